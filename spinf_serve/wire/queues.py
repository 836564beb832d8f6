"""Typed queues between processes, over ZeroMQ `ipc://` sockets: the only module that names it.

One context per process, one class per direction. Receiving sockets are bound by their owner and their file is unlinked
on close; sending sockets never block: a full queue is `QueueFull`. No socket lingers, so no process hangs at exit.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq

from spinf_serve.wire.codec import decode, encode
from spinf_serve.wire.errors import QueueFull, WireError

MAX_PATH_BYTES = 106
"""A Unix socket address holds 107 bytes; libzmq fails with a bare errno beyond it."""

HIGH_WATER_MARK = 1000
"""Messages, per peer. Admission keeps requests far below it; it bounds what a stuck process can pile up."""

RECONNECT_MS = 20


def ipc_address(path: str) -> str:
    """The address of a socket file. Raises WireError for a path that does not fit a Unix socket address."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        limit = f"at most {MAX_PATH_BYTES} fit"
        raise WireError(f"the socket path {path} has {length} bytes, {limit}: choose a shorter --ipc-dir")
    return f"ipc://{path}"


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.linger = 0
    socket.set_hwm(HIGH_WATER_MARK)
    return socket


class Inbox:
    """The messages that a process receives, in order per sender. For one thread."""

    def __init__(self, path: str, accepts: Sequence[type[Any]]) -> None:
        self.address = ipc_address(path)
        self._path = path
        self._accepts = tuple(accepts)
        self._socket = _socket(zmq.PULL)
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise WireError(f"cannot bind {path}: {error}") from None

    def fileno(self) -> int:
        """A descriptor that becomes readable when something may have come. Edge-triggered: drain each time."""
        return int(self._socket.FD)

    def poll(self, timeout_s: float, *fds: int) -> bool:
        """Wait for a message, for a readable descriptor or for the end of the time; True when a message is there."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for fd in fds:
            poller.register(fd, zmq.POLLIN)
        ready = dict(poller.poll(max(0, int(timeout_s * 1000))))
        return self._socket in ready

    def take(self) -> Iterator[Any]:
        """The messages that are there now. A malformed one raises WireError; the next call goes on behind it."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield decode([frame.buffer for frame in frames], self._accepts)

    def close(self) -> None:
        """Close at once and remove the socket file, which libzmq leaves behind."""
        self._socket.close(linger=0)
        with contextlib.suppress(OSError):
            os.unlink(self._path)


class AsyncInbox:
    """An inbox served by the running event loop: `on_message` is called for each message, `on_error` for a bad one."""

    def __init__(self, inbox: Inbox, on_message: Callable[[Any], None], on_error: Callable[[WireError], None]) -> None:
        self._inbox = inbox
        self._on_message = on_message
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(inbox.fileno(), self._drain)
        # The descriptor is edge-triggered: what came before it was watched needs a first look.
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        try:
            for message in self._inbox.take():
                self._on_message(message)
        except WireError as error:
            self._on_error(error)
            self._loop.call_soon(self._drain)
        except BaseException:
            # Whatever it was, it must not cost the messages behind it: no further edge would tell of them.
            self._loop.call_soon(self._drain)
            raise

    def detach(self) -> None:
        """Stop serving the inbox, which stays open."""
        self._loop.remove_reader(self._inbox.fileno())


class Outbox:
    """The way to one inbox. For one thread."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = _socket(zmq.PUSH)
        self._socket.reconnect_ivl = RECONNECT_MS
        self._socket.connect(address)

    def send(self, message: Any) -> None:
        """Queue a message; never blocks. Raises QueueFull at the high-water mark, WireError for a bad message."""
        frames = encode(message)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise QueueFull(f"{type(message).__name__}: the queue to {self.address} is full") from None

    def close(self, linger_s: float = 0.0) -> None:
        """Drop what is still queued after `linger_s` seconds."""
        self._socket.close(linger=int(linger_s * 1000))


def close_context(linger_s: float = 0.5) -> None:
    """Last act of a process: wait a moment for the last words to leave, then tear the sockets down."""
    zmq.Context.instance().destroy(linger=int(linger_s * 1000))
