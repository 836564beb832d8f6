"""`spinf-serve packs list` and `packs validate`: tables, plain lines, JSON, exit codes."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spinf_serve.cli import app
from spinf_serve.manifests import DEFAULT_MODEL
from tests.base.packs.support import draft_of, small_pack, write_json, write_repository

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "docs/examples/prompt-packs"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPINF_PACKS", "SPINF_OFFICIAL_PACKS", "SPINF_MODEL", "SPINF_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["packs", *map(str, arguments)])


def test_validate_prints_the_listing(repository: Path) -> None:
    result = invoke("validate", repository)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "pack\tversion\tstatus\tmodel\tcategories\tqueries\tprompts\tfixture",
        "acme/guard\t1.2.0\tavailable\tdemo\t3\t3\t5\tnone",
    ]


def test_validate_as_json(repository: Path) -> None:
    found = json.loads(invoke("validate", repository, "--json").stdout)
    assert found["problems"] == []
    assert found["packs"][0]["versions"] == [
        {
            "version": "1.2.0",
            "status": "available",
            "model": "demo",
            "categories": 3,
            "queries": 3,
            "prompts": 5,
            "fixture": "none",
        }
    ]


def test_validate_the_example() -> None:
    result = invoke("validate", EXAMPLE)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("holds") == 2


def test_validate_names_every_problem_and_exits_with_1(tmp_path: Path) -> None:
    bad = small_pack(answers="x")
    bad["reads"][0]["sd"] = 0
    result = invoke("validate", write_repository(tmp_path, [bad]))
    assert result.exit_code == 1
    assert result.stderr.count("problem: ") == 2
    assert invoke("validate", tmp_path / "none").exit_code == 1
    found = json.loads(invoke("validate", tmp_path, "--json").stdout)
    assert len(found["problems"]) == 2


def test_validate_evaluates_fixtures(repository: Path) -> None:
    write_json(repository / "packs/fixtures/1.2.0.json", {"results": [], "expected": []})
    result = invoke("validate", repository)
    assert result.exit_code == 1
    assert "packs/fixtures/1.2.0.json: must hold the lists" in result.stderr
    assert "failed" in result.stdout


def test_validate_shows_drafts_as_drafts(tmp_path: Path) -> None:
    write_json(tmp_path / "drafts/guard.json", draft_of(small_pack()))
    row = "acme/guard\t1.2.0\tdraft\tdemo\t3\t3\t5\tnone"
    for path in (tmp_path, tmp_path / "drafts/guard.json"):
        result = invoke("validate", path)
        assert (result.exit_code, result.stderr, result.stdout.splitlines()[1:]) == (0, "", [row])
    found = json.loads(invoke("validate", tmp_path, "--json").stdout)
    sizes = {"categories": 3, "queries": 3, "prompts": 5}
    assert found["drafts"] == [
        {"id": "acme/guard", "version": "1.2.0", "file": "drafts/guard.json", "model": "demo"} | sizes
    ]


def test_validate_half_fitted_packs_as_drafts(repository: Path) -> None:
    half = small_pack(version="3")
    del half["categories"]["harm"]["platt"]
    file = write_json(repository / "drafts/half.json", half)
    assert invoke("validate", file).exit_code == 1
    assert invoke("validate", repository).stdout.count("draft") == 0
    for path in (file, repository):
        result = invoke("validate", "--draft", path)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "acme/guard\t3\tdraft\tdemo" in result.stdout
    write_json(file, half | {"answers": "x"})
    assert "problem: drafts/half.json: answers: must be" in invoke("validate", "--draft", repository).stderr


def test_validate_one_file(repository: Path) -> None:
    file = repository / "packs/acme-guard-1.2.0.json"
    assert "acme/guard\t1.2.0\tavailable" in invoke("validate", file).stdout
    assert "acme/guard\t1.2.0\tavailable" in invoke("validate", repository / "prompt-packs.json").stdout
    write_json(repository / "packs/fixtures/1.2.0.json", {"results": [], "expected": []})
    assert invoke("validate", file).exit_code == 1
    result = invoke("validate", write_json(repository / "other.json", [1]))
    assert (result.exit_code, result.stderr) == (1, "problem: other.json: must be an object\n")


def test_validate_says_that_the_model_manifests_cannot_be_read(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPINF_MANIFEST_DIRS", "/nonexistent")
    result = invoke("validate", repository)
    assert (result.exit_code, result.stderr) == (1, "spinf-serve: no such directory of manifests: /nonexistent\n")


def test_validate_warns_of_a_broken_lock_without_failing(tmp_path: Path) -> None:
    edited = small_pack()
    edited["categories"]["harm"]["platt"] = [1.5, 0.0]
    result = invoke("validate", write_repository(tmp_path, [edited]))
    assert result.exit_code == 0
    assert "warning: packs/acme-guard-1.2.0.json: decision.micro_layer.lock: does not match" in result.stderr


def test_list_shows_what_a_server_would_enable(repository: Path, tmp_path: Path) -> None:
    other = write_repository(tmp_path / "other", [small_pack(pack="acme/other", model="somebody/else")])
    result = invoke("list", "--no-official", "--model", "demo", "--packs", repository, "--packs", other)
    assert result.exit_code == 0, result.output
    assert f"acme/guard\t1.2.0\tavailable\tdemo\t3\t5\tmicro_layer\t{repository}" in result.stdout.splitlines()
    assert f"{other}\tok\t\t0" in result.stdout.splitlines()
    assert "skipped: pack acme/other 1.2.0 is for the model somebody/else: skipped" in result.stderr


def test_list_as_json(repository: Path) -> None:
    found = json.loads(invoke("list", "--no-official", "--model", "demo", "--packs", repository, "--json").stdout)
    assert [pack["id"] for pack in found["packs"]] == ["acme/guard"]
    assert (found["skipped"], found["warnings"], found["problems"]) == ([], [], [])


def test_list_without_sources() -> None:
    result = invoke("list", "--no-official", "--model", "demo")
    assert (result.exit_code, result.stderr) == (0, "")


def test_list_says_which_model_it_is_for_where_nobody_chose_one(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("list", "--no-official", "--packs", repository)
    line = f"for the default model {DEFAULT_MODEL}; choose another with --model ID"
    assert invoke(*arguments).stderr.splitlines()[0] == line
    assert json.loads(invoke(*arguments, "--json").stdout)["model"] == DEFAULT_MODEL
    assert json.loads(invoke(*arguments, "--model", "demo", "--json").stdout)["model"] == "gemma-3-270m"
    monkeypatch.setenv("SPINF_MODEL", "demo")
    assert invoke(*arguments).stderr == ""


def test_list_skips_drafts(tmp_path: Path) -> None:
    write_json(tmp_path / "drafts/guard.json", draft_of(small_pack()))
    arguments = ("list", "--no-official", "--model", "demo", "--packs", tmp_path)
    alone = invoke(*arguments)
    assert alone.exit_code == 1
    assert "holds no packs" in alone.stderr
    write_json(tmp_path / "packs/1.2.0.json", small_pack())
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "drafts/guard.json is a draft of acme/guard 1.2.0: skipped" in result.stderr
    assert "acme/guard\t1.2.0\tavailable" in result.stdout


def test_list_says_that_the_official_source_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPINF_PACKS_OFFICIAL", "github:spinfinc/spinf-prompts@0.1.0")
    result = invoke("list")
    assert result.exit_code == 0
    assert "official\terror" in result.stdout
    assert "warning: pack source official cannot be reached" in result.stderr


@pytest.mark.parametrize("source", ["/nonexistent", "github:x"])
def test_list_refuses_a_bad_source(source: str) -> None:
    result = invoke("list", "--no-official", "--packs", source)
    assert result.exit_code == 1
    assert f"problem: pack source {source}" in result.stderr


def test_list_needs_permission_for_the_official_namespace(tmp_path: Path) -> None:
    root = write_repository(tmp_path, [small_pack(pack="spinf/moderation")], namespace="spinf")
    arguments = ("list", "--no-official", "--model", "demo", "--packs", root)
    assert invoke(*arguments).exit_code == 1
    assert "spinf/moderation" in invoke(*arguments, "--allow-namespace", "spinf").stdout


def test_list_takes_the_settings_of_the_environment(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPINF_PACKS", str(repository))
    monkeypatch.setenv("SPINF_OFFICIAL_PACKS", "0")
    monkeypatch.setenv("SPINF_MODEL", "demo")
    assert "acme/guard" in invoke("list").stdout


def test_control_characters_of_a_file_are_not_printed(tmp_path: Path) -> None:
    root = write_repository(tmp_path, [small_pack(model="\x1b[31mred\x07")])
    result = invoke("validate", root)
    assert "\x1b" not in result.output
    assert "\x07" not in result.output


def test_a_terminal_gets_a_table(repository: Path) -> None:
    leader, follower = pty.openpty()
    code = f"from spinf_serve.cli import app; app(['packs', 'validate', {str(repository)!r}])"
    environment = os.environ | {"COLUMNS": "120", "TERM": "xterm"}
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=follower)
    os.close(follower)
    output = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the child closed the terminal
            break
        if not chunk:
            break
        output += chunk
    os.close(leader)
    assert child.wait(30) == 0
    assert "│ acme/guard │" in output.decode()
