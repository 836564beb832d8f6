"""The cache of fetched repositories: one folder per commit, written whole, and the commits that refs named.

Layout: `<cache>/<api host>/<owner>/<repo>/` holds `commits/<40 hex>/` (the files), `refs/<quoted ref>` (a commit) and
`lock`. A commit's folder appears by one rename, so it is complete or absent, whoever is killed when.
"""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO
from urllib.parse import quote

from spinf_serve.packs.extraction import extract
from spinf_serve.packs.sources import SourceError

try:
    import fcntl
except ImportError:  # not on Windows: the rename alone keeps the cache whole, a repository may be fetched twice
    fcntl = None  # type: ignore[assignment]

LOCK_SECONDS = 150.0
"""How long one process waits for another's fetch; longer than a fetch may take."""
STALE_SECONDS = 3600.0
_POLL_SECONDS = 0.05
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_STAGED = ".new-"


class RepositoryCache:
    """The cached commits and refs of one repository. Raises `SourceError` where the folder cannot be written."""

    def __init__(self, cache_dir: Path, host: str, owner: str, repo: str) -> None:
        # GitHub's names ignore case; a port's colon is no file name everywhere.
        self.root = cache_dir.joinpath(*(quote(name.lower(), safe="") for name in (host, owner, repo)))

    def ref(self, ref: str) -> str | None:
        """The commit remembered for a ref."""
        try:
            commit = self._ref_file(ref).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return commit if _COMMIT.fullmatch(commit) else None

    def remember(self, ref: str, commit: str) -> None:
        """Remembers a ref's commit, in one step."""
        with _writing(self.root):
            file = self._ref_file(ref)
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=_STAGED, dir=file.parent)
            with os.fdopen(descriptor, "w", encoding="ascii") as staged:
                staged.write(commit + "\n")
            Path(name).replace(file)

    def _ref_file(self, ref: str) -> Path:
        return self.root / "refs" / ("@" + quote(ref, safe=""))

    def folder(self, commit: str) -> Path | None:
        """The files of a commit, where they are cached."""
        folder = self.root / "commits" / commit
        return folder if folder.is_dir() else None

    def fetched(self, commit: str, fetch: Callable[[IO[bytes]], None]) -> Path:
        """The files of a commit; `fetch` writes its tarball to a file and is called only where they are not cached.

        Two processes that want the same repository fetch it once. A fetch that fails or is killed leaves no commit.
        """
        if (folder := self.folder(commit)) is not None:
            return folder
        with _writing(self.root):
            commits = self.root / "commits"
            commits.mkdir(parents=True, exist_ok=True)
            with _locked(self.root / "lock") as alone:
                if (folder := self.folder(commit)) is not None:
                    return folder
                _remove_stale(commits, 0.0 if alone else STALE_SECONDS)
                return _fetch_into(commits, commit, fetch)


def _fetch_into(commits: Path, commit: str, fetch: Callable[[IO[bytes]], None]) -> Path:
    staging = Path(tempfile.mkdtemp(prefix=_STAGED, dir=commits))
    try:
        with (staging / "tarball").open("w+b") as tarball:
            fetch(tarball)
            tarball.seek(0)
            extract(tarball, staging / "files")
        target = commits / commit
        try:
            (staging / "files").rename(target)
        except OSError:
            # Without locks another process may have been first; the same commit holds the same files.
            if not target.is_dir():
                raise
        return target
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_stale(commits: Path, min_age: float) -> None:
    """What killed processes left; without the lock, only what is too old to be in use (`min_age` seconds)."""
    for entry in commits.glob(_STAGED + "*"):
        with contextlib.suppress(OSError):
            if time.time() - entry.stat().st_mtime >= min_age:
                shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """An exclusive lock between processes; the kernel releases it when its holder dies. False: no locks here."""
    with path.open("a") as file:
        yield _lock(file, path)


def _lock(file: IO[str], path: Path) -> bool:
    deadline = time.monotonic() + LOCK_SECONDS
    while fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise SourceError(f"{path}: another process has held this lock for too long") from None
            time.sleep(_POLL_SECONDS)
        except OSError:
            break  # a file system without locks
    return False


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SourceError(f"the pack cache {root} cannot be written: {error.strerror or error}") from None
