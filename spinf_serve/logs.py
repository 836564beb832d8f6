"""Logging of every process: one line per event on standard error, text or JSON. Never content, options or tokens.

A thread writes. Whoever logs never waits for the reader of standard error: where that one stops reading, lines are
dropped (and counted once it reads again), and the server goes on.
"""

import atexit
import contextlib
import json
import logging
import os
import queue
import threading
import time
import traceback
from types import TracebackType
from typing import Any

STDERR = 2
MAX_LINES = 10_000
"""Waiting to be written."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def facts(**values: Any) -> dict[str, Any]:
    """`extra` of a log call: named values behind the message; None is left out."""
    return {"facts": {name: value for name, value in values.items() if value is not None}}


class _Formatter(logging.Formatter):
    """Shared by both formats. `hide`: tracebacks show places and types, not messages, which may quote a request."""

    def __init__(self, process: str, hide: bool) -> None:
        super().__init__()
        self._process = process
        self._hide = hide

    def formatException(self, ei: ExcInfo) -> str:
        """The traceback of the active exception and its causes."""
        if ei[1] is None:
            return ""
        if not self._hide:
            return "".join(traceback.format_exception(*ei)).rstrip()
        lines: list[str] = []
        error: BaseException | None = ei[1]
        while error is not None and len(lines) < 200:
            frames = traceback.extract_tb(error.__traceback__)
            lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
            lines.append(f"{type(error).__name__} (its message is not logged)")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\n".join(lines)

    def _time(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{whole}.{int(record.msecs):03d}Z"


class TextFormatter(_Formatter):
    """`time LEVEL process[pid] message name=value …`"""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows on its own lines."""
        values = getattr(record, "facts", {})
        tail = "".join(f" {name}={_word(value)}" for name, value in values.items())
        message = _one_line(record.getMessage())
        line = f"{self._time(record)} {record.levelname} {self._process}[{os.getpid()}] {message}{tail}"
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(_Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The object, with the facts as members of their own."""
        entry: dict[str, Any] = {
            "time": self._time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and (trace := self.formatException(record.exc_info)):
            entry["traceback"] = trace
        return json.dumps(entry, default=str)


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _word(value: Any) -> str:
    """A value without spaces as it is, anything else quoted: a caller's request id cannot forge a field."""
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    plain = text and all("!" <= character <= "~" and character not in "\"'\\=" for character in text)
    return text if plain else json.dumps(text)


class _Writer(logging.Handler):
    """Formats in the calling thread, writes in its own."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[bytes | threading.Event] = queue.Queue(MAX_LINES)
        self._dropped = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()
        atexit.register(self.settle)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line; never blocks."""
        self.say(self.format(record))

    def say(self, text: str) -> None:
        """Queue a line as it is."""
        try:
            self._lines.put_nowait(f"{text}\n".encode(errors="backslashreplace"))
        except queue.Full:
            self._dropped += 1

    def settle(self, timeout_s: float = 1.0) -> None:
        """Wait until everything queued so far is written, or nobody reads it."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put(written, timeout=timeout_s)
            written.wait(timeout_s)

    def _run(self) -> None:
        while True:
            item = self._lines.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            dropped, self._dropped = self._dropped, 0
            note = self._note_of(dropped) if dropped else b""
            # Not through sys.stderr, whose lock would be held at the interpreter's end. A reader that left is no error.
            with contextlib.suppress(OSError):
                _write_all(note + item)

    def _note_of(self, dropped: int) -> bytes:
        words = f"{dropped} lines of the log were dropped: nobody read them"
        record = logging.makeLogRecord({"msg": words, "levelno": logging.WARNING, "levelname": "WARNING"})
        return f"{self.format(record)}\n".encode()


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(STDERR, data) :]


_writer: _Writer | None = None


def setup(process: str, log_format: str, *, hide_messages: bool = False) -> None:
    """Send everything from INFO up to standard error. In each process once it knows the format; may be called again."""
    global _writer
    _writer = _writer or _Writer()
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    _writer.setFormatter(formatter(process, hide_messages))
    root = logging.getLogger()
    root.handlers[:] = [_writer]
    root.setLevel(logging.INFO)
    logging.raiseExceptions = False
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def say(text: str) -> None:
    """A plain line for the person who started the server, behind what was logged before it."""
    if _writer is None:
        os.write(STDERR, f"{text}\n".encode(errors="backslashreplace"))
    else:
        _writer.say(text)


def settle() -> None:
    """Wait a moment for what was logged to be written: before an end that runs no exit handlers."""
    if _writer is not None:
        _writer.settle()
