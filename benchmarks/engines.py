"""The bare scoring engine for scripts that need neither HTTP nor a tokenizer: made from a directory, asked in plans."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spinf_serve import snapshots
from spinf_serve.plan import ScorePlan, ScoreResult
from spinf_serve.settings import Settings
from workers.engine.engine import ScoringEngine


def load_engine(snapshot: Path, **settings: Any) -> ScoringEngine:
    """An engine on a snapshot directory, whose weights are not hashed: its fingerprint does not tell them apart."""
    effective = Settings.load({"model": str(snapshot), **settings})
    model = replace(snapshots.describe(effective.choice()), snapshot_dir=str(snapshot.resolve()))
    return ScoringEngine.load(effective.engine_config(model))


def score_plans(engine: ScoringEngine, plans: Mapping[Hashable, ScorePlan]) -> dict[Hashable, ScoreResult]:
    """Submit all at once, step until all are done. Raises what a plan raises."""
    for key, plan in plans.items():
        engine.submit(key, plan)
    found: dict[Hashable, ScoreResult] = {}
    while engine.has_work:
        for completion in engine.step():
            if completion.error is not None:
                raise completion.error
            assert completion.result is not None
            found[completion.key] = completion.result
    return found
