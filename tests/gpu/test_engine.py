"""The engine on a real GPU: load, schemes, equal bits, memory that runs out and comes back, nothing compiled late.

The model is small; its sizes are such that every kernel takes it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from spinf_serve.cli import app
from spinf_serve.plan import ScorePlan
from spinf_serve.protocol.errors import RequestError
from tests.engine.quant.support import change, some_amax, write_calibration
from tests.engine.support import Job, Question, drain, engine_config, make_plan, random_jobs, run_all, score
from tests.support.tiny_gemma4 import make_tiny_gemma4
from workers.engine.engine import ScoringEngine
from workers.engine.export import export_fp8
from workers.engine.quant.calibration import read_calibration

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]

SCHEMES = ("fp8s", "fp8", "fp8row", "w8a16", "w8a8", "bf16")
INVARIANT = tuple(scheme for scheme in SCHEMES if scheme != "fp8")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "global_head_dim": 128,
    "sliding_window": 128,
}
BUDGET, MOST = 1024, 4096
VOCAB = 800


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bf16, queries and keys small: scores are not scaled, and larger heads would make them one-hot."""
    path = make_tiny_gemma4(tmp_path_factory.mktemp("gpu") / "snapshot", **SIZES)
    weights = load_file(path / "model.safetensors")
    norms = {name: w * 0.3 for name, w in weights.items() if name.endswith(("q_norm.weight", "k_norm.weight"))}
    return change(path, {name: w.bfloat16() for name, w in (weights | norms).items()})


@pytest.fixture(scope="module")
def static(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in static fp8, every linear with the same scale of its input."""
    folder = tmp_path_factory.mktemp("gpu-static")
    amax = dict.fromkeys(some_amax(checkpoint), 6.0)
    calibration = read_calibration(write_calibration(checkpoint, folder / "calibration.json", amax))
    export_fp8(checkpoint, folder / "snapshot", calibration)
    return folder / "snapshot"


Make = Callable[..., ScoringEngine]


@pytest.fixture
def make(checkpoint: Path, static: Path) -> Iterator[Make]:
    """Engines by scheme; all are closed at the end."""
    engines: list[ScoringEngine] = []

    def load(scheme: str, **settings: Any) -> ScoringEngine:
        snapshot = static if scheme == "fp8s" else checkpoint
        values = {"device": "cuda:0", "token_budget": BUDGET, "max_tokens": MOST, "quant": scheme, **settings}
        engines.append(ScoringEngine.load(engine_config(snapshot, **values)))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()
    torch.cuda.empty_cache()


def a_plan(seed: int = 1, content: int = 40, questions: int = 4) -> ScorePlan:
    return make_plan(random_jobs(seed, VOCAB, [content], questions))[0]


def values(engine: ScoringEngine, plans: dict[str, ScorePlan]) -> dict[str, np.ndarray]:
    """Everything together; no plan may fail."""
    completions = run_all(engine, plans)
    assert not [c.error for c in completions.values() if c.error]
    return {key: c.result.logprobs for key, c in completions.items() if c.result is not None}


PLANS = {
    "one token": a_plan(1, 1, 1),
    "short": a_plan(2, 40, 4),
    "over the window": a_plan(3, 300, 6),
    "split": a_plan(4, 200, 150),
    "over the budget": a_plan(5, 1500, 3),
    "many": make_plan(random_jobs(6, VOCAB, [64, 65, 1, 128, 20], 7))[0],
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_loads_and_says_what_it_is(make: Make, scheme: str) -> None:
    engine = make(scheme)
    info = engine.info
    assert (info.scheme, info.batch_invariant) == (scheme, scheme != "fp8")
    assert info.compute_capability == "{}.{}".format(*torch.cuda.get_device_capability())
    assert info.device_name == torch.cuda.get_device_name()
    assert info.versions["cuda"] == torch.version.cuda
    found = score(engine, PLANS["short"]).logprobs
    assert np.isfinite(found).all()
    assert (found <= 0).all()


def test_auto_takes_the_scales_of_the_checkpoint(make: Make, static: Path, checkpoint: Path) -> None:
    fp8 = torch.cuda.get_device_capability() >= (8, 9)
    config = engine_config(static, device="cuda:0", token_budget=BUDGET, max_tokens=MOST)
    engine = ScoringEngine.load(config)
    assert engine.info.scheme == ("fp8s" if fp8 else "bf16")
    engine.close()
    assert make("auto").info.scheme == "bf16"


def question_logprobs(engine: ScoringEngine, jobs: list[Job], **changes: bool) -> dict[tuple[int, ...], list[float]]:
    """Path up to the options → their log-probabilities. All options have one token."""
    plan, where = make_plan(jobs)
    found = score(engine, replace(plan, **changes)).logprobs
    return {
        (*job.content, *question.prompt): [
            float(found[where[i, question.prompt, option[0]]]) for option in question.options
        ]
        for i, job in enumerate(jobs)
        for question in job.questions
    }


@pytest.mark.parametrize("scheme", INVARIANT)
def test_by_position_a_path_keeps_its_bits_wherever_its_content_ends(make: Make, scheme: str) -> None:
    content = random_jobs(7, VOCAB, [200], 1)[0].content
    options = ((30,), (31,))
    prompts = [tuple(np.random.default_rng(i).integers(40, VOCAB, 3 + i).tolist()) for i in range(8)]
    questions = tuple(Question(prompt, options) for prompt in prompts)
    stranger = Question((33, 34, 35), options)
    lower = tuple(Question((*content[70:], *prompt), options) for prompt in prompts)
    one_job = [Job(content, questions)]
    more = [Job(content, (*questions, stranger))]
    early = [Job(content[:70], (*lower, stranger))]
    alone = [[Job((*content, *prompt), (Question((), options),))] for prompt in prompts]
    expected: dict[tuple[int, ...], list[float]] = {}
    for budget in (BUDGET, 256):
        engine = make(scheme, token_budget=budget)
        for jobs in (*alone, one_job, more, early):
            for path, numbers in question_logprobs(engine, jobs, by_position=True).items():
                assert expected.setdefault(path, numbers) == numbers


@pytest.mark.parametrize("scheme", INVARIANT)
def test_a_long_question_keeps_its_bits_among_others(make: Make, scheme: str) -> None:
    """Its end is summed by position, its beginning as short ones are."""
    content = random_jobs(8, VOCAB, [100], 1)[0].content
    long = tuple(np.random.default_rng(0).integers(40, VOCAB, 700).tolist())
    options = ((30,), (31,))
    reads = [Question(long[:count], options) for count in (3, 500, 511, 512, 513, 530, 700)]
    others = [Question((*long[:count], 35, 36), options) for count in (1, 100, 511, 520, 640)]
    expected: dict[tuple[int, ...], list[float]] = {}
    for budget in (BUDGET, 840):
        engine = make(scheme, token_budget=budget)
        for asked in (*[[read] for read in reads], reads, [*others, *reads]):
            for path, numbers in question_logprobs(engine, [Job(content, tuple(asked))]).items():
                assert expected.setdefault(path, numbers) == numbers


@pytest.mark.parametrize("scheme", INVARIANT)
def test_equal_bits_in_any_company(make: Make, scheme: str) -> None:
    engine = make(scheme)
    alone = {key: score(engine, plan).logprobs for key, plan in PLANS.items()}
    assert all(np.isfinite(numbers).all() for numbers in alone.values())
    for plans in (PLANS, dict(reversed(PLANS.items()))):
        together = values(engine, plans)
        assert all(np.array_equal(together[key], alone[key]) for key in PLANS)
    small = make(scheme, token_budget=256)
    assert small.info.fingerprint == engine.info.fingerprint
    cut = values(small, PLANS)
    assert all(np.array_equal(cut[key], alone[key]) for key in PLANS)
    assert not engine.stats()["stored_bytes"]


def test_fp8_never_shares_a_pass(make: Make) -> None:
    engine = make("fp8")
    completions = run_all(engine, {str(i): a_plan(i) for i in range(4)})
    results = [c.result for c in completions.values()]
    assert all(result is not None and not result.shared_pass and result.passes == 1 for result in results)


@pytest.mark.parametrize("scheme", ["fp8s", "bf16", "w8a8"])
def test_nothing_is_compiled_after_the_warm_up(make: Make, scheme: str) -> None:
    engine = make(scheme, warmup="full")
    engine.warm_up()
    assert engine.info.warmup_s > 0
    for number, (content, questions) in enumerate([(1, 1), (2, 1), (17, 3), (500, 60), (4000, 2), (129, 400)]):
        score(engine, a_plan(number, content, questions))
    values(engine, PLANS)
    assert engine.stats()["late_compiles"] == 0


def test_figures_of_memory(make: Make) -> None:
    engine = make("fp8s", warmup="full")
    engine.warm_up()
    found = engine.stats()
    weights = sum(t.nbytes for t in (*engine._runner.model.parameters(), *engine._runner.model.buffers()))
    assert weights <= found["weights_bytes"] < weights + (8 << 20)
    assert found["weights_bytes"] < found["peak_bytes"] <= found["memory_bytes"]


# Memory that runs out


@pytest.fixture
def little_memory(make: Make) -> Iterator[ScoringEngine]:
    """An engine that may take 256 MiB more than it holds."""
    engine = make("bf16", warmup="short", token_budget=MOST, max_tokens=1 << 20)
    engine.warm_up()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    yield engine
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_that_runs_out_costs_one_request(little_memory: ScoringEngine) -> None:
    engine = little_memory
    plans = {"a": a_plan(1), "b": a_plan(2, 90, 30)}
    expected = {key: score(engine, plan).logprobs for key, plan in plans.items()}
    idle = torch.cuda.memory_allocated()
    large = a_plan(3, 400_000, 1)
    for key, plan in {"a": plans["a"], "large": large, "b": plans["b"]}.items():
        engine.submit(key, plan)
    completions = {c.key: c for c in drain(engine)}
    error = completions.pop("large").error
    assert isinstance(error, RequestError)
    assert error.code == "request_too_large"
    for key, completion in completions.items():
        assert completion.result is not None
        assert np.array_equal(completion.result.logprobs, expected[key])
    assert engine.degraded is None
    assert abs(torch.cuda.memory_allocated() - idle) < (16 << 20)
    assert all(np.array_equal(score(engine, plan).logprobs, expected[key]) for key, plan in plans.items())


def test_memory_that_stays_away_marks_the_engine_degraded(
    little_memory: ScoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.set_per_process_memory_fraction(1.0)
    engine, kept = little_memory, []

    def leaking(_staged: Any) -> Any:
        kept.append(torch.empty(1100 << 20, dtype=torch.uint8, device="cuda"))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine._runner, "launch", leaking)
    with pytest.raises(RequestError, match="request_too_large"):
        score(engine, a_plan())
    assert engine.degraded is not None
    assert "were not given back" in engine.degraded


# The self-check


@pytest.mark.parametrize("scheme", SCHEMES)
def test_selfcheck(checkpoint: Path, scheme: str) -> None:
    arguments = ["selfcheck", str(checkpoint), "--quant", scheme, "--rows", "700"]
    result = CliRunner().invoke(app, arguments)
    print(result.stdout)
    assert result.exit_code == (1 if scheme == "fp8" else 0), result.output
    assert ("NOT invariant" in result.stdout) == (scheme == "fp8")


def test_a_fault_of_the_device_is_noticed(make: Make) -> None:
    """Only that it works: a real fault would end this process's use of the GPU."""
    memory = make("bf16")._memory
    assert memory is not None
    assert memory.allocator.works()
