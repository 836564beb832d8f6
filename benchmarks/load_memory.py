"""Host memory while a snapshot is loaded, above the model's own size: a random checkpoint, loaded in a fresh process.

    python -m benchmarks.load_memory [--gigabytes 4] [--dtype BF16] [--folder DIR]

Writes the checkpoint (of Gemma 3's shape) into a temporary folder of DIR and removes it. Prints the peak of the
resident memory, mapped files included, while `ScoringEngine.load` runs, and what is left without the model's tensors.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from workers.engine.quant import fp8
from workers.engine.quant.compressed_tensors import to_json
from workers.engine.shard_writer import Entry, ShardWriter
from workers.engine.shards import DTYPES

HIDDEN, INNER, HEAD, VOCABULARY = 2304, 9216, 256, 262_144
CONFIG = {
    "model_type": "gemma3_text", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "head_dim": HEAD, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 512,
}  # fmt: skip
CHILD = """
import resource, sys
from pathlib import Path
from benchmarks.load_memory import engine_config
from workers.engine.engine import ScoringEngine
engine = ScoringEngine.load(engine_config(Path(sys.argv[1])))
model = engine._runner.model
size = sum(p.numel() * p.element_size() for p in model.parameters())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, size, engine.info.load_s)
"""


def engine_config(snapshot: Path) -> Any:
    """The settings of an engine on a local snapshot."""
    from spinf_serve.config import EngineConfig, ServedModel

    model = ServedModel(
        id="random", name="random", aliases=(), requested="", family="gemma3", head="lm_head", capabilities=("score",),
        media=(), prompt_style="default", base_model="", revision="", snapshot_dir=str(snapshot),
    )  # fmt: skip
    return EngineConfig(model=model, device="cpu", warmup="none", token_budget=256, max_tokens=1024)


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    hidden, inner, head = HIDDEN, INNER, HEAD
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        at = f"model.layers.{i}"
        linears = {"q_proj": (8 * head, hidden), "k_proj": (4 * head, hidden), "v_proj": (4 * head, hidden)}
        out |= {f"{at}.self_attn.{name}.weight": shape for name, shape in linears.items()}
        out |= {f"{at}.self_attn.o_proj.weight": (hidden, 8 * head), f"{at}.mlp.down_proj.weight": (hidden, inner)}
        out |= {f"{at}.mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
        out |= {f"{at}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        out |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in norms}
    return out


def kinds(layers: int, dtype: str) -> dict[str, Entry]:
    """The stored tensors; with F8_E4M3 the linears of the layers are static fp8 and everything else is BF16."""
    if dtype != "F8_E4M3":
        return {name: Entry(dtype, shape) for name, shape in shapes(layers).items()}
    out: dict[str, Entry] = {}
    for name, shape in shapes(layers).items():
        if name.endswith("_proj.weight"):
            stored = fp8.layout(name.removesuffix(".weight"), shape)
            out |= {part: Entry(*kind) for part, kind in stored.items()}
        else:
            out[name] = Entry("BF16", shape)
    return out


def write_checkpoint(folder: Path, gigabytes: float, dtype: str) -> int:
    """One model.safetensors of about this size; returns its bytes."""
    fixed = sum(entry.num_bytes for entry in kinds(0, dtype).values())
    layer = sum(entry.num_bytes for entry in kinds(1, dtype).values()) - fixed
    count = max(1, round((gigabytes * 1e9 - fixed) / layer))
    quantization = {"quantization_config": to_json(["lm_head"])} if dtype == "F8_E4M3" else {}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **quantization, "num_hidden_layers": count}))
    generator = torch.Generator().manual_seed(0)
    entries = kinds(count, dtype)
    with ShardWriter(folder / "model.safetensors", entries, {"format": "pt"}) as writer:
        for name, entry in entries.items():
            for first in range(0, entry.shape[0], 4096):
                rows = min(4096, entry.shape[0] - first)
                block = torch.rand(rows, *entry.shape[1:], generator=generator) * 0.02
                writer.write(name, block.to(DTYPES[entry.dtype]))
    return (folder / "model.safetensors").stat().st_size


def main() -> None:
    """Write, load in a child, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--dtype", choices=("BF16", "F32", "F8_E4M3"), default="BF16")
    parser.add_argument("--folder", type=Path, default=None, help="where the temporary checkpoint goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        stored = write_checkpoint(Path(folder), arguments.gigabytes, arguments.dtype)
        print(f"checkpoint: {stored / 1e9:.2f} GB of {arguments.dtype}", flush=True)
        run = subprocess.run([sys.executable, "-c", CHILD, folder], check=True, capture_output=True, text=True)
    peak, model, seconds = map(float, run.stdout.split())
    print(f"model in memory: {model / 1e9:.2f} GB (float32), loaded in {seconds:.1f} s")
    print(f"peak of the process: {peak / 1e9:.2f} GB, {(peak - model) / 1e9:.2f} GB above the model")


if __name__ == "__main__":
    main()
