"""Why a download failed, in words that say what to do, without tokens or the secrets of an address.

Runs in the download process; httpx and huggingface_hub are imported late.
"""

import errno
import re

_SECRETS = (
    (re.compile(r"(?<=://)[^/@\s]+@"), ""),  # user:password@ of an address
    (re.compile(r"(https?://[^\s?]+)\?[^\s'\"]*"), r"\1"),  # the signature of an address is in its query
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\"]+"), r"\1 ***"),
    (re.compile(r"\bhf_[A-Za-z0-9_]{4,}"), "hf_***"),
)
_tokens: set[str] = set()
_KEPT = "what was downloaded is kept, and the next start goes on from there"


class Refused(Exception):
    """No retry helps. The message is for the person who started the server."""


class CutOff(Exception):
    """The answer ended before the file did; the next try goes on from there."""


def keep_secret(token: str) -> None:
    """Never let this token out, wherever it was read."""
    _tokens.add(token)


def scrub(text: str) -> str:
    """`text` without tokens, passwords and signatures."""
    for token in _tokens:
        text = text.replace(token, "***")
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error, if there is one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    import httpx

    if status := status_of(error):
        return status in (408, 425, 429) or status >= 500
    return isinstance(error, CutOff | httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)


def retry_after(error: BaseException) -> float:
    """Seconds that the Hub asks to wait, at most 60."""
    value = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    return min(60.0, float(value)) if value.isdecimal() else 0.0


def explain(error: BaseException, repo: str, revision: str | None, endpoint: str, cache: str, has_token: bool) -> str:
    """One sentence for `error`: what happened, and what to do."""
    return scrub(_explain(error, repo, revision, endpoint, cache, has_token))


def _explain(error: BaseException, repo: str, revision: str | None, endpoint: str, cache: str, has_token: bool) -> str:
    if isinstance(error, Refused):
        return str(error)
    if status := status_of(error):
        return _explain_status(error, status, repo, revision, endpoint, has_token)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left in {cache} for the weights of {repo}: free some, or set HF_HUB_CACHE to a directory on "
            f"another volume; {_KEPT}"
        )
    if isinstance(error, OSError) and error.strerror is not None:
        what = "directory that takes files of this size" if error.errno == errno.EFBIG else "writable directory"
        return (
            f"the Hub cache cannot be written ({error.strerror}: {error.filename or cache}): set HF_HUB_CACHE or "
            f"HF_HOME to a {what}"
        )
    if is_transient(error):
        return (
            f"the connection to the Hub at {endpoint} fails for {repo} ({_short(error)}): check the network, the proxy "
            f"and HF_ENDPOINT, or give a local snapshot with --model-dir DIR; {_KEPT}"
        )
    return (
        f"{endpoint} answers for {repo} as the Hub does not ({_short(error)}): check HF_ENDPOINT and the proxy, or "
        "give a local snapshot with --model-dir DIR"
    )


def _explain_status(
    error: BaseException, status: int, repo: str, revision: str | None, endpoint: str, has_token: bool
) -> str:
    code = getattr(error, "response").headers.get("X-Error-Code", "")  # noqa: B009 - status_of found it
    if code == "GatedRepo" or status == 403:
        return (
            f"access to {repo} is restricted ({status}): accept its terms at {endpoint}/{repo}, and set HF_TOKEN to a "
            "token of that account that may read it"
        )
    if status == 401 and has_token:
        return (
            f"the Hub does not accept the token for {repo} (401): check HF_TOKEN (or the login of `hf auth login`), "
            "whether that account may read the repository, and whether the repository exists"
        )
    if status == 401:
        return (
            f"the Hub shows no repository {repo} (401): check the name; if it is private or gated, set HF_TOKEN to a "
            "token that may read it"
        )
    if status == 404 and code == "EntryNotFound":
        return (
            f"a file that the Hub lists for {repo} at {revision or 'main'} is not there (404): try later, or give a "
            "local snapshot with --model-dir DIR"
        )
    if status == 404 and (code == "RevisionNotFound" or (code != "RepoNotFound" and revision is not None)):
        return (
            f"{repo} has no revision {revision or 'main'} on the Hub (404): give a local snapshot with --model-dir DIR"
        )
    if status == 404:
        return f"there is no repository {repo} on the Hub (404): check the name; a private one needs HF_TOKEN"
    if is_transient(error):
        return f"the Hub answered {status} for {repo} again and again: try later; {_KEPT}"
    return f"the Hub refused {repo}: it answered {status}"


def _short(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    text = str(error).strip().partition("\n")[0][:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
