"""Reading a body message by message: when it ends, and what is kept of it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from spinf_serve.protocol.errors import RequestError
from workers.frontend.admission import Admission
from workers.frontend.body import BodyReader, ClientGone, read_body

CHUNKED = [(b"transfer-encoding", b"chunked")]


def read(messages: list[dict[str, Any]], *, limit: int = 10, timeout_s: float = 5.0) -> tuple[bytes, BodyReader]:
    """Read a body from the ASGI messages that a server would give, and nothing behind them."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        message = next(left, None)
        if message is None:
            await asyncio.sleep(60)
        assert message is not None
        return message

    async def run() -> tuple[bytes, BodyReader]:
        reader = BodyReader(receive, CHUNKED)
        return await read_body(reader, limit, timeout_s, Admission(queue=0)), reader

    return asyncio.run(run())


def chunk(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_pieces_are_joined() -> None:
    body, reader = read([chunk(b"abc"), chunk(b""), chunk(b"defghij"), chunk(b"", more=False)])
    assert body == b"abcdefghij"
    assert reader.whole


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([chunk(b"a" * 11)], "body_too_large"),  # not one message more is asked for
        ([chunk(b"a" * 6), chunk(b"a" * 5)], "body_too_large"),
        ([chunk(b"a" * 11, more=False)], "body_too_large"),
    ],
)
def test_reading_ends_at_the_limit(messages: list[dict[str, Any]], code: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(messages)
    assert refused.value.code == code


def test_reading_ends_in_time() -> None:
    with pytest.raises(RequestError) as refused:
        read([chunk(b"abc")], timeout_s=0.05)
    assert (refused.value.code, refused.value.param) == ("invalid_field", "body")


def test_caller_who_leaves() -> None:
    with pytest.raises(ClientGone):
        read([chunk(b"abc"), {"type": "http.disconnect"}])


@pytest.mark.parametrize(
    ("headers", "whole"),
    [
        ([], True),
        ([(b"content-length", b"0")], True),
        ([(b"content-length", b"3")], False),
        (CHUNKED, False),
    ],
)
def test_announced_bodies(headers: list[tuple[bytes, bytes]], whole: bool) -> None:
    unused: Callable[..., Any] = chunk
    assert BodyReader(unused, headers).whole is whole
