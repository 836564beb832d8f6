"""A folder of packs: what `prompt-packs.json` lists, or without it the pack files that are found."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from spinf_serve import manifests
from spinf_serve.packs.discovery import discover
from spinf_serve.packs.listed import (
    AVAILABLE,
    COMING_SOON,
    STATUSES,
    ListedPack,
    ListedVersion,
    Repository,
    file_bytes,
    fixture_of,
)
from spinf_serve.packs.pack import Pack, from_data, json_of
from spinf_serve.packs.parse import MEDIA, VERSION, is_pack_id
from spinf_serve.packs.problems import PackError, Problems, fields_of
from spinf_serve.protocol.document import Fields, Place

MANIFEST = "prompt-packs.json"
FORMAT = 1


def read_repository(root: Path) -> Repository:
    """Everything in a folder, with every problem. Raises `StartRefused` where the model manifests cannot be read."""
    repository = Repository(root)
    if not root.is_dir():
        repository.problems.append(f"{root} is no folder")
    elif (root / MANIFEST).exists():
        _read_manifest(repository)
    else:
        discover(repository)
    if not (repository.packs or repository.drafts or repository.problems):
        repository.problems.append(no_packs(root))
    return repository


def read_drafts(root: Path) -> Repository:
    """Every pack file in a folder, listed in a manifest or not; what fitting would write may be missing."""
    repository = Repository(root)
    if not root.is_dir():
        repository.problems.append(f"{root} is no folder")
    else:
        discover(repository, draft=True)
    if not (repository.packs or repository.drafts or repository.problems):
        repository.problems.append(no_packs(root))
    return repository


def no_packs(root: Path) -> str:
    return f"{root} holds no packs: neither {MANIFEST} nor JSON files with pack and scoring"


def _read_manifest(repository: Repository) -> None:
    problems = Problems()
    try:
        data = json_of(file_bytes(repository.root / MANIFEST), MANIFEST)
    except PackError as error:
        repository.problems += [f"{MANIFEST}: {problem}" for problem in error.problems]
        return
    root = fields_of(data, Place(), problems)
    if root is not None:
        _read_entries(repository, root, problems)
    repository.problems += [f"{MANIFEST}: {problem}" for problem in problems.found]


def _read_entries(repository: Repository, root: Fields, problems: Problems) -> None:
    if root.value.get("format") != FORMAT or isinstance(root.value.get("format"), bool):
        root.fault("format", f"must be {FORMAT}")
    namespace = root.string("namespace", required=True) or ""
    for name in ("name", "homepage", "license"):
        root.string(name)
    place, seen = root.place("packs"), set[str]()
    for i, entry in enumerate(root.items("packs", required=True) or []):
        fields = fields_of(entry, place.item(i), problems)
        if fields is None:
            continue
        pack_id = fields.string("id", required=True)
        if pack_id is None:
            continue
        if not is_pack_id(pack_id):
            fields.fault("id", "must be <namespace>/<name>: lower case letters, digits and . _ -")
        elif pack_id.partition("/")[0] != namespace:
            fields.fault("id", f"{pack_id} is outside the namespace {namespace[:64]}")
        if pack_id in seen:
            fields.fault("id", f"{pack_id} is listed twice")
            continue
        seen.add(pack_id)
        repository.packs.append(_entry(repository, fields, pack_id, problems))


def _entry(repository: Repository, fields: Fields, pack_id: str, problems: Problems) -> ListedPack:
    listed = Listed(repository, fields, pack_id, problems)
    for name, others in (("readme", ()), ("samples", (list,))):
        if not isinstance(fields.value.get(name), others):
            listed.file(fields, name)
    tags = fields.items("tags") or []
    if not all(isinstance(tag, str) for tag in tags):
        fields.fault("tags", "must be a list of strings")
        tags = []
    return ListedPack(
        id=pack_id,
        name=fields.string("name") or pack_id,
        description=fields.string("description") or "",
        tags=tuple(tags),
        versions=tuple(listed.versions()),
    )


class Listed:
    """A manifest's entry, checked against the files that it names."""

    def __init__(self, repository: Repository, fields: Fields, pack_id: str, problems: Problems) -> None:
        self._repository, self._fields, self._id, self._problems = repository, fields, pack_id, problems
        self._media = self._names("media", MEDIA)
        self._parameters = self._names("parameters", None)

    def versions(self) -> Iterator[ListedVersion]:
        entries = self._fields.items("versions", required=True)
        place, seen = self._fields.place("versions"), set[str]()
        if entries is not None and not entries:
            self._problems.at(place, "must hold at least one version")
        for i, entry in enumerate(entries or []):
            fields = fields_of(entry, place.item(i), self._problems)
            version = fields.string("version", required=True) if fields is not None else None
            if fields is None or version is None:
                continue
            if not VERSION.fullmatch(version):
                fields.fault("version", "must be digits, letters and . + -")
            if version in seen:
                fields.fault("version", f"{self._id} {version} is listed twice")
            seen.add(version)
            yield self._version(fields, version)

    def _version(self, fields: Fields, version: str) -> ListedVersion:
        status = AVAILABLE if (given := fields.string("status")) is None else given
        if status not in STATUSES:
            fields.fault("status", f"must be one of {', '.join(STATUSES)}")
        model, note = fields.string("model", required=status != COMING_SOON), fields.string("note") or ""
        if status == COMING_SOON:
            return ListedVersion(version, status, model, note=note)
        path = self.file(fields, "file", required=True)
        fixture = self.file(fields, "fixture")
        if path is None:
            return ListedVersion(version, status, model, note=note)
        try:
            content = file_bytes(path)
            pack = from_data(json_of(content, ""), "")
        except PackError as error:
            for problem in error.problems:
                fields.fault("file", f"{fields.value['file']}: {problem}")
            return ListedVersion(version, status, model, note=note)
        self._contradictions(fields, pack, version, model)
        self._repository.warnings += [f"{fields.value['file']}: {warning}" for warning in pack.warnings]
        return ListedVersion(version, status, pack.model.model, pack, content, fixture or fixture_of(path, pack), note)

    def _contradictions(self, fields: Fields, pack: Pack, version: str, model: str | None) -> None:
        """An entry may repeat what its file says; where they differ, neither can be believed."""
        told: list[tuple[str, Any, Any]] = [
            ("id", self._id, pack.id),
            ("version", version, pack.version),
            ("model", self._own_name(model, pack), pack.model.model),
            ("media", self._media, set(pack.model.media)),
            ("parameters", self._parameters, set(pack.model.parameters)),
        ]
        for name, entry, file in told:
            if entry is not None and entry != file:
                fields.fault(
                    "file", f"{fields.value['file']}: its {name} is {_listed(file)}, the entry says {_listed(entry)}"
                )

    def _own_name(self, model: str | None, pack: Pack) -> str | None:
        """The entry's model under the name that the file has for it: an id and its aliases are one model."""
        if model is None:
            return None
        own, catalog = pack.model.model, manifests.Catalog.load()
        return own if catalog.names_of(model) & catalog.names_of(own) else model

    def _names(self, name: str, known: tuple[str, ...] | None) -> set[str] | None:
        """The names in a list of names or of objects with an id, or the keys of an object; None where it is absent."""
        value = self._fields.value.get(name)
        if value is None:
            return None
        names = (
            [item.get("id") if isinstance(item, dict) else item for item in value] if isinstance(value, list) else value
        )
        if not isinstance(value, list | dict) or not all(isinstance(item, str) for item in names):
            self._fields.fault(name, "must be a list of names" if known else "must be an object or a list of names")
            return None
        return set(names)

    def file(self, fields: Fields, name: str, *, required: bool = False) -> Path | None:
        """A file of the repository that an entry names, or None and a problem."""
        if fields.value.get(name) is None and not required:
            return None
        text = fields.string(name, min_chars=1, required=True)
        if text is None:
            return None
        path = inside(self._repository.root, text)
        if path is None:
            fields.fault(name, f"{text[:200]} is outside the repository")
        elif not path.is_file():
            fields.fault(name, f"{text[:200]} does not exist")
            return None
        return path


def _listed(value: Any) -> str:
    return ", ".join(sorted(value)) or "none" if isinstance(value, set) else str(value)


def inside(root: Path, relative: str) -> Path | None:
    """A path below `root`, links followed, or None where it leaves it or cannot be a path at all."""
    if "\0" in relative or PurePosixPath(relative).is_absolute():
        return None
    try:
        path = (root / relative).resolve()
        path.is_file()
    except (OSError, RuntimeError):  # a name that the file system does not take, links in a circle
        return None
    return path if path.is_relative_to(root.resolve()) else None
