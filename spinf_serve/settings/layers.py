"""The layers under the flags: environment, TOML file, manifest.

Every layer checks its own values before they are merged, so that an error names the place at fault even where a
higher layer overrides the value. Beside the values a layer emits where each came from, in the field `origins`:
pydantic-settings merges both alike, so the origin that survives is that of the value that survives.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

from spinf_serve.manifests import Catalog, user_path
from spinf_serve.refusal import StartRefused
from spinf_serve.settings.fields import SETTINGS, TABLES, Setting


class SettingsError(StartRefused):
    """A setting that cannot be used. The message names the flag, the variable, or file, table and key."""


def checked(setting: Setting, value: Any, where: str, *, strict: bool = False) -> Any:
    """`value` as the setting's type. Raises `SettingsError` that names `where` and never quotes a secret."""
    if value == "":
        raise SettingsError(f"{where}: is empty; leave it out or give a value")
    try:
        return setting.validate(value, strict=strict)
    except ValidationError as error:
        message = error.errors(include_input=False, include_url=False)[0]["msg"].removeprefix("Value error, ")
        shown = "" if setting.secret else f" (got {str(value)[:80]!r})"
        raise SettingsError(f"{where}: {message}{shown}") from None


def layer(values: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    """What a layer hands to pydantic-settings."""
    return {**values, "origins": dict(origins)}


class _Layer(PydanticBaseSettingsSource):
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """One field of the layer, as the base class asks for."""
        return self().get(field_name), field_name, False

    def so_far(self, name: str) -> Any:
        """What the layers above, or the default, say."""
        return self.current_state.get(name, SETTINGS[name].default)


class EnvironmentLayer(_Layer):
    """SPINF_* variables. Unknown ones are ignored, an empty one is an error."""

    def __call__(self) -> dict[str, Any]:
        present = {s.name: s for s in SETTINGS.values() if s.env in os.environ}
        values = {name: checked(s, self._value(s), s.env) for name, s in present.items()}
        return layer(values, {name: f"environment {s.env}" for name, s in present.items()})

    def _value(self, setting: Setting) -> Any:
        """Lists are separated by commas."""
        text = os.environ[setting.env]
        return text.split(",") if setting.is_list and text else text


class FileLayer(_Layer):
    """The TOML file that --config or SPINF_CONFIG names."""

    def __call__(self) -> dict[str, Any]:
        path = self.so_far("config")
        if path is None:
            return {}
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for table, entries in read_toml(path).items():
            if table not in TABLES:
                raise SettingsError(f"{path}: unknown {_kind(entries)} {table!r}; tables: {', '.join(TABLES)}")
            if not isinstance(entries, dict):
                raise SettingsError(f"{path}: {table} must be a table, written [{table}]")
            for key, value in entries.items():
                setting = SETTINGS.get(key)
                if setting is None or setting.table != table:
                    raise SettingsError(f"{path}: [{table}] {key}: unknown key{_hint(setting)}")
                values[key] = checked(setting, value, f"{path}: [{table}] {key}", strict=True)
                origins[key] = f"file {path} [{table}] {key}"
        return layer(values, origins)


class ManifestLayer(_Layer):
    """What the manifest of the chosen model sets: token_budget and max_tokens."""

    def __call__(self) -> dict[str, Any]:
        manifest = Catalog.load().resolve(self.so_far("model"), self.so_far("model_dir")).manifest
        values = manifest.limits.model_dump()
        return layer(values, dict.fromkeys(values, f"manifest {manifest.id}"))


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a settings file. Raises `SettingsError` for an unreadable one."""
    try:
        return tomllib.loads(user_path(str(path)).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file: {error}") from None


def _kind(entries: Any) -> str:
    return "table" if isinstance(entries, dict) else "key (outside any table)"


def _hint(setting: Setting | None) -> str:
    return f"; it belongs to [{setting.table}]" if setting and setting.table else ""
