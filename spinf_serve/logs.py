"""Logging of every process: one line per event on standard error, text or JSON. Never content, options or tokens."""

import json
import logging
import os
import sys
import time
import traceback
from types import TracebackType
from typing import Any

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


def setup(process: str, log_format: str, *, hide_messages: bool = False) -> None:
    """Send everything from INFO up to standard error. In each process once it knows the format; may be called again."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(process, hide_messages))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    # A reader of the log that went away must not turn into more output.
    logging.raiseExceptions = False
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
