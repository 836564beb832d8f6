"""Where snapshots of the Hub lie on this machine, and which of them may be served. Reads only; no network."""

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from spinf_serve.completeness import SnapshotError, check_snapshot
from spinf_serve.jsonfile import parse

CACHE_DIRS_ENV = "SPINF_CACHE_DIRS"
WANTED = ("*.json", "*.safetensors", "tokenizer*")
"""What is downloaded of a repository, at its top level: a snapshot has no folders."""
HEAD = "main"
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHA1 = re.compile(r"[0-9a-f]{40}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True, slots=True)
class Found:
    """The complete snapshot, or None; and why the other places were passed over, one sentence each."""

    directory: Path | None
    skipped: tuple[str, ...]


def wanted(name: str) -> bool:
    """Whether a file of a repository belongs to its snapshot here."""
    return "/" not in name and name.isprintable() and any(fnmatchcase(name, pattern) for pattern in WANTED)


def offline() -> bool:
    """Whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids the network, as huggingface_hub reads them."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in _TRUE


def hub_cache() -> Path:
    """The Hub cache, as huggingface_hub finds it.

    HF_HUB_CACHE, else HUGGINGFACE_HUB_CACHE, else hub/ in HF_HOME, else in $XDG_CACHE_HOME/huggingface (~/.cache).
    """
    for name, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if value := os.environ.get(name):
            return _expanded(value) / below
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def extra_dirs() -> list[Path]:
    """The directories of SPINF_CACHE_DIRS, separated by colons."""
    return [_expanded(part) for part in os.environ.get(CACHE_DIRS_ENV, "").split(":") if part]


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(text)))


def repo_folder(root: Path, repo: str) -> Path:
    """A repository's folder in a directory of the Hub cache's layout."""
    return root / f"models--{repo.replace('/', '--')}"


def find(repo: str, revision: str) -> Found:
    """The first complete snapshot of a repository at a commit: in SPINF_CACHE_DIRS, then in the Hub cache.

    Read without writing anything, so that a cache may be mounted read-only.
    """
    skipped: list[str] = []
    for root in [*extra_dirs(), hub_cache()]:
        try:
            for directory, records in _candidates(root, repo, revision, skipped):
                try:
                    check(directory, records, revision)
                except SnapshotError as error:
                    skipped.append(str(error))
                else:
                    return Found(directory, tuple(skipped))
        except OSError as error:
            skipped.append(f"{root} cannot be read: {error.strerror or error}")
    return Found(None, tuple(skipped))


def _candidates(root: Path, repo: str, revision: str, skipped: list[str]) -> Iterator[tuple[Path, Path]]:
    """Directories that hold the repository at the commit, each with the folder of its `trees/`."""
    is_extra = root != hub_cache()
    if is_extra and not root.is_dir():
        skipped.append(f"{root} of {CACHE_DIRS_ENV} is no directory")
        return
    seen = len(skipped)
    folder = repo_folder(root, repo)
    snapshots = folder / "snapshots"
    if (snapshots / revision).is_dir():
        seen = -1
        yield snapshots / revision, folder
    elif snapshots.is_dir() and (others := sorted(path.name for path in snapshots.iterdir())):
        skipped.append(f"{folder} holds revision {', '.join(others[:3])}, not {revision}")
    if not is_extra:
        return
    for plain in (root.joinpath(*repo.split("/")), root):
        if not (plain / "config.json").is_file():
            continue
        seen = -1
        known, reason = revision_of(plain)
        if known == revision:
            yield plain, plain / ".cache" / "huggingface"
        else:
            skipped.append(f"{plain} holds revision {known}, not {revision}" if known else f"{plain}: {reason}")
    if len(skipped) == seen:
        skipped.append(f"{root} holds no snapshot of {repo}")


def revision_of(directory: Path) -> tuple[str | None, str]:
    """The commit that a directory's files are known to be of, or None and why it is not known.

    Known from its name (…/snapshots/<commit>), or from what `hf download --local-dir` recorded for each of its files,
    as long as no file changed since.
    """
    name = directory.resolve().name
    if _COMMIT.fullmatch(name):
        return name, ""
    records = directory / ".cache" / "huggingface" / "download"
    commits: set[str] = set()
    for path in sorted(path for path in directory.iterdir() if wanted(path.name)):
        try:
            commit, _etag, written = (records / f"{path.name}.metadata").read_text(encoding="utf-8").split()[:3]
            if path.stat().st_mtime - 1 > float(written):
                return None, f"{path.name} was changed after its download"
        except (OSError, ValueError):
            return None, f"the revision of its {path.name} is not known: serve it with --model-dir"
        commits.add(commit)
    if len(commits) != 1:
        return None, f"its files are of several revisions: {', '.join(sorted(commits))}"
    return commits.pop(), ""


def check(directory: Path, records: Path, revision: str) -> None:
    """Refuse a snapshot that lacks a file, or has one of another length than the Hub's listing or its header says.

    The listing of the commit's files, where a download recorded one (`records`/trees/<commit>.json), finds what the
    shards cannot tell: a tokenizer_config.json that a killed download never got to. Of what is no weights the content
    is compared, too, with the digest that a cache names it by: a machine that stopped may have left zeros under the
    right name. Raises `SnapshotError`.
    """
    try:
        check_snapshot(directory)
        for name, size in listed_sizes(records, revision).items():
            path = directory / name
            if not path.is_file():
                raise SnapshotError(f"incomplete snapshot {directory}: {name} is missing")
            if (found := path.stat().st_size) != size:
                raise SnapshotError(
                    f"incomplete snapshot {directory}: {name} has {found} bytes, the Hub's listing says {size}"
                )
        for path in sorted(directory.iterdir()):
            if wanted(path.name) and path.suffix != ".safetensors" and path.is_symlink():
                try:
                    check_content(path, path.resolve().name)
                except SnapshotError as error:
                    raise SnapshotError(f"damaged snapshot {directory}: {path.name}: {error}") from None
    except OSError as error:
        raise SnapshotError(f"{directory} cannot be read: {error.strerror or error}") from None


def check_content(path: Path, etag: str) -> None:
    """Compare a file with its ETag where that is a digest. Raises `SnapshotError`.

    The Hub names weights and large files by their SHA-256, the others by git's SHA-1 of them; some of its mirrors name
    these by the SHA-1 of their bytes alone.
    """
    if _SHA256.fullmatch(etag):
        with path.open("rb") as content:
            found = [hashlib.file_digest(content, "sha256").hexdigest()]
    elif _SHA1.fullmatch(etag):
        data = path.read_bytes()
        git = b"blob %d\0" % len(data) + data
        found = [hashlib.sha1(text, usedforsecurity=False).hexdigest() for text in (git, data)]
    else:
        return
    if etag not in found:
        kind = "SHA-256" if len(etag) == 64 else "SHA-1"
        raise SnapshotError(f"its {kind} is another one than the Hub says")


def listed_sizes(records: Path, revision: str) -> dict[str, int]:
    """File → bytes of a commit, from the listing that huggingface_hub's and our downloads record; {} without one."""
    try:
        listing = parse((records / "trees" / f"{revision}.json").read_text(encoding="utf-8"))
        if listing["format_version"] != 1:
            return {}
        entries = {name: entry.get("lfs_size") or entry["size"] for name, entry in listing["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {name: size for name, size in entries.items() if wanted(name) and isinstance(size, int)}


def local_head(repo: str) -> tuple[str, Path] | None:
    """The commit that was last seen as the head of a repository's default branch, and the directory with its files."""
    for root in [*extra_dirs(), hub_cache()]:
        folder = repo_folder(root, repo)
        try:
            commit = (folder / "refs" / HEAD).read_text(encoding="ascii").strip()
            directory = folder / "snapshots" / commit
            if _COMMIT.fullmatch(commit) and (directory / "config.json").is_file():
                return commit, directory
        except (OSError, UnicodeDecodeError):
            continue
    return None
