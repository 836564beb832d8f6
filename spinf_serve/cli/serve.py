"""`spinf-serve serve [MODEL]`."""

from typing import Annotated, Any

import typer

from spinf_serve.cli.options import fail, load_or_exit, refuse_unstartable, with_settings
from spinf_serve.extras import missing_server_packages
from spinf_serve.settings.show import show_config as render_config


@with_settings
def serve(
    flags: dict[str, Any],
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the effective settings and where each came from, then exit.")
    ] = False,
) -> None:
    """Serve MODEL over HTTP until a signal stops it."""
    settings = load_or_exit(flags)
    if show_config:
        typer.echo(render_config(settings))
        return
    refuse_unstartable(settings)
    if missing := missing_server_packages():
        fail(f"{', '.join(missing)} not installed: pip install 'spinf-serve[server]'")
    from spinf_serve.supervisor import run

    raise typer.Exit(run(settings))
