"""From the engine's numbers to the response: warnings, rounding, numbers that are no numbers."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spinf_serve.plan import ScoreResult
from spinf_serve.protocol.errors import RequestError
from tests.support.fake_engine import run_plan
from tests.support.requests import body, header, item, limited, preprocessor, query, to_bytes
from workers.preprocess.preprocessor import Preprocessor
from workers.preprocess.readout import logsumexp, residual, rounded, softmax
from workers.preprocess.tokenizer import ContentTokenizer

EXACT = {"case_insensitive": False, "empty_floor": False}


def respond(prep: Preprocessor, value: Any, values: float | list[float]) -> dict[str, Any]:
    """The response where the engine returns these log-probabilities, column by column."""
    prepared = prep.prepare(to_bytes(value), header())
    logprobs = np.empty(len(prepared.plan.cols), np.float32)
    logprobs[:] = values
    response: dict[str, Any] = json.loads(prep.assemble(prepared, ScoreResult(logprobs, "fp_x")))
    return response


def row(response: dict[str, Any]) -> dict[str, Any]:
    combination: dict[str, Any] = response["results"][0]["queries"][0]["combinations"][0]
    return combination


def test_p_and_residual(prep: Preprocessor) -> None:
    got = row(respond(prep, body(scoring={"queries": [query()], **EXACT}), [math.log(0.6), math.log(0.2)]))
    assert [o["p"] for o in got["options"]] == [0.75, 0.25]
    assert [o["logprob"] for o in got["options"]] == [-0.510826, -1.609438]
    assert (got["residual"], got["floor_residual"], got["options"][0]["floor_p"]) == (0.2, None, None)


def test_probabilities_that_add_up_to_more_than_one_leave_no_negative_residual(prep: Preprocessor) -> None:
    got = row(respond(prep, body(scoring={"queries": [query()], **EXACT}), [-1e-8, -1e-7]))
    assert [str(o["logprob"]) for o in got["options"]] == ["0.0", "0.0"]
    assert str(got["residual"]) == "0.0"


def test_rounding_never_leaves_a_negative_zero() -> None:
    values = rounded(np.array([-0.0, -4e-7, 4e-7, -6e-7]), 6)
    assert [str(value) for value in values] == ["0.0", "0.0", "0.0", "-1e-06"]
    assert rounded(np.array([-12.3456784, 1 / 3]), 6) == [-12.345678, 0.333333]
    assert [str(value) for value in rounded(np.array([-0.0, 1 / 3]), None)] == ["0.0", str(1 / 3)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("floor", [True, False])
def test_a_number_that_is_not_finite_is_an_engine_error(bad: float, floor: bool, prep: Preprocessor) -> None:
    """In every column: also a variant's, also a floor's."""
    value = body(
        query(options=[" yes no", " no"]),
        scoring={"queries": [query(options=[" no", " yes no"])], "empty_floor": floor},
    )
    prepared = prep.prepare(to_bytes(value), header())
    good = run_plan(prepared.plan)
    for column in range(len(good.logprobs)):
        logprobs = good.logprobs.copy()
        logprobs[column] = bad
        if bad == -math.inf:
            prep_answer(prep, prepared, replace(good, logprobs=logprobs))
            continue
        with pytest.raises(RequestError) as error:
            prep.assemble(prepared, replace(good, logprobs=logprobs))
        assert (error.value.code, error.value.status) == ("engine_error", 500)


def prep_answer(prep: Preprocessor, prepared: Any, result: ScoreResult) -> None:
    """An impossible spelling is allowed while another one of the option is possible; never a number like -inf."""
    try:
        text = prep.assemble(prepared, result).decode()
    except RequestError as error:
        text = error.code
    assert "Infinity" not in text
    assert "NaN" not in text


def test_an_option_without_any_possible_spelling_is_an_engine_error(prep: Preprocessor) -> None:
    for floor in (True, False):
        value = body(scoring={"queries": [query()], "case_insensitive": False, "empty_floor": floor})
        with pytest.raises(RequestError) as error:
            respond(prep, value, [-1.0, -1.0, -math.inf, -1.0] if floor else [-math.inf, -1.0])
        assert error.value.code == "engine_error"


def test_another_number_of_values_is_an_engine_error(prep: Preprocessor) -> None:
    prepared = prep.prepare(to_bytes(body()), header())
    result = run_plan(prepared.plan)
    for logprobs in (result.logprobs[:-1], np.append(result.logprobs, result.logprobs[:1]), result.logprobs[:, None]):
        with pytest.raises(RequestError) as error:
            prep.assemble(prepared, replace(result, logprobs=logprobs))
        assert error.value.code == "engine_error"


def warned(response: dict[str, Any]) -> list[tuple[str, str | None, str | None]]:
    return [(w["code"], w.get("query_id"), w.get("input_id")) for w in response["warnings"]]


class TestLowOptionMass:
    def test_over_nine_tenths(self, prep: Preprocessor) -> None:
        value = body(scoring={"queries": [query()], **EXACT})
        assert warned(respond(prep, value, math.log(0.0499))) == [("low_option_mass", "q", None)]
        assert warned(respond(prep, value, math.log(0.0501))) == []

    def test_multi_token_options_never_warn(self, prep: Preprocessor) -> None:
        assert warned(respond(prep, body(query(options=[" yes", " no yes"])), -20.0)) == []

    def test_the_mean_over_inputs_and_combinations(self, prep: Preprocessor) -> None:
        asked = query("\n{x}?{?}", [" yes"], combinations=[{"x": "a"}, {"x": "b"}])
        value = {"inputs": [item("a"), item("b")], "scoring": {"queries": [asked], **EXACT}}
        assert warned(respond(prep, value, [math.log(0.39), -30, -30, -30])) == [("low_option_mass", "q", None)]
        assert warned(respond(prep, value, [math.log(0.41), -30, -30, -30])) == []

    def test_one_per_query_in_request_order(self, prep: Preprocessor) -> None:
        value = {
            "inputs": [item("a"), item("b", queries=[query(id="own")])],
            "scoring": {"queries": [query(id="y"), query(id="x")], **EXACT},
        }
        found = [(query_id, input_id) for _, query_id, input_id in warned(respond(prep, value, -20.0))]
        assert found == [("y", None), ("x", None), ("own", "b")]

    def test_the_given_spelling_decides_what_is_one_token(self, prep: Preprocessor) -> None:
        value = body(query(options=[" yes", "yes no"]))
        assert warned(respond(prep, value, -20.0)) == []


def test_texts_come_back_as_they_were_sent(tokenizer: ContentTokenizer) -> None:
    prep = preprocessor(tokenizer, limited(max_option_tokens=50))
    odd = ' "\\\n\0é😀\u2028</script>'
    asked = query("\n{x}{{}}:{?}", [" yes", odd], id=odd, combinations=[{"x": odd}])
    value = {"inputs": [item(odd, odd)], "endpoint": odd, "scoring": {"queries": [asked], "empty_floor": False}}
    prepared = prep.prepare(json.dumps(value, ensure_ascii=False).encode(), header())
    got = json.loads(prep.assemble(prepared, run_plan(prepared.plan)))
    assert (got["endpoint"], got["results"][0]["input_id"], got["results"][0]["queries"][0]["id"]) == (odd, odd, odd)
    assert row(got)["values"] == {"x": odd}
    assert [o["text"] for o in row(got)["options"]] == [" yes", odd]


def test_sums_do_not_depend_on_the_company() -> None:
    """Bits of one row, alone and among others, for every shape that numpy might reduce in another order."""
    rng = np.random.default_rng(0)
    for options in (1, 2, 7, 8, 9, 130, 1000):
        values = -20 * rng.random((65, options))
        p, rest = softmax(values), residual(values)
        summed = logsumexp(values[:, :, None] + np.log(np.arange(1.0, 4.0)))
        # The engine's columns are gathered, and that leaves no promise about the layout in memory.
        turned = np.asfortranarray(values)
        assert (softmax(turned) == p).all()
        assert (residual(turned) == rest).all()
        for n in range(0, 65, 7):
            one = values[n : n + 1].copy()
            assert (softmax(one)[0] == p[n]).all()
            assert residual(one)[0] == rest[n]
            assert (logsumexp(one[:, :, None] + np.log(np.arange(1.0, 4.0)))[0] == summed[n]).all()


def test_logsumexp() -> None:
    x = np.array([[-1.0, -2.0, -np.inf], [-800.0, -800.0, -800.0], [-np.inf, -np.inf, -np.inf]])
    assert np.allclose(logsumexp(x[:2]), [math.log(math.exp(-1) + math.exp(-2)), -800 + math.log(3)], rtol=1e-15)
    assert logsumexp(x)[2] == -np.inf
    assert np.isnan(logsumexp(np.array([[np.nan, -1.0]])))[0]
