"""The command line: parameters made from the settings, exit codes, what is printed where."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spinf_serve import gpus
from spinf_serve.cli import app, options
from spinf_serve.protocol.ids import new_request_id
from spinf_serve.settings import SETTINGS, Settings

LAUNCH = [sys.executable, "-c", "from spinf_serve.cli import app; app()"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SPINF_"):
            monkeypatch.delenv(name)


def invoke(*arguments: str, stdin: bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The supervisor replaced: the settings that `serve` hands to it."""
    found: list[Settings] = []

    def run(settings: Settings) -> int:
        found.append(settings)
        return 5

    monkeypatch.setattr("spinf_serve.supervisor.run", run)
    return found


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, "spinf-serve 0.1.2\n")


@pytest.mark.parametrize("command", ["serve", "score"])
def test_help_shows_every_setting(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    for setting in SETTINGS.values():
        assert (setting.flag or "[MODEL]") in result.stdout
        assert setting.env in result.stdout


def test_serve_hands_the_settings_to_the_supervisor_and_exits_with_its_code(started: list[Settings]) -> None:
    result = invoke("serve", "demo", "--device", "cpu", "--port", "0", "--max-options=7", "--debug", "--keepalive", "5")
    assert result.exit_code == 5
    (settings,) = started
    assert (settings.model, settings.device, settings.port, settings.max_options) == ("demo", "cpu", 0, 7)
    assert (settings.debug, settings.keepalive) == (True, 5.0)


def test_the_order_of_flags_does_not_matter(started: list[Settings]) -> None:
    pieces = [["demo"], ["--device", "cpu"], ["--port", "81"], ["--no-debug"]]
    for order in itertools.permutations(pieces):
        invoke("serve", *itertools.chain.from_iterable(order))
    assert len(started) == 24
    assert all(settings == started[0] for settings in started)


def test_every_flag_sets_its_setting(started: list[Settings], tmp_path: Path) -> None:
    """One value per setting, other than its default, through the command line to the settings object."""
    (tmp_path / "empty.toml").write_text("")
    given: dict[str, Any] = {
        "model": "demo",
        "device": "cpu",
        "quant": "f32",
        "model_dir": str(tmp_path),
        "warmup": "none",
        "host": "127.0.0.1",
        "token": "a",
        "trusted_token": "b",
        "ipc_dir": "/tmp/x",
        "log_format": "json",
        "metrics_auth": True,
        "debug": True,
        "packs": ("github:a/b@1.0", "folder"),
        "official_packs": False,
        "packs_allow_namespace": ("spinf",),
        "packs_refresh": True,
        "config": tmp_path / "empty.toml",
    }
    given |= {name: setting.default + 1 for name, setting in SETTINGS.items() if name not in given}
    arguments: list[str] = []
    for name, value in given.items():
        flag = SETTINGS[name].flag
        if flag is None:
            arguments.append(str(value))
        elif isinstance(value, bool):
            arguments.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            for one in value if isinstance(value, tuple) else (value,):
                arguments += [flag, str(one)]
    assert invoke("serve", *arguments).exit_code == 5
    for name, value in given.items():
        assert getattr(started[0], name) == value, name


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["serve", "--port", "x"], 2),
        (["serve", "--queue", "1.5"], 2),
        (["serve", "--no-such-flag"], 2),
        (["serve", "demo", "another"], 2),
        (["serve", "demo", "--port"], 2),
        (["score"], 2),
        (["no-such-command"], 2),
        (["--port", "1", "serve"], 2),
        (["serve"], 1),
        (["serve", "demo"], 1),
        (["serve", "demo", "--device", "cpu", "--port", "65536"], 1),
        (["serve", "demo", "--device", "cpu", "--queue", "-1"], 1),
        (["serve", "demo", "--device", "cpu", "--watchdog", "nan"], 1),
        (["serve", "demo", "--device", "cpu", "--token", ""], 1),
        (["serve", "demo", "--device", "cpu", "--token="], 1),
        (["serve", "demo", "--device", "cpu", "--quant", "fp8s"], 1),
        (["serve", "demo", "--device", "cpu", "--config", "/no/such/file.toml"], 1),
        (["serve", "no-such-model", "--device", "cpu"], 1),
        (["serve", "spinf-12b", "--show-config", "--port", "-1"], 1),
        (["serve", "demo", "--show-config"], 0),
        (["serve", "--show-config"], 0),
        (["serve", "demo", "--device", "cpu"], 5),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_exit_codes(started: list[Settings], arguments: list[str], code: int) -> None:
    result = invoke(*arguments)
    assert result.exit_code == code
    assert len(started) == (code == 5), "nothing starts after an error"
    if code in (1, 2):
        assert result.stdout == ""
        assert result.stderr
        assert "Traceback" not in result.stderr


def test_a_secret_is_never_printed(started: list[Settings]) -> None:
    for flag in ("--token", "--trusted-token"):
        for value in ("hidden-secret", "hidden secret"):
            for more in (["--show-config"], ["--port", "-1"], ["--port", "x"]):
                result = invoke("serve", "demo", flag, value, *more)
                assert "hidden" not in result.output


@pytest.mark.parametrize("command", [["serve"], ["score", "-"]], ids=lambda command: command[0])
def test_a_machine_without_a_gpu_says_so_at_once(
    started: list[Settings], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(gpus, "ask_driver", lambda: gpus.Driver())
    result = invoke(*command)
    assert result.exit_code == 1
    assert "--device cuda:0: no NVIDIA driver is installed here" in result.stderr
    assert "--device cpu" in result.stderr
    assert not started


def test_a_gpu_is_no_reason_to_refuse(started: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "ask_driver", lambda: gpus.Driver((13, 0), 0, ((9, 0),)))
    monkeypatch.setattr(gpus, "compiler_refusal", lambda: None)
    assert invoke("serve").exit_code == 5
    assert started[0].device == "cuda:0"


def test_a_model_of_a_family_to_come_says_why_it_does_not_start() -> None:
    result = invoke("serve", "qwen3.8-27b-s", "--device", "cpu")
    assert "its family qwen35 is not supported yet" in result.stderr


def test_missing_server_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spinf_serve.extras.find_spec", lambda name: None if name in ("torch", "zmq") else name)
    result = invoke("serve", "demo", "--device", "cpu")
    assert result.exit_code == 1
    assert "torch, zmq not installed: pip install 'spinf-serve[server]'" in result.stderr


def test_show_config_needs_only_the_base_package() -> None:
    """In a fresh interpreter where every package of the extras is unimportable."""
    code = (
        "import sys\n"
        "for name in ('torch', 'zmq', 'fastapi', 'uvicorn', 'tokenizers', 'safetensors', 'transformers', 'gguf',\n"
        "             'huggingface_hub', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "from spinf_serve.cli import app\n"
        "app(['serve', 'demo', '--show-config'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "token_budget = 4096  # manifest gemma-3-270m" in done.stdout
    assert done.stderr == ""


def test_the_environment_and_the_file_count(tmp_path: Path) -> None:
    config = tmp_path / "s.toml"
    config.write_text("[server]\nport = 81\nqueue = 9\n")
    env = {**os.environ, "SPINF_CONFIG": str(config), "SPINF_PORT": "82", "SPINF_MODEL": "demo", "NO_COLOR": "1"}
    done = subprocess.run(
        [*LAUNCH, "serve", "--show-config"], capture_output=True, text=True, env=env, timeout=60, check=True
    )
    assert "port = 82  # environment SPINF_PORT" in done.stdout
    assert f"queue = 9  # file {config} [server] queue" in done.stdout
    assert 'model = "demo"  # environment SPINF_MODEL' in done.stdout


def test_an_unreadable_request_is_a_failure(tmp_path: Path) -> None:
    result = invoke("score", str(tmp_path / "gone.json"), "demo", "--device", "cpu")
    assert result.exit_code == 1
    assert "gone.json: cannot be read" in result.stderr
    assert result.stdout == ""


def test_scoring_with_a_model_that_cannot_be_served_is_a_failure(tmp_path: Path) -> None:
    result = invoke("score", "-", "qwen3.8-27b-s", "--device", "cpu", stdin=b"{}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "not supported yet" in result.stderr


def test_plain_types_of_the_command_line() -> None:
    kinds = {name: options._plain_type(setting) for name, setting in SETTINGS.items()}
    assert kinds["port"] is int
    assert kinds["watchdog"] is float
    assert kinds["debug"] is bool
    assert kinds["token"] is kinds["config"] is kinds["warmup"] is str


def test_request_ids_are_ulids_in_order_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alphabet = set("0123456789ABCDEFGHJKMNPQRSTVWXYZ")
    ids = {new_request_id() for _ in range(2000)}
    assert len(ids) == 2000
    for value in ids:
        assert len(value) == 30
        assert value.startswith("scr_")
        assert set(value[4:]) <= alphabet
    monkeypatch.setattr("time.time_ns", lambda: 1_469_922_850_259 * 1_000_000)
    assert new_request_id()[4:14] == "01ARZ3NDEK"  # the ULID specification's example of that millisecond
