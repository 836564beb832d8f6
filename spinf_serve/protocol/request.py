"""The body of `/v1/score` and `/v1/chat/completions`, read without a tokenizer.

Faults are collected with their places and the first in document order wins, together with those that only a tokenizer
finds: so reading a body never raises by itself, and a compiler that has added its own faults calls `faults.check()`.
"""

from dataclasses import dataclass
from typing import Any

from spinf_serve.config import Limits, ServedModel
from spinf_serve.packs.use import PackUse, PackUses, Shelf, case_conflicts, read_packs
from spinf_serve.protocol.document import Faults, Fields, Place
from spinf_serve.protocol.errors import RequestError
from spinf_serve.protocol.inputs import Input, InputReader
from spinf_serve.protocol.limits import trusted_limits
from spinf_serve.protocol.queries import Query, QueryList, QueryRules, read_queries

MAX_ENDPOINT_CHARS = 128

_SCORING_FIELDS = frozenset({"queries", "packs", "empty_floor", "case_insensitive"})
_NO_PACKS = Shelf()


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request as the caller meant it; what stands after the first fault may be missing.

    model     as requested, or None
    limits    the caller's, capped by the server's
    packs     asked to every input, after its own queries
    """

    model: str | None
    endpoint: str | None
    inputs: tuple[Input, ...]
    shared: tuple[Query, ...]
    case_insensitive: bool
    limits: Limits
    faults: Faults
    packs: tuple[PackUse, ...] = ()

    @property
    def packed(self) -> tuple[Query, ...]:
        """The packs' queries."""
        return tuple(query for use in self.packs for query in use.queries)

    @property
    def hidden(self) -> frozenset[Query]:
        """The packs' queries whose results the caller did not ask for."""
        return frozenset(query for use in self.packs if not use.include_queries for query in use.queries)

    def asked(self) -> list[Query]:
        """Every query that some input is asked, once, in request order: shared ones, each input's own, the packs'."""
        used: set[Query] = set()
        for shared in {id(item.shared): item.shared for item in self.inputs}.values():
            used.update(shared)
        kept = [query for query in self.shared if query in used]
        return kept + [query for item in self.inputs for query in item.own] + list(self.packed)


def read_request(
    body: Any,
    served: ServedModel,
    limits: Limits,
    *,
    trusted: bool = False,
    needs_scoring: bool = False,
    shelf: Shelf = _NO_PACKS,
) -> ScoreRequest:
    """Reads a parsed JSON body. `needs_scoring`: the chat route's rule. Faults stay in the result's `faults`."""
    if not isinstance(body, dict):
        raise RequestError("invalid_field", "the body must be an object", "body")
    faults = Faults()
    fields = Fields(body, Place(), faults)
    if trusted:
        limits = trusted_limits(fields, limits)
    model = _model(fields, served)
    endpoint = fields.string("endpoint", min_chars=1, max_chars=MAX_ENDPOINT_CHARS)
    if body.get("stream") not in (None, False):
        fields.fault("stream", "nothing is streamed")
    if needs_scoring and body.get("scoring") is None:
        fields.fault("scoring", "the request has no scoring", "scoring_required")
    rules, shared, packs = _scoring(fields, limits, shelf)
    inputs = InputReader(fields, rules, shared, packs, limits.max_prompts_per_input).read()
    return ScoreRequest(model, endpoint, inputs, shared.queries, rules.case_insensitive, limits, faults, packs.uses)


def _model(fields: Fields, served: ServedModel) -> str | None:
    model = fields.string("model")
    names = {name.casefold() for name in (served.id, served.requested, *served.aliases)}
    if model is not None and model.casefold() not in names:
        fields.fault("model", f"this server serves {served.id}", "model_not_served")
    return model


def _scoring(fields: Fields, limits: Limits, shelf: Shelf) -> tuple[QueryRules, QueryList, PackUses]:
    scoring = fields.object("scoring")
    if scoring is None:
        rules = QueryRules(True, True, limits.max_options)
        return rules, QueryList(known="scoring" not in fields), PackUses(known="scoring" not in fields)
    scoring.refuse_unknown(_SCORING_FIELDS)
    packs = read_packs(scoring, shelf)
    case_insensitive = scoring.boolean("case_insensitive", True)
    if packs.case_insensitive is not None:
        case_conflicts(packs, scoring)
        case_insensitive = packs.case_insensitive
    rules = QueryRules(
        empty_floor=scoring.boolean("empty_floor", True),
        case_insensitive=case_insensitive,
        max_options=limits.max_options,
        taken=frozenset(query.id for query in packs.queries),
        reserved=frozenset(use.pack.model.group for use in packs.uses),
    )
    return rules, read_queries(scoring, rules), packs
