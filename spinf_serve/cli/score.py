"""`spinf-serve score REQUEST.json [MODEL]`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from spinf_serve.cli.options import fail, load_or_exit, refuse_unstartable, with_settings
from spinf_serve.progress import for_standard_error
from spinf_serve.protocol.errors import RequestError
from spinf_serve.protocol.ids import new_request_id
from spinf_serve.refusal import StartRefused
from spinf_serve.settings import Settings


@with_settings
def score(
    flags: dict[str, Any],
    request: Annotated[
        str,
        typer.Argument(metavar="REQUEST.json", help="File with one body of POST /v1/score; - reads standard input."),
    ],
) -> None:
    """Score one request without a server and print the response on standard output."""
    settings = load_or_exit(flags)
    if "warmup" not in settings.origins:
        # For a single request a warm-up is only a wait of its own.
        settings = load_or_exit({**flags, "warmup": "none"})
    refuse_unstartable(settings)
    body = _read_request(request)
    request_id = new_request_id()
    try:
        response = _score(settings, body, request_id)
    except RequestError as error:
        print(json.dumps(error.envelope(request_id, rejected=True)), file=sys.stderr)
        raise typer.Exit(1) from None
    except StartRefused as error:
        fail(str(error))
    sys.stdout.buffer.write(response + b"\n")
    sys.stdout.flush()


def _read_request(request: str) -> bytes:
    if request == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(request).read_bytes()
    except OSError as error:
        fail(f"{request}: cannot be read: {error.strerror or error}")


def _score(settings: Settings, body: bytes, request_id: str) -> bytes:
    from spinf_serve.engine_api import Engine  # loads torch

    with Engine.from_settings(settings, on_progress=for_standard_error(), first=body) as engine:
        return engine.score_bytes(body, request_id)
