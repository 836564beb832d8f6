"""What a pack costs beside the model: 64 inputs asked a pack of 106 prompts, demo model, CPU.

    python -m benchmarks.pack_speed [--inputs 64] [--queries 53]

Prints a figure only after every entry agreed with the library's evaluation of the raw results.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import workers.engine  # noqa: F401 - before torch
from spinf_serve import snapshots
from spinf_serve.config import PackFile
from spinf_serve.packs import encode_weights, lock_of
from spinf_serve.packs.answers import answers_of
from spinf_serve.packs.evaluation import evaluate
from spinf_serve.packs.pack import Pack, from_data
from spinf_serve.settings import Settings
from workers.engine.engine import ScoringEngine
from workers.preprocess.preprocessor import SCORE, Preprocessor, RequestHeader
from workers.preprocess.tokenizer import ContentTokenizer

TRAITS = (
    "rude",
    "kind",
    "angry",
    "calm",
    "sad",
    "funny",
    "cruel",
    "loud",
    "shy",
    "proud",
    "odd",
    "fair",
    "rough",
    "warm",
)


def benchmark_pack(queries: int) -> dict[str, Any]:
    """A pack of the shape of a moderation pack: every question asked twice, 20 categories, a hidden micro-layer."""
    asked, reads, names = [], [], [f"c{i}" for i in range(min(20, queries))]
    for i in range(queries):
        trait = f"{TRAITS[i % len(TRAITS)]} {i}"
        combinations = [{"F": "author"}, {"F": "reader"}]
        template = f"\nIs the {{F}} of this post {trait}?{{?}}"
        options = [" no", " maybe", " yes"]
        asked.append({"id": f"q{i}", "template": template, "options": options, "combinations": combinations})
        for row in combinations:
            read = {"id": f"r{i}-{row['F']}", "query": f"q{i}", "F": row["F"], "kind": "any", "mu": [0.1, 0.2, 0.3]}
            reads.append(read | {"category": names[i % len(names)], "mean": 0.1, "sd": 2.0})
    categories = {
        name: {"label": name, "platt": [1.0, 0.1], "threshold": 0.5, "normal_quantiles": quantiles()} for name in names
    }
    inputs, hidden = [f"c:{name}" for name in names], 16
    weights = np.random.default_rng(0).normal(size=(len(inputs) + 2) * hidden + 2).tolist()
    layer = {"inputs": inputs, "hidden": hidden, "weights": encode_weights(weights)}
    pack: dict[str, Any] = {
        "pack": "bench/pack",
        "version": "1.0",
        "model": "demo",
        "contexts": {"post": "Post:\n{X}\n"},
    }
    pack |= {"scoring": {"queries": asked}, "reads": reads, "categories": categories}
    pack["decision"] = {"mode": "micro_layer", "micro_layer": layer}
    layer["lock"] = lock_of(pack)
    return pack


def quantiles() -> dict[str, list[float]]:
    levels = [round(i / 100, 2) for i in range(100)]
    return {"levels": levels, "values": levels}


def request(inputs: int, *, include: bool = False) -> bytes:
    text = "We walked along the river for two hours and the dog jumped into the water again and again, number "
    entries = [{"id": str(i), "messages": [{"content": f"{text}{i}."}]} for i in range(inputs)]
    scoring = {"packs": [{"id": "bench/pack", "include_queries": include}]}
    return json.dumps({"inputs": entries, "scoring": scoring}).encode()


def run(engine: ScoringEngine, prep: Preprocessor, body: bytes) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of compiling, of the engine, of assembly with evaluation; and the response."""
    header = RequestHeader("benchmark", SCORE, True, None, time.monotonic())
    times = [time.perf_counter()]
    prepared = prep.prepare(body, header)
    times.append(time.perf_counter())
    engine.submit("benchmark", prepared.plan)
    result = None
    while engine.has_work:
        for completion in engine.step():
            result = completion.result
    assert result is not None
    times.append(time.perf_counter())
    response = json.loads(prep.assemble(prepared, result))
    times.append(time.perf_counter())
    names = ("compile", "engine", "assemble")
    return {name: b - a for name, a, b in zip(names, times, times[1:], strict=False)}, response


def check(pack: Pack, response: dict[str, Any]) -> float:
    """Every entry is what the library says of the raw results; returns the seconds of evaluating alone."""
    answers = [answers_of(pack.model, result) for result in response["results"]]
    for result in response["results"]:
        assert result["packs"] == [pack.evaluate(result)]
    started = time.perf_counter()
    for one in answers:
        evaluate(pack.model, one)
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=64)
    parser.add_argument("--queries", type=int, default=53)
    options = parser.parse_args()
    settings = Settings.load({"model": "demo", "device": "cpu", "warmup": "none"})
    model = snapshots.resolve(settings.choice())
    data = benchmark_pack(options.queries)
    pack = from_data(data, "benchmark")
    file = PackFile(pack.id, pack.version, True, json.dumps(data).encode())
    config = replace(settings.preprocess_config(model), pack_files=(file,))
    prep = Preprocessor(config, ContentTokenizer.load(Path(model.snapshot_dir)))
    engine = ScoringEngine.load(settings.engine_config(model))
    try:
        _, raw = run(engine, prep, request(2, include=True))
        check(pack, raw)
        seconds, response = run(engine, prep, request(options.inputs))
        evaluation = check(pack, run(engine, prep, request(2, include=True))[1]) / 2 * options.inputs
    finally:
        engine.close()
    wall = sum(seconds.values())
    prompts = response["usage"]["scoring"]["prompts"]
    print(f"{options.inputs} inputs x {pack.model.prompts} prompts = {prompts} prompts in {wall:.2f} s")
    for name, spent in seconds.items():
        print(f"  {name:10} {spent:8.3f} s  {100 * spent / wall:6.2f} % of wall")
    print(f"  evaluation of that: about {evaluation:.3f} s, {1000 * evaluation / options.inputs:.2f} ms per input")


if __name__ == "__main__":
    main()
