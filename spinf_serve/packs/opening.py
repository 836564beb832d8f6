"""From a source to a folder on this machine: a folder as it is, a repository through the cache."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from spinf_serve.packs.cache import RepositoryCache
from spinf_serve.packs.github import BRANCH, GitHub, Resolved
from spinf_serve.packs.sources import Environment, FolderSource, GitHubSource, Source, SourceError, Unreachable


@dataclass(frozen=True, slots=True)
class Opened:
    """Where a source's files are, the commit they are of (None for a folder), and what the log should say.

    `cached` is the folder of the whole commit in the cache.
    """

    root: Path
    commit: str | None = None
    warnings: tuple[str, ...] = ()
    cached: Path | None = None


def open_source(source: Source, environment: Environment, *, refresh: bool = False) -> Opened:
    """The source's files. `refresh` resolves a remembered tag again. Raises `SourceError`, and `Unreachable` of it."""
    if isinstance(source, FolderSource):
        if not source.path.is_dir():
            raise SourceError(f"{source}: no such folder")
        return Opened(source.path)
    github = GitHub(environment)
    host = urlsplit(environment.github_api).netloc.rpartition("@")[2]
    cache = RepositoryCache(environment.cache_dir, host, source.owner, source.repo)
    resolved, warnings = _resolve(source, github, cache, refresh)
    root = cache.fetched(resolved.commit, partial(github.tarball, source.owner, source.repo, resolved.commit))
    # Only now: a ref is remembered when its files are here, so that the next start needs no network.
    # What is remembered already is not written again: a cache that was filled for it may be read-only.
    for ref in (_key(resolved), *([_DEFAULT_BRANCH] if source.ref is None else [])):
        if cache.ref(ref) != resolved.commit:
            cache.remember(ref, resolved.commit)
    folder = root / source.path
    if not folder.is_dir():
        raise SourceError(f"{source}: no such folder in the repository")
    return Opened(folder, resolved.commit, warnings, root)


_BRANCH_MARK = ":"  # no ref holds a colon
_DEFAULT_BRANCH = _BRANCH_MARK


def _key(resolved: Resolved) -> str:
    return (_BRANCH_MARK if resolved.kind == BRANCH else "") + resolved.ref


def _resolve(
    source: GitHubSource, github: GitHub, cache: RepositoryCache, refresh: bool
) -> tuple[Resolved, tuple[str, ...]]:
    """Tags and commits as remembered; a branch anew, or where nobody answers the commit it named last."""
    if source.ref is not None and not refresh and (commit := cache.ref(source.ref)) is not None:
        return Resolved(commit, "remembered", source.ref), ()
    try:
        resolved = github.resolve(source.owner, source.repo, source.ref)
    except Unreachable as error:
        commit = cache.ref(_BRANCH_MARK + (source.ref or ""))
        if refresh or commit is None or cache.folder(commit) is None:
            raise
        warning = f"{source}: {error}; using commit {commit[:12]}, which the branch named at an earlier start"
        return Resolved(commit, BRANCH, source.ref or ""), (warning,)
    if resolved.kind != BRANCH:
        return resolved, ()
    warning = (
        f"{source}: {resolved.ref} is a branch and may change at every start; it is at commit {resolved.commit[:12]}"
    )
    return resolved, (f"{warning} (pin it: @{resolved.commit})",)
