"""Makes a published static fp8 checkpoint from its recipe:

    python quantizations/fp8_quantize.py quantizations/NAME SRC DST --calibration calibration.json

SRC is the snapshot that the recipe names, calibration.json comes from `spinf-serve calibrate SRC`. A recipe with a
revision takes no other source; one without takes your word for it, and the result says what it was made of. The
folder's README.md becomes the card; the work is that of `spinf-serve quantize`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from spinf_serve.completeness import check_snapshot
from spinf_serve.refusal import StartRefused
from workers.engine.export import CARD, export_fp8, source_of
from workers.engine.quant.calibration import read_calibration


def read_recipe(folder: Path) -> dict[str, Any]:
    """recipe.yaml of a folder. `StartRefused` for one that is not of static fp8."""
    try:
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
        if recipe["scheme"] != "fp8s":
            raise StartRefused(f"{folder}: the recipe is of the scheme {recipe['scheme']}, not of fp8s")
        _ = recipe["source"]["repo"], recipe["source"]["revision"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise StartRefused(f"{folder} holds no recipe: {error!r}") from None
    return dict(recipe)


def make(folder: Path, source: Path, target: Path, calibration: Path) -> None:
    """Write `target`. `StartRefused` for a source of another revision than the recipe's, and as `export_fp8` does."""
    recipe = read_recipe(folder)
    check_snapshot(source)
    name, revision = recipe["source"]["repo"], recipe["source"]["revision"]
    if revision is not None and (found := source_of(source).revision) != revision:
        raise StartRefused(f"{source} is revision {found} of {name}, the recipe is of {revision}")
    export_fp8(source, target, read_calibration(calibration), name=name, card=folder / CARD, on_progress=_report)


def _report(line: str) -> None:
    print(line, file=sys.stderr)


def main() -> None:
    """The command line; exit code 1 with the reason where nothing can be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="folder with recipe.yaml and README.md")
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("target", type=Path, metavar="DST")
    parser.add_argument("--calibration", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        make(arguments.recipe, arguments.source, arguments.target, arguments.calibration)
    except StartRefused as error:
        sys.exit(f"fp8_quantize: {error}")


if __name__ == "__main__":
    main()
