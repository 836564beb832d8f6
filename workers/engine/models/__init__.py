"""One file per model family, and the table that finds it by config.json's `model_type`."""

from pathlib import Path

from workers.engine.errors import LoadError
from workers.engine.models.config import read_config
from workers.engine.models.gemma import GemmaConfig, GemmaModel

__all__ = ["GemmaModel", "model_config"]


def model_config(snapshot_dir: Path) -> GemmaConfig:
    """The parsed config.json of a snapshot; raises LoadError for what this engine cannot compute faithfully."""
    config = read_config(snapshot_dir)
    model_type = config.get("model_type")
    if model_type not in GemmaConfig.model_types:
        known = ", ".join(GemmaConfig.model_types)
        raise LoadError(f"config.json: model_type {model_type!r} is not supported (supported: {known})")
    return GemmaConfig.from_json(config)
