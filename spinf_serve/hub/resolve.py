"""From a repository at a commit to a complete snapshot directory: found, else downloaded."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spinf_serve.completeness import SnapshotError
from spinf_serve.hub import cache, client
from spinf_serve.progress import transfer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a repository's default branch: its commit, a directory with its config.json, and what to log."""

    revision: str
    directory: Path
    note: str


@functools.cache
def head(repo: str) -> Head:
    """Ask the Hub once per process, so that one start means one commit; its config.json comes along.

    Offline, or with a Hub that cannot be reached, it is the commit that was last seen as the head. Raises
    `SnapshotError`.
    """
    why = "HF_HUB_OFFLINE is set"
    if not cache.offline():
        try:
            revision = client.fetch(repo, None, log.warning, only=("config.json",))
            note = f"{repo}: no manifest; the head of its default branch is {revision}"
            return Head(revision, client.snapshot_dir(repo, revision), note)
        except client.Unreachable as error:
            refusal, why = error, "the Hub cannot be reached"
            found = cache.local_head(repo)
            if found is None:
                raise refusal from None
    elif (found := cache.local_head(repo)) is None:
        raise SnapshotError(
            f"{why}, and the head of {repo} is not in any cache: give a local snapshot with --model-dir DIR"
        )
    return Head(
        *found, f"{repo}: no manifest, and {why}; serving {found[0]}, last seen as the head of its default branch"
    )


def snapshot(repo: str, revision: str, check_config: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    """The directory of a complete snapshot, downloaded if there is none yet.

    `check_config` gets a directory with the repository's config.json and raises where the model cannot be served: it is
    asked before the weights are downloaded. Raises `StartRefused`.
    """
    found = cache.find(repo, revision)
    for reason in found.skipped:
        progress(f"passed over: {reason}")
    if found.directory is not None:
        check_config(found.directory)
        return found.directory
    if cache.offline():
        raise SnapshotError(
            f"HF_HUB_OFFLINE is set, and no complete snapshot of {repo} at {revision} is here"
            f"{''.join(f'; {reason}' for reason in found.skipped)}"
        )
    with transfer(progress, repo) as moved:
        client.fetch(repo, revision, progress, moved, check_config)
    directory = client.snapshot_dir(repo, revision)
    try:
        cache.check(directory, directory.parents[1], revision)
    except SnapshotError as error:
        raise SnapshotError(f"{repo} at {revision} was downloaded and cannot be served: {error}") from None
    progress(f"downloaded {repo} to {directory}")
    return directory
