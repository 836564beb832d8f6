"""What a download does not take, what it says then, and what it never says."""

import hashlib
import json
from pathlib import Path

import pytest

from spinf_serve.hub import cache, failures, remote
from tests.base.hub.fetching import CONFIG, SHARD, SHARDS, assert_whole, fetch, parts, refusal, snapshot
from tests.support.hub import OTHER, REPO, REVISION, FakeHub


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


def test_a_listing_without_an_end_is_given_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_MOST_FILES", 500)
    hub.faults.endless_tree = True
    assert "lists more than 500 files for acme/tiny-model: check HF_ENDPOINT" in refusal(hub)
    assert len(hub.seen) < 500
    monkeypatch.setattr(remote, "_MOST_FILES", len(hub.tree()) - 2)  # the listing has a folder, too
    hub.faults.endless_tree = False
    assert "lists more than" in refusal(hub)


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
