"""What the distribution declares: packages, pins, version."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import spinf_serve

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)\s*(?:;.*)?")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> list[str]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    groups = PROJECT["dependency-groups"].values()
    return [*PROJECT["project"]["dependencies"], *(line for part in [*extras, *groups] for line in part)]


def locked() -> dict[str, set[str]]:
    """Name → versions in the lock file (more than one where platforms differ)."""
    versions: dict[str, set[str]] = {}
    for match in re.finditer(r"^([A-Za-z0-9._-]+)==(\S+)", LOCK, re.MULTILINE):
        versions.setdefault(normalized(match[1]), set()).add(match[2])
    return versions


def test_every_package_folder_is_declared() -> None:
    folders = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for top in ("spinf_serve", "workers")
        for path in (ROOT / top).rglob("*.py")
    }
    packages = PROJECT["tool"]["setuptools"]["packages"]
    code = {name for name in packages if (ROOT / name.replace(".", "/")).is_dir()}
    assert folders == code


def test_every_package_folder_has_an_init() -> None:
    folders = {path.parent for top in ("spinf_serve", "workers") for path in (ROOT / top).rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == spinf_serve.__version__


@pytest.mark.parametrize("line", declared())
def test_dependency_is_pinned_exactly_and_locked(line: str) -> None:
    match = REQUIREMENT.fullmatch(line)
    assert match, f"{line!r} is not an exact pin"
    assert locked()[normalized(match["name"])] == {match["version"]}


def test_scores_depend_on_these_exact_versions() -> None:
    server = PROJECT["project"]["optional-dependencies"]["server"]
    for pin in ("torch==2.11.0", "triton==3.6.0", "transformers==5.17.0"):
        assert any(line.split(";")[0].strip() == pin for line in server), pin


def test_lock_file_has_hashes_and_no_address() -> None:
    blocks = re.split(r"^(?=[A-Za-z0-9])", LOCK, flags=re.MULTILINE)
    assert not [block.splitlines()[0] for block in blocks if block.strip() and "--hash=sha256:" not in block]
    assert "://" not in LOCK
    assert not re.search(r"^\s*--?(?!hash)[a-z]", LOCK, re.MULTILINE), "an option line, such as an index address"
    assert not re.search(r"(^|\s)/\w+/", LOCK), "a path of a machine"
