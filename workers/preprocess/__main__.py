"""Entry of a preprocess process: `python -P -m workers.preprocess RUN_DIR`, started by the supervisor."""

import os
import sys
from pathlib import Path

from spinf_serve import logs
from spinf_serve.supervisor.member import CannotStart, Member, run_child
from spinf_serve.wire.preprocess import PreprocessSetup


def main(member: Member) -> None:
    """Import what preprocessing needs while the supervisor finds the model, load the tokenizer, work."""
    from workers.preprocess.loop import PreprocessLoop
    from workers.preprocess.preprocessor import Preprocessor
    from workers.preprocess.tokenizer import ContentTokenizer

    setup = member.set_up(PreprocessSetup)
    logs.setup("preprocess", setup.log_format, hide_messages=True)
    try:
        tokenizer = ContentTokenizer.load(Path(setup.config.model.snapshot_dir))
    except Exception as error:
        raise CannotStart(f"the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
    PreprocessLoop(member, Preprocessor(setup.config, tokenizer)).run(setup.peers)


if __name__ == "__main__":
    # The pool is the parallelism: a thread pool of its own in each worker would only fight the engine for the cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    sys.exit(run_child("preprocess", main))
