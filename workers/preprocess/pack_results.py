"""What a pack says about one content: its answers read from the scores, evaluated, and rounded like every number."""

from collections.abc import Sequence
from typing import Any

from spinf_serve.packs.answers import renormalised
from spinf_serve.packs.evaluation import evaluate
from spinf_serve.packs.parse_queries import PLACEHOLDER
from spinf_serve.packs.rounding import rounded
from spinf_serve.packs.use import PackUse
from workers.preprocess.readout import Scores


class PackResults:
    """One pack of a call. Its numbers are the response's, rounded: who evaluates a response again gets the same."""

    def __init__(self, use: PackUse) -> None:
        self._use = use
        self._keys = [(query.id, values.get(PLACEHOLDER)) for query in use.queries for values in query.combinations]

    @property
    def prompts(self) -> int:
        """Prompts of the pack for one input."""
        return len(self._keys)

    def entry(self, scores: Sequence[Scores]) -> dict[str, Any]:
        """The result entry of one input; `scores` are its prompts in the pack's order."""
        use, model = self._use, self._use.pack.model
        if model.answers == "p":
            answers = {key: score.p for key, score in zip(self._keys, scores, strict=True)}
        else:
            answers = {key: renormalised(score.logprobs) for key, score in zip(self._keys, scores, strict=True)}
        found = evaluate(model, answers, use.overrides)
        entry: dict[str, Any] = rounded({"id": model.id, "version": model.version, "context": use.context, **found})
        return entry
