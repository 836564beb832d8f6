"""The public TCP sockets. The supervisor binds them before anything loads and holds them until the end."""

import errno
import os
import socket

from spinf_serve.refusal import StartRefused

BACKLOG = 2048


class PortTaken(StartRefused):
    """Somebody else listens there: exit code 4."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host` (one only with port 0, which takes a free port).

    Raises PortTaken, or StartRefused for a host that this machine does not have.
    """
    name = host.strip("[]")
    try:
        found = socket.getaddrinfo(name or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise StartRefused(f"--host {host}: {getattr(error, 'strerror', None) or error}") from None
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    if port == 0:
        addresses = addresses[:1]
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    for family, address in addresses:
        try:
            sockets.append(_bind(family, address))
        except OSError as error:
            # A name may stand for addresses of a family that this machine has switched off.
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                absent = error
                continue
            for opened in sockets:
                opened.close()
            _refuse(host, port, error)
    if not sockets:
        _refuse(host, port, absent or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL)))
    return sockets


def _refuse(host: str, port: int, error: OSError) -> None:
    if error.errno == errno.EADDRINUSE:
        raise PortTaken(f"port {port} on {host} is taken") from None
    raise StartRefused(f"cannot listen on {host} port {port}: {error.strerror}") from None


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address[0] == "::":
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" takes IPv4 callers too
        opened.bind(address)
        # At once: with SO_REUSEADDR two sockets may be bound, only one may listen.
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except OSError:
        opened.close()
        raise
    return opened


def url_of(opened: socket.socket) -> str:
    """`http://host:port` of a listening socket."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if opened.family == socket.AF_INET6 else f"http://{host}:{port}"
