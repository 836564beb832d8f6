"""Corpus files: what is a text, and that nothing unreadable is passed over."""

import json
import re
from pathlib import Path

import pytest

from spinf_serve.corpus import read_corpus
from spinf_serve.refusal import StartRefused


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_lines_and_files_in_their_order(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", '"one"\n{"text": "two", "id": 7}\r\n\n  \n{"text": ""}\n"four\\u2028five"')
    plain = write(tmp_path / "b.txt", "\ufeffa whole\nfile, lines and all\n")
    corpus = read_corpus([plain, lines])
    assert corpus.texts == ["a whole\nfile, lines and all\n", "one", "two", "four\u2028five"]
    assert [(entry["name"], entry["texts"]) for entry in corpus.files] == [("b.txt", 1), ("a.jsonl", 3)]
    assert read_corpus([lines]).texts == corpus.texts[1:]


def test_separators_that_json_allows_do_not_end_a_line(tmp_path: Path) -> None:
    text = "first\u2028second\u2029third\x85fourth"
    path = write(tmp_path / "a.jsonl", json.dumps(text, ensure_ascii=False) + "\n")
    assert read_corpus([path]).texts == [text]


def test_the_key_of_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"body": "this", "text": "not this"}')
    assert read_corpus([path], "body").texts == ["this"]


def test_the_digest_is_of_contents_and_order(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", '"one"'), write(tmp_path / "b.jsonl", '"two"')
    same = write(tmp_path / "renamed.jsonl", '"one"')
    digest = read_corpus([a, b]).digest
    assert digest == read_corpus([same, b]).digest
    assert digest != read_corpus([b, a]).digest
    assert digest != read_corpus([a]).digest


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", '"good"\n{"text": ', "a.jsonl:2: not JSON"),
        ("a.jsonl", '"good"\n\n{"other": "x"}', "a.jsonl:3: neither"),
        ("a.jsonl", "7", "a.jsonl:1: neither"),
        ("a.jsonl", '{"text": 7}', "a.jsonl:1: neither"),
        ("a.jsonl", '["x"]', "a.jsonl:1: neither"),
        ("a.jsonl", '"\\ud800"', "a.jsonl:1: the text holds half a surrogate"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: not JSON"),
        ("a.jsonl", b'"\xff"', "a.jsonl: not UTF-8"),
        ("a.txt", b"\xff", "a.txt: not UTF-8"),
        ("a.csv", "text", "a.csv: a corpus file ends in"),
        ("a.jsonl", "", "holds no text"),
        ("a.jsonl", '""\n', "holds no text"),
        ("a.txt", "", "holds no text"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, content: str | bytes, where: str) -> None:
    with pytest.raises(StartRefused, match=re.escape(where)):
        read_corpus([write(tmp_path / name, content)])


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="No such file"):
        read_corpus([tmp_path / "absent.jsonl"])
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(StartRefused, match="directory"):
        read_corpus([tmp_path / "folder.txt"])
