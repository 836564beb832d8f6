"""The one settings object: flags → SPINF_* environment → TOML file → the model's manifest → defaults.

It lives in the supervisor; each process gets its frozen slice (`spinf_serve.config`) in the handshake.
"""

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Any, Self, cast

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from spinf_serve.config import EngineConfig, FrontendConfig, Limits, PreprocessConfig, ServedModel
from spinf_serve.manifests import (
    Catalog,
    ModelChoice,
    family_refusal,
    read_model_config,
    trained_positions,
)
from spinf_serve.packs.catalog import PackSettings
from spinf_serve.settings.fields import SETTINGS, Declarations, Setting
from spinf_serve.settings.layers import EnvironmentLayer, FileLayer, ManifestLayer, SettingsError, checked, layer

__all__ = ["SETTINGS", "Setting", "Settings", "SettingsError"]


class Settings(Declarations):
    """Effective settings. `origins` says for each setting that is not a default where its value came from."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    origins: dict[str, str] = Field(default_factory=dict, repr=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The layers, highest first."""
        return init_settings, EnvironmentLayer(cls), FileLayer(cls), ManifestLayer(cls)

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None, *, keywords: bool = False) -> Self:
        """Merge all layers under `flags` (setting name → value; None = not given).

        `keywords`: they are arguments of a Python call, which errors and origins then say. Raises `StartRefused`.
        """
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for name, value in (flags or {}).items():
            if value is not None:
                setting = SETTINGS[name]
                origins[name] = f"argument {name}" if keywords else f"flag {setting.flag or 'MODEL'}"
                values[name] = checked(setting, value, name if keywords else setting.flag or "MODEL")
        return cls(**layer(values, origins))

    def choice(self) -> ModelChoice:
        """The manifest (and directory) that MODEL and --model-dir mean."""
        return Catalog.load().resolve(self.model, self.model_dir)

    def limits(self) -> Limits:
        """The public limits of api.md."""
        return cast(Limits, self._slice(Limits))

    def engine_config(self, model: ServedModel) -> EngineConfig:
        """The engine's slice."""
        return cast(EngineConfig, self._slice(EngineConfig, model=model))

    def preprocess_config(self, model: ServedModel) -> PreprocessConfig:
        """The preprocess workers' slice."""
        return cast(PreprocessConfig, self._slice(PreprocessConfig, model=model, limits=self.limits()))

    def frontend_config(self, model: ServedModel) -> FrontendConfig:
        """The frontend's slice: the only one with the tokens."""
        return cast(FrontendConfig, self._slice(FrontendConfig, model=model, limits=self.limits()))

    def pack_settings(self, model: ServedModel) -> PackSettings:
        """Which pack sources to read, and for which model."""
        return PackSettings(
            models=(model.id, *model.aliases, model.requested),
            sources=self.packs,
            official=self.official_packs,
            allowed_namespaces=self.packs_allow_namespace,
            refresh=self.packs_refresh,
        )

    def _slice(self, slice_type: type, **given: Any) -> Any:
        names = {field.name for field in dataclasses.fields(slice_type)} & SETTINGS.keys() - given.keys()
        return slice_type(**given, **{name: getattr(self, name) for name in names})

    def refusals(self) -> list[str]:
        """Why these settings cannot be started with, one sentence each; empty when they can."""
        manifest = self.choice().manifest
        if reason := family_refusal(self.model, manifest.family):
            return [f"{reason}; to try the server: spinf-serve serve demo --device cpu"]
        schemes = manifest.schemes(self.device)
        if self.quant not in ("auto", *schemes):
            return [f"--quant {self.quant}: not available on {self.device}; available: {', '.join(schemes)} (or auto)"]
        return []

    def warnings(self) -> list[str]:
        """What a server's log should say at start, one sentence each."""
        found = []
        directory = self.choice().directory
        positions = trained_positions(read_model_config(directory)) if directory else None
        if positions is not None and self.max_tokens > positions:
            found.append(f"max_tokens {self.max_tokens} is over the {positions} positions that the model was made for")
        if self.max_content_tokens >= self.max_tokens:
            found.append(
                f"max_content_tokens {self.max_content_tokens} is not below max_tokens {self.max_tokens}: "
                "a content and its longest question must fit max_tokens together"
            )
        if self.token is None and self.trusted_token is None and not is_loopback(self.host):
            found.append(f"no token is set and {self.host} is not a loopback address: anyone who reaches it may call")
        return found


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine only. A name other than localhost counts as outside: it may resolve anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
