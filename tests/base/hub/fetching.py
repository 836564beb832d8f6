"""A fetch from the stand-in Hub into this test's cache, and what it left there."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spinf_serve.hub import cache, failures
from spinf_serve.hub.fetch import Fetch, Job, Report
from spinf_serve.hub.remote import Remote
from tests.support.hub import REPO, REVISION, FakeHub

CONFIG, SHARDS = "config.json", [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
SHARD = SHARDS[1]
WAITS_S = (0.01, 0.01, 0.01)


@dataclass
class Heard:
    """What a fetch said."""

    notes: list[str] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)


def fetch(hub: FakeHub, revision: str | None = REVISION, only: tuple[str, ...] = ()) -> Heard:
    heard = Heard()
    report = Report(heard.notes.append, lambda done, total: heard.moves.append((done, total)))
    remote = Remote(REPO, WAITS_S, heard.notes.append, endpoint=hub.url)
    job = Job(REPO, revision, str(cache.hub_cache()), only=only, waits_s=WAITS_S)
    assert Fetch(job, report, remote).run() == REVISION
    return heard


def refusal(hub: FakeHub, revision: str | None = REVISION, has_token: bool = False) -> str:
    """What the user reads when a fetch fails."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of any kind; the text is what counts
        fetch(hub, revision)
    assert cache.find(REPO, REVISION).directory is None
    return failures.explain(raised.value, REPO, revision, hub.url, str(cache.hub_cache()), has_token)


def snapshot() -> Path:
    """The complete snapshot of the cache, read back file by file."""
    found = cache.find(REPO, REVISION)
    assert found.directory is not None, found.skipped
    return found.directory


def assert_whole(repository: dict[str, bytes]) -> None:
    files = [path for path in snapshot().iterdir() if not path.name.endswith(".link")]
    assert {path.name: path.read_bytes() for path in files} == {
        name: data for name, data in repository.items() if cache.wanted(name)
    }


def parts() -> list[Path]:
    return sorted(cache.hub_cache().rglob("*.incomplete"))
