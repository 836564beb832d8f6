"""Downloads a commit's files into the Hub cache, from where an earlier run ended. Runs in the download process."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from spinf_serve.completeness import INDEX, SnapshotError, check_shard, indexed_shards
from spinf_serve.hub.cache import HEAD, check_content, listed_sizes
from spinf_serve.hub.failures import CutOff, Refused
from spinf_serve.hub.remote import Patience, Remote, RemoteFile, wanted_files
from spinf_serve.hub.store import Store
from spinf_serve.progress import size_text

_REPORT_S = 0.2
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Job:
    """What to fetch: everything that belongs to the snapshot, or the files in `only`; `revision` None: the head."""

    repo: str
    revision: str | None
    cache: str
    endpoint: str | None = None  # None: huggingface.co
    only: Sequence[str] = ()
    streams: int = 4  # files at a time
    waits_s: Sequence[float] = (1.0, 2.0, 4.0, 8.0)  # between tries; the count starts anew when bytes arrived


@dataclass(frozen=True, slots=True)
class Report:
    """Where to say what happens: a sentence, and (bytes here, bytes in all).

    `config_here` is called once config.json is in the commit's directory, and returns when the rest is wanted too.
    """

    note: Callable[[str], None]
    moved: Callable[[int, int], None]
    config_here: Callable[[str], None] = lambda _directory: None


class Fetch:
    """One job. Raises `Refused`, and the errors of the network and the disk."""

    def __init__(self, job: Job, report: Report, remote: Remote) -> None:
        self._job = job
        self._report = report
        self._remote = remote
        self._store = Store(Path(job.cache), job.repo)
        self._revision = job.revision or ""
        self._listed: dict[str, int] = {}
        self._total = 0
        self._here: dict[str, int] = {}
        self._reported = 0.0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self) -> str:
        """Fetch the job's files; returns their commit."""
        if not self._revision:
            self._revision = self._remote.head()
            self._store.write_ref(HEAD, self._revision)
        files = [self._sized(self._remote.file(self._revision, name)) for name in self._names()]
        self._count(files)
        small = [file for file in files if not file.name.endswith(".safetensors")]
        for file in sorted(small, key=lambda file: file.name != "config.json"):
            self._fetch(file)
            if file.name == "config.json":
                self._report.config_here(str(self._store.snapshot(self._revision)))
        self._check_index([file.name for file in files])
        self._fetch_together(files[len(small) :])
        self._report.moved(self._total, self._total)
        return self._revision

    def _names(self) -> Iterable[str]:
        if self._job.only:
            return self._job.only
        names, entries = self._remote.listing(self._revision)
        for needed, *others in (("config.json",), ("tokenizer.json",), (INDEX, "model.safetensors")):
            if not {needed, *others} & set(names):
                raise Refused(f"{self._job.repo} at {self._revision} has no {needed}: it cannot be served")
        if entries is not None:
            self._store.write_listing(self._revision, entries)
            self._listed = listed_sizes(self._store.root, self._revision)
        return wanted_files(names)

    def _sized(self, file: RemoteFile) -> RemoteFile:
        """A server that says no length: without one an answer that was cut off looks whole."""
        return file if file.size is not None else replace(file, size=self._listed.get(file.name))

    def _count(self, files: list[RemoteFile]) -> None:
        """Set up the progress, and refuse what the disk has no room for."""
        missing = 0
        for file in files:
            here = self._size_here(file)
            self._total += file.size or 0
            self._here[file.name] = here
            missing += max(0, (file.size or 0) - here)
        free = shutil.disk_usage(_existing(self._store.root)).free
        if missing > free:
            raise Refused(
                f"{size_text(missing)} of {self._job.repo} are still to be downloaded, and {self._job.cache} has "
                f"{size_text(free)} free: free some, or set HF_HUB_CACHE to a directory on another volume"
            )
        here = sum(self._here.values())
        if self._total > here and not self._job.only:
            kept = f", {size_text(here)} of them here already" if 100 * here >= self._total else ""
            size = f"{len(files)} files, {size_text(self._total)}{kept}"
            self._report.note(f"downloading {self._job.repo} at {self._revision}: {size}")

    def _size_here(self, file: RemoteFile) -> int:
        if self._store.shows(self._revision, file.name, file.size) or self._store.has(file.etag, file.size):
            return file.size or 0
        here = self._store.partial_size(file.etag)
        return here if file.size is None or here <= file.size else 0

    def _check_index(self, names: list[str]) -> None:
        """Refuse a repository without one of its shards before the others are downloaded."""
        if INDEX not in names:
            return
        try:
            shards = indexed_shards(self._store.snapshot(self._revision))
        except SnapshotError as error:
            raise Refused(f"{self._job.repo} at {self._revision}: {error}") from None
        if absent := shards.keys() - set(names):
            raise Refused(f"{self._job.repo} at {self._revision} has no {min(absent)}, which its {INDEX} names")

    def _fetch_together(self, files: list[RemoteFile]) -> None:
        """Several at a time, largest first, in threads that end with the process."""
        queue: SimpleQueue[RemoteFile] = SimpleQueue()
        for file in sorted(files, key=lambda file: -(file.size or 0)):
            queue.put(file)
        threads = [
            threading.Thread(target=self._drain, args=(queue,), daemon=True)
            for _ in range(min(self._job.streams, len(files)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _drain(self, queue: "SimpleQueue[RemoteFile]") -> None:
        while self._failure is None:
            try:
                self._fetch(queue.get_nowait())
            except Empty:
                return
            except BaseException as error:
                with self._lock:
                    self._failure = self._failure or error

    # One file

    def _fetch(self, file: RemoteFile) -> None:
        """Make a file of the commit whole: its content under its ETag, then the link that shows it."""
        store = self._store
        if self._is_good(store.snapshot(self._revision) / file.name, file):
            return
        with store.alone(file.etag, lambda: self._report.note(f"waiting for another download of {file.name}")):
            if not self._is_good(store.blob(file.etag), file):
                self._verify(self._complete(file))
                store.keep(file.etag)
            store.link(self._revision, file.name, file.etag)
        self._at(file, file.size or 0)

    def _is_good(self, path: Path, file: RemoteFile) -> bool:
        """Whether the content is here, as long as the Hub says (if it does), and not damaged as far as is seen soon.

        What is no weights is compared with its digest, of weights the header is read.
        """
        try:
            if not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
                return False
            if file.name.endswith(".safetensors"):
                check_shard(path)
            else:
                check_content(path, file.etag)
        except (OSError, SnapshotError):
            return False
        return True

    def _complete(self, file: RemoteFile) -> RemoteFile:
        """Fetch what is missing of a part, with patience as long as something arrives; its length is known then."""
        part = self._store.partial(file.etag)
        part.touch()
        at = furthest = part.stat().st_size
        patience = Patience(self._job.waits_s, self._report.note)
        while file.size is None or at != file.size:
            try:
                file = self._stream(file, part, at)
                at = part.stat().st_size
                if file.size is not None and at < file.size:
                    raise CutOff(f"the answer ended after {at} of {file.size} bytes")
                return file
            except Exception as error:
                at = part.stat().st_size
                if at > furthest:
                    furthest = at
                    patience.reset()
                patience.wait(error, f"the connection broke after {at} bytes of {file.name}")
        return file

    def _stream(self, file: RemoteFile, part: Path, at: int) -> RemoteFile:
        """One request: append its body to the part. The returned file knows its length if the answer says it."""
        from huggingface_hub import get_session, hf_raise_for_status
        from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT

        headers = {**self._remote.headers, "Accept-Encoding": "identity"}
        if at:
            headers["Range"] = f"bytes={at}-"
        with get_session().stream("GET", file.url, headers=headers, timeout=HF_HUB_DOWNLOAD_TIMEOUT) as response:
            if response.status_code == 416:
                self._drop(file)
                raise CutOff(f"{file.name}: what was here is not a part of it")
            hf_raise_for_status(response)
            start, total = _extent(response, at)
            if file.size is None:
                file = replace(file, size=total)
            if start not in (0, at):
                self._drop(file)
                raise Refused(
                    f"for {file.name} of {self._job.repo} the Hub sent other bytes than it was asked for: nothing of "
                    "it is kept; start again, and check the proxy if it stays so"
                )
            if total is not None and total != file.size:
                self._drop(file)
                raise Refused(self._wrong_length(file, total))
            with part.open("r+b") as target:
                target.truncate(start)
                target.seek(start)
                for (
                    chunk
                ) in response.iter_bytes():  # as they come: a size would hold bytes back, and lose them at a cut
                    self._append(file, target, chunk)
        return file

    def _append(self, file: RemoteFile, target: Any, chunk: bytes) -> None:
        if self._failure is not None:
            raise self._failure
        target.write(chunk)
        at = target.tell()
        if file.size is not None and at > file.size:
            self._drop(file)
            raise Refused(self._wrong_length(file, at))
        self._at(file, at)

    def _verify(self, file: RemoteFile) -> None:
        """Check a whole part before it gets a name: the digest that the Hub names it by, and a shard's header."""
        part = self._store.partial(file.etag)
        try:
            check_content(part, file.etag)
            if file.name.endswith(".safetensors"):
                check_shard(part)
        except SnapshotError as error:
            self._drop(file)
            reason = str(error).replace(str(part), file.name)
            raise Refused(
                f"{file.name} of {self._job.repo} arrived damaged and was thrown away: {reason}; start again, and "
                "check the proxy if it stays so"
            ) from None

    def _drop(self, file: RemoteFile) -> None:
        self._store.drop_partial(file.etag)
        self._store.partial(file.etag).touch()
        self._at(file, 0)

    def _wrong_length(self, file: RemoteFile, length: int | None) -> str:
        return (
            f"{file.name} of {self._job.repo} has {file.size} bytes, but the Hub sent {length}: nothing of it is kept; "
            "start again, and check the proxy if it stays so"
        )

    def _at(self, file: RemoteFile, here: int) -> None:
        """Report the bytes of a file that are here, not more often than a reader can follow."""
        now = time.monotonic()
        with self._lock:
            self._here[file.name] = here
            if now - self._reported < _REPORT_S:
                return
            self._reported = now
            done = sum(self._here.values())
        self._report.moved(min(done, self._total), self._total)


def _extent(response: Any, asked: int) -> tuple[int, int | None]:
    """Where in the file a body starts, and the length of the file if the answer says it."""
    headers = response.headers
    if response.status_code == 206:
        found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        if found is None:
            return asked, None
        return int(found[1]), int(found[2]) if found[2] != "*" else None
    length = headers.get("Content-Length", "")
    if headers.get("Content-Encoding", "identity").lower() != "identity" or not length.isdecimal():
        return 0, None
    return 0, int(length)


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())
