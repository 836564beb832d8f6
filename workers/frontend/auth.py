"""Who calls: the rules of `Authorization`. Plain objects."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """`access`: may use /v1; `trusted`: may use /v0, and gets and gives the internal fields."""

    access: bool
    trusted: bool


@dataclass(frozen=True, slots=True)
class Auth:
    """The tokens of this server. Without any it is open, and nobody is trusted."""

    token: str | None
    trusted_token: str | None

    @property
    def open(self) -> bool:
        return self.token is None and self.trusted_token is None

    def caller(self, authorization: Sequence[bytes]) -> Caller:
        """Judge the values of a request's Authorization headers (two of them are as good as none)."""
        if self.open:
            return Caller(access=True, trusted=False)
        given = _bearer(authorization[0]) if len(authorization) == 1 else None
        # Both are compared whatever the first says, each in constant time.
        is_access, is_trusted = _equal(given, self.token), _equal(given, self.trusted_token)
        return Caller(access=is_access or is_trusted, trusted=is_trusted or (is_access and self.trusted_token is None))


def _bearer(value: bytes) -> bytes | None:
    scheme, _, token = value.strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def _equal(given: bytes | None, token: str | None) -> bool:
    same = hmac.compare_digest(given or b"", (token or "").encode())
    return same and bool(given) and bool(token)
