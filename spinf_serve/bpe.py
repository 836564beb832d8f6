"""tokenizer.json of a Gemma-style vocabulary: BPE over whole text, spaces as "▁", characters it lacks as bytes.

The merges are not stored in a GGUF file; they follow from the vocabulary alone. SentencePiece ranks a merge by the
score of the piece it makes, and the scores fall with the id, so the merged piece's id is the rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SPACE = "▁"


def is_run(piece: str) -> bool:
    """Whether `piece` repeats one of the characters that the vocabulary holds runs of (line break, space, tab)."""
    return piece[:1] in ("\n", SPACE, "\t") and piece == piece[:1] * len(piece)


def bpe_merges(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to build a piece of `vocab` from two others, best first.

    Runs of line breaks, spaces and tabs come first, longest left half first, so a run grows from its start to the
    longest piece (SentencePiece matches these user-defined pieces greedily). Then by the id of the merged piece,
    longest left half first.
    """
    runs: list[tuple[str, str]] = []
    merges: list[tuple[str, str]] = []
    for piece in sorted(vocab, key=vocab.__getitem__):
        halves = runs if is_run(piece) else merges
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                halves.append((left, right))
    runs.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
    return runs + merges


def added_token(piece: str, index: int, *, special: bool) -> dict[str, Any]:
    """An entry of `added_tokens` that is matched in the raw text exactly as written."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": piece, **flags, "special": special}


def tokenizer_json(pieces: Sequence[str], *, special: Iterable[str], plain: Iterable[str]) -> dict[str, Any]:
    """The whole tokenizer.json for the vocabulary `pieces` (a piece's id is its index).

    `special` and `plain` name the pieces that are matched before BPE, as special and as ordinary added tokens. `<unk>`
    and `<bos>` must be among the pieces, and so must the 256 byte pieces `<0x00>` to `<0xFF>`.
    """
    vocab = {piece: index for index, piece in enumerate(pieces)}
    added = [added_token(piece, vocab[piece], special=True) for piece in special]
    added += [added_token(piece, vocab[piece], special=False) for piece in plain]
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    text = [bos, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [{"SpecialToken": {"id": "<bos>", "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda entry: int(entry["id"])),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": text,
            "pair": text + pair,
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [vocab["<bos>"]], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": bpe_merges(vocab),
        },
    }
