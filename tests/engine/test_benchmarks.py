"""The parts of the speed scripts that could print a wrong figure without anyone noticing."""

import json
import time
from typing import Any

import numpy as np
import pytest

from benchmarks.job_speed import Measured, check_alone, report, results_of, use_of
from benchmarks.jobs import Json, copies_of, num_questions
from benchmarks.probes import GpuTrace, Phases, covered, percentile

JOBS: list[Json] = [
    {
        "id": name,
        "text": f"{name} is a town.",
        "cells": [
            {"cell": "c", "template": "{X}\n\nIs {F} near?", "phrase": phrase, "pair": ["yes", "no"]}
            for phrase in ("it", "the sea")
        ],
    }
    for name in ("a", "b", "c")
]


def test_no_two_copies_begin_alike_and_every_text_stays_whole() -> None:
    many = copies_of(JOBS, 4)
    openings = [job["text"].partition("\n")[0] for job in many]
    assert len(set(openings)) == len(many) == 12
    assert len({job["id"] for job in many}) == 12
    assert all(job["text"].endswith(JOBS[i % 3]["text"]) for i, job in enumerate(many))
    assert num_questions(many) == 24


def test_a_use_asks_every_article_once() -> None:
    use = use_of("x", copies_of(JOBS, 3), inputs=4, in_flight=8, floors=False)
    inputs = [item["id"] for body in use.bodies for item in json.loads(body)["inputs"]]
    assert len(inputs) == len(set(inputs)) == use.contents == 9
    assert [len(json.loads(body)["inputs"]) for body in use.bodies] == [4, 4, 1]
    assert (use.questions, use.in_flight) == (18, 3)


def test_overlapping_kernels_count_once() -> None:
    assert covered([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5
    assert covered([]) == 0


def test_phases_add_up_over_calls() -> None:
    class Owner:
        def work(self, seconds: float) -> float:
            time.sleep(seconds)
            return seconds

    owner, phases = Owner(), Phases()
    phases.probe(owner, "work", "work")
    phases.probe(owner, "absent", "absent")
    assert [owner.work(0.01), owner.work(0.02)] == [0.01, 0.02]
    walls = [wall for wall, _ in phases.calls["work"]]
    assert walls[0] >= 0.01
    assert walls[1] >= 0.02
    assert list(phases.calls) == ["work"]
    assert list(phases.lines(contents=2))[1].split()[:2] == ["work", "2"]


def test_a_failing_call_is_timed_too() -> None:
    phases = Phases()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        phases.timed(fail, "fail")()
    assert len(phases.calls["fail"]) == 1


def test_the_report_divides_the_median_and_takes_the_gap_from_the_trace() -> None:
    use = use_of("x", JOBS, inputs=3, in_flight=1, floors=True)
    run = Measured([4.0, 2.0, 3.0], tokens=600, passes=2, packed=640, padded=800, busy_s=2.4, results={})
    columns = report(use, run, GpuTrace(wall=2.0, busy=1.5, kernels={})).split()
    assert columns[-10:] == ["6", "600", "2", "3.000", "2.000", "2.0", "200", "400", "25.0%", "80.0%"]
    assert report(use, run, None).split()[-3:] == ["250", "20.0%", "80.0%"]


def test_different_scores_in_company_stop_the_script() -> None:
    one: dict[str, Any] = {"a": {"logprob": -1.0}, "b": {"logprob": -2.0}}
    check_alone({"a": {"logprob": -1.0}}, one)
    with pytest.raises(SystemExit, match="b has other scores"):
        check_alone({"b": {"logprob": -2.0000001}}, one)


def test_results_are_found_by_their_input() -> None:
    responses = [json.dumps({"results": [{"input_id": name, "queries": []}]}).encode() for name in "ab"]
    assert list(results_of(responses)) == ["a", "b"]


def test_percentiles_are_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert np.isclose(percentile(range(101), 0.95), 95)
