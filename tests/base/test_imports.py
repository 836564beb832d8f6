"""Who may import whom: the rules of docs/architecture.md, read from the source and from a real interpreter."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "tokenizers",
    "fastapi",
    "starlette",
    "uvicorn",
    "zmq",
    "gguf",
    "httpx",
    "huggingface_hub",
)
PROCESSES = ("frontend", "preprocess", "engine")
# Inside the engine: a folder may import those that stand after it.
ENGINE_ORDER = ("models", "layers", "quant", "kernels")


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _nodes(tree: ast.AST, *, late: bool) -> Iterator[ast.AST]:
    """Nodes that run at import time; with `late`, those inside functions too. Never what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if _is_type_checking(node) or (is_function and not late):
            continue
        yield node
        yield from _nodes(node, late=late)


def imported(path: Path, *, late: bool) -> set[str]:
    """Dotted names that a file imports; `from a.b import c` gives both a.b and a.b.c, for c may be a module."""
    names: set[str] = set()
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8")), late=late):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names.update([origin, *(f"{origin}.{alias.name}" for alias in node.names)])
    return names


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", sources("spinf_serve"), ids=module_name)
def test_base_package_names_no_worker_at_import_time(path: Path) -> None:
    assert not [name for name in imported(path, late=False) if _inside(name, "workers")]


@pytest.mark.parametrize("process", PROCESSES)
def test_workers_do_not_import_each_other(process: str) -> None:
    others = [f"workers.{other}" for other in PROCESSES if other != process]
    found = {
        module_name(path): name
        for path in sources(f"workers/{process}")
        for name in imported(path, late=True)
        if any(_inside(name, other) for other in others)
    }
    assert not found


@pytest.mark.parametrize("process", ["frontend", "preprocess"])
def test_only_the_engine_imports_torch(process: str) -> None:
    found = {
        module_name(path): name
        for path in sources(f"workers/{process}")
        for name in imported(path, late=True)
        if _inside(name, "torch") or _inside(name, "triton")
    }
    assert not found


@pytest.mark.parametrize("folder", ENGINE_ORDER)
def test_engine_imports_go_one_way(folder: str) -> None:
    earlier = [f"workers.engine.{name}" for name in ENGINE_ORDER[: ENGINE_ORDER.index(folder)]]
    found = {
        module_name(path): name
        for path in sources(f"workers/engine/{folder}")
        for name in imported(path, late=True)
        if any(_inside(name, other) for other in earlier)
    }
    assert not found


def test_engine_core_needs_no_sockets_and_no_http() -> None:
    """Only the entry and the loop of the process may touch the wire: everything else runs in one process too."""
    thin = {"__main__", "loop"}
    outside = ("zmq", "fastapi", "uvicorn", "spinf_serve.wire", "spinf_serve.supervisor")
    found = {
        module_name(path): name
        for process in ("engine", "preprocess")
        for path in sources(f"workers/{process}")
        if path.stem not in thin
        for name in imported(path, late=True)
        if any(_inside(name, other) for other in outside)
    }
    assert not found


def _loaded_after(code: str) -> list[str]:
    """Heavy packages in `sys.modules` of a fresh interpreter that ran `code`."""
    probe = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1].split() if run.stdout.strip() else []


def test_importing_the_base_package_loads_nothing_heavy() -> None:
    socket_owners = ("spinf_serve.wire", "spinf_serve.supervisor")
    modules = [
        name
        for name in map(module_name, sources("spinf_serve"))
        if not any(_inside(name, owner) for owner in socket_owners) and not name.endswith("__main__")
    ]
    assert "spinf_serve.protocol.errors" in modules
    assert _loaded_after("\n".join(f"import {name}" for name in modules)) == []


def test_show_config_loads_nothing_heavy() -> None:
    code = (
        "from typer.testing import CliRunner\n"
        "from spinf_serve.cli import app\n"
        "result = CliRunner().invoke(app, ['serve', 'demo', '--show-config'])\n"
        "assert result.exit_code == 0, result.output"
    )
    assert _loaded_after(code) == []


def test_the_wire_and_the_supervisor_load_no_torch() -> None:
    modules = [module_name(path) for path in sources("spinf_serve") if path.parts[-2] in ("wire", "supervisor")]
    loaded = _loaded_after("\n".join(f"import {name}" for name in modules))
    assert set(loaded) <= {"zmq"}
