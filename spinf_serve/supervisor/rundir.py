"""The private run directory that holds the processes' sockets: made, found stale, removed.

Its file `supervisor.pid` says which supervisor it belongs to: "<pid> <start time>". The supervisor also holds a lock on
that file while it lives: the lock tells across containers that share a directory, the pid where locks do not work.
"""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from spinf_serve.refusal import StartRefused
from spinf_serve.wire.errors import WireError
from spinf_serve.wire.queues import ipc_address

PREFIX = "spinf-serve-"
OWNER = "supervisor.pid"
CONTROL = "control"
LONGEST_SOCKET = "p4194304"  # the largest pid of a 64-bit Linux
UNCLAIMED_S = 60.0
"""An empty directory is its maker's for this long, then left over from a crash."""


class RunDir:
    """A run directory of this supervisor. `path` is absolute; everything in it is readable by its user alone."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, ipc_dir: str | None) -> "RunDir":
        """A fresh directory under `ipc_dir`, XDG_RUNTIME_DIR or TMPDIR; stale ones beside it are removed.

        Raises StartRefused where `ipc_dir` cannot be used, or nothing can.
        """
        bases = [Path(ipc_dir).expanduser()] if ipc_dir else _default_bases()
        refusals = []
        for base in bases:
            try:
                base = base.resolve()
                if ipc_dir:
                    base.mkdir(mode=0o700, parents=True, exist_ok=True)
                ipc_address(str(base / f"{PREFIX}12345678" / LONGEST_SOCKET))
                clean_stale(base)
                return cls._claim(Path(tempfile.mkdtemp(prefix=PREFIX, dir=base)))
            except (OSError, WireError) as error:
                refusals.append(f"{base}: {error}")
        raise StartRefused(f"no directory for the processes' sockets: {'; '.join(refusals)}")

    @classmethod
    def _claim(cls, path: Path) -> "RunDir":
        fd = os.open(path / OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, f"{os.getpid()} {start_time(os.getpid())}".encode())
        return cls(path, fd)

    @property
    def control(self) -> str:
        """Path of the supervisor's socket file."""
        return str(self.path / CONTROL)

    def remove(self) -> None:
        """Delete the directory and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def _default_bases() -> list[Path]:
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    return [Path(base) for base in dict.fromkeys(candidates) if base and os.path.isdir(base)]


def child_socket(run_dir: Path, role: str, pid: int) -> str:
    """Path of a child's socket file, short: with its directories it must fit a socket address."""
    return str(run_dir / f"{role[0]}{pid}")


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (field 22 of /proc/PID/stat); None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def owner_pid(run_dir: Path) -> int | None:
    """The supervisor that a run directory says it belongs to."""
    try:
        return int((run_dir / OWNER).read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None


def clean_stale(base: Path) -> list[Path]:
    """Remove this user's run directories under `base` whose supervisor is dead; returns them."""
    removed = []
    for path in base.glob(f"{PREFIX}*"):
        try:
            info = path.lstat()
            if path.is_symlink() or not path.is_dir() or info.st_uid != os.getuid():
                continue
            if (path / OWNER).exists():
                if not _is_stale(path):
                    continue
                shutil.rmtree(path, ignore_errors=True)
            elif time.time() - info.st_mtime > UNCLAIMED_S:
                path.rmdir()  # nothing but an empty one can be known to be ours
            else:
                continue
            removed.append(path)
        except OSError:
            continue
    return removed


def _is_stale(path: Path) -> bool:
    fd = os.open(path / OWNER, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pid, started = [*os.read(fd, 100).decode("ascii", "replace").split(), "", ""][:2]
        return pid.isdecimal() and started.isdecimal() and str(start_time(int(pid))) != started
    except OSError:  # somebody holds the lock
        return False
    finally:
        os.close(fd)
