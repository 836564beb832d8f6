"""`spinf-serve quantize SRC DST`."""

from pathlib import Path
from typing import Annotated

import typer

from spinf_serve.cli.options import fail
from spinf_serve.cli.weights import need_engine, snapshot_of
from spinf_serve.progress import for_standard_error
from spinf_serve.refusal import StartRefused


def quantize(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Checkpoint in full precision: directory, manifest id or repository.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory of the new checkpoint; must not exist.")],
    calibration: Annotated[Path, typer.Option("--calibration", help="calibration.json of SRC (see calibrate).")],
    card: Annotated[
        Path | None, typer.Option("--card", help="README.md for DST; that of SRC stays as README.source.md.")
    ] = None,
) -> None:
    """Write a static fp8 checkpoint from one in full precision."""
    need_engine()
    try:
        from workers.engine.export import export_fp8  # loads torch
        from workers.engine.quant.calibration import read_calibration

        directory, name = snapshot_of(source)
        export_fp8(
            directory,
            target,
            read_calibration(calibration),
            name=name,
            card=card,
            on_progress=for_standard_error(),
        )
    except StartRefused as error:
        fail(str(error))
