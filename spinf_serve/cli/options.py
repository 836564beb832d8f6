"""Command-line parameters made from the settings."""

import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, get_args, get_origin

import typer

from spinf_serve.gpus import machine_refusal
from spinf_serve.refusal import StartRefused
from spinf_serve.settings import SETTINGS, Setting, Settings
from spinf_serve.settings.show import default_text

EXIT_FAILURE = 1


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(settings_flags, **own)` one parameter per setting, MODEL last of the positional ones.

    The command receives what the user gave as a dict (setting name → value, None = not given), to be merged by
    `load_or_exit`.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "flags"]
    parameters = [*own, *(_parameter(setting) for setting in SETTINGS.values())]

    def wrapper(**arguments: Any) -> None:
        # A flag that was not given at all comes as None, a repeatable one as an empty list.
        flags = {name: None if (value := arguments.pop(name)) == [] else value for name in SETTINGS}
        command(flags, **arguments)

    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    # typer reads both: the signature for the order, the annotations for the types.
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _parameter(setting: Setting) -> inspect.Parameter:
    default = default_text(setting)
    help_text = f"{setting.help} ({setting.env}{', default ' + default if default else ''})"
    kind: Any
    if setting.flag is None:
        kind = typer.Argument(metavar=f"[{setting.name.upper()}]", help=help_text, show_default=False)
    else:
        kind = typer.Option(*_spellings(setting), help=help_text, show_default=False)
    annotation: Any = Annotated[_plain_type(setting) | None, kind]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _spellings(setting: Setting) -> list[str]:
    assert setting.flag is not None
    if _plain_type(setting) is bool:
        return [f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"]
    return [setting.flag]


def _plain_type(setting: Setting) -> Any:
    """bool, int, float, str or a list of words: what the command line tells apart. The settings check the rest."""
    if setting.is_list:
        return list[str]
    stack = [setting.info.annotation]
    while stack:
        annotation: Any = stack.pop()
        if annotation in (bool, int, float):
            return annotation
        if get_origin(annotation) is Annotated:
            stack.append(get_args(annotation)[0])
        elif get_args(annotation):
            stack += [arg for arg in get_args(annotation) if not isinstance(arg, str)]
    return str


def load_or_exit(flags: dict[str, Any]) -> Settings:
    """All layers merged; a fault is printed and ends the command with 1."""
    try:
        return Settings.load(flags)
    except StartRefused as error:
        fail(str(error))


def fail(*messages: str) -> NoReturn:
    """Print why nothing starts and exit with 1."""
    for message in messages:
        print(f"spinf-serve: {message}", file=sys.stderr)
    raise typer.Exit(EXIT_FAILURE)


def refuse_unstartable(settings: Settings) -> None:
    """Exit with 1 where these settings name something that this version or this machine does not run."""
    if found := settings.refusals():
        fail(*found)
    if reason := machine_refusal(settings.device):
        fail(reason)
