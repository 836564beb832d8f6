"""The container files: what no linter knows about them."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))


def instructions(name: str) -> list[str]:
    """The arguments of an instruction in the last stage of the Dockerfile, continuation lines joined."""
    stage = DOCKERFILE.replace("\\\n", " ").rsplit("\nFROM ", 1)[1]
    return re.findall(rf"^{name}\s+(.*)$", stage, re.MULTILINE)


def test_image_runs_the_server_as_any_user() -> None:
    assert instructions("ENTRYPOINT") == ['["spinf-serve", "serve"]']
    assert instructions("USER") == ["10001:10001"]
    assert "/readyz" in instructions("HEALTHCHECK")[0]
    assert instructions("VOLUME") == ["/cache"]
    assert any("gcc" in run and "--mode=1777 /cache" in run for run in instructions("RUN"))
    environment = " ".join(instructions("ENV"))
    for variable in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert re.search(rf"\b{variable}=/cache", environment), variable


def test_image_context_holds_what_the_wheel_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    kept = re.findall(r"^!(\S+)$", (ROOT / "docker/Dockerfile.dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    for name in ["pyproject.toml", project["readme"], *project["license-files"]]:
        assert name in kept
    assert {"spinf_serve", "workers", "manifests"} <= set(kept)


def test_proxy_knows_every_server_of_the_compose_example() -> None:
    proxy = (ROOT / "docker/haproxy.cfg").read_text(encoding="utf-8")
    servers = {name for name, service in COMPOSE["services"].items() if "build" in service}
    assert set(re.findall(r"^\s+server \S+ (\w+):8000$", proxy, re.MULTILINE)) == servers
    assert "uri /readyz" in proxy
    assert len(servers) > 1


def test_compose_servers_run_locked_down() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
