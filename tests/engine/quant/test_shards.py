"""Safetensors files, read and written block by block."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.engine import shards
from workers.engine.errors import LoadError
from workers.engine.shard_writer import Entry, ShardWriter
from workers.engine.shards import Shard, Snapshot

TENSORS = {
    "a": torch.randn(70, 13),
    "b": torch.randn(5, 3, 2).bfloat16(),
    "c": torch.tensor(7.5, dtype=torch.float16),
    "d": torch.zeros(0, 4),
    "e": torch.randn(33, 9).to(torch.float8_e4m3fn),
    "f": torch.arange(11),
    "g": torch.zeros(4, 0),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.mark.parametrize("block_bytes", [1, 60, 1 << 20])
def test_blocks_make_up_the_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", block_bytes)
    with Snapshot(folder) as snapshot:
        assert snapshot.tensors.keys() == TENSORS.keys()
        for name, expected in TENSORS.items():
            read = snapshot.tensors[name].read()
            assert (read.shape, read.dtype) == (expected.shape, expected.dtype)
            assert torch.equal(bits(read), bits(expected))
        sizes = [len(rows) for _, rows in snapshot.tensors["a"].blocks()]
        assert sizes == [max(1, min(70, block_bytes // 52))] * (len(sizes) - 1) + sizes[-1:]
        assert sum(sizes) == 70


def test_the_buffer_stays_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", 520)
    with Snapshot(folder) as snapshot:
        addresses = {rows.data_ptr() for _, rows in snapshot.tensors["a"].blocks()}
        assert len(addresses) == 1
        assert snapshot.shards[0]._buffer.nbytes <= 2 * 520


def test_other_types_may_lie_there_unread(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with Snapshot(tmp_path) as snapshot, pytest.raises(LoadError, match="x has type F4"):
        snapshot.tensors["x"].read()


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in ("one.safetensors", "two.safetensors"):
        save_file({"same": torch.zeros(2)}, tmp_path / file)
    index = {"weight_map": {"same": "one.safetensors", "other": "two.safetensors"}}
    (tmp_path / shards.INDEX).write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"same is stored twice: the second time in .*two\.safetensors"):
        Snapshot(tmp_path)


HEADERS = {
    "not json": b"{]",
    "a list": b"[1]",
    "no offsets": b'{"x": {"dtype": "F32", "shape": [1]}}',
    "negative": b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    "beyond the end": b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
    "backwards": b'{"x": {"dtype": "F32", "shape": [0], "data_offsets": [4, 0]}}',
    "wrong size": b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    "a shape of no number": b'{"x": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
    "a type of no name": b'{"x": {"dtype": 4, "shape": [1], "data_offsets": [0, 4]}}',
    "nested too deeply": b"[" * 100_000,
    "a name twice": b'{"x": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}, '
    b'"x": {"dtype": "F16", "shape": [1], "data_offsets": [2, 4]}}',
    "overlapping": b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
    b'"y": {"dtype": "F16", "shape": [1], "data_offsets": [2, 4]}}',
    "one place for two": b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
    b'"y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "a gap": b'{"x": {"dtype": "F16", "shape": [1], "data_offsets": [2, 4]}}',
    "text shape": b'{"x": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers_are_refused_with_the_file(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(HEADERS[case]).to_bytes(8, "little") + HEADERS[case] + b"\0" * 4)
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        Shard(path)


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 8, b"\xff" * 30])
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(LoadError, match="not a safetensors file"):
        Shard(path)


def test_a_file_cut_off_while_it_is_read_is_an_error(folder: Path) -> None:
    with Snapshot(folder) as snapshot:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(snapshot.tensors["a"].offset + 100)
        with pytest.raises(LoadError, match="cut off"):
            snapshot.tensors["a"].read()


def test_what_is_written_is_read_by_the_library(tmp_path: Path) -> None:
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3",
             torch.int64: "I64"}  # fmt: skip
    entries = {name: Entry(names[tensor.dtype], tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    path = tmp_path / "out.safetensors"
    with ShardWriter(path, entries, {"format": "pt"}) as writer:
        for name in sorted(TENSORS, reverse=True):
            tensor = TENSORS[name]
            for rows in tensor.split(4) if tensor.dim() else [tensor]:  # type: ignore[no-untyped-call]
                writer.write(name, rows)
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(bits(read[name]), bits(TENSORS[name])) for name in TENSORS)
    save_file(TENSORS, tmp_path / "library.safetensors", {"format": "pt"})
    assert path.read_bytes() == (tmp_path / "library.safetensors").read_bytes()


def test_a_writer_takes_exactly_what_was_declared(tmp_path: Path) -> None:
    entries = {"x": Entry("F32", (4, 2))}
    with pytest.raises(ValueError, match="not written whole"), ShardWriter(tmp_path / "1", entries, {}) as writer:
        writer.write("x", torch.zeros(3, 2))
    with pytest.raises(ValueError, match="more rows"), ShardWriter(tmp_path / "2", entries, {}) as writer:
        writer.write("x", torch.zeros(5, 2))
    with pytest.raises(ValueError, match="is to be F32"), ShardWriter(tmp_path / "3", entries, {}) as writer:
        writer.write("x", torch.zeros(4, 2).bfloat16())
