"""Code planted into single processes of a server from outside, by a `sitecustomize`: the product has no hooks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LIGHT_ENGINE = """
import sys
import tests.support.light_engine
import workers.engine
sys.modules["workers.engine.engine"] = workers.engine.engine = tests.support.light_engine
"""
"""For the engine: a stand-in without torch, ready in a moment, where a test is about processes and not about scores."""


def planted(folder: Path, **code_of_role: str) -> dict[str, str]:
    """Environment in which every process of a role (one of the workers', or supervisor) runs `code` before its own."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["import sys"]
    for role, code in code_of_role.items():
        word = "serve" if role == "supervisor" else f"workers.{role}"
        lines += [f'if "{word}" in sys.orig_argv:', *(f"    {line}" for line in code.strip().splitlines())]
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def light(folder: Path, **code_of_role: str) -> dict[str, str]:
    """The same with the stand-in engine; what is planted into the engine besides runs after it."""
    engine = LIGHT_ENGINE + code_of_role.pop("engine", "")
    return planted(folder, engine=engine, **code_of_role)
