"""Log lines: one event on stderr, with the name of the process. They never contain any part of a prompt, an output or a key.

text   for a person: time, level, process, logger, message
json   for a machine: one object on one line, with ts (RFC 3339, UTC, milliseconds), level, process, logger, message, and exception if one
       was caught

No process waits for whoever reads its log (`baton.cluster.log_writer`).

`telemetry.log_format: auto` is text on a terminal and json elsewhere. Processes that `baton up` starts write text, because people read
those files.
"""

import json
import logging
import os
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType

import grpc

from baton.cluster.config import ConfigError, TelemetryConfig
from baton.cluster.errors import BatonError
from baton.cluster.log_writer import LogWriter, reads_slowly, write_all

# Their messages name files, devices, sizes and our own rules. Any other (a KeyError, a library's own) may quote what it was given.
TOLD = (BatonError, ConfigError, OSError, RuntimeError, AssertionError, ImportError, MemoryError)
WITHHELD = "(its message may quote a request and is not logged)"
_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def setup_logging(config: TelemetryConfig, process: str) -> None:
    terminal = sys.stderr.isatty()
    text = config.log_format == "text" or (config.log_format == "auto" and terminal)
    handler = _handler()
    handler.setFormatter(Text(process) if text else JsonFormatter(process))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)  # a library's warning is a record like any other
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs each failed batch; we log when failures begin and end


def _handler() -> logging.Handler:
    try:
        fd = sys.stderr.fileno()
    except (OSError, ValueError):  # a stand-in without a file
        return logging.StreamHandler(sys.stderr)
    return LogWriter(write_all(os.dup(fd))) if reads_slowly(fd) else logging.StreamHandler(sys.stderr)


class _Discreet(logging.Formatter):
    def formatException(self, ei: _Raised) -> str:
        return "".join(_lines(ei[1], set())).rstrip("\n") if ei[1] is not None else ""


class Text(_Discreet):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {process.replace('%', '%%')} %(name)s: %(message)s", "%H:%M:%S")


class JsonFormatter(_Discreet):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        ts = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        told = {
            "ts": ts,
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


def _lines(error: BaseException, seen: set[int]) -> list[str]:
    """A traceback with its causes, as Python prints it, but for messages that may quote a request."""
    if id(error) in seen:
        return []
    seen.add(id(error))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    above = [*_lines(cause, seen), "\ncaused, or was handled when there came:\n\n"] if cause is not None else []
    inner = [f"  {line}" for each in error.exceptions for line in _lines(each, seen)] if isinstance(error, BaseExceptionGroup) else []
    name = type(error).__qualname__
    told = isinstance(error, TOLD) and not isinstance(error, grpc.RpcError | UnicodeError)
    message = str(error) if told else WITHHELD
    return [*above, "Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__), f"{name}: {message}\n", *inner]
