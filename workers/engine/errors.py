"""The engine's own error. A request's refusal is a `RequestError`."""

from spinf_serve.refusal import StartRefused


class LoadError(StartRefused):
    """The snapshot or its configuration cannot be served, no retry cures it; the message says which part and why."""
