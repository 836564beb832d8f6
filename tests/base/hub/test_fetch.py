"""Downloading into the cache, against a server with every fault; in this process."""

import pytest

from spinf_serve.hub import cache
from tests.base.hub.fetching import CONFIG, SHARD, SHARDS, WAITS_S, assert_whole, fetch, parts, refusal
from tests.support.hub import REPO, REVISION, FakeHub


def test_a_download_brings_what_is_wanted_and_nothing_else(hub: FakeHub, repository: dict[str, bytes]) -> None:
    heard = fetch(hub)
    assert_whole(repository)
    asked = {seen.path.rsplit("/", 1)[1] for seen in hub.seen if "/resolve/" in seen.path}
    assert asked == {name for name in repository if cache.wanted(name)}
    sizes = {name: len(data) for name, data in repository.items() if cache.wanted(name)}
    assert cache.listed_sizes(cache.repo_folder(cache.hub_cache(), REPO), REVISION) == sizes
    total = sum(sizes.values())
    assert heard.moves[-1] == (total, total)
    assert heard.moves == sorted(heard.moves)
    assert parts() == []
    order = [seen.path.rsplit("/", 1)[1] for seen in hub.seen if seen.method == "GET" and "/resolve/" in seen.path]
    assert set(order[-2:]) == set(SHARDS), "weights last: their presence must mean that everything is here"


def test_a_connection_that_breaks_again_and_again_still_gets_there(hub: FakeHub, repository: dict[str, bytes]) -> None:
    for name in (*SHARDS, "tokenizer.json"):
        hub.faults.cut_after[name] = 20_000
    heard = fetch(hub)
    assert_whole(repository)
    for name in hub.faults.cut_after:
        assert hub.sent[name] == len(repository[name]), "every byte once"
    assert len(hub.got(SHARD)) > 5
    assert any("the connection broke" in note for note in heard.notes)


@pytest.mark.parametrize("kind", ["no_range", "chunked"])
def test_servers_that_know_no_ranges_or_lengths(hub: FakeHub, repository: dict[str, bytes], kind: str) -> None:
    setattr(hub.faults, kind, True)
    hub.faults.cut_after[SHARD], hub.faults.cuts[SHARD] = 50_000, 2
    fetch(hub)
    assert_whole(repository)


def test_a_slow_server_is_waited_for_and_reported(hub: FakeHub, repository: dict[str, bytes]) -> None:
    hub.faults.pace_s = 0.02
    heard = fetch(hub)
    assert_whole(repository)
    assert len(heard.moves) > 3
    assert heard.moves == sorted(heard.moves)
    assert heard.moves[0][0] < heard.moves[-1][0]


def test_a_server_that_falls_silent_is_given_up_and_gone_on_with(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.faults.hold_at[SHARD] = 100_000
    assert "ReadTimeout" in refusal(hub)
    hub.go.set()
    fetch(hub)
    assert_whole(repository)
    assert hub.got(SHARD)[-1].range == "bytes=100000-"


def test_what_an_earlier_run_left_is_gone_on_with(hub: FakeHub, repository: dict[str, bytes]) -> None:
    store = cache.repo_folder(cache.hub_cache(), REPO) / "blobs"
    store.mkdir(parents=True)
    (store / f"{hub.etag(SHARD)}.incomplete").write_bytes(repository[SHARD][:100_001])
    fetch(hub)
    assert_whole(repository)
    assert [seen.range for seen in hub.got(SHARD)] == ["bytes=100001-"]
    assert hub.sent[SHARD] == len(repository[SHARD]) - 100_001


@pytest.mark.parametrize("left", ["whole", "longer", "garbage", "garbage of the same length"])
def test_any_part_is_recovered_from(hub: FakeHub, repository: dict[str, bytes], left: str) -> None:
    data = repository[SHARD]
    content = {
        "whole": data,
        "longer": data + b"x",
        "garbage": b"x" * 999,
        "garbage of the same length": b"x" * len(data),
    }
    store = cache.repo_folder(cache.hub_cache(), REPO) / "blobs"
    store.mkdir(parents=True)
    (store / f"{hub.etag(SHARD)}.incomplete").write_bytes(content[left])
    if left.startswith("garbage"):
        assert "its SHA-256 is another one" in refusal(hub)
    fetch(hub)
    assert_whole(repository)
    assert (SHARD not in hub.sent) is (left == "whole")


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 408])
def test_passing_trouble_is_waited_out(hub: FakeHub, repository: dict[str, bytes], status: int) -> None:
    for where in ("/tree/", CONFIG, SHARD):
        hub.faults.status[where] = (status, "")
        hub.faults.times[where] = 2
    heard = fetch(hub)
    assert_whole(repository)
    assert sum("trying again" in note for note in heard.notes) == 6


def test_no_server_at_all(repository: dict[str, bytes]) -> None:
    with FakeHub(repository) as hub:
        pass
    text = refusal(hub)
    assert f"the connection to the Hub at {hub.url} fails" in text
    assert "--model-dir" in text


def test_a_connection_that_never_brings_anything_new_is_given_up(hub: FakeHub) -> None:
    hub.faults.cut_after[SHARD] = 0
    assert "what was downloaded is kept" in refusal(hub)
    assert len(hub.got(SHARD)) == len(WAITS_S) + 1


def test_a_mirror_that_only_describes_the_repository(hub: FakeHub, repository: dict[str, bytes]) -> None:
    hub.faults.no_tree = True
    fetch(hub)
    assert_whole(repository)
