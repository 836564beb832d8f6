"""Every kernel beside its floor, and the whole forward beside the products of the library.

    python -m benchmarks.kernel_speed [--model gemma-4-12b] [--rows 16384 1272] [--snapshot DIR] [--jobs FILE]
        [--only PART ...] [--forward] [--quant fp8s]

A kernel is timed only after its result on a part of its input was held against its reference; one that fails says so in
its row, the others go on. floor: the larger of its bytes over the bandwidth of a copy and its FLOP over the rate of a
large library product, both measured in this run. Between two calls the L2 cache is swept.

--snapshot DIR gives the tokenizer, so that attention runs on the first full pass of the job set instead of one of the
same shape (contents of 512 tokens, 56 questions of 12). --forward runs that pass through the snapshot's whole model and
lists where the GPU's time goes; it then wants the snapshot of a model with all its layers.
"""

import argparse
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import workers.engine  # noqa: F401 - before torch
from benchmarks.ceilings import (
    LIBRARY,
    Ceilings,
    Product,
    Timer,
    check_product,
    draw,
    library_seconds,
    measure_ceilings,
    model_products,
    product_flops,
)
from benchmarks.job_speed import DEFAULT_JOBS
from benchmarks.passes import job_pass, row_positions, synthetic_pass
from benchmarks.probes import machine, trace_gpu
from benchmarks.shapes import FULL, MODELS, Json
from workers.engine.kernels.encoding import Codes, Encoding
from workers.engine.kernels.rotary import HeadLayout, rotary_table
from workers.engine.packing import PackedPass

PARTS = ("library", "linears", "streams", "attention", "head")
EPS = 1e-6
SCALE = 2.0**-5
_CHECK_ROWS = 48


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a kernel's call, how often a forward makes it, and the least it must move and compute."""

    name: str
    calls: int
    num_bytes: float
    flops: float
    rate: float  # FLOP per second that its arithmetic could reach
    check: Callable[[], None]
    run: Callable[[], object]


class Bench:
    """One model's shapes on one device."""

    def __init__(self, text: Json, timer: Timer, ceilings: Ceilings) -> None:
        self.text, self.timer, self.ceilings, self.device = text, timer, ceilings, timer.device
        self.layers = Counter(text["layer_types"])
        self.static = Encoding("fp8_static", torch.bfloat16, torch.tensor([SCALE], device=self.device))
        self.bf16 = Encoding("float", torch.bfloat16)

    def layout(self, kind: str) -> HeadLayout:
        """The heads of a layer type."""
        text, full = self.text, kind == FULL
        return HeadLayout(
            text["num_attention_heads"],
            text["num_global_key_value_heads" if full else "num_key_value_heads"],
            text["global_head_dim" if full else "head_dim"],
            shared_kv=full and text["attention_k_eq_v"],
        )

    # Products

    def linears(self, rows: int) -> Iterator[Row]:
        """The schemes whose products are not the library's, shape by shape."""
        from workers.engine.kernels.linear import kernel

        counts = Counter((p.k, p.o) for p in model_products(self.text))
        kinds = (("bf16", torch.bfloat16, torch.bfloat16), ("w8a16", torch.bfloat16, torch.int8))
        for name, of_x, of_weight in (*kinds, ("w8a8", torch.int8, torch.int8)):
            for (k, o), calls in counts.items():
                x, weight = draw(self.device, rows, k, dtype=of_x), draw(self.device, o, k, seed=1, dtype=of_weight)
                row_scale = torch.full((rows,), SCALE, device=self.device) if of_x == torch.int8 else None
                channel = torch.full((o,), SCALE, device=self.device) if of_weight == torch.int8 else None
                factor = (1.0 if row_scale is None else SCALE) * (1.0 if channel is None else SCALE)
                run = partial(kernel.linear, x, weight, row_scale, channel)
                moved = x.nbytes + weight.nbytes + 2.0 * rows * o
                flops = product_flops([Product("", k, o)], rows)
                rate = self.ceilings.fp8 if name == "w8a8" else self.ceilings.bf16

                def check(run: Any = run, x: Tensor = x, weight: Tensor = weight, factor: float = factor) -> None:
                    check_product("linear", run(), x, weight, factor, fast=False)

                yield Row(f"linear {name} {k}x{o}", calls, moved, flops, rate, check, run)

    # What streams activations

    def streams(self, rows: int) -> Iterator[Row]:
        """Norms, gated gelu, head norms with rotary, encode; the inputs' encoding is that of fp8s."""
        from tests.support import streams
        from workers.engine.kernels.encode import kernel as encode
        from workers.engine.kernels.gelu_mul import kernel as gelu
        from workers.engine.kernels.rms_norm import kernel as norm
        from workers.engine.kernels.rotary import kernel as rotary

        hidden, inner, count = self.text["hidden_size"], self.text["intermediate_size"], sum(self.layers.values())
        device, few = self.device, min(rows, _CHECK_ROWS)
        x, h = draw(device, rows, hidden, dtype=torch.float32), draw(device, rows, hidden, seed=1)
        scales = [draw(device, hidden, seed=seed, dtype=torch.float32) for seed in (2, 3)]
        scalar = torch.tensor([1.25], device=device)
        yield self._stream(
            "norm_encode", 1, rows * hidden * 5,
            partial(streams.check_norm, norm.norm_encode, x[:few], scales[0], self.static),
            partial(norm.norm_encode, x, scales[0], EPS, self.static),
        )  # fmt: skip
        for name, one in (("before the MLP", None), ("at the layer's end", scalar)):
            args = (scales[0], one, scales[1])
            yield self._stream(
                f"residual_norm {name}", count, rows * hidden * 11,
                partial(streams.check_residual, norm.residual_norm, x[:few], h[:few], *args, self.static),
                partial(norm.residual_norm, x, h, *args, EPS, self.static),
            )  # fmt: skip
        gate_up, pending = draw(device, rows, 2 * inner, seed=4), torch.tensor([0.5, 2.0], device=device)
        yield self._stream(
            "gelu_mul_encode", count, rows * inner * 5,
            partial(streams.check_gelu, gelu.gelu_mul_encode, gate_up[:few], pending, self.static),
            partial(gelu.gelu_mul_encode, gate_up, self.static, pending),
        )  # fmt: skip
        for kind, calls in self.layers.items():
            yield self._rotary(rotary.qkv_norm_rotary, kind, calls, rows)
        wide = draw(device, rows, self.layout(FULL).num_heads * self.layout(FULL).head_dim, seed=5)

        def check_encode() -> None:
            y = wide[:few].double() / SCALE
            streams.check_encoded(encode.encode(wide[:few], self.static), y * SCALE, y * 0, self.static)

        yield self._stream(
            "encode (not in fp8s)", 0, wide.numel() * 3, check_encode, partial(encode.encode, wide, self.static)
        )

    def _rotary(self, op: Any, kind: str, calls: int, rows: int) -> Row:
        from tests.support import streams

        layout = self.layout(kind)
        qkv = draw(self.device, rows, layout.width, seed=6)
        scales = [draw(self.device, layout.head_dim, seed=seed, dtype=torch.float32) for seed in (7, 8)]
        frequencies = 10_000.0 ** -(torch.arange(0, layout.head_dim, 2, device=self.device) / layout.head_dim)
        cos, sin = rotary_table(torch.arange(rows, device=self.device), frequencies)
        pending = torch.tensor([0.5, 2.0, 0.25], device=self.device)[: len(layout.parts)]
        written = (layout.num_heads + 2 * layout.num_kv_heads) * layout.head_dim
        moved = rows * (2 * layout.width + 2 * written + 4 * layout.head_dim)

        def adapted(*args: Any, norm_v: bool, pending: Tensor | None, extra_rows: int) -> tuple[Tensor, ...]:
            return op(*args, norm_v, pending, extra_rows)  # type: ignore[no-any-return]

        return self._stream(
            f"qkv_norm_rotary {kind.partition('_')[0]}", calls, moved,
            lambda: streams.check_rotary(adapted, min(rows, _CHECK_ROWS), layout, True, True),
            lambda: op(qkv, layout, *scales, cos, sin, EPS, True, pending, 0),
        )  # fmt: skip

    def _stream(self, name: str, calls: int, moved: float, check: Callable[[], None], run: Callable[[], object]) -> Row:
        return Row(name, calls, moved, 0.0, self.ceilings.bf16, check, run)

    # Attention and head

    def attention(self, packed: PackedPass) -> Iterator[Row]:
        """Both layer types over one pass, straight to the codes of the next product."""
        from workers.engine.kernels.tree_attention import kernel
        from workers.engine.staging import DeviceBuffer, HostBuffer

        rows, positions = len(packed.tokens), torch.from_numpy(row_positions(packed))
        for kind, calls in self.layers.items():
            layout, window = self.layout(kind), None if kind == FULL else self.text["sliding_window"]
            heads, d = layout.num_heads, layout.head_dim
            q = draw(self.device, rows, heads, d, seed=1) * (3 / d**0.5)  # scores of a standard deviation of 3
            k, v = (draw(self.device, rows, layout.num_kv_heads, d, seed=seed) for seed in (2, 3))
            buffer = HostBuffer()
            key = layout.group, d
            staged = kernel.stage(packed.segments, buffer, {key: (window,)}, rows=rows)
            plan = kernel.on_device(staged[key], DeviceBuffer(buffer.pack(pinned=False), self.device))
            seen = (positions + 1).clamp(max=window or rows).sum().item()
            moved = q.nbytes + k.nbytes + v.nbytes + rows * heads * d
            yield Row(
                f"tree_attention {kind.partition('_')[0]}", calls, moved, 4.0 * d * heads * seen, self.ceilings.bf16,
                partial(self._check_attention, packed, q, k, v, plan, window),
                partial(kernel.tree_attention, q, k, v, (), plan, window=window, encoding=self.static),
            )  # fmt: skip

    def _check_attention(
        self, packed: PackedPass, q: Tensor, k: Tensor, v: Tensor, plan: Any, window: int | None
    ) -> None:
        """Some rows in bf16 against float64 over their paths; weights and sums carry bf16's 2^-9."""
        from workers.engine.kernels.tree_attention import kernel
        from workers.engine.kernels.tree_attention.segments import chains, cut

        ours = kernel.tree_attention(q, k, v, (), plan, window=window, encoding=self.bf16)
        assert isinstance(ours, Tensor)
        codes = kernel.tree_attention(q, k, v, (), plan, window=window, encoding=self.static)
        assert isinstance(codes, Codes)
        found = chains(packed.segments)
        for chain in found[:: max(1, len(found) // 24)]:
            row, position = chain.start + chain.rows - 1, chain.position + chain.rows - 1
            first = 0 if window is None else max(0, position - window + 1)
            pieces = cut(chain.path, first, position + 1)
            keys, values = (torch.cat([x[a : a + m] for _, a, m in pieces]).double() for x in (k, v))
            group = q.shape[1] // k.shape[1]
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
            weights = torch.softmax(torch.einsum("hd,lhd->hl", q[row].double(), keys), dim=1)
            expected = torch.einsum("hl,lhd->hd", weights, values).flatten()
            for got, bound in ((ours[row].double(), 2.0**-7), (codes.values[row].double() * SCALE, 2.0**-4)):
                off = float((got - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
                assert off <= bound, f"row {row} is off by {off:.1e}"

    def head(self, rows: int) -> Iterator[Row]:
        """`rows` rows, two options each."""
        from workers.engine.kernels.lm_head import kernel

        vocabulary, hidden, cap = self.text["vocab_size"], self.text["hidden_size"], 30.0
        weight = draw(self.device, vocabulary, hidden, seed=1) / hidden**0.5
        x = draw(self.device, rows, hidden, dtype=torch.float32) * 6
        entry_rows = torch.arange(rows, device=self.device).repeat_interleave(2)
        entry_cols = torch.randint(0, vocabulary, (2 * rows,), device=self.device)

        def check() -> None:
            ours = kernel.lm_head_logprobs(x, weight, entry_rows, entry_cols, cap)
            few = min(8, rows)
            logits = cap * torch.tanh((x[:few].bfloat16().float() @ weight.float().t()) / cap)
            expected = torch.log_softmax(logits.double(), dim=1)[entry_rows[: 2 * few], entry_cols[: 2 * few]]
            off = float((ours[: 2 * few].double() - expected).abs().max())
            assert off <= 1e-3, f"log-probabilities are off by {off:.1e}"

        moved, flops = weight.nbytes + x.nbytes, 2.0 * rows * vocabulary * hidden
        run = partial(kernel.lm_head_logprobs, x, weight, entry_rows, entry_cols, cap)
        yield Row(f"lm_head {rows} rows", 1, moved, flops, self.ceilings.bf16, check, run)

    def report(self, rows: Iterator[Row]) -> float:
        """Check, time and print each; returns the milliseconds of a whole forward that they stand for."""
        total = 0.0
        while True:
            name = "?"
            try:
                row = next(rows, None)
                if row is None:
                    return total
                name = row.name
                row.check()
                seconds = self.timer.seconds(row.run)
            except Exception as error:
                traceback.print_exc()
                print(f"{name:36} FAILED: {type(error).__name__}: {str(error)[:160]}", flush=True)
                if name == "?":  # a generator that raised is at its end
                    return total
                continue
            floor = max(row.num_bytes / self.ceilings.copy, row.flops / row.rate)
            total += row.calls * seconds * 1e3
            print(
                f"{name:36} {seconds * 1e6:10.1f} {floor * 1e6:10.1f} {floor / seconds:6.2f} "
                f"{row.num_bytes / seconds / 1e12:7.2f} {row.flops / seconds / 1e12:8.0f} {row.calls:5d} "
                f"{row.calls * seconds * 1e3:9.2f}",
                flush=True,
            )


HEADER = f"{'kernel':36} {'us':>10} {'floor us':>10} {'share':>6} {'TB/s':>7} {'TFLOP/s':>8} {'calls':>5} {'ms':>9}"


def print_library(timer: Timer, text: Json, rows: int, repeats: int = 3) -> dict[str, float]:
    """The ceilings over the whole model; returns seconds by kind."""
    products = model_products(text)
    seconds = library_seconds(timer, products, rows, LIBRARY, repeats)
    for name, spent in seconds.items():
        rate = product_flops(products, rows) / spent / 1e12
        print(
            f"library products of all layers, {name:30} {spent * 1e3:9.2f} ms {rate:7.0f} TFLOP/s "
            f"{rows / spent:9.0f} tokens/s"
        )
    return seconds


def forward(snapshot: Path, quant: str, packed: PackedPass, ceilings: dict[str, float], rows: int) -> None:
    """One pass through the whole model: how long the GPU was busy, with what, and its share of the ceiling."""
    from spinf_serve import snapshots
    from spinf_serve.settings import Settings
    from workers.engine.engine import ScoringEngine

    settings = Settings.load({"model": str(snapshot), "device": "cuda:0", "quant": quant, "warmup": "none"})
    engine = ScoringEngine.load(settings.engine_config(snapshots.resolve(settings.choice())))
    runner, passes = engine._runner, 3
    staged = runner.stage(packed)
    values = [runner.run(staged).copy() for _ in range(3)]
    trace = trace_gpu(lambda: [runner.run(staged) for _ in range(passes)])
    if any((value != values[0]).any() for value in values):
        raise SystemExit("NOT PRINTED: the same pass gave different values")
    busy, tokens = trace.busy / passes, len(packed.tokens)
    print(
        f"forward, {engine.info.scheme}: {tokens} tokens in {staged.padded_tokens} rows, {len(packed.read_rows)} read; "
        f"busy {busy * 1e3:.2f} ms of {trace.wall / passes * 1e3:.2f} ms, {tokens / busy:.0f} tokens/s; "
        f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at most"
    )
    for name, seconds in ceilings.items():
        print(f"  {tokens / busy / (rows / seconds):.3f} of the library's products, {name}")
    print("\n".join(f"  {line}" for line in trace.top(15)))
    engine.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gemma-4-12b")
    parser.add_argument("--rows", type=int, nargs="+", default=[16_384, 1272])
    parser.add_argument("--read-rows", type=int, default=1024)
    parser.add_argument("--snapshot", type=Path, default=None)
    parser.add_argument("--jobs", type=Path, default=DEFAULT_JOBS, help="job set, JSON or JSON.gz")
    parser.add_argument(
        "--only", nargs="+", choices=("library", "linears", "streams", "attention", "head"), default=None
    )
    parser.add_argument("--forward", action="store_true", help="also the whole model of --snapshot")
    parser.add_argument("--quant", default="auto", help="the scheme of --forward")
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    args = arguments()
    if args.forward and args.snapshot is None:
        raise SystemExit("--forward needs --snapshot")
    timer, text = Timer(torch.device("cuda")), MODELS[args.model].text
    print(machine())
    ceilings = measure_ceilings(timer)
    print(
        f"{args.model}; a copy moves {ceilings.copy / 1e12:.2f} TB/s, a library product reaches "
        f"{ceilings.fp8 / 1e12:.0f} TFLOP/s in fp8, {ceilings.bf16 / 1e12:.0f} in bf16"
    )
    bench = Bench(text, timer, ceilings)
    most = args.rows[0]
    packed = job_pass(args.snapshot, args.jobs, most) if args.snapshot else synthetic_pass(most)
    print(f"pass: {len(packed.tokens)} tokens in {len(packed.shares)} contents, {len(packed.read_rows)} rows read")
    library: dict[int, dict[str, float]] = {}
    for rows in args.rows:
        print(f"\n{rows} rows")
        if "library" in args.only or (args.forward and rows == most):
            library[rows] = print_library(timer, text, rows)
        print(HEADER)
        total = bench.report(bench.streams(rows)) if "streams" in args.only else 0.0
        if "attention" in args.only and rows == most:
            total += bench.report(bench.attention(packed))
        if "head" in args.only and rows == most:
            total += bench.report(bench.head(args.read_rows))
        print(f"{'beside the products':36} {total:.2f} ms of a forward")
        if "linears" in args.only:
            bench.report(bench.linears(rows))
    if args.forward:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        print()
        forward(args.snapshot, args.quant, packed, library[most], most)


if __name__ == "__main__":
    main()
