"""What the health routes and the door say, from what the supervisor last reported. Plain functions."""

from typing import Any

from spinf_serve.plan import EngineInfo
from spinf_serve.protocol.errors import RequestError
from spinf_serve.wire.frontend import Serving

LOADING_RETRY_S = 5
RESTART_RETRY_S = 5
STOPPING_RETRY_S = 5


def is_ready(serving: Serving) -> bool:
    """Whether traffic should be sent here."""
    return serving.phase == "ready" and not (serving.draining or serving.stopping or serving.degraded)


def boot_of(info: EngineInfo) -> dict[str, Any]:
    """How long the start took, in seconds."""
    return {"load_s": round(info.load_s, 3), "warmup_s": round(info.warmup_s, 3), "compiles": info.compiles}


def readiness(serving: Serving) -> dict[str, Any]:
    """Body of /readyz; status 200 when `ready` is true, else 503."""
    if is_ready(serving) and serving.info is not None:
        return {"ready": True, "boot": boot_of(serving.info)}
    body: dict[str, Any] = {"ready": False}
    if serving.draining or serving.stopping:
        body["draining"] = True
    if serving.error is not None:
        body["error"] = serving.error
    if serving.degraded is not None:
        body["degraded"] = serving.degraded
    return body


def restarting() -> RequestError:
    """503 for calls that an engine took with it, and for new ones until the next is there."""
    return RequestError("model_unavailable", "the engine is being restarted", retry_after=RESTART_RETRY_S)


def stopping() -> RequestError:
    """503 for new calls once a signal came, and for those that the drain limit cuts off."""
    return RequestError("model_unavailable", "the server is stopping", retry_after=STOPPING_RETRY_S)


def refusal(serving: Serving) -> RequestError | None:
    """Why a new call is not taken, or None."""
    if serving.stopping:
        return stopping()
    if serving.phase == "ready":
        return None if serving.degraded is None else restarting()
    if serving.phase == "loading":
        return RequestError("warming_up", "the model is being loaded", retry_after=LOADING_RETRY_S)
    return restarting()
