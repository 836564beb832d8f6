"""spinf-serve: bulk classification and decisions on one GPU.

The base package is pure Python: importing it loads neither torch nor any server package.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.2"
__all__ = ["Engine", "__version__"]

if TYPE_CHECKING:
    from spinf_serve.engine_api import Engine


def __getattr__(name: str) -> Any:
    # `Engine` pulls in torch when it is built; the import itself stays light, and lazy so that cycles cannot form.
    if name == "Engine":
        from spinf_serve.engine_api import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
