"""The command line: `spinf-serve COMMAND`. One file per command; typer reads the options from the settings."""

from typing import Annotated

import typer

from spinf_serve import __version__
from spinf_serve.cli import packs
from spinf_serve.cli.calibrate import calibrate
from spinf_serve.cli.parity import parity
from spinf_serve.cli.quantize import quantize
from spinf_serve.cli.score import score
from spinf_serve.cli.selfcheck import selfcheck
from spinf_serve.cli.serve import serve

app = typer.Typer(
    name="spinf-serve",
    help="Read a content once, answer hundreds of fixed-choice questions about it.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: complete in any width, and in a pipe
    pretty_exceptions_enable=False,  # its tracebacks print local variables, tokens among them
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(score)
app.add_typer(packs.app, name="packs")
app.command()(parity)
app.command()(calibrate)
app.command()(quantize)
app.command()(selfcheck)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"spinf-serve {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Read a content once, answer hundreds of fixed-choice questions about it."""
