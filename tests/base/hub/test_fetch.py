"""Downloading into the cache, against a server with every fault; in this process."""

import errno
import hashlib
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spinf_serve.hub import cache, failures
from spinf_serve.hub.fetch import Fetch, Job, Report
from spinf_serve.hub.remote import Remote
from spinf_serve.hub.store import Store
from tests.support.hub import OTHER, REPO, REVISION, FakeHub

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


def test_a_damaged_blob_is_downloaded_again(hub: FakeHub, repository: dict[str, bytes]) -> None:
    fetch(hub)
    directory = snapshot()
    for name in (SHARD, "tokenizer.json"):
        (directory / name).resolve().write_bytes(repository[name][:-7])
    assert cache.find(REPO, REVISION).directory is None
    fetch(hub)
    assert_whole(repository)


@pytest.mark.parametrize("more", [-1, 1, 1000])
def test_a_wrong_length_is_refused_and_not_kept(hub: FakeHub, repository: dict[str, bytes], more: int) -> None:
    hub.faults.claim[SHARD] = len(repository[SHARD]) + more
    text = refusal(hub)
    assert f"{SHARD} of {REPO} has {len(repository[SHARD]) + more} bytes, but the Hub sent" in text
    assert [path.stat().st_size for path in parts() if path.stem == hub.etag(SHARD)] == [0]
    hub.faults.claim.clear()
    fetch(hub)
    assert_whole(repository)


def test_more_bytes_than_the_length_says_are_refused(hub: FakeHub, repository: dict[str, bytes]) -> None:
    hub.faults.chunked = True
    hub.faults.body[SHARD] = repository[SHARD] + b"x" * 100_000
    assert "but the Hub sent" in refusal(hub)


def test_other_bytes_of_the_same_length_are_refused_and_not_kept(hub: FakeHub, repository: dict[str, bytes]) -> None:
    hub.faults.body[SHARD] = repository[SHARD][:-1] + bytes([repository[SHARD][-1] ^ 1])
    assert f"{SHARD} of {REPO} arrived damaged and was thrown away" in refusal(hub)
    hub.faults.body.clear()
    fetch(hub)
    assert_whole(repository)


@pytest.mark.parametrize("name", [CONFIG, "tokenizer.json"])
def test_other_text_of_the_same_length_is_refused_and_not_kept(
    hub: FakeHub, repository: dict[str, bytes], name: str
) -> None:
    """No header says how long a tokenizer is, and a parser may be content with half of it."""
    hub.faults.body[name] = repository[name].replace(b"e", b"o", 1)
    assert f"{name} of {REPO} arrived damaged and was thrown away: its SHA-1" in refusal(hub)
    hub.faults.body.clear()
    fetch(hub)
    assert_whole(repository)


def test_a_mirror_may_name_text_by_its_plain_sha1(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "etag", lambda name: hashlib.sha1(hub.files[name]).hexdigest())
    fetch(hub)
    assert_whole(repository)


@pytest.mark.parametrize("name", [CONFIG, "tokenizer.json", SHARD])
def test_without_lengths_the_listing_tells_a_whole_file(hub: FakeHub, repository: dict[str, bytes], name: str) -> None:
    hub.faults.no_length = hub.faults.chunked = True
    hub.faults.cut_after[name], hub.faults.cuts[name] = 100, 1
    fetch(hub)
    assert_whole(repository)


def test_bytes_from_elsewhere_are_refused_as_such(hub: FakeHub, repository: dict[str, bytes]) -> None:
    part = cache.repo_folder(cache.hub_cache(), REPO) / "blobs" / f"{hub.etag(SHARD)}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(repository[SHARD][:1000])
    hub.faults.range_from = 5000
    assert "sent other bytes than it was asked for" in refusal(hub)
    hub.faults.range_from = None
    fetch(hub)
    assert_whole(repository)


@pytest.mark.parametrize("tree", [b"<html>", b"", b"[" * 200_000], ids=["a page", "nothing", "too deep"])
def test_a_listing_that_is_none_is_no_hub(hub: FakeHub, tree: bytes) -> None:
    hub.faults.tree = tree
    text = refusal(hub)
    assert "answers for acme/tiny-model as the Hub does not" in text
    assert "HF_ENDPOINT" in text


def test_names_that_cannot_be_files_are_not_wanted(hub: FakeHub, repository: dict[str, bytes]) -> None:
    odd = [{"type": "file", "path": name, "size": 1, "oid": "x"} for name in ("a\0.json", "a\n.json", "\ud800.json")]
    hub.faults.tree = json.dumps(hub.tree() + odd).encode()
    fetch(hub)
    assert_whole(repository)


def test_without_a_digest_the_header_of_a_shard_decides(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror may name contents by other hashes; a shard that is cut off on it has a right length nowhere."""
    monkeypatch.setattr(hub, "etag", lambda name: f"etag-of-{name}")
    hub.files[SHARD] = repository[SHARD][:-4]
    text = refusal(hub)
    assert "its header says" in text
    assert str(cache.hub_cache()) not in text
    hub.files[SHARD] = repository[SHARD]
    fetch(hub)
    assert_whole(repository)


@pytest.mark.parametrize(
    ("where", "status", "code", "has_token", "expected"),
    [
        ("/tree/", 401, "", False, "check the name; if it is private or gated, set HF_TOKEN"),
        ("/tree/", 401, "RepoNotFound", False, "check the name; if it is private or gated, set HF_TOKEN"),
        ("/tree/", 401, "", True, "does not accept the token"),
        (SHARD, 401, "", True, "does not accept the token"),
        ("/tree/", 403, "GatedRepo", True, "accept its terms at"),
        (CONFIG, 403, "", True, "accept its terms at"),
        ("/api/", 404, "RepoNotFound", False, "there is no repository acme/tiny-model on the Hub (404)"),
        ("/api/", 404, "RevisionNotFound", False, f"has no revision {REVISION} on the Hub (404)"),
        (SHARD, 404, "EntryNotFound", False, f"a file that the Hub lists for {REPO} at {REVISION} is not there (404)"),
        (SHARD, 503, "", False, "answered 503 for acme/tiny-model again and again: try later"),
        ("/tree/", 429, "", False, "answered 429"),
        (SHARD, 410, "", False, "it answered 410"),
    ],
)
def test_every_refusal_says_what_to_do(
    hub: FakeHub, where: str, status: int, code: str, has_token: bool, expected: str
) -> None:
    hub.faults.status[where] = (status, code)
    assert expected in refusal(hub, has_token=has_token)


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


@pytest.mark.parametrize("commit", [OTHER, None])
def test_an_answer_of_another_commit_is_foreign(hub: FakeHub, commit: str | None) -> None:
    hub.faults.commit = commit
    text = refusal(hub)
    assert (f"answers with revision {OTHER}" if commit else "something that is not the Hub") in text
    assert not hub.sent


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json", SHARD])
def test_a_repository_that_cannot_be_whole_costs_no_weights(hub: FakeHub, name: str) -> None:
    del hub.files[name]
    text = refusal(hub)
    assert name.removesuffix(".index.json") in text
    assert "has no" in text
    assert not [seen for seen in hub.seen if seen.method == "GET" and seen.path.endswith(".safetensors")]


def test_weights_come_from_storage_without_the_token(
    repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_AbCdEfGhIjKlMnOpQrStUv")
    with FakeHub(repository) as storage:
        address = storage.url.replace("127.0.0.1", "localhost")
        with FakeHub(repository, token="hf_AbCdEfGhIjKlMnOpQrStUv", storage=address) as hub:
            fetch(hub)
            assert_whole(repository)
            assert {seen.authorization for seen in storage.seen} == {None}
            assert {seen.path for seen in storage.seen} == {f"/stored/{name}" for name in SHARDS}
            assert {seen.authorization for seen in hub.seen} == {"Bearer hf_AbCdEfGhIjKlMnOpQrStUv"}


def test_a_mirror_that_only_describes_the_repository(hub: FakeHub, repository: dict[str, bytes]) -> None:
    hub.faults.no_tree = True
    fetch(hub)
    assert_whole(repository)


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


def test_names_that_lead_elsewhere_are_not_followed(hub: FakeHub, repository: dict[str, bytes], tmp_path: Path) -> None:
    hub.files |= {"../../evil.json": b"{}", "/evil.json": b"{}", "a/../../../evil.json": b"{}"}
    fetch(hub)
    assert_whole(repository)
    assert not list(tmp_path.rglob("evil.json"))


@pytest.mark.parametrize("etag", ["../../evil", "/evil", "..", ".hidden", "a/b", "x" * 300])
def test_an_etag_that_is_no_file_name_is_refused(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, etag: str) -> None:
    monkeypatch.setattr(hub, "etag", lambda _name: etag)
    assert "cannot be a file name" in refusal(hub)
    assert not hub.sent


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


def test_a_token_that_cannot_be_one_is_refused_without_its_text(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("hf_Ab CdEf", "hf_AbCdEfé", "hf_Ab\x07CdEf"):
        monkeypatch.setenv("HF_TOKEN", token)
        text = refusal(hub)
        assert "characters that no token has" in text
        assert "hf_Ab" not in text
    assert not hub.seen


def test_what_no_wait_helps_is_not_waited_for(hub: FakeHub) -> None:
    hub.faults.status[SHARD] = (403, "")
    refusal(hub)
    assert sum(seen.path.endswith(SHARD) for seen in hub.seen) == 1


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("GET https://user:pa%20ss@hub.example/api?x=1 failed", "GET https://hub.example/api failed"),
        ("see https://cdn.example/f?Signature=abc&Expires=1 (403)", "see https://cdn.example/f (403)"),
        ("header b'Bearer abc.def'", "header b'Bearer ***'"),
        ("authorization: basic dXNlcg==", "authorization: basic ***"),
        ("token hf_AbCdEf123, and plain-secret too", "token hf_***, and *** too"),
        ("no secrets: a/b at 12:30, 50 % of x?", "no secrets: a/b at 12:30, 50 % of x?"),
    ],
)
def test_texts_are_scrubbed(text: str, clean: str) -> None:
    failures.keep_secret("plain-secret")
    assert failures.scrub(text) == clean


def test_the_token_of_a_login_is_a_secret_too(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("of-a-login")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    fetch(hub)
    assert {seen.authorization for seen in hub.seen} == {"Bearer of-a-login"}
    assert failures.scrub("x of-a-login x") == "x *** x"
