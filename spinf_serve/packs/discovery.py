"""Pack files in a folder that lists none: published versions, and drafts, which nobody serves."""

import os
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from spinf_serve.packs.listed import AVAILABLE, Draft, ListedPack, ListedVersion, Repository, file_bytes, fixture_of
from spinf_serve.packs.pack import from_data, json_of
from spinf_serve.packs.parse import is_unfitted
from spinf_serve.packs.problems import PackError

_MAX_FILES = 20_000
_MARKS = ("pack", "scoring")
"""The keys by which a JSON file is known to hold a pack."""


def discover(repository: Repository, *, draft: bool = False) -> None:
    """Every pack file of the folder, with every problem. A file in which nothing is fitted counts as a draft.

    With `draft` so does one in which something is missing that fitting would write.
    """
    found: dict[str, dict[str, ListedVersion]] = {}
    for path in _json_files(repository):
        relative = path.relative_to(repository.root).as_posix()
        try:
            content = file_bytes(path)
            data = _pack_data(content, relative)
        except PackError as error:
            repository.problems += [f"{relative}: {problem}" for problem in error.problems]
            continue
        if data is not None:
            _add(repository, found, path, content, data, draft=draft)
    for pack_id in sorted(found):
        newest_first = sorted(found[pack_id].values(), key=lambda item: version_key(item.version), reverse=True)
        repository.packs.append(ListedPack(pack_id, name=pack_id, versions=tuple(newest_first)))


def examine(path: Path, *, draft: bool = False) -> Repository:
    """One file, as a pack whatever it holds: its own folder's repository, with this file alone."""
    repository = Repository(path.parent)
    try:
        content = file_bytes(path)
        data = json_of(content, path.name)
    except PackError as error:
        repository.problems += [f"{path.name}: {problem}" for problem in error.problems]
        return repository
    found: dict[str, dict[str, ListedVersion]] = {}
    _add(repository, found, path, content, data, draft=draft)
    repository.packs += [ListedPack(name, name, versions=tuple(found[name].values())) for name in found]
    return repository


def _pack_data(content: bytes, relative: str) -> Any:
    """The parsed file where it is an object with `pack` and `scoring`, else None.

    Raises `PackError` for a file that names both and is not JSON: somebody's pack must not go missing over a comma.
    """
    try:
        data = json_of(content, relative)
    except PackError:
        if all(f'"{mark}"'.encode() in content for mark in _MARKS):
            raise
        return None
    return data if isinstance(data, dict) and data.keys() >= set(_MARKS) else None


def _add(
    repository: Repository,
    found: dict[str, dict[str, ListedVersion]],
    path: Path,
    content: bytes,
    data: Any,
    *,
    draft: bool,
) -> None:
    relative = path.relative_to(repository.root).as_posix()
    try:
        pack = from_data(data, relative, draft=draft or is_unfitted(data))
    except PackError as error:
        repository.problems += [f"{relative}: {problem}" for problem in error.problems]
        return
    repository.warnings += [f"{relative}: {warning}" for warning in pack.warnings]
    if pack.draft:
        repository.drafts.append(Draft(relative, pack))
        return
    versions = found.setdefault(pack.id, {})
    if pack.version in versions:
        repository.problems.append(f"{relative}: {pack.id} {pack.version} is in another file too")
    fixture = fixture_of(path, pack)
    versions[pack.version] = ListedVersion(pack.version, AVAILABLE, pack.model.model, pack, content, fixture)


def _json_files(repository: Repository) -> list[Path]:
    """Plain files only: reading a pipe would wait for ever."""
    paths: list[Path] = []

    def unreadable(error: OSError) -> None:
        place = Path(error.filename or repository.root)
        relative = place.relative_to(repository.root) if place.is_relative_to(repository.root) else place
        repository.problems.append(f"{relative}: cannot be read: {error.strerror or error}")

    for folder, folders, files in os.walk(repository.root, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += [path for name in sorted(files) if name.endswith(".json") and (path := Path(folder, name)).is_file()]
        if len(paths) > _MAX_FILES:
            break
    return paths[:_MAX_FILES]


def version_key(version: str) -> tuple[bool, Version, str]:
    """Sorts versions as PEP 440 does; what it does not know comes before every version that it does."""
    try:
        return True, Version(version), version
    except InvalidVersion:
        return False, Version("0"), version
