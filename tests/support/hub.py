"""A local HTTP server that plays the Hub: one repository at one commit, with the faults that a test asks for."""

import contextlib
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

REPO = "acme/tiny-model"
REVISION = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
_PIECE = 16 << 10


@dataclass(frozen=True)
class Seen:
    """One request, as the server saw it."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Faults:
    """What goes wrong. Names are of files; counts are per request unless they say otherwise."""

    status: dict[str, tuple[int, str]] = field(default_factory=dict)  # part of a path → status and X-Error-Code
    times: dict[str, int] = field(default_factory=dict)  # part of a path → how often `status` counts (default: ever)
    cut_after: dict[str, int] = field(default_factory=dict)  # bytes of the body before the connection breaks
    cuts: dict[str, int] = field(default_factory=dict)  # how often `cut_after` counts (default: ever)
    no_range: bool = False  # answer 200 and the whole file to every Range
    body: dict[str, bytes] = field(default_factory=dict)  # another content than HEAD describes
    claim: dict[str, int] = field(default_factory=dict)  # another length than the file's in HEAD
    chunked: bool = False  # no Content-Length in GET
    commit: str | None = REVISION  # X-Repo-Commit
    pace_s: float = 0.0  # wait before each 16 KiB
    hold_at: dict[str, int] = field(default_factory=dict)  # stop at this offset of a file until `go` is set
    no_tree: bool = False  # the listing call does not exist
    no_length: bool = False  # no Content-Length in HEAD
    tree: bytes | None = None  # what the listing call answers
    endless_tree: bool = False  # each page of the listing names itself as the next one
    range_from: int | None = None  # where an answer to a Range says that it begins


class FakeHub:
    """`with FakeHub(files) as hub:` serves `REPO` at `REVISION`, its head, on a free loopback port."""

    def __init__(self, files: dict[str, bytes], *, token: str | None = None, storage: str | None = None) -> None:
        self.files = dict(files)
        self.faults = Faults()
        self.token = token
        self.storage = storage  # address that weights are redirected to, as the Hub does
        self.head = REVISION
        self.seen: list[Seen] = []
        self.sent: Counter[str] = Counter()  # file → bytes of bodies sent
        self.holding = threading.Event()
        self.go = threading.Event()
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def got(self, name: str) -> list[Seen]:
        """The GETs of a file."""
        return [seen for seen in self.seen if seen.method == "GET" and seen.path.endswith(f"/{name}")]

    def etag(self, name: str) -> str:
        """As the Hub names contents: SHA-256 of weights, git's SHA-1 of everything else."""
        data = self.files[name]
        if name.endswith(".safetensors"):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def tree(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = [{"type": "directory", "oid": "d" * 40, "size": 0, "path": "extra"}]
        for name, data in self.files.items():
            entry = {"type": "file", "oid": "b" * 40, "size": len(data), "path": name}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"oid": self.etag(name), "size": len(data), "pointerSize": 134}
            entries.append(entry)
        return entries


class _Handler(BaseHTTPRequestHandler):
    owner: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits 40 ms for the receipt of its head

    def handle(self) -> None:
        """As usual, but a client that is killed is no error."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.owner
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        hub.seen.append(Seen(self.command, path, self.headers.get("Range"), authorization))
        for part, (status, code) in hub.faults.status.items():
            if part in path and hub.faults.times.get(part, 1) > 0:
                if part in hub.faults.times:
                    hub.faults.times[part] -= 1
                return self._send(status, b'{"error": "x"}', {"X-Error-Code": code} if code else {})
        if hub.token is not None and authorization != f"Bearer {hub.token}":
            return self._send(401, b"{}", {})
        if path.startswith("/stored/"):
            return self._file(path.removeprefix("/stored/"), stored=True)
        if match := re.fullmatch(f"/{REPO}/resolve/([^/]+)/(.+)", path):
            return self._file(match[2]) if match[1] == REVISION else self._missing("RevisionNotFound")
        if not path.startswith(f"/api/models/{REPO}"):
            return self._missing("RepoNotFound")
        rest = path.removeprefix(f"/api/models/{REPO}").split("/")[1:]
        if rest[:1] == ["tree"] and not hub.faults.no_tree:
            if hub.faults.tree is not None:
                return self._send(200, hub.faults.tree, {"Content-Type": "application/json"})
            if rest[1] != REVISION:
                return self._missing("RevisionNotFound")
            link = {"Link": f'<{hub.url}{path}>; rel="next"'} if hub.faults.endless_tree else {}
            return self._send(200, json.dumps(hub.tree()).encode(), {"Content-Type": "application/json"} | link)
        if rest in ([], ["revision", "main"], ["revision", REVISION]):
            siblings = [{"rfilename": name} for name in hub.files]
            return self._json({"id": REPO, "modelId": REPO, "sha": hub.head, "siblings": siblings})
        return self._missing("RevisionNotFound" if rest[:1] == ["revision"] else "")

    def _missing(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code} if code else {})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, sized: bool = True) -> None:
        self.send_response(status)
        length = {"Content-Length": str(len(body))} if sized else {}
        for name, value in (length | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _file(self, name: str, stored: bool = False) -> None:
        hub = self.owner
        if name not in hub.files:
            return self._missing("EntryNotFound")
        size = hub.faults.claim.get(name, len(hub.files[name]))
        headers = {"ETag": f'"{hub.etag(name)}"'}
        if hub.faults.commit is not None:
            headers["X-Repo-Commit"] = hub.faults.commit
        if hub.storage is not None and not stored and name.endswith(".safetensors"):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(size)}
            headers |= {"Location": f"{hub.storage}/stored/{name}?X-Amz-Signature=sekrit", "Content-Length": "0"}
            return self._send(302, b"", headers)
        if self.command == "HEAD" and hub.faults.no_length:
            self.close_connection = True
            return self._send(200, b"", headers | {"Connection": "close"}, sized=False)
        if self.command == "HEAD":
            return self._send(200, b"", headers | {"Content-Length": str(size)})
        return self._body(name, hub.faults.body.get(name, hub.files[name]), headers)

    def _body(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        faults = self.owner.faults
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked and not faults.no_range:
            start = int(asked[1])
            if start >= len(data):
                self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
        self.send_response(206 if start else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        if start:
            said = start if faults.range_from is None else faults.range_from
            self.send_header("Content-Range", f"bytes {said}-{len(data) - 1}/{len(data)}")
        if faults.chunked:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        cut = faults.cut_after.get(name)
        if cut is not None and name in faults.cuts:
            faults.cuts[name] -= 1
            cut = cut if faults.cuts[name] >= 0 else None
        self._write(name, data, start, len(data) if cut is None else min(len(data), start + cut))
        if cut is not None or faults.chunked:
            self.close_connection = True

    def _write(self, name: str, data: bytes, start: int, end: int) -> None:
        hub, faults = self.owner, self.owner.faults
        hold = faults.hold_at.get(name)
        while start < end:
            stop = min(end, start + _PIECE)
            if hold is not None and start <= hold < stop and not hub.go.is_set():
                stop = hold
                if start == stop:
                    self.wfile.flush()
                    hub.holding.set()
                    hub.go.wait(60)
                    continue
            if faults.pace_s:
                time.sleep(faults.pace_s)
            try:
                self.wfile.write(data[start:stop])
            except OSError:
                self.close_connection = True
                return
            hub.sent[name] += stop - start
            start = stop


def eventually(probe: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Poll until `probe` returns something true, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
    return found
