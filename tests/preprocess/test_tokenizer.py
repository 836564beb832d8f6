"""ContentTokenizer on the tiny vocabulary: what text becomes, and what it never becomes."""

import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.texts import varied_texts
from tests.support.tiny import tiny_pieces
from workers.preprocess.tokenizer import ContentTokenizer

MARKERS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", "<unused0>", "<unused9>", "<start_of_turn>"]
MARKERS += ["<end_of_turn>", "<start_of_image>", "<end_of_image>"]
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> ContentTokenizer:
    return ContentTokenizer.load(tiny_checkpoint)


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Path) -> Tokenizer:
    """The library's own reading of the file, control tokens and all."""
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


@pytest.fixture
def edited(tiny_checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny tokenizer after edits of its files: edited(tokenizer=f, config=g, tokenizer_config=h)."""

    def copy(**edits: Edit) -> Path:
        for name in ("tokenizer", "config", "tokenizer_config"):
            content = json.loads((tiny_checkpoint / f"{name}.json").read_text(encoding="utf-8"))
            if name in edits:
                edits[name](content)
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return copy


def pieces_of(tokenizer: ContentTokenizer, text: str) -> list[str]:
    return [tiny_pieces()[0][index] for index in tokenizer.encode(text)]


def spelled(pieces: list[str]) -> str:
    """The text that the pieces stand for, bytes put together again."""
    raw = b"".join(
        bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") and len(piece) == 6 else piece.encode()
        for piece in pieces
    )
    return raw.decode()


def test_ordinary_text_is_read_as_the_model_reads_it(tokenizer: ContentTokenizer, plain: Tokenizer) -> None:
    texts = varied_texts(1, 1500)
    assert tokenizer.encode_batch(texts) == [plain.encode(text, add_special_tokens=False).ids for text in texts]


def test_no_text_is_lost_or_changed(tokenizer: ContentTokenizer) -> None:
    for text in varied_texts(2, 1000):
        assert spelled(pieces_of(tokenizer, text)) == text.replace(" ", "▁")


@pytest.mark.parametrize(
    "text", ["", " ", "\x00", "\x00a\x00", " a ", "\n", "e\u0301", "\u00e9", "\ufeffa", "\u2126", "A\u030a"]
)
def test_nothing_is_normalised_or_stripped(tokenizer: ContentTokenizer, text: str) -> None:
    assert spelled(pieces_of(tokenizer, text)) == text.replace(" ", "▁")


def test_markers_are_ordinary_characters(tokenizer: ContentTokenizer) -> None:
    assert tokenizer.special_ids == {tiny_pieces()[0].index(piece) for piece in tiny_pieces()[0] if is_marker(piece)}
    for marker in MARKERS:
        assert spelled(pieces_of(tokenizer, marker)) == marker
        assert len(tokenizer.encode(marker)) > 1


def is_marker(piece: str) -> bool:
    return piece in MARKERS or piece.startswith("<unused")


def test_markers_in_any_surroundings_never_yield_a_special_id(tokenizer: ContentTokenizer) -> None:
    rng = random.Random(3)
    fragments = [*MARKERS, *(f"<unused{i}>" for i in range(12)), "<", ">", "<<", "\n", "  ", "▁", "<b>", "</", "<0x0A>"]
    fragments += varied_texts(4, 40, 2)
    for _ in range(3000):
        text = "".join(rng.choice(fragments) for _ in range(rng.randint(1, 9)))
        pieces = pieces_of(tokenizer, text)
        assert not tokenizer.special_ids.intersection(tokenizer.encode(text)), text
        assert spelled(pieces) == text.replace(" ", "▁"), text


def test_byte_pieces_are_never_typed(tokenizer: ContentTokenizer) -> None:
    assert "<0x0A>" not in pieces_of(tokenizer, "<0x0A>")
    assert pieces_of(tokenizer, "\u2603") == ["<0xE2>", "<0x98>", "<0x83>"]


@pytest.mark.parametrize("piece", ["\n", "\n\n\n", "\t\t", "   ", "▁▁", "<b>", "</table>", "<code>"])
def test_runs_and_markup_stay_the_models_own_tokens(tokenizer: ContentTokenizer, piece: str) -> None:
    assert pieces_of(tokenizer, piece) == [piece.replace(" ", "▁")]
    assert piece.replace(" ", "▁") in pieces_of(tokenizer, f"one{piece}two")


def test_the_start_token_is_known_and_never_added(tokenizer: ContentTokenizer) -> None:
    assert tokenizer.bos_id == 2
    assert tokenizer.encode("") == []
    assert tokenizer.vocab_size == len(tiny_pieces()[0])


def test_no_token_is_longer_than_the_bound(tokenizer: ContentTokenizer) -> None:
    for text in [*varied_texts(5, 500), " " * 99, "▁" * 99, "\n" * 99, "</table>" * 9]:
        assert len(text.encode()) <= len(tokenizer.encode(text)) * tokenizer.max_token_bytes


def test_a_lone_surrogate_is_a_value_error(tokenizer: ContentTokenizer) -> None:
    for text in ("\ud800", "a\udfffb"):
        with pytest.raises(ValueError, match="lone surrogate"):
            tokenizer.encode(text)
        assert tokenizer.clean_cut(text) is not None


def test_threads_may_share_it(tokenizer: ContentTokenizer) -> None:
    texts = varied_texts(6, 400)
    expected = tokenizer.encode_batch(texts)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts * 3)) == expected * 3


def test_long_texts_take_linear_time(tokenizer: ContentTokenizer) -> None:
    # A quadratic merge loop would need minutes for these 400,000 characters without a space.
    for text in ("a" * 400_000, "\n" * 400_000, "▁yes" * 100_000, "\U000e0100" * 100_000):
        assert tokenizer.encode(text)


def set_truncation(content: dict[str, Any]) -> None:
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip
    content["model"]["dropout"] = 0.5


def test_stored_truncation_padding_and_dropout_are_ignored(
    edited: Callable[..., Path], tokenizer: ContentTokenizer
) -> None:
    changed = ContentTokenizer.load(edited(tokenizer=set_truncation))
    texts = varied_texts(7, 100)
    assert changed.encode_batch(texts) == tokenizer.encode_batch(texts)


def add_ways_to_markers(content: dict[str, Any]) -> None:
    """Merges that spell three markers and a byte piece out of ordinary characters."""
    vocab: dict[str, int] = content["model"]["vocab"]
    for marker in ("<mask>", "<unused1>", "<eos>", "<0x0A>"):
        for end in range(2, len(marker) + 1):
            if marker[:end] not in vocab:
                vocab[marker[:end]] = len(vocab)
            content["model"]["merges"].insert(0, [marker[: end - 1], marker[end - 1]])


def test_merges_never_spell_a_marker(edited: Callable[..., Path]) -> None:
    snapshot = edited(tokenizer=add_ways_to_markers, config=lambda config: config.update(vocab_size=2000))
    changed = ContentTokenizer.load(snapshot)
    vocab = Tokenizer.from_file(str(snapshot / "tokenizer.json")).get_vocab()
    hidden = {vocab[piece] for piece in ("<mask>", "<unused1>", "<eos>", "<0x0A>")}
    for text in ("<mask>", "a<mask>b", "<unused1>", "<eos>", "<0x0A>", "<<eos>>", "<mask><mask>", "\n<0x0A>"):
        assert not hidden.intersection(changed.encode(text)), text
    assert changed.encode("<mas") == [vocab["<mas"]]  # the rest of the merges stays


def test_markers_of_the_config_are_hidden(edited: Callable[..., Path], tokenizer: ContentTokenizer) -> None:
    pieces = list(tiny_pieces()[0])
    tags = {name: pieces.index(name) for name in ("<b>", "<i>", "<ul>", "<li>", "<tr>", "<td>")}
    snapshot = edited(
        tokenizer_config=lambda config: config.update(
            image_token={"content": "<b>", "special": True},
            extra_special_tokens={"audio_token": "<i>"},
            added_tokens_decoder={str(tags["<tr>"]): {"content": "<tr>", "special": True}},
        ),
        config=lambda config: config.update(
            audio_token_id=tags["<ul>"], eos_token_id=[1, tags["<li>"]], vision={"video_token_index": tags["<td>"]}
        ),
    )
    changed = ContentTokenizer.load(snapshot)
    assert changed.special_ids == tokenizer.special_ids | set(tags.values())
    for tag, index in tags.items():
        assert tokenizer.encode(tag) == [index]
        assert index not in changed.encode(f"x{tag}y")


def test_a_config_never_hides_a_character(edited: Callable[..., Path], tokenizer: ContentTokenizer) -> None:
    changed = ContentTokenizer.load(edited(tokenizer_config=lambda config: config.update(pad_token="!")))
    assert changed.encode("!") == tokenizer.encode("!")
    assert changed.special_ids == tokenizer.special_ids


def make_special(piece: str) -> Edit:
    def change(content: dict[str, Any]) -> None:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        content["added_tokens"].append({"id": content["model"]["vocab"][piece], "content": piece, **flags})

    return change


def test_a_special_token_of_one_character_is_refused(edited: Callable[..., Path]) -> None:
    # The character would have no encoding left that is not the control token.
    with pytest.raises(ValueError, match="control token '!'"):
        ContentTokenizer.load(edited(tokenizer=make_special("!")))


def test_a_post_processor_wins_over_add_bos_token(edited: Callable[..., Path]) -> None:
    snapshot = edited(tokenizer_config=lambda content: content.update(add_bos_token=False))
    assert ContentTokenizer.load(snapshot).bos_id == 2


def drop_template(content: dict[str, Any]) -> None:
    content["post_processor"] = None


@pytest.mark.parametrize(
    ("config", "bos_id"),
    [
        ({"add_bos_token": True}, 2),
        ({"add_bos_token": True, "bos_token": {"content": "<bos>"}}, 2),
        ({"add_bos_token": False}, None),
        ({"add_bos_token": None}, None),
    ],
)
def test_the_start_token_without_a_post_processor(
    edited: Callable[..., Path], config: dict[str, Any], bos_id: int | None
) -> None:
    snapshot = edited(tokenizer=drop_template, tokenizer_config=lambda content: content.update(config))
    assert ContentTokenizer.load(snapshot).bos_id == bos_id


def pass_through(content: dict[str, Any]) -> None:
    """The template of the first published Gemma 4 tokenizers: the text alone."""
    content["post_processor"] |= {"single": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}}
    content["post_processor"]["pair"] = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}, {"bos_token": {"content": "<bos>"}}], ids=str)
@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified", "gemma4_text", "gemma4_unified_text"])
@pytest.mark.parametrize("template", [drop_template, pass_through], ids=lambda f: f.__name__)
def test_gemma_4_never_reads_a_text_without_its_start(
    edited: Callable[..., Path], template: Edit, model_type: str, config: dict[str, Any]
) -> None:
    def forget(content: dict[str, Any]) -> None:
        for key in ("add_bos_token", "bos_token"):
            content.pop(key, None)
        content.update(config)

    snapshot = edited(
        tokenizer=template, tokenizer_config=forget, config=lambda content: content.update(model_type=model_type)
    )
    assert ContentTokenizer.load(snapshot).bos_id == 2
    assert ContentTokenizer.load(edited(tokenizer=template, tokenizer_config=forget)).bos_id is None, "Gemma 3"


def test_turn_and_media_markers_of_gemma_4_stay_text(edited: Callable[..., Path]) -> None:
    """They are written otherwise than Gemma 3's; flagged special in tokenizer.json, or named by the configs alone."""
    markers = ["<|turn>", "<turn|>", '<|"|>', "<|image|>", "<|audio>", "<|think|>"]

    def add(content: dict[str, Any]) -> None:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        first = max(entry["id"] for entry in content["added_tokens"]) + 1
        first = max(first, len(content["model"]["vocab"]))
        for number, marker in enumerate(markers):
            special = marker != "<|image|>"
            content["added_tokens"].append({"id": first + number, "content": marker, "special": special, **flags})

    snapshot = edited(
        tokenizer=add,
        tokenizer_config=lambda content: content.update(image_token="<|image|>"),
        config=lambda content: content.update(model_type="gemma4", vocab_size=content["vocab_size"] + len(markers)),
    )
    tokenizer = ContentTokenizer.load(snapshot)
    for marker in markers:
        ids = tokenizer.encode(f"a {marker} b")
        assert not tokenizer.special_ids & set(ids)
        assert max(ids) < tokenizer.vocab_size - len(markers)


def test_added_tokens_outside_the_model_are_hidden(edited: Callable[..., Path]) -> None:
    rows = len(tiny_pieces()[0])

    def add(content: dict[str, Any]) -> None:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        content["added_tokens"].append({"id": rows, "content": "<video>", **flags})

    changed = ContentTokenizer.load(edited(tokenizer=add))
    assert rows in changed.special_ids
    assert max(changed.encode("a <video> b")) < rows


def set_flag(name: str) -> Edit:
    def change(content: dict[str, Any]) -> None:
        next(token for token in content["added_tokens"] if token["content"] == "<b>")[name] = True

    return change


def set_model(**values: Any) -> Edit:
    return lambda content: content["model"].update(values)


def lose_byte(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["<0xAA "] = vocab.pop("<0xAA>")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_model(byte_fallback=False), "byte_fallback"),
        (set_model(ignore_merges=True), "ignore_merges"),
        (set_model(end_of_word_suffix="</w>"), "end_of_word_suffix"),
        (lose_byte, "byte pieces"),
        (lambda content: content["model"]["vocab"].update({"<0xE2><0x98>": 5000}), "several bytes"),
        (lambda content: content.update(normalizer={"type": "NFC"}), "normalizer"),
        (lambda content: content.update(normalizer=None), "normalizer"),
        (lambda content: content.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer"),
        (set_flag("lstrip"), "depends on the text around it"),
        (set_flag("single_word"), "depends on the text around it"),
        (lambda content: content.pop("model"), "tokenizer.json"),
    ],
)
def test_tokenizers_that_would_break_the_promises_are_refused(
    edited: Callable[..., Path], edit: Edit, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ContentTokenizer.load(edited(tokenizer=edit))


def test_damaged_files_are_named(edited: Callable[..., Path], tmp_path: Path) -> None:
    snapshot = edited()
    (snapshot / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not valid JSON"):
        ContentTokenizer.load(snapshot)
    (snapshot / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="expected a JSON object"):
        ContentTokenizer.load(snapshot)
    (snapshot / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        ContentTokenizer.load(snapshot)


def empty_template(content: dict[str, Any]) -> None:
    content["post_processor"]["special_tokens"] = {}


def lose_piece(content: dict[str, Any]) -> None:
    """A line break, which merges still name."""
    del content["model"]["vocab"]["\n"]


def lose_start(content: dict[str, Any]) -> None:
    drop_template(content)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<bos>"]
    content["model"]["vocab"]["<start>"] = content["model"]["vocab"].pop("<bos>")


def late_start(content: dict[str, Any]) -> None:
    """A start token that the model has no row for."""
    drop_template(content)
    next(token for token in content["added_tokens"] if token["content"] == "<bos>")["id"] = 5000
    content["model"]["vocab"]["<bos>"] = 5000


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"tokenizer": empty_template}, r"tokenizer\.json: the tokenizers library cannot run it: no entry"),
        (
            {"tokenizer": set_model(continuing_subword_prefix="<bos>")},
            r"tokenizer\.json: the tokenizers library cannot",
        ),
        ({"tokenizer": lose_start}, r"tokenizer\.json: no piece '<bos>', with which every text begins"),
        ({"tokenizer": drop_template, "bos_token": "<nope>"}, r"tokenizer\.json: no piece '<nope>', with which"),
        ({"tokenizer": drop_template, "bos_token": 5}, r"tokenizer_config\.json: bos_token is no piece: 5"),
        ({"tokenizer": drop_template, "bos_token": {"content": [1]}}, r"bos_token is no piece: \[1\]"),
        ({"added_tokens_decoder": ["<bos>"]}, r"tokenizer_config\.json: added_tokens_decoder is not an object"),
        ({"added_tokens_decoder": 1.5}, r"tokenizer_config\.json: added_tokens_decoder is not an object"),
    ],
)
def test_files_that_contradict_each_other_are_refused_in_one_line(
    edited: Callable[..., Path], edits: dict[str, Any], message: str
) -> None:
    changes = {key: value for key, value in edits.items() if key != "tokenizer"}
    edit = edits.get("tokenizer", lambda content: None)
    snapshot = edited(tokenizer=edit, tokenizer_config=lambda content: content.update(changes))
    with pytest.raises(ValueError, match=message) as refused:
        ContentTokenizer.load(snapshot)
    assert "\n" not in str(refused.value)


def test_a_start_token_beyond_the_model_is_refused(edited: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: texts begin with id 5000, beyond the [0-9]+ rows"):
        ContentTokenizer.load(edited(tokenizer=late_start))


def test_what_the_library_says_over_several_lines_is_one(edited: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: ") as refused:
        ContentTokenizer.load(edited(tokenizer=lose_piece))
    assert "\n" not in str(refused.value)


def test_a_vocabulary_larger_than_the_model_is_refused(edited: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="beyond the 700 rows"):
        ContentTokenizer.load(edited(config=lambda config: config.update(vocab_size=700)))


def test_the_text_part_of_a_config_says_how_many_rows_there_are(edited: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="beyond the 700 rows"):
        ContentTokenizer.load(edited(config=lambda config: config.update(text_config={"vocab_size": 700})))


@pytest.mark.parametrize("change", [{"vocab_size": "800"}, {"vocab_size": [1]}, {"vocab_size": None, "text_config": 3}])
def test_a_vocabulary_of_no_size_is_left_to_the_engine(edited: Callable[..., Path], change: dict[str, Any]) -> None:
    ContentTokenizer.load(edited(config=lambda config: config.update(change)))


def test_it_needs_only_the_tokenizer_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoint / "tokenizer.json", tmp_path)
    assert ContentTokenizer.load(tmp_path).bos_id == 2
