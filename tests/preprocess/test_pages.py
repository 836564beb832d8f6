"""The requests that the pages show are accepted, and every field of a response is explained in docs/api.md."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spinf_serve.config import Limits, PackFile, PreprocessConfig, ServedModel
from spinf_serve.plan import ScoreResult
from workers.preprocess.preprocessor import Preprocessor, RequestHeader
from workers.preprocess.tokenizer import ContentTokenizer

ROOT = Path(__file__).resolve().parents[2]
API = (ROOT / "docs/api.md").read_text(encoding="utf-8")
JOBS = {"jobs": [{"id": "a", "prompts": ["Is it? Yes", "Is it? No"], "options": [[" yes"], [" no"]]}]}


def shown_requests() -> list[Any]:
    """Bodies in the pages' JSON and curl examples."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"^```json\n(.*?)^```$", text, re.M | re.S) + re.findall(r"-d '(\{.*?\})'", text, re.S)
        found += [
            pytest.param(block, id=f"{path.name}-{n}") for n, block in enumerate(blocks) if '"scoring": {' in block
        ]
    return [block for block in found if '"object": "score"' not in block.values[0]]


@pytest.fixture(scope="module")
def preprocessor(tiny_checkpoint: Path) -> Preprocessor:
    """Room for the tiny vocabulary, which cuts words into more tokens than a real one."""
    model = ServedModel(
        id="tiny",
        name="tiny",
        aliases=("demo",),
        requested="tiny",
        family="gemma3",
        head="lm_head",
        capabilities=("score",),
        media=(),
        prompt_style="default",
        base_model="tiny",
        revision="",
        snapshot_dir=str(tiny_checkpoint),
    )
    limits = Limits(max_query_tokens=4096, max_option_tokens=64)
    content = (ROOT / "docs/examples/prompt-packs/packs/forum-guard/1.0.json").read_bytes()
    packs = (PackFile("example/forum-guard", "1.0", True, content),)
    config = PreprocessConfig(model=model, limits=limits, pack_files=packs)
    return Preprocessor(config, ContentTokenizer.load(tiny_checkpoint))


def answer(preprocessor: Preprocessor, body: str, route: str) -> dict[str, Any]:
    """The response to a trusted caller, from an engine that finds everything equally likely."""
    header = RequestHeader("scr_x", route, trusted=True, content_encoding=None, received=time.monotonic())
    prepared = preprocessor.prepare(body.encode(), header)
    logprobs = np.full(prepared.plan.cols.shape, -5.0, dtype=np.float32)
    response: dict[str, Any] = json.loads(preprocessor.assemble(prepared, ScoreResult(logprobs, "fp_0")))
    return response


@pytest.mark.parametrize("body", shown_requests())
def test_shown_requests_are_accepted(preprocessor: Preprocessor, body: str) -> None:
    response = answer(preprocessor, body, "score")
    assert response["results"]
    assert not [w for w in response["warnings"] if w["code"] != "low_option_mass"]


def keys(value: Any) -> Iterator[str]:
    """All field names of a response; values of placeholders are the caller's own."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from () if key == "values" else keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from keys(item)


@pytest.mark.parametrize("route", ["score", "chat", "v0_score"])
def test_every_response_field_is_documented(preprocessor: Preprocessor, route: str) -> None:
    body = json.dumps(JOBS) if route == "v0_score" else shown_requests()[0].values[0]
    named = set(re.findall(r"[`\"](\w+)[`\"]", API))
    assert set(keys(answer(preprocessor, body, route))) <= named


def test_usage_and_timing_tables_have_no_field_too_many(preprocessor: Preprocessor) -> None:
    response = answer(preprocessor, shown_requests()[0].values[0], "score")
    for field in ("usage", "timing"):
        table = re.search(rf"^`{field}`[^\n]*\n\n((?:\|[^\n]*\n)+)", API, re.M)
        assert table
        rows = re.findall(r"^\| `(\w+)` \|", table[1], re.M)
        assert set(rows) == set(response[field]), field
