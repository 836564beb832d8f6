"""Strict JSON: what is read, and what is refused as invalid_json."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spinf_serve.protocol.errors import RequestError
from spinf_serve.protocol.json import loads


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"\xef\xbb\xbf{}", {}),
        (b' [1, -2.5e3, true, null, "a"]\r\n\t', [1, -2500.0, True, None, "a"]),
        ('{"k": "\\u0000\\ud83d\\ude00é"}'.encode(), {"k": "\0😀é"}),
        (b'"\\\\ud800"', "\\ud800"),
        (b"1.7976931348623157e308", sys.float_info.max),
        (str(2**1023).encode(), 2**1023),
        (b"1e-999", 0.0),
        (b'{"a": {"a": 1}, "b": {"a": 2}}', {"a": {"a": 1}, "b": {"a": 2}}),
    ],
)
def test_read(body: bytes, value: object) -> None:
    assert loads(body) == value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{'a': 1}",
        b'{"a": 1,}',
        b"[1] x",
        b"{} {}",
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b'"\xff"',
        b'"\xed\xa0\x80"',  # a surrogate written as UTF-8
        b'"\xc0\xaf"',  # overlong
        b'"\xf4\x90\x80\x80"',  # beyond U+10FFFF
        b'"\\ud800"',
        b'"\\uDFFF a"',
        b'"\\ude00\\ud83d"',
        b'{"\\udc00": 1}',
        b'[[{"a": ["x", {"b\\ud900": 1}]}]]',
        b'{"a": 1, "a": 1}',
        b'{"x": [{"a": 1, "b": 2, "\\u0061": 3}]}',
        b"NaN",
        b"[Infinity]",
        b'{"a": -Infinity}',
        b"1e999",
        b"-1e400",
        str(2**1024).encode(),
        b"9" * 5000,
        b"-" + b"1" * 400,
        b"1." + b"9" * 10 + b"e310",
        b'"a\nb"',
        b"01",
        b"+1",
        b"[1 2]",
        "[\uff11]".encode(),
        "\u00a0{}".encode(),
        b"[" * 200_000,
        b"[" * 200_000 + b"]" * 200_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as error:
        loads(body)
    assert (error.value.code, error.value.status, error.value.param) == ("invalid_json", 400, None)
    assert len(error.value.message) < 500


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_whatever_python_writes_is_read_back(value: object) -> None:
    for ascii_only in (True, False):
        assert loads(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text(alphabet='{}[]",:\\ud8cf01eE.-+ NaInfity\ud83d', max_size=40).map(
        lambda s: s.encode("utf-8", "surrogatepass")
    )
)
def test_any_bytes_give_a_value_or_invalid_json(body: bytes) -> None:
    refused: RequestError | None = None
    value: object = None
    try:
        value = loads(body)
    except RequestError as error:
        refused = error
    assert refused is None or refused.code == "invalid_json"
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
