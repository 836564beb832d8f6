"""`spinf-serve parity [MODEL]`."""

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from spinf_serve.cli.options import fail, load_or_exit, refuse_unstartable, with_settings
from spinf_serve.parity import (
    ARRANGEMENTS,
    Comparison,
    Fixture,
    Reference,
    bound_for,
    check_belongs,
    check_writable,
    compare_entries,
    read_fixture,
)
from spinf_serve.plan import EngineInfo
from spinf_serve.progress import for_standard_error
from spinf_serve.protocol.errors import RequestError
from spinf_serve.refusal import StartRefused
from spinf_serve.settings import Settings

_SHOWN = 20  # differing values that are listed

Results = dict[str, Any]


@with_settings
def parity(
    flags: dict[str, Any],
    fixture: Annotated[
        Path | None,
        typer.Option("--fixture", help="A body of POST /v0/score or /v1/score. Default: the manifest's."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", help="The recorded numbers. Default: the manifest's.")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Write the reference instead of comparing with it.")] = False,
    passes: Annotated[
        int,
        typer.Option(
            "--passes",
            min=1,
            max=1000,
            help="Times the fixture is scored: whole, each entry alone, reversed, and so on. All must agree.",
        ),
    ] = 2,
) -> None:
    """Score a fixture and compare with a recorded reference; exit 1 on any difference."""
    settings = load_or_exit(flags)
    if "warmup" not in settings.origins:
        settings = load_or_exit({**flags, "warmup": "none"})
    refuse_unstartable(settings)
    try:
        fixture_path, reference_path = _paths(settings, fixture, reference)
        asked = read_fixture(fixture_path)
        recorded = None if record else Reference.read(reference_path)
        if recorded is None:
            check_writable(reference_path)
        else:
            check_belongs(recorded, asked, scheme_of(settings))
        made, found, info = _score(settings, asked, passes)
        bound = bound_for(recorded or made, info, asked)
        rows = [compare_entries((recorded or made).results, results, bound) for results in found]
        typer.echo(_table(rows))
        if differences := _differences(rows):
            fail(*differences)
        if recorded is None:
            made.write(reference_path)
    except StartRefused as error:
        fail(str(error))
    typer.echo(_verdict(recorded, info, bound, reference_path))


def _paths(settings: Settings, fixture: Path | None, reference: Path | None) -> tuple[Path, Path]:
    """Where fixture and reference are: what the flags say, else the manifest."""
    manifest = settings.choice().manifest
    named = manifest.parity
    found = (
        fixture or (Path(named.fixture) if named else None),
        reference or (Path(named.reference) if named else None),
    )
    for flag, path in zip(("--fixture", "--reference"), found, strict=True):
        if path is None:
            raise StartRefused(f"{flag} is needed: the manifest of {manifest.id} names no parity data")
    return found  # type: ignore[return-value]  # neither is None


def _score(settings: Settings, fixture: Fixture, passes: int) -> tuple[Reference, list[Results], EngineInfo]:
    """The reference that the first pass makes, and every pass's numbers."""
    from spinf_serve.engine_api import Engine  # loads torch

    report = for_standard_error()
    opened = functools.partial(Engine.from_settings, settings, on_progress=report)
    try:
        with opened(first=fixture.body, jobs=fixture.is_jobs) as engine:
            score = engine.score_jobs if fixture.is_jobs else engine.score
            found = []
            for number in range(passes):
                report(f"pass {number + 1} of {passes}: {ARRANGEMENTS[number % len(ARRANGEMENTS)]}")
                found.append(fixture.results(score(body) for body in fixture.bodies(number)))
            made = Reference.of(engine.model.id, engine.model.revision, engine.info, fixture, found[0])
            return made, found, engine.info
    except RequestError as error:
        where = f" ({error.param})" if error.param else ""
        raise StartRefused(f"the fixture is refused: {error.code}: {error.message}{where}") from None


def scheme_of(settings: Settings) -> str | None:
    """The scheme that the engine will choose, None where the card decides."""
    if settings.quant != "auto":
        return settings.quant
    return settings.choice().manifest.schemes(settings.device)[0] if settings.device == "cpu" else None


def _table(rows: list[dict[str, Comparison]]) -> str:
    """A line per entry: its values, and per pass `equal` or the largest difference, `!` behind one beyond the bound."""
    entries = list(dict.fromkeys(entry for row in rows for entry in row))
    width = max(len("entry"), *(len(entry) for entry in entries))
    titles = [f"pass {number + 1}" for number in range(len(rows))]
    lines = [f"{'entry':<{width}}  values  " + "  ".join(f"{title:<10}" for title in titles)]
    for entry in entries:
        cells = [_cell(row[entry]) if entry in row else "" for row in rows]
        values = max(row[entry].values for row in rows if entry in row)
        lines.append(f"{entry:<{width}}  {values:>6}  " + "  ".join(f"{cell:<10}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def _cell(comparison: Comparison) -> str:
    if not comparison.largest:
        return "equal"
    return f"{comparison.largest:.1e}{' !' if comparison.differences else ''}"


def _differences(rows: list[dict[str, Comparison]]) -> list[str]:
    """One line per value beyond the bound, the first of them, and how many there are."""
    lines = [
        f"pass {number}: {entry}: {difference.path}: recorded {difference.recorded!r}, now {difference.now!r}"
        for number, row in enumerate(rows, start=1)
        for entry, comparison in row.items()
        for difference in comparison.differences
    ]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more, f"{len(lines)} values differ"] if lines else []


def _verdict(recorded: Reference | None, info: EngineInfo, bound: float, path: Path) -> str:
    if recorded is None:
        return f"recorded {path} in scheme {info.scheme} by {info.fingerprint}"
    if bound == 0.0:
        return f"equal to {path}, bit for bit: recorded in scheme {info.scheme} by this very engine, {info.fingerprint}"
    return (
        f"within {bound:.0e} of {path}: recorded in scheme {info.scheme} by {recorded.fingerprint} "
        f"(torch {recorded.versions.get('torch')}), this is {info.fingerprint} (torch {info.versions.get('torch')})"
    )
