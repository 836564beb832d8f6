"""The joint content|template: where a content is cut, so that it is read once under every question."""

from dataclasses import dataclass

from workers.preprocess.encoder import Encoder, Tokens


@dataclass(frozen=True, slots=True)
class CutContent:
    """A content in two parts: `prefix` is read once, `tail` is tokenized anew with each filled template.

    prefix    token ids without `<bos>`
    tokens    how many tokens the content has on its own
    merged    False where no clean place was near the end: the tail is empty then, and the parts join between tokens
    """

    prefix: Tokens
    tail: str
    tokens: int
    merged: bool


def cut_content(text: str, encoder: Encoder) -> CutContent:
    """Cuts at the last clean place within 256 characters of the end; see `ContentTokenizer.clean_cut`."""
    cut = encoder.clean_cut(text)
    at = len(text) if cut is None else cut
    prefix, tail = encoder.encode_once(text[:at]), text[at:]
    return CutContent(prefix, tail, len(prefix) + len(encoder.encode(tail)), cut is not None)


@dataclass(frozen=True, slots=True)
class FilledTemplate:
    """A filled template, split where whatever stands before it cannot change the rest.

    head, rest    text = head + rest; `rest` is "" without such a place
    """

    text: str
    head: str
    rest: Tokens

    @classmethod
    def split(cls, text: str, encoder: Encoder) -> "FilledTemplate":
        at = encoder.clean_start(text)
        if at is None:
            return cls(text, text, ())
        return cls(text, text[:at], encoder.encode(text[at:]))

    @property
    def touchable(self) -> bool:
        """Whether a content could reach through the template to what follows it."""
        return not self.rest

    def after(self, tail: str, encoder: Encoder) -> Tokens:
        """The tokens of tail + template, exactly as the tokenizer reads them in one piece."""
        return encoder.encode(tail + self.head) + self.rest
