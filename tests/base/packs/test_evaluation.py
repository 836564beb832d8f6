"""The evaluator against the page (written again in `reference`), against the one in spinf-client; its properties."""

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spinf_client import packs as client

from spinf_serve.packs.answers import answers_of
from spinf_serve.packs.evaluation import (
    LOCK_WARNING,
    EvaluationError,
    Overrides,
    evaluate,
    percentile,
    read_value,
    sigmoid,
)
from spinf_serve.packs.model import Quantiles
from spinf_serve.packs.pack import Pack, from_data
from tests.base.packs import reference
from tests.base.packs.support import draft_of, random_pack, random_result, small_pack

SEEDS = st.integers(0, 2**32 - 1)
NEAR = 1e-9


def loaded(data: dict[str, Any]) -> Pack:
    return from_data(data, "test")


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for name in want:
            if name != "warning":
                assert_same(got[name], want[name])
    elif isinstance(want, float) and isinstance(got, float):
        assert math.isclose(got, want, rel_tol=NEAR, abs_tol=NEAR)
    else:
        assert got == want


def random_call(rng: np.random.Generator, pack: dict[str, Any]) -> dict[str, Any]:
    """Overrides that the pack can use."""
    modes = ["max", "per_category", *(["micro_layer"] if "micro_layer" in pack["decision"] else [])]
    call: dict[str, Any] = {"mode": str(rng.choice(modes))} if rng.random() < 0.7 else {}
    mode = call.get("mode", pack["decision"]["mode"])
    if mode != "per_category" and rng.random() < 0.5:
        call["threshold"] = float(rng.random())
    names = list(pack["categories"])
    if rng.random() < 0.5:
        call["thresholds"] = {
            name: (None if rng.random() < 0.3 else float(rng.random())) for name in names if rng.random() < 0.5
        }
    if rng.random() < 0.5:
        call["critical"] = [name for name in names if rng.random() < 0.5]
    return call


@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_equals_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = random_pack(rng)
    result, call = random_result(rng, data), random_call(rng, data)
    pack = loaded(data)
    got = evaluate(pack.model, answers_of(pack.model, result), Overrides(**call))
    assert_same(got, reference.evaluate(data, result, **call))


def in_requirement_order(pack: dict[str, Any]) -> bool:
    """Whether every requirement stands before what requires it: spinf-client lets flags fall in one pass."""
    names = list(pack["categories"])
    return all(
        names.index(required) < i
        for i, name in enumerate(names)
        for required in pack["categories"][name].get("requires", ())
    )


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_equals_the_evaluator_of_the_public_client(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = random_pack(rng)
    for category in data["categories"].values():
        if "requires" in category:
            before = list(data["categories"])[: list(data["categories"].values()).index(category)]
            category["requires"] = [name for name in category["requires"] if name in before]
    assert in_requirement_order(data)
    result, call = random_result(rng, data), random_call(rng, data)
    pack = loaded(data)
    got = evaluate(pack.model, answers_of(pack.model, result), Overrides(**call))
    assert_same(got, client.evaluate(data, client.answers_from_result(result, data), **call))


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_scores_stay_in_their_range_and_finite_at_the_extremes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = random_pack(rng)
    data["answers"] = "p"
    result = random_result(rng, data)
    for query in result["queries"]:
        for combination in query["combinations"]:
            certain = rng.integers(-1, len(combination["options"]))
            for i, option in enumerate(combination["options"]):
                option["p"] = 1.0 if i == certain else 0.0
    entry = loaded(data).evaluate(result)
    numbers = [c["score"] for c in entry["categories"].values()] + [entry["decision"].get("score", 0.0)]
    numbers += [c["percentile"] for c in entry["categories"].values() if c["percentile"] is not None]
    assert all(math.isfinite(x) for x in numbers)
    assert all(0 <= category["score"] <= 1 for category in entry["categories"].values())


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_the_order_of_options_is_irrelevant(seed: int) -> None:
    """Options permuted in queries, reads and results alike; that breaks the micro-layer lock, so it does not decide."""
    rng = np.random.default_rng(seed)
    data = random_pack(rng)
    result, shuffled = random_result(rng, data), copy.deepcopy(data)
    shuffled_result = copy.deepcopy(result)
    orders = {}
    for query, found in zip(shuffled["scoring"]["queries"], shuffled_result["queries"], strict=True):
        # `any` reads against option 0, `pair` reads 0 against 1: the first stays, or the sign says which is which.
        order = [0, *(1 + rng.permutation(len(query["options"]) - 1)).tolist()]
        orders[query["id"]] = order
        query["options"] = [query["options"][i] for i in order]
        for combination in found["combinations"]:
            combination["options"] = [combination["options"][i] for i in order]
    for read in shuffled["reads"]:
        order = orders[read["query"]]
        if isinstance(read.get("mu"), list):
            read["mu"] = [read["mu"][i] for i in order]
        if "option" in read:
            read["option"] = order.index(read["option"])
        if "unsafe" in read:
            read["unsafe"] = [order.index(i) for i in read["unsafe"]]
    a = loaded(data).evaluate(result, mode="per_category")
    b = loaded(shuffled).evaluate(shuffled_result, mode="per_category")
    assert a == b


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_the_order_of_reads_and_categories_is_irrelevant(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = random_pack(rng)
    result, shuffled = random_result(rng, data), copy.deepcopy(data)
    rng.shuffle(shuffled["reads"])
    shuffled["categories"] = dict(reversed(shuffled["categories"].items()))
    a, b = (loaded(pack).evaluate(result, mode="per_category") for pack in (data, shuffled))
    assert a["categories"] == b["categories"]
    assert sorted(a["decision"]["categories"]) == sorted(b["decision"]["categories"])


def small(answers: dict[tuple[str, str | None], list[float]] | None = None, **changes: Any) -> dict[str, Any]:
    pack = loaded(small_pack(**changes))
    return evaluate(pack.model, answers or ANSWERS)


ANSWERS: dict[tuple[str, str | None], list[float]] = {
    ("ok", None): [0.2, 0.8],
    ("topic", "money"): [0.5, 0.2, 0.3],
    ("topic", "health"): [0.1, 0.3, 0.6],
    ("tone", "first"): [0.4, 0.3, 0.2, 0.1],
    ("tone", "second"): [0.25, 0.5, 0.05, 0.2],
}


def test_a_value_by_hand() -> None:
    """`pair` with sign -1: -(log 0.2/0.8) = 1.386294; z = (1.386294 + 0.5) / 1.5."""
    pack = loaded(small_pack()).model
    assert read_value(pack.reads[0], ANSWERS) == pytest.approx(math.log(4), abs=1e-12)
    health = (math.log(0.6) + 0.4 - 0.2) / 0.8
    macro = ((math.log(4) + 0.5) / 1.5 + health) / 2
    score = 1 / (1 + math.exp(-(1.5 * macro - 0.25)))
    harm = small()["categories"]["harm"]
    assert harm["score"] == pytest.approx(score, abs=1e-12)
    assert harm["percentile"] == pytest.approx(0.9 + 0.09 * (score - 0.5) / 0.4, abs=1e-12)


def test_a_macro_and_not_a_score_enters_the_layer() -> None:
    pack = loaded(small_pack()).model
    found = evaluate(pack, ANSWERS)
    logit = math.log(found["categories"]["harm"]["score"] / (1 - found["categories"]["harm"]["score"]))
    harm = (logit + 0.25) / 1.5
    tone = math.log(found["categories"]["tone"]["score"] / (1 - found["categories"]["tone"]["score"]))
    z_ok = (math.log(4) + 0.5) / 1.5
    value = 0.5 * harm + 0.25 * tone - 0.125 * z_ok + float(np.float32(0.1))
    assert found["decision"]["score"] == pytest.approx(value, abs=1e-9)
    assert found["decision"]["threshold"] == float(np.float32(0.2))


def test_a_category_and_a_read_of_one_name_are_told_apart() -> None:
    data = small_pack()
    data["reads"][0]["id"] = "harm"
    for inputs in (["c:harm", "c:tone", "r:harm"], ["r:harm", "c:tone", "c:harm"]):
        data["decision"]["micro_layer"]["inputs"] = inputs
        data["decision"]["micro_layer"]["lock"] = reference.lock(data)
        result = random_result(np.random.default_rng(2), data)
        got = loaded(data).evaluate(result)["decision"]["score"]
        assert got == pytest.approx(reference.evaluate(data, result)["decision"]["score"], abs=1e-6)


def test_a_threshold_that_is_just_reached_counts() -> None:
    model = loaded(small_pack()).model
    scores = {name: found["score"] for name, found in evaluate(model, ANSWERS)["categories"].items()}
    layer = evaluate(model, ANSWERS)["decision"]["score"]
    for cut, reached in ((lambda x: x, True), (lambda x: math.nextafter(x, 2), False)):
        thresholds = {"harm": cut(scores["harm"]), "tone": None}
        flags = evaluate(model, ANSWERS, Overrides(thresholds=thresholds))["categories"]
        assert flags["harm"]["flagged"] is reached
        top = evaluate(model, ANSWERS, Overrides("max", cut(scores["harm"]), {"tone": None}, []))["decision"]
        assert (top["category"], top["unsafe"]) == ("harm", reached)
        assert evaluate(model, ANSWERS, Overrides(threshold=cut(layer), critical=[]))["decision"]["unsafe"] is reached


def test_a_chain_of_requirements_falls_whatever_the_order() -> None:
    data = small_pack()
    chain = {"tone": ["money"], "money": ["harm"], "harm": []}
    for names in (["harm", "money", "tone"], ["tone", "money", "harm"]):
        data["categories"] = {name: data["categories"][name] | {"threshold": 0.0} for name in names}
        for name in names:
            data["categories"][name]["requires"] = chain[name]
        model = loaded(data).model
        flags = evaluate(model, ANSWERS, Overrides(thresholds={"harm": 1.0}))["categories"]
        assert [flags[name]["flagged"] for name in ("harm", "money", "tone")] == [False, False, False]


def test_two_categories_that_require_each_other_stand_together() -> None:
    data = small_pack()
    data["categories"]["harm"]["requires"] = ["tone"]
    model = loaded(data).model
    both = evaluate(model, ANSWERS, Overrides(thresholds={"harm": 0.0, "tone": 0.0}))["categories"]
    assert both["harm"]["flagged"]
    assert both["tone"]["flagged"]
    one = evaluate(model, ANSWERS, Overrides(thresholds={"harm": 0.0, "tone": 1.0}))["categories"]
    assert not one["harm"]["flagged"]
    assert not one["tone"]["flagged"]


def test_a_requirement_without_a_threshold_is_not_flagged() -> None:
    model = loaded(small_pack()).model
    flags = evaluate(model, ANSWERS, Overrides(thresholds={"harm": None, "tone": 0.0}))["categories"]
    assert flags["harm"]["flagged"] is None
    assert flags["tone"]["flagged"] is False


def test_critical_says_when_it_changed_the_result() -> None:
    model = loaded(small_pack()).model
    changed = evaluate(model, ANSWERS, Overrides(mode="max", threshold=1.0, thresholds={"harm": 0.0, "tone": 0.0}))
    assert changed["decision"]["unsafe"] is True
    assert changed["decision"]["critical"] == ["tone"]
    assert changed["decision"]["by"] == "critical"
    agreed = evaluate(model, ANSWERS, Overrides(mode="max", threshold=0.0, thresholds={"harm": 0.0, "tone": 0.0}))
    assert agreed["decision"]["critical"] == ["tone"]
    assert "by" not in agreed["decision"]
    none = evaluate(model, ANSWERS, Overrides(mode="max", threshold=1.0, critical=[]))
    assert none["decision"]["unsafe"] is False
    assert "critical" not in none["decision"]


def test_max_without_a_deciding_category_is_safe() -> None:
    model = loaded(small_pack()).model
    off = dict.fromkeys(("harm", "tone"), None)
    decision = evaluate(model, ANSWERS, Overrides(mode="max", threshold=0.0, thresholds=off))["decision"]
    assert decision == {"unsafe": False, "mode": "max", "score": 0.0, "threshold": 0.0, "category": None}


def test_a_category_that_does_not_decide_never_does() -> None:
    model = loaded(small_pack()).model
    for mode in ("max", "per_category"):
        cuts = {"money": 0.0, "harm": None, "tone": None}
        decision = evaluate(model, ANSWERS, Overrides(mode=mode, thresholds=cuts))["decision"]
        assert decision["unsafe"] is False


def test_a_broken_lock_falls_back_and_keeps_the_packs_threshold() -> None:
    data = small_pack()
    data["categories"]["harm"]["platt"] = [1.5, -0.2]
    pack = loaded(data)
    assert len(pack.warnings) == 1
    decision = evaluate(pack.model, ANSWERS, Overrides(threshold=-5.0))["decision"]
    assert (decision["mode"], decision["threshold"], decision["warning"]) == ("max", 0.7, LOCK_WARNING)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"mode": "best"}, "mode must be one of"),
        ({"mode": "per_category", "threshold": 0.5}, "does not go with per_category"),
        ({"mode": "max", "threshold": 1.5}, "from 0 to 1"),
        ({"threshold": math.inf}, "finite"),
        ({"thresholds": {"no": 0.5}}, "no category 'no'"),
        ({"thresholds": {"harm": 2}}, "from 0 to 1"),
        ({"critical": ["no"]}, "no category 'no'"),
    ],
)
def test_calls_that_the_pack_cannot_use(call: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        evaluate(loaded(small_pack()).model, ANSWERS, Overrides(**call))


def test_modes_that_the_pack_has_no_numbers_for() -> None:
    data = small_pack(decision={"mode": "per_category"})
    model = loaded(data).model
    assert model.modes == ("per_category",)
    with pytest.raises(EvaluationError, match="no micro-layer"):
        evaluate(model, ANSWERS, Overrides(mode="micro_layer"))
    with pytest.raises(EvaluationError, match="give one"):
        evaluate(model, ANSWERS, Overrides(mode="max"))
    assert evaluate(model, ANSWERS, Overrides(mode="max", threshold=0.5))["decision"]["threshold"] == 0.5


def test_a_draft_is_not_evaluated() -> None:
    draft = from_data(draft_of(small_pack()), "test", draft=True)
    with pytest.raises(EvaluationError, match="draft"):
        draft.evaluate([])


def test_a_result_of_other_questions_is_refused() -> None:
    pack = loaded(small_pack())
    with pytest.raises(EvaluationError, match="no answer of its query"):
        pack.evaluate({"queries": []})
    result = random_result(np.random.default_rng(0), pack.data)
    result["queries"][0]["combinations"][0]["options"].reverse()
    with pytest.raises(EvaluationError, match="options are not the pack's"):
        pack.evaluate(result)


def test_logprob_answers_keep_what_p_lost_to_rounding() -> None:
    options = [{"text": " yes", "logprob": -20.0, "p": 0.0}, {"text": " no", "logprob": 0.0, "p": 1.0}]
    pack = loaded(small_pack())
    result = random_result(np.random.default_rng(0), pack.data)
    result["queries"][0]["combinations"][0]["options"] = options
    answers = {
        kind: answers_of(loaded(small_pack(answers=kind)).model, result)["ok", None] for kind in ("p", "logprob")
    }
    assert answers["p"] == [0.0, 1.0]
    assert answers["logprob"][0] == pytest.approx(math.exp(-20), rel=1e-6)


def test_entries_are_rounded_to_six_decimals() -> None:
    pack = loaded(small_pack())
    entry = pack.evaluate(random_result(np.random.default_rng(3), pack.data), context="post")
    assert (entry["id"], entry["version"], entry["context"]) == ("acme/guard", "1.2.0", "post")
    numbers = [c["score"] for c in entry["categories"].values()]
    numbers += [entry["decision"]["score"], entry["decision"]["threshold"]]
    assert all(x == round(x, 6) for x in numbers)


@given(st.floats(-1e6, 1e6))
def test_sigmoid_is_stable_and_symmetric(x: float) -> None:
    assert 0 <= sigmoid(x) <= 1
    assert sigmoid(x) + sigmoid(-x) == pytest.approx(1, abs=1e-15)


def test_percentiles_are_clamped_and_ties_take_the_upper_level() -> None:
    quantiles = Quantiles((0.1, 0.5, 0.6, 0.9), (0.2, 0.4, 0.4, 0.8))
    got = [percentile(quantiles, x) for x in (0.0, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)]
    assert got == pytest.approx([0.1, 0.1, 0.3, 0.6, 0.75, 0.9, 0.9])
    assert percentile(None, 0.5) is None
