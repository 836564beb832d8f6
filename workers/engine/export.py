"""A checkpoint in full precision → one in static fp8, shard by shard; whole in its place or not there at all.

Linears of the decoder layers are quantized by the same functions that quantize at load time. Everything else, tensors
and files, is kept as it is. What is changed is marked: in each weight file's metadata, NOTICE and spinf_quantize.json.
"""

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from spinf_serve import __version__
from spinf_serve.progress import Moved, transfer
from spinf_serve.snapshots import files_digest
from workers.engine.errors import LoadError
from workers.engine.models import GemmaModel, model_config
from workers.engine.models.config import read_config
from workers.engine.quant import compressed_tensors, fp8
from workers.engine.quant.calibration import Calibration
from workers.engine.quant.compressed_tensors import Fp8Static, read_scales
from workers.engine.shard_writer import Entry, ShardWriter
from workers.engine.shards import INDEX, Shard, Snapshot, StoredTensor
from workers.engine.sizes import check_sizes
from workers.engine.weights import (
    check_copy,
    decoder_linears,
    float_blocks,
    stored_linears,
    text_name,
    weight_places,
)

RECORD = "spinf_quantize.json"
CARD, SOURCE_CARD, NOTICE = "README.md", "README.source.md", "NOTICE"
_FLOATS = ("F32", "BF16", "F16")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_LICENCES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights come from, as the record and the notice say it."""

    name: str
    revision: str
    weights: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a source becomes: stored linear → text name, its config, and stored copies of linears that are left out."""

    linears: dict[str, str]
    config: dict[str, Any]
    dropped: tuple[str, ...]


def weights_digest(directory: Path) -> str:
    """What a calibration belongs to: config.json and the weight files of a snapshot."""
    with Snapshot(directory) as snapshot:
        return files_digest([directory / "config.json", *(shard.path for shard in snapshot.shards)])


def source_of(directory: Path, name: str | None = None) -> Source:
    """What a snapshot directory is. In a Hub cache (models--OWNER--REPO/snapshots/COMMIT) the path says it."""
    path = directory.resolve()
    digest = weights_digest(path)
    repo, revision = path.parent.parent.name, path.name
    if path.parent.name == "snapshots" and repo.startswith("models--"):
        return Source(_text(name or repo.removeprefix("models--").replace("--", "/")), revision, digest)
    return Source(_text(name or path.name), digest, digest)


def _text(name: str) -> str:
    """A directory's name as text: it may hold bytes that are none."""
    return name.encode(errors="replace").decode()


def export_fp8(
    source_dir: Path,
    target_dir: Path,
    calibration: Calibration,
    *,
    name: str | None = None,
    card: Path | None = None,
    on_progress: Report | None = None,
) -> None:
    """Write `target_dir`, which must not exist. LoadError for a source or calibration that cannot be used.

    name  what the source is called; by default what its path says
    card  a README.md for the new checkpoint; the source's own is then kept as README.source.md
    """
    report = on_progress or (lambda _line: None)
    if os.path.lexists(target_dir):
        raise LoadError(f"{target_dir} exists already: nothing is overwritten")
    if card is not None and not (card.is_file() and os.access(card, os.R_OK)):  # before hours of work, not after
        raise LoadError(f"the card {card} is no file that can be read")
    if not any(path.name.upper().startswith(_LICENCES) for path in source_dir.iterdir()):
        report(f"no licence lies beside the weights in {source_dir}: add its notices before you pass the result on")
    report(f"hashing the weights in {source_dir}")
    source = source_of(source_dir, name)
    if calibration.weights_digest != source.weights:
        raise LoadError(
            f"the calibration belongs to other weights ({calibration.weights_digest}) than {source_dir} holds "
            f"({source.weights})"
        )
    with Snapshot(source_dir) as snapshot:
        plan = _plan(source_dir, snapshot, calibration)
        if plan.dropped:
            report(f"{len(plan.dropped)} weights are left out: they are copies of linears that are quantized")
        try:
            target_dir.parent.mkdir(parents=True, exist_ok=True)
            _check_space(target_dir.parent, snapshot, plan)
            with tempfile.TemporaryDirectory(prefix=f".{target_dir.name}.tmp-", dir=target_dir.parent) as temporary:
                work = Path(temporary) / target_dir.name
                work.mkdir()
                _write(work, source_dir, snapshot, plan, calibration, source, card, report)
                os.rename(work, target_dir)
        except OSError as error:
            raise LoadError(f"{target_dir} cannot be written: {error}") from None


def _plan(source_dir: Path, snapshot: Snapshot, calibration: Calibration) -> _Plan:
    """Checks everything that can be checked before anything is written."""
    config = read_config(source_dir)
    if Fp8Static.from_json(config) is not None:
        raise LoadError(f"{source_dir} is quantized already")
    read_scales(None, {}, snapshot.tensors)
    facts = model_config(source_dir)
    check_sizes(facts, source_dir)
    with torch.device("meta"):
        model = GemmaModel(facts)
    linears = stored_linears(model, snapshot)
    places = decoder_linears(model)
    calibration.check_names(places)
    for stored, text in linears.items():
        tensor = snapshot.tensors[stored + fp8.WEIGHT]
        if tensor.shape != places[text].shape:
            raise LoadError(f"weight {tensor.name} has shape {list(tensor.shape)}, expected {list(places[text].shape)}")
        if tensor.dtype not in _FLOATS:
            raise LoadError(f"weight {tensor.name} has type {tensor.dtype}: only {', '.join(_FLOATS)} are quantized")
    for tensor in snapshot.tensors.values():
        _ = tensor.torch_dtype  # refused when it cannot be copied
    dropped = _copies_of_linears(model, snapshot, linears)
    ignore = {"lm_head", *_other_linears(snapshot, {*linears, *(name.removesuffix(fp8.WEIGHT) for name in dropped)})}
    return _Plan(linears, {**config, "quantization_config": compressed_tensors.to_json(ignore)}, dropped)


def _copies_of_linears(model: GemmaModel, snapshot: Snapshot, linears: dict[str, str]) -> tuple[str, ...]:
    """Tensors that store a linear once more: the copy would stay in full precision and no longer be one.

    LoadError for a copy of anything with other values, and for a tensor that the loader would refuse.
    """
    places = weight_places(model)
    stored_as = {text_name(model, name): tensor for name, tensor in snapshot.tensors.items()}
    dropped = []
    for name, tensor in snapshot.tensors.items():
        text = text_name(model, name)
        if text in places:
            continue
        original = model.copy_of(text)
        if original in places:
            check_copy(tensor, stored_as[original])
            dropped += [name] if original.removesuffix(fp8.WEIGHT) in linears.values() else []
        elif model.unused_reason(text) is None:
            raise LoadError(f"the snapshot holds a weight that the model has no place for: {name}")
    return tuple(sorted(dropped))


def _other_linears(snapshot: Snapshot, known: set[str]) -> set[str]:
    """Modules outside the decoder with a matrix for a weight: readers of the format may think them quantized."""
    return {
        name.removesuffix(fp8.WEIGHT)
        for name, tensor in snapshot.tensors.items()
        if name.endswith(fp8.WEIGHT) and len(tensor.shape) >= 2 and name.removesuffix(fp8.WEIGHT) not in known
    }


def _check_space(parent: Path, snapshot: Snapshot, plan: _Plan) -> None:
    needed = sum(entry.num_bytes for shard in snapshot.shards for entry in _entries(shard, plan).values())
    if shutil.disk_usage(parent).free < needed:
        raise LoadError(f"{parent} has less than {needed / 1e9:.1f} GB free")


def _write(
    work: Path,
    source_dir: Path,
    snapshot: Snapshot,
    plan: _Plan,
    calibration: Calibration,
    source: Source,
    card: Path | None,
    report: Report,
) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(snapshot.shards, start=1):
        report(f"quantizing {shard.path.name} ({number} of {len(snapshot.shards)})")
        entries = _entries(shard, plan)
        if not entries:  # nothing but copies
            continue
        note = f"changed: linears of the decoder quantized to static fp8 from {source.name} {source.revision}"
        metadata = {"format": "pt", "spinf_quantize": note}
        with (
            transfer(report, shard.path.name) as moved,
            ShardWriter(work / shard.path.name, entries, metadata) as writer,
        ):
            _write_shard(writer, shard, plan, calibration, moved)
        weight_map |= dict.fromkeys(entries, shard.path.name)
        total += sum(entry.num_bytes for entry in entries.values())
    changed = ["config.json", *dict.fromkeys(weight_map.values())]
    _write_json(work / "config.json", plan.config)
    if (source_dir / INDEX).exists():
        changed.append(INDEX)
        _write_json(work / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    kept = _copy_others(source_dir, work, changed, card)
    _write_notice(work, source_dir, source, plan, changed, kept)
    _write_json(work / RECORD, _record(source, calibration, plan, changed, kept))


def _entries(shard: Shard, plan: _Plan) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name, tensor in shard.tensors.items():
        linear = name.removesuffix(fp8.WEIGHT)
        if name in plan.dropped:
            continue
        if linear not in plan.linears or not name.endswith(fp8.WEIGHT):
            entries[name] = Entry(tensor.dtype, tensor.shape)
            continue
        entries |= {stored: Entry(*kind) for stored, kind in fp8.layout(linear, tensor.shape).items()}
    return entries


def _write_shard(writer: ShardWriter, shard: Shard, plan: _Plan, calibration: Calibration, moved: Moved) -> None:
    done, total = 0, sum(tensor.num_bytes for tensor in shard.tensors.values())
    for name, tensor in shard.tensors.items():
        moved(done, total)
        done += tensor.num_bytes
        if name in plan.dropped:
            continue
        linear = name.removesuffix(fp8.WEIGHT)
        if linear in plan.linears and name.endswith(fp8.WEIGHT):
            _write_linear(writer, linear, tensor, calibration.scales[plan.linears[linear]])
            continue
        for _, rows in tensor.blocks():
            writer.write(name, rows)


def _write_linear(writer: ShardWriter, linear: str, tensor: StoredTensor, input_scale: float) -> None:
    try:
        for name, rows in fp8.pack(linear, float_blocks(tensor, None), input_scale):
            writer.write(name, rows)
    except ValueError as error:
        raise LoadError(f"weight {tensor.name} {error}") from None


def _copy_others(source_dir: Path, work: Path, changed: list[str], card: Path | None) -> list[str]:
    """Tokenizer, licence, notices and whatever else lies beside the weights, byte for byte. Returns their names."""
    kept = []
    for path in sorted(source_dir.iterdir()):
        name = SOURCE_CARD if card is not None and path.name == CARD else path.name
        if (
            not path.is_file()
            or path.name in (*changed, INDEX, RECORD)
            or path.suffix in _WEIGHT_FILES
            or path.name.startswith(".")
        ):
            continue
        shutil.copyfile(path, work / name)
        kept.append(name)
    if card is not None:
        shutil.copyfile(card, work / CARD)
    return kept


def _write_notice(
    work: Path, source_dir: Path, source: Source, plan: _Plan, changed: list[str], kept: list[str]
) -> None:
    """The source's own notice first, word for word, then what was changed."""
    own = (source_dir / NOTICE).read_bytes() if (source_dir / NOTICE).is_file() else b""
    text = (
        f"These weights are a changed form of {source.name}, revision {source.revision}.\n"
        f"The linear layers of the decoder were quantized to static fp8 by spinf-serve {__version__}; "
        "every other tensor is as it was.\n\n"
        "Changed files:\n" + "".join(f"  {name}\n" for name in changed) + "Files kept as they were:\n"
    )
    text += "".join(f"  {name}\n" for name in kept if name != NOTICE)
    if plan.dropped:
        text += "Weights left out, since each is a copy of another:\n" + "".join(f"  {name}\n" for name in plan.dropped)
    (work / NOTICE).write_bytes(own + (b"\n\n" if own else b"") + text.encode(errors="replace"))


def _record(
    source: Source, calibration: Calibration, plan: _Plan, changed: list[str], kept: list[str]
) -> dict[str, Any]:
    return {
        "format": "spinf-quantize-1",
        "scheme": "fp8s",
        "source": asdict(source),
        "calibration": {"sha256": calibration.digest, "corpus": calibration.record.get("corpus")},
        "linears": len(plan.linears),
        "changed": changed,
        "kept": kept,
        "dropped": list(plan.dropped),
        "tools": tool_versions(),
    }


def tool_versions() -> dict[str, str]:
    """What computed the codes."""
    return {"spinf_serve": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
