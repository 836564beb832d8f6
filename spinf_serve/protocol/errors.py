"""The public error codes: one table maps a code to its HTTP status, and a status to the envelope's type."""

from dataclasses import dataclass
from typing import Any

_STATUS: dict[int, tuple[str, ...]] = {
    400: (
        "invalid_json",
        "invalid_field",
        "unsupported_option",
        "invalid_template",
        "unknown_placeholder",
        "missing_value",
        "too_many_options",
        "duplicate_option",
        "option_too_long",
        "option_boundary",
        "too_many_combinations",
        "too_many_prompts",
        "too_many_extractions",
        "duplicate_id",
        "unknown_query_id",
        "empty_queries",
        "content_too_long",
        "template_too_long",
        "unsupported_content",
        "model_not_served",
        "scoring_required",
        "media_not_supported",
        "media_disabled",
        "invalid_media",
        "extraction_disabled",
        "generation_disabled",
        "reserved_group",
        "unknown_pack",
        "unknown_pack_version",
        "pack_not_available",
        "pack_conflict",
        "pack_media_not_supported",
        "unknown_category",
    ),
    401: ("invalid_token",),
    404: ("not_found",),
    405: ("method_not_allowed",),
    413: ("body_too_large", "request_too_large"),
    429: ("concurrency_limit",),
    500: ("engine_error",),
    503: ("warming_up", "model_unavailable"),
}

STATUS_OF_CODE: dict[str, int] = {code: status for status, codes in _STATUS.items() for code in codes}

TYPE_OF_STATUS: dict[int, str] = {
    400: "invalid_request",
    401: "authentication_error",
    404: "not_found",
    405: "invalid_request",
    413: "invalid_request",
    429: "rate_limited",
    500: "api_error",
    503: "unavailable",
}

MAX_MESSAGE = 500
"""Characters: a message never quotes long input."""


@dataclass(eq=False)
class RequestError(Exception):
    """A request's refusal. `param` is a dotted path into the request, or None; `retry_after` is whole seconds.

    `status` overrides the table only where one code has two statuses (`unknown_pack` and `unknown_pack_version`: 400
    in a request, 404 on download).
    """

    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None
    status: int = 0

    def __post_init__(self) -> None:
        self.status = self.status or STATUS_OF_CODE[self.code]
        if len(self.message) >= MAX_MESSAGE:
            self.message = self.message[: MAX_MESSAGE - 2] + "…"
        super().__init__(self.code, self.message, self.param)

    def envelope(self, request_id: str, *, rejected: bool = False) -> dict[str, Any]:
        """The public error body; `rejected` adds the trusted callers' field (400 and 413 only)."""
        error = {
            "type": TYPE_OF_STATUS.get(self.status, "api_error"),
            "code": self.code,
            "message": self.message,
            "param": self.param,
        }
        body: dict[str, Any] = {"error": error, "request_id": request_id}
        if rejected and self.status in (400, 413):
            body["rejected"] = {"code": self.code, "message": self.message, "param": self.param}
        return body
