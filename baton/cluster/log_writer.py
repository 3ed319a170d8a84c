"""Writes log lines from a thread of its own, so that whoever logs never waits for a reader.

A terminal that was stopped, or a pipe that nobody empties, makes a write wait for ever, and the event loop with it. Here lines wait
instead, up to MOST_BYTES; more are dropped, and a line says how many when something reads again. Only a file has no reader to wait for.
"""

import contextlib
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable

MOST_BYTES = 1 << 20
FLUSH_S = 1.0  # for what waits at the end of the process


def reads_slowly(fd: int) -> bool:
    """Whether a write to `fd` may have to wait for somebody: a pipe, a socket, a terminal."""
    return not stat.S_ISREG(os.fstat(fd).st_mode)


def write_all(fd: int) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        while data:
            data = data[os.write(fd, data) :]

    return write


class LogWriter(logging.Handler):
    def __init__(self, write: Callable[[bytes], None], most_bytes: int = MOST_BYTES) -> None:
        """`write` may block. Errors of it lose the line."""
        super().__init__()
        self.lost = 0  # lines, since the last one that says so
        self._write = write
        self._most_bytes = most_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._busy = False
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if self._bytes + len(line) > self._most_bytes:
                self.lost += 1
                return
            self._waiting.append(line)
            self._bytes += len(line)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Waits until everything is written, FLUSH_S at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy, FLUSH_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                line, self._busy = self._waiting.popleft(), True
            with contextlib.suppress(OSError):  # else nobody will ever read it
                self._write(line)
            with self._changed:
                self._bytes -= len(line)  # only now: what is being written waits, too
                lost, self.lost = (self.lost, 0) if self.lost and not self._waiting else (0, self.lost)
                if lost:
                    message = f"{lost} log lines were lost: nobody read them in time"
                    told = self._line(logging.LogRecord(__name__, logging.WARNING, "", 0, message, None, None))
                    self._waiting.append(told)
                    self._bytes += len(told)

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode(errors="backslashreplace")
