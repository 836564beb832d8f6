"""Which pieces of a vocabulary user text must never become: special and control tokens, media and turn markers."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spinf_serve.jsonfile import parse

_RESERVED = re.compile(r"<mask>|\[multimodal\]|<unused\d+>")
_ID_KEY = re.compile(r"_token_(id|ids|index)$")
_STRING_KEYS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, {} where there is no such file. Raises ValueError for a file that is not a JSON object."""
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


def forbidden_ids(snapshot_dir: Path, vocab: Mapping[str, int], special: set[int]) -> frozenset[int]:
    """Ids that user text never yields.

    `vocab` maps every piece, added tokens included, to its id; `special` are the ids flagged special in tokenizer.json.
    To these come `<mask>`, `[multimodal]`, `<unusedN>`, every `*_token` string of tokenizer_config.json and
    special_tokens_map.json, and every `*_token_id` of config.json and generation_config.json. A piece of one character
    is never forbidden by a config: it has no other spelling.
    """
    ids = set(special)
    ids |= {index for piece, index in vocab.items() if _RESERVED.fullmatch(piece)}
    marked = {vocab[piece] for piece in marker_strings(snapshot_dir) if piece in vocab}
    marked |= set(marker_ids(snapshot_dir))
    single = {index for piece, index in vocab.items() if len(piece) == 1}
    return frozenset(ids | (marked - single))


def marker_strings(snapshot_dir: Path) -> Iterator[str]:
    """Pieces that the tokenizer's own config files name as special."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        config = read_json(snapshot_dir / name)
        for key, value in config.items():
            if key.endswith("_token") or key in _STRING_KEYS:
                yield from _contents(value)
        entries = config.get("added_tokens_decoder") or {}
        if not isinstance(entries, dict):
            raise ValueError(f"{snapshot_dir / name}: added_tokens_decoder is not an object")
        for entry in entries.values():
            if isinstance(entry, dict) and entry.get("special"):
                yield from _contents(entry)


def marker_ids(snapshot_dir: Path) -> Iterator[int]:
    """Ids that the model's config names: start, end, padding, image, audio and video markers, at any depth."""
    for name in ("config.json", "generation_config.json"):
        yield from _ids(read_json(snapshot_dir / name))


def _contents(value: Any) -> Iterator[str]:
    """Strings in `value`: a string, {"content": string}, or a list or table of either."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and isinstance(value.get("content"), str):
        yield value["content"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _contents(item)


def _ids(config: dict[str, Any]) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _ids(value)
        elif _ID_KEY.search(key):
            yield from (item for item in (value if isinstance(value, list) else [value]) if type(item) is int)
