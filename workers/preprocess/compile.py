"""A request compiled: contents cut and joined to their questions, floors, and the plan that the engine runs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spinf_serve.plan import I32, ScorePlan
from spinf_serve.protocol.errors import RequestError
from spinf_serve.protocol.inputs import Input
from spinf_serve.protocol.queries import Query
from spinf_serve.protocol.request import ScoreRequest
from workers.preprocess.encoder import Encoder
from workers.preprocess.join import CutContent, cut_content
from workers.preprocess.layout import ScoreLayout, Usage
from workers.preprocess.option_touch import OptionTouch
from workers.preprocess.options import OptionList
from workers.preprocess.plan_builder import PlanBuilder
from workers.preprocess.questions import Prompt, Question, QuestionCompiler
from workers.preprocess.trie import Branch, Forest, ForestBuilder


@dataclass(frozen=True, slots=True)
class Compiled:
    plan: ScorePlan
    layout: ScoreLayout


def compile_request(request: ScoreRequest, encoder: Encoder, max_tokens: int) -> Compiled:
    """Tokenizes a request and lays it out. `max_tokens`: the longest path of content plus question.

    Raises the request's first fault in document order, those that only a tokenizer finds included; after these
    content_too_long for a path over `max_tokens`, and request_too_large.
    """
    return _Compiler(request, encoder, max_tokens).run()


@dataclass
class _Compiler:
    request: ScoreRequest
    encoder: Encoder
    max_tokens: int

    def run(self) -> Compiled:
        self._bound_prompts()
        questions = self._questions()
        contents = [self._content(item) for item in self.request.inputs]
        self.request.faults.check()
        packed = self.request.packed
        per_input = [
            tuple(questions[query] for query in (*item.shared, *item.own, *packed)) for item in self.request.inputs
        ]
        floors = _Floors(per_input)
        usage = self._usage(contents, per_input, floors.prompts)
        builder, forests = PlanBuilder(), ForestBuilder()
        self._add_inputs(contents, per_input, builder, forests)
        reads = builder.reads()
        if floors.prompts:
            builder.add(self.encoder.bos, self._forest("", [(None, prompt) for prompt in floors.prompts], forests))
        layout = ScoreLayout(
            request=self.request,
            questions=tuple(per_input),
            asked=tuple(questions[query] for query in self.request.asked()),
            gathers=tuple(forests.gathers),
            reads=reads,
            floor_reads=builder.reads(),
            floor_of=floors.of_prompts(),
            unmerged=self._unmerged(contents, per_input),
            usage=usage,
        )
        return Compiled(builder.plan(), layout)

    def _bound_prompts(self) -> None:
        """Before anything is tokenized: a prompt counts as a token at least, whatever its template holds."""
        most = self.request.limits.max_processed_tokens
        packed = sum(len(query.combinations) for query in self.request.packed)
        prompts, by_list = packed * len(self.request.inputs), dict[int, int]()
        for item in self.request.inputs:
            if id(item.shared) not in by_list:
                by_list[id(item.shared)] = sum(len(query.combinations) for query in item.shared)
            prompts += by_list[id(item.shared)] + sum(len(query.combinations) for query in item.own)
        if prompts > most:
            self.request.faults.check()
            raise _too_large(most)

    def _questions(self) -> dict[Query, Question]:
        """The compiled form of every query, also of a shared one that no input keeps: its faults count too."""
        request = self.request
        compiler = QuestionCompiler(self.encoder, request.limits, request.case_insensitive, request.faults)
        queries = [*request.shared, *(query for item in request.inputs for query in item.own), *request.packed]
        compiled = {query: compiler.compile(query) for query in queries}
        return {query: question for query, question in compiled.items() if question is not None}

    def _content(self, item: Input) -> CutContent:
        """The content's tokens, none where they cannot matter any more: too long, or after the first fault."""
        most, faults = self.request.limits.max_content_tokens, self.request.faults
        over = self.encoder.over(item.text, most)
        content = cut_content("" if over or faults.before(item.place) else item.text, self.encoder)
        if over or content.tokens > most:
            faults.add(item.place, "content_too_long", f"a content has at most {most} tokens")
        return content

    def _usage(
        self, contents: list[CutContent], per_input: list[tuple[Question, ...]], floors: Sequence[Prompt]
    ) -> Usage:
        usage = Usage(
            content_tokens=sum(content.tokens for content in contents),
            query_tokens=sum(question.tokens for questions in per_input for question in questions),
            pack_tokens=sum(q.tokens for questions in per_input for q in questions if q.query.of_pack),
            floor_tokens=sum(prompt.tokens for prompt in floors),
            prompts=sum(len(question.prompts) for questions in per_input for question in questions),
            floor_prompts=len(floors),
        )
        most = self.request.limits.max_processed_tokens
        if usage.processed_tokens > most:
            raise _too_large(most)
        return usage

    def _add_inputs(
        self,
        contents: list[CutContent],
        per_input: list[tuple[Question, ...]],
        builder: PlanBuilder,
        forests: ForestBuilder,
    ) -> None:
        """A job for each input. Inputs with one tail and the same questions share the layout of their tries."""
        known: dict[tuple[str, tuple[Question, ...]], Forest] = {}
        for item, content, questions in zip(self.request.inputs, contents, per_input, strict=True):
            forest = known.get((content.tail, questions))
            if forest is None:
                prompts = [(question.query.group, prompt) for question in questions for prompt in question.prompts]
                forest = known[content.tail, questions] = self._forest(content.tail, prompts, forests)
            prefix = self.encoder.bos + content.prefix
            if len(prefix) + forest.depth > self.max_tokens:
                message = f"the content and its longest question have more than {self.max_tokens} tokens"
                raise RequestError("content_too_long", message, item.place.param())
            builder.add(prefix, forest)

    def _forest(self, tail: str, prompts: list[tuple[str | None, Prompt]], forests: ForestBuilder) -> Forest:
        """The tries below a content that ends in `tail`, one for each group."""
        groups: dict[str | None, list[tuple[int, Branch]]] = {}
        for number, (group, prompt) in enumerate(prompts):
            branch = Branch(prompt.template.after(tail, self.encoder), prompt.reading)
            groups.setdefault(group, []).append((number, branch))
        return forests.build(list(groups.values()), len(prompts))

    def _unmerged(self, contents: list[CutContent], per_input: list[tuple[Question, ...]]) -> tuple[str, ...]:
        """Inputs whose content was not joined as one string: no clean place, or it reaches through to an option.

        Of the packs' questions only those count whose results are shown.
        """
        touch = OptionTouch(self.encoder)
        packed, hidden = len(self.request.packed), self.request.hidden
        shown = tuple(q for questions in per_input[:1] for q in questions[-packed:] if q.query not in hidden)
        seen = [questions[:-packed] + shown for questions in per_input] if packed else per_input
        rows = zip(self.request.inputs, contents, seen, strict=True)
        return tuple(
            item.id for item, content, questions in rows if not content.merged or touch.reaches(content.tail, questions)
        )


class _Floors:
    """The distinct floors of a call, and which of them each prompt has."""

    def __init__(self, per_input: list[tuple[Question, ...]]) -> None:
        self.prompts: list[Prompt] = []
        self._numbers: dict[tuple[str, OptionList], int] = {}
        self._of_question: dict[Question, list[int]] = {}
        self._per_input = per_input
        for question in (question for questions in per_input for question in questions):
            if question not in self._of_question:
                self._of_question[question] = [self._number(question, prompt) for prompt in question.prompts]

    def _number(self, question: Question, prompt: Prompt) -> int:
        if not question.query.empty_floor:
            return -1
        number = self._numbers.setdefault((prompt.template.text, question.options), len(self.prompts))
        if number == len(self.prompts):
            self.prompts.append(prompt)
        return number

    def of_prompts(self) -> I32:
        """[N] int32, prompts by input, question and combination; -1 without a floor."""
        numbers = [self._of_question[question] for questions in self._per_input for question in questions]
        return np.fromiter(itertools.chain.from_iterable(numbers), np.int32)


def _too_large(most: int) -> RequestError:
    return RequestError("request_too_large", f"the request needs more than {most} tokens")
