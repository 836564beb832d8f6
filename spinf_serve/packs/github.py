"""The three calls to GitHub's REST API that a pack source needs: default branch, ref to commit, tarball."""

import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import quote, urlsplit

from spinf_serve import __version__
from spinf_serve.packs.sources import Environment, SourceError, Unreachable

CONNECT_SECONDS = 5.0
RESOLVE_SECONDS = 15.0
FETCH_SECONDS = 120.0
MAX_TARBALL_BYTES = 64 << 20
_MAX_REPLY_BYTES = 1 << 20
_CHUNK = 1 << 16
_SHA = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHORT_SHA = re.compile(r"[0-9a-f]{7,39}", re.ASCII)
_TRY_LATER = (403, 408, 429, *range(500, 600))
TAG, BRANCH, COMMIT = "tag", "branch", "commit"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A commit (40 hex digits), and what kind of ref named it. A branch moves, the others stay."""

    commit: str
    kind: str
    ref: str


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects over HTTP(S) without ever weakening them, and keeps the token on the host it was meant for."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme != "https"):
            fp.close()
            raise SourceError(f"{old.netloc} redirects to an address that is not secure")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (new.scheme, new.netloc) != (old.scheme, old.netloc):
            request.remove_header("Authorization")
        return request


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS only, through the proxies of the environment: no file or FTP addresses."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _SafeRedirects(),
    ):
        opener.add_handler(handler)
    return opener


class NotFound(SourceError):
    """The repository, ref or commit does not exist, or the token does not show it."""


class GitHub:
    """Calls with bounded time. Raises `SourceError`, and its kinds `Unreachable` and `NotFound`."""

    def __init__(self, environment: Environment) -> None:
        if urlsplit(environment.github_api).scheme not in ("http", "https"):
            raise SourceError(f"GITHUB_API_URL: {environment.github_api!r} is no http(s) address")
        self._api, self._token = environment.github_api, environment.github_token
        self._open = _opener().open

    def resolve(self, owner: str, repo: str, ref: str | None) -> Resolved:
        """The commit that a ref names now: a full commit as it is, else a tag, a branch or a short commit, in order."""
        if ref is not None and _SHA.fullmatch(ref):
            return Resolved(ref, COMMIT, ref)
        repository = f"/repos/{owner}/{repo}"
        if ref is None:
            ref = self._text(self._get(repository), "default_branch")
            return Resolved(self._ref(repository, f"heads/{ref}"), BRANCH, ref)
        for kind, place in ((TAG, "tags"), (BRANCH, "heads")):
            try:
                return Resolved(self._ref(repository, f"{place}/{ref}"), kind, ref)
            except NotFound:
                continue
        if _SHORT_SHA.fullmatch(ref):
            return Resolved(self._commit(self._get(f"{repository}/commits/{ref}")), COMMIT, ref)
        raise NotFound(f"no tag, branch or commit {ref} in {owner}/{repo} (a private repository needs GITHUB_TOKEN)")

    def tarball(self, owner: str, repo: str, commit: str, file: IO[bytes]) -> None:
        """Writes the repository's gzip tarball at a commit to `file`, at most 64 MiB, whole or not at all."""
        _within(FETCH_SECONDS, lambda: self._download(owner, repo, commit, file))

    def _download(self, owner: str, repo: str, commit: str, file: IO[bytes]) -> None:
        deadline = time.monotonic() + FETCH_SECONDS
        with self._request(f"/repos/{owner}/{repo}/tarball/{commit}", deadline) as reply:
            expected = reply.headers.get("Content-Length")
            got = 0
            for chunk in _chunks(reply, deadline):
                got += len(chunk)
                if got > MAX_TARBALL_BYTES:
                    raise SourceError(f"the tarball of {owner}/{repo} is over {MAX_TARBALL_BYTES >> 20} MiB")
                file.write(chunk)
        if expected is not None and expected.isdecimal() and got != int(expected):
            raise Unreachable(f"the tarball of {owner}/{repo} was cut off after {got} of {expected} bytes")

    def _ref(self, repository: str, ref: str) -> str:
        target = self._get(f"{repository}/git/ref/{quote(ref)}").get("object")
        for _ in range(5):  # an annotated tag names a tag object, which may name another
            if not isinstance(target, dict) or target.get("type") != "tag":
                break
            target = self._get(f"{repository}/git/tags/{self._commit(target)}").get("object")
        return self._commit(target)

    def _commit(self, target: Any) -> str:
        sha = self._text(target, "sha")
        if not _SHA.fullmatch(sha):
            raise SourceError(f"{self._api} answered with no commit")
        return sha

    def _text(self, reply: Any, name: str) -> str:
        value = reply.get(name) if isinstance(reply, dict) else None
        if not isinstance(value, str):
            raise SourceError(f"{self._api} answered without {name}")
        return value

    def _get(self, path: str) -> dict[str, Any]:
        try:
            value = json.loads(_within(RESOLVE_SECONDS, lambda: self._content(path)))
        except SourceError:
            raise
        except (ValueError, RecursionError):
            raise SourceError(f"{self._api}{path}: the answer is not JSON") from None
        if not isinstance(value, dict):
            raise SourceError(f"{self._api}{path}: the answer is no object")
        return value

    def _content(self, path: str) -> bytes:
        deadline, content = time.monotonic() + RESOLVE_SECONDS, b""
        with self._request(path, deadline) as reply:
            for chunk in _chunks(reply, deadline):
                content += chunk
                if len(content) > _MAX_REPLY_BYTES:
                    raise SourceError(f"{self._api}{path}: the answer is too long")
        return content

    def _request(self, path: str, deadline: float) -> Any:
        headers = {"Accept": "application/vnd.github+json", "User-Agent": f"spinf-serve/{__version__}"}
        request = urllib.request.Request(self._api + path, headers=headers)
        if self._token is not None:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            return self._open(request, timeout=min(CONNECT_SECONDS, max(0.1, deadline - time.monotonic())))
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refusal(path, error.code) from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self._api} cannot be reached: {_reason(error)}") from None

    def _refusal(self, path: str, status: int) -> SourceError:
        if status == 404:
            return NotFound(f"{self._api}{path} does not exist (a private repository needs GITHUB_TOKEN)")
        if status == 401:
            return SourceError(f"{self._api} does not accept GITHUB_TOKEN")
        if status in _TRY_LATER:
            return Unreachable(f"{self._api}{path} answered {status}")
        return SourceError(f"{self._api}{path} answered {status}")


def _within[T](seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises, or `Unreachable` after `seconds`.

    A socket's own timeout starts anew with each byte and does not hold for names that are looked up, so that a server
    which sends its headers slowly would never be given up. The thread that is left ends with the connection.
    """
    done: Future[T] = Future()
    threading.Thread(target=_settle, args=(done, call), name="github", daemon=True).start()
    try:
        return done.result(timeout=seconds)
    except TimeoutError:
        if done.done():  # an error of the call, of the same type
            raise
        raise Unreachable("the answer did not arrive in time") from None
    finally:
        del done  # an error's traceback would hold it, and it the error, with the connection in both


def _settle[T](done: Future[T], call: Callable[[], T]) -> None:
    try:
        done.set_result(call())
    except Exception as error:
        done.set_exception(error)
        del done


def _chunks(reply: Any, deadline: float) -> Any:
    """The body piece by piece, until it ends or the deadline passes."""
    try:
        while chunk := reply.read1(_CHUNK):
            yield chunk
            if time.monotonic() > deadline:
                raise Unreachable("the answer did not arrive in time")
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"the connection broke: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None)
    return str(inner or error or type(error).__name__)
