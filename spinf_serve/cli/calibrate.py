"""`spinf-serve calibrate MODEL`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from spinf_serve.cli.options import fail
from spinf_serve.cli.weights import need_engine, snapshot_of
from spinf_serve.corpus import Corpus, read_corpus
from spinf_serve.progress import for_standard_error
from spinf_serve.refusal import StartRefused


def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Snapshot directory, manifest id, alias or repository.")
    ],
    corpus: Annotated[list[Path], typer.Option("--corpus", help="JSONL or text file; repeatable.")],
    out: Annotated[Path, typer.Option("--out", help="Where calibration.json goes; must not exist.")],
    field: Annotated[str, typer.Option("--field", help="Key of the text in a JSONL object.")] = "text",
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens of one pass; longer texts are cut.")] = 2048,
) -> None:
    """Calibrate the static fp8 activation scales of a checkpoint over a corpus, on the CPU."""
    need_engine()
    if os.path.lexists(out):
        fail(f"{out} exists already: nothing is overwritten")
    if not os.access(out.parent, os.W_OK):  # before hours of work, not after
        fail(f"{out.parent} is not a directory that can be written to")
    try:
        texts = read_corpus(corpus, field)
        content = _calibrate(snapshot_of(model), texts, window)
        _write(out, content)
    except StartRefused as error:
        fail(str(error))


def _calibrate(source: tuple[Path, str], corpus: Corpus, window: int) -> str:
    """The text of calibration.json."""
    from workers.engine.calibrate import calibrate as calibrate_model  # loads torch
    from workers.engine.export import source_of, tool_versions
    from workers.engine.load import percent_reporter
    from workers.engine.quant.calibration import to_json

    directory, name = source
    say = for_standard_error()
    windows = list(_windows(directory, corpus.texts, window))
    if not windows:
        raise StartRefused("the corpus holds no text that the tokenizer makes tokens of")
    tokens = sum(map(len, windows))
    say(f"hashing the weights in {directory}")
    found = source_of(directory, name)

    def on_text(done: int) -> None:
        if 10 * done // len(windows) > 10 * (done - 1) // len(windows):
            say(f"calibrating: {100 * done // len(windows)} % of {tokens} tokens")

    amax = calibrate_model(directory, windows, on_text, percent_reporter(say))
    counts = {"texts": len(corpus.texts), "windows": len(windows), "tokens": tokens, "window": window}
    record: dict[str, Any] = {
        "model": {"name": found.name, "revision": found.revision, "weights": found.weights},
        "corpus": {"sha256": corpus.digest, "files": corpus.files, **counts},
        "scheme": "fp8",
        "tools": tool_versions(),
    }
    return to_json(amax, record)


def _windows(directory: Path, texts: list[str], window: int) -> Iterator[list[int]]:
    """Token ids as the model reads a content: `<bos>` before each piece of at most `window` tokens in all."""
    from workers.preprocess.tokenizer import ContentTokenizer

    try:
        tokenizer = ContentTokenizer.load(directory)
    except (OSError, ValueError) as error:
        raise StartRefused(f"the tokenizer cannot be loaded: {error}") from None
    head = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    step = window - len(head)
    for text in texts:
        ids = tokenizer.encode(text)
        for first in range(0, len(ids), step):
            yield head + ids[first : first + step]


def _write(out: Path, content: str) -> None:
    """A new file: an existing one is never replaced. What cannot be written whole is removed."""
    try:
        with out.open("x", encoding="utf-8") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                out.unlink()
                raise
    except OSError as error:
        raise StartRefused(f"{out} cannot be written: {error.strerror or error}") from None
