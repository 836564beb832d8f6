"""Which of the optional packages are there, without importing them."""

from importlib.util import find_spec

SERVER_MODULES = ("fastapi", "prometheus_client", "safetensors", "tokenizers", "torch", "uvicorn", "zmq")
ENGINE_MODULES = ("safetensors", "tokenizers", "torch")


def missing_server_packages() -> list[str]:
    """Modules of the extra `server` that the server processes import and that are not installed."""
    return [name for name in SERVER_MODULES if find_spec(name) is None]


def missing_engine_packages() -> list[str]:
    """The same for an engine in one's own process."""
    return [name for name in ENGINE_MODULES if find_spec(name) is None]
