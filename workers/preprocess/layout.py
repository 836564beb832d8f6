"""What a compiled request keeps beside its plan, to read the engine's numbers and write the response."""

from dataclasses import dataclass

from spinf_serve.plan import I32, I64
from spinf_serve.protocol.request import ScoreRequest
from workers.preprocess.questions import Question
from workers.preprocess.trie import Gather


@dataclass(frozen=True, slots=True)
class Usage:
    """Logical token counts: they do not change when the engine shares a prefix or finds a floor in a cache."""

    content_tokens: int
    query_tokens: int
    pack_tokens: int  # of the query tokens, those of packs
    floor_tokens: int
    prompts: int
    floor_prompts: int

    @property
    def processed_tokens(self) -> int:
        return self.content_tokens + self.query_tokens + self.floor_tokens


@dataclass(frozen=True, slots=True)
class Reads:
    """Where the numbers of N prompts stand in a plan's columns.

    starts    [N] int64  first column of the prompt's block
    gathers   [N] int32  which of `ScoreLayout.gathers` reads the block
    """

    starts: I64
    gathers: I32


@dataclass(frozen=True, slots=True)
class ScoreLayout:
    """The response's frame.

    questions     per input, what it is asked: its own questions, then the packs'
    reads         the prompts, by input, question and combination
    floor_reads   the distinct floors
    floor_of      [N] int32: the floor of each prompt, -1 without one
    unmerged      the inputs whose content joins a question between tokens, in request order
    """

    request: ScoreRequest
    questions: tuple[tuple[Question, ...], ...]
    asked: tuple[Question, ...]
    gathers: tuple[Gather, ...]
    reads: Reads
    floor_reads: Reads
    floor_of: I32
    unmerged: tuple[str, ...]
    usage: Usage
