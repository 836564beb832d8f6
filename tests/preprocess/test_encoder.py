"""The encoder's memory for short strings: the same answers, asked once, and never too many kept."""

import pytest

from workers.preprocess import encoder as encoder_module
from workers.preprocess.encoder import Encoder


class Counting:
    """Encodes each character by its code point and cuts after the last space; counts its calls."""

    bos_id = 1
    max_token_bytes = 4

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.cut: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return [ord(char) for char in text]

    def clean_cut(self, text: str) -> int | None:
        self.cut.append(text)
        return text.rfind(" ") + 1 or None

    def clean_start(self, text: str) -> int | None:
        return None


def test_short_strings_are_encoded_and_cut_once() -> None:
    tokenizer = Counting()
    encoder = Encoder(tokenizer)
    for _ in range(3):
        assert encoder.encode("a b") == (97, 32, 98)
        assert encoder.clean_tail("is it") == "it"
        assert encoder.clean_tail("whole") == "whole"
    assert tokenizer.encoded == ["a b"]
    assert tokenizer.cut == ["is it", "whole"]


def test_long_strings_are_not_kept() -> None:
    tokenizer = Counting()
    encoder = Encoder(tokenizer)
    long = "x" * 513
    for _ in range(2):
        encoder.encode(long)
        encoder.clean_tail(long)
    assert (len(tokenizer.encoded), len(tokenizer.cut)) == (2, 2)


def test_the_memory_is_emptied_before_it_grows_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "_MAX_KEPT", 100)
    tokenizer = Counting()
    encoder = Encoder(tokenizer)
    for i in range(60):
        encoder.encode(f"{i:010d}")
        assert encoder.clean_tail(f"{i:09d} ") == ""
        assert sum(map(len, encoder._tokens)) + sum(map(len, encoder._tails)) <= 100
    assert encoder.encode("0000000000") == tuple(map(ord, "0000000000"))
    assert len(tokenizer.encoded) == 61
