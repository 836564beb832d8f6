"""Manifests: what can be served. Schema, catalog, names.

`manifests/*.toml` is data: a manifest may describe a model whose family this version does not run yet (`FAMILIES`).
"""

import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

import spinf_serve
from spinf_serve.hub.resolve import head
from spinf_serve.jsonfile import parse
from spinf_serve.refusal import StartRefused

MANIFEST_DIRS_ENV = "SPINF_MANIFEST_DIRS"
DEFAULT_MODEL = "spinf/gemma-4-12b-fp8"
CAPABILITIES = ("score",)
"""What this version does with a model, whatever else the model could do."""

_HUB_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$")]
_Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


class ManifestError(StartRefused):
    """A manifest that breaks the schema, a name claimed twice, or a model that no manifest describes."""


@dataclass(frozen=True, slots=True)
class Family:
    """`model_types`: what config.json calls it. `schemes`: device kind → schemes that this version runs."""

    model_types: tuple[str, ...]
    schemes: dict[str, tuple[str, ...]]


_GEMMA_SCHEMES = {"cpu": ("f32", "bf16"), "cuda": ("fp8s", "fp8", "fp8row", "w8a16", "w8a8", "bf16")}

FAMILIES: dict[str, Family] = {
    "gemma3": Family(("gemma3_text", "gemma3"), _GEMMA_SCHEMES),
    "gemma4": Family(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _GEMMA_SCHEMES),
    "qwen35": Family(("qwen3_5", "qwen3_5_text"), {}),
}
SERVED_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.schemes)


def family_refusal(model: str, family: str) -> str | None:
    """Why a model of this family cannot be run by this version, or None."""
    if family in SERVED_FAMILIES:
        return None
    return f"model {model}: its family {family} is not supported yet (supported: {', '.join(SERVED_FAMILIES)})"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Source(_Table):
    """Where the weights come from: a Hub repository at a pinned commit, or a Python package at a pinned version."""

    repo: Annotated[str, Field(pattern=f"^{_HUB_REPO.pattern}$")] | None = None
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    package: _Name | None = None
    version: _Name | None = None
    format: Literal["safetensors-bf16", "fp8-static", "gptq-int4-g32", "gguf"]

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.repo is None) == (self.package is None):
            raise ValueError("exactly one of repo and package is needed")
        if self.repo is None and self.revision is not None:
            raise ValueError("revision belongs to repo; a package is pinned by version")
        if self.package is None and self.version is not None:
            raise ValueError("version belongs to package; a repo is pinned by revision")
        return self

    @property
    def pinned(self) -> bool:
        return self.revision is not None or self.version is not None


class Quant(_Table):
    """Schemes of engine.md on a GPU: `default` is one of `allowed`, or `auto` for the choice made from the card."""

    default: str = "auto"
    allowed: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="after")
    def _default_allowed(self) -> Self:
        if self.default not in ("auto", *self.allowed):
            raise ValueError(f"default {self.default!r} is not among allowed")
        return self


class DetailTokens(_Table):
    """Tokens of one image by the `detail` of a request."""

    low: _Positive
    auto: _Positive
    high: _Positive


class Image(_Table):
    """How the family cuts an image: `side` pixels a token."""

    scheme: Literal["gemma4", "qwen"]
    side: _Positive
    detail_tokens: DetailTokens


class ManifestLimits(_Table):
    """Packed tokens per pass, and the largest single input."""

    token_budget: _Positive
    max_tokens: _Positive


class Parity(_Table):
    """A fixture and its recorded reference: paths, in the file relative to the manifest's folder."""

    fixture: Annotated[str, Field(min_length=1)]
    reference: Annotated[str, Field(min_length=1)]

    def beside(self, folder: Path) -> "Parity":
        """The same with whole paths."""
        return Parity(fixture=str(folder / self.fixture), reference=str(folder / self.reference))


class Manifest(_Table):
    """One model. `source` is None only for a snapshot directory that the user named."""

    id: _Name
    name: Annotated[str, Field(min_length=1)]
    aliases: Annotated[tuple[_Name, ...], Field(strict=False)] = ()
    base_model: str | None = None
    status: Literal["available", "planned"]
    family: Literal["gemma3", "gemma4", "qwen35"]
    head: Literal["lm_head", "readout"] = "lm_head"
    capabilities: Annotated[tuple[Literal["score", "extract", "generate"], ...], Field(strict=False, min_length=1)]
    prompt_style: Literal["default", "decider"] = "default"
    media: Annotated[tuple[Literal["image", "audio", "video"], ...], Field(strict=False)] = ()
    source: Source | None = None
    quant: Quant | None = None
    image: Image | None = None
    limits: ManifestLimits
    parity: Parity | None = None

    @field_validator("aliases", "capabilities", "media")
    @classmethod
    def _no_repeats(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len({item.casefold() for item in value}) < len(value):
            raise ValueError("an entry is listed twice")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.status == "available" and self.source is not None and not self.source.pinned:
            raise ValueError("an available model needs source.revision (or source.version of a package)")
        if ("image" in self.media or "video" in self.media) != (self.image is not None):
            raise ValueError("[image] goes with the media kinds image and video")
        return self

    def schemes(self, device: str) -> tuple[str, ...]:
        """What `quant` may be on this device, besides auto; on a GPU the manifest's own list counts too."""
        kind = device.partition(":")[0]
        schemes = FAMILIES[self.family].schemes.get(kind, ())
        listed = self.quant.allowed if self.quant is not None and kind == "cuda" else schemes
        return tuple(scheme for scheme in schemes if scheme in listed)

    def names(self) -> set[str]:
        """The id and the aliases, folded: names are compared without case."""
        return {self.id.casefold(), *(alias.casefold() for alias in self.aliases)}


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What the user's MODEL and `--model-dir` mean: a manifest, a local snapshot if one was named, the name used.

    `notes`: what the log should say about how it was found.
    """

    manifest: Manifest
    directory: Path | None
    requested: str
    notes: tuple[str, ...] = ()


def builtin_dir() -> Path:
    """The shipped manifests: inside the package in a wheel, `manifests/` at the top of a checkout."""
    package = Path(spinf_serve.__file__).resolve().parent
    shipped = package / "_manifests"
    return shipped if shipped.is_dir() else package.parent / "manifests"


def load_manifest(path: Path) -> Manifest:
    """Read and validate one file. Raises `ManifestError` naming file, table and key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ManifestError(f"manifest {path}: {error}") from None
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "(whole file)"
        raise ManifestError(f"manifest {path}: {where}: {first['msg']}") from None
    if manifest.source is None:
        raise ManifestError(f"manifest {path}: source: Field required")
    if manifest.parity is not None:
        return manifest.model_copy(update={"parity": manifest.parity.beside(path.absolute().parent)})
    return manifest


def user_path(text: str) -> Path:
    """A path with ~ for the home directory; without one (a container's odd user id) the ~ stays, and is not found."""
    return Path(os.path.expanduser(text))


def extra_dirs_from_env() -> list[Path]:
    """The directories of SPINF_MANIFEST_DIRS, separated by colons or commas."""
    return [user_path(part) for part in re.split(r"[:,]", os.environ.get(MANIFEST_DIRS_ENV, "")) if part]


class Catalog:
    """All manifests, by name. Build it with `load`."""

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self.manifests = tuple(manifests)
        self._by_name: dict[str, Manifest] = {}
        for manifest in self.manifests:
            for name in manifest.names():
                if (other := self._by_name.setdefault(name, manifest)) is not manifest:
                    raise ManifestError(f"the name {name!r} is claimed by two manifests: {other.id} and {manifest.id}")

    @classmethod
    def load(cls, extra_dirs: Iterable[Path] | None = None) -> Self:
        """The built-in manifests and those of `extra_dirs` (default: SPINF_MANIFEST_DIRS), which override by id.

        Raises `ManifestError`: a bad file, a missing directory, a name claimed twice.
        """
        merged = {manifest.id.casefold(): manifest for manifest in _load_dir(builtin_dir())}
        extra: dict[str, Manifest] = {}
        for directory in extra_dirs_from_env() if extra_dirs is None else extra_dirs:
            for manifest in _load_dir(directory):
                if manifest.id.casefold() in extra:
                    raise ManifestError(f"{directory}: a second manifest with the id {manifest.id!r}")
                extra[manifest.id.casefold()] = manifest
        return cls((merged | extra).values())

    def resolve(self, model: str, model_dir: str | None = None) -> ModelChoice:
        """Find what MODEL names: an id or alias, a Hub repository, or a local snapshot directory, in this order.

        A Hub repository that no manifest describes is asked for its head and its config.json. Raises `StartRefused` for
        a name that means nothing, and for a directory or repository that cannot be served.
        """
        directory = None if model_dir is None else user_path(model_dir).absolute()
        manifest = self._by_name.get(model.casefold()) or self._by_repo(model)
        if manifest is not None:
            return ModelChoice(manifest, directory, model)
        local = user_path(model)
        if local.is_dir():
            if directory is not None:
                raise ManifestError(f"MODEL {model!r} is a directory already: leave out --model-dir")
            local = local.absolute()
            return ModelChoice(synthesize(local.resolve().name or "model", local), local, model)
        if not _HUB_REPO.fullmatch(model):
            raise ManifestError(
                f"unknown model {model!r}: neither a directory nor a known name "
                f"({'; '.join(sorted(' or '.join((m.id, *m.aliases)) for m in self.manifests))})"
            )
        if directory is None:
            found = head(model)
            return ModelChoice(synthesize(model, found.directory, found.revision), None, model, (found.note,))
        return ModelChoice(synthesize(model, directory), directory, model)

    def names_of(self, model: str) -> set[str]:
        """Every name of the model that a name means, folded; of an unknown model this one name."""
        manifest = self._by_name.get(model.casefold())
        return {model.casefold()} if manifest is None else manifest.names()

    def _by_repo(self, model: str) -> Manifest | None:
        found = [m for m in self.manifests if m.source and (m.source.repo or "").casefold() == model.casefold()]
        if len(found) > 1:
            raise ManifestError(f"several manifests use the repository {model!r}: name one of {[m.id for m in found]}")
        return found[0] if found else None


def _load_dir(directory: Path) -> list[Manifest]:
    if not directory.is_dir():
        raise ManifestError(f"no such directory of manifests: {directory}")
    manifests = [load_manifest(path) for path in sorted(directory.glob("*.toml"))]
    if len({manifest.id.casefold() for manifest in manifests}) < len(manifests):
        raise ManifestError(f"{directory}: two manifests with one id")
    return manifests


def read_model_config(directory: Path) -> dict[str, Any]:
    """config.json of a snapshot. Raises `ManifestError` where there is none, or it is no JSON object."""
    path = directory / "config.json"
    try:
        config = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ManifestError(f"no readable config.json in {directory}: {error}") from None
    if not isinstance(config, dict):
        raise ManifestError(f"{path}: not a JSON object")
    return config


def family_of(config: dict[str, Any], where: str) -> str:
    """The family that a config.json's `model_type` names. Raises `ManifestError` for one that is not served."""
    model_type = config.get("model_type")
    family = next((name for name, entry in FAMILIES.items() if model_type in entry.model_types), None)
    if family is None or family not in SERVED_FAMILIES:
        served = ", ".join(t for name in SERVED_FAMILIES for t in FAMILIES[name].model_types)
        raise ManifestError(f"{where}: model_type {model_type!r} is not supported yet; supported: {served}")
    return family


def synthesize(model_id: str, directory: Path, hub_revision: str | None = None) -> Manifest:
    """The manifest of a snapshot directory that has none: the family from config.json, the usual limits.

    With `hub_revision` it is the Hub repository `model_id` at that commit, of which `directory` may hold no more than
    config.json.
    """
    config = read_model_config(directory)
    family = family_of(config, model_id if hub_revision else str(directory))
    return Manifest(
        id=re.sub(r"\s+", "-", model_id)[-200:],
        name=model_id,
        status="available",
        family=family,  # type: ignore[arg-type]  # a key of FAMILIES
        capabilities=("score",),
        source=Source(repo=model_id, revision=hub_revision, format=_format_of(config)) if hub_revision else None,
        limits=ManifestLimits(token_budget=16_384, max_tokens=min(65_536, trained_positions(config) or 65_536)),
    )


def _format_of(config: dict[str, Any]) -> Literal["safetensors-bf16", "fp8-static", "gptq-int4-g32"]:
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "compressed-tensors":
        return "fp8-static"
    return "gptq-int4-g32" if method == "gptq" else "safetensors-bf16"


def trained_positions(config: dict[str, Any]) -> int | None:
    """How many positions config.json says that the model was made for; None where it does not."""
    text_config = config.get("text_config")
    positions = (text_config if isinstance(text_config, dict) else config).get("max_position_embeddings")
    return positions if type(positions) is int and positions > 1 else None
