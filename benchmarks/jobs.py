"""Job sets: articles, each asked many fixed-choice questions, as `/v1/score` bodies.

A job set is JSON (also gzipped): `{"jobs": [{"id", "text", "cells": [{"cell", "template", "phrase", "pair"}]}]}`.
A cell is one question: the template with `{X}` for the text and `{F}` for the phrase, and the two answers.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def read_jobs(path: Path) -> list[Json]:
    """The jobs of a set."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    jobs: list[Json] = json.loads(data)["jobs"]
    return jobs


def _queries(cells: Sequence[Json]) -> list[Json]:
    """One query per template and pair; its phrases are the combinations, in the order of the cells."""
    grouped: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for cell in cells:
        before, _, after = cell["template"].partition("{X}")
        if before:
            raise ValueError(
                f"template of {cell['cell']}: only text before the question can be shared, {{X}} must come first"
            )
        grouped.setdefault((after, tuple(cell["pair"])), []).append(cell["phrase"])
    return [
        {
            "id": f"q{i}",
            "template": template + "{?}",
            "options": [f" {answer}" for answer in pair],
            "combinations": [{"F": phrase} for phrase in phrases],
        }
        for i, ((template, pair), phrases) in enumerate(grouped.items())
    ]


def score_body(jobs: Sequence[Json], *, empty_floor: bool = True) -> Json:
    """One body of `POST /v1/score`. Jobs with the same questions share them; others bring their own."""
    shared = _queries(jobs[0]["cells"])
    inputs: list[Json] = []
    for job in jobs:
        entry = {"id": job["id"], "messages": [{"role": "user", "content": job["text"]}]}
        queries = _queries(job["cells"])
        if queries != shared:
            entry["queries"] = [query | {"id": f"{job['id']}-{query['id']}"} for query in queries]
            entry["query_ids"] = []
        inputs.append(entry)
    return {"inputs": inputs, "scoring": {"queries": shared, "empty_floor": empty_floor}}


def copies_of(jobs: Sequence[Json], copies: int) -> list[Json]:
    """The jobs `copies` times over, each text under a headline with its own number: no two of them begin alike."""
    out = []
    for number in range(copies * len(jobs)):
        job = jobs[number % len(jobs)]
        text = f"{number + 1}. Report of the day\n\n{job['text']}"
        out.append(job | {"id": f"{job['id']}-{number // len(jobs)}", "text": text})
    return out


def num_questions(jobs: Sequence[Json]) -> int:
    """Cells over all jobs."""
    return sum(len(job["cells"]) for job in jobs)
