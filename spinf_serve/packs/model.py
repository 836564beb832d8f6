"""A prompt pack as checked objects. `spinf_serve.packs.parse` makes them; nothing here checks anything."""

from collections.abc import Mapping
from dataclasses import dataclass, field

PAIR, OPTION, ANY, SET = "pair", "option", "any", "set"
KINDS = (PAIR, OPTION, ANY, SET)
MICRO_LAYER, MAX, PER_CATEGORY = "micro_layer", "max", "per_category"
MODES = (MICRO_LAYER, MAX, PER_CATEGORY)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value that the caller gives with each content. Its text is `default` where it is not given."""

    id: str
    label: str
    description: str
    required: bool
    default: str | None


@dataclass(frozen=True, slots=True)
class Context:
    """A context template, split at `{X}`. A side is pieces: text, or in a 1-tuple the name of a parameter."""

    name: str
    template: str
    before: tuple[str | tuple[str], ...]
    after: tuple[str | tuple[str], ...]


@dataclass(frozen=True, slots=True)
class Query:
    """A scored query. `values` are the values of `F` in the query's order, or (None,) for a template without it."""

    id: str
    template: str
    options: tuple[str, ...]
    values: tuple[str | None, ...]
    empty_floor: bool


@dataclass(frozen=True, slots=True)
class Read:
    """How one (query, F) becomes a number. `mu` holds one value per option, whatever the file's form."""

    id: str
    query: str
    F: str | None
    kind: str
    category: str
    mean: float
    sd: float
    view: str | None = None
    sign: int = 1
    option: int = 0
    mu: tuple[float, ...] = ()
    unsafe: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Scores of normal traffic: a share `levels[i]` of it scores at most `values[i]`. Both ascend."""

    levels: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Category:
    id: str
    label: str
    platt: tuple[float, float]
    threshold: float | None
    normal_quantiles: Quantiles | None = None
    views: bool = False  # aggregate: views
    requires: tuple[str, ...] = ()
    decides: bool = True


@dataclass(frozen=True, slots=True)
class MicroLayer:
    """A linear layer (`hidden` is None) or one hidden layer of tanh units.

    inputs     `c:<category>` (its macro) or `r:<read>` (its z), n of them
    weights    linear: [n]; hidden: [n, hidden] row-major, then b1 [hidden], then w2 [hidden]
    """

    inputs: tuple[str, ...]
    hidden: int | None
    weights: tuple[float, ...]
    bias: float
    threshold: float
    locked: bool  # the lock in the file matches what the weights were fitted on


@dataclass(frozen=True, slots=True)
class Decision:
    mode: str
    fallback: str = PER_CATEGORY
    max_threshold: float | None = None
    micro_layer: MicroLayer | None = None
    critical: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackModel:
    """A whole pack. In a draft the numbers that are fitted later stand at neutral values and must not be used."""

    id: str
    version: str
    model: str
    media: tuple[str, ...]
    answers: str
    parameters: Mapping[str, Parameter]
    contexts: Mapping[str, Context]
    queries: tuple[Query, ...]
    case_insensitive: bool
    reads: tuple[Read, ...]
    categories: Mapping[str, Category]
    decision: Decision
    draft: bool
    warnings: tuple[str, ...] = field(default=())

    @property
    def group(self) -> str:
        """The query group in which the pack's questions are laid out."""
        return f"{self.id}@{self.version}"

    @property
    def default_context(self) -> str:
        return next(iter(self.contexts))

    @property
    def prompts(self) -> int:
        """Filled templates per content."""
        return sum(len(query.values) for query in self.queries)

    @property
    def modes(self) -> tuple[str, ...]:
        """The decision modes that need nothing from the caller, the pack's own first."""
        layer, top = self.decision.micro_layer, self.decision.max_threshold
        able = [PER_CATEGORY, *([MAX] if top is not None else []), *([MICRO_LAYER] if layer is not None else [])]
        return tuple(sorted(able, key=lambda mode: (mode != self.decision.mode, MODES.index(mode))))
