"""The example repository that pack authors copy: sound, fitted by its own script, and true to its fixtures."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spinf_serve import packs
from spinf_serve.packs.fixtures import check_fixture
from spinf_serve.packs.pack import from_data
from spinf_serve.packs.repository import read_repository
from tests.base.packs.support import random_result

EXAMPLE = Path(__file__).resolve().parents[3] / "docs/examples/prompt-packs"
FIT = runpy.run_path(str(EXAMPLE / "fit.py"))


def test_the_example_is_a_sound_repository() -> None:
    found = read_repository(EXAMPLE)
    assert (found.problems, found.warnings) == ([], [])
    assert [pack.id for pack in found.packs] == ["example/support-triage", "example/forum-guard"]


@pytest.mark.parametrize("name", ["support-triage", "forum-guard"])
def test_its_fixtures_hold(name: str) -> None:
    pack = packs.load(EXAMPLE / f"packs/{name}/1.0.json")
    assert check_fixture(pack, EXAMPLE / f"packs/{name}/fixtures/1.0.json") == []


def test_the_full_pack_has_every_feature() -> None:
    pack = packs.load(EXAMPLE / "packs/forum-guard/1.0.json").model
    assert len(pack.contexts) == 2
    assert [p.required for p in pack.parameters.values()] == [True, False]
    assert {read.kind for read in pack.reads} == {"pair", "option", "any", "set"}
    assert pack.categories["hostile"].views
    assert pack.categories["threat"].requires == ("hostile",)
    assert pack.decision.critical == ("threat",)
    assert pack.decision.micro_layer is not None
    assert pack.decision.micro_layer.locked


@pytest.mark.parametrize("name", ["support-triage", "forum-guard"])
def test_a_version_is_its_draft_fitted(name: str) -> None:
    draft = json.loads((EXAMPLE / f"drafts/{name}.json").read_bytes())
    whole = json.loads((EXAMPLE / f"packs/{name}/1.0.json").read_bytes())
    for field in ("pack", "version", "model", "contexts", "scoring"):
        assert whole[field] == draft[field]
    assert packs.load(EXAMPLE / f"drafts/{name}.json", draft=True).draft


@pytest.mark.parametrize("name", ["support-triage", "forum-guard"])
def test_the_script_fits_a_sound_pack(name: str, tmp_path: Path) -> None:
    """On random results: loads without a warning, its lock holds, normal traffic is flagged as often as asked."""
    draft = json.loads((EXAMPLE / f"drafts/{name}.json").read_bytes())
    rng = np.random.default_rng(7)
    names = list(draft["categories"])
    rows: list[dict[str, Any]] = [{"labels": [names[i // 2 % len(names)]] if i % 2 else []} for i in range(90)]
    results = [random_result(rng, draft, (1.0,)) | {"input_id": str(i)} for i in range(90)]
    pack = from_data(FIT["fit"](draft, rows, results, 0.1), "fitted")
    assert pack.warnings == ()
    normal = [r for r, row in zip(results, rows, strict=True) if not row["labels"]]
    for category in pack.model.categories.values():
        if category.threshold is None or category.requires:
            continue
        flags = [pack.evaluate(result)["categories"][category.id]["flagged"] for result in normal]
        assert abs(sum(flags) - 0.1 * len(normal)) <= 1
    FIT["write_json"](tmp_path / "fixture.json", FIT["fixture"](pack, results[:3]))
    assert check_fixture(pack, tmp_path / "fixture.json") == []


def test_fitted_reads_are_standard_over_normal_traffic() -> None:
    draft = json.loads((EXAMPLE / "drafts/forum-guard.json").read_bytes())
    rng = np.random.default_rng(3)
    results = [random_result(rng, draft) for _ in range(60)]
    normal = np.arange(60) < 50
    model = from_data(draft, "draft", draft=True).model
    FIT["fit_reads"](draft, model, results, normal)
    fitted = from_data(draft, "draft", draft=True).model
    for read in fitted.reads:
        values = [(FIT["read_value"](read, FIT["answers_of"](fitted, r)) - read.mean) / read.sd for r in results[:50]]
        assert np.mean(values) == pytest.approx(0, abs=1e-5)
        assert np.std(values, ddof=1) == pytest.approx(1, abs=1e-5)
