"""The packs of the library: read early where they were given, late where they are the official ones."""

from pathlib import Path

import pytest

from spinf_serve.packs import shelving
from spinf_serve.packs.catalog import PackSettings
from spinf_serve.packs.shelving import LazyShelf
from spinf_serve.packs.use import Shelf, asks_packs
from spinf_serve.refusal import StartRefused
from tests.base.packs.support import small_pack, write_repository

MODELS = ("gemma-3-270m", "demo")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[PackSettings]:
    """Every time the catalog is loaded."""
    found: list[PackSettings] = []
    load = shelving.load_catalog

    def counted(settings: PackSettings) -> object:
        found.append(settings)
        return load(settings)

    monkeypatch.setattr(shelving, "load_catalog", counted)
    return found


def test_the_official_source_waits_for_the_first_use(loads: list[PackSettings], tmp_path: Path) -> None:
    said: list[str] = []
    shelf = LazyShelf(PackSettings(MODELS), said.append)
    assert loads == []
    assert shelf() == Shelf()
    assert shelf() is shelf()
    assert len(loads) == 1
    assert "starting without the official packs" in said[0]


def test_given_sources_are_read_at_once(loads: list[PackSettings], repository: Path) -> None:
    shelf = LazyShelf(PackSettings(MODELS, (str(repository),), official=False), print)
    assert len(loads) == 1
    assert list(shelf().versions) == ["acme/guard"]
    assert len(loads) == 1


def test_a_bad_given_source_refuses_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="no such folder"):
        LazyShelf(PackSettings(MODELS, (str(tmp_path / "none"),), official=False), print)


def test_versions_and_defaults_of_a_shelf(tmp_path: Path) -> None:
    root = write_repository(tmp_path, [small_pack(version="2.0"), small_pack(version="1.0")])
    shelf = LazyShelf(PackSettings(MODELS, (str(root),), official=False), print)()
    assert list(shelf.versions["acme/guard"]) == ["2.0", "1.0"]
    assert shelf.defaults == {"acme/guard": "2.0"}


@pytest.mark.parametrize(
    ("body", "asks"),
    [
        ({"scoring": {"packs": [{"id": "a/b"}]}}, True),
        ({"scoring": {"packs": []}}, False),
        ({"scoring": {"packs": 3}}, True),
        ({"scoring": []}, False),
        ({"packs": [1]}, False),
        ([], False),
        (None, False),
    ],
)
def test_only_a_request_that_names_packs_asks_for_them(body: object, asks: bool) -> None:
    assert asks_packs(body) is asks
