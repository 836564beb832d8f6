"""The rules between sources: models, namespaces, ids given twice, the official source, defaults."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from spinf_serve.packs import catalog as catalog_module
from spinf_serve.packs.catalog import Catalog, PackSettings, listing, listing_bytes, load_catalog
from spinf_serve.packs.sources import Environment
from tests.base.packs.github_server import SHA, Hub, folder_tarball
from tests.base.packs.support import small_pack, write_json, write_repository

MODELS = ("gemma-3-270m", "demo", "/models/demo")


def catalog(*sources: Path | str, **settings: Any) -> Catalog:
    given = {"models": MODELS, "official": False} | settings
    return load_catalog(PackSettings(sources=tuple(map(str, sources)), **given))


def test_nothing_is_read_where_no_source_is_set() -> None:
    found = catalog()
    assert (found.packs, found.problems, found.sources) == ({}, [], [])


def test_versions_for_another_model_are_skipped_with_a_line(tmp_path: Path) -> None:
    packs = [
        small_pack(version="2.0", model="other"),
        small_pack(version="1.0", model="DEMO"),
        small_pack(pack="acme/no", model="x"),
    ]
    found = catalog(write_repository(tmp_path, packs))
    assert found.problems == []
    assert {name: [v.version for v in pack.versions] for name, pack in found.packs.items()} == {"acme/guard": ["1.0"]}
    assert found.skipped == [
        "pack acme/guard 2.0 is for the model other: skipped",
        "pack acme/no 1.2.0 is for the model x: skipped",
    ]


def test_an_id_of_two_sources_is_refused(tmp_path: Path) -> None:
    one = write_repository(tmp_path / "one", [small_pack()])
    two = write_repository(tmp_path / "two", [small_pack(version="2.0")])
    assert catalog(one, two).problems == [f"pack acme/guard is given by two sources: {one} and {two}"]
    assert catalog(one, one).problems == []


def test_the_official_namespace_needs_permission(tmp_path: Path) -> None:
    root = write_repository(tmp_path, [small_pack(pack="spinf/moderation")], namespace="spinf")
    refused = catalog(root).problems
    assert len(refused) == 1
    assert "--packs-allow-namespace spinf" in refused[0]
    assert list(catalog(root, allowed_namespaces=("spinf",)).packs) == ["spinf/moderation"]


def test_a_bad_given_source_is_a_problem(tmp_path: Path) -> None:
    assert "no such folder" in catalog(tmp_path / "none").problems[0]
    assert "expected github:" in catalog("github:x").problems[0]
    assert "cannot be reached" in catalog("github:acme/packs").problems[0]
    bad = write_repository(tmp_path, [small_pack(answers="x")])
    assert "answers: must be p or logprob" in catalog(bad).problems[0]


def test_the_official_source_is_read_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_repository(tmp_path / "official", [small_pack(pack="spinf/moderation")], namespace="spinf")
    monkeypatch.setenv("SPINF_PACKS_OFFICIAL", str(root))
    found = catalog(official=True)
    assert (found.problems, list(found.packs)) == ([], ["spinf/moderation"])
    assert found.packs["spinf/moderation"].source == "official"


def test_an_unusable_official_source_is_only_logged(repository: Path) -> None:
    found = catalog(repository, official=True)
    assert found.problems == []
    assert list(found.packs) == ["acme/guard"]
    assert "pack source official cannot be used" in found.warnings[0]
    assert "starting without the official packs" in found.warnings[0]
    sources = {source["source"]: source["status"] for source in listing(found)["sources"]}
    assert sources == {"official": "error", str(repository): "ok"}


def test_the_official_source_given_by_hand_must_work() -> None:
    assert "pack source official" in catalog("official", official=True).problems[0]


def test_an_official_source_that_never_answers_delays_nothing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    monkeypatch.setattr(catalog_module, "OFFICIAL_SECONDS", 0.4)
    monkeypatch.setenv("SPINF_PACKS_OFFICIAL", "github:acme/packs@1.0")
    monkeypatch.setenv("GITHUB_API_URL", hub.url)
    hub.fail["/"] = "stall"
    started = time.monotonic()
    found = catalog(repository, official=True)
    assert time.monotonic() - started < 2
    assert list(found.packs) == ["acme/guard"]
    assert "gave no answer in" in found.warnings[0]


def test_an_official_source_that_breaks_its_reader_is_logged(
    monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPINF_PACKS_OFFICIAL", str(write_repository(tmp_path / "official", [small_pack()])))
    read = catalog_module.read_repository

    def broken(root: Path) -> Any:
        if root.name == "official":
            raise KeyError("packs")
        return read(root)

    monkeypatch.setattr(catalog_module, "read_repository", broken)
    found = catalog(repository, official=True)
    assert (list(found.packs), found.problems) == (["acme/guard"], [])
    assert found.warnings == [
        "pack source official cannot be used: KeyError: 'packs'; starting without the official packs"
    ]


def test_an_unreachable_official_source_is_logged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPINF_PACKS_OFFICIAL", "github:acme/packs@1.0")
    started = time.monotonic()
    found = catalog(official=True)
    assert time.monotonic() - started < 2
    assert "pack source official cannot be reached" in found.warnings[0]


def test_a_repository_that_was_fetched_needs_no_network_later(
    hub: Hub, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    official = write_repository(tmp_path / "official", [small_pack(pack="spinf/moderation")], namespace="spinf")
    hub.tarballs[SHA] = folder_tarball(official)
    settings = PackSettings(models=MODELS)
    online = Environment(environment.cache_dir, "github:acme/packs@1.0", hub.url)
    assert list(load_catalog(settings, online).packs) == ["spinf/moderation"]
    hub.fail["/"] = 500
    again = load_catalog(settings, online)
    assert (list(again.packs), again.warnings) == (["spinf/moderation"], [])
    assert again.sources[0].commit == SHA


def test_a_damaged_cache_says_where_it_is(hub: Hub, environment: Environment, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    repository.rename(tmp_path / "top" / "tree")
    hub.tarballs[SHA] = folder_tarball(tmp_path / "top")
    source = "github:acme/packs@1.0#tree"
    settings = PackSettings(models=MODELS, sources=(source,), official=False)
    assert list(load_catalog(settings, environment).packs) == ["acme/guard"]
    [manifest] = environment.cache_dir.rglob("prompt-packs.json")
    manifest.write_text("{")
    found = load_catalog(settings, environment)
    assert len(found.problems) == 1
    folder = manifest.parents[1]
    assert folder.name == SHA
    assert found.warnings == [f"pack source {source}: fetched into {folder}: if damaged there, delete that folder"]
    shutil.rmtree(folder)
    assert list(load_catalog(settings, environment).packs) == ["acme/guard"]


def with_statuses(root: Path, *statuses: str) -> Path:
    versions = [f"{i + 1}.0" for i in range(len(statuses))]
    write_repository(root, [small_pack(version=version) for version in versions])
    manifest = json.loads((root / "prompt-packs.json").read_bytes())
    for listed, status in zip(manifest["packs"][0]["versions"], statuses, strict=True):
        listed["status"] = status
    write_json(root / "prompt-packs.json", manifest)
    return root


@pytest.mark.parametrize(
    ("statuses", "default"),
    [
        (("available", "available"), "1.0"),
        (("deprecated", "available"), "2.0"),
        (("coming_soon", "deprecated", "available"), "3.0"),
        (("coming_soon", "deprecated"), "2.0"),
        (("coming_soon",), None),
    ],
)
def test_the_default_is_the_first_available_version(
    tmp_path: Path, statuses: tuple[str, ...], default: str | None
) -> None:
    found = catalog(with_statuses(tmp_path, *statuses))
    assert found.problems == []
    entry = listing(found)["packs"][0]
    assert entry["version"] == default
    assert entry["status"] == ("coming_soon" if default is None else statuses[int(default[0]) - 1])


def test_callers_are_not_told_the_paths_of_folders(
    repository: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the official source's, where that is a folder; packs and sources still fit together."""
    monkeypatch.setenv("GITHUB_API_URL", hub.url)
    hub.tarballs[SHA] = folder_tarball(write_repository(tmp_path / "remote", [small_pack(pack="acme/remote")]))
    official = write_repository(tmp_path / "official", [small_pack(pack="spinf/moderation")], namespace="spinf")
    monkeypatch.setenv("SPINF_PACKS_OFFICIAL", str(official))
    write_repository(tmp_path / "other", [small_pack(pack="acme/other")])
    monkeypatch.chdir(tmp_path)
    found = catalog(repository, "github:acme/packs@1.0", "other", official=True)
    body = listing_bytes(found).decode()
    assert str(tmp_path) not in body
    assert '"other"' not in body
    shown = json.loads(body)
    sources = {source["source"]: source["packs"] for source in shown["sources"]}
    assert sources == {
        "official": ["spinf/moderation"],
        "folder:1": ["acme/guard"],
        "github:acme/packs@1.0": ["acme/remote"],
        "folder:2": ["acme/other"],
    }
    assert {pack["id"]: pack["source"] for pack in shown["packs"]} == {
        pack: source for source, packs in sources.items() for pack in packs
    }
    assert {source["source"] for source in listing(found)["sources"]} >= {str(repository), "other"}


def test_the_listing_has_what_callers_need(repository: Path) -> None:
    entry = listing(catalog(repository))["packs"][0]
    assert entry == {
        "id": "acme/guard",
        "name": "A pack",
        "status": "available",
        "version": "1.2.0",
        "versions": ["1.2.0"],
        "description": "",
        "tags": [],
        "model": "demo",
        "media": ["text", "image"],
        "source": str(repository),
        "parameters": [
            {"id": "who", "label": "Who", "description": "Who wrote it", "required": True, "default": None},
            {"id": "place", "label": "Place", "description": "", "required": False, "default": "here"},
        ],
        "contexts": [
            {"id": "chat", "template": "A message from {who} ({place}):\n{X}\n"},
            {"id": "post", "template": "A post:\n{X}"},
        ],
        "categories": [
            {"id": "harm", "label": "Harm", "threshold": 0.6},
            {"id": "money", "label": "Money", "threshold": None},
            {"id": "tone", "label": "Tone", "threshold": 0.5},
        ],
        "decision": {
            "mode": "micro_layer",
            "modes": ["micro_layer", "max", "per_category"],
            "fallback": "max",
            "max_threshold": 0.7,
            "critical": ["tone"],
        },
        "queries": 3,
        "prompts": 5,
    }
