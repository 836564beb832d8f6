"""Request ids: `scr_` + a ULID."""

import secrets
import time

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_request_id() -> str:
    """`scr_` + 26 characters of Crockford base 32: 48 bits of Unix milliseconds, then 80 random bits.

    Source: the ULID specification (github.com/ulid/spec); the first character holds the top 3 bits of 130.
    """
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "scr_" + "".join(_CROCKFORD[value >> shift & 31] for shift in range(125, -1, -5))
