"""The settings object: layers, errors, slices, `--show-config`."""

import dataclasses
import logging
import os
import pickle
import tomllib
from pathlib import Path

import msgpack
import pytest

from spinf_serve.config import EngineConfig, FrontendConfig, Limits, PreprocessConfig
from spinf_serve.manifests import Catalog
from spinf_serve.refusal import StartRefused
from spinf_serve.settings import SETTINGS, Settings, SettingsError
from spinf_serve.settings.show import MASK, markdown_table, show_config
from spinf_serve.snapshots import describe

CLI_FLAGS = """
--device SPINF_DEVICE engine.device
--quant SPINF_QUANT engine.quant
--model-dir SPINF_MODEL_DIR engine.model_dir
--token-budget SPINF_TOKEN_BUDGET engine.token_budget
--max-tokens SPINF_MAX_TOKENS engine.max_tokens
--warmup SPINF_WARMUP engine.warmup
--preprocess-workers SPINF_PREPROCESS_WORKERS engine.preprocess_workers
--watchdog SPINF_WATCHDOG engine.watchdog
--host SPINF_HOST server.host
--port SPINF_PORT server.port
--token SPINF_TOKEN server.token
--trusted-token SPINF_ENGINE_TOKEN server.trusted_token
--queue SPINF_QUEUE server.queue
--max-body-bytes SPINF_MAX_BODY_BYTES server.max_body_bytes
--drain-timeout SPINF_DRAIN_TIMEOUT server.drain_timeout
--keepalive SPINF_KEEPALIVE server.keepalive
--body-timeout SPINF_BODY_TIMEOUT server.body_timeout
--metrics-auth SPINF_METRICS_AUTH server.metrics_auth
--ipc-dir SPINF_IPC_DIR server.ipc_dir
--debug SPINF_DEBUG server.debug
--log-format SPINF_LOG_FORMAT server.log_format
--packs SPINF_PACKS features.packs
--official-packs SPINF_OFFICIAL_PACKS features.official_packs
--packs-allow-namespace SPINF_PACKS_ALLOW_NAMESPACE features.packs_allow_namespace
--packs-refresh SPINF_PACKS_REFRESH features.packs_refresh
--max-content-tokens SPINF_MAX_CONTENT_TOKENS limits.max_content_tokens
--max-image-pixels SPINF_MAX_IMAGE_PIXELS limits.max_image_pixels
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SPINF_"):
            monkeypatch.delenv(name)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "spinf.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("line", CLI_FLAGS.strip().splitlines())
def test_names_are_the_published_ones(line: str) -> None:
    flag, env, key = line.split()
    setting = SETTINGS[key.partition(".")[2]]
    assert (setting.flag, setting.env, setting.key) == (flag, env, key)


def test_every_limit_is_a_setting() -> None:
    for field in dataclasses.fields(Limits):
        setting = SETTINGS[field.name]
        assert setting.table == "limits"
        assert setting.env == f"SPINF_{field.name.upper()}"
        assert setting.default == field.default


def test_layers_override_from_flags_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path,
        '[engine]\nmodel = "demo"\ntoken_budget = 300\n[server]\nport = 1\nqueue = 1\nkeepalive = 5\n'
        "[limits]\nmax_options = 7",
    )
    monkeypatch.setenv("SPINF_PORT", "2")
    monkeypatch.setenv("SPINF_QUEUE", "2")
    settings = Settings.load({"port": 3, "config": str(path), "host": None})
    assert (settings.port, settings.queue, settings.keepalive, settings.max_options) == (3, 2, 5.0, 7)
    assert (settings.token_budget, settings.max_tokens, settings.host) == (300, 8192, "0.0.0.0")
    assert settings.origins["port"] == "flag --port"
    assert settings.origins["queue"] == "environment SPINF_QUEUE"
    assert settings.origins["keepalive"] == f"file {path} [server] keepalive"
    assert settings.origins["max_tokens"] == "manifest gemma-3-270m"
    assert settings.origins["token_budget"].startswith("file ")
    assert "host" not in settings.origins


def test_the_manifest_is_that_of_the_model_finally_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, '[engine]\nmodel = "spinf-31b"')
    monkeypatch.setenv("SPINF_CONFIG", str(path))
    assert Settings.load().max_tokens == 32_768
    monkeypatch.setenv("SPINF_MODEL", "demo")
    assert Settings.load().max_tokens == 8192
    assert Settings.load({"model": "spinf-12b"}).max_tokens == 65_536
    monkeypatch.setenv("SPINF_MAX_TOKENS", "77")
    assert Settings.load({"model": "spinf-12b"}).max_tokens == 77


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nprot = 1", ["[server] prot", "unknown key"]),
        ("[server]\ndevice = 'cpu'", ["[server] device", "belongs to [engine]"]),
        ("[sever]\nport = 1", ["sever", "unknown table"]),
        ("port = 1", ["port", "outside any table"]),
        ("server = 1", ["server", "must be a table"]),
        ("[server]\nport = '8000'", ["[server] port", "valid integer"]),
        ("[server]\nport = 8000.0", ["[server] port", "valid integer"]),
        ("[server]\nport = true", ["[server] port", "valid integer"]),
        ("[server]\nport = 65536", ["[server] port", "65535"]),
        ("[server]\ndebug = 1", ["[server] debug", "valid boolean"]),
        ("[server]\nkeepalive = nan", ["[server] keepalive", "finite"]),
        ("[server]\nkeepalive = inf", ["[server] keepalive"]),
        ("[server]\nhost = 5", ["[server] host", "valid string"]),
        ("[server]\nhost = ['a']", ["[server] host", "valid string"]),
        ("[server]\ntoken = ''", ["[server] token", "empty"]),
        ("[server]\nlog_format = 'xml'", ["[server] log_format", "'text' or 'json'"]),
        ("[server]\nconfig = 'x'", ["[server] config", "unknown key"]),
        ("[limits]\nmax_options = 0", ["[limits] max_options", "greater than or equal to 1"]),
        ("[engine]\nwarmup = 'all'", ["[engine] warmup"]),
        ("[engine\n", ["not a TOML file"]),
    ],
)
def test_a_fault_in_the_file_names_file_table_and_key(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        Settings.load({"config": path, "model": "demo"})
    for part in [str(path), *expected]:
        assert part in str(caught.value)


def test_a_fault_in_the_file_counts_even_where_a_flag_overrides_it(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nport = '8000'")
    with pytest.raises(SettingsError, match="port"):
        Settings.load({"config": path, "model": "demo", "port": 1})


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_an_unreadable_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        Settings.load({"config": tmp_path / name})


def test_a_file_of_another_encoding_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[server]\nhost = "\xe9"')
    with pytest.raises(SettingsError, match=r"latin\.toml: not a TOML file"):
        Settings.load({"config": path})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SPINF_TOKEN", ""),
        ("SPINF_ENGINE_TOKEN", ""),
        ("SPINF_PORT", ""),
        ("SPINF_PORT", "80a"),
        ("SPINF_PORT", "-1"),
        ("SPINF_QUEUE", "-1"),
        ("SPINF_PREPROCESS_WORKERS", "0"),
        ("SPINF_PREPROCESS_WORKERS", "100000"),
        ("SPINF_QUEUE", "1.5"),
        ("SPINF_WATCHDOG", "nan"),
        ("SPINF_DRAIN_TIMEOUT", "inf"),
        ("SPINF_KEEPALIVE", "0"),
        ("SPINF_DEBUG", "maybe"),
        ("SPINF_DEVICE", "tpu"),
        ("SPINF_DEVICE", "cuda:x"),
        ("SPINF_QUANT", "fp4"),
        ("SPINF_MAX_OPTIONS", "0"),
        ("SPINF_TOKEN_BUDGET", "99999999999"),
        ("SPINF_TOKEN", "two words"),
        ("SPINF_TOKEN", "schlüssel"),
    ],
)
def test_a_fault_in_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=variable):
        Settings.load({"model": "demo"})


def test_unknown_variables_are_ignored_and_names_have_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPINF_PROT", "1")
    monkeypatch.setenv("spinf_port", "1")
    monkeypatch.setenv("PORT", "1")
    monkeypatch.setenv("TOKEN", "x")
    settings = Settings.load({"model": "demo"})
    assert (settings.port, settings.token) == (8000, None)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("true", True), ("off", False)])
def test_booleans_of_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("SPINF_DEBUG", value)
    assert Settings.load({"model": "demo"}).debug is expected


def test_false_in_a_flag_overrides_true_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPINF_DEBUG", "1")
    assert Settings.load({"model": "demo", "debug": False}).debug is False


@pytest.mark.parametrize("token", ["a b", "", "\ttab", "nul\0"])
def test_an_unusable_token_is_refused_and_never_quoted(token: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load({"model": "demo", "token": token})
    assert str(caught.value).startswith("--token: ")
    assert not token or token not in str(caught.value)


def test_secrets_do_not_show(tmp_path: Path) -> None:
    settings = Settings.load({"model": "demo", "token": "s3cret", "trusted_token": "s4cret"})
    text = show_config(settings)
    for shown in (text, repr(settings), str(settings)):
        assert "s3cret" not in shown
        assert "s4cret" not in shown
    assert MASK in text
    assert "--token" in text


def test_show_config_is_a_settings_file(tmp_path: Path) -> None:
    """What it prints gives the same settings again, except that a mask never becomes a token."""
    first = Settings.load({"model": "demo", "port": 5, "device": "cpu", "token": "x", "keepalive": 1e-7, "debug": True})
    text = show_config(first)
    assert tomllib.loads(text)["server"]["port"] == 5
    again = Settings.load({"config": write(tmp_path, text)})
    for name in SETTINGS.keys() - {"config", "token"}:
        assert getattr(again, name) == getattr(first, name), name
    assert again.token is None


def test_show_config_lists_every_setting_with_its_origin() -> None:
    lines = show_config(Settings.load({"model": "demo", "queue": 9})).splitlines()
    assert "queue = 9  # flag --queue" in lines
    assert "port = 8000  # default" in lines
    assert "token_budget = 4096  # manifest gemma-3-270m" in lines
    for name in SETTINGS.keys() - {"config"}:
        assert sum(line.removeprefix("# ").startswith(f"{name} ") for line in lines) == 1, name


def test_slices_carry_the_settings() -> None:
    settings = Settings.load(
        {"model": "demo", "device": "cpu", "token": "t", "max_options": 9, "token_budget": 64, "max_body_bytes": 5}
    )
    model = describe(settings.choice())
    assert settings.engine_config(model) == EngineConfig(model=model, device="cpu", token_budget=64, max_tokens=8192)
    assert settings.preprocess_config(model) == PreprocessConfig(
        model=model, limits=Limits(max_options=9), max_tokens=8192, max_body_bytes=5
    )
    assert settings.frontend_config(model) == FrontendConfig(
        model=model, limits=Limits(max_options=9), token="t", max_body_bytes=5
    )


@pytest.mark.parametrize("slice_type", [EngineConfig, PreprocessConfig, FrontendConfig, Limits])
def test_defaults_are_those_of_the_slices(slice_type: type) -> None:
    for field in dataclasses.fields(slice_type):
        if field.name in SETTINGS and field.name != "model":
            assert SETTINGS[field.name].default == field.default, field.name


def test_slices_and_settings_travel() -> None:
    settings = Settings.load({"model": "demo", "device": "cpu", "token": "t"})
    model = describe(settings.choice())
    for piece in (settings.engine_config(model), settings.preprocess_config(model), settings.frontend_config(model)):
        assert msgpack.unpackb(msgpack.packb(dataclasses.asdict(piece)))["model"]["id"] == "gemma-3-270m"
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_settings_cannot_be_changed() -> None:
    settings = Settings.load({"model": "demo"})
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"model": "spinf/qwen3.8-27b-int4", "device": "cpu"}, "qwen35 is not supported yet"),
        ({"model": "demo", "quant": "fp8s"}, "not available on cuda:0; available: bf16 (or auto)"),
        ({"quant": "f32"}, "available: fp8s, fp8, fp8row, w8a16, w8a8, bf16 (or auto)"),
        ({"model": "demo", "device": "cpu", "quant": "fp8s"}, "available: f32, bf16"),
        ({"device": "cpu", "quant": "fp8s"}, "available: f32, bf16"),
    ],
)
def test_what_cannot_be_started_says_why(flags: dict[str, str], reason: str) -> None:
    (message,) = Settings.load(flags).refusals()
    assert reason in message


@pytest.mark.parametrize("quant", ["auto", "fp8s", "fp8", "fp8row", "w8a16", "w8a8", "bf16"])
def test_gemma_on_a_gpu_can_be_started(quant: str) -> None:
    assert Settings.load({"quant": quant}).refusals() == []
    assert Settings.load({"model": "spinf-31b", "device": "cuda:7", "quant": quant}).refusals() == []


@pytest.mark.parametrize("model", ["demo", "spinf-12b", "spinf-31b"])
@pytest.mark.parametrize("quant", ["auto", "f32", "bf16"])
def test_gemma_on_the_cpu_can_be_started(model: str, quant: str) -> None:
    assert Settings.load({"model": model, "device": "cpu", "quant": quant}).refusals() == []


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ({}, True),
        ({"host": "10.0.0.1"}, True),
        ({"host": "::"}, True),
        ({"host": "my-host"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "127.8.8.8"}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"token": "x"}, False),
        ({"trusted_token": "x"}, False),
    ],
)
def test_an_open_server_off_loopback_is_warned_about(flags: dict[str, str], warned: bool) -> None:
    assert any("token" in message for message in Settings.load({"model": "demo", **flags}).warnings()) is warned


def test_limits_that_cannot_be_reached_are_warned_about() -> None:
    flags = {"model": "demo", "host": "127.0.0.1"}
    assert Settings.load(flags).warnings() == []
    (message,) = Settings.load({**flags, "max_content_tokens": 8192}).warnings()
    assert "max_content_tokens 8192" in message


def test_max_tokens_beyond_the_trained_positions_is_warned_about(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text", "max_position_embeddings": 6000}')
    flags = {"model": str(tmp_path), "host": "127.0.0.1"}
    assert Settings.load(flags).warnings() == []
    (message,) = Settings.load({**flags, "max_tokens": 6001}).warnings()
    assert "max_tokens 6001 is over the 6000 positions" in message


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(StartRefused, match="unknown model 'no-such-model'"):
        Settings.load({"model": "no-such-model"})


def test_the_documentation_table_has_every_setting() -> None:
    table = markdown_table()
    for setting in SETTINGS.values():
        assert f"`{setting.env}`" in table
        assert setting.help in table
        assert "|" not in setting.help


def test_python_arguments_are_named_as_such() -> None:
    with pytest.raises(SettingsError, match=r"^port: "):
        Settings.load({"port": -1}, keywords=True)
    assert Settings.load({"port": 1, "model": "demo"}, keywords=True).origins["port"] == "argument port"


def test_reading_settings_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        Settings.load({"model": "demo", "token": "s3cret"})
    assert "s3cret" not in caplog.text


def test_the_catalog_and_the_settings_agree_on_the_default_model() -> None:
    assert Catalog.load().resolve(SETTINGS["model"].default).manifest.id == "spinf/gemma-4-12b-fp8"
