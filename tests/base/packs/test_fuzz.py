"""Edited packs and manifests: every edit is listed as a problem or the result works, and nothing else happens."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spinf_serve import packs
from spinf_serve.packs.pack import from_data
from spinf_serve.packs.repository import read_repository
from tests.base.packs.support import draft_of, random_result, small_pack, write_json, write_repository

WORDS = st.sampled_from(
    ["harm", "topic", "F", "{X}", "{F}", "max", "views", "r-ok", "c:harm", "text", "", "\n", "../x", "1.0"]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats(allow_nan=True)
    | WORDS
    | st.sampled_from([1e100, -1e100, 1e-100])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=6
)


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a JSON value."""
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    else:
        inner = []
    return [at, *(path for name, item in inner for path in paths_of(item, (*at, name)))]


def edited(data: Any, path: tuple[Any, ...], value: Any, *, remove: bool) -> Any:
    if not path:
        return value
    data = copy.deepcopy(data)
    target = data
    for step in path[:-1]:
        target = target[step]
    if remove:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return data


PACK = small_pack()
PACK_PATHS = paths_of(PACK)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(PACK_PATHS), VALUES, st.booleans(), st.booleans())
def test_an_edited_pack_is_refused_or_works(path: tuple[Any, ...], value: Any, remove: bool, draft: bool) -> None:
    source = draft_of(PACK) if draft else PACK
    if path not in paths_of(source):
        return
    data = edited(source, path, value, remove=remove)
    problems = packs.validate(data, draft=draft)
    assert all(isinstance(problem, str) and problem for problem in problems)
    if problems:
        return
    pack = from_data(data, "test", draft=draft)
    if not pack.draft:
        entry = pack.evaluate(random_result(np.random.default_rng(0), dict(pack.data)))
        json.dumps(entry, allow_nan=False)
        assert all(0 <= category["score"] <= 1 for category in entry["categories"].values())
        assert math.isfinite(entry["decision"].get("score", 0.0))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), VALUES, st.booleans())
def test_an_edited_manifest_is_refused_or_works(tmp_path: Path, data: Any, value: Any, remove: bool) -> None:
    root = write_repository(tmp_path / "repository", [PACK])
    manifest = json.loads((root / "prompt-packs.json").read_bytes())
    path = data.draw(st.sampled_from(paths_of(manifest)))
    write_json(root / "prompt-packs.json", edited(manifest, path, value, remove=remove))
    repository = read_repository(root)
    assert all(isinstance(problem, str) and problem for problem in repository.problems)


def test_the_largest_numbers_do_not_overflow() -> None:
    """Every number of the pack at its bound at once: scores stay numbers, and so does the layer's value."""
    data = copy.deepcopy(PACK)
    for read in data["reads"]:
        read |= {"mean": -1e100, "sd": 1e-100}
        if isinstance(read.get("mu"), list):
            read["mu"] = [1e100, *(-1e100 for _ in read["mu"][1:])]
    for category in data["categories"].values():
        category["platt"] = [1e100, -1e100]
    layer = data["decision"]["micro_layer"]
    layer["weights"] = packs.encode_weights([3.4e38, -3.4e38, 3.4e38, -3.4e38, 3.4e38])
    layer["lock"] = packs.lock_of(data)
    entry = from_data(data, "test").evaluate(random_result(np.random.default_rng(0), data))
    json.dumps(entry, allow_nan=False)
    assert entry["decision"]["mode"] == "micro_layer"
