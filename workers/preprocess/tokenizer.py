"""User text to token ids, as the model reads it and never as one of the model's own control tokens."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from workers.preprocess.clean_cut import AdjacentPairs, CutRule
from workers.preprocess.markers import forbidden_ids, read_json

_BYTE_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE_RULE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


class ContentTokenizer:
    """Encodes contents, templates and options. Reads only: safe to share between threads.

    Text is scored as sent: nothing is normalised, stripped, truncated or padded, and no `<bos>` is added. Every
    character has an encoding. A string that looks like a control token is encoded as ordinary characters; runs of line
    breaks, tabs and spaces and the markup tags of the vocabulary are the model's own tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab: Mapping[str, int], special_ids: frozenset[int], bos_id: int | None
    ) -> None:
        """`vocab`: every piece and its id. `tokenizer` must be free of every way to one of `special_ids`."""
        readable = [piece for piece, index in vocab.items() if index not in special_ids and piece not in _BYTE_PIECES]
        self._tokenizer = tokenizer
        self._cut_rule: CutRule = AdjacentPairs(readable)
        self.special_ids = special_ids  # ids that no text yields
        self.bos_id = bos_id  # the id that the model reads before every text, if any
        self.vocab_size = max(vocab.values()) + 1
        self.max_token_bytes = max(len(piece.encode()) for piece in readable)  # no token stands for more UTF-8 bytes

    @classmethod
    def load(cls, snapshot_dir: Path) -> "ContentTokenizer":
        """Read tokenizer.json and the configs beside it.

        Raises FileNotFoundError without a tokenizer.json, ValueError for one that this class cannot keep its promises
        with (the message says why).
        """
        path = Path(snapshot_dir) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            return cls._load(path)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a fault of the library: it is no `Exception`
                raise
            raise ValueError(f"{path}: the tokenizers library cannot run it: {' '.join(str(error).split())}") from None

    @classmethod
    def _load(cls, path: Path) -> "ContentTokenizer":
        try:
            source = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
        vocab = source.get_vocab(with_added_tokens=True)
        problem = unsupported(source, vocab)
        if problem:
            raise ValueError(f"{path}: {problem}")
        forbidden = _forbidden(path.parent, source, vocab)
        safe = _safe_tokenizer(source, vocab, forbidden)
        bos_id, rows = _bos_id(path.parent, source), _rows(path.parent)
        if bos_id is not None and rows is not None and bos_id >= rows:
            raise ValueError(f"{path}: texts begin with id {bos_id}, beyond the {rows} rows of config.json")
        return cls(safe, vocab, forbidden, bos_id)

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`. Raises ValueError for a text with a lone surrogate."""
        try:
            # A batch of one: the only call of the library that skips the offsets, which nobody reads here.
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        except TypeError:
            raise ValueError("the text holds a lone surrogate and cannot be encoded") from None
        ids: list[int] = encoding.ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in order. One thread: the pool's processes share the cores already."""
        return [self.encode(text) for text in texts]

    def clean_cut(self, text: str) -> int | None:
        """The last place at which `text` may be cut whatever follows it, in characters from its start.

        encode(text[:cut]) + encode(text[cut:] + anything) = encode(text + anything). It depends on the text alone, so a
        question never changes the tokens that another one sees. None when the last 256 characters hold no such place;
        the start and, after a character that no piece continues, the end of the text are such places.
        """
        return self._cut_rule.last_clean(text)

    def clean_start(self, text: str) -> int | None:
        """The first place inside `text` at which it may be cut whatever stands before and after, or None.

        encode(before + text[:cut]) + encode(text[cut:] + after) = encode(before + text + after).
        """
        return self._cut_rule.first_clean(text)


def unsupported(source: Tokenizer, vocab: Mapping[str, int]) -> str | None:
    """Why the character rule of clean cuts or the safe encoding would not hold for this tokenizer, or None."""
    model = source.model
    if not isinstance(model, models.BPE) or not model.byte_fallback:
        return "expected a BPE model with byte_fallback"
    if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
        return "ignore_merges, continuing_subword_prefix and end_of_word_suffix are not supported"
    if not vocab.keys() >= _BYTE_PIECES:
        return "the vocabulary lacks some of the 256 byte pieces <0x00> to <0xFF>"
    if any("<0x" in piece and len(piece) > 6 and _BYTE_PIECE.search(piece) for piece in vocab):
        return "the vocabulary holds pieces of several bytes"
    if _state(source.normalizer) != _SPACE_RULE:
        return 'the only supported normalizer replaces " " by "▁"'
    splitter = _state(source.pre_tokenizer)
    if splitter and (splitter.get("type"), splitter.get("pattern")) != ("Split", {"String": " "}):
        return "the only supported pre-tokenizer is a split at spaces"
    added = source.get_added_tokens_decoder().values()
    loose = [t.content for t in added if not t.special and (t.lstrip or t.rstrip or t.single_word)]
    return f"added token {loose[0]!r} depends on the text around it" if loose else None


def _state(component: Any) -> dict[str, Any]:
    """A component's part of tokenizer.json, {} for none."""
    state: dict[str, Any] = json.loads(component.__getstate__()) if component is not None else {}
    return state


def _forbidden(snapshot_dir: Path, source: Tokenizer, vocab: Mapping[str, int]) -> frozenset[int]:
    """The ids that text must not yield; an added token outside the model's embedding rows is one of them."""
    added = source.get_added_tokens_decoder()
    ids = forbidden_ids(snapshot_dir, vocab, {index for index, token in added.items() if token.special})
    rows = _rows(snapshot_dir)
    if rows is None:
        return ids
    outside = {index for index in vocab.values() if index >= rows}
    if outside - set(added):
        raise ValueError(
            f"{snapshot_dir}: tokenizer.json has pieces beyond the {rows} rows of config.json's vocab_size"
        )
    return ids | outside


def _rows(snapshot_dir: Path) -> int | None:
    """The rows of the model's embedding; None where config.json is of another kind: the engine refuses it."""
    config = read_json(snapshot_dir / "config.json")
    text = config.get("text_config")
    rows = (text.get("vocab_size") if isinstance(text, dict) else None) or config.get("vocab_size")
    return rows if isinstance(rows, int) and rows else None


def _safe_tokenizer(source: Tokenizer, vocab: Mapping[str, int], forbidden: frozenset[int]) -> Tokenizer:
    """`source` without truncation, padding and post-processing, and without any way to a forbidden id."""
    safe = _derive(source, source.model, forbidden)
    hidden = {piece: index for piece, index in vocab.items() if index in forbidden}
    hidden |= {piece: vocab[piece] for piece in _BYTE_PIECES}
    # BPE never undoes a merge, so a piece can come out of some text only if it comes out of its own spelling.
    if _reached(safe, hidden):
        safe = _derive(source, _without_merges(source.model, hidden.keys()), forbidden)
        if left := _reached(safe, hidden):
            raise ValueError(f"text cannot be kept from becoming the control token {left!r}")
    return safe


def _reached(tokenizer: Tokenizer, hidden: Mapping[str, int]) -> str | None:
    """A piece of `hidden` whose spelling is encoded to its id."""
    for piece, index in hidden.items():
        if index in tokenizer.encode(piece, add_special_tokens=False).ids:
            return piece
    return None


def _derive(source: Tokenizer, model: Any, forbidden: frozenset[int]) -> Tokenizer:
    safe = Tokenizer(model)
    safe.normalizer = source.normalizer
    model.dropout = None  # encoding is a function of the text
    added = {index: token for index, token in source.get_added_tokens_decoder().items() if index not in forbidden}
    safe.add_tokens([added[index] for index in sorted(added)])
    for index, token in added.items():
        if safe.token_to_id(token.content) != index:
            raise ValueError(f"added token {token.content!r} has an id that the vocabulary does not give it")
    return safe


def _without_merges(model: Any, pieces: Set[str]) -> models.BPE:
    """The same model without the merges that make one of `pieces`."""
    state: dict[str, Any] = json.loads(model.__getstate__())
    pairs = (tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ", 1)) for merge in state["merges"])
    return models.BPE(
        vocab=state["vocab"],
        merges=[(left, right) for left, right in pairs if left + right not in pieces],
        unk_token=state.get("unk_token"),
        fuse_unk=state.get("fuse_unk", False),
        byte_fallback=True,
    )


def _bos_id(snapshot_dir: Path, source: Tokenizer) -> int | None:
    """What the model reads before every text: the post-processor's first token; without one what add_bos_token says.

    transformers reads these files the same way: a post-processor wins over add_bos_token. Gemma 4 is an exception: it
    was trained with `<bos>` before every text, but the first published tokenizers leave it to their chat templates,
    which are not used here.
    """
    ids: list[int] = source.encode("", add_special_tokens=True).ids
    if ids:
        return ids[0]
    config = read_json(snapshot_dir / "tokenizer_config.json")
    always = str(read_json(snapshot_dir / "config.json").get("model_type")).startswith("gemma4")
    if not config.get("add_bos_token") and not always:
        return None
    bos = config.get("bos_token") or ("<bos>" if always else None)
    content = bos.get("content") if isinstance(bos, Mapping) else bos
    if content is not None and not isinstance(content, str):
        raise ValueError(f"{snapshot_dir / 'tokenizer_config.json'}: bos_token is no piece: {content!r}")
    if not content:
        return None
    index: int | None = source.token_to_id(content)
    if index is None:  # without it the model would read every text otherwise than it was trained
        raise ValueError(f"{snapshot_dir / 'tokenizer.json'}: no piece {content!r}, with which every text begins")
    return index
