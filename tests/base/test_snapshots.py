"""Snapshots: completeness, content revision, the converted demo model."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from spinf_serve import snapshots
from spinf_serve.manifests import Catalog
from spinf_serve.refusal import StartRefused
from spinf_serve.snapshots import SnapshotError, check_snapshot, content_revision

INDEX = "model.safetensors.index.json"


def make_sharded(directory: Path) -> Path:
    directory.mkdir()
    weight_map = {}
    for i in (1, 2):
        name = f"model-0000{i}-of-00002.safetensors"
        save_file({f"w{i}": np.full((4, 4), i, np.float32)}, directory / name)
        weight_map[f"w{i}"] = name
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "gemma3_text"}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_sharded(tmp_path / "sharded")


def test_a_complete_snapshot_lists_its_shards(sharded: Path, tiny_checkpoint: Path) -> None:
    assert [path.name for path in check_snapshot(sharded)] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert [path.name for path in check_snapshot(tiny_checkpoint)] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors", INDEX])
def test_a_missing_file_is_named(sharded: Path, name: str) -> None:
    (sharded / name).unlink()
    with pytest.raises(SnapshotError, match=name.split(".")[0]):
        check_snapshot(sharded)


def test_one_file_next_to_other_weights_counts_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, copy := tmp_path / "copy")
    (copy / "consolidated.safetensors").write_bytes(b"another format")
    assert [path.name for path in check_snapshot(copy)] == ["model.safetensors"]


def test_a_file_that_the_index_does_not_know_is_ambiguous(sharded: Path) -> None:
    """Readers differ in which of the two they take: neither is guessed."""
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / "model.safetensors")
    with pytest.raises(SnapshotError, match="ambiguous snapshot"):
        check_snapshot(sharded)


def truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


@pytest.mark.parametrize("cut", [1, 64, -4, -8, -9999])
def test_a_shard_of_another_length_is_incomplete(sharded: Path, cut: int) -> None:
    """A download that stopped: at the last byte, in the data, in the header, in its length, at nothing."""
    shard = sharded / "model-00002-of-00002.safetensors"
    size = shard.stat().st_size
    truncate(shard, max(0, size - cut if cut > 0 else 4 - cut if cut > -9 else 0))
    with pytest.raises(SnapshotError, match="model-00002"):
        check_snapshot(sharded)


def test_a_longer_shard_is_refused(sharded: Path) -> None:
    with (sharded / "model-00001-of-00002.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(SnapshotError, match="its header says"):
        check_snapshot(sharded)


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"\x10" + b"\0" * 7 + b"not json at all!", b"<html>sign in</html>"])
def test_a_shard_that_is_something_else_is_refused(sharded: Path, data: bytes) -> None:
    (sharded / "model-00001-of-00002.safetensors").write_bytes(data)
    with pytest.raises(SnapshotError, match="model-00001"):
        check_snapshot(sharded)


def test_a_tensor_of_the_index_that_its_shard_lacks_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["w3"] = "model-00002-of-00002.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(SnapshotError, match="lacks w3"):
        check_snapshot(sharded)


@pytest.mark.parametrize(
    "offsets",
    ['[0, 4]}, "b": {"data_offsets": [0, 4]', '[0, 4]}, "a": {"data_offsets": [0, 4]', "[2, 4]", "5"],
    ids=["overlap", "a name twice", "gap", "a number"],
)
def test_a_shard_whose_tensors_do_not_follow_each_other_is_refused(sharded: Path, offsets: str) -> None:
    header = f'{{"a": {{"data_offsets": {offsets}}}}}'.encode()
    shard = sharded / "model-00001-of-00002.safetensors"
    shard.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(SnapshotError, match=r"model-00001.* (is damaged|is not a safetensors file)"):
        check_snapshot(sharded)


DEEP = "[" * 100_000


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00001-of-00002.safetensors"])
def test_what_is_nested_too_deeply_is_refused(sharded: Path, name: str) -> None:
    length = len(DEEP).to_bytes(8, "little") if name.endswith(".safetensors") else b""
    (sharded / name).write_bytes(length + DEEP.encode())
    with pytest.raises(StartRefused, match=name):
        snapshots.resolve(Catalog.load([]).resolve(str(sharded)))


def test_a_pipe_is_not_waited_for(sharded: Path) -> None:
    shard = sharded / "model-00001-of-00002.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(SnapshotError, match="is no file"):
        check_snapshot(sharded)


@pytest.mark.parametrize("index", ["{", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"w": "../x.safetensors"}}'])
def test_an_unusable_index_is_refused(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    with pytest.raises(SnapshotError, match="unusable index"):
        check_snapshot(sharded)


@pytest.mark.parametrize("name", ["w\n\x1b[31m1", "w" * 100_000], ids=["control characters", "long"])
@pytest.mark.parametrize("where", ["header", "index", "shard name"])
def test_a_name_that_no_message_should_show_is_refused_without_it(sharded: Path, name: str, where: str) -> None:
    shard = "model-00001-of-00002.safetensors"
    if where == "header":
        save_file({"w1": np.zeros(4, np.float32), name: np.zeros(4, np.float32)}, sharded / shard)
    else:
        entry = {name: shard} if where == "index" else {"w1": name}
        (sharded / INDEX).write_text(json.dumps({"weight_map": {**entry, "w2": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(SnapshotError, match=r"header cannot be read|unusable index") as refused:
        check_snapshot(sharded)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_the_revision_covers_every_byte(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_CHUNK", 4096)
    shutil.copytree(tiny_checkpoint, copy := tmp_path / "copy")
    shards = check_snapshot(copy)
    first = content_revision(copy, shards)
    assert first == content_revision(tiny_checkpoint, check_snapshot(tiny_checkpoint))
    weights = bytearray(shards[0].read_bytes())
    for position in (len(weights) - 1, 5000, 9000):  # the last block, the second, the third
        weights[position] ^= 1
        shards[0].write_bytes(weights)
        assert content_revision(copy, shards) != first
        weights[position] ^= 1
        shards[0].write_bytes(weights)
    assert content_revision(copy, shards) == first
    for name in ("config.json", "tokenizer.json"):
        text = (copy / name).read_text()
        (copy / name).write_text(text + " ")
        assert content_revision(copy, shards) != first
        (copy / name).write_text(text)


def test_swapped_blocks_are_another_revision(sharded: Path) -> None:
    shards = check_snapshot(sharded)
    first = content_revision(sharded, shards)
    one, two = (path.read_bytes() for path in shards)
    shards[0].write_bytes(two)
    shards[1].write_bytes(one)
    assert content_revision(sharded, shards) != first


def test_a_local_directory_is_resolved(tiny_checkpoint: Path) -> None:
    served = snapshots.resolve(Catalog.load([]).resolve(str(tiny_checkpoint)))
    assert Path(served.snapshot_dir) == tiny_checkpoint.resolve()
    assert served.requested == str(tiny_checkpoint)
    assert served.revision.startswith("sha256:")
    assert served.capabilities == ("score",)
    assert (served.media, served.family) == ((), "gemma3")


def test_model_dir_replaces_the_source_and_must_fit_the_manifest(tiny_checkpoint: Path) -> None:
    catalog = Catalog.load([])
    served = snapshots.resolve(catalog.resolve("demo", str(tiny_checkpoint)))
    assert (served.id, served.snapshot_dir) == ("gemma-3-270m", str(tiny_checkpoint.resolve()))
    with pytest.raises(StartRefused, match="gemma3 model"):
        snapshots.resolve(catalog.resolve("spinf-12b", str(tiny_checkpoint)))


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="no such snapshot directory"):
        snapshots.resolve(Catalog.load([]).resolve("demo", str(tmp_path / "gone")))


@pytest.fixture
def fake_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The demo conversion replaced by a small copy; the list holds where it was called to write."""
    calls: list[Path] = []
    original = make_sharded(tmp_path / "original")

    def convert(target: Path, on_progress: object = None) -> None:
        calls.append(target)
        shutil.copytree(original, target, dirs_exist_ok=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.metadata.version", lambda _package: "1.0.0")
    monkeypatch.setattr("spinf_serve.demo.convert_demo", convert)
    return calls


def resolve_demo() -> Path:
    return Path(snapshots.resolve(Catalog.load([]).resolve("demo")).snapshot_dir)


def test_the_demo_is_converted_once(fake_conversion: list[Path], tmp_path: Path) -> None:
    first = resolve_demo()
    assert first == resolve_demo()
    assert len(fake_conversion) == 1
    assert first.parent == tmp_path / "cache" / "spinf-serve" / "snapshots"
    assert {path.name for path in first.parent.iterdir()} == {first.name, f".{first.name}.lock"}
    assert "1.0.0" in first.name


def test_several_at_once_convert_once(fake_conversion: list[Path]) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_demo())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    assert len(fake_conversion) == 1


def test_a_damaged_conversion_is_made_again(fake_conversion: list[Path]) -> None:
    target = resolve_demo()
    revision = (target / snapshots.REVISION_FILE).read_text()
    truncate(target / "model-00001-of-00002.safetensors", 50)
    assert resolve_demo() == target
    assert len(fake_conversion) == 2
    assert (target / snapshots.REVISION_FILE).read_text() == revision


def test_a_failed_conversion_leaves_nothing(
    fake_conversion: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(target: Path, on_progress: object = None) -> None:
        (target / "config.json").write_text("{}")
        raise RuntimeError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("spinf_serve.demo.convert_demo", fail)
        with pytest.raises(RuntimeError, match="no space"):
            resolve_demo()
    left = list((tmp_path / "cache" / "spinf-serve" / "snapshots").iterdir())
    assert [path.suffix for path in left] == [".lock"]
    assert check_snapshot(resolve_demo())


def test_what_a_killed_conversion_left_is_removed(fake_conversion: list[Path], tmp_path: Path) -> None:
    target = resolve_demo()
    shutil.rmtree(target)
    left = target.parent / f".{target.name}.tmp-dead"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    resolve_demo()
    assert not left.exists()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    catalog = Catalog.load([])
    choice = catalog.resolve("demo")
    assert choice.manifest.source is not None
    source = choice.manifest.source.model_copy(update={"package": "no-such-package-here"})
    other = choice.manifest.model_copy(update={"source": source})
    with pytest.raises(SnapshotError, match=r"pip install spinf-serve\[demo\]"):
        snapshots.resolve(snapshots.ModelChoice(other, None, "demo"))


def test_another_version_of_the_package_is_refused(
    fake_conversion: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _package: "2.0.0")
    with pytest.raises(SnapshotError, match=r"2\.0\.0 is installed, 1\.0\.0 is needed"):
        resolve_demo()


def test_an_unwritable_cache_names_the_variable(
    fake_conversion: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SnapshotError, match="XDG_CACHE_HOME"):
        resolve_demo()


def test_a_user_without_a_home_is_told_what_to_set(
    fake_conversion: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(SnapshotError, match="XDG_CACHE_HOME"):
        resolve_demo()


def test_snapshots_need_no_torch(tiny_checkpoint: Path) -> None:
    code = (
        "import sys; from spinf_serve import snapshots; from spinf_serve.manifests import Catalog\n"
        "snapshots.resolve(Catalog.load().resolve(sys.argv[1]))\n"
        "assert not {'torch', 'zmq', 'tokenizers', 'fastapi'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_checkpoint)], check=True, env=dict(os.environ), timeout=60)
