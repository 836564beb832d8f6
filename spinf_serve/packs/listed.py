"""What a repository of packs holds, and how its files are read."""

from dataclasses import dataclass, field
from pathlib import Path

from spinf_serve.packs.pack import MAX_FILE_BYTES, Pack
from spinf_serve.packs.problems import PackError

AVAILABLE, DEPRECATED, COMING_SOON = "available", "deprecated", "coming_soon"
STATUSES = (AVAILABLE, DEPRECATED, COMING_SOON)


@dataclass(frozen=True, slots=True)
class ListedVersion:
    """One version of a pack. `pack` and `content` (the file's bytes) are None while it is coming soon."""

    version: str
    status: str
    model: str | None
    pack: Pack | None = None
    content: bytes | None = None
    fixture: Path | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ListedPack:
    """One pack of a repository, its versions in the order of the manifest."""

    id: str
    name: str
    description: str = ""
    tags: tuple[str, ...] = ()
    versions: tuple[ListedVersion, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A file with a pack that is not fitted yet; `file` is its place in the repository."""

    file: str
    pack: Pack


@dataclass(slots=True)
class Repository:
    """What a folder holds. It is usable where `problems` is empty; `warnings` are for its author."""

    root: Path
    packs: list[ListedPack] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def file_bytes(path: Path) -> bytes:
    """At most one byte over the limit, which `json_of` then refuses. Raises `PackError`."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PackError(path.name, [f"cannot be read: {error.strerror or error}"]) from None


def fixture_of(path: Path, pack: Pack) -> Path | None:
    """`fixtures/<version>.json` beside a pack file, where it exists."""
    fixture = path.parent / "fixtures" / f"{pack.version}.json"
    return fixture if fixture.is_file() else None
