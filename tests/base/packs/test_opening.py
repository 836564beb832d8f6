"""Sources on a stand-in server: refs, tokens, failures, the cache, and processes that want it at once."""

import contextlib
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spinf_serve.packs import cache, github
from spinf_serve.packs.cache import RepositoryCache
from spinf_serve.packs.opening import open_source
from spinf_serve.packs.sources import Environment, SourceError, Unreachable, parse_source
from tests.base.packs.github_server import OTHER_SHA, SHA, Hub, hub_server, tarball

ROOT = Path(__file__).resolve().parents[3]
TARBALL = f"/repos/acme/packs/tarball/{SHA}"


def opened(environment: Environment, text: str = "github:acme/packs@1.0", *, refresh: bool = False) -> Path:
    return open_source(parse_source(text), environment, refresh=refresh).root


def test_a_tag_is_resolved_and_fetched_once(hub: Hub, environment: Environment) -> None:
    root = opened(environment)
    assert json.loads((root / "prompt-packs.json").read_bytes())["namespace"] == "acme"
    asked = hub.paths()
    assert asked == ["/repos/acme/packs/git/ref/tags/1.0", TARBALL]
    assert opened(environment) == root
    assert hub.paths() == asked


def test_a_remembered_tag_needs_no_network(hub: Hub, environment: Environment) -> None:
    root = opened(environment)
    hub.fail["/"] = 500
    assert opened(environment) == root


def test_refresh_resolves_a_tag_again(hub: Hub, environment: Environment) -> None:
    opened(environment)
    hub.refs["tags/1.0"] = {"type": "commit", "sha": OTHER_SHA}
    hub.tarballs[OTHER_SHA] = tarball({"moved": b""})
    assert not (opened(environment) / "moved").exists()
    assert (opened(environment, refresh=True) / "moved").exists()
    assert (opened(environment) / "moved").exists()


def test_an_annotated_tag_is_followed(hub: Hub, environment: Environment) -> None:
    hub.refs["tags/2.0"] = {"type": "tag", "sha": OTHER_SHA}
    hub.tags[OTHER_SHA] = {"type": "commit", "sha": SHA}
    assert open_source(parse_source("github:acme/packs@2.0"), environment).commit == SHA


@pytest.mark.parametrize("ref", [SHA, SHA[:10]])
def test_a_commit_is_remembered(hub: Hub, environment: Environment, ref: str) -> None:
    root = opened(environment, f"github:acme/packs@{ref}")
    hub.fail["/"] = 500
    assert opened(environment, f"github:acme/packs@{ref}") == root


def test_a_full_commit_is_not_resolved(hub: Hub, environment: Environment) -> None:
    opened(environment, f"github:acme/packs@{SHA}")
    assert hub.paths() == [TARBALL]


@pytest.mark.parametrize("text", ["github:acme/packs@main", "github:acme/packs"])
def test_a_branch_is_resolved_at_every_start_with_a_warning(hub: Hub, environment: Environment, text: str) -> None:
    first = open_source(parse_source(text), environment)
    assert len(first.warnings) == 1
    assert "main is a branch" in first.warnings[0]
    hub.refs["heads/main"] = {"type": "commit", "sha": OTHER_SHA}
    hub.tarballs[OTHER_SHA] = tarball({"moved": b""})
    second = open_source(parse_source(text), environment)
    assert (first.commit, second.commit) == (SHA, OTHER_SHA)


@pytest.mark.parametrize("text", ["github:acme/packs@main", "github:acme/packs"])
def test_an_unreachable_branch_stays_where_it_was_and_says_so(hub: Hub, environment: Environment, text: str) -> None:
    root = opened(environment, text)
    hub.fail["/"] = 503
    again = open_source(parse_source(text), environment)
    assert again.root == root
    assert "at an earlier start" in again.warnings[0]
    with pytest.raises(Unreachable):
        opened(environment, text, refresh=True)


def test_a_tag_goes_before_a_branch_of_its_name(hub: Hub, environment: Environment) -> None:
    hub.refs["heads/1.0"] = {"type": "commit", "sha": OTHER_SHA}
    assert open_source(parse_source("github:acme/packs@1.0"), environment).commit == SHA


def test_a_folder_of_the_repository(hub: Hub, environment: Environment) -> None:
    assert opened(environment, "github:acme/packs@1.0#packs").name == "packs"
    with pytest.raises(SourceError, match="no such folder in the repository"):
        opened(environment, "github:acme/packs@1.0#nothing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("github:acme/packs@none", "no tag, branch or commit none"),
        ("github:acme/packs@fffffff", "does not exist"),
        ("github:acme/other", "does not exist"),
    ],
)
def test_what_does_not_exist_is_no_network_failure(environment: Environment, text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        opened(environment, text)
    assert not isinstance(caught.value, Unreachable)


def test_a_private_repository_needs_the_token(hub: Hub, environment: Environment) -> None:
    hub.token = "secret"
    with pytest.raises(SourceError, match="needs GITHUB_TOKEN"):
        opened(environment)
    opened(replace(environment, github_token="secret"))


def test_the_token_stays_on_the_host_it_is_for(hub: Hub, environment: Environment) -> None:
    hub.token = "secret"
    with hub_server(tarballs=hub.tarballs) as storage:
        hub.redirect_to = storage.url + "/repos/acme/packs"
        opened(replace(environment, github_token="secret"))
        assert storage.asked == [(TARBALL, None)]


@pytest.mark.parametrize("target", ["file:///etc", "ftp://127.0.0.1/x"])
def test_redirects_stay_on_http(hub: Hub, environment: Environment, target: str) -> None:
    hub.redirect_to = target
    with pytest.raises(SourceError, match=r"not secure|answered 302"):
        opened(environment)


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_limits_and_faults_of_the_server_count_as_unreachable(hub: Hub, environment: Environment, status: int) -> None:
    hub.fail["/"] = status
    with pytest.raises(Unreachable, match=str(status)):
        opened(environment)


def test_nobody_listens(environment: Environment) -> None:
    started = time.monotonic()
    with pytest.raises(Unreachable, match="cannot be reached"):
        opened(replace(environment, github_api="http://127.0.0.1:1"))
    assert time.monotonic() - started < 5


def test_a_server_that_never_answers(hub: Hub, environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(github, "CONNECT_SECONDS", 0.3)
    hub.fail["/repos/acme/packs/git"] = "stall"
    with pytest.raises(Unreachable):
        opened(environment)


@pytest.mark.parametrize("path", ["/repos/acme/packs/git", TARBALL])
def test_a_server_that_answers_a_byte_at_a_time_is_given_up(
    hub: Hub, environment: Environment, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(github, "RESOLVE_SECONDS", 1.0)
    monkeypatch.setattr(github, "FETCH_SECONDS", 1.0)
    hub.fail[path] = "drip"
    started = time.monotonic()
    with pytest.raises(Unreachable, match="did not arrive in time"):
        opened(environment)
    assert time.monotonic() - started < 5
    assert _cache(environment).folder(SHA) is None
    assert list((_cache(environment).root / "commits").glob("*")) == []


def test_an_error_of_a_bounded_call_keeps_nothing_alive() -> None:
    """A connection that waits for the garbage collector would be reported as left open."""

    class Connection:
        pass

    kept: list[weakref.ref[Connection]] = []

    def call() -> None:
        connection = Connection()
        kept.append(weakref.ref(connection))
        raise Unreachable("no")

    gc.disable()
    try:
        with contextlib.suppress(Unreachable):
            github._within(5, call)
        deadline = time.monotonic() + 5
        while kept[0]() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # the thread is ending
        assert kept[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("text", ["github:acme/packs@1.0", "github:acme/packs@main", "github:acme/packs"])
def test_a_filled_cache_is_not_written_again(
    hub: Hub, environment: Environment, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """It may be part of an image, or mounted for reading only."""
    root = opened(environment, text)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkstemp", "mkdtemp"):
        monkeypatch.setattr(tempfile, name, refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert opened(environment, text) == root
    hub.refs["heads/main"] = {"type": "commit", "sha": OTHER_SHA}
    hub.refs["tags/1.0"] = {"type": "commit", "sha": OTHER_SHA}
    with pytest.raises(SourceError, match="cannot be written: Read-only"):
        opened(environment, text, refresh=True)


def test_a_tarball_cut_off_leaves_nothing_and_the_next_try_works(hub: Hub, environment: Environment) -> None:
    hub.fail[TARBALL] = "cut"
    with pytest.raises(Unreachable, match=r"cut off after \d+ of \d+ bytes"):
        opened(environment)
    cached = _cache(environment)
    assert cached.folder(SHA) is None
    assert list((cached.root / "commits").iterdir()) == []
    assert cached.ref("1.0") is None
    hub.fail.clear()
    assert (opened(environment) / "prompt-packs.json").is_file()


def test_a_tarball_over_the_limit_is_refused(
    hub: Hub, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(github, "MAX_TARBALL_BYTES", len(hub.tarballs[SHA]) - 1)
    with pytest.raises(SourceError, match="is over"):
        opened(environment)
    assert _cache(environment).folder(SHA) is None


def test_a_cache_that_cannot_be_written_says_so(hub: Hub, environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="pack cache"):
        opened(replace(environment, cache_dir=tmp_path / "file" / "cache"))


def test_a_damaged_ref_file_is_resolved_again(hub: Hub, environment: Environment) -> None:
    opened(environment)
    (_cache(environment).root / "refs" / "@1.0").write_bytes(b"\xff garbage")
    assert (opened(environment) / "prompt-packs.json").is_file()


def _cache(environment: Environment) -> RepositoryCache:
    host = environment.github_api.removeprefix("http://")
    return RepositoryCache(environment.cache_dir, host, "acme", "packs")


def open_at_once(environment: Environment, count: int = 4) -> list[Path]:
    roots: list[Path] = []
    threads = [threading.Thread(target=lambda: roots.append(opened(environment))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(roots) == count
    return roots


def test_threads_that_start_at_once_fetch_once(hub: Hub, environment: Environment) -> None:
    assert len(set(open_at_once(environment))) == 1
    assert hub.paths().count(TARBALL) == 1


_CHILD = """
import sys
from spinf_serve.packs.opening import open_source
from spinf_serve.packs.sources import Environment, parse_source
print(open_source(parse_source("github:acme/packs@1.0"), Environment.read()).root, flush=True)
"""


def _child(environment: Environment) -> subprocess.Popen[str]:
    variables = {"SPINF_PACKS_CACHE": str(environment.cache_dir), "GITHUB_API_URL": environment.github_api}
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD], cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True
    )


def test_two_processes_that_start_at_once_share_one_fetch(hub: Hub, environment: Environment) -> None:
    children = [_child(environment) for _ in range(2)]
    outputs = [child.communicate(timeout=30)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert outputs[0] == outputs[1]
    assert hub.paths().count(TARBALL) == 1
    assert [path.name for path in (_cache(environment).root / "commits").iterdir()] == [SHA]


def test_a_killed_fetch_leaves_no_half_cache(hub: Hub, environment: Environment) -> None:
    hub.fail[TARBALL] = "stall"
    child = _child(environment)
    deadline = time.monotonic() + 20
    while TARBALL not in hub.paths() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=10)
    cached = _cache(environment)
    assert len(list((cached.root / "commits").glob(".new-*"))) == 1
    assert cached.folder(SHA) is None
    assert cached.ref("1.0") is None
    hub.fail.clear()
    root = opened(environment)
    assert (root / "prompt-packs.json").is_file()
    assert [path.name for path in root.parent.iterdir()] == [SHA]


def test_without_locks_the_rename_keeps_the_cache_whole(
    hub: Hub, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "fcntl", None)
    roots = open_at_once(environment)
    assert [path.name for path in roots[0].parent.iterdir()] == [SHA]


def test_a_folder_is_taken_as_it_is(repository: Path, environment: Environment) -> None:
    assert opened(environment, str(repository)) == repository
    with pytest.raises(SourceError, match="no such folder"):
        opened(environment, str(repository / "none"))


def test_the_api_address_must_be_http(environment: Environment) -> None:
    with pytest.raises(SourceError, match="GITHUB_API_URL"):
        opened(replace(environment, github_api="file:///tmp"))
