"""quantizations/: a recipe and a card for every published checkpoint, and the script that follows a recipe."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spinf_serve.manifests import Catalog, Manifest
from spinf_serve.refusal import StartRefused
from tests.engine.quant.support import bf16_checkpoint, write_calibration
from workers.engine.export import weights_digest

FOLDER = Path(__file__).resolve().parents[3] / "quantizations"
SCRIPT = FOLDER / "fp8_quantize.py"
PUBLISHED = [m for m in Catalog.load([]).manifests if m.source is not None and m.source.repo is not None]
SCHEMES = {"fp8-static": "fp8s", "gptq-int4-g32": "gptq-int4-g32"}


def recipe_of(folder: Path) -> Any:
    return yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))


def folder_of(manifest: Manifest) -> Path:
    return FOLDER / manifest.id.rpartition("/")[2]


def test_every_published_checkpoint_has_a_folder_and_no_other() -> None:
    folders = {path for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {folder_of(manifest) for manifest in PUBLISHED}


@pytest.mark.parametrize("manifest", PUBLISHED, ids=lambda manifest: manifest.id)
def test_recipe_and_card_say_what_the_manifest_says(manifest: Manifest) -> None:
    assert manifest.source is not None
    recipe, card = recipe_of(folder_of(manifest)), (folder_of(manifest) / "README.md").read_text(encoding="utf-8")
    assert recipe["checkpoint"] == manifest.source.repo
    assert recipe["published"] == manifest.source.revision
    assert recipe["scheme"] == SCHEMES[manifest.source.format]
    assert card.startswith("---\n")
    front = yaml.safe_load(card.split("---")[1])
    if manifest.base_model is not None:
        assert recipe["source"]["repo"] == front["base_model"] == manifest.base_model
        assert f"{manifest.limits.max_tokens:,} tokens" in card
    assert "icence" in card


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return bf16_checkpoint(tmp_path / "source")


def small_recipe(folder: Path, **changes: Any) -> Path:
    """The 12B's recipe for a source of ours."""
    shutil.copytree(FOLDER / "gemma-4-12b-fp8", folder)
    recipe = recipe_of(folder)
    recipe["source"] |= {"repo": "somebody/tiny", **changes}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def make(*arguments: Path) -> None:
    runpy.run_path(str(SCRIPT))["make"](*arguments)


def test_the_script_follows_a_recipe(source: Path, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "recipe", revision=weights_digest(source))
    calibration, target = write_calibration(source, tmp_path / "c.json"), tmp_path / "target"
    command = [sys.executable, str(SCRIPT), str(recipe), str(source), str(target), "--calibration", str(calibration)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    record = json.loads((target / "spinf_quantize.json").read_text())
    assert record["source"]["name"] == "somebody/tiny"
    assert (target / "README.md").read_bytes() == (recipe / "README.md").read_bytes()
    with pytest.raises(StartRefused, match="exists already"):
        make(recipe, source, target, calibration)


def test_another_revision_than_the_recipes_is_refused(source: Path, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path / "recipe", revision="0" * 40)
    calibration = write_calibration(source, tmp_path / "c.json")
    with pytest.raises(StartRefused, match="the recipe is of 0000"):
        make(recipe, source, tmp_path / "target", calibration)


def test_recipes_of_other_schemes_are_refused(source: Path, tmp_path: Path) -> None:
    calibration = write_calibration(source, tmp_path / "c.json")
    with pytest.raises(StartRefused, match="not of fp8s"):
        make(FOLDER / "qwen3.8-27b-int4", source, tmp_path / "target", calibration)
    with pytest.raises(StartRefused, match="holds no recipe"):
        make(tmp_path, source, tmp_path / "target", calibration)
