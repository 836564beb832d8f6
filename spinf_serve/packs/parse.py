"""A pack file's content → `PackModel`, with every problem listed."""

import re
from typing import Any

from spinf_serve.packs.model import MODES, Context, Decision, PackModel, Parameter
from spinf_serve.packs.parse_decision import check_fed, parse_categories, parse_decision
from spinf_serve.packs.parse_queries import parse_scoring
from spinf_serve.packs.parse_reads import parse_reads
from spinf_serve.packs.problems import Problems, fields_of, unknown_keys
from spinf_serve.packs.wrapping import CONTENT, NAME, split_context
from spinf_serve.protocol.document import Fields, Place
from spinf_serve.protocol.queries import MAX_ID_CHARS

MEDIA = ("text", "image", "audio", "video")
ANSWERS = ("p", "logprob")
PACK_ID = re.compile(r"[a-z0-9._-]+/[a-z0-9._-]+", re.ASCII)
VERSION = re.compile(r"[0-9A-Za-z.+-]+", re.ASCII)
_ROOT = (
    *("pack", "version", "model", "media", "answers", "parameters", "contexts", "scoring", "reads"),
    *("categories", "decision"),
)
_NOTES = ("name", "description", "notes", "license", "homepage", "authors", "created", "$schema")
_FITTED = {"mu", "mean", "sd", "platt", "normal_quantiles"}
_PARAMETER = ("label", "description", "required", "default")


def parse_pack(data: Any, *, draft: bool = False) -> tuple[PackModel | None, Problems]:
    """The pack, or None and what is wrong with it. A draft lacks what is fitted: see `PackModel.draft`."""
    problems = Problems()
    root = fields_of(data, Place(), problems)
    if root is None:
        return None, problems
    for place, message in unknown_keys(root, (*_ROOT, *_NOTES)):
        problems.warn(place, f"{message}; it is ignored")
    pack_id, version = _identity(root)
    parameters = _parameters(root, problems)
    contexts = _contexts(root, parameters, problems)
    scoring = root.object("scoring", required=True)
    queries, case_insensitive = parse_scoring(scoring, problems) if scoring is not None else ((), False)
    categories, unfitted = parse_categories(root, problems, draft=draft)
    known = set(root.value["categories"]) if isinstance(root.value.get("categories"), dict) else set()
    reads, unread = parse_reads(root, queries, known, problems, draft=draft)
    check_fed(root, categories, reads, problems)
    model = root.string("model", min_chars=1, max_chars=MAX_ID_CHARS, required=True)
    media, answers = _media(root, problems), _answers(root)
    if draft:
        decision = _draft_decision(root, problems)
    else:
        decision = parse_decision(root, root.value, reads, categories, problems)
    if problems.found:
        return None, problems
    pack = PackModel(
        id=pack_id,
        version=version,
        model=model or "",
        media=media,
        answers=answers,
        parameters=parameters,
        contexts=contexts,
        queries=queries,
        case_insensitive=case_insensitive,
        reads=reads,
        categories=categories,
        decision=decision,
        draft=draft and (unfitted or unread or "decision" not in root or "micro_layer" not in root.value["decision"]),
        warnings=tuple(problems.warnings),
    )
    return pack, problems


def is_unfitted(data: Any) -> bool:
    """Whether a file holds none of the numbers that fitting writes: then it is a draft, else a pack to be served."""
    data = data if isinstance(data, dict) else {}
    reads, categories, decision = (data.get(name) for name in ("reads", "categories", "decision"))
    entries = [
        *(reads if isinstance(reads, list) else ()),
        *(categories if isinstance(categories, dict) else {}).values(),
    ]
    fitted = any(isinstance(entry, dict) and entry.keys() & _FITTED for entry in entries)
    return not fitted and not (isinstance(decision, dict) and "micro_layer" in decision)


def _identity(root: Fields) -> tuple[str, str]:
    """Id and version, which together name the pack's query group."""
    pack_id = root.string("pack", required=True)
    if pack_id is not None and not is_pack_id(pack_id):
        root.fault("pack", "must be <namespace>/<name>: lower case letters, digits and . _ -")
    version = root.string("version", required=True)
    if version is not None and not VERSION.fullmatch(version):
        root.fault("version", "must be digits, letters and . + -")
    if pack_id is not None and version is not None and len(pack_id) + 1 + len(version) > MAX_ID_CHARS:
        root.fault("version", f"id and version together have at most {MAX_ID_CHARS - 1} characters")
    return pack_id or "", version or ""


def is_pack_id(text: str) -> bool:
    """Whether a string can name a pack: two names, neither of dots only."""
    return PACK_ID.fullmatch(text) is not None and all(name.strip(".") for name in text.split("/"))


def _media(root: Fields, problems: Problems) -> tuple[str, ...]:
    kinds = root.items("media")
    if kinds is None:
        return ("text",)
    place, found = root.place("media"), dict[str, None]()
    for i, kind in enumerate(kinds):
        if kind not in MEDIA:
            problems.at(place.item(i), f"must be one of {', '.join(MEDIA)}")
        elif kind in found:
            problems.at(place.item(i), "repeats a kind")
        else:
            found[kind] = None
    if "text" not in found:
        problems.at(place, "must hold text")
    return tuple(found)


def _answers(root: Fields) -> str:
    answers = root.string("answers")
    if answers is not None and answers not in ANSWERS:
        root.fault("answers", "must be p or logprob")
    return answers or "p"


def _parameters(root: Fields, problems: Problems) -> dict[str, Parameter]:
    entries = root.object("parameters")
    parameters = dict[str, Parameter]()
    for name, value in entries.value.items() if entries is not None else ():
        assert entries is not None
        place = entries.place(name)
        if name == CONTENT:
            problems.at(place, "X is reserved for the content")
        elif not NAME.fullmatch(name):
            problems.at(place, "a name is letters, digits and _")
        fields = fields_of(value, place, problems)
        if fields is None:
            continue
        for unknown, message in unknown_keys(fields, _PARAMETER):
            problems.at(unknown, message)
        parameters[name] = Parameter(
            id=name,
            label=fields.string("label", min_chars=1, max_chars=MAX_ID_CHARS, required=True) or name,
            description=fields.string("description") or "",
            required=fields.boolean("required", True),
            default=fields.string("default"),
        )
    return parameters


def _contexts(root: Fields, parameters: dict[str, Parameter], problems: Problems) -> dict[str, Context]:
    entries = root.object("contexts", required=True)
    contexts = dict[str, Context]()
    if entries is None:
        return contexts
    if not entries.value:
        problems.at(root.place("contexts"), "must hold at least one context")
    for name in entries.value:
        template = entries.string(name)
        if not 1 <= len(name) <= MAX_ID_CHARS:
            problems.at(entries.place(name), f"a name has 1 to {MAX_ID_CHARS} characters")
        if template is None:
            continue
        try:
            contexts[name] = split_context(name, template, parameters)
        except ValueError as error:
            problems.at(entries.place(name), str(error))
    return contexts


def _draft_decision(root: Fields, problems: Problems) -> Decision:
    """A draft's decision is not used yet: only its mode is checked, so that a typing error shows early."""
    fields = root.object("decision")
    mode = fields.string("mode") if fields is not None else None
    if fields is not None and mode is not None and mode not in MODES:
        fields.fault("mode", f"must be one of {', '.join(MODES)}")
    return Decision(mode or MODES[-1])
