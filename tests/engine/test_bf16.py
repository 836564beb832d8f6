"""Scheme bf16 on the CPU: within what its roundings explain, and no further off than the reference in bf16."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.engine.mutations import load_model
from tests.engine.rounding import deviations
from tests.engine.support import (
    Job,
    Question,
    engine_config,
    load_reference,
    make_plan,
    option_logprobs,
    reference_logprobs,
    score,
)
from tests.engine.test_tree_attention import Case, make_case, random_forest, run
from tests.support.tiny import make_tiny_checkpoint
from tests.support.tiny_gemma4 import make_tiny_gemma4
from workers.engine.engine import ScoringEngine
from workers.engine.kernels.products import RowRule
from workers.engine.kernels.tree_attention import cpu as attention_cpu
from workers.engine.kernels.tree_attention import reference as attention_reference
from workers.engine.layers.linear import Linear
from workers.engine.models import GemmaModel
from workers.engine.models.gemma import GemmaLayer
from workers.engine.runner import Runner

MAKERS: dict[str, Callable[..., Path]] = {"gemma3": make_tiny_checkpoint, "gemma4": make_tiny_gemma4}
WORST = 5.0
"""Standard deviations: a normal variable is further off once in two million times."""


def _jobs() -> list[Job]:
    """Contents within and over the window, questions read at one row each."""
    rng = np.random.default_rng(40)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(20, 800, count).tolist())

    def question(length: int) -> Question:
        return Question(draw(length), tuple((token,) for token in sorted(draw(3))))

    return [Job((2, *draw(length)), tuple(question(3 + i) for i in range(3))) for length in (5, 20, 60, 100)]


JOBS = _jobs()


@pytest.fixture(scope="module", params=MAKERS)
def snapshot(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint stored in bf16, as published ones are: its weights are not rounded again."""
    directory = MAKERS[request.param](tmp_path_factory.mktemp("bf16") / "snapshot", seed=1)
    file = directory / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    return directory


@pytest.fixture(scope="module")
def exact(snapshot: Path) -> dict[Any, float]:
    """transformers in float32."""
    return reference_logprobs(load_reference(snapshot), JOBS)


@pytest.fixture(scope="module")
def sigma(snapshot: Path) -> dict[Any, float]:
    """The standard deviation that the roundings give each log-probability."""
    model, out = load_reference(snapshot), {}
    for number, job in enumerate(JOBS):
        for question in job.questions:
            columns = [option[0] for option in question.options]
            found = deviations(model, (*job.content, *question.prompt), columns)
            out |= {(number, question.prompt, (column,)): s for column, s in zip(columns, found, strict=True)}
    return out


def _errors(scores: dict[Any, float], exact: dict[Any, float], sigma: dict[Any, float]) -> Any:
    """Differences from float32 in units of σ."""
    return np.array([(scores[key] - exact[key]) / sigma[key] for key in exact])


def _scores(engine: ScoringEngine) -> dict[Any, float]:
    plan, where = make_plan(JOBS)
    return option_logprobs(JOBS, score(engine, plan).logprobs, where)


def _with_model(snapshot: Path, model: GemmaModel) -> dict[Any, float]:
    engine = ScoringEngine.load(engine_config(snapshot, quant="bf16"))
    return _scores(ScoringEngine(engine.config, Runner(model, RowRule()), engine.info))


def test_errors_are_what_the_roundings_explain(snapshot: Path, exact: Any, sigma: Any) -> None:
    """Not only below the bound: of its size, which shows that it counts the roundings that there are."""
    engine = ScoringEngine.load(engine_config(snapshot, quant="bf16"))
    errors = _errors(_scores(engine), exact, sigma)
    assert np.abs(errors).max() < WORST
    assert 0.6 < np.sqrt(np.mean(errors**2)) < 1.4
    assert engine.info.scheme == "bf16"
    assert engine.info.batch_invariant


def test_no_further_off_than_the_reference_in_bf16(snapshot: Path, exact: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.bfloat16, attn_implementation="eager").eval()
    theirs = reference_logprobs(model, JOBS)
    ours = _scores(ScoringEngine.load(engine_config(snapshot, quant="bf16")))

    def rms(scores: dict[Any, float]) -> float:
        return float(np.sqrt(np.mean([(scores[key] - exact[key]) ** 2 for key in exact])))

    assert rms(ours) < rms(theirs)


@pytest.mark.parametrize("step", [-1, 1])
def test_a_mutation_is_outside_the_bound(snapshot: Path, exact: Any, sigma: Any, step: int) -> None:
    model = load_model(snapshot, lambda c: replace(c, sliding_window=c.sliding_window + step), torch.bfloat16)
    assert np.abs(_errors(_with_model(snapshot, model), exact, sigma)).max() > 2 * WORST


def test_what_is_rounded_and_what_is_not(snapshot: Path) -> None:
    """Linear layers read and write bf16; the residual stream between the layers is float32."""
    model = load_model(snapshot, dtype=torch.bfloat16)
    seen: dict[str, set[torch.dtype]] = {"linear": set(), "layer": set()}

    def note(module: nn.Module, inputs: tuple[Tensor, ...], result: Any) -> None:
        if isinstance(module, Linear):
            seen["linear"] |= {inputs[0].dtype, result.dtype}
        elif isinstance(module, GemmaLayer):
            stream, _normed = result
            seen["layer"] |= {inputs[0].dtype, stream.dtype}

    for module in model.modules():
        module.register_forward_hook(note)
    _with_model(snapshot, model)
    assert seen == {"linear": {torch.bfloat16}, "layer": {torch.float32}}


def _attention_error(case: Case, window: int | None) -> float:
    """How far the op's bf16 result is from the definition in float64, in units of what one rounding may change."""
    exact = attention_reference.tree_attention(
        case.q.double(),
        case.k.double(),
        case.v.double(),
        [(k.double(), v.double()) for k, v in case.stores],
        case.segments,
        window=window,
    )
    found = run(case, window)
    assert found.dtype == torch.bfloat16
    return float(((found.double() - exact).abs() / (2**-8 * exact.abs() + 1e-5)).max())


def _bf16_case() -> Case:
    """Scores spread as a model's are: with those of the tests in float32 one key would take all the weight."""
    case = make_case(random_forest(3, stored=True))
    case.q = (case.q / case.q.shape[-1] ** 0.5).bfloat16()
    case.k, case.v = case.k.bfloat16(), case.v.bfloat16()
    case.stores = [(k.bfloat16(), v.bfloat16()) for k, v in case.stores]
    return case


@pytest.mark.parametrize("window", [None, 64])
def test_attention_rounds_its_result_alone(window: int | None) -> None:
    """Scores, weights and sums are float32, which no log-probability of a small model would tell."""
    assert _attention_error(_bf16_case(), window) < 1.0


def _rounding(*, scores: bool = False, weights: bool = False, total: bool = False) -> Callable[[Tensor], Tensor]:
    """The softmax with one more rounding to bf16, as transformers' own bf16 has them."""
    plain = attention_cpu._softmax

    def rounded(values: Tensor) -> Tensor:
        if scores:
            values.copy_(values.bfloat16())
        found = plain(values)
        if weights:
            values.copy_(values.bfloat16())
        return found.bfloat16().float() if total else found

    return rounded


@pytest.mark.parametrize("what", ["scores", "weights", "total"])
def test_another_rounding_in_the_attention_shows(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(attention_cpu, "_softmax", _rounding(**{what: True}))
    assert _attention_error(_bf16_case(), None) > 1.5


def test_weights_and_kept_contents_take_half_the_memory(snapshot: Path) -> None:
    f32, bf16 = load_model(snapshot), load_model(snapshot, dtype=torch.bfloat16)
    linears = [p for name, p in bf16.named_parameters() if p.dim() == 2]
    assert all(p.dtype == torch.bfloat16 for p in linears)
    size = [sum(p.nbytes for p in model.parameters()) for model in (f32, bf16)]
    assert size[1] < 0.55 * size[0]
    assert bf16.head_weight.dtype == torch.bfloat16  # what contents are kept in


def test_float32_weights_are_rounded_once(tmp_path: Path) -> None:
    """A checkpoint in float32 scores as the same one stored in bf16 does, but for the norms: they stay as they are."""
    snapshot = make_tiny_checkpoint(tmp_path / "snapshot")
    file = snapshot / "model.safetensors"
    tensors = load_file(file)
    whole = _scores(ScoringEngine.load(engine_config(snapshot, quant="bf16")))
    save_file({name: t.bfloat16() if t.dim() == 2 else t for name, t in tensors.items()}, file)
    assert _scores(ScoringEngine.load(engine_config(snapshot, quant="bf16"))) == whole
