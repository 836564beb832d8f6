"""The answers that a pack reads, from the query results of one content as a response shows them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spinf_serve.packs.evaluation import EvaluationError
from spinf_serve.packs.model import PackModel
from spinf_serve.packs.parse_queries import PLACEHOLDER

_ROUNDING = 1e-6
"""By how much a response's number may be over what it stands for."""


def answers_of(pack: PackModel, result: Mapping[str, Any] | Sequence[Any]) -> dict[tuple[str, str | None], list[float]]:
    """The option probabilities of every query of the pack: `result` is one entry of `results`, or its `queries`.

    Response numbers (6 decimals) are what is read, in the server too: who evaluates a response again gets the same
    scores. With `answers: logprob` the probabilities are made from the log-probabilities, so that small ones are not
    lost to rounding. Raises `EvaluationError` where the result is not one of this pack's queries.
    """
    try:
        return _answers(pack, result)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, EvaluationError):
            raise
        raise EvaluationError("the result is no entry of a response's results") from None


def _answers(pack: PackModel, result: Mapping[str, Any] | Sequence[Any]) -> dict[tuple[str, str | None], list[float]]:
    queries = result["queries"] if isinstance(result, Mapping) else result
    known = {query.id: query for query in pack.queries}
    answers: dict[tuple[str, str | None], list[float]] = {}
    for entry in queries:
        query = known.get(entry["id"])
        for combination in entry.get("combinations", ()) if query is not None else ():
            assert query is not None
            options = combination["options"]
            if [option["text"] for option in options] != list(query.options):
                raise EvaluationError(f"query {query.id[:64]}: the result's options are not the pack's")
            answers[query.id, combination["values"].get(PLACEHOLDER)] = probabilities(options, pack.answers)
    return answers


def probabilities(options: Sequence[Mapping[str, Any]], answers: str) -> list[float]:
    """`p` as it is, or the log-probabilities renormalised over the options.

    Raises `EvaluationError` for what is no probability: it would make scores that look like any other.
    """
    if answers == "p":
        p = [float(option["p"]) for option in options]
        if not all(0 <= x <= 1 + _ROUNDING for x in p):
            raise EvaluationError("the result holds a p that is no probability")
        return p
    logprobs = [float(option["logprob"]) for option in options]
    if not all(math.isfinite(x) for x in logprobs):
        raise EvaluationError("the result holds a logprob that is no log-probability")
    return renormalised(logprobs)


def renormalised(logprobs: Sequence[float]) -> list[float]:
    """The probabilities of options among themselves, from their log-probabilities."""
    top = max(logprobs)
    weights = [math.exp(x - top) for x in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
