"""A download and its cache: full, unwritable, shared, killed at any step."""

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spinf_serve.hub import cache, failures
from spinf_serve.hub.fetch import Fetch
from spinf_serve.hub.store import Store
from tests.base.hub.fetching import CONFIG, SHARD, SHARDS, assert_whole, fetch, refusal, snapshot
from tests.support.hub import REPO, REVISION, FakeHub


def test_the_cache_is_one_that_huggingface_hub_reads_and_writes(
    hub: FakeHub, repository: dict[str, bytes], tmp_path: Path
) -> None:
    from huggingface_hub import scan_cache_dir, snapshot_download

    fetch(hub)
    before = len(hub.seen)
    theirs = snapshot_download(REPO, revision=REVISION, cache_dir=cache.hub_cache(), local_files_only=True,
                               allow_patterns=list(cache.WANTED), ignore_patterns=["*/*"])  # fmt: skip
    assert (Path(theirs), len(hub.seen)) == (snapshot(), before)
    scanned = scan_cache_dir(cache.hub_cache())
    assert (scanned.warnings, {repo.repo_id for repo in scanned.repos}) == ([], {REPO})

    shutil.rmtree(cache.hub_cache())
    snapshot_download(REPO, revision=REVISION, cache_dir=cache.hub_cache(), endpoint=hub.url,
                      allow_patterns=list(cache.WANTED), max_workers=1)  # fmt: skip
    assert (snapshot() / SHARD).read_bytes() == repository[SHARD]
    before = sum(hub.sent.values())
    fetch(hub)
    assert sum(hub.sent.values()) == before, "what another download brought is not downloaded again"


def test_a_full_disk_is_seen_before_and_while_downloading(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(cache.hub_cache().anchor)
        patch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=600_000))
        text = refusal(hub)
        assert "600.0 kB free" in text
        assert "HF_HUB_CACHE" in text
        assert not hub.sent
    with monkeypatch.context() as patch:

        def full(*_arguments: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(Fetch, "_append", full)
        assert "no space left in" in refusal(hub)
    fetch(hub)
    assert_whole(repository)


def test_a_file_that_is_too_large_for_the_cache_names_the_variables() -> None:
    """As a limit of the shell or an old file system sets it; such an error names no file."""
    text = failures.explain(OSError(errno.EFBIG, "File too large"), REPO, REVISION, "x", "/the/cache", False)
    assert "cannot be written (File too large: /the/cache): set HF_HUB_CACHE" in text


def test_an_unwritable_cache_names_the_variables(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert "set HF_HUB_CACHE or HF_HOME to a writable directory" in refusal(hub)


def test_an_end_at_every_single_step_is_recovered_from(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run ends before its first change to the disk, before its second, and so on; the next one completes."""

    class Ended(BaseException):
        pass

    left = 0

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **more: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise Ended
            return original(*arguments, **more)

        return step

    for name in ("touch", "replace", "write_text"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    for name in ("fsync", "symlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    hub.files = {name: repository[name] for name in (CONFIG, "tokenizer.json")}
    hub.files |= {"model.safetensors": repository[SHARD]}
    for point in itertools.count(1):
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / str(point)))
        left = point
        try:
            fetch(hub)
        except Ended:
            found = cache.find(REPO, REVISION).directory
            assert found is None or {path.name for path in found.iterdir()} >= hub.files.keys()
            left = 0
            fetch(hub)
            assert_whole(hub.files)
        else:
            break
    assert_whole(hub.files)
    assert point > 15


def test_two_downloads_at_once_share_the_work(hub: FakeHub, repository: dict[str, bytes]) -> None:
    hub.faults.pace_s = 0.01
    threads = [threading.Thread(target=fetch, args=(hub,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_whole(repository)
    for name in SHARDS:
        assert hub.sent[name] == len(repository[name])


def test_threads_write_one_listing_at_once() -> None:
    store = Store(cache.hub_cache(), REPO)
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(store.write_listing, REVISION, {}) for _ in range(400)]
    for write in writes:
        write.result()
    assert [path.name for path in (store.root / "trees").iterdir()] == [f"{REVISION}.json"]


def test_what_a_kill_left_of_a_link_is_in_nobodys_way(hub: FakeHub, repository: dict[str, bytes]) -> None:
    """Process ids come back, above all in containers."""
    fetch(hub, only=(CONFIG,))
    directory = cache.repo_folder(cache.hub_cache(), REPO) / "snapshots" / REVISION
    left = directory / f".tokenizer.json.{os.getpid()}.link"
    left.symlink_to("../../blobs/gone")
    fetch(hub)
    assert_whole(repository)
    assert (directory / "tokenizer.json").is_symlink()


def test_equal_files_are_stored_once(hub: FakeHub, repository: dict[str, bytes]) -> None:
    hub.files["tokenizer_copy.json"] = repository["tokenizer.json"]
    fetch(hub)
    assert_whole(repository | {"tokenizer_copy.json": repository["tokenizer.json"]})
    blobs = cache.repo_folder(cache.hub_cache(), REPO) / "blobs"
    assert len(list(blobs.iterdir())) == sum(map(cache.wanted, repository))


def test_a_file_system_without_links_and_locks(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_arguments: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("os.symlink", unsupported)
    monkeypatch.setattr("fcntl.flock", unsupported)
    fetch(hub)
    assert_whole(repository)
    sent = sum(hub.sent.values())
    fetch(hub)
    assert sum(hub.sent.values()) == sent


def test_an_empty_file_is_a_file(hub: FakeHub, repository: dict[str, bytes]) -> None:
    hub.files["tokenizer.extra"] = b""
    fetch(hub)
    assert_whole(repository | {"tokenizer.extra": b""})


def test_the_head_is_a_commit_and_remembered(hub: FakeHub) -> None:
    fetch(hub, revision=None, only=(CONFIG,))
    assert cache.local_head(REPO) == (REVISION, cache.repo_folder(cache.hub_cache(), REPO) / "snapshots" / REVISION)
    refs = cache.repo_folder(cache.hub_cache(), REPO) / "refs"
    shutil.rmtree(refs)
    refs.write_text("as in a cache that cannot be written")
    fetch(hub, revision=None, only=(CONFIG,))
    hub.head = "main"
    assert "names no commit" in refusal(hub, revision=None)


DAMAGED = {
    "config of zeros": (CONFIG, lambda data: bytes(len(data))),
    "tokenizer with another letter": ("tokenizer.json", lambda data: data.replace(b"e", b"o", 1)),
    "shard of zeros": (SHARD, lambda data: bytes(len(data))),
    "header of a shard": (SHARD, lambda data: data[:8] + b"[" + data[9:]),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "of a cut-off download"])
def test_a_cached_file_that_its_name_contradicts_is_passed_over_and_fetched_again(
    hub: FakeHub, repository: dict[str, bytes], case: str, is_whole: bool
) -> None:
    """As long as it should be: what a machine that lost its power leaves of a file."""
    name, damage = DAMAGED[case]
    fetch(hub)
    blob = (snapshot() / name).resolve()
    if not is_whole:
        (snapshot() / SHARDS[0]).unlink()
    blob.write_bytes(damage(repository[name]))
    found = cache.find(REPO, REVISION)
    assert found.directory is None
    assert not is_whole or name in found.skipped[0]
    fetch(hub)
    assert_whole(repository)
    assert blob.read_bytes() == repository[name]


def test_a_link_to_another_content_is_put_right(hub: FakeHub, repository: dict[str, bytes]) -> None:
    """Of the same length: in a cut-off download only the Hub knows which content belongs there."""
    fetch(hub)
    link, shard = snapshot() / "tokenizer_config.json", snapshot() / SHARD
    other = link.resolve().with_name("0" * 32)
    other.write_bytes(bytes(len(repository[link.name])))
    link.unlink()
    link.symlink_to(other)
    shard.unlink()
    fetch(hub)
    assert_whole(repository)
