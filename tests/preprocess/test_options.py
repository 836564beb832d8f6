"""Reading an option: case variants, who owns a token sequence, and which variants keep the boundary."""

import pytest

from tests.support.requests import answer, body, preprocessor, query, refusal
from workers.preprocess.encoder import Encoder
from workers.preprocess.option_touch import OptionTouch
from workers.preprocess.options import OptionList, case_forms
from workers.preprocess.preprocessor import Preprocessor
from workers.preprocess.tokenizer import ContentTokenizer


class Letters:
    """A tokenizer of listed pieces, the longest first; every other character is a token of its own."""

    bos_id: int | None = 0
    max_token_bytes = 8

    def __init__(self, *pieces: str) -> None:
        self.pieces = sorted(pieces, key=len, reverse=True)

    def encode(self, text: str) -> list[int]:
        tokens = []
        while text:
            piece = next((p for p in self.pieces if text.startswith(p)), text[0])
            tokens.append(1_000_000 + self.pieces.index(piece) if len(piece) > 1 else ord(piece))
            text = text[len(piece) :]
        return tokens

    def clean_cut(self, text: str) -> int | None:
        return 0

    def clean_start(self, text: str) -> int | None:
        return None


def spelled(tokenizer: Letters, sequences: tuple[tuple[tuple[int, ...], ...], ...]) -> list[list[str]]:
    """Readings as strings."""

    def text(sequence: tuple[int, ...]) -> str:
        return "".join(tokenizer.pieces[t - 1_000_000] if t >= 1_000_000 else chr(t) for t in sequence)

    return [[text(sequence) for sequence in owned] for owned in sequences]


def read(tokenizer: Letters, options: list[str], template: str = "", insensitive: bool = True) -> list[list[str]]:
    encoded = OptionList.encode(tuple(options), insensitive, Encoder(tokenizer))
    return spelled(tokenizer, encoded.reading(encoded.merging(template)).sequences)


@pytest.mark.parametrize(
    ("option", "forms"),
    [
        (" yes", ("yes", " yes", "Yes", " Yes", "YES", " YES")),
        ("iPhone 5", ("iphone 5", " iphone 5", "Iphone 5", " Iphone 5", "IPHONE 5", " IPHONE 5")),
        ("\tß ", ("ß", " ß", "SS", " SS")),
        ("ǆ", ("ǆ", " ǆ", "Ǆ", " Ǆ")),
        ("  ", ("", " ")),
        ("5", ("5", " 5")),
    ],
)
def test_the_formula_of_case_variants(option: str, forms: tuple[str, ...]) -> None:
    assert case_forms(option) == forms


YES = [f"{space}{word}" for space in ("", " ") for word in ("yes", "Yes", "YES", "no", "No")]


def test_variants_are_one_token_and_the_given_string_always_counts() -> None:
    assert read(Letters(*YES), [" yes", " no", " oh no"]) == [
        [" yes", "yes", "Yes", " Yes", "YES", " YES"],
        [" no", "no", "No", " No"],
        [" oh no"],
    ]
    assert read(Letters("Yes"), [" yes"]) == [[" yes", "Yes"]]
    assert read(Letters(*YES), [" yes", "no"], insensitive=False) == [[" yes"], ["no"]]


def test_variants_must_keep_the_boundary() -> None:
    tokenizer = Letters(*YES, ":yes", "r:")
    assert read(tokenizer, [" yes"], "Answer:") == [[" yes", "yes", "Yes", " Yes", "YES", " YES"]]
    assert read(tokenizer, [" yes"], "Why:") == [[" yes", "Yes", " Yes", "YES", " YES"]]


def test_the_first_option_that_has_a_sequence_keeps_it() -> None:
    """Upper case of dotless ı is I: both options reach it, and neither repeats the other for casefold()."""
    assert "ı".casefold() != "I".casefold()
    assert read(Letters(" I"), ["ı", "I"]) == [["ı", "I", " I"], ["i"]]
    assert read(Letters(" I"), ["I", "ı"]) == [["I", "i", " I"], ["ı"]]


def test_all_space_options() -> None:
    assert read(Letters("  "), ["  ", "a"]) == [["  ", " "], ["a", "A"]]


def test_an_option_left_without_any_spelling_is_a_duplicate(prep: Preprocessor, tokenizer: ContentTokenizer) -> None:
    """The tokenizer writes a space as ▁: these two strings are the same tokens."""
    assert tokenizer.encode(" yes") == tokenizer.encode("▁yes")
    scoring = {"queries": [query(options=[" yes", " no", "▁yes"])], "case_insensitive": False}
    assert refusal(prep, body(scoring=scoring)) == ("duplicate_option", "scoring.queries.0.options.2")


def test_the_case_rule_changes_what_is_summed(prep: Preprocessor) -> None:
    both = [
        answer(prep, body(scoring={"queries": [query()], "case_insensitive": rule}))["results"][0]["queries"][0]
        for rule in (True, False)
    ]
    wide, narrow = (question["combinations"][0]["options"] for question in both)
    assert all(w["logprob"] > n["logprob"] for w, n in zip(wide, narrow, strict=True))


def test_one_list_is_encoded_once() -> None:
    options = OptionList.encode((" yes",), True, Encoder(Letters(*YES, ":yes")))
    merging = options.merging("a:")
    assert merging == frozenset({"yes"})
    assert options.merging("a:") is merging
    assert options.reading(merging) is options.reading(frozenset({"yes"}))
    assert options.reading(frozenset()) is not options.reading(merging)


def test_the_join_warning_tries_a_bounded_number_of_strings() -> None:
    encoder = Encoder(Letters("bc"))
    options = OptionList.encode(("c", "d"), False, encoder)
    for tail, left, reaches in [("ab", 9, True), ("ac", 9, False), ("ac", 1, True), ("", 0, False)]:
        touch = OptionTouch(encoder, left)
        assert touch.merges(tail, options) == reaches
        assert touch.merges(tail, options) == reaches


@pytest.mark.parametrize(
    ("content", "options", "told"), [("a", ["c", "d"], True), ("x", ["c"], False), ("a", ["d"], False)]
)
def test_a_content_that_reaches_through_a_short_template(content: str, options: list[str], told: bool) -> None:
    """b and c are apart, but a, b and c are one token: the option keeps its own token, and the caller is told."""
    prep = preprocessor(Letters("abc"))
    got = answer(prep, body(query("b{?}", options), content=content))
    assert ("join_not_merged" in [w["code"] for w in got["warnings"]]) == told


def test_the_encoder_keeps_a_bounded_number_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.preprocess.encoder._MAX_KEPT", 100)
    asked: list[str] = []

    class Counting(Letters):
        def encode(self, text: str) -> list[int]:
            asked.append(text)
            return super().encode(text)

    encoder = Encoder(Counting())
    for text in ("a" * 60, "a" * 60, "b" * 60, "b" * 60, "a" * 60, "", "c" * 9999, "c" * 9999):
        assert encoder.encode(text) == tuple(map(ord, text))
    assert [text[:1] for text in asked] == ["a", "b", "a", "c", "c"]
