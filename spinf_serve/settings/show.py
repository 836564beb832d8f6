"""`--show-config` and the reference table of the documentation, made from the declarations."""

import json
from typing import Any

from spinf_serve.settings import SETTINGS, Setting, Settings
from spinf_serve.settings.fields import TABLES

MASK = "********"


def toml_value(value: Any) -> str:
    """A setting's value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(str(value), ensure_ascii=False)


def show_config(settings: Settings) -> str:
    """The effective settings as TOML, each with a comment that says where it came from. Secrets are masked."""
    lines = []
    if settings.config is not None:
        lines += [f"# config = {toml_value(settings.config)}  # {settings.origins['config']}", ""]
    for table in TABLES:
        lines.append(f"[{table}]")
        lines += [_line(settings, setting) for setting in SETTINGS.values() if setting.table == table]
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def _line(settings: Settings, setting: Setting) -> str:
    value = getattr(settings, setting.name)
    if value is None:
        return f"# {setting.name} is not set"
    origin = settings.origins.get(setting.name, "default")
    if setting.secret:
        # A comment: whoever saves this output as a settings file must not get the mask for a token.
        return f"# {setting.name} = {toml_value(MASK)}  # {origin}"
    return f"{setting.name} = {toml_value(value)}  # {origin}"


def default_text(setting: Setting) -> str:
    """The default as the help and the documentation show it; "" where there is none."""
    if setting.name == "preprocess_workers":
        return "max(2, min(8, cores - 2))"
    if setting.name in ("token_budget", "max_tokens"):
        return f"manifest, {setting.default}"
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return "" if setting.default in (None, ()) else str(setting.default)


def markdown_table() -> str:
    """Every setting as a Markdown table: flag, environment variable, TOML key, default, meaning."""
    rows = ["| flag | environment | file | default | meaning |", "|---|---|---|---|---|"]
    for setting in SETTINGS.values():
        flag = f"`{setting.flag}`" if setting.flag else "`MODEL`"
        if setting.default is True:
            flag += f", `--no-{(setting.flag or '').removeprefix('--')}`"
        if setting.is_list:
            flag += " (repeatable)"
        default = f"`{text}`" if (text := default_text(setting)) else ""
        rows.append(f"| {flag} | `{setting.env}` | {setting.key or ''} | {default} | {setting.help} |")
    return "\n".join(rows)
