"""The inputs of a request: contents, and which queries each is asked."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

from spinf_serve.packs.use import PackUses
from spinf_serve.protocol.content import read_messages
from spinf_serve.protocol.document import Fields, Place
from spinf_serve.protocol.queries import MAX_ID_CHARS, Query, QueryList, QueryRules, read_queries

SINGLE_INPUT_ID = "0"
"""The input id of a request that sends `messages`."""

_INPUT_FIELDS = frozenset({"id", "messages", "query_ids", "queries", "parameters"})


@dataclass(frozen=True, slots=True)
class Input:
    """One content and what it is asked: shared queries first, then its own, each in request order.

    place     its messages
    """

    id: str
    text: str
    shared: tuple[Query, ...]
    own: tuple[Query, ...]
    place: Place


@dataclass
class InputReader:
    """Reads `messages` or `inputs` of the body, after the shared queries."""

    body: Fields
    rules: QueryRules
    shared: QueryList
    packs: PackUses
    max_prompts: int
    ids: set[str] = field(default_factory=set)

    @cached_property
    def _by_id(self) -> dict[str, tuple[int, Query]]:
        return {query.id: (rank, query) for rank, query in enumerate(self.shared.queries)}

    @cached_property
    def _shared_prompts(self) -> int:
        return sum(len(query.combinations) for query in self.shared.queries)

    @cached_property
    def _pack_prompts(self) -> int:
        return sum(len(query.combinations) for query in self.packs.queries)

    @cached_property
    def _shared_place(self) -> Place:
        scoring = self.body.object("scoring")
        if scoring is None:
            return Place(("scoring", "queries"), self.body.place("scoring").order)
        return scoring.place("queries")

    def read(self) -> tuple[Input, ...]:
        body = self.body
        if "messages" in body and "inputs" in body:
            later = max(body.place("messages"), body.place("inputs"), key=lambda place: place.order)
            body.faults.add(replace(later, path=("messages",)), "invalid_field", "send messages or inputs, not both")
            return ()
        if "inputs" not in body:
            return self._single()
        entries = body.items("inputs")
        if entries == []:
            body.fault("inputs", "must hold at least one input")
        place = body.place("inputs")
        read = [self._input(entry, place.item(i)) for i, entry in enumerate(entries or ())]
        return tuple(item for item in read if item is not None)

    def _single(self) -> tuple[Input, ...]:
        messages = self.body.items("messages", required=True)
        if messages is None:
            return ()
        place = self.body.place("messages")
        text = read_messages(messages, place, self.body.faults, self.packs.refused)
        text = self.packs.wrap(text, None, self.body, "messages")
        item = Input(SINGLE_INPUT_ID, text, self.shared.queries, (), place)
        if self.shared.known and not self.shared.count and self.packs.known and not self.packs.sent:
            self.body.faults.add(self._shared_place, "empty_queries", "the request has no queries")
        self._bound_prompts(item, self._shared_place)
        return (item,)

    def _input(self, entry: Any, place: Place) -> Input | None:
        faults = self.body.faults
        if not isinstance(entry, dict):
            faults.add(place, "invalid_field", "must be an object")
            return None
        fields = Fields(entry, place, faults)
        fields.refuse_unknown(_INPUT_FIELDS)
        input_id = fields.string("id", max_chars=MAX_ID_CHARS, required=True)
        if input_id in self.ids:
            fields.fault("id", "another input has this id", "duplicate_id")
        self.ids.add(input_id or "")
        messages = fields.items("messages", required=True)
        at = fields.place("messages")
        text = "" if messages is None else read_messages(messages, at, faults, self.packs.refused)
        text = self.packs.wrap(text, fields.object("parameters"), fields)
        kept = self._kept(fields)
        own = read_queries(fields, self.rules, kept)
        shared = self.shared.queries
        if "query_ids" in fields:
            shared = tuple(
                query for _, query in sorted((self._by_id[i] for i in kept if i in self._by_id), key=itemgetter(0))
            )
        item = Input(input_id or "", text, shared, own.queries, at)
        self._refuse_empty(fields, kept, own)
        self._bound_prompts(item, fields.place("queries") if own.count else self._shared_place)
        return item

    def _kept(self, fields: Fields) -> frozenset[str]:
        """The ids of the shared queries that this input keeps."""
        ids = fields.items("query_ids")
        if ids is None:
            return self.shared.ids
        kept, place = set(), fields.place("query_ids").item
        for i, query_id in enumerate(ids):
            if not isinstance(query_id, str):
                fields.faults.add(place(i), "invalid_field", "must be a string")
            elif query_id not in self.shared.ids and self.shared.known:
                fields.faults.add(place(i), "unknown_query_id", "no shared query has this id")
            else:
                kept.add(query_id)
        return frozenset(kept)

    def _refuse_empty(self, fields: Fields, kept: frozenset[str], own: QueryList) -> None:
        if own.count or not own.known or not self.shared.known or self.packs.sent or not self.packs.known:
            return
        if fields.value.get("query_ids") == []:
            fields.fault("query_ids", "this input keeps no query and has none of its own", "empty_queries")
        elif not self.shared.count:
            fields.fault("queries", "this input has no query of its own and none is shared", "empty_queries")

    def _bound_prompts(self, item: Input, place: Place) -> None:
        shared, own = item.shared, item.own
        prompts = self._shared_prompts if shared is self.shared.queries else sum(len(q.combinations) for q in shared)
        prompts += self._pack_prompts + sum(len(query.combinations) for query in own)
        if prompts > self.max_prompts:
            message = f"an input is asked more than {self.max_prompts} prompts"
            self.body.faults.add(place, "too_many_prompts", message)
