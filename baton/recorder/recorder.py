"""The recorder of a process: its tapes, and when they become a file: at a failure, on SIGUSR2, and when somebody asks.

recorder.minutes: 0     nothing is followed, so nothing costs anything
a failure               `Stop.witness`: the process cannot go on
SIGUSR2                 a person's, or the launcher's before it kills a process that hangs
`baton record`          through the guarded doors of the routers and, behind them, of the workers
"""

import asyncio
import logging
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from baton.cluster import log_file
from baton.cluster.config import Config
from baton.cluster.config_layers import dump
from baton.cluster.errors import BatonError, Reason, invalid
from baton.recorder.recording import TapeSource, lines

log = logging.getLogger(__name__)
SUFFIX = ".recording.jsonl"
KEPT = 8  # files of one process
SECRET_BYTES = 32
LINES_AT_ONCE = 64  # in one message, made in a thread


class Recorder:
    def __init__(self, config: Config, name: str, role: str, code: str = "") -> None:
        """`name`: of this process. `code`: a digest of the deciding code."""
        self.sources: list[TapeSource] = []
        self.refused = ""  # why nothing is recorded
        self.requests: Callable[[], Iterable[Any]] = tuple  # those that ended, as JSON
        self._config = config
        self._name, self._role = name, role
        self._code = code
        self._busy = threading.Lock()  # one reader at a time

    @property
    def on(self) -> bool:
        return self._config.recorder.minutes > 0

    @property
    def span_s(self) -> float:
        return self._config.recorder.minutes * 60

    @property
    def most_bytes(self) -> int:
        return int(self._config.recorder.mib * 2**20)

    def section(self, why: str, secret: bytes | None = None) -> Iterator[bytes]:
        """The lines of this process. `secret`: of all processes of one file; by default one of its own."""
        head = {
            "process": self._name,
            "role": self._role,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "at": datetime.now(UTC).isoformat(),
            "why": why,
            "code": self._code,
            "off": "" if self.on else "recorder.minutes is 0",
            "refused": self.refused,
            "config": yaml.safe_load(dump(self._config)),  # secrets are masked
        }
        return lines(head, self.requests(), self.sources, secret or secrets.token_bytes(SECRET_BYTES))

    async def stream(self, secret: bytes) -> AsyncGenerator[bytes, None]:
        """Pieces of the section, made in a thread. Raises SATURATED while somebody else reads."""
        if not self._busy.acquire(blocking=False):
            raise BatonError(Reason.SATURATED, f"{self._name} is being recorded already")
        try:
            made = self.section("asked", secret)
            while piece := await asyncio.to_thread(lambda: b"".join(islice(made, LINES_AT_ONCE))):
                yield piece
        finally:
            self._busy.release()

    def dump(self, why: str) -> Path | None:
        """Writes a file of this process, readable by its owner only, and returns it. None: nothing is recorded, or there is no room."""
        if not self.on:
            log.warning("nothing is recorded: recorder.minutes is 0")
            return None
        try:
            with self._busy:
                return self._write(why)
        except Exception as error:  # it is called where something else has failed already
            log.error("the recording cannot be written: %r", error, exc_info=not isinstance(error, OSError))
            return None

    def _write(self, why: str) -> Path:
        folder = self._folder()
        path = folder / f"{self._name}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{why}{SUFFIX}"
        draft, unfinished = tempfile.mkstemp(dir=folder, prefix=f".{self._name}-")
        try:
            with os.fdopen(draft, "wb") as file:
                for line in self.section(why):
                    file.write(line)
            os.replace(unfinished, path)  # a file of this name is whole
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        for old in sorted(folder.glob(f"{self._name}-*{SUFFIX}"))[:-KEPT]:
            with suppress(OSError):
                old.unlink()
        log.warning("recorded: %s", path)
        return path

    def _folder(self) -> Path:
        if (given := self._config.recorder.folder) is not None:
            folder = Path(given)
        elif file := os.environ.get(log_file.VARIABLE):
            folder = Path(file).parent
        else:
            folder = Path(tempfile.gettempdir())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder


def check_secret(secret: bytes) -> None:
    """Raises INVALID_FIELD."""
    if len(secret) != SECRET_BYTES:
        raise invalid("secret", f"must be {SECRET_BYTES} bytes")


def digest_of(modules: Iterable[str]) -> str:
    """The digest of the text of deciding code: what another version has decided may be decided otherwise."""
    digest = blake2b(digest_size=8)
    for name in sorted(modules):
        if (file := import_module(name).__file__) is not None:
            digest.update(name.encode() + b"\0" + Path(file).read_bytes())
    return digest.hexdigest()
