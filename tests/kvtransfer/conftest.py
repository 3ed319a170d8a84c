"""Peers in other processes, and the transport under test."""

import atexit
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import authority
import numpy as np
import pytest

HERE = Path(__file__).parent
SENTINEL = 0xA5
T = TypeVar("T")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


program = _load(HERE / "peer.py")


class Nursery:
    """A process that runs peer.py, and forks peers."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._line, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
        self._process = subprocess.Popen([sys.executable, str(HERE / "peer.py")], env=environment, stdin=theirs.fileno())
        theirs.close()

    def ask(self, *request: object, pipes: Sequence[int] = ()) -> Any:
        with self._one_at_a_time:
            socket.send_fds(self._line, [json.dumps(request).encode()], list(pipes))
            answer = self._line.recv(1 << 10)
        assert answer, f"the process that forks peers exited with {self._process.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        self._line.close()
        assert self._process.wait(60) == 0


@cache
def nursery() -> Nursery:
    """It is there from the first peer on, until all tests of this process have ended."""
    made = Nursery()
    atexit.register(made.close)
    return made


class Peer:
    """A process that serves as peer.py has it."""

    def __init__(self, kind: str, name: str, *, num_blocks: int = 64, block_kib: int = 4, seed: int = 1, **options: Any) -> None:
        self.name = name
        self.shape = (num_blocks, program.layout(block_kib).block_bytes)
        options |= {"kind": kind, "name": name, "num_blocks": num_blocks, "block_kib": block_kib, "seed": seed}
        stdin, commands = os.pipe()
        answers, stdout = os.pipe()
        self.pid: int = nursery().ask("start", options, dict(os.environ), pipes=(stdin, stdout))
        os.close(stdin)
        os.close(stdout)
        self._commands, self._answers = os.fdopen(commands, "w"), os.fdopen(answers)
        self._status: int | None = None
        self.bytes = program.pattern(seed, *self.shape)
        self.address = bytes.fromhex(self._answer())

    def tell(self, *command: object) -> None:
        self._commands.write(json.dumps(command) + "\n")
        self._commands.flush()

    def ask(self, *command: object) -> Any:
        self.tell(*command)
        return self._answer()

    def fill(self, seed: int) -> None:
        self.ask("fill", seed)
        self.bytes = program.pattern(seed, *self.shape)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        nursery().ask("stopped", self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def ended(self, within_s: float) -> int | None:
        """Its exit status; None if it goes on."""
        if self._status is None:
            self._status = nursery().ask("ended", self.pid, within_s)
        return self._status

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        assert self.ended(60) is not None

    def end(self) -> None:
        self.kill()
        self._commands.close()
        self._answers.close()

    def _answer(self) -> Any:
        line = self._answers.readline()
        assert line, f"peer {self.name} exited with {self.ended(60)}"
        return json.loads(line)


class Reader:
    """A transport in this process, over a pool filled with SENTINEL."""

    def __init__(self, kind: str, name: str, *, num_blocks: int = 64, block_kib: int = 4, **options: Any) -> None:
        self.pool: Any = program.make_pool(kind, program.layout(block_kib), num_blocks)
        self.clear()
        self.transport = program.transport(kind, name, self.pool, **options)

    def clear(self) -> None:
        self.pool.array[:] = SENTINEL

    def connect(self, peer: Peer) -> None:
        self.transport.connect(peer.name, peer.address)

    def read(self, peer: Peer, remote: Sequence[int], local: Sequence[int], timeout: float = 10) -> None:
        self.transport.read(peer.name, list(remote), list(local), timeout)
        if self.transport.route(peer.name).through_host:
            self.pool.take_in(list(local))

    def has(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> bool:
        """Whether exactly these blocks arrived and nothing else changed."""
        rest = np.setdiff1d(np.arange(self.pool.num_blocks), local)
        arrived = np.array_equal(self.pool.array[list(local)], peer.bytes[list(remote)])
        return arrived and bool((self.pool.array[rest] == SENTINEL).all())

    def untouched(self) -> bool:
        return bool((self.pool.array == SENTINEL).all())

    def still(self, seconds: float) -> bool:
        """Whether no byte of the pool changes for this many seconds."""
        before = self.pool.array.copy()
        time.sleep(seconds)
        return np.array_equal(before, self.pool.array)


@pytest.fixture(scope="session", autouse=True)
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For the kind `tls`, in this process and in its peers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_TEST_TLS", str(folder := authority.make(tmp_path_factory.mktemp("kv") / "tls")))
        yield folder


StartPeer = Callable[..., Peer]
MakeReader = Callable[..., Reader]
SharedPeers = Callable[[str], Peer]
SharedReaders = Callable[[str], Reader]


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    peers: list[Peer] = []

    def start(kind: str, name: str = "peer:1", **options: Any) -> Peer:
        peers.append(Peer(kind, name, **options))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


@pytest.fixture
def make_reader() -> Iterator[MakeReader]:
    readers: list[Reader] = []

    def make(kind: str, name: str = "reader:1", **options: Any) -> Reader:
        readers.append(Reader(kind, name, **options))
        return readers[-1]

    yield make
    for reader in readers:
        reader.transport.close()


@pytest.fixture
def make_device() -> Callable[[int], Any]:
    """Makes a `peer.Device` of so many blocks of 4 KiB."""
    return lambda num_blocks: program.Device(program.layout(4), num_blocks)


def _once(make: Callable[[str], T], end: Callable[[T], None]) -> Iterator[Callable[[str], T]]:
    made: dict[str, T] = {}

    def get(kind: str) -> T:
        if kind not in made:
            made[kind] = make(kind)
        return made[kind]

    yield get
    for thing in made.values():
        end(thing)


@pytest.fixture(scope="module")
def shared_peers() -> Iterator[SharedPeers]:
    """One peer of each kind, for tests that do not damage it."""
    yield from _once(lambda kind: Peer(kind, f"shared-{kind}:1"), Peer.end)


@pytest.fixture(scope="module")
def shared_readers() -> Iterator[SharedReaders]:
    """One reader of each kind, for tests that leave it open."""
    yield from _once(lambda kind: Reader(kind, f"shared-reader-{kind}:1"), lambda reader: reader.transport.close())
