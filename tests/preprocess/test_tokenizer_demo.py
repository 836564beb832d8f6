"""The demo model's tokenizer against Gemma 3's own, and the join and marker rules on the full vocabulary."""

import json
import random
from pathlib import Path

import pytest

from tests.preprocess.test_clean_cut import random_join
from tests.support.reference_ids import load_reference
from tests.support.texts import varied_texts
from workers.preprocess.tokenizer import ContentTokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_snapshot: Path) -> ContentTokenizer:
    return ContentTokenizer.load(demo_snapshot)


@pytest.fixture(scope="module")
def vocab(demo_snapshot: Path) -> dict[str, int]:
    content = json.loads((demo_snapshot / "tokenizer.json").read_text(encoding="utf-8"))
    pieces: dict[str, int] = content["model"]["vocab"]
    return pieces


def test_it_equals_the_reference_on_2000_varied_texts(tokenizer: ContentTokenizer) -> None:
    recorded = load_reference()
    assert len(recorded) == 2000
    wrong = [text for text, ids in recorded if tokenizer.encode(text) != ids]
    assert not wrong, (len(wrong), wrong[:3])


def test_the_recorded_texts_are_varied() -> None:
    ids = {index for _, ids in load_reference() for index in ids}
    text = "".join(text for text, _ in load_reference())
    assert len(ids) > 8_000
    assert len(set(text)) > 2_500
    for kind in ("\u200d", "\ufe0f", "\x00", "\n" * 35, " " * 40, "\t\t\t", "<table>", "\r\n", "▁▁", "\u0301", "退款"):
        assert kind in text, kind


@pytest.mark.parametrize("word", [" yes", " no", " billing", " cancellation", " Yes", " refund", " shipping"])
def test_common_options_are_one_token(tokenizer: ContentTokenizer, word: str) -> None:
    assert len(tokenizer.encode(word)) == 1


def test_runs_are_split_greedily_from_the_left(tokenizer: ContentTokenizer, vocab: dict[str, int]) -> None:
    for character, piece in ((" ", "▁"), ("\n", "\n"), ("\t", "\t"), ("▁", "▁")):
        assert tokenizer.encode(character * 75) == [vocab[piece * 31], vocab[piece * 31], vocab[piece * 13]]


def test_the_join_is_the_whole_string(tokenizer: ContentTokenizer) -> None:
    rng = random.Random(21)
    merged = 0
    for _ in range(5000):
        content, template = random_join(rng)
        cut = tokenizer.clean_cut(content)
        assert cut is not None
        whole = tokenizer.encode(content + template)
        joined = tokenizer.encode(content[:cut]) + tokenizer.encode(content[cut:] + template)
        assert joined == whole, (content, cut, template)
        merged += tokenizer.encode(content) + tokenizer.encode(template) != whole
    assert merged > 500  # joins where gluing the two token lists would have been wrong


def test_a_clean_cut_is_near_the_end_of_a_sentence(tokenizer: ContentTokenizer) -> None:
    distances = []
    for text in varied_texts(22, 1000):
        cut = tokenizer.clean_cut(text)
        assert cut is not None
        distances.append(len(text) - cut)
    assert sorted(distances)[len(distances) // 2] <= 13


def test_no_marker_comes_out_of_any_text(tokenizer: ContentTokenizer, vocab: dict[str, int]) -> None:
    markers = [piece for piece, index in vocab.items() if index in tokenizer.special_ids]
    assert len(markers) == 6252  # 6,242 <unusedN>, <mask>, [multimodal] and the eight flagged special
    bytes_of = {vocab[f"<0x{byte:02X}>"] for byte in range(256)}
    for marker in markers:
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(f"a{marker}\n{marker}")), marker
    assert bytes_of.isdisjoint(tokenizer.encode("".join(f"<0x{byte:02X}> " for byte in range(256))))
    rng = random.Random(23)
    for text in varied_texts(24, 1000):
        where = rng.randint(0, len(text))
        hostile = text[:where] + rng.choice(markers) + text[where:]
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(hostile)), hostile


def test_markup_stays_one_token(tokenizer: ContentTokenizer, vocab: dict[str, int]) -> None:
    for tag in ("<table>", "</table>", "<h1>", "<b>", "</code>", "<img>", "<bbox>"):
        assert vocab[tag] in tokenizer.encode(f"one{tag}two")


def test_facts(tokenizer: ContentTokenizer) -> None:
    assert tokenizer.bos_id == 2
    assert tokenizer.vocab_size == 262_144
    assert tokenizer.max_token_bytes == 93  # 31 ▁ of three bytes
