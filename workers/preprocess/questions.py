"""Queries as tokens: filled templates and option readings, and the limits that only a tokenizer can check."""

from dataclasses import dataclass, field

from spinf_serve.config import Limits
from spinf_serve.protocol.document import Faults
from spinf_serve.protocol.queries import Query
from workers.preprocess.encoder import Encoder
from workers.preprocess.join import FilledTemplate
from workers.preprocess.options import OptionList, Reading, check_boundary, short_options


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """One question: a filled template and how its options are read. `tokens`: what it adds to the usage."""

    template: FilledTemplate
    reading: Reading
    tokens: int


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    """A query compiled as far as no content is needed: one prompt per combination, in request order."""

    query: Query
    options: OptionList
    prompts: tuple[Prompt, ...]

    @property
    def tokens(self) -> int:
        return sum(prompt.tokens for prompt in self.prompts)

    @property
    def touchable(self) -> list[str]:
        """The filled templates through which a content may reach to the options."""
        return [prompt.template.text for prompt in self.prompts if prompt.template.touchable]


@dataclass
class QuestionCompiler:
    """Compiles the queries of one request; equal option lists and filled templates are encoded once."""

    encoder: Encoder
    limits: Limits
    case_insensitive: bool
    faults: Faults
    _options: dict[tuple[str, ...], OptionList] = field(default_factory=dict)
    _templates: dict[str, tuple[FilledTemplate, int]] = field(default_factory=dict)

    def compile(self, query: Query) -> Question | None:
        """The query's prompts, or None (with a fault, here or in the request) where it cannot be asked."""
        faults = self.faults
        if faults.before(query.place):
            return None
        options = self._option_list(query)
        prompts = []
        for values in query.combinations:
            # The bound comes before filling: a value may be repeated more often than memory allows.
            most = self.limits.max_query_tokens * self.encoder.max_token_bytes
            if not query.of_pack and query.template.filled_chars(values) > most:
                self._too_long(query)
                continue
            text = query.template.fill(values)
            reading = check_boundary(options, text, query.options_place, faults)
            if faults.before(query.template_place):
                continue  # only an option that was sent before the template can still be reported
            template, tokens = self._template(text)
            if not query.of_pack and tokens > self.limits.max_query_tokens:
                self._too_long(query)
            if not text and not self.encoder.bos:
                faults.add(query.template_place, "invalid_field", "this model needs text before the slot")
            prompts.append(Prompt(template, reading, tokens + options.extra_tokens))
        return Question(query, options, tuple(prompts))

    def _option_list(self, query: Query) -> OptionList:
        texts = short_options(
            query.options, query.options_place, self.limits.max_option_tokens, self.encoder, self.faults
        )
        options = self._options.get(texts)
        if options is None:
            options = self._options[texts] = OptionList.encode(texts, self.case_insensitive, self.encoder)
        return options

    def _template(self, text: str) -> tuple[FilledTemplate, int]:
        known = self._templates.get(text)
        if known is None:
            template = FilledTemplate.split(text, self.encoder)
            known = self._templates[text] = (template, len(template.after("", self.encoder)))
        return known

    def _too_long(self, query: Query) -> None:
        message = f"a filled template has more than {self.limits.max_query_tokens} tokens"
        self.faults.add(query.template_place, "template_too_long", message)
