"""Snapshots: a directory with config.json, tokenizer.json and complete safetensors shards.

Heavy steps (converting the demo model, hashing weights) run here without torch; `resolve` may be called from any
process, by several at once.
"""

import fcntl
import hashlib
import importlib.metadata
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from spinf_serve.completeness import SnapshotError, check_snapshot
from spinf_serve.config import ServedModel
from spinf_serve.hub.cache import revision_of
from spinf_serve.hub.resolve import snapshot
from spinf_serve.manifests import (
    CAPABILITIES,
    ModelChoice,
    family_of,
    family_refusal,
    read_model_config,
    user_path,
)

Progress = Callable[[str], None]
REVISION_FILE = ".revision"
_CHUNK = 32 << 20


def describe(choice: ModelChoice) -> ServedModel:
    """The facts of the model before its snapshot is there: `revision` is the pinned one, `snapshot_dir` is ""."""
    manifest = choice.manifest
    source = manifest.source
    return ServedModel(
        id=manifest.id,
        name=manifest.name,
        aliases=manifest.aliases,
        requested=choice.requested,
        family=manifest.family,
        head=manifest.head,
        capabilities=tuple(c for c in manifest.capabilities if c in CAPABILITIES),
        media=(),
        prompt_style=manifest.prompt_style,
        base_model=manifest.base_model or manifest.id,
        revision=(source.revision or source.version or "") if source else "",
        snapshot_dir="",
    )


def resolve(choice: ModelChoice, on_progress: Progress | None = None) -> ServedModel:
    """Find (for the demo: make) the model's complete snapshot, and say what it is.

    Raises `StartRefused`. The revision is the Hub's commit, or a hash of the content where a directory was named or
    converted: two sets of weights never share a fingerprint.
    """
    progress = on_progress or (lambda _message: None)
    served = describe(choice)
    for note in choice.notes:
        progress(note)
    if choice.directory is not None:
        directory = choice.directory
        shards = check_snapshot(directory)
        _check_family(choice, directory)
        _tell_revision(choice, directory, progress)
        progress(f"hashing the weights in {directory}")
        revision = content_revision(directory, shards)
    elif choice.manifest.source is not None and choice.manifest.source.package is not None:
        directory = package_snapshot(choice, progress)
        revision = (directory / REVISION_FILE).read_text(encoding="ascii")
    else:
        directory, revision = _hub_snapshot(choice, progress)
    return replace(served, revision=revision, snapshot_dir=str(directory.resolve()))


def _hub_snapshot(choice: ModelChoice, progress: Progress) -> tuple[Path, str]:
    """The snapshot of the manifest's repository and its commit. The family is checked before anything is downloaded."""
    manifest = choice.manifest
    source = manifest.source
    if source is None or source.repo is None or source.revision is None:
        raise SnapshotError(f"no weights of {manifest.id} are published: give a local snapshot with --model-dir DIR")
    if reason := family_refusal(manifest.id, manifest.family):
        raise SnapshotError(reason)
    directory = snapshot(source.repo, source.revision, lambda found: _check_family(choice, found), progress)
    return directory, source.revision


def _check_family(choice: ModelChoice, directory: Path) -> None:
    family = family_of(read_model_config(directory), str(directory))
    if family != choice.manifest.family:
        raise SnapshotError(
            f"{directory} holds a {family} model, {choice.manifest.id} is {choice.manifest.family}: "
            "to serve the directory as it is, give it as MODEL"
        )


def _tell_revision(choice: ModelChoice, directory: Path, progress: Progress) -> None:
    """Log that a named directory stands in for the pinned revision."""
    source = choice.manifest.source
    if source is None or source.repo is None:
        return
    found, _reason = revision_of(directory)
    if found != source.revision:
        what = f"revision {found}" if found else "a snapshot of an unknown revision"
        progress(f"serving {what} from {directory}, not the pinned {source.revision} of {source.repo}")


def content_revision(directory: Path, shards: list[Path]) -> str:
    """`sha256:` + 64 hex digits over the names and full contents of every JSON file and shard of a snapshot."""
    return files_digest([*sorted(directory.glob("*.json")), *shards])


def files_digest(paths: list[Path]) -> str:
    """`sha256:` + 64 hex digits over the names and full contents of files, in this order.

    Blocks of 32 MiB are hashed in parallel (about 0.7 s per GB on two cores), then the list of their digests.
    """
    blocks: list[tuple[Path, int]] = []
    names = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        names.update(f"{path.name}\0{size}\0".encode())
        blocks += [(path, offset) for offset in range(0, size, _CHUNK)]
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        # A few at a time: what is queued in a pool would delay the end of a process that is told to stop.
        for few in itertools.batched(blocks, 4 * workers):
            for digest in pool.map(_block_digest, few):
                names.update(digest)
    return f"sha256:{names.hexdigest()}"


def _block_digest(block: tuple[Path, int]) -> bytes:
    path, offset = block
    with path.open("rb") as file:
        file.seek(offset)
        return hashlib.sha256(file.read(_CHUNK)).digest()


def cache_dir() -> Path:
    """Where converted snapshots are kept: $XDG_CACHE_HOME/spinf-serve/snapshots, by default under ~/.cache."""
    base = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if str(base).startswith("~"):
        raise SnapshotError("this user has no home directory to keep a snapshot in: set XDG_CACHE_HOME")
    return base / "spinf-serve" / "snapshots"


def package_snapshot(choice: ModelChoice, progress: Progress) -> Path:
    """The snapshot converted from a model package, made on the first call and kept.

    One process converts, under a lock; the others wait for it. The directory appears whole (rename) or not at all.
    """
    source = choice.manifest.source
    assert source is not None
    assert source.package is not None
    version = _installed_version(source.package, source.version)
    parent = cache_dir()
    target = parent / f"{choice.manifest.id}-{version}-{_converter_digest()}"
    if _is_complete(target):
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent / f".{target.name}.lock"):
            if not _is_complete(target):
                progress(f"converting {source.package} {version} to a snapshot in {target} (once)")
                _convert(target, progress)
    except OSError as error:
        raise SnapshotError(
            f"cannot write the snapshot {target} ({error}); set XDG_CACHE_HOME to a writable place"
        ) from None
    return target


def _installed_version(package: str, pinned: str | None) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise SnapshotError(f"the package {package} is not installed: pip install spinf-serve[demo]") from None
    if pinned is not None and version != pinned:
        raise SnapshotError(f"{package} {version} is installed, {pinned} is needed: pip install spinf-serve[demo]")
    return version


def _is_complete(directory: Path) -> bool:
    if not (directory / REVISION_FILE).is_file():
        return False
    try:
        check_snapshot(directory)
    except SnapshotError:
        return False
    return True


def _converter_digest() -> str:
    """A few hex digits over the code that converts: a snapshot made by other code is not reused."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in ("demo.py", "bpe.py"))).hexdigest()[:8]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel drops when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(target: Path, progress: Progress) -> None:
    """Convert beside `target`, hash, then rename. What an interrupted conversion left behind is removed first."""
    for left in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    try:
        _run_conversion(work, progress)
        (work / REVISION_FILE).write_text(content_revision(work, check_snapshot(work)), encoding="ascii")
        if target.exists():  # incomplete, or this process would not be here
            shutil.rmtree(target)
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_conversion(work: Path, progress: Progress) -> None:
    from spinf_serve.demo import convert_demo

    try:
        convert_demo(work, progress)
    except ModuleNotFoundError as error:
        raise SnapshotError(f"the package {error.name} is not installed: pip install spinf-serve[demo]") from None
    except ValueError as error:
        raise SnapshotError(f"the demo model cannot be converted: {error}") from None
