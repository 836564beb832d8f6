"""What compiling asks of a tokenizer, with a memory for the short strings that requests repeat."""

from typing import Protocol

_MAX_KEPT_CHARS = 512  # of one string
_MAX_KEPT = 1 << 21  # characters of all of them: at worst as many tokens, about 100 MB

Tokens = tuple[int, ...]


class Tokenizer(Protocol):
    """See `workers.preprocess.tokenizer.ContentTokenizer`, which says what each promises."""

    bos_id: int | None
    max_token_bytes: int

    def encode(self, text: str) -> list[int]: ...

    def clean_cut(self, text: str) -> int | None: ...

    def clean_start(self, text: str) -> int | None: ...


class Encoder:
    """A tokenizer whose answers for short strings are kept: templates, options and joints come again and again.

    Safe to share between threads: an entry is a pure function of its key.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: dict[str, Tokens] = {"": ()}
        self._tails: dict[str, str] = {}
        self._kept = 0
        self.bos: Tokens = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
        self.max_token_bytes = tokenizer.max_token_bytes

    def encode(self, text: str) -> Tokens:
        """The token ids of `text`, without `<bos>`."""
        tokens = self._tokens.get(text)
        if tokens is None:
            tokens = tuple(self._tokenizer.encode(text))
            if len(text) <= _MAX_KEPT_CHARS:
                self._count(text)
                self._tokens[text] = tokens
        return tokens

    def encode_once(self, text: str) -> Tokens:
        """`encode` for a text that will hardly come again, such as a content."""
        return tuple(self._tokenizer.encode(text))

    def _count(self, text: str) -> None:
        """One more text is kept; everything is forgotten before it becomes too much."""
        self._kept += len(text)
        if self._kept > _MAX_KEPT:
            self._tokens, self._tails, self._kept = {"": ()}, {}, len(text)

    def clean_tail(self, text: str) -> str:
        """What of `text` a continuation can change; all of it where no clean place is near its end."""
        tail = self._tails.get(text)
        if tail is None:
            cut = self._tokenizer.clean_cut(text)
            tail = text if cut is None else text[cut:]
            if len(text) <= _MAX_KEPT_CHARS:
                self._count(text)
                self._tails[text] = tail
        return tail

    def clean_cut(self, text: str) -> int | None:
        """The last place where `text` may be cut whatever follows it."""
        return self._tokenizer.clean_cut(text)

    def clean_start(self, text: str) -> int | None:
        """The first place inside `text` where it may be cut whatever stands on either side."""
        return self._tokenizer.clean_start(text)

    def splits(self, left: str, right: str) -> bool:
        """Whether encode(left + right) = encode(left) + encode(right), exactly."""
        return self.tail_splits(self.clean_tail(left), right)

    def tail_splits(self, tail: str, right: str) -> bool:
        """`splits` for a text whose clean tail is known."""
        return self.apart(tail, right) or self.encode(tail + right) == self.encode(tail) + self.encode(right)

    def apart(self, tail: str, right: str) -> bool:
        """Whether the characters at the joint alone keep the two apart."""
        return not tail or not right or self._tokenizer.clean_start(tail[-1] + right[0]) == 1

    def over(self, text: str, tokens: int) -> bool:
        """Whether `text` has more bytes than that many tokens could hold: then it need not be tokenized."""
        most = tokens * self.max_token_bytes
        return len(text) > most or (4 * len(text) > most and len(text.encode()) > most)
