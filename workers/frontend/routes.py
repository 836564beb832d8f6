"""The fixed table of paths: the first thing that is decided about a request. Plain functions."""

from dataclasses import dataclass

GET = ("GET",)
PACK_PREFIX = "/v1/packs/"
TRUSTED_PREFIX = "/v0/"


@dataclass(frozen=True, slots=True)
class Route:
    """`name` is the label of metrics and logs. `open`: no token is ever needed. `probe`: not logged."""

    name: str
    methods: tuple[str, ...] = GET
    open: bool = False
    probe: bool = False


ROUTES: dict[str, Route] = {
    "/v1/score": Route("score", ("POST",)),
    "/v1/chat/completions": Route("chat", ("POST",)),
    "/v1/models": Route("models"),
    "/v1/packs": Route("packs"),
    "/v0/score": Route("v0_score", ("POST",)),
    "/v0/info": Route("info"),
    "/v0/drain": Route("drain", ("POST", "DELETE")),
    "/healthz": Route("healthz", open=True, probe=True),
    "/readyz": Route("readyz", open=True, probe=True),
    "/livez": Route("livez", open=True, probe=True),
    "/health": Route("health", open=True, probe=True),
    "/ping": Route("ping", open=True, probe=True),
    "/metrics": Route("metrics", open=True, probe=True),
}
PACK = Route("pack")
OTHER = Route("other")
"""Whatever is not in the table, for the metrics."""

SCORING = ("score", "chat", "v0_score")


def find_route(path: str, raw_path: bytes) -> Route | None:
    """The route of an exact path; None is 404. A percent-encoded spelling counts only inside a pack's id."""
    if path.startswith(PACK_PREFIX) and len(path) > len(PACK_PREFIX):
        return PACK
    return None if b"%" in raw_path else ROUTES.get(path)
