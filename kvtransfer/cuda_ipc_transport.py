"""Moves blocks from the memory of one GPU process to that of another on the same machine. The reader maps the peer's pool (CUDA IPC) and
copies with a kernel of its own: the peer's processor and the host's memory have no part in it.

UCX, below NIXL, reads so only where it finds NVLinks. Elsewhere it sends such bytes over TCP: 0.5 GB/s on a single H200, and 100 GB/s with
UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on, where this kernel copies 1,500.

A mapping of a dead process's memory must not be read: nobody says what it holds, or that reading it does not break this process's device,
too. So every process holds a lock on a file in /dev/shm, which the kernel drops with the process, and a reader looks at it before and
after each copy.
"""

import fcntl
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvtransfer.transport import ReadPending, Registered, Route, check_blocks, seal, transfer_failed, unseal

POLL_S = 0.0001
READ_BYTES = 256 << 20  # copied in the time that it takes to begin a few copies
CLOSE_TIMEOUT_S = 5.0
MAGIC = b"baton-cuda-ipc/1"
HEAD = struct.Struct("<QQ16s")  # blocks, bytes of a block, name of the presence
SHARED = Path("/dev/shm")
PREFIX = "baton-kv-"


class SharedDeviceMemory(Registered, Protocol):
    """A pool on a device: `baton.engine.gpu.pool.DevicePool`."""

    def share(self) -> bytes:
        """What another process on this machine gives to `open`."""
        ...

    def open(self, shared: bytes) -> Any:
        """A peer's pool, mapped until the last reference to it is gone. Raises an Exception if it cannot be."""
        ...

    def begin_copy(self, peer: Any, remote: Sequence[int], local: Sequence[int]) -> Callable[[], bool]:
        """Begins to copy `remote[i]` of an opened pool to `local[i]` of this one. The answer tells whether the copy has ended, and raises
        an Exception if it has failed: then no more bytes land."""
        ...


@dataclass(frozen=True, slots=True)
class _Address:
    num_blocks: int
    block_bytes: int
    presence: bytes
    shared: bytes

    def pack(self) -> bytes:
        return seal(MAGIC, HEAD.pack(self.num_blocks, self.block_bytes, self.presence) + self.shared)

    @classmethod
    def parse(cls, data: bytes) -> "_Address":
        """Raises BatonError(TRANSFER_FAILED) for data that `pack` did not make: the driver trusts its input."""
        rest = unseal(MAGIC, data, HEAD.size, "cuda_ipc")
        num_blocks, block_bytes, presence = HEAD.unpack_from(rest)
        return cls(num_blocks, block_bytes, presence, rest[HEAD.size :])


class Presence:
    """A locked file that says that this process lives and serves."""

    def __init__(self) -> None:
        for left in SHARED.glob(f"{PREFIX}*"):  # by processes that were killed
            with suppress(OSError, ValueError):
                watch = Watch(bytes.fromhex(left.name.removeprefix(PREFIX)))
                watch.is_there()
                watch.end()
        self.name = secrets.token_bytes(16)
        self._path = _path(self.name)
        unlocked = self._path.with_name(f".{self._path.name}")
        self._file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        unlocked.rename(self._path)  # only now can it be found

    def end(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)


class Watch:
    """A peer's presence, as another process sees it. Raises OSError if there is none."""

    def __init__(self, name: bytes) -> None:
        self._path = _path(name)
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def is_there(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        self._path.unlink(missing_ok=True)  # nobody else does, after a kill
        return False

    def end(self) -> None:
        os.close(self._file)


def _path(name: bytes) -> Path:
    return SHARED / f"{PREFIX}{name.hex()}"


@dataclass(frozen=True, slots=True)
class _Link:
    address: bytes
    num_blocks: int
    pool: Any  # the peer's, mapped
    watch: Watch


class CudaIpcTransport:
    """Raises BatonError(TRANSFER_FAILED) if the driver does not share this pool's memory."""

    name = "cuda_ipc"

    def __init__(self, pool: SharedDeviceMemory) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._copies: list[Callable[[], bool]] = []  # under way
        self._closed = False
        try:
            shared = pool.share()
            self._presence = Presence()
        except Exception as error:
            raise transfer_failed(f"the memory of this device cannot be shared: {error}") from error
        self._address = _Address(pool.region.blocks, pool.layout.block_bytes, self._presence.name, shared).pack()

    def address(self) -> bytes:
        return self._address

    def backend_detail(self) -> str:
        with self._lock:
            links = [f"{peer}: mapped" for peer in self._links]
        return "; ".join(["CUDA IPC: copied in memory by the reader's GPU", *links])

    def connect(self, peer: str, address: bytes) -> None:
        told = _Address.parse(address)
        if told.block_bytes != self._pool.layout.block_bytes:
            raise transfer_failed(f"blocks have {told.block_bytes} bytes at {peer}, {self._pool.layout.block_bytes} here")
        with self._lock:
            self._require_open()
            known = self._links.get(peer)
            if known is not None and known.address == address:
                return
            self._drop(peer)
            self._links[peer] = self._open(peer, address, told)

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._lock:
            self._require_open()
            link = self._links.get(peer)
            if link is None:
                raise transfer_failed(f"not connected to {peer}")
            check_blocks(remote, link.num_blocks, local, self._pool.region.blocks)
            self._require_alive(peer, link)
            if not remote:
                return
            try:
                ended = self._pool.begin_copy(link.pool, remote, local)
            except Exception as error:
                raise transfer_failed(f"reading from {peer}: {error}") from error
            self._copies.append(ended)
        try:
            while not ended():
                if time.monotonic() >= deadline:
                    raise ReadPending(f"reading from {peer}: timed out; bytes may still land", lambda: self._settled(ended))
                time.sleep(POLL_S)
        except ReadPending:
            raise
        except Exception as error:
            self._forget(ended)
            raise transfer_failed(f"reading from {peer}: {error}") from error
        self._forget(ended)
        with self._lock:
            if self._links.get(peer) is link:
                self._require_alive(peer, link)

    def route(self, peer: str) -> Route:
        return Route("cuda_ipc", through_host=False, read_bytes=READ_BYTES)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self._drop(peer)

    def close(self) -> None:
        """Waits for copies under way: a device ends them by itself, unless it hangs."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._presence.end()
            for peer in list(self._links):
                self._drop(peer)
            copies = list(self._copies)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while any(not self._settled(ended) for ended in copies) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _settled(self, ended: Callable[[], bool]) -> bool:
        try:
            done = ended()
        except Exception:
            done = True  # the device has failed: it copies nothing more
        if done:
            self._forget(ended)
        return done

    def _forget(self, ended: Callable[[], bool]) -> None:
        with self._lock:
            if ended in self._copies:
                self._copies.remove(ended)

    # Callers of the methods below hold the lock.

    def _open(self, peer: str, address: bytes, told: _Address) -> _Link:
        try:
            watch = Watch(told.presence)
        except OSError:
            raise transfer_failed(f"{peer} does not live on this machine, or does not share its {SHARED}") from None
        try:
            if not watch.is_there():
                raise ProcessLookupError("its process has ended")
            return _Link(address, told.num_blocks, self._pool.open(told.shared), watch)
        except Exception as error:
            watch.end()
            raise transfer_failed(f"the memory of {peer} cannot be mapped: {type(error).__name__}: {error}") from error

    def _require_alive(self, peer: str, link: _Link) -> None:
        if not link.watch.is_there():
            self._drop(peer)
            raise transfer_failed(f"reading from {peer}: its process has ended")

    def _drop(self, peer: str) -> None:
        if (link := self._links.pop(peer, None)) is not None:
            link.watch.end()

    def _require_open(self) -> None:
        if self._closed:
            raise transfer_failed("the transport is closed")
