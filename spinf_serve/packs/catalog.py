"""The packs that one server enables: its sources, the rules between them, and what is skipped and why."""

import json
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from spinf_serve.config import PackFile
from spinf_serve.packs.listed import AVAILABLE, COMING_SOON, DEPRECATED, ListedPack, ListedVersion, Repository
from spinf_serve.packs.opening import Opened, open_source
from spinf_serve.packs.repository import no_packs, read_repository
from spinf_serve.packs.sources import (
    OFFICIAL,
    OFFICIAL_NAMESPACE,
    Environment,
    FolderSource,
    SourceError,
    Unreachable,
    parse_source,
)

OFFICIAL_SECONDS = 5.0
"""How long a start waits for the official source, which loads while everything else does."""


@dataclass(frozen=True, slots=True)
class PackSettings:
    """What the settings say about packs. `models` are all names of the served model."""

    models: tuple[str, ...]
    sources: tuple[str, ...] = ()
    official: bool = True
    allowed_namespaces: tuple[str, ...] = ()
    refresh: bool = False


@dataclass(frozen=True, slots=True)
class EnabledPack:
    """A pack with the versions that this server keeps, in their order."""

    id: str
    name: str
    description: str
    tags: tuple[str, ...]
    source: str
    versions: tuple[ListedVersion, ...]

    @property
    def usable(self) -> tuple[ListedVersion, ...]:
        return tuple(item for item in self.versions if item.pack is not None)

    @property
    def default(self) -> ListedVersion | None:
        """The first available version, else the first deprecated one; None while the pack is coming soon."""
        for status in (AVAILABLE, DEPRECATED):
            for item in self.usable:
                if item.status == status:
                    return item
        return None


@dataclass(slots=True)
class SourceReport:
    """How one source was read. `problems` refuse the start unless the source is the official one by default."""

    source: str
    official: bool = False
    location: str = ""
    folder: bool = False  # given as a path
    commit: str | None = None
    repository: Repository | None = None
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Catalog:
    """The enabled packs by id. A server starts only where `problems` is empty."""

    packs: dict[str, EnabledPack] = field(default_factory=dict)
    sources: list[SourceReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def load_catalog(
    settings: PackSettings, environment: Environment | None = None, *, official_seconds: float | None = None
) -> Catalog:
    """Opens and reads every source, and applies the rules. Nothing is raised: see `Catalog.problems`.

    The official source has `official_seconds` (default `OFFICIAL_SECONDS`) to answer before it is left out.
    """
    environment = environment or Environment.read()
    waiting = None
    if settings.official and OFFICIAL not in settings.sources:
        seconds = OFFICIAL_SECONDS if official_seconds is None else official_seconds
        waiting = _Background(environment, settings.refresh, seconds)
    reports = [_read(source, environment, settings.refresh) for source in dict.fromkeys(settings.sources)]
    if waiting is not None:
        reports.insert(0, waiting.report())
    catalog = Catalog(sources=reports)
    for report in reports:
        catalog.warnings += report.warnings
        optional = waiting is not None and report.official
        if report.problems and optional:
            catalog.warnings += [f"{problem}; starting without the official packs" for problem in report.problems]
        elif report.problems:
            catalog.problems += report.problems
        else:
            _enable(catalog, report, settings)
    return catalog


def _read(text: str, environment: Environment, refresh: bool) -> SourceReport:
    official = text == OFFICIAL
    report = SourceReport(text, official, environment.official if official else text)
    try:
        source = parse_source(report.location)
        report.folder = isinstance(source, FolderSource) and not official
        opened: Opened = open_source(source, environment, refresh=refresh)
    except SourceError as error:
        what = "cannot be reached" if isinstance(error, Unreachable) else "cannot be used"
        report.problems.append(f"pack source {text} {what}: {error}")
        return report
    report.commit, report.repository = opened.commit, read_repository(opened.root)
    report.warnings += opened.warnings
    report.warnings += [f"pack source {text}: {warning}" for warning in report.repository.warnings]
    report.problems += [f"pack source {text}: {problem}" for problem in report.repository.problems]
    if report.problems and opened.cached is not None:
        report.warnings.append(
            f"pack source {text}: fetched into {opened.cached}: if damaged there, delete that folder"
        )
    if not (report.repository.packs or report.problems):
        report.problems.append(f"pack source {text}: {no_packs(opened.root)}, drafts aside")
    return report


class _Background:
    """The official source, read while the others are. A start that waited long enough goes on without it.

    The thread may outlive the wait: what it still puts into the cache is there for the next start.
    """

    def __init__(self, environment: Environment, refresh: bool, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._location = environment.official
        self._found: list[SourceReport] = []
        self._thread = threading.Thread(
            target=self._run, args=(environment, refresh), name="official-packs", daemon=True
        )
        self._thread.start()

    def _run(self, environment: Environment, refresh: bool) -> None:
        try:
            report = _read(OFFICIAL, environment, refresh)
        except Exception as error:  # whatever it is, it must not be waited for
            problem = f"pack source {OFFICIAL} cannot be used: {type(error).__name__}: {error}"
            report = SourceReport(OFFICIAL, True, self._location, problems=[problem])
        self._found.append(report)

    def report(self) -> SourceReport:
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._found:
            return self._found[0]
        problem = f"pack source {OFFICIAL} cannot be reached: {self._location} gave no answer in {self._seconds:.0f} s"
        return SourceReport(OFFICIAL, True, self._location, problems=[problem])


def _enable(catalog: Catalog, report: SourceReport, settings: PackSettings) -> None:
    assert report.repository is not None
    catalog.skipped += [
        f"pack source {report.source}: {draft.file} is a draft of {draft.pack.id} {draft.pack.version}: skipped"
        for draft in report.repository.drafts
    ]
    models = {name.casefold() for name in settings.models}
    for listed in report.repository.packs:
        namespace = listed.id.partition("/")[0]
        if namespace == OFFICIAL_NAMESPACE and not report.official and namespace not in settings.allowed_namespaces:
            catalog.problems.append(
                f"pack source {report.source}: {listed.id} is in the namespace {namespace}/, which belongs to the "
                f"official source (allow it: --packs-allow-namespace {namespace})"
            )
        elif listed.id in catalog.packs:
            other = catalog.packs[listed.id].source
            catalog.problems.append(f"pack {listed.id} is given by two sources: {other} and {report.source}")
        elif versions := _kept(catalog, listed, models):
            catalog.packs[listed.id] = EnabledPack(
                listed.id, listed.name, listed.description, listed.tags, report.source, versions
            )


def _kept(catalog: Catalog, listed: ListedPack, models: Collection[str]) -> tuple[ListedVersion, ...]:
    kept = []
    for item in listed.versions:
        if item.model is None or item.model.casefold() in models:
            kept.append(item)
        else:
            catalog.skipped.append(f"pack {listed.id} {item.version} is for the model {item.model}: skipped")
    return tuple(kept)


def list_entry(pack: EnabledPack) -> dict[str, Any]:
    """The pack's entry in `GET /v1/packs`."""
    default = pack.default
    entry: dict[str, Any] = {
        "id": pack.id,
        "name": pack.name,
        "status": default.status if default is not None else COMING_SOON,
        "version": default.version if default is not None else None,
        "versions": [item.version for item in pack.usable],
        "description": pack.description,
        "tags": list(pack.tags),
        "model": (default or pack.versions[0]).model,
    }
    return entry | _facts(default, pack.source)


def _facts(version: ListedVersion | None, source: str) -> dict[str, Any]:
    if version is None or version.pack is None:
        empty: dict[str, Any] = {"media": [], "source": source, "parameters": [], "contexts": [], "categories": []}
        return empty | {"decision": None, "queries": 0, "prompts": 0}
    model = version.pack.model
    decision = model.decision
    return {
        "media": list(model.media),
        "source": source,
        "parameters": [
            {"id": p.id, "label": p.label, "description": p.description, "required": p.required, "default": p.default}
            for p in model.parameters.values()
        ],
        "contexts": [{"id": context.name, "template": context.template} for context in model.contexts.values()],
        "categories": [{"id": c.id, "label": c.label, "threshold": c.threshold} for c in model.categories.values()],
        "decision": {
            "mode": decision.mode,
            "modes": list(model.modes),
            "fallback": decision.fallback,
            "max_threshold": decision.max_threshold,
            "critical": list(decision.critical),
        },
        "queries": len(model.queries),
        "prompts": model.prompts,
    }


def listing(catalog: Catalog, *, public: bool = False) -> dict[str, Any]:
    """What is enabled and where it came from. `public` is for callers: a folder has a number instead of its path."""
    packs = [list_entry(pack) for pack in catalog.packs.values()]
    sources = [_source_entry(catalog, report) for report in catalog.sources]
    if public:
        names = _public_names(catalog)
        for entry in (*packs, *sources):
            entry["source"] = names[entry["source"]]
    return {"packs": packs, "sources": sources}


def _public_names(catalog: Catalog) -> dict[str, str]:
    """Each source as callers see it: they have no use for a path on the server, and no right to it."""
    names, folders = dict[str, str](), 0
    for report in catalog.sources:
        folders += report.folder
        names[report.source] = f"folder:{folders}" if report.folder else report.source
    return names


def _source_entry(catalog: Catalog, report: SourceReport) -> dict[str, Any]:
    return {
        "source": report.source,
        "official": report.official,
        "status": "error" if report.problems else "ok",
        "commit": report.commit,
        "packs": [pack.id for pack in catalog.packs.values() if pack.source == report.source],
    }


def listing_bytes(catalog: Catalog) -> bytes:
    """The body of `GET /v1/packs`."""
    return json.dumps(listing(catalog, public=True), ensure_ascii=False, separators=(",", ":")).encode()


def pack_files(catalog: Catalog) -> tuple[PackFile, ...]:
    """What the processes of a server get: every kept version as its file's bytes, so that none reads a file again."""
    return tuple(
        PackFile(pack.id, item.version, item is pack.default, item.content or b"")
        for pack in catalog.packs.values()
        for item in pack.versions
    )
