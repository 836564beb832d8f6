"""The body of `/v0/score`: whole prompt texts and their options, without templates, variants or floors."""

from dataclasses import dataclass
from typing import Any

from spinf_serve.config import Limits
from spinf_serve.protocol.document import Faults, Fields, Place
from spinf_serve.protocol.errors import RequestError
from spinf_serve.protocol.limits import trusted_limits
from spinf_serve.protocol.queries import MAX_ID_CHARS

MAX_JOBS = 1000

_JOB_FIELDS = frozenset({"id", "prompts", "options"})


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts that share their first tokens. `options[i]` are asked after `prompts[i]`."""

    id: str
    prompts: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]
    prompts_place: Place
    options_place: Place


@dataclass(frozen=True, slots=True)
class JobsRequest:
    """What stands after the first fault may be missing; the fault waits in `faults`, as in `ScoreRequest`."""

    jobs: tuple[Job, ...]
    limits: Limits
    faults: Faults


def read_jobs(body: Any, limits: Limits) -> JobsRequest:
    """Reads a parsed JSON body; callers of this route are trusted."""
    if not isinstance(body, dict):
        raise RequestError("invalid_field", "the body must be an object", "body")
    fields = Fields(body, Place(), Faults())
    limits = trusted_limits(fields, limits)
    entries = fields.items("jobs", required=True)
    if entries is not None and not 1 <= len(entries) <= MAX_JOBS:
        fields.fault("jobs", f"must hold 1 to {MAX_JOBS} jobs")
        entries = None
    jobs, ids, place = [], set[str](), fields.place("jobs")
    for i, entry in enumerate(entries or ()):
        if not isinstance(entry, dict):
            fields.faults.add(place.item(i), "invalid_field", "must be an object")
            continue
        job_fields = Fields(entry, place.item(i), fields.faults)
        job = _job(job_fields, limits)
        if job.id in ids:
            job_fields.fault("id", "another job has this id", "duplicate_id")
        ids.add(job.id)
        jobs.append(job)
    return JobsRequest(tuple(jobs), limits, fields.faults)


def _job(fields: Fields, limits: Limits) -> Job:
    fields.refuse_unknown(_JOB_FIELDS)
    job_id = fields.string("id", max_chars=MAX_ID_CHARS, required=True)
    prompts, options = fields.items("prompts", required=True), fields.items("options", required=True)
    if prompts == []:
        fields.fault("prompts", "must hold at least one prompt")
    if prompts is not None and options is not None and len(prompts) != len(options):
        fields.fault("options", "must hold one list for each prompt")
    texts = _strings(prompts or [], fields.place("prompts"), fields.faults)
    lists = _options(options or [], fields.place("options"), fields.faults, limits)
    return Job(job_id or "", texts, lists, fields.place("prompts"), fields.place("options"))


def _strings(values: list[Any], place: Place, faults: Faults, *, min_chars: int = 0) -> tuple[str, ...]:
    """The strings before the first value that is none."""
    for i, value in enumerate(values):
        if not isinstance(value, str) or len(value) < min_chars:
            faults.add(place.item(i), "invalid_field", "must be a string" + (" that is not empty" if min_chars else ""))
            return tuple(values[:i])
    return tuple(values)


def _options(lists: list[Any], place: Place, faults: Faults, limits: Limits) -> tuple[tuple[str, ...], ...]:
    read = []
    for i, options in enumerate(lists):
        if not isinstance(options, list):
            faults.add(place.item(i), "invalid_field", "must be a list")
            break
        if not 1 <= len(options) <= limits.max_options:
            message = f"must hold 1 to {limits.max_options} options"
            faults.add(place.item(i), "too_many_options", message)
            break
        read.append(_strings(options, place.item(i), faults, min_chars=1))
    return tuple(read)
