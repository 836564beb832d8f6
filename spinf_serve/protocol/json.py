"""Strict JSON: what RFC 8259 allows, in UTF-8, with nothing that another parser would read differently."""

import json
import math
import re
from typing import Any, NoReturn

from spinf_serve.protocol.errors import RequestError

_DOUBLE_DIGITS = 309  # an integer of fewer digits is always within a double
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(body: bytes) -> Any:
    """The JSON value of a UTF-8 body, an optional byte order mark skipped.

    Raises `RequestError` invalid_json for broken UTF-8 or JSON, trailing text, a duplicate key, `NaN` and `Infinity`, a
    number beyond a double, a lone surrogate (escaped or raw, in keys too) and nesting too deep to read.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _invalid(f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise _invalid("the body is nested too deeply") from None
    # Strict UTF-8 holds no surrogates, so only an escape can have made one.
    if _SURROGATE_ESCAPE.search(text) and _has_lone_surrogate(value):
        raise _invalid("the body holds a lone surrogate")
    return value


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_json", message)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _invalid("an object holds the same key twice")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _invalid("a number is beyond the range of a double")
    return value


def _int(digits: str) -> int:
    if len(digits) >= _DOUBLE_DIGITS:
        _float(digits)
    return int(digits)


def _constant(name: str) -> NoReturn:
    raise _invalid(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_float=_float, parse_int=_int, parse_constant=_constant)


def _has_lone_surrogate(value: Any) -> bool:
    """Walks without recursion: nesting may be as deep as the decoder allowed."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
                return True
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value
            waiting += value.values()
    return False
