"""`spinf-serve packs list` and `spinf-serve packs validate PATH`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spinf_serve.cli.options import EXIT_FAILURE, fail, load_or_exit
from spinf_serve.packs.catalog import Catalog, listing, load_catalog
from spinf_serve.packs.discovery import examine
from spinf_serve.packs.fixtures import check_fixture
from spinf_serve.packs.listed import ListedVersion, Repository
from spinf_serve.packs.pack import Pack
from spinf_serve.packs.repository import MANIFEST, read_drafts, read_repository
from spinf_serve.refusal import StartRefused
from spinf_serve.snapshots import describe

OFFICIAL_SECONDS = 60.0
"""How long `packs list` waits for the official source: longer than a start, so that it can fill the cache for one."""

app = typer.Typer(help="Prompt packs: what a server would enable, and checks for authors.", no_args_is_help=True)
_DRAFT = "draft"
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_packs(
    packs: Annotated[
        list[str] | None, typer.Option("--packs", metavar="SOURCE", help="Pack source; may be given several times.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="ID", help="The served model.")] = None,
    no_official: Annotated[bool, typer.Option("--no-official", help="Without the official packs.")] = False,
    allow_namespace: Annotated[
        list[str] | None,
        typer.Option("--allow-namespace", metavar="NS", help="Allow a namespace of the official packs; repeatable."),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask again which commit a tag names.")] = False,
    as_json: Json = False,
) -> None:
    """Print what a server with these sources would enable, and what it would skip and why."""
    flags = {
        "packs": packs or None,
        "model": model,
        "official_packs": False if no_official else None,
        "packs_allow_namespace": allow_namespace or None,
        "packs_refresh": refresh or None,
    }
    settings = load_or_exit(flags)
    try:
        served = describe(settings.choice())
    except StartRefused as error:
        fail(str(error))
    catalog = load_catalog(settings.pack_settings(served), official_seconds=OFFICIAL_SECONDS)
    if "model" not in settings.origins:
        print(f"for the default model {served.id}; choose another with --model ID", file=sys.stderr)
    if as_json:
        more = {
            "model": served.id,
            "skipped": catalog.skipped,
            "warnings": catalog.warnings,
            "problems": catalog.problems,
        }
        _print_json(listing(catalog) | more)
    else:
        _print_catalog(catalog)
    if catalog.problems:
        raise typer.Exit(EXIT_FAILURE)


def _print_catalog(catalog: Catalog) -> None:
    found = listing(catalog)
    columns = ("pack", "version", "status", "model", "queries", "prompts", "decision", "source")
    rows = [
        [
            *(entry[name] or "" for name in ("id", "version", "status", "model", "queries", "prompts")),
            entry["decision"]["mode"] if entry["decision"] else "",
            entry["source"],
        ]
        for entry in found["packs"]
    ]
    _print_table(columns, rows)
    sources = [
        [entry["source"], entry["status"], (entry["commit"] or "")[:12], len(entry["packs"])]
        for entry in found["sources"]
    ]
    _print_table(("source", "status", "commit", "packs"), sources)
    _print_lines("skipped", catalog.skipped)
    _print_lines("warning", catalog.warnings)
    _print_lines("problem", catalog.problems)


@app.command()
def validate(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A pack repository, a folder with pack files, or one pack file.")
    ],
    draft: Annotated[
        bool,
        typer.Option("--draft", help="Check every pack file as a draft: what fitting writes may be missing."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a pack repository, folder or file with its fixtures and print its listing; exit 1 on any problem."""
    try:
        repository = _read(path, draft=draft)
    except StartRefused as error:
        fail(str(error))
    fixtures = {
        (pack.id, item.version): _fixture(repository, item) for pack in repository.packs for item in pack.versions
    }
    if as_json:
        _print_json(_repository_entry(repository, fixtures))
    else:
        columns = ("pack", "version", "status", "model", "categories", "queries", "prompts", "fixture")
        rows = [
            [pack.id, item.version, item.status, item.model or "", *_sizes(item.pack), fixtures[pack.id, item.version]]
            for pack in repository.packs
            for item in pack.versions
        ]
        rows += [
            [draft.pack.id, draft.pack.version, _DRAFT, draft.pack.model.model, *_sizes(draft.pack), "none"]
            for draft in repository.drafts
        ]
        _print_table(columns, rows)
        _print_lines("warning", repository.warnings)
        _print_lines("problem", repository.problems)
    if repository.problems:
        raise typer.Exit(EXIT_FAILURE)


def _read(path: Path, *, draft: bool) -> Repository:
    if path.is_file() and path.name != MANIFEST:
        return examine(path, draft=draft)
    path = path.parent if path.is_file() else path
    return read_drafts(path) if draft else read_repository(path)


def _fixture(repository: Repository, item: ListedVersion) -> str:
    """Evaluates a version's fixture; what differs is added to the problems."""
    if item.pack is None or item.fixture is None:
        return "none"
    problems = check_fixture(item.pack, item.fixture)
    name = item.fixture.name
    if item.fixture.is_relative_to(repository.root):
        name = str(item.fixture.relative_to(repository.root))
    repository.problems += [f"{name}: {problem}" for problem in problems]
    return "failed" if problems else "holds"


def _sizes(pack: Pack | None) -> list[Any]:
    if pack is None:
        return ["", "", ""]
    model = pack.model
    return [len(model.categories), len(model.queries), model.prompts]


def _repository_entry(repository: Repository, fixtures: dict[tuple[str, str], str]) -> dict[str, Any]:
    packs = []
    for pack in repository.packs:
        versions = [
            {"version": item.version, "status": item.status, "model": item.model}
            | _named_sizes(item.pack)
            | {"fixture": fixtures[pack.id, item.version]}
            for item in pack.versions
        ]
        packs.append({"id": pack.id, "name": pack.name, "versions": versions})
    drafts = [
        {"id": draft.pack.id, "version": draft.pack.version, "file": draft.file, "model": draft.pack.model.model}
        | _named_sizes(draft.pack)
        for draft in repository.drafts
    ]
    return {"packs": packs, "drafts": drafts, "warnings": repository.warnings, "problems": repository.problems}


def _named_sizes(pack: Pack | None) -> dict[str, int]:
    return {name: size or 0 for name, size in zip(("categories", "queries", "prompts"), _sizes(pack), strict=True)}


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1))


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on a terminal; elsewhere one line for each row, its cells separated by tabs."""
    console = Console()
    if not console.is_terminal:
        for row in (columns, *rows):
            print("\t".join(_printable(cell) for cell in row))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    console.print(table)


def _print_lines(kind: str, lines: Sequence[str]) -> None:
    for line in lines:
        print(f"{kind}: {_printable(line)}", file=sys.stderr)


def _printable(value: Any) -> str:
    """Text of a file that nobody vouches for, safe to print: no control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))
