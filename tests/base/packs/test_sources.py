"""What a source is written as, and what the environment says about sources."""

from pathlib import Path

import pytest

from spinf_serve.packs.sources import Environment, FolderSource, GitHubSource, SourceError, parse_source


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("github:acme/packs", GitHubSource("acme", "packs", None, "")),
        ("github:acme/packs@1.0", GitHubSource("acme", "packs", "1.0", "")),
        ("github:acme/packs@feature/new#sub/folder", GitHubSource("acme", "packs", "feature/new", "sub/folder")),
        ("github:Acme/my.packs_2#sub/", GitHubSource("Acme", "my.packs_2", None, "sub")),
        ("/srv/packs@1#x", FolderSource(Path("/srv/packs@1#x"))),
    ],
)
def test_sources(text: str, source: object) -> None:
    assert parse_source(text) == source


def test_a_folder_is_absolute_and_a_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_source("here") == parse_source("~/here") == FolderSource(tmp_path / "here")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\0b",
        "github:",
        "github:acme",
        "github:acme/",
        "github:/packs",
        "github:acme/packs/more",
        "github:ac me/packs",
        "github:acme/..",
        "github:acme/packs@",
        "github:acme/packs@a..b",
        "github:acme/packs@-x y",
        "github:acme/packs@a?b",
        "github:acme/packs@a%2e",
        "github:acme/packs@a\nb",
        "github:acme/packs#",
        "github:acme/packs#../x",
        "github:acme/packs#/etc",
        "github:acme/packs#a/../../b",
        "github:acme/packs#a\\b",
    ],
)
def test_what_is_no_source(text: str) -> None:
    with pytest.raises(SourceError):
        parse_source(text)


def test_the_environment_has_its_defaults() -> None:
    environment = Environment.read({"HOME": "/home/u", "GITHUB_TOKEN": "", "SPINF_PACKS_OFFICIAL": ""})
    assert environment.official == "github:spinfinc/spinf-prompts@0.1.0"
    assert environment.github_api == "https://api.github.com"
    assert environment.github_token is None
    assert environment.cache_dir == Path("~/.cache/spinf-serve/packs").expanduser()
    given = {"XDG_CACHE_HOME": "/x", "GITHUB_API_URL": "https://ghe.example/api/v3/", "GITHUB_TOKEN": "t"}
    environment = Environment.read(given)
    assert environment.cache_dir == Path("/x/spinf-serve/packs")
    assert (environment.github_api, environment.github_token) == ("https://ghe.example/api/v3", "t")
    assert Environment.read({"SPINF_PACKS_CACHE": "/c", "XDG_CACHE_HOME": "/x"}).cache_dir == Path("/c")
