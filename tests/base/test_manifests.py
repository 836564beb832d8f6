"""Manifests: schema, names, catalog, local directories."""

import json
from pathlib import Path

import pytest

from spinf_serve.manifests import Catalog, ManifestError, builtin_dir, load_manifest

PUBLISHED = {
    # id: (names, family, head, media, revision, token_budget, max_tokens)
    "spinf/gemma-4-12b-fp8": (
        ["spinf-12b", "google/gemma-4-12B", "gemma-4-12b"],
        ("gemma4", "lm_head", ("image", "audio", "video")),
        "a689df2c5f611e3bfaa4569b8190f97db5018569",
        (16_384, 65_536),
    ),
    "spinf/gemma-4-31b-fp8": (
        ["spinf-31b", "google/gemma-4-31B", "gemma-4-31b"],
        ("gemma4", "lm_head", ("image", "video")),
        "8c54e9850ccca10823f2936c77ed045c735e123d",
        (16_384, 32_768),
    ),
    "spinf/qwen3.8-27b-int4": (
        ["qwen3.8-27b-s"],
        ("qwen35", "lm_head", ("image", "video")),
        "22de4859c04ccdb4136d89b66e56e717db752c7c",
        (16_384, 16_384),
    ),
    "spinf/pplx-decider-v1-27b-int4": (
        [],
        ("qwen35", "readout", ()),
        "5579a6ec32478b65920cb2a1d9fd23349fb51699",
        (16_384, 16_384),
    ),
    "gemma-3-270m": (["demo"], ("gemma3", "lm_head", ()), None, (4096, 8192)),
}

MINIMAL = """
id = "{id}"
name = "Test"
aliases = {aliases}
status = "available"
family = "gemma3"
capabilities = ["score"]

[source]
repo = "org/{id}"
revision = "0123456789012345678901234567890123456789"
format = "safetensors-bf16"

[limits]
token_budget = 10
max_tokens = 20
"""


def minimal(directory: Path, model_id: str = "test", aliases: tuple[str, ...] = (), file: str | None = None) -> Path:
    path = directory / f"{file or model_id}.toml"
    path.write_text(MINIMAL.format(id=model_id, aliases=list(aliases)))
    return path


def test_the_built_in_manifests_are_the_published_ones() -> None:
    found = {manifest.id: manifest for manifest in Catalog.load([]).manifests}
    assert found.keys() == PUBLISHED.keys()
    for model_id, (aliases, kind, revision, limits) in PUBLISHED.items():
        manifest = found[model_id]
        assert list(manifest.aliases) == aliases
        assert (manifest.family, manifest.head, manifest.media) == kind
        assert manifest.source is not None
        assert manifest.source.revision == revision
        assert (manifest.limits.token_budget, manifest.limits.max_tokens) == limits
        assert (manifest.source.repo or model_id) == model_id


def test_image_budgets_and_schemes() -> None:
    catalog = Catalog.load([])
    for name, expected in {"spinf-12b": (48, 70, 280, 1120), "qwen3.8-27b-s": (32, 256, 1024, 4096)}.items():
        image = catalog.resolve(name).manifest.image
        assert image is not None
        tokens = image.detail_tokens
        assert (image.side, tokens.low, tokens.auto, tokens.high) == expected
    decider = catalog.resolve("spinf/pplx-decider-v1-27b-int4").manifest
    assert (decider.capabilities, decider.prompt_style) == (("score",), "decider")
    demo = catalog.resolve("demo").manifest
    assert demo.quant is not None
    assert demo.quant.allowed == ("f32", "bf16")


@pytest.mark.parametrize("name", ["demo", "DEMO", "Gemma-3-270M"])
def test_names_are_compared_without_case(name: str) -> None:
    choice = Catalog.load([]).resolve(name)
    assert (choice.manifest.id, choice.requested, choice.directory) == ("gemma-3-270m", name, None)


def test_a_hub_repository_names_its_manifest(tmp_path: Path) -> None:
    minimal(tmp_path)
    assert Catalog.load([tmp_path]).resolve("Org/Test").manifest.id == "test"


def test_a_repository_of_two_manifests_is_ambiguous(tmp_path: Path) -> None:
    minimal(tmp_path)
    other = minimal(tmp_path, "test2")
    other.write_text(other.read_text().replace("org/test2", "org/test"))
    with pytest.raises(ManifestError, match=r"several manifests use the repository 'org/test'"):
        Catalog.load([tmp_path]).resolve("org/test")


@pytest.mark.parametrize(
    ("first", "second"),
    [(("shared",), ("Shared",)), ((), ("TEST",)), (("test2",), ())],
    ids=["alias-alias", "id-alias", "alias-id"],
)
def test_two_manifests_with_one_name_are_an_error(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    minimal(tmp_path, "test", first)
    minimal(tmp_path, "test2", second)
    with pytest.raises(ManifestError, match="claimed by two manifests: test and test2"):
        Catalog.load([tmp_path])


def test_an_extra_manifest_must_not_claim_a_built_in_alias(tmp_path: Path) -> None:
    minimal(tmp_path, "mine", ("Demo",))
    with pytest.raises(ManifestError, match="'demo' is claimed by two manifests"):
        Catalog.load([tmp_path])


def test_an_extra_manifest_overrides_a_built_in_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minimal(tmp_path, "Gemma-3-270m", ("demo",), file="other")
    monkeypatch.setenv("SPINF_MANIFEST_DIRS", f"{tmp_path}:")
    catalog = Catalog.load()
    assert catalog.resolve("demo").manifest.limits.token_budget == 10
    assert len(catalog.manifests) == len(PUBLISHED)


@pytest.mark.parametrize("separator", [":", ","])
def test_several_extra_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        minimal(tmp_path / name, f"model-{name}")
    monkeypatch.setenv("SPINF_MANIFEST_DIRS", f"{tmp_path}/a{separator}{tmp_path}/b")
    assert Catalog.load().resolve("model-b").manifest.id == "model-b"
    minimal(tmp_path / "b", "model-a", file="again")
    with pytest.raises(ManifestError, match="a second manifest with the id 'model-a'"):
        Catalog.load()


def test_a_missing_extra_directory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPINF_MANIFEST_DIRS", "/no/such/place")
    with pytest.raises(ManifestError, match="/no/such/place"):
        Catalog.load()


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('name = "Test"', "", "name"),
        ('name = "Test"', 'name = "Test"\nsize = 3', "size"),
        ('status = "available"', 'status = "soon"', "status"),
        ('family = "gemma3"', 'family = "gpt2"', "family"),
        ('["score"]', '["score", "sing"]', "capabilities"),
        ('["score"]', '["score", "score"]', "capabilities"),
        ('["score"]', '"score"', "capabilities"),
        ("aliases = []", 'aliases = ["a", "A"]', "aliases"),
        ("aliases = []", 'aliases = ["a b"]', "aliases"),
        ("0123456789012345678901234567890123456789", "main", "source.revision"),
        ('revision = "0123456789012345678901234567890123456789"', "", "source.revision"),
        ('repo = "org/test"', "", "exactly one of repo and package"),
        ('repo = "org/test"', 'repo = "org/test"\npackage = "p"', "exactly one of repo and package"),
        ('"safetensors-bf16"', '"pickle"', "source.format"),
        ("token_budget = 10", "token_budget = 0", "limits.token_budget"),
        ("token_budget = 10", 'token_budget = "10"', "limits.token_budget"),
        ("token_budget = 10", "token_budget = 10\nmax_options = 5", "limits.max_options"),
        ("[limits]", "[quant]\nallowed = ['f32']\ndefault = 'bf16'\n[limits]", "quant"),
        ("[limits]", "[limits", "test.toml"),
        ('family = "gemma3"', 'family = "gemma3"\nmedia = ["image"]', "[image]"),
    ],
)
def test_a_manifest_that_breaks_the_schema_is_refused(tmp_path: Path, old: str, new: str, where: str) -> None:
    path = minimal(tmp_path)
    text = path.read_text()
    assert old in text
    load_manifest(path)
    path.write_text(text.replace(old, new))
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    assert str(path) in str(caught.value)
    assert where in str(caught.value)


def test_a_manifest_without_source_is_refused(tmp_path: Path) -> None:
    path = minimal(tmp_path)
    head, _, tail = path.read_text().partition("[source]")
    path.write_text(head + tail[tail.index("[limits]") :])
    with pytest.raises(ManifestError, match="source"):
        load_manifest(path)


def checkpoint(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma3"])
def test_a_directory_gets_a_manifest_from_its_config(tmp_path: Path, model_type: str) -> None:
    directory = checkpoint(tmp_path / "my-model", model_type=model_type, max_position_embeddings=2048)
    choice = Catalog.load([]).resolve(str(directory))
    assert (choice.manifest.id, choice.manifest.family, choice.directory) == ("my-model", "gemma3", directory)
    assert (choice.manifest.limits.token_budget, choice.manifest.limits.max_tokens) == (16_384, 2048)
    assert choice.requested == str(directory)


def test_the_limits_of_a_nested_text_config_count(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "m", model_type="gemma3", text_config={"max_position_embeddings": 99})
    assert Catalog.load([]).resolve(str(directory)).manifest.limits.max_tokens == 99


@pytest.mark.parametrize("positions", [None, "many", -1, True, 10**9])
def test_odd_position_counts_leave_the_usual_limit(tmp_path: Path, positions: object) -> None:
    directory = checkpoint(tmp_path / "m", model_type="gemma3", text_config=5, max_position_embeddings=positions)
    assert Catalog.load([]).resolve(str(directory)).manifest.limits.max_tokens == 65_536


def test_odd_directory_names_make_usable_ids(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / f"my model {'x' * 230}", model_type="gemma3_text")
    model_id = Catalog.load([]).resolve(str(directory)).manifest.id
    assert len(model_id) == 200
    assert " " not in model_id


def test_relative_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(tmp_path / "org" / "model", model_type="gemma3_text")
    checkpoint(tmp_path / "demo", model_type="gemma3_text")
    monkeypatch.chdir(tmp_path)
    catalog = Catalog.load([])
    assert catalog.resolve("org/model").directory == directory
    assert catalog.resolve("./demo").manifest.id == "demo"
    assert catalog.resolve("demo").manifest.id == "gemma-3-270m", "a name goes before a folder that lies about"


UNSERVED = ('{"model_type": "llama"}', '{"model_type": "gemma4_assistant"}', "{}", "[]", "{", "")


@pytest.mark.parametrize("config", UNSERVED)
def test_a_directory_that_cannot_be_served_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ManifestError, match=str(tmp_path)):
        Catalog.load([]).resolve(str(tmp_path))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"no readable config\.json"):
        Catalog.load([]).resolve(str(tmp_path))


def test_a_hub_repository_without_manifest_takes_a_local_directory(tmp_path: Path) -> None:
    catalog = Catalog.load([])
    directory = checkpoint(tmp_path / "x", model_type="gemma3_text")
    choice = catalog.resolve("someone/gemma", str(directory))
    assert (choice.manifest.id, choice.directory) == ("someone/gemma", directory)


def test_model_dir_goes_with_a_manifest_and_not_with_a_directory(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "x", model_type="gemma3_text")
    catalog = Catalog.load([])
    assert catalog.resolve("demo", str(directory)).directory == directory
    with pytest.raises(ManifestError, match="leave out --model-dir"):
        catalog.resolve(str(directory), str(directory))
    with pytest.raises(ManifestError, match=r"unknown model 'typo'.*gemma-3-270m or demo; "):
        catalog.resolve("typo", str(directory))


def test_the_built_in_manifests_are_data_at_the_top_of_the_checkout() -> None:
    assert builtin_dir().name == "manifests"
    assert (builtin_dir().parent / "pyproject.toml").is_file()
