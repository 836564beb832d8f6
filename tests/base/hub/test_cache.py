"""Finding a snapshot on this machine: places, their order, completeness, revisions. No network."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spinf_serve.hub import cache
from tests.support.hub import OTHER, REPO, REVISION

SHARD = "model-00002-of-00002.safetensors"


def lay_out(root: Path, files: dict[str, bytes], revision: str = REVISION, repo: str = REPO) -> Path:
    """A snapshot in the layout of the Hub cache, links to blobs included; returns its directory."""
    folder = root / f"models--{repo.replace('/', '--')}"
    directory = folder / "snapshots" / revision
    directory.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for name, data in files.items():
        if cache.wanted(name):
            (folder / "blobs" / f"{name}-etag").write_bytes(data)
            (directory / name).symlink_to(Path("../../blobs") / f"{name}-etag")
    return directory


def download_to(directory: Path, files: dict[str, bytes], revision: str = REVISION) -> Path:
    """A directory as `hf download --local-dir` leaves it."""
    records = directory / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    for name, data in files.items():
        if cache.wanted(name):
            (directory / name).write_bytes(data)
            (records / f"{name}.metadata").write_text(f"{revision}\n{'e' * 40}\n{time.time()}\n")
    return directory


def record_listing(records: Path, sizes: dict[str, int], revision: str = REVISION) -> None:
    """What huggingface_hub records of a commit's files."""
    (records / "trees").mkdir(parents=True)
    files = {name: {"size": size, "blob_id": "b" * 40} for name, size in sizes.items()}
    (records / "trees" / f"{revision}.json").write_text(json.dumps({"format_version": 1, "files": files}))


def hub_cache() -> Path:
    return cache.hub_cache()


def reasons() -> str:
    found = cache.find(REPO, REVISION)
    assert found.directory is None
    return "\n".join(found.skipped)


@pytest.mark.parametrize(
    ("name", "is_wanted"),
    [
        *((name, True) for name in ("config.json", "a.safetensors", "tokenizer.model", "tokenizer_config.json")),
        *((name, False) for name in ("README.md", "pytorch_model.bin", "original/a.safetensors", "../config.json")),
        *((name, False) for name in ("x/tokenizer.json", "model.gguf", "xtokenizer", "modeling.py", ".gitattributes")),
        *((name, False) for name in ("a\0.json", "a\n.json", "\ud800.json")),
    ],
)
def test_what_belongs_to_a_snapshot(name: str, is_wanted: bool) -> None:
    assert cache.wanted(name) is is_wanted


def test_the_hub_cache_is_where_huggingface_hub_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOMEWHERE", str(tmp_path))
    cases: list[dict[str, str]] = [
        {},
        {"XDG_CACHE_HOME": "/xdg"},
        {"HF_HOME": "~/home", "XDG_CACHE_HOME": "/xdg"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/home"},
        {"HF_HUB_CACHE": "$SOMEWHERE/new", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/home"},
        {"HF_HUB_OFFLINE": "1"},
        {"HF_HUB_OFFLINE": "True"},
        {"HF_HUB_OFFLINE": "0"},
        {"TRANSFORMERS_OFFLINE": "yes"},
        {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"},
    ]
    code = (
        "import importlib, json, os, sys\n"
        "from huggingface_hub import constants as c\n"
        "for case in json.loads(sys.argv[1]):\n"
        "    os.environ.update(case)\n"
        "    importlib.reload(c)\n"
        "    print(json.dumps([c.HF_HUB_CACHE, c.HF_HUB_OFFLINE]))\n"
        "    for name in case: del os.environ[name]\n"
    )
    monkeypatch.delenv("HF_HOME")
    run = subprocess.run(
        [sys.executable, "-c", code, json.dumps(cases)], capture_output=True, text=True, check=True, timeout=60
    )
    for case, line in zip(cases, run.stdout.splitlines(), strict=True):
        with monkeypatch.context() as patch:
            for name, value in case.items():
                patch.setenv(name, value)
            assert [str(cache.hub_cache()), cache.offline()] == json.loads(line), case


def test_a_complete_snapshot_is_found_without_writing(repository: dict[str, bytes]) -> None:
    directory = lay_out(hub_cache(), repository)
    before = {path: path.lstat().st_mtime_ns for path in hub_cache().rglob("*")}
    found = cache.find(REPO, REVISION)
    assert (found.directory, found.skipped) == (directory, ())
    assert {path: path.lstat().st_mtime_ns for path in hub_cache().rglob("*")} == before


def test_the_extra_directories_come_first_and_in_order(
    repository: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = lay_out(hub_cache(), repository)
    second = lay_out(tmp_path / "b", repository)
    first = download_to(tmp_path / "a" / "acme" / "tiny-model", repository)
    monkeypatch.setenv("SPINF_CACHE_DIRS", f"{tmp_path / 'gone'}:{tmp_path / 'a'}::{tmp_path / 'b'}")
    for directory in (first, second, last):
        found = cache.find(REPO, REVISION)
        assert found.directory == directory
        (directory / "config.json").unlink()
    assert "gone of SPINF_CACHE_DIRS is no directory" in found.skipped[0]
    assert len(found.skipped) == 3
    assert cache.find(REPO, REVISION).directory is None


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json", SHARD])
def test_an_incomplete_snapshot_is_passed_over_with_the_file_at_fault(
    repository: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = lay_out(hub_cache(), repository)
    broken = lay_out(tmp_path / "extra", repository)
    monkeypatch.setenv("SPINF_CACHE_DIRS", str(tmp_path / "extra"))
    (broken / name).resolve().unlink()  # the link dangles, as after a blob's removal
    found = cache.find(REPO, REVISION)
    assert found.directory == whole
    assert name.removesuffix(".index.json") in found.skipped[0]


@pytest.mark.parametrize("change", [-1, -5000, 1])
def test_a_shard_of_another_length_is_never_served(repository: dict[str, bytes], change: int) -> None:
    shard = lay_out(hub_cache(), repository) / SHARD
    data = shard.read_bytes()
    shard.write_bytes(data[:change] if change < 0 else data + b"\0")
    assert SHARD in reasons()
    assert "its header says" in reasons()


def test_a_file_of_the_recorded_listing_must_be_there(repository: dict[str, bytes]) -> None:
    """A killed download may have all shards and lack a file that decides how text is read."""
    directory = lay_out(hub_cache(), repository)
    sizes = {name: len(data) for name, data in repository.items()}
    record_listing(directory.parents[1], sizes)
    assert cache.find(REPO, REVISION).directory == directory
    (directory / "tokenizer_config.json").unlink()
    assert "tokenizer_config.json is missing" in reasons()
    (directory / "tokenizer_config.json").write_bytes(repository["tokenizer_config.json"][:-1])
    assert "tokenizer_config.json has" in reasons()


@pytest.mark.parametrize(
    "listing", ["", "{", "[]", "[" * 100_000, '{"format_version": 2, "files": {"x.json": {"size": 1}}}', '"x"']
)
def test_an_unreadable_listing_counts_as_none(repository: dict[str, bytes], listing: str) -> None:
    directory = lay_out(hub_cache(), repository)
    record_listing(directory.parents[1], {})
    (directory.parents[1] / "trees" / f"{REVISION}.json").write_text(listing)
    assert cache.find(REPO, REVISION).directory == directory


def test_another_revision_is_foreign(
    repository: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(hub_cache(), repository, revision=OTHER)
    download_to(tmp_path / "plain" / "acme" / "tiny-model", repository, revision=OTHER)
    monkeypatch.setenv("SPINF_CACHE_DIRS", str(tmp_path / "plain"))
    assert reasons().count(f"holds revision {OTHER}, not {REVISION}") == 2


def test_a_repository_of_another_name_is_not_taken(repository: dict[str, bytes]) -> None:
    lay_out(hub_cache(), repository, repo="acme/tiny-model-2")
    lay_out(hub_cache(), repository, repo="other/tiny-model")
    assert reasons() == ""


def test_a_plain_directory_counts_by_what_its_download_recorded(
    repository: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    itself = download_to(tmp_path / "itself", repository)
    monkeypatch.setenv("SPINF_CACHE_DIRS", str(itself))
    assert cache.find(REPO, REVISION).directory == itself
    record = itself / ".cache" / "huggingface" / "download" / "config.json.metadata"
    text = record.read_text()

    record.write_text(text.replace(REVISION, OTHER))
    assert "several revisions" in reasons()
    record.unlink()
    assert "the revision of its config.json is not known" in reasons()
    record.write_text(text)
    os.utime(itself / SHARD, (time.time() + 60, time.time() + 60))
    assert f"{SHARD} was changed after its download" in reasons()


def test_a_directory_named_by_its_commit_is_known(
    repository: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = lay_out(tmp_path / "elsewhere", repository)
    (tmp_path / "extra" / "acme").mkdir(parents=True)
    (tmp_path / "extra" / "acme" / "tiny-model").symlink_to(directory)
    monkeypatch.setenv("SPINF_CACHE_DIRS", str(tmp_path / "extra"))
    assert cache.find(REPO, REVISION).directory == tmp_path / "extra" / "acme" / "tiny-model"


def test_odd_places_are_passed_over(
    repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file where a directory is expected, a loop of links, an empty snapshot."""
    (tmp_path / "file").write_text("")
    (tmp_path / "loop" / "models--acme--tiny-model").mkdir(parents=True)
    (tmp_path / "loop" / "models--acme--tiny-model" / "snapshots").symlink_to("snapshots")
    (tmp_path / "empty" / "models--acme--tiny-model" / "snapshots" / REVISION).mkdir(parents=True)
    monkeypatch.setenv("SPINF_CACHE_DIRS", ":".join(str(tmp_path / name) for name in ("file", "loop", "empty")))
    directory = lay_out(hub_cache(), repository)
    found = cache.find(REPO, REVISION)
    assert found.directory == directory
    assert len(found.skipped) == 3


def test_a_place_that_may_not_be_read_is_passed_over(
    repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = lay_out(hub_cache(), repository)
    is_dir = Path.is_dir

    def forbidden(path: Path) -> bool:
        if path == tmp_path / "extra":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", forbidden)
    monkeypatch.setenv("SPINF_CACHE_DIRS", str(tmp_path / "extra"))
    found = cache.find(REPO, REVISION)
    assert (found.directory, found.skipped) == (directory, (f"{tmp_path / 'extra'} cannot be read: Permission denied",))
