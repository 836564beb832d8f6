"""What can go wrong on a socket between two of our own processes."""


class WireError(Exception):
    """A message that must not be acted on: unknown, malformed, or of another shape than its class says."""


class VersionMismatch(WireError):
    """A message of another protocol version; `sender` is what it calls itself, when that could be read."""

    def __init__(self, theirs: object, ours: int, sender: str | None) -> None:
        super().__init__(f"{sender or 'a process'} speaks wire protocol version {theirs!r}, this process {ours}")
        self.sender = sender


class QueueFull(WireError):
    """The receiver does not keep up: its high-water mark is reached. Nothing was sent."""
