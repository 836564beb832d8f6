"""Bodies on their way: limits, chunks, slow senders, connections that are used again after an error."""

import gzip
import json
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.raw import RawConnection
from tests.support.plant import light
from tests.support.server import ServerProcess, body_of, wait_for

LIMIT = 65536
BODY = json.dumps(body_of()).encode()


def padded(size: int) -> bytes:
    """A valid body of `size` bytes."""
    return BODY[:-1] + b" " * (size - len(BODY)) + b"}"


def chunked(data: bytes, size: int = 10_000) -> bytes:
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def assert_error(answer: object, status: int, code: str) -> None:
    body = getattr(answer, "body", None) or answer.content  # type: ignore[attr-defined]
    found = getattr(answer, "status", None) or answer.status_code  # type: ignore[attr-defined]
    envelope = json.loads(body)
    assert (found, envelope["error"]["code"]) == (status, code)
    assert envelope["request_id"] == answer.headers["x-request-id"]  # type: ignore[attr-defined]


def test_limit_is_exact(open_server: ServerProcess) -> None:
    assert open_server.post(padded(LIMIT)).status_code == 200
    assert_error(open_server.post(padded(LIMIT + 1)), 413, "body_too_large")


def test_limit_without_a_length(open_server: ServerProcess) -> None:
    def pieces(size: int) -> Iterator[bytes]:
        data = padded(size)
        yield from (data[i : i + 5000] for i in range(0, size, 5000))

    assert open_server.client.post("/v1/score", content=pieces(LIMIT)).status_code == 200
    assert_error(open_server.client.post("/v1/score", content=pieces(LIMIT + 1)), 413, "body_too_large")
    assert_error(open_server.client.post("/v1/score", content=pieces(6 * LIMIT)), 413, "body_too_large")


def test_too_large_is_answered_before_the_body_is_there(open_server: ServerProcess) -> None:
    """By Content-Length alone; the rest is read away, so the client that sends on sees the answer."""
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", f"Content-Length: {4 * LIMIT}", body=b"x" * 1000)
        started = time.monotonic()
        answer = connection.read()
        assert time.monotonic() - started < 4
        assert_error(answer, 413, "body_too_large")
        assert answer.headers["connection"] == "close"
        connection.send(b"x" * (4 * LIMIT - 1000))
        assert connection.ended()


def test_client_that_sends_all_before_it_reads_sees_the_answer(open_server: ServerProcess) -> None:
    """Up to 8 times the limit: closing earlier would reset the connection and lose the answer."""
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", f"Content-Length: {6 * LIMIT}")
        for _ in range(24):
            connection.send(b"x" * (LIMIT // 4))
            time.sleep(0.02)
        assert_error(connection.read(), 413, "body_too_large")


def test_endless_body_is_cut(open_server: ServerProcess) -> None:
    """Reading away ends at 8 × the limit."""
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", "Transfer-Encoding: chunked")
        piece = b"%x\r\n%s\r\n" % (LIMIT, b"x" * LIMIT)

        def flood() -> bool:
            try:
                connection.send(piece)
            except ConnectionError:
                return True
            return False

        wait_for(flood, "the end of an endless body", 30)


def test_expect_continue(open_server: ServerProcess) -> None:
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", f"Content-Length: {len(BODY)}", "Expect: 100-continue")
        assert connection.read().status == 100
        connection.send(BODY)
        assert connection.read().status == 200


@pytest.mark.parametrize(("path", "length", "status"), [("/v1/score", 2 * LIMIT, 413), ("/nope", 10, 404)])
def test_refusal_instead_of_continue(open_server: ServerProcess, path: str, length: int, status: int) -> None:
    """The client never sends the body, so the connection ends."""
    with RawConnection(open_server.port) as connection:
        connection.post(path, f"Content-Length: {length}", "Expect: 100-continue")
        answer = connection.read()
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        assert connection.ended()


def test_compressed_bodies(open_server: ServerProcess) -> None:
    expected = open_server.post(BODY).json()["results"]
    for encoding, data in (
        ("gzip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
    ):
        answer = open_server.post(data, headers={"content-encoding": encoding})
        assert answer.json()["results"] == expected
    bomb = gzip.compress(padded(LIMIT + 1))
    assert len(bomb) < 1000
    assert_error(open_server.post(bomb, headers={"content-encoding": "gzip"}), 413, "body_too_large")
    assert_error(open_server.post(BODY, headers={"content-encoding": "br"}), 400, "invalid_field")
    assert_error(open_server.post(BODY, headers={"content-encoding": "gzip"}), 400, "invalid_json")


def test_connection_lives_on_after_errors(open_server: ServerProcess) -> None:
    """One connection, refused again and again with bodies unread, then a good call."""
    with RawConnection(open_server.port) as connection:
        for path, body in (("/nope", BODY), ("/v1/score", b"{"), ("/v1/models", b"x" * 50_000), ("/v1/score", BODY)):
            connection.post(path, f"Content-Length: {len(body)}", body=body)
            answer = connection.read()
            assert "connection" not in answer.headers
        assert answer.status == 200


def test_pipelined_calls_are_answered_in_order(open_server: ServerProcess) -> None:
    head = f"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
    with RawConnection(open_server.port) as connection:
        connection.send(head + BODY + b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n" + head + BODY)
        answers = [connection.read() for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 404, 200]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3


def test_http_1_0(open_server: ServerProcess) -> None:
    with RawConnection(open_server.port) as connection:
        connection.send(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert connection.read().status == 200
        assert connection.ended()


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_malformed_http_hurts_nobody(open_server: ServerProcess, head: bytes) -> None:
    """It gets a 4xx or a closed connection; no traceback, and the next caller is served."""
    with RawConnection(open_server.port, timeout=10) as connection:
        try:
            connection.send(head)
            answer = connection.read()
        except (EOFError, ConnectionError):
            pass
        else:
            assert 400 <= answer.status < 500
            assert b"Traceback" not in answer.body
    assert open_server.get("/healthz").status_code == 200
    assert "Traceback" not in open_server.log


def test_absolute_form_and_upgrade(open_server: ServerProcess) -> None:
    """What proxies and curious clients send is served as plain HTTP."""
    with RawConnection(open_server.port) as connection:
        connection.send(b"GET http://somewhere/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.read().status == 200
        connection.send(
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert connection.read().status == 200


def test_slow_senders_do_not_close_the_server(open_server: ServerProcess) -> None:
    """More of them than there are read slots; fast callers get in all the time, the slow ones get an answer."""
    slow = [RawConnection(open_server.port) for _ in range(25)]
    try:
        for connection in slow:
            connection.post("/v1/score", f"Content-Length: {len(BODY)}", body=BODY[:20])

        for _ in range(20):
            assert open_server.post(BODY).status_code == 200
            assert open_server.get("/healthz").elapsed.total_seconds() < 1
        statuses = {connection.read().status for connection in slow}
        assert statuses <= {400, 429}
    finally:
        for connection in slow:
            connection.__exit__()


def test_body_that_never_ends_in_time(open_server: ServerProcess) -> None:
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", f"Content-Length: {len(BODY)}", body=BODY[:20])
        answer = connection.read()
        assert_error(answer, 400, "invalid_field")
        assert json.loads(answer.body)["error"]["param"] == "body"
        assert answer.headers["connection"] == "close"
        assert connection.ended()


def test_half_a_head_takes_nothing(open_server: ServerProcess) -> None:
    """Hundreds of connections that never finish their head: others are served at once."""
    loris = []
    try:
        for _ in range(300):
            connection = socket.create_connection(("127.0.0.1", open_server.port))
            connection.sendall(b"POST /v1/score HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            loris.append(connection)
        assert open_server.post(BODY).status_code == 200
        assert open_server.get("/readyz").status_code == 200
    finally:
        for connection in loris:
            connection.close()


def test_body_that_stops_half_way_leaves_no_trace(open_server: ServerProcess) -> None:
    """A caller that disconnects while sending gives its slot back."""
    for _ in range(30):
        with RawConnection(open_server.port) as connection:
            connection.post("/v1/score", f"Content-Length: {len(BODY)}", body=BODY[:20])
    wait_for(lambda: open_server.post(BODY).status_code == 200, "a place after those who left", 5)


def test_slow_heads_end(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A head that does not end, and a body that nobody reads and that trickles, cost their connection in the end."""
    short = "import workers.frontend.http as http\nhttp.HEAD_S = 0.5"
    env = light(tmp_path / "plant", frontend=short)
    with ServerProcess(tiny_checkpoint, tmp_path, "--keepalive", "4", env=env) as server:
        with (
            RawConnection(server.port) as idle,
            RawConnection(server.port) as loris,
            RawConnection(server.port) as drip,
        ):
            loris.send(b"GET /healthz HTTP/1.1\r\nX-Slow:")
            drip.post("/nope", "Content-Length: 1000", body=b"x")
            assert drip.read().status == 404
            started = time.monotonic()
            assert loris.ended()
            assert drip.ended()
            assert time.monotonic() - started < 3.5, "sooner than an idle connection"
            assert idle.ended()
        with RawConnection(server.port) as good:
            for _ in range(3):
                good.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert good.read().status == 200
                time.sleep(0.7)
