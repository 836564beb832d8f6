"""Frozen slices of the settings, one for each process, and the facts of the served model.

Every field is a plain msgpack value (str, int, float, bool, None, tuple, dict, nested dataclass): the slices travel in
the handshake. Facts found at run time (a loaded engine's fingerprint, timings) live in `spinf_serve.plan`, never here.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """The public limits of api.md. Tokens, counts, bytes or seconds as the names say."""

    max_content_tokens: int = 4096
    max_query_tokens: int = 256
    max_prompts_per_input: int = 10_000
    max_extractions_per_input: int = 10
    max_processed_tokens: int = 2_000_000
    max_options: int = 1000
    max_option_tokens: int = 5
    max_frames: int = 1024
    max_audio_seconds: int = 600
    max_image_pixels: int = 50_000_000


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served: the manifest's facts and the complete local snapshot.

    `requested` is what the user named on the command line (an id, an alias, a path): clients may name it too.
    """

    id: str
    name: str
    aliases: tuple[str, ...]
    requested: str
    family: str
    head: str  # lm_head | readout
    capabilities: tuple[str, ...]  # of score, extract, generate: what this server does with the model
    media: tuple[str, ...]  # kinds that this server reads for the model
    prompt_style: str  # default | decider
    base_model: str
    revision: str
    snapshot_dir: str  # absolute; config.json, tokenizer.json and *.safetensors; "" while it is not resolved yet


@dataclass(frozen=True, slots=True)
class PackFile:
    """One version of a prompt pack that this server has. `default`: who names no version gets it."""

    id: str
    version: str
    default: bool
    content: bytes  # the file as it stands; b"" while the version is coming soon


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: ServedModel
    device: str = "cuda:0"
    quant: str = "auto"
    token_budget: int = 16_384  # packed tokens per pass
    max_tokens: int = 65_536  # largest single input, content plus longest question, <bos> included
    warmup: str = "full"  # full | short | none
    threads: int = 0  # CPU threads of the engine's products; 0 = every core that the process may use


@dataclass(frozen=True, slots=True)
class PreprocessConfig:
    model: ServedModel
    limits: Limits = field(default_factory=Limits)
    max_tokens: int = 65_536
    max_body_bytes: int = 2 << 20  # bound of a decompressed body
    debug: bool = False
    pack_files: tuple[PackFile, ...] = ()


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    model: ServedModel
    limits: Limits = field(default_factory=Limits)
    host: str = "0.0.0.0"
    port: int = 8000
    token: str | None = None
    trusted_token: str | None = None
    queue: int = 4
    max_body_bytes: int = 2 << 20
    keepalive: float = 75.0
    body_timeout: float = 60.0
    metrics_auth: bool = False
    debug: bool = False
    log_format: str = "text"
