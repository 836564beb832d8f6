"""A stand-in for GitHub's API on the loopback: refs, tags and tarballs, and the ways in which a network fails."""

import contextlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"
OTHER_SHA = "89abcdef0123456789abcdef0123456789abcdef"


def tarball(files: dict[str, bytes], top: str = "acme-packs-0123456/") -> bytes:
    """A gzip tarball as GitHub makes it: a global comment header, one top folder, the files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT, pax_headers={"comment": SHA}) as tar:
        folder = tarfile.TarInfo(top)
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in files.items():
            member = tarfile.TarInfo(top + name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def folder_tarball(root: Path) -> bytes:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return tarball({path.relative_to(root).as_posix(): path.read_bytes() for path in files})


@dataclass
class Hub:
    """What the server holds and what it was asked. `fail` maps a path's prefix to what happens instead of an answer."""

    url: str = ""
    refs: dict[str, dict[str, str]] = field(default_factory=dict)  # "tags/1.0" → {"type", "sha"}
    tags: dict[str, dict[str, str]] = field(default_factory=dict)  # tag object → what it names
    tarballs: dict[str, bytes] = field(default_factory=dict)
    default_branch: str = "main"
    redirect_to: str | None = None
    token: str | None = None
    fail: dict[str, Any] = field(default_factory=dict)  # a status, "cut", "stall" or "drip"
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@contextmanager
def hub_server(**facts: Any) -> Iterator[Hub]:
    hub = Hub(**facts)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            hub.asked.append((self.path, self.headers.get("Authorization")))
            failure = next((what for prefix, what in hub.fail.items() if self.path.startswith(prefix)), None)
            if failure == "stall":
                hub.release.wait(20)
            elif failure == "drip":
                self._drip()
            elif isinstance(failure, int):
                self._reply(failure, b"{}")
            elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._reply(404, b"{}")
            else:
                self._answer(cut=failure == "cut")

        def _drip(self) -> None:
            """Headers without end, a byte at a time: each is in time for a socket's timeout."""
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            with contextlib.suppress(OSError):
                while not hub.release.wait(0.05):
                    self.wfile.write(b"x")
            self.close_connection = True

        def _answer(self, *, cut: bool) -> None:
            prefix = "/repos/acme/packs"
            route = self.path.removeprefix(prefix).removeprefix("/") if self.path.startswith(prefix) else self.path
            if route == "":
                self._json({"default_branch": hub.default_branch})
            elif route.startswith("git/ref/") and route.removeprefix("git/ref/") in hub.refs:
                self._json({"object": hub.refs[route.removeprefix("git/ref/")]})
            elif route.startswith("git/tags/") and route.removeprefix("git/tags/") in hub.tags:
                self._json({"object": hub.tags[route.removeprefix("git/tags/")]})
            elif route.startswith("commits/") and SHA.startswith(route.removeprefix("commits/")):
                self._json({"sha": SHA})
            elif route.startswith("tarball/") and hub.redirect_to is not None:
                self.send_response(302)
                self.send_header("Location", f"{hub.redirect_to}/{route}")
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif route.startswith("tarball/") and route.removeprefix("tarball/") in hub.tarballs:
                self._reply(200, hub.tarballs[route.removeprefix("tarball/")], cut=cut)
            else:
                self._reply(404, b"{}")

        def _json(self, value: Any) -> None:
            self._reply(200, json.dumps(value).encode())

        def _reply(self, status: int, content: bytes, *, cut: bool = False) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if cut else content)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        thread.join()
        server.server_close()
