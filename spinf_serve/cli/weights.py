"""What the commands that work on checkpoints share."""

import sys
from pathlib import Path

from spinf_serve import snapshots
from spinf_serve.cli.options import fail
from spinf_serve.completeness import check_snapshot
from spinf_serve.extras import missing_engine_packages
from spinf_serve.manifests import Catalog


def need_engine() -> None:
    """Exit with 1 where packages are missing that read weights."""
    if missing := missing_engine_packages():
        fail(f"{', '.join(missing)} not installed: pip install 'spinf-serve[server]'")


def snapshot_of(model: str) -> tuple[Path, str]:
    """The complete snapshot that MODEL means, and its name: the repository, the package, or the directory's own name.

    Raises `StartRefused`.
    """
    choice = Catalog.load().resolve(model)
    if choice.directory is not None:
        check_snapshot(choice.directory)
        return choice.directory, choice.directory.resolve().name
    served = snapshots.resolve(choice, on_progress=lambda message: print(message, file=sys.stderr))
    source = choice.manifest.source
    return Path(served.snapshot_dir), (source and (source.repo or source.package)) or served.id
