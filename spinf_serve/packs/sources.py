"""Where packs come from: a GitHub repository, a local folder, or the official repository."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

OFFICIAL = "official"
OFFICIAL_DEFAULT = "github:spinfinc/spinf-prompts@0.1.0"
OFFICIAL_NAMESPACE = "spinf"
GITHUB_API = "https://api.github.com"
GITHUB = "github:"

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}", re.ASCII)
_REPO = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)
# What git allows in a ref, less what has a meaning of its own to git or in an address.
_REF = re.compile(r"(?!.*(?:\.\.|//|@\{))[^\x00-\x20\x7f~^:?*\[\\#%]{1,200}(?<![/.])")


class SourceError(ValueError):
    """A source that cannot be used; the message names what is wrong, for the person who gave it."""


class Unreachable(SourceError):
    """A source that could not be asked: no network, no answer in time, a server that is down or limits calls."""


@dataclass(frozen=True, slots=True)
class GitHubSource:
    """A repository at a branch, tag or commit (`ref` None: its default branch), and a folder in it ("": its root)."""

    owner: str
    repo: str
    ref: str | None
    path: str

    def __str__(self) -> str:
        ref, path = f"@{self.ref}" if self.ref else "", f"#{self.path}" if self.path else ""
        return f"{GITHUB}{self.owner}/{self.repo}{ref}{path}"


@dataclass(frozen=True, slots=True)
class FolderSource:
    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source = GitHubSource | FolderSource


@dataclass(frozen=True, slots=True)
class Environment:
    """What only the environment says about sources. The token is for private repositories and stays on its host."""

    cache_dir: Path
    official: str = OFFICIAL_DEFAULT
    github_api: str = GITHUB_API
    github_token: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> "Environment":
        """`SPINF_PACKS_CACHE`, `SPINF_PACKS_OFFICIAL`, `GITHUB_API_URL`, `GITHUB_TOKEN`; an empty one is unset."""
        environ = os.environ if environ is None else environ
        base = environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache = environ.get("SPINF_PACKS_CACHE") or f"{base}/spinf-serve/packs"
        return cls(
            cache_dir=Path(cache).expanduser().absolute(),
            official=environ.get("SPINF_PACKS_OFFICIAL") or OFFICIAL_DEFAULT,
            github_api=(environ.get("GITHUB_API_URL") or GITHUB_API).rstrip("/"),
            github_token=environ.get("GITHUB_TOKEN") or None,
        )


def parse_source(text: str) -> Source:
    """`github:<owner>/<repo>[@ref][#path]`, or a folder. Raises `SourceError`."""
    if not text.startswith(GITHUB):
        if not text or "\0" in text:
            raise SourceError("a pack source is github:<owner>/<repo>[@ref][#path], a folder, or official")
        return FolderSource(Path(text).expanduser().absolute())
    where, marked, path = text.removeprefix(GITHUB).partition("#")
    name, at, ref = where.partition("@")
    owner, _, repo = name.partition("/")
    if not _OWNER.fullmatch(owner) or not _REPO.fullmatch(repo) or not repo.strip("."):
        raise SourceError(f"{text}: expected github:<owner>/<repo>[@ref][#path]")
    if at and not _REF.fullmatch(ref):
        raise SourceError(f"{text}: {ref!r} is no branch, tag or commit")
    if marked and not _is_inner(path):
        raise SourceError(f"{text}: the path must name a folder inside the repository")
    return GitHubSource(owner, repo, ref or None, path.strip("/") if marked else "")


def _is_inner(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\\" not in path and "\0" not in path
