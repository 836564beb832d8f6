"""One file per model family, and the table that finds it by config.json's `model_type`."""

from collections.abc import Callable
from pathlib import Path

from workers.engine.errors import LoadError
from workers.engine.models import gemma3_config, gemma4_config
from workers.engine.models.config import Json, read_config
from workers.engine.models.gemma import GemmaModel
from workers.engine.models.gemma_config import GemmaConfig

__all__ = ["GemmaConfig", "GemmaModel", "model_config"]

_READERS: dict[str, Callable[[Json], GemmaConfig]] = {
    **dict.fromkeys(gemma3_config.MODEL_TYPES, gemma3_config.gemma3_config),
    **dict.fromkeys(gemma4_config.MODEL_TYPES, gemma4_config.gemma4_config),
}


def model_config(snapshot_dir: Path) -> GemmaConfig:
    """The parsed config.json of a snapshot; raises LoadError for what this engine cannot compute faithfully."""
    config = read_config(snapshot_dir)
    model_type = config.get("model_type")
    reader = _READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        known = ", ".join(_READERS)
        raise LoadError(f"config.json: model_type {model_type!r} is not supported (supported: {known})")
    return reader(config)
