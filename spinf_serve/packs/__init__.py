"""Prompt packs: questions, how their answers become category scores, and how scores become a decision. Data only."""

from spinf_serve.packs.evaluation import EvaluationError
from spinf_serve.packs.micro_layer import encode_weights, lock_of
from spinf_serve.packs.pack import Pack, load, validate
from spinf_serve.packs.problems import PackError

__all__ = ["EvaluationError", "Pack", "PackError", "encode_weights", "load", "lock_of", "validate"]
