"""A private cache and no proxies for every pack test: nothing leaves the machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from spinf_serve.packs.sources import Environment
from tests.base.packs.github_server import SHA, Hub, folder_tarball, hub_server
from tests.base.packs.support import small_pack, write_repository


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "GITHUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPINF_PACKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPINF_PACKS_OFFICIAL", str(tmp_path / "no-official"))
    monkeypatch.setenv("GITHUB_API_URL", "http://127.0.0.1:1")  # nothing listens there


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_repository(tmp_path / "repository", [small_pack()])


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    """A server that holds `acme/packs` at the tag 1.0 and the branch main."""
    with hub_server(
        refs={"tags/1.0": {"type": "commit", "sha": SHA}, "heads/main": {"type": "commit", "sha": SHA}},
        tarballs={SHA: folder_tarball(repository)},
    ) as hub:
        yield hub


@pytest.fixture
def environment(tmp_path: Path, hub: Hub) -> Environment:
    return Environment(cache_dir=tmp_path / "cache", github_api=hub.url)
