"""The settings, each declared once: type and range, place, help and default.

Flag, environment name, TOML key, help text, `--show-config` and the reference table are made from the declaration.
A default that a process slice has too is taken from the slice (`spinf_serve.config`).
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from spinf_serve.config import EngineConfig, FrontendConfig, Limits
from spinf_serve.manifests import DEFAULT_MODEL

INT_MAX = 2**31 - 1
SCHEMES = ("auto", "f32", "bf16", "fp8s", "fp8", "fp8row", "w8a16", "w8a8", "f16", "i8")


@dataclass(frozen=True, slots=True)
class In:
    """Where a setting is given: its TOML table (None: not in the file), and names that differ from the usual ones."""

    table: str | None
    help: str
    env: str | None = None
    argument: bool = False  # the positional MODEL rather than a flag
    secret: bool = False


def default_of(slice_type: type, name: str) -> Any:
    """The default of a slice's field."""
    return next(f.default for f in dataclasses.fields(slice_type) if f.name == name)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(value: str) -> str:
    kind, colon, index = value.partition(":")
    if value == "cpu" or (kind == "cuda" and (not colon or index.isdecimal())):
        return "cuda:0" if value == "cuda" else value
    raise ValueError("expected cpu, cuda or cuda:N")


def _scheme(value: str) -> str:
    if value not in SCHEMES:
        raise ValueError(f"unknown scheme; known: {', '.join(SCHEMES)}")
    return value


def _token(value: str) -> str:
    # Anything else could never match what a client sends after "Bearer ".
    if not all("!" <= character <= "~" for character in value):
        raise ValueError("a token is visible ASCII without spaces")
    return value


def _words(value: Any) -> Any:
    """A list of words as a tuple, for strict validation too."""
    if not isinstance(value, list | tuple):
        raise ValueError("expected a list of words")
    if not all(isinstance(word, str) and word.strip() for word in value):
        raise ValueError("expected words that are not empty")
    return tuple(word.strip() for word in value)


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Count = Annotated[int, Field(ge=1, le=INT_MAX)]
CountOrZero = Annotated[int, Field(ge=0, le=INT_MAX)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Token = Annotated[str, AfterValidator(_token)]


def _limit(name: str) -> Any:
    return default_of(Limits, name)


def _engine(name: str) -> Any:
    return default_of(EngineConfig, name)


def _server(name: str) -> Any:
    return default_of(FrontendConfig, name)


class Declarations(BaseSettings):
    """Every setting. `Settings` adds the layers and the slices."""

    model: Annotated[str, In("engine", "manifest id, alias, Hub repository or snapshot directory", argument=True)] = (
        DEFAULT_MODEL
    )
    device: Annotated[str, AfterValidator(_device), In("engine", "GPU as cuda:N, or cpu")] = _engine("device")
    quant: Annotated[
        str,
        AfterValidator(_scheme),
        In("engine", "scheme of weights and activations; auto: by checkpoint and GPU, on the CPU f32"),
    ] = _engine("quant")
    model_dir: Annotated[str | None, In("engine", "local snapshot directory, instead of the model's own source")] = None
    token_budget: Annotated[Count, In("engine", "packed tokens per forward pass")] = _engine("token_budget")
    max_tokens: Annotated[
        Annotated[int, Field(ge=2, le=INT_MAX)],
        In("engine", "tokens of the largest single input, content plus longest question"),
    ] = _engine("max_tokens")
    warmup: Annotated[
        Literal["full", "short", "none"],
        In("engine", "passes run before ready: full, short (one small, one at the budget) or none"),
    ] = _engine("warmup")
    preprocess_workers: Annotated[
        int, Field(ge=1, le=256), In("engine", "processes that parse and tokenize requests")
    ] = Field(default_factory=lambda: max(2, min(8, usable_cores() - 2)))
    watchdog: Annotated[
        SecondsOrZero,
        In("engine", "seconds a pass may run before the engine counts as stuck and is restarted; 0 = off"),
    ] = 120.0

    host: Annotated[str, In("server", "address to listen on")] = _server("host")
    port: Annotated[int, Field(ge=0, le=65_535), In("server", "TCP port; 0 takes a free one")] = _server("port")
    token: Annotated[
        Token | None, Field(repr=False), In("server", "access token that callers must send", secret=True)
    ] = None
    trusted_token: Annotated[
        Token | None,
        Field(repr=False),
        In("server", "token of trusted callers; an access token too", env="SPINF_ENGINE_TOKEN", secret=True),
    ] = None
    queue: Annotated[CountOrZero, In("server", "requests accepted while one is running; beyond them 429")] = _server(
        "queue"
    )
    max_body_bytes: Annotated[Count, In("server", "bytes of a request body, also after decompression")] = _server(
        "max_body_bytes"
    )
    drain_timeout: Annotated[SecondsOrZero, In("server", "seconds that SIGTERM waits for calls in flight")] = 30.0
    keepalive: Annotated[
        Seconds, In("server", "seconds an idle connection stays open; longer than the proxy in front")
    ] = _server("keepalive")
    body_timeout: Annotated[Seconds, In("server", "seconds for a request body to arrive")] = _server("body_timeout")
    metrics_auth: Annotated[bool, In("server", "/metrics needs the token")] = _server("metrics_auth")
    ipc_dir: Annotated[str | None, In("server", "directory of the processes' sockets; unset: a private one")] = None
    debug: Annotated[bool, In("server", "internal fields in every caller's responses")] = _server("debug")
    log_format: Annotated[Literal["text", "json"], In("server", "log lines as text or json")] = _server("log_format")

    packs: Annotated[
        Words, In("features", "prompt packs: github:OWNER/REPO[@REF][#PATH] or a folder, beside the official ones")
    ] = ()
    official_packs: Annotated[bool, In("features", "load the official prompt packs")] = True
    packs_allow_namespace: Annotated[
        Words, In("features", "namespaces of the official packs that other sources may use too")
    ] = ()
    packs_refresh: Annotated[bool, In("features", "ask again which commit the tag of a pack source names")] = False

    max_content_tokens: Annotated[Count, In("limits", "tokens of one content")] = _limit("max_content_tokens")
    max_query_tokens: Annotated[Count, In("limits", "tokens of one filled template")] = _limit("max_query_tokens")
    max_prompts_per_input: Annotated[Count, In("limits", "filled templates per input")] = _limit(
        "max_prompts_per_input"
    )
    max_extractions_per_input: Annotated[CountOrZero, In("limits", "extraction slots per input")] = _limit(
        "max_extractions_per_input"
    )
    max_processed_tokens: Annotated[Count, In("limits", "tokens that one request may process")] = _limit(
        "max_processed_tokens"
    )
    max_options: Annotated[Count, In("limits", "options of one query")] = _limit("max_options")
    max_option_tokens: Annotated[Count, In("limits", "tokens of one option")] = _limit("max_option_tokens")
    max_frames: Annotated[Count, In("limits", "video frames of one input")] = _limit("max_frames")
    max_audio_seconds: Annotated[Count, In("limits", "seconds of audio of one input")] = _limit("max_audio_seconds")
    max_image_pixels: Annotated[Count, In("limits", "pixels of one image")] = _limit("max_image_pixels")

    config: Annotated[Path | None, In(None, "TOML file with settings")] = None


@dataclass(frozen=True)
class Setting:
    """One declared setting, as documentation, command line and layers see it."""

    name: str
    table: str | None
    env: str
    flag: str | None  # None: the positional MODEL
    help: str
    secret: bool
    info: FieldInfo

    @property
    def key(self) -> str | None:
        """`table.key` in the TOML file."""
        return f"{self.table}.{self.name}" if self.table else None

    @property
    def default(self) -> Any:
        return self.info.get_default(call_default_factory=True)

    @property
    def is_list(self) -> bool:
        """Several values: a repeatable flag, commas in the environment, a list in the file."""
        return isinstance(self.default, tuple)

    @cached_property
    def validate(self) -> Callable[..., Any]:
        """Validate one value: `validate(value, strict=bool)`; raises pydantic's ValidationError."""
        annotation: Any = self.info.annotation
        for extra in self.info.metadata:
            annotation = Annotated[annotation, extra]
        return TypeAdapter(annotation).validate_python


def _setting(name: str, info: FieldInfo) -> Setting:
    place = next(item for item in info.metadata if isinstance(item, In))
    return Setting(
        name=name,
        table=place.table,
        env=place.env or f"SPINF_{name.upper()}",
        flag=None if place.argument else "--" + name.replace("_", "-"),
        help=place.help,
        secret=place.secret,
        info=info,
    )


SETTINGS: dict[str, Setting] = {name: _setting(name, info) for name, info in Declarations.model_fields.items()}
TABLES: tuple[str, ...] = tuple(dict.fromkeys(s.table for s in SETTINGS.values() if s.table))
