"""From a model's name to its snapshot: manifests, the Hub, offline, the head of a repository without a manifest."""

import json
from pathlib import Path

import pytest

from spinf_serve import snapshots
from spinf_serve.config import ServedModel
from spinf_serve.hub import cache, resolve
from spinf_serve.manifests import Catalog
from spinf_serve.refusal import StartRefused
from spinf_serve.settings import Settings
from tests.base.hub.test_cache import download_to, lay_out
from tests.support.hub import OTHER, REPO, REVISION, FakeHub

MANIFEST = f"""
id = "test/tiny"
name = "Tiny"
aliases = ["tiny"]
status = "available"
family = "FAMILY"
capabilities = ["score"]
[source]
repo = "{REPO}"
revision = "{REVISION}"
format = "safetensors-bf16"
[limits]
token_budget = 512
max_tokens = 1024
"""


pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture(autouse=True)
def manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "manifests"
    directory.mkdir()
    (directory / "tiny.toml").write_text(MANIFEST.replace("FAMILY", "gemma3"))
    monkeypatch.setenv("SPINF_MANIFEST_DIRS", str(directory))
    return directory


def served(model: str = "tiny", model_dir: Path | None = None) -> tuple[ServedModel, list[str]]:
    said: list[str] = []
    choice = Catalog.load().resolve(model, str(model_dir) if model_dir else None)
    return snapshots.resolve(choice, said.append), said


def gets(hub: FakeHub) -> set[str]:
    return {seen.path.rsplit("/", 1)[1] for seen in hub.seen if seen.method == "GET" and "/resolve/" in seen.path}


def test_weights_are_downloaded_once_and_found_ever_after(hub: FakeHub) -> None:
    model, said = served()
    assert model.revision == REVISION
    assert Path(model.snapshot_dir) == cache.find(REPO, REVISION).directory
    assert [line.split(":")[0].split(" to ")[0] for line in said] == [
        f"downloading {REPO} at {REVISION}",
        f"downloaded {REPO}",
    ]
    before = len(hub.seen)
    again, said = served()
    assert (again, said, len(hub.seen)) == (model, [], before), "a complete snapshot needs no request"


def test_what_is_passed_over_is_logged(
    hub: FakeHub, repository: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path / "extra", repository, revision=OTHER)
    (lay_out(cache.hub_cache(), repository) / "tokenizer.json").unlink()
    monkeypatch.setenv("SPINF_CACHE_DIRS", str(tmp_path / "extra"))
    _model, said = served()
    assert f"holds revision {OTHER}, not {REVISION}" in said[0]
    assert "tokenizer.json is missing" in said[1]
    assert gets(hub) >= {"tokenizer.json"}


def test_a_family_that_is_not_served_costs_no_request(hub: FakeHub, manifests: Path) -> None:
    (manifests / "tiny.toml").write_text(MANIFEST.replace("FAMILY", "qwen35"))
    with pytest.raises(StartRefused, match="model test/tiny: its family qwen35 is not supported"):
        served()
    assert "family qwen35 is not supported yet" in Settings.load({"model": "tiny", "device": "cpu"}).refusals()[0]
    assert hub.seen == []


@pytest.mark.parametrize("model_type", ["qwen3_5", "llama", None])
def test_the_config_is_checked_before_the_weights(hub: FakeHub, model_type: str | None) -> None:
    """Whatever the manifest says."""
    hub.files["config.json"] = json.dumps({"model_type": model_type}).encode()
    with pytest.raises(StartRefused, match="not supported yet"):
        served()
    assert gets(hub) == {"config.json"}


def test_a_found_snapshot_of_another_family_is_refused(hub: FakeHub, repository: dict[str, bytes]) -> None:
    lay_out(cache.hub_cache(), repository | {"config.json": b'{"model_type": "llama"}'})
    with pytest.raises(StartRefused, match="llama"):
        served()


def test_what_was_downloaded_and_is_not_whole_is_refused(hub: FakeHub) -> None:
    """The published index names a tensor that no shard has: found at the end, and said."""
    index = json.loads(hub.files["model.safetensors.index.json"])
    index["weight_map"]["model.norm.more"] = "model-00002-of-00002.safetensors"
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    with pytest.raises(StartRefused, match=f"{REPO} at {REVISION} was downloaded and cannot be served.*lacks"):
        served()


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_means_no_request(
    hub: FakeHub, repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    (lay_out(cache.hub_cache(), repository) / "tokenizer.json").unlink()
    with pytest.raises(StartRefused, match=r"HF_HUB_OFFLINE is set.*tokenizer\.json is missing"):
        served()
    with pytest.raises(StartRefused, match=r"HF_HUB_OFFLINE is set.*someone/else"):
        served("someone/else")
    (cache.repo_folder(cache.hub_cache(), REPO) / "snapshots" / REVISION / "tokenizer.json").write_bytes(
        repository["tokenizer.json"]
    )
    assert served()[0].revision == REVISION
    assert hub.seen == []


def test_another_revision_needs_model_dir_and_is_logged(
    hub: FakeHub, repository: dict[str, bytes], tmp_path: Path
) -> None:
    for directory, expected in (
        (lay_out(tmp_path / "hub", repository, revision=OTHER), f"serving revision {OTHER} from"),
        (download_to(tmp_path / "plain", repository, revision=OTHER), f"serving revision {OTHER} from"),
    ):
        model, said = served(model_dir=directory)
        assert expected in said[0]
        assert f"not the pinned {REVISION} of {REPO}" in said[0]
        assert model.revision.startswith("sha256:")
    (tmp_path / "plain" / "config.json").write_bytes(repository["config.json"] + b" ")
    changed, said = served(model_dir=tmp_path / "plain")
    assert changed.revision != model.revision
    pinned = lay_out(tmp_path / "pinned", repository)
    assert not any("not the pinned" in line for line in served(model_dir=pinned)[1])
    assert hub.seen == []


def test_a_repository_without_manifest_is_served_at_its_head(hub: FakeHub, manifests: Path) -> None:
    (manifests / "tiny.toml").unlink()
    settings = Settings.load({"model": REPO, "device": "cpu"})
    assert settings.max_tokens == json.loads(hub.files["config.json"])["max_position_embeddings"]
    assert settings.refusals() == []
    model, said = served(REPO)
    assert (model.id, model.revision, model.family) == (REPO, REVISION, "gemma3")
    assert said[0] == f"{REPO}: no manifest; the head of its default branch is {REVISION}"
    assert sum("/revision/main" in seen.path for seen in hub.seen) == 1, "one start means one commit"


def test_a_head_of_another_family_costs_no_weights(hub: FakeHub, manifests: Path) -> None:
    (manifests / "tiny.toml").unlink()
    hub.files["config.json"] = b'{"model_type": "llama"}'
    with pytest.raises(StartRefused, match=f"{REPO}: model_type 'llama' is not supported yet"):
        served(REPO)
    assert gets(hub) == {"config.json"}


@pytest.mark.parametrize("reason", ["offline", "down", "gone"])
def test_the_head_last_seen_serves_without_network(
    hub: FakeHub, manifests: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    (manifests / "tiny.toml").unlink()
    model, _said = served(REPO)
    resolve.head.cache_clear()
    if reason == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.faults.status["/"] = (404, "RepoNotFound") if reason == "gone" else (503, "")
    if reason == "gone":
        with pytest.raises(StartRefused, match="there is no repository"):
            served(REPO)
        return
    again, said = served(REPO)
    assert again == model
    assert f"serving {REVISION}, last seen as the head" in said[0]


def test_an_unknown_repository_that_cannot_be_reached_is_refused(hub: FakeHub) -> None:
    with pytest.raises(StartRefused, match="there is no repository someone/else on the Hub"):
        served("someone/else")
