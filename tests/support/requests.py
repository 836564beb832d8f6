"""Requests for tests: the served model, headers, small bodies, and what a `Preprocessor` says to them."""

import json
from dataclasses import replace
from typing import Any

from spinf_serve.config import Limits, PreprocessConfig, ServedModel
from spinf_serve.protocol.errors import RequestError
from tests.support.fake_engine import run_plan
from workers.preprocess.preprocessor import Preprocessor, RequestHeader

MODEL = ServedModel(
    id="gemma-3-270m",
    name="Gemma 3 270M",
    aliases=("demo", "Small-Gemma"),
    requested="./models/Gemma",
    family="gemma3",
    head="lm_head",
    capabilities=("score",),
    media=(),
    prompt_style="default",
    base_model="google/gemma-3-270m",
    revision="r1",
    snapshot_dir="",
)

REQUEST_ID = "scr_01JD8X5V6M4T0Q3S9Z7K2B1C5E"


def header(route: str = "score", *, trusted: bool = False, encoding: str | None = None) -> RequestHeader:
    return RequestHeader(REQUEST_ID, route, trusted, encoding, received=0.0)


def preprocessor(tokenizer: Any, limits: Limits | None = None, **config: Any) -> Preprocessor:
    return Preprocessor(PreprocessConfig(model=MODEL, limits=limits or Limits(), **config), tokenizer)


def query(template: str = "\nIs it good? Answer:{?}", options: Any = (" yes", " no"), **fields: Any) -> dict[str, Any]:
    return {"id": "q", "template": template, "options": list(options), **fields}


def body(*queries: dict[str, Any], content: Any = "A short content.", **fields: Any) -> dict[str, Any]:
    """A body with one content."""
    return {
        "messages": [{"role": "user", "content": content}],
        "scoring": {"queries": list(queries or [query()])},
    } | fields


def item(input_id: str, content: Any = "A short content.", **fields: Any) -> dict[str, Any]:
    """An entry of `inputs`."""
    return {"id": input_id, "messages": [{"content": content}], **fields}


def to_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def refusal(prep: Preprocessor, value: Any, head: RequestHeader | None = None) -> tuple[str, str | None]:
    """The code and the param with which a body is refused; ("", None) where it is not."""
    refused: RequestError | None = None
    try:
        prep.prepare(to_bytes(value), head or header())
    except RequestError as error:
        refused = error
    if refused is None:
        return "", None
    assert 0 < len(refused.message) < 500
    return refused.code, refused.param


def answer(prep: Preprocessor, value: Any, head: RequestHeader | None = None) -> dict[str, Any]:
    """The response to a body, with the numbers of the fake engine."""
    prepared = prep.prepare(to_bytes(value), head or header())
    response: dict[str, Any] = json.loads(prep.assemble(prepared, run_plan(prepared.plan)))
    return response


def limited(**limits: int) -> Limits:
    return replace(Limits(), **limits)
