"""Calibration: the largest inputs against an independent forward, and what the file may hold."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.engine.quant.support import WEIGHTS, change, some_amax, write_calibration
from tests.engine.support import load_reference
from workers.engine.calibrate import calibrate
from workers.engine.errors import LoadError
from workers.engine.quant import fp8, reference
from workers.engine.quant.calibration import FORMAT, Calibration, read_calibration, to_json

TEXTS = tuple((2, *range(20 + 37 * i, 20 + 37 * i + n)) for i, n in enumerate((4, 15, 40, 16)))


def emulated(model: Any, texts: tuple[tuple[int, ...], ...]) -> dict[str, float]:
    """Largest inputs of transformers' own model, each text alone, with every decoder linear in dynamic fp8."""
    found: dict[str, float] = {}

    def replace(name: str, linear: nn.Linear) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1])
            found[name] = max(found.get(name, 0.0), float(rows.abs().max()))
            out = reference.linear("fp8", rows, linear.weight, (len(linear.weight),))
            return out.reshape(*x.shape[:-1], -1)

        linear.forward = forward  # type: ignore[method-assign]

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            replace(name, module)
    with torch.inference_mode():
        for text in texts:
            model(torch.tensor([text]))
    return found


@pytest.mark.parametrize(("checkpoint", "linears"), [("tiny_checkpoint", 21), ("tiny_gemma4", 26)])
def test_largest_inputs_are_the_references(request: pytest.FixtureRequest, checkpoint: str, linears: int) -> None:
    """Products in another order move a rounded activation by one code at most, and what follows by a few per cent."""
    snapshot: Path = request.getfixturevalue(checkpoint)
    ours = calibrate(snapshot, TEXTS)
    theirs = emulated(load_reference(snapshot), TEXTS)
    assert ours.keys() == theirs.keys()
    assert len(ours) == linears
    for name, value in theirs.items():
        exact = name.startswith("model.layers.0.self_attn.") and not name.endswith("o_proj")
        assert ours[name] == pytest.approx(value, rel=1e-6 if exact else 0.03), name


def test_parts_of_one_linear_see_one_input(tiny_checkpoint: Path) -> None:
    amax = calibrate(tiny_checkpoint, TEXTS[:1])
    for layer in range(3):
        at = f"model.layers.{layer}"
        assert len({amax[f"{at}.self_attn.{name}_proj"] for name in "qkv"}) == 1
        assert amax[f"{at}.mlp.gate_proj"] == amax[f"{at}.mlp.up_proj"]


def test_a_corpus_is_the_largest_of_its_texts(tiny_checkpoint: Path) -> None:
    """Texts run alone: neither the others nor the padding of a pass changes what one contributes."""
    alone = [calibrate(tiny_checkpoint, [text]) for text in TEXTS]
    together, reversed_ = calibrate(tiny_checkpoint, TEXTS), calibrate(tiny_checkpoint, TEXTS[::-1])
    assert together == reversed_
    assert together == {name: max(one[name] for one in alone) for name in together}


def test_padding_is_not_seen(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A pass is filled up with token 0. Here its normed embedding is larger than any other's."""
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    table = load_file(copy / WEIGHTS)["model.embed_tokens.weight"]
    table[0] = torch.nn.functional.one_hot(torch.tensor(7), table.shape[1]) * 100.0
    change(copy, {"model.embed_tokens.weight": table})
    assert calibrate(copy, TEXTS[:2]) == calibrate(tiny_checkpoint, TEXTS[:2])
    assert calibrate(copy, [(*TEXTS[0], 0)]) != calibrate(tiny_checkpoint, [(*TEXTS[0], 0)])


def test_it_is_deterministic(tiny_checkpoint: Path) -> None:
    assert calibrate(tiny_checkpoint, TEXTS[:2]) == calibrate(tiny_checkpoint, TEXTS[:2])


def test_the_file_holds_maxima_and_scales(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = write_calibration(tiny_checkpoint, tmp_path / "c.json")
    content = json.loads(path.read_text())
    amax = some_amax(tiny_checkpoint)
    assert content["linears"] == {
        name: {"amax": value, "input_scale": fp8.input_scale(value)} for name, value in amax.items()
    }
    assert list(content["linears"]) == sorted(amax)
    calibration = read_calibration(path)
    assert calibration.scales == {name: fp8.input_scale(value) for name, value in amax.items()}


def test_names_must_be_those_of_the_model() -> None:
    calibration = Calibration({"a": 1.0, "b": 1.0}, "", {})
    calibration.check_names(["b", "a"])
    with pytest.raises(LoadError, match="lacks 1 linears: c"):
        calibration.check_names(["a", "b", "c"])
    with pytest.raises(LoadError, match="not there: b"):
        calibration.check_names(["a"])


BAD_SCALES = [0, -1.0, math.nan, math.inf, 1e39, 10**400, 0.1, "1", None, True, [1.0]]


@pytest.mark.parametrize("value", BAD_SCALES, ids=lambda value: str(value)[:10])
def test_scales_that_cannot_be_stored_as_they_are_are_refused(tmp_path: Path, value: Any) -> None:
    """0.1 is no float32 number: stored, it would be another scale than the file says."""
    content = {"format": FORMAT, "model": {"weights": "sha256:0"}, "linears": {"some.linear": {"input_scale": value}}}
    (tmp_path / "c.json").write_text(json.dumps(content))
    with pytest.raises(LoadError, match=r"some\.linear"):
        read_calibration(tmp_path / "c.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"format": "other"}',
        f'{{"format": "{FORMAT}"}}',
        f'{{"format": "{FORMAT}", "linears": []}}',
        f'{{"format": "{FORMAT}", "linears": {{"a": 1.0}}}}',
        f'{{"format": "{FORMAT}", "linears": {{}}}}',
        f'{{"format": "{FORMAT}", "linears": {{}}, "model": {{"weights": null}}}}',
    ],
)
def test_files_that_are_no_calibration_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(LoadError, match="is not a calibration"):
        read_calibration(tmp_path / "c.json")


def test_a_missing_calibration_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"absent\.json cannot be read: No such file"):
        read_calibration(tmp_path / "absent.json")


def test_inputs_that_are_not_finite_are_refused_by_name(tmp_path: Path, tiny_checkpoint: Path) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    norm = "model.layers.1.input_layernorm.weight"
    weight = load_file(copy / WEIGHTS)[norm]
    weight[3] = 3e38  # with the size of a normalised row
    change(copy, {norm: weight})
    with pytest.raises(LoadError, match=r"the input of model\.layers\.1\.self_attn\.[qkv]_proj was not finite"):
        calibrate(copy, TEXTS[:1])


def test_no_file_says_more_than_json_can() -> None:
    with pytest.raises(ValueError, match="largest input"):
        to_json({"a": math.nan}, {})
