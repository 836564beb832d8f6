"""Connections: offers of another protocol, the bound of a head however it is cut, callers who leave in between."""

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import Iterable
from unittest.mock import Mock

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from tests.http.raw import RawConnection
from tests.support.server import ServerProcess, body_of, slow_body, wait_for
from workers.frontend.auth import Auth
from workers.frontend.body import ClientGone
from workers.frontend.call import Call
from workers.frontend.gate import Gate
from workers.frontend.http import MAX_HEAD_BYTES, Connection

BODY = json.dumps(body_of()).encode()
CHUNKED = b"%x\r\n%s\r\n%x;x=y\r\n%s\r\n0\r\nX-Trailer: 1\r\n\r\n" % (7, BODY[:7], len(BODY) - 7, BODY[7:])
FRAMINGS = {"length": (f"Content-Length: {len(BODY)}", BODY), "chunked": ("Transfer-Encoding: chunked", CHUNKED)}
OFFERS = {
    "h2c": ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"),
    "unknown": ("Connection: upgrade", "Upgrade: foo"),
    "websocket": ("Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
}


def request(path: str, *headers: str, body: bytes = b"", method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode("latin-1") + body


PLAIN = request("/healthz", method="GET")


def send_slowly(connection: RawConnection, pieces: Iterable[bytes]) -> None:
    """Each piece in a segment of its own."""
    for piece in pieces:
        connection.send(piece)
        time.sleep(0.005)


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("framing", FRAMINGS)
def test_an_offered_upgrade_is_ignored(open_server: ServerProcess, offer: str, framing: str) -> None:
    """RFC 9110, 7.8: a server may ignore it; the request is answered as without it, however its bytes are cut."""
    header, body = FRAMINGS[framing]
    whole = request("/v1/score", *OFFERS[offer], header, body=body)
    at = whole.index(b"\r\n\r\n") + 4
    mark = len(open_server.lines)
    for pieces in ([whole], [whole[:at], whole[at:]], [whole[: at + 3], whole[at + 3 :]], cut(whole, 37)):
        with RawConnection(open_server.port) as connection:
            send_slowly(connection, pieces)
            assert connection.read().status == 200
            connection.send(PLAIN)
            assert connection.read().status == 200
    with RawConnection(open_server.port) as connection:
        connection.send(whole + PLAIN + whole + request("/healthz", *OFFERS[offer], method="GET") + whole)
        assert [connection.read().status for _ in range(5)] == [200] * 5
    time.sleep(0.1)
    assert not re.search("WebSocket|[Uu]nsupported|Invalid", "".join(open_server.lines[mark:]))


def test_an_offer_changes_nothing_else(open_server: ServerProcess) -> None:
    """The rest of the head keeps its meaning: the end of the connection, the caller, 100 Continue, a bad length."""
    length = f"Content-Length: {len(BODY)}"
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", "Connection: close, Upgrade", "Upgrade: h2c", length, body=BODY)
        answer = connection.read()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert connection.ended()
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", *OFFERS["h2c"], length, "Expect: 100-continue")
        assert connection.read().status == 100
        connection.send(BODY)
        assert connection.read().status == 200
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", *OFFERS["h2c"], "Transfer-Encoding: gzip", body=BODY)
        assert connection.read().status == 400
        assert connection.ended()
    with RawConnection(open_server.port) as connection:
        connection.send(request("x:80", method="CONNECT", body=PLAIN))
        assert connection.read().status == 400
        assert connection.ended()


def head_of(size: int, *, padded: bool) -> bytes:
    """A GET of exactly `size` bytes, filled with a long value or with spaces before it."""
    head = request("/healthz", "X-Fill: #y", method="GET")
    return head.replace(b"#", (b" " if padded else b"x") * (size - len(head) + 1))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("before", [b"", PLAIN, *(request("/v1/score", h, body=b) for h, b in FRAMINGS.values())])
def test_the_bound_of_a_head_is_exact(open_server: ServerProcess, before: bytes, padded: bool) -> None:
    """In one read, in many, or behind another request: the same 64 KiB."""
    for size, status in ((MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 400)):
        data = before + head_of(size, padded=padded)
        for pieces in ([data], cut(data, 9000), [data[:-1], data[-1:]]):
            with RawConnection(open_server.port) as connection:
                send_slowly(connection, pieces)
                if before:
                    assert connection.read().status == 200
                assert connection.read().status == status, (size, len(pieces))


@pytest.mark.parametrize(
    "coding", ["gzip, chunked", "x-foo , chunked", "chunked, chunked", "deflate\r\nTransfer-Encoding: chunked"]
)
def test_other_transfer_codings_are_refused(open_server: ServerProcess, coding: str) -> None:
    """Their content is never read as if it were the body."""
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", f"Transfer-Encoding: {coding}", body=CHUNKED)
        answer = connection.read()
        assert answer.status == 400
        if coding != "chunked, chunked":
            error = json.loads(answer.body)["error"]
            assert error["code"] == "invalid_field"
            assert f"Transfer-Encoding: {re.split('[ ,\r]', coding)[0]}" in error["message"]
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", "Transfer-Encoding: Chunked", body=CHUNKED)
        assert connection.read().status == 200


@pytest.mark.parametrize(
    "bad",
    [
        b"nonsense\r\n\r\n",
        request("http://[", method="GET"),
        request("/v1/score", "Transfer-Encoding: chunked", body=b"zz\r\n"),
        request("/v1/score", "Transfer-Encoding: chunked", body=b"5\r\nhello-\r\n"),
        head_of(MAX_HEAD_BYTES + 1, padded=False),
    ],
)
def test_a_fault_behind_a_request_is_told_behind_its_answer(open_server: ServerProcess, bad: bytes) -> None:
    """It never takes the place of the answer to a request that was well formed."""
    good = request("/v1/score", f"Content-Length: {len(BODY)}", body=BODY)
    for before in ([good], [good, good, PLAIN], [PLAIN]):
        for pieces in ([b"".join(before) + bad + good], [*before, bad, good]):
            with RawConnection(open_server.port) as connection:
                for piece in pieces:
                    connection.send(piece)
                assert [connection.read().status for _ in before] == [200] * len(before)
                answer = connection.read()
                assert (answer.status, answer.body.split()[-1]) in ((400, b"received."), (400, b"long."))
                assert connection.ended()


def leave(connection: RawConnection, *, reset: bool) -> None:
    if reset:
        connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.__exit__()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("path", ["/v1/score", "/nope", "/metrics"])
def test_leaving_a_pipeline_is_quiet(open_server: ServerProcess, path: str, reset: bool) -> None:
    """Several requests at once, and the caller leaves while they are answered: no traceback, no finished call."""
    mark = len(open_server.lines)
    body = json.dumps(slow_body(3)).encode()
    one = (
        request(path, f"Content-Length: {len(body)}", body=body) if path != "/metrics" else request(path, method="GET")
    )
    for wait in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05) * 3:
        connection = RawConnection(open_server.port)
        connection.send(one * 6)
        time.sleep(wait)
        leave(connection, reset=reset)
    assert open_server.post(BODY).status_code == 200
    time.sleep(0.1)
    lines = open_server.lines[mark:]
    assert not [line for line in lines if not re.search(r"\bcall\b", line)], "".join(lines)


def test_leaving_a_pipeline_cancels_the_call_that_runs(open_server: ServerProcess) -> None:
    """The one being scored, although another was read behind it."""
    body = json.dumps(slow_body(50)).encode()
    mark = len(open_server.lines)
    connection = RawConnection(open_server.port)
    connection.send(request("/v1/score", f"Content-Length: {len(body)}", body=body) + PLAIN)
    time.sleep(0.15)
    leave(connection, reset=False)
    line = wait_for(lambda: next((x for x in open_server.lines[mark:] if "route=score" in x), None), "its line", 20)
    assert "status=499" in line


def test_a_caller_who_closes_its_sending_side_has_left(open_server: ServerProcess) -> None:
    """As docs/operations.md says: TCP shows a whole close and a half one alike, and the call ends in both."""
    body = json.dumps(slow_body(50)).encode()
    mark = len(open_server.lines)
    with RawConnection(open_server.port) as connection:
        connection.post("/v1/score", f"Content-Length: {len(body)}", body=body)
        connection._socket.shutdown(socket.SHUT_WR)
        assert connection.ended()
    line = wait_for(lambda: next((x for x in open_server.lines[mark:] if "route=score" in x), None), "its line", 20)
    assert "status=499" in line


async def ended_calls(path: str, fails_at: str) -> list[Call]:
    """What the gate notes of a call whose caller is gone when the message `fails_at` is sent."""
    ended: list[Call] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == fails_at:
            raise ClientGone

    gate = Gate(
        app, Auth(None, None), max_body_bytes=9, metrics_auth=False, is_stopping=lambda: False, on_end=ended.append
    )
    await gate({"method": "GET", "path": path, "raw_path": path.encode(), "headers": []}, receive, send)
    return ended


@pytest.mark.parametrize("fails_at", ["http.response.start", "http.response.body"])
@pytest.mark.parametrize("path", ["/livez", "/nope"])
def test_an_answer_that_reaches_nobody_is_noted_as_a_departure(path: str, fails_at: str) -> None:
    (call,) = asyncio.run(ended_calls(path, fails_at))
    assert (call.status, call.code) == (499, None)


async def told_of_departure(when: str) -> int:
    """How often an application that answers a caller who leaves is told so, of two attempts."""
    told: list[ClientGone] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        for message in ({"type": "http.response.start", "status": 200}, {"type": "http.response.body", "body": b"x"}):
            try:
                await send(message)
            except ClientGone as gone:
                told.append(gone)

    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
    connection = Connection(config, ServerState(), {})
    transport = Mock(asyncio.Transport)
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = None
    if when == "meanwhile":
        transport.write.side_effect = lambda _data: connection.connection_lost(ConnectionResetError())
    connection.connection_made(transport)
    connection.data_received(PLAIN)
    transport.is_closing.return_value = when == "before"
    await asyncio.gather(*connection.tasks)
    connection.connection_lost(ConnectionResetError())
    assert transport.write.call_count == (when == "meanwhile")
    return len(told)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_the_application_is_told_that_an_answer_has_nowhere_to_go(when: str) -> None:
    """uvicorn drops it without a word, or fails where the event loop has not yet said that the connection is lost."""
    assert asyncio.run(told_of_departure(when)) == 2
