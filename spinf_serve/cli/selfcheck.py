"""`spinf-serve selfcheck [MODEL]`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from spinf_serve import snapshots
from spinf_serve.cli.options import EXIT_FAILURE, fail
from spinf_serve.cli.weights import need_engine
from spinf_serve.gpus import machine_refusal
from spinf_serve.hub import cache, client
from spinf_serve.manifests import (
    DEFAULT_MODEL,
    FAMILIES,
    Catalog,
    family_of,
    family_refusal,
    read_model_config,
    user_path,
)
from spinf_serve.refusal import StartRefused
from spinf_serve.settings import SETTINGS
from spinf_serve.settings.layers import checked

DEVICE, QUANT = SETTINGS["device"], SETTINGS["quant"]
_WIDTHS = (26, 40, 8)


def selfcheck(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="As for serve, or a config.json: weights are not needed.")
    ] = DEFAULT_MODEL,
    device: Annotated[str, typer.Option("--device", help="GPU as cuda:N, or cpu.")] = DEVICE.default,
    quant: Annotated[str, typer.Option("--quant", help="Scheme, or auto as for serve.")] = QUANT.default,
    rows: Annotated[int, typer.Option("--rows", min=1, help="The longest run of rows, on a GPU.")] = 16_384,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure whether rows keep their bits whatever runs beside them: every product and kernel, on this device."""
    need_engine()
    try:
        device = checked(DEVICE, device, "--device")
        quant = checked(QUANT, quant, "--quant")
        directory = config_directory(model)
        _refuse(directory, device, quant)
        invariant = _run(directory, device, quant, rows, as_json)
    except (StartRefused, RuntimeError) as error:
        fail(str(error))
    if not invariant:
        raise typer.Exit(EXIT_FAILURE)


def config_directory(model: str) -> Path:
    """A directory with the model's config.json; of a Hub repository that file alone is downloaded."""
    path = user_path(model)
    if path.is_file():
        return path.absolute().parent
    choice = Catalog.load().resolve(model)
    source = choice.manifest.source
    if choice.directory is not None:
        return choice.directory
    if reason := family_refusal(model, choice.manifest.family):
        raise StartRefused(reason)
    if source is None or source.repo is None or source.revision is None:
        return Path(snapshots.resolve(choice, _say).snapshot_dir)
    directory = client.snapshot_dir(source.repo, source.revision)
    if not (directory / "config.json").is_file():
        if cache.offline():
            raise StartRefused(f"HF_HUB_OFFLINE is set, and config.json of {source.repo} is not here: give a file")
        client.fetch(source.repo, source.revision, _say, only=("config.json",))
    return directory


def _refuse(directory: Path, device: str, quant: str) -> None:
    """StartRefused for a family, a scheme or a device that cannot be checked here."""
    family = FAMILIES[family_of(read_model_config(directory), str(directory))]
    schemes = family.schemes.get(device.partition(":")[0], ())
    if quant not in ("auto", *schemes):
        raise StartRefused(f"--quant {quant}: not available on {device}; available: {', '.join(schemes)} (or auto)")
    if reason := machine_refusal(device):
        raise StartRefused(reason)


def _run(directory: Path, device: str, quant: str, rows: int, as_json: bool) -> bool:
    """Print the findings; whether all of them are invariant."""
    from workers.engine.sweep import selfcheck as sweep  # loads torch

    check = sweep(directory, device, quant, rows)
    facts: dict[str, Any] = {
        "device": check.device_name,
        "compute_capability": check.compute_capability,
        "scheme": check.scheme,
    }
    found = []
    if not as_json:
        print(f"{check.scheme} on {check.device_name}")
        print(_line("op", "shape", "runs", "bits"))
    for finding in check.findings:
        found.append(finding)
        if not as_json:
            print(_line(finding.op, finding.shape, str(finding.counts), _verdict(finding.first, finding.note)))
            sys.stdout.flush()
    invariant = all(finding.invariant for finding in found)
    if as_json:
        print(json.dumps({**facts, "invariant": invariant, "findings": [finding.to_json() for finding in found]}))
    else:
        print("invariant" if invariant else "NOT invariant: scores depend on what runs beside them")
    return invariant


def _line(*cells: str) -> str:
    head = "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=False))
    return f"{head}  {cells[-1]}"


def _verdict(first: int | None, note: str) -> str:
    if first is not None:
        return f"DIFFERENT from {first} rows"
    return note.upper() if note else "equal"


def _say(message: str) -> None:
    print(message, file=sys.stderr)
