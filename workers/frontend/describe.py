"""Bodies of GET /v1/models and GET /v0/info. Plain functions."""

import dataclasses
from typing import Any

from spinf_serve import __version__
from spinf_serve.config import FrontendConfig
from spinf_serve.wire.frontend import Serving
from workers.frontend.state import boot_of

_STATUS = {"loading": "loading", "ready": "available", "restarting": "loading", "failed": "error"}


def models(config: FrontendConfig, serving: Serving) -> dict[str, Any]:
    """The one model, under both keys that clients read. `batch_invariant` is null until the engine knows its scheme."""
    model = config.model
    entry = {
        "id": model.id,
        "object": "model",
        "name": model.name,
        "status": _STATUS[serving.phase],
        "base_model": model.base_model,
        "aliases": list(model.aliases),
        "family": model.family,
        "capabilities": list(model.capabilities),
        "media": list(model.media),
        "limits": {
            **dataclasses.asdict(config.limits),
            "max_body_bytes": config.max_body_bytes,
            "queue": config.queue,
        },
        "features": {
            "media": list(model.media),
            "extraction": "extract" in model.capabilities,
            "generation": "generate" in model.capabilities,
        },
        "batch_invariant": serving.info.batch_invariant if serving.info else None,
    }
    return {"object": "list", "data": [entry], "models": [entry]}


def info(config: FrontendConfig, serving: Serving) -> dict[str, Any]:
    """What produces the scores; fields that only the engine knows are null until it was ready once."""
    found = serving.info
    return {
        "engine": "spinf-serve",
        "version": __version__,
        "model": config.model.id,
        "revision": serving.revision,
        "family": config.model.family,
        "scheme": found and found.scheme,
        "system_fingerprint": found and found.fingerprint,
        "batch_invariant": found and found.batch_invariant,
        "token_budget": found and found.token_budget,
        "max_tokens": found and found.max_tokens,
        "vocab_size": found and found.vocab_size,
        "gpu": {"name": found and found.device_name, "compute_capability": found and found.compute_capability},
        "versions": found and found.versions,
        "boot": found and boot_of(found),
    }
