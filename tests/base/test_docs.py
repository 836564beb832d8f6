"""The documentation is complete: what the code declares stands on its page, and nothing stands there that is gone."""

import ast
import json
import re
import runpy
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer

from spinf_serve.cli import app
from spinf_serve.config import Limits
from spinf_serve.manifests import FAMILIES
from spinf_serve.protocol.errors import STATUS_OF_CODE
from spinf_serve.supervisor import exit_codes

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """From a heading to the next one of its level or above."""
    match = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert match, f"no section {title!r}"
    rest = text[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def first_cells(table: str) -> set[str]:
    """The words in backquotes in the first column of a section's tables."""
    return {
        word for line in re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE) for word in re.findall(r"`([^`]+)`", line)
    }


def sources() -> Iterator[Path]:
    for folder in ("spinf_serve", "workers"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def string_literals(pattern: str) -> set[str]:
    """String constants of the code that match a pattern whole, docstrings excepted (they hold more than a word)."""
    nodes = (node for path in sources() for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    values = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {value for value in values if re.fullmatch(pattern, value)}


def test_table_of_settings_is_the_declared_one() -> None:
    with_table = runpy.run_path(str(ROOT / "docs/update.py"))["with_table"]
    assert page("configuration") == with_table(page("configuration")), "out of date: make docs"


def test_every_variable_is_documented() -> None:
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page("configuration")))
    assert string_literals("(SPINF|XDG|HF)_[A-Z0-9_]+") - {"SPINF_"} <= documented


def test_every_served_family_and_scheme_is_documented() -> None:
    named = set(re.findall(r"`([^`]+)`", section(page("configuration"), "Which models")))
    served = {name: schemes for name, family in FAMILIES.items() for schemes in family.schemes.values()}
    assert served.keys() | {scheme for schemes in served.values() for scheme in schemes} <= named
    assert not named & (FAMILIES.keys() - served.keys())


def test_every_command_is_documented() -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    commands |= {group.name for group in app.registered_groups if group.name}
    documented = {
        match[1]
        for cell in first_cells(section(page("configuration"), "Commands"))
        if (match := re.match(r"spinf-serve (\w+)", cell))
    }
    assert documented == commands
    assert isinstance(app, typer.Typer)


def test_every_error_code_is_documented_with_its_status() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| `(\w+)` \| (.+) \|$", section(page("api"), "Errors"), re.MULTILINE)
    documented = {code: {int(status) for status in statuses.split(",")} for statuses, code, _when in rows}
    assert documented.keys() == STATUS_OF_CODE.keys()
    assert not [code for code, status in STATUS_OF_CODE.items() if status not in documented[code]]
    assert len(rows) == len(documented), "a code stands twice"


def test_every_warning_is_documented() -> None:
    dicts = (
        n
        for path in sources()
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(n, ast.Dict)
    )
    pairs = [(key, value) for node in dicts for key, value in zip(node.keys, node.values, strict=True)]
    warnings = {
        value.value
        for key, value in pairs
        if isinstance(key, ast.Constant) and key.value == "code" and isinstance(value, ast.Constant)
    }
    assert warnings
    assert first_cells(section(page("api"), "Warnings")) == warnings


def test_every_limit_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", section(page("api"), "Limits"), re.MULTILINE))
    assert {name: int(value) for name, value in rows.items() if name != "queue"} == asdict(Limits())


def test_every_exit_code_is_documented() -> None:
    rows = re.findall(r"^\| (\d) \|", section(page("operations"), "Exit codes of `serve`"), re.MULTILINE)
    usage = 2  # the command line's own
    assert {int(code) for code in rows} == {value for name, value in vars(exit_codes).items() if name.isupper()} | {
        usage
    }


def test_every_part_stands_on_the_map() -> None:
    packages = section(page("architecture"), "Packages")
    parts = {path.relative_to(ROOT).parts for path in sources() if path.stem not in ("__init__", "__main__")}
    named = set(re.findall(r"[\w.]+(?:/|\.py)", packages))
    base = {f"{part[1]}/" if len(part) > 2 else part[1] for part in parts if part[0] == "spinf_serve"}
    workers = {f"{part[1]}/" for part in parts if part[0] == "workers"}
    engine = {f"{part[2]}/" for part in parts if part[:2] == ("workers", "engine") and len(part) > 3}
    assert base | workers | engine <= named


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(link)
    assert not broken


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/(\w+)\.md\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert linked == {path.stem for path in (ROOT / "docs").glob("*.md")}


def json_blocks() -> list[Any]:
    found = []
    for path in PAGES:
        for number, block in enumerate(
            re.findall(r"^```json\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)
        ):
            found.append(pytest.param(block, id=f"{path.name}-{number}"))
    return found


@pytest.mark.parametrize("block", json_blocks())
def test_examples_are_json(block: str) -> None:
    assert isinstance(json.loads(block), dict)


def test_make_targets_of_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        name for path in PAGES for name in re.findall(r"(?:`|^)make ([a-z]+)", path.read_text(encoding="utf-8"), re.M)
    }
    assert {"demo", "test"} <= named
    assert named <= targets
