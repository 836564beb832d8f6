"""HTTP over a bare socket, for what no client library sends."""

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


class RawConnection:
    """One TCP connection to a server."""

    def __init__(self, port: int, timeout: float = 30.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is sent in pieces travels in pieces
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> "RawConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def post(self, path: str, *headers: str, body: bytes = b"") -> None:
        """Send a POST; the body goes out as it is, whatever the headers say."""
        head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *headers, "", ""])
        self.send(head.encode("latin-1") + body)

    def read(self) -> RawAnswer:
        """The next answer; raises EOFError when the connection ended instead."""
        line = self._file.readline()
        if not line:
            raise EOFError
        headers = {}
        while (header := self._file.readline().strip()) and b":" in header:
            name, _, value = header.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = self._file.read(int(headers.get("content-length", "0")))
        return RawAnswer(int(line.split()[1]), headers, body)

    def ended(self) -> bool:
        """Whether the server closed the connection (waits for it)."""
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True
