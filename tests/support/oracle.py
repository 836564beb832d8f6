"""What a scoring response must say, from the definitions alone: whole strings, no tries, no cuts, no caches."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

from tests.support.fake_engine import fake_logprob

Encode = Callable[[str], list[int]]


def fill(template: str, values: dict[str, str]) -> str:
    """The text before `{?}` of a template."""
    pieces = re.findall(r"\{\{|\}\}|\{\w+\}|[^{}]+", template.removesuffix("{?}"))
    named = {"{{": "{", "}}": "}"}
    return "".join(named.get(p, values[p[1:-1]] if p[0] == "{" and p not in named else p) for p in pieces)


def combinations(query: dict[str, Any]) -> list[dict[str, str]]:
    sent = query.get("combinations") or [{}]
    if sent != "all":
        return list(sent)
    names = list(dict.fromkeys(re.findall(r"(?<!\{)\{(\w+)\}", query["template"])))
    return [dict(zip(names, row, strict=True)) for row in itertools.product(*(query["values"][n] for n in names))]


def option_sequences(filled: str, options: list[str], insensitive: bool, encode: Encode) -> list[list[tuple[int, ...]]]:
    """The token sequences of each option after a filled template, by the formula of "Reading an option"."""
    seen: set[tuple[int, ...]] = set()
    result = []
    for option in options:
        strings = [option]
        if insensitive:
            w = option.strip()
            for form in (w.lower(), w[:1].upper() + w[1:].lower(), w.upper()):
                for variant in (form, " " + form):
                    tokens = encode(variant)
                    if len(tokens) == 1 and encode(filled + variant) == encode(filled) + tokens:
                        strings.append(variant)
        owned = []
        for string in strings:
            sequence = tuple(encode(string))
            if sequence not in seen:
                seen.add(sequence)
                owned.append(sequence)
        result.append(owned)
    return result


def option_logprob(path: tuple[int, ...], sequences: list[tuple[int, ...]]) -> float:
    sums = [sum(fake_logprob(path + sequence[:k], token) for k, token in enumerate(sequence)) for sequence in sequences]
    return math.log(sum(math.exp(value) for value in sums))


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(v) for v in values)
    return [math.exp(v) / total for v in values]


def expected_results(body: dict[str, Any], encode: Encode, bos: list[int]) -> list[dict[str, Any]]:
    """`results` of a text request, not rounded."""
    scoring = body["scoring"]
    inputs = body.get("inputs") or [{"id": "0", "messages": body["messages"]}]
    results = []
    for entry in inputs:
        content = "\n\n".join(
            m["content"] if isinstance(m["content"], str) else "".join(part["text"] for part in m["content"])
            for m in entry["messages"]
        )
        kept = entry.get("query_ids")
        queries = [q for q in scoring.get("queries", []) if kept is None or q["id"] in kept] + entry.get("queries", [])
        rows = [expected_query(query, content, scoring, encode, bos) for query in queries]
        results.append({"input_id": entry["id"], "queries": rows})
    return results


def expected_query(
    query: dict[str, Any], content: str, scoring: dict[str, Any], encode: Encode, bos: list[int]
) -> dict[str, Any]:
    rows = []
    for values in combinations(query):
        filled = fill(query["template"], values)
        sequences = option_sequences(filled, query["options"], scoring.get("case_insensitive", True), encode)
        logprobs = [option_logprob((*bos, *encode(content + filled)), s) for s in sequences]
        floors = [option_logprob((*bos, *encode(filled)), s) for s in sequences]
        floor = query.get("empty_floor", scoring.get("empty_floor", True))
        columns = zip(query["options"], logprobs, softmax(logprobs), softmax(floors), strict=True)
        rows.append(
            {
                "values": values,
                "options": [
                    {"text": text, "logprob": logprob, "p": p, "floor_p": floor_p if floor else None}
                    for text, logprob, p, floor_p in columns
                ],
                "residual": max(0.0, 1 - sum(math.exp(v) for v in logprobs)),
                "floor_residual": max(0.0, 1 - sum(math.exp(v) for v in floors)) if floor else None,
            }
        )
    return {"id": query["id"], "combinations": rows}


def assert_close(got: Any, expected: Any, path: str = "results") -> None:
    """The same structure in the same order; numbers within the rounding to 6 decimals."""
    if isinstance(expected, float):
        assert isinstance(got, float), path
        assert abs(got - expected) < 5.1e-7, f"{path}: {got} != {expected}"
        assert round(got, 6) == got, path
    elif isinstance(expected, dict):
        assert list(got) == list(expected), path
        for key, value in expected.items():
            assert_close(got[key], value, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), path
        for i, value in enumerate(expected):
            assert_close(got[i], value, f"{path}.{i}")
    else:
        assert got == expected, path
