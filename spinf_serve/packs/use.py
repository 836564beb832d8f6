"""Packs in a request: `scoring.packs` against the packs of the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spinf_serve.config import PackFile
from spinf_serve.packs.evaluation import Overrides, mode_problem
from spinf_serve.packs.model import MICRO_LAYER, MODES
from spinf_serve.packs.model import Query as PackQuery
from spinf_serve.packs.pack import Pack, from_bytes
from spinf_serve.packs.parse_queries import PLACEHOLDER
from spinf_serve.packs.wrapping import ParameterFault, wrap_texts
from spinf_serve.protocol.document import Fields, Place
from spinf_serve.protocol.queries import Query
from spinf_serve.templates import Combinations, parse_template

_FIELDS = frozenset({"id", "version", "context", "decision", "include_queries"})
_DECISION_FIELDS = frozenset({"mode", "threshold", "thresholds", "critical"})
_LIMIT = 1e308
"""Of a micro-layer's threshold: JSON numbers are finite, so this only has to be out of the way."""


@dataclass(frozen=True, slots=True)
class ShelvedPack:
    """A version of a pack, ready to be asked. `pack` is None while it is coming soon."""

    pack: Pack | None
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Shelf:
    """The packs that requests can use: id → version → pack, and each id's default version (None: coming soon)."""

    versions: Mapping[str, Mapping[str, ShelvedPack]] = field(default_factory=dict)
    defaults: Mapping[str, str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Sequence[PackFile]) -> "Shelf":
        """The shelf of a server's pack files, which were checked when the catalog was made."""
        versions: dict[str, dict[str, ShelvedPack]] = {}
        defaults: dict[str, str | None] = {}
        for file in files:
            versions.setdefault(file.id, {})[file.version] = _shelved(file)
            if file.default or file.id not in defaults:
                defaults[file.id] = file.version if file.default else None
        return cls(versions, defaults)


def _shelved(file: PackFile) -> ShelvedPack:
    if not file.content:
        return ShelvedPack(None, ())
    pack = from_bytes(file.content, file.id)
    queries = tuple(_query(query, pack.model.group) for query in pack.model.queries)
    return ShelvedPack(pack, queries)


def _query(query: PackQuery, group: str) -> Query:
    rows = [{} if value is None else {PLACEHOLDER: value} for value in query.values]
    nowhere = Place()
    return Query(
        id=query.id,
        template=parse_template(query.template),
        options=query.options,
        combinations=Combinations(rows=rows),
        empty_floor=query.empty_floor,
        group=group,
        place=nowhere,
        template_place=nowhere,
        options_place=nowhere,
        of_pack=True,
    )


@dataclass(frozen=True, slots=True)
class PackUse:
    """A pack of a call, as the caller wants it. `queries` are the pack's, in its order."""

    pack: Pack
    context: str
    overrides: Overrides
    include_queries: bool
    queries: tuple[Query, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class PackUses:
    """The packs of a call. `sent`: the caller sent some; `known`: all of them could be read."""

    uses: tuple[PackUse, ...] = ()
    sent: bool = False
    known: bool = True

    @property
    def queries(self) -> tuple[Query, ...]:
        return tuple(query for use in self.uses for query in use.queries)

    @property
    def case_insensitive(self) -> bool | None:
        """The case rule of the call, or None where it is the caller's."""
        return self.uses[0].pack.model.case_insensitive if self.uses else None

    def refused(self, kind: str) -> str | None:
        """Why contents of a media kind are refused, or None."""
        for use in self.uses:
            if kind not in use.pack.model.media:
                return f"the pack {use.pack.id} does not read {kind} parts"
        return None

    def wrap(self, text: str, given: Fields | None, holder: Fields, fallback: str = "parameters") -> str:
        """A content's text in the packs' context. `given` are its parameters, `holder` where they are (or miss).

        Adds the faults: a parameter that is missing or unknown, packs that wrap differently.
        """
        values = {} if given is None else given.value
        if not self.known or (given is None and "parameters" in holder):
            return text
        known = {name for use in self.uses for name in use.pack.model.parameters}
        for name in values:
            if name not in known and given is not None:
                given.fault(name, "no pack of this call has such a parameter")
        wraps = []
        for use in self.uses:
            try:
                wraps.append(wrap_texts(use.pack.model, use.context, _own(use, values)))
            except ParameterFault as error:
                if given is not None:
                    given.fault(error.name, error.message)
                else:
                    holder.faults.add(_missing(holder, fallback, error.name), "invalid_field", str(error))
                return text
        for use, wrap in zip(self.uses, wraps, strict=True):
            if wrap != wraps[0]:
                message = f"{use.pack.id} and {self.uses[0].pack.id} present the content in different ways"
                holder.faults.add(use.place, "pack_conflict", message)
        before, after = wraps[0] if wraps else ("", "")
        return before + text + after


def _own(use: PackUse, values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if name in use.pack.model.parameters}


def _missing(holder: Fields, fallback: str, name: str) -> Place:
    place = holder.place(fallback)
    return place if fallback in holder else place.named(name)


def asks_packs(body: object) -> bool:
    """Whether a parsed body names packs at all."""
    scoring = body.get("scoring") if isinstance(body, dict) else None
    return isinstance(scoring, dict) and bool(scoring.get("packs"))


def read_packs(scoring: Fields, shelf: Shelf) -> PackUses:
    """The field `packs` of `scoring`."""
    entries = scoring.items("packs")
    if not entries:
        return PackUses(known="packs" not in scoring or entries == [])
    place, uses, seen, shown = scoring.place("packs"), list[PackUse](), set[str](), set[str]()
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            scoring.faults.add(place.item(i), "invalid_field", "must be an object")
            continue
        fields = Fields(entry, place.item(i), scoring.faults)
        if use := _use(fields, shelf, seen):
            uses.append(use)
            ids = {query.id for query in use.queries} if use.include_queries else set()
            if ids & shown:
                fields.fault("include_queries", "another pack shows queries with the same ids", "duplicate_id")
            shown |= ids
    return PackUses(tuple(uses), sent=True, known=len(uses) == len(entries))


def _use(fields: Fields, shelf: Shelf, seen: set[str]) -> PackUse | None:
    fields.refuse_unknown(_FIELDS)
    include = fields.boolean("include_queries", False)
    context, decision = fields.string("context"), fields.object("decision")
    if decision is not None:
        decision.refuse_unknown(_DECISION_FIELDS)
    found = _find(fields, shelf, seen)
    if found is None or found.pack is None:
        return None
    model = found.pack.model
    if context is not None and context not in model.contexts:
        fields.fault("context", f"the pack has no such context; it has {', '.join(model.contexts)}")
        return None
    overrides = _overrides(decision, found.pack) if decision is not None else Overrides()
    place = fields.place("id")
    queries = tuple(replace(query, place=place, template_place=place, options_place=place) for query in found.queries)
    return PackUse(found.pack, context or model.default_context, overrides, include, queries, fields.place("context"))


def _find(fields: Fields, shelf: Shelf, seen: set[str]) -> ShelvedPack | None:
    pack_id, version = fields.string("id", required=True), fields.string("version")
    if pack_id is None or ("version" in fields and version is None):
        return None
    if pack_id in seen:
        fields.fault("id", "this pack is in the call twice", "duplicate_id")
        return None
    seen.add(pack_id)
    versions = shelf.versions.get(pack_id)
    if versions is None:
        fields.fault("id", "this server has no such pack", "unknown_pack")
        return None
    wanted = version if version is not None else shelf.defaults[pack_id]
    if wanted is None:
        fields.fault("id", "this pack is not available yet", "pack_not_available")
        return None
    if wanted not in versions:
        fields.fault("version", "this server has no such version of the pack", "unknown_pack_version")
        return None
    if versions[wanted].pack is None:
        fields.fault("version", "this version is not available yet", "pack_not_available")
    return versions[wanted]


def _overrides(fields: Fields, pack: Pack) -> Overrides:
    mode, model = fields.string("mode"), pack.model
    if mode is not None and mode not in MODES:
        fields.fault("mode", f"must be one of {', '.join(MODES)}")
        mode = None
    effective = mode or model.decision.mode
    low, high = (-_LIMIT, _LIMIT) if effective == MICRO_LAYER else (0, 1)
    threshold = fields.number("threshold", low, high)
    if ("threshold" in fields) == (threshold is not None) and (problem := mode_problem(model, effective, threshold)):
        fields.fault("threshold" if "threshold" in fields else "mode", problem)
    return Overrides(mode, threshold, _thresholds(fields, pack), _critical(fields, pack))


def _thresholds(fields: Fields, pack: Pack) -> dict[str, float | None] | None:
    sent = fields.object("thresholds")
    if sent is None:
        return None
    thresholds: dict[str, float | None] = {}
    for name, value in sent.value.items():
        if name not in pack.model.categories:
            sent.fault(name, "the pack has no such category", "unknown_category")
        else:
            thresholds[name] = None if value is None else sent.number(name, 0, 1)
    return thresholds


def _critical(fields: Fields, pack: Pack) -> tuple[str, ...] | None:
    sent = fields.items("critical")
    if sent is None:
        return None
    place, critical = fields.place("critical"), []
    for i, name in enumerate(sent):
        if not isinstance(name, str):
            fields.faults.add(place.item(i), "invalid_field", "must be a string")
        elif name not in pack.model.categories:
            fields.faults.add(place.item(i), "unknown_category", "the pack has no such category")
        else:
            critical.append(name)
    return tuple(critical)


def case_conflicts(packs: PackUses, scoring: Fields) -> None:
    """Adds a fault for packs with different case rules, and for a caller who sends another than theirs."""
    rule = packs.case_insensitive
    for use in packs.uses:
        if use.pack.model.case_insensitive != rule:
            message = f"{use.pack.id} and {packs.uses[0].pack.id} have different case rules"
            scoring.faults.add(use.place, "pack_conflict", message)
    sent = scoring.value.get("case_insensitive")
    if packs.uses and isinstance(sent, bool) and sent != rule:
        message = f"the packs of this call need case_insensitive {str(rule).lower()}"
        scoring.fault("case_insensitive", message, "pack_conflict")
