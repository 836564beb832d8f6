"""Packs in the library: bits of the real engine, given sources, and the bits of a pack in every company."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spinf_serve import Engine
from spinf_serve.packs.pack import from_data
from spinf_serve.refusal import StartRefused
from tests.base.packs.support import write_repository
from tests.support.packs import guarded, plain_pack, tiny_pack, use

MODEL = "snapshot"
SMALL: dict[str, Any] = {"device": "cpu", "warmup": "none", "token_budget": 256, "official_packs": False}
MINE = {"id": "mine", "template": "\nIs it fine? Answer:{?}", "options": [" yes", " no"]}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    packs = [tiny_pack(model=MODEL), plain_pack(model=MODEL)]
    root = write_repository(tmp_path_factory.mktemp("packs"), packs)
    with Engine(str(tiny_checkpoint), packs=[str(root)], **SMALL) as engine:
        yield engine


def entries(engine: Engine, body: dict[str, Any]) -> list[Any]:
    return [result["packs"] for result in engine.score(body)["results"]]


@pytest.mark.parametrize("count", [1, 64])
def test_a_packs_bits_do_not_depend_on_company(engine: Engine, count: int) -> None:
    """Raw log-probabilities, not only the rounded entry: with the caller's questions, another pack, another order."""
    texts = [f"Message number {i}: please refund one of the charges." for i in range(count)]
    shown = [use(context="post", include_queries=True)]

    def raw(body: dict[str, Any]) -> list[Any]:
        results = engine.score(body)["results"]
        return [[q for q in result["queries"] if q["id"].startswith("p-")] for result in results]

    alone = raw(guarded(*texts, packs=shown))
    assert raw(guarded(*texts, packs=shown, queries=[MINE, MINE | {"id": "b", "group": "g"}])) == alone
    assert raw(guarded(*texts, packs=[use("acme/plain"), *shown])) == alone
    assert raw(guarded(*texts[::-1], packs=shown)) == alone[::-1]
    assert [raw(guarded(text, packs=shown))[0] for text in texts[:3]] == alone[:3]


def test_the_callers_scores_do_not_depend_on_the_pack(engine: Engine) -> None:
    texts = [f"Message number {i}." for i in range(8)]
    plain = guarded(*(f"A post:\n{text}" for text in texts), queries=[MINE], packs=[])
    for entry in plain["inputs"]:
        del entry["parameters"]
    plain["scoring"]["case_insensitive"] = False
    with_pack = guarded(*texts, queries=[MINE], packs=[use(context="post")])
    mine = [result["queries"] for result in engine.score(plain)["results"]]
    assert [result["queries"] for result in engine.score(with_pack)["results"]] == mine


def test_the_request_side_of_a_pack_gives_the_same_entry(engine: Engine) -> None:
    pack = from_data(tiny_pack(model=MODEL), "test")
    texts = ["one", "two words", "A text about money."]
    body = pack.request(texts, "post", params={"who": "Ann"})
    results = engine.score(body)["results"]
    served = entries(engine, guarded(*texts, packs=[use(context="post")]))
    assert [[pack.evaluate(result, context="post")] for result in results] == served


def test_a_bad_source_refuses_the_library_too(tiny_checkpoint: Path) -> None:
    with pytest.raises(StartRefused, match="no such folder"):
        Engine(str(tiny_checkpoint), packs=["/nonexistent"], **SMALL)
