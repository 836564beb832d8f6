"""The engine's own errors at its start. A request's refusal is a `RequestError`."""

from spinf_serve.refusal import StartRefused


class LoadError(StartRefused):
    """The snapshot or its configuration cannot be served, no retry cures it; the message says which part and why."""


class NotNow(RuntimeError):
    """What keeps the engine from starting may pass by itself: memory that another process holds, a driver not ready.

    The message is one sentence and says all: where it was raised is of no interest.
    """
