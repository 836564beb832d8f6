"""Where a content may be cut, against the tokenization of the whole string and against the rule read literally."""

import random
from pathlib import Path

import pytest

from tests.support.texts import varied_text, varied_texts
from tests.support.tiny import tiny_pieces
from workers.preprocess.clean_cut import WINDOW, AdjacentPairs
from workers.preprocess.tokenizer import ContentTokenizer

TEMPLATES = [
    "\n\nIs this about billing?\nAnswer:",
    "\n",
    " ",
    "s",
    "ing",
    "ation:",
    "\u200d",
    "\ufe0f",
    "▁",
    "</b>",
    ">",
    "",
]
TEMPLATES += ["\U0001f3fd", "\t\tx", "'s", "00", ".", "?!", "\u0301", "_of_turn>", "\r\n", "\x00", "款", "\u2764\ufe0f"]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> ContentTokenizer:
    return ContentTokenizer.load(tiny_checkpoint)


def random_join(rng: random.Random) -> tuple[str, str]:
    """A content and what follows it: a template, a random text, or the rest of a text torn apart anywhere."""
    content = varied_text(rng, rng.randint(1, 6))
    if rng.random() < 0.4:
        torn = rng.randint(0, len(content))
        return content[:torn], content[torn:] + rng.choice(TEMPLATES)
    return content, rng.choice([rng.choice(TEMPLATES), varied_text(rng, 2)])


def test_the_join_is_the_whole_string(tokenizer: ContentTokenizer) -> None:
    rng = random.Random(11)
    for _ in range(5000):
        content, template = random_join(rng)
        cut = tokenizer.clean_cut(content)
        assert cut is not None
        joined = tokenizer.encode(content[:cut]) + tokenizer.encode(content[cut:] + template)
        assert joined == tokenizer.encode(content + template), (content, cut, template)


def test_a_clean_start_is_clean_between_any_two_texts(tokenizer: ContentTokenizer) -> None:
    rng = random.Random(12)
    for _ in range(2000):
        before, template = random_join(rng)
        after = varied_text(rng, 1)
        cut = tokenizer.clean_start(template)
        if cut is not None:
            assert 0 < cut < len(template)
            joined = tokenizer.encode(before + template[:cut]) + tokenizer.encode(template[cut:] + after)
            assert joined == tokenizer.encode(before + template + after), (before, template, cut, after)


def literal_rule(pieces: list[str], text: str) -> int | None:
    """The rule in its own words, without any speed: the last a|b that no piece holds side by side."""
    read = text.replace(" ", "▁")
    if not read or not any(read[-1] in piece[:-1] for piece in pieces):
        return len(text)
    for cut in range(len(read) - 1, max(0, len(read) - WINDOW) - 1, -1):
        if cut == 0 or not any(read[cut - 1 : cut + 1] in piece for piece in pieces):
            return cut
    return None


def literal_start(pieces: list[str], text: str) -> int | None:
    read = text.replace(" ", "▁")
    inside = range(1, min(len(read), WINDOW))
    return next((p for p in inside if not any(read[p - 1 : p + 1] in piece for piece in pieces)), None)


def test_it_is_the_rule_read_literally(tokenizer: ContentTokenizer) -> None:
    hidden = tokenizer.special_ids
    pieces = [piece for index, piece in enumerate(tiny_pieces()[0]) if index not in hidden and piece[:3] != "<0x"]
    for text in [*varied_texts(13, 400), "aaaa", "ing ing", "yes<unused1", "<start_of", "\x00", "a\x00", "\ud800"]:
        assert tokenizer.clean_cut(text) == literal_rule(pieces, text), text
        assert tokenizer.clean_start(text) == literal_start(pieces, text), text


def test_it_stands_near_the_end_of_ordinary_text(tokenizer: ContentTokenizer) -> None:
    text = "I was charged twice for September, please refund one of the charges."
    cut = tokenizer.clean_cut(text)
    assert cut is not None
    assert len(text) - 13 <= cut < len(text)


def test_it_looks_at_the_last_256_characters_only() -> None:
    rule = AdjacentPairs(["aa", "ab"])
    assert rule.last_clean("") == 0
    assert rule.last_clean("a" * 256) == 0
    assert rule.last_clean("a" * 257) is None
    assert rule.last_clean("ba" + "a" * 255) == 1
    assert rule.last_clean("ba" + "a" * 256) is None
    assert rule.last_clean("a" * 300 + "b") == 301  # nothing continues a b
    assert rule.last_clean("a" * 300 + "cca") == 302


def test_characters_are_whole_code_points() -> None:
    rule = AdjacentPairs(["\U0001f469\u200d", "▁a"])
    assert rule.last_clean("x\U0001f469") == 1
    assert rule.last_clean("x\U0001f469\u200d") == 3
    assert rule.last_clean("x ") == 1  # a space is read as ▁
    assert rule.last_clean("x▁") == 1
    assert AdjacentPairs(["<a b>", "bb", "a "]).last_clean("xa") == 1  # so are the spaces of added tokens
    assert AdjacentPairs(["<a b>"]).last_clean("ca ") == 1


def test_a_vocabulary_without_pairs_cuts_anywhere() -> None:
    assert AdjacentPairs(["a", "b"]).last_clean("abab") == 4
    assert AdjacentPairs([]).last_clean("ab") == 2
