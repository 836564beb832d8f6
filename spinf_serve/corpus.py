"""Texts to calibrate with, read from JSONL and plain text files, and what they were."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spinf_serve.jsonfile import parse
from spinf_serve.refusal import StartRefused

_JSONL = (".jsonl", ".ndjson")
_PLAIN = (".txt", ".md")


@dataclass(frozen=True, slots=True)
class Corpus:
    """`texts` in the order of the files and their lines; `files` = {name, sha256, texts} of each, for the record."""

    texts: list[str]
    files: list[dict[str, Any]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """sha256 over the contents of the files, in order."""
        return hashlib.sha256("\n".join(entry["sha256"] for entry in self.files).encode()).hexdigest()


def read_corpus(paths: Iterable[Path], text_field: str = "text") -> Corpus:
    """A JSONL line is a string, or an object whose `text_field` is one; a plain text file is one text.

    Empty texts are left out. Raises `StartRefused` naming file and line for anything else, and where no text is found.
    """
    texts: list[str] = []
    files: list[dict[str, Any]] = []
    for path in paths:
        raw = _read(path)
        found = [text for text in _texts(path, raw, text_field) if text]
        name = path.name.encode(errors="replace").decode()  # a file system takes bytes that are no text
        files.append({"name": name, "sha256": hashlib.sha256(raw).hexdigest(), "texts": len(found)})
        texts += found
    if not texts:
        raise StartRefused("the corpus holds no text")
    return Corpus(texts, files)


def _read(path: Path) -> bytes:
    if path.suffix.lower() not in _JSONL + _PLAIN:
        raise StartRefused(f"{path}: a corpus file ends in {', '.join(_JSONL + _PLAIN)}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartRefused(f"{path}: cannot be read: {error.strerror or error}") from None


def _texts(path: Path, raw: bytes, text_field: str) -> list[str]:
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StartRefused(f"{path}: not UTF-8 ({error})") from None
    if path.suffix.lower() in _PLAIN:
        return [content]
    # Lines end at \n alone: JSON may hold the other separators of str.splitlines.
    lines = enumerate(content.split("\n"), start=1)
    return [_line_text(line, text_field, f"{path}:{number}") for number, line in lines if line.strip()]


def _line_text(line: str, text_field: str, where: str) -> str:
    try:
        value = parse(line)
    except ValueError as error:
        raise StartRefused(f"{where}: not JSON ({error})") from None
    text = value.get(text_field) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise StartRefused(f"{where}: neither a string nor an object with a string {text_field!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise StartRefused(f"{where}: the text holds half a surrogate pair") from None
    return text
