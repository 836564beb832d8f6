"""Fixtures of the preprocess tests: the tiny checkpoint's tokenizer and a preprocessor with default limits."""

from pathlib import Path

import pytest

from tests.support.requests import preprocessor
from workers.preprocess.preprocessor import Preprocessor
from workers.preprocess.tokenizer import ContentTokenizer


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoint: Path) -> ContentTokenizer:
    return ContentTokenizer.load(tiny_checkpoint)


@pytest.fixture(scope="session")
def prep(tokenizer: ContentTokenizer) -> Preprocessor:
    return preprocessor(tokenizer)
