"""Writes into the Hub cache in huggingface_hub's layout.

`models--org--name/` holds `blobs/<etag>` (contents), `snapshots/<commit>/<name>` (links to them), `refs/`, `trees/`. A
blob appears by one rename once it is whole. Before that it is `blobs/<etag>.incomplete`, under the same name in every
run, so that a run goes on where a killed one ended (huggingface_hub itself starts the file again). Runs in the download
process.
"""

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spinf_serve.hub.cache import repo_folder

_POLL_S = 0.2


class Store:
    """One repository's folder in a Hub cache."""

    def __init__(self, cache: Path, repo: str) -> None:
        self.root = repo_folder(cache, repo)
        self._locks = cache / ".locks" / self.root.name

    def snapshot(self, revision: str) -> Path:
        """The directory of a commit's files."""
        return self.root / "snapshots" / revision

    def blob(self, etag: str) -> Path:
        """Where a file's content lies once it is whole."""
        return self.root / "blobs" / etag

    def partial(self, etag: str) -> Path:
        """Where it lies before."""
        return self.root / "blobs" / f"{etag}.incomplete"

    def has(self, etag: str, size: int | None) -> bool:
        """Whether the content is here, and as long as the Hub says (if it does)."""
        try:
            found = self.blob(etag).stat().st_size
        except OSError:
            return False
        return size is None or found == size

    def shows(self, revision: str, name: str, size: int | None) -> bool:
        """Whether a file of a commit is here, and as long as the Hub says (if it does)."""
        try:
            found = (self.snapshot(revision) / name).stat().st_size
        except OSError:
            return False
        return size is None or found == size

    def partial_size(self, etag: str) -> int:
        """Bytes of the content that an earlier run left."""
        try:
            return self.partial(etag).stat().st_size
        except OSError:
            return 0

    @contextlib.contextmanager
    def alone(self, etag: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the lock on a content that huggingface_hub takes too; the kernel drops it when its holder dies.

        `waiting` is called once where another process has it.
        """
        self._locks.mkdir(parents=True, exist_ok=True)
        self.blob(etag).parent.mkdir(parents=True, exist_ok=True)
        with (self._locks / f"{etag}.lock").open("a") as file:
            told = False
            while not _lock(file.fileno()):
                if not told:
                    waiting()
                    told = True
                time.sleep(_POLL_S)
            yield

    def keep(self, etag: str) -> None:
        """Turn a whole part into the content, on disk before it has its name."""
        with self.partial(etag).open("rb") as file:
            os.fsync(file.fileno())
        self.partial(etag).replace(self.blob(etag))

    def drop_partial(self, etag: str) -> None:
        """Forget a part that cannot become the content."""
        self.partial(etag).unlink(missing_ok=True)

    def link(self, revision: str, name: str, etag: str) -> None:
        """Show a content as a file of a commit, in one step."""
        target = self.snapshot(revision) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = os.path.relpath(self.blob(etag), target.parent)
        with contextlib.suppress(OSError):
            if os.readlink(target) == source:
                return
        temporary = _temporary(target, "link")
        try:
            os.symlink(source, temporary)
        except OSError:  # a file system without links: the content moves, as huggingface_hub does it
            self.blob(etag).replace(target)
        else:
            temporary.replace(target)

    def write_ref(self, ref: str, revision: str) -> None:
        """Remember the commit that a branch named, where the cache can be written: it only helps without network."""
        with contextlib.suppress(OSError):
            self._write(self.root / "refs" / ref, revision)

    def write_listing(self, revision: str, files: dict[str, dict[str, Any]]) -> None:
        """Record a commit's files in huggingface_hub's format (`cache.listed_sizes` reads it)."""
        listing = {"format_version": 1, "files": dict(sorted(files.items()))}
        self._write(self.root / "trees" / f"{revision}.json", json.dumps(listing, indent=1))

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path, "tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def _temporary(path: Path, ending: str) -> Path:
    """A name beside `path` of this download alone: threads share a process id, and containers on one cache may too."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{ending}")


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: two processes then write the same bytes to the same places
    return True
