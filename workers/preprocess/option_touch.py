"""Where a content would merge with an option, over a template too short to keep them apart: for a warning, no score."""

from dataclasses import dataclass, field

from workers.preprocess.encoder import Encoder
from workers.preprocess.options import OptionList
from workers.preprocess.questions import Question

_MAX_TRIED = 100_000
"""Strings tokenized for one request; after these, a pair of characters that may merge counts as merged."""


@dataclass
class OptionTouch:
    """Answers for one request; equal tails, templates and option lists are tried once.

    The boundary rule holds on the template alone and never looks at the content, so such an option is scored with its
    own tokens after the content's: the caller is told that the whole string would be tokenized otherwise.
    """

    encoder: Encoder
    left: int = _MAX_TRIED
    _touchable: dict[Question, list[str]] = field(default_factory=dict)
    _tails: dict[str, str] = field(default_factory=dict)
    _known: dict[tuple[str, OptionList], bool] = field(default_factory=dict)

    def reaches(self, tail: str, questions: tuple[Question, ...]) -> bool:
        """Whether content + template + option merges over an option's start for any of the questions."""
        return any(
            self.merges(self._clean_tail(tail + text), question.options)
            for question in questions
            for text in self._texts(question)
        )

    def _texts(self, question: Question) -> list[str]:
        texts = self._touchable.get(question)
        if texts is None:
            texts = self._touchable[question] = question.touchable
        return texts

    def _clean_tail(self, text: str) -> str:
        tail = self._tails.get(text)
        if tail is None:
            tail = self._tails[text] = self.encoder.clean_tail(text)
        return tail

    def merges(self, tail: str, options: OptionList) -> bool:
        """Whether one of the options merges with `tail`, a text up to whose start nothing reaches."""
        merges = self._known.get((tail, options))
        if merges is None:
            merges = self._known[tail, options] = any(self._merges_with(tail, text) for text in options.texts)
        return merges

    def _merges_with(self, tail: str, option: str) -> bool:
        if self.encoder.apart(tail, option):
            return False
        self.left -= 1
        return self.left < 0 or not self.encoder.tail_splits(tail, option)
