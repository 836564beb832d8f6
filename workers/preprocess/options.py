"""Option lists as tokens: case variants, the boundary to the template, and which option owns a token sequence."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from spinf_serve.protocol.document import Faults, Place
from workers.preprocess.encoder import Encoder, Tokens


@dataclass(frozen=True, eq=False, slots=True)
class Reading:
    """How one option list is read after a template: per option, the token sequences whose probabilities are summed.

    Compared by identity: equal readings are made once.
    """

    sequences: tuple[tuple[Tokens, ...], ...]
    fault: int | None = None  # the first option that merges with the template, or is left without a sequence


@dataclass(eq=False)
class OptionList:
    """The options of a query, encoded once for all templates, inputs and queries that use them.

    given       the tokens of each option as it was sent
    variants    per option, the case variants that are one token, in the order of the formula
    """

    texts: tuple[str, ...]
    given: tuple[Tokens, ...]
    variants: tuple[tuple[str, ...], ...]
    encoder: Encoder
    _readings: dict[frozenset[str], Reading] = field(default_factory=dict)
    _merging: dict[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def encode(cls, texts: tuple[str, ...], case_insensitive: bool, encoder: Encoder) -> "OptionList":
        given = tuple(encoder.encode(text) for text in texts)
        variants = tuple(_one_token_variants(text, encoder) if case_insensitive else () for text in texts)
        return cls(texts, given, variants, encoder)

    @property
    def extra_tokens(self) -> int:
        """Tokens after the first, over all options: what they add to a question's count."""
        return sum(len(tokens) - 1 for tokens in self.given)

    @property
    def single_tokens(self) -> bool:
        """Whether every option, as it was sent, is one token."""
        return all(len(tokens) == 1 for tokens in self.given)

    def merging(self, template: str) -> frozenset[str]:
        """The options and variants that tokenize otherwise after `template` (filled, without content) than alone."""
        tail = self.encoder.clean_tail(template)
        merging = self._merging.get(tail)
        if merging is None:
            merging = frozenset(s for s in self._strings() if not self.encoder.tail_splits(tail, s))
            self._merging[tail] = merging
        return merging

    def reading(self, merging: frozenset[str]) -> Reading:
        """The reading without the variants in `merging`. An option may be left with no sequence at all."""
        reading = self._readings.get(merging)
        if reading is None:
            sequences = tuple(self._owned(merging))
            rows = enumerate(zip(self.texts, sequences, strict=True))
            fault = next((i for i, (text, owned) in rows if text in merging or not owned), None)
            reading = self._readings[merging] = Reading(sequences, fault)
        return reading

    def _strings(self) -> Iterator[str]:
        for text, variants in zip(self.texts, self.variants, strict=True):
            yield text
            yield from variants

    def _owned(self, merging: frozenset[str]) -> Iterator[tuple[Tokens, ...]]:
        """A token sequence belongs to the first option that has it."""
        seen: set[Tokens] = set()
        for tokens, variants in zip(self.given, self.variants, strict=True):
            strings = [tokens, *(self.encoder.encode(text) for text in variants if text not in merging)]
            owned = tuple(sequence for sequence in dict.fromkeys(strings) if sequence not in seen)
            seen.update(owned)
            yield owned


def case_forms(option: str) -> tuple[str, ...]:
    """Lower case, capitalised and upper case of the stripped option, each without and with a leading space."""
    word = option.strip()
    forms = (word.lower(), word[:1].upper() + word[1:].lower(), word.upper())
    return tuple(dict.fromkeys(space + form for form in forms for space in ("", " ")))


def _one_token_variants(option: str, encoder: Encoder) -> tuple[str, ...]:
    return tuple(form for form in case_forms(option) if form != option and len(encoder.encode(form)) == 1)


def short_options(
    texts: tuple[str, ...], place: Place, max_tokens: int, encoder: Encoder, faults: Faults
) -> tuple[str, ...]:
    """The options before the first one over `max_tokens`, which is an option_too_long."""
    for i, text in enumerate(texts):
        if encoder.over(text, max_tokens) or len(encoder.encode(text)) > max_tokens:
            faults.add(place.item(i), "option_too_long", f"an option has at most {max_tokens} tokens")
            return texts[:i]
    return texts


def check_boundary(options: OptionList, template: str, place: Place, faults: Faults) -> Reading:
    """The options read after a filled template; adds option_boundary, or duplicate_option for one that owns nothing."""
    merging = options.merging(template)
    reading = options.reading(merging)
    if reading.fault is not None:
        text = options.texts[reading.fault]
        code, message = "duplicate_option", "every spelling of this option is read as an earlier option"
        if text in merging:
            code, message = "option_boundary", _advice(template, text, options.encoder)
        faults.add(place.item(reading.fault), code, message)
    return reading


def _advice(template: str, option: str, encoder: Encoder) -> str:
    """Which space to drop, tried on the tokenizer."""
    message = "the option tokenizes differently after the template than on its own: "
    spaced = template.endswith(" ")
    if spaced and option.startswith(" ") and encoder.splits(template.rstrip(" "), option):
        return message + "drop the space before {?}, and keep the one at the option's start"
    if spaced and not option.startswith(" ") and encoder.splits(template.rstrip(" "), " " + option):
        return message + "drop the space before {?}, and start the option with a space"
    if option.startswith(" ") and option.strip(" ") and encoder.splits(template, option.lstrip(" ")):
        return message + "drop the space at the option's start"
    return message + "end the template at the end of a word, and start the option with a space"
