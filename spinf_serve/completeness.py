"""Whether a snapshot directory is complete: the files are there, and every shard is as long as its header says."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spinf_serve.jsonfile import parse
from spinf_serve.refusal import StartRefused

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20  # safetensors' own bound on the header
_LONGEST_NAME = 300  # of a tensor


class SnapshotError(StartRefused):
    """No usable snapshot. The message says which file is missing, short or foreign."""


def check_snapshot(directory: Path) -> list[Path]:
    """The weight files of a complete snapshot, sorted by name. Raises `SnapshotError` for an incomplete one."""
    if not directory.is_dir():
        raise SnapshotError(f"no such snapshot directory: {directory}")
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise SnapshotError(f"incomplete snapshot {directory}: {name} is missing")
    single = (directory / "model.safetensors").exists()
    shards = indexed_shards(directory) if (directory / INDEX).exists() else {"model.safetensors": None}
    if single and "model.safetensors" not in shards:
        raise SnapshotError(f"ambiguous snapshot {directory}: model.safetensors is not among the shards of {INDEX}")
    if not single and "model.safetensors" in shards:
        raise SnapshotError(f"incomplete snapshot {directory}: needs model.safetensors, or shards and {INDEX}")
    for name, tensors in sorted(shards.items()):
        check_shard(directory / name, tensors)
    return [directory / name for name in sorted(shards)]


def indexed_shards(directory: Path) -> dict[str, Any]:
    """File name → names of the tensors that the index expects in it."""
    path = directory / INDEX
    try:
        weight_map = parse(path.read_text(encoding="utf-8"), unique=True)["weight_map"]
        shards: dict[str, Any] = {}
        for tensor, name in weight_map.items():
            _check_names((tensor, name))
            if Path(name).name != name:
                raise ValueError(f"shard {name!r} is not a plain file name")
            shards.setdefault(name, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(f"unusable index {path}: {error!r}") from None
    if not shards:
        raise SnapshotError(f"unusable index {path}: it names no tensor")
    return shards


def check_shard(path: Path, tensors: list[str] | None = None) -> None:
    """Compare a file's length with its header: 8 bytes of header length, a JSON header, the data it describes."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise SnapshotError(f"incomplete snapshot: {path} is no file")
        size = path.stat().st_size
        with path.open("rb") as file:
            header_len = int.from_bytes(file.read(8), "little")
            if not 2 <= header_len <= min(size - 8, _MAX_HEADER):
                raise SnapshotError(f"incomplete snapshot: {path} is cut off or not a safetensors file")
            header = parse(file.read(header_len), unique=True)
        header.pop("__metadata__", None)
        _check_names(header)
        offsets = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
        expected = 8 + header_len + max((end for _, end in offsets.values()), default=0)
        astray = first_astray(offsets.items())
    except OSError as error:
        raise SnapshotError(f"incomplete snapshot: {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise SnapshotError(f"{path} is not a safetensors file: its header cannot be read") from None
    if size != expected:
        raise SnapshotError(f"incomplete snapshot: {path} has {size} bytes, its header says {expected}")
    if astray is not None:
        raise SnapshotError(f"{path} is damaged: the data of {astray} do not follow those before them")
    if missing := set(tensors or ()) - header.keys():
        raise SnapshotError(
            f"incomplete snapshot: {path} lacks {min(missing)} and {len(missing) - 1} others of the index"
        )


def _check_names(names: Iterable[str]) -> None:
    """ValueError for the name of a tensor that no model has and no terminal should show."""
    for name in names:
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise ValueError(f"a name of {len(name)} characters that begins with {name[:20]!r}")


def first_astray(offsets: Iterable[tuple[str, tuple[int, int]]]) -> str | None:
    """The first tensor whose data (begin, end) do not begin where those before it end: the format has no gaps."""
    expected = 0
    for name, (begin, end) in sorted(offsets, key=lambda entry: entry[1]):
        if begin != expected or end < begin:
            return name
        expected = end
    return None
