"""What a trusted caller may say about limits and features."""

from dataclasses import fields, replace

from spinf_serve.config import Limits
from spinf_serve.protocol.document import Fields

_NAMES = tuple(field.name for field in fields(Limits))


def trusted_limits(body: Fields, limits: Limits) -> Limits:
    """The server's limits, lowered by the body's. `features` is only checked: what it switches off is not here."""
    features = body.object("features")
    if features is not None:
        features.items("media")
        features.boolean("extraction", False)
        features.boolean("generation", False)
    sent = body.object("limits")
    if sent is None:
        return limits
    values = {name: sent.integer(name, 0) for name in _NAMES}
    return replace(limits, **{n: min(v, getattr(limits, n)) for n, v in values.items() if v is not None})
