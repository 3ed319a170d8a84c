"""Slots of one size in a few large files, and the way in which this disk reads and writes them soonest.

Slots that lie side by side are read or written in one call, through memory of our own that is aligned as direct I/O wants it.
"""

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from baton.tiers.disk_folder import Shape, padded, units_name
from baton.tiers.slots import SlotEntry

PIECE_BYTES = 8 << 20  # of one call, at least one slot
BUFFERS = 4  # kept for the next calls
PROBE_SLOTS, PROBE_S = 8, 0.25
BETTER = 1.25  # how much faster buffered I/O must be: it takes the page cache from others
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Rates(NamedTuple):
    """Bytes per second, written and read back; 0: this disk has no such thing."""

    direct: float
    buffered: float


class SlotRun(NamedTuple):
    """Slots side by side in one file."""

    file: int
    first: int  # slot in it
    members: list[int]  # places in what was asked for


class Files:
    """Thread-safe; a call waits for the disk and raises OSError. `direct`: past the page cache."""

    def __init__(self, folder: Path, shape: Shape, capacity: int, direct: bool) -> None:
        self._folder, self._shape, self._capacity = folder, shape, capacity
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        self._most = max(1, PIECE_BYTES // shape.slot_bytes)
        self._fds: dict[int, int] = {}
        self._sized: set[int] = set()  # files that have the room for all their slots
        self._buffers: list[mmap.mmap] = []
        self._lock = threading.Lock()  # over the three above; never held while a disk is waited for, but to open a file

    def write(self, slots: Sequence[int], data: Sequence[memoryview]) -> None:
        size = self._shape.slot_bytes
        for run in self._runs(slots):
            fd = self._file(run.file, make=True)
            with self._buffer() as rows:
                for row, i in zip(rows, run.members, strict=False):
                    row[: self._shape.unit_bytes] = np.frombuffer(data[i], np.uint8)
                length = len(run.members) * size
                if os.pwrite(fd, rows.reshape(-1).data[:length], run.first * size) != length:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read(self, slots: Sequence[int], into: Sequence[memoryview]) -> list[bool]:
        """Whether each slot is within its file."""
        size, there = self._shape.slot_bytes, [False] * len(slots)
        for run in self._runs(slots):
            try:
                fd = self._file(run.file, make=False)
            except FileNotFoundError:
                continue
            with self._buffer() as rows:
                whole = rows.reshape(-1).data[: len(run.members) * size]
                count = os.preadv(fd, [whole], run.first * size) // size
                for row, i in zip(rows, run.members[:count], strict=False):
                    np.frombuffer(into[i], np.uint8)[:] = row[: self._shape.unit_bytes]
                    there[i] = True
        return there

    def present(self, entries: Sequence[SlotEntry]) -> list[SlotEntry]:
        """Those whose slots exist: a file may have been lost or cut."""
        per_file, slots = self._shape.slots_per_file, dict[int, int]()
        for index in {entry.slot // per_file for entry in entries}:
            with suppress(FileNotFoundError):
                slots[index] = (self._folder / units_name(index)).stat().st_size // self._shape.slot_bytes
        return [entry for entry in entries if entry.slot % per_file < slots.get(entry.slot // per_file, 0)]

    def trim(self) -> None:
        """Deletes what lies beyond the capacity, which was larger before."""
        per_file = self._shape.slots_per_file
        index = -(-self._capacity // per_file)
        while (path := self._folder / units_name(index)).exists():
            path.unlink()
            index += 1
        with suppress(FileNotFoundError):
            last = self._folder / units_name(index := (self._capacity - 1) // per_file)
            if last.stat().st_size > self._size(index):
                os.truncate(last, self._size(index))

    def close(self) -> None:
        """Nobody reads or writes."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _runs(self, slots: Sequence[int]) -> Iterator[SlotRun]:
        run: SlotRun | None = None
        for i in sorted(range(len(slots)), key=lambda i: slots[i]):
            file, place = divmod(slots[i], self._shape.slots_per_file)
            if run and run.file == file and place == run.first + len(run.members) and len(run.members) < self._most:
                run.members.append(i)
                continue
            if run:
                yield run
            run = SlotRun(file, place, [i])
        if run:
            yield run

    def _size(self, index: int) -> int:
        """Bytes of a file."""
        per_file = self._shape.slots_per_file
        return min(per_file, self._capacity - index * per_file) * self._shape.slot_bytes

    def _file(self, index: int, make: bool) -> int:
        with self._lock:
            if index not in self._fds:
                self._fds[index] = os.open(self._folder / units_name(index), self._flags | (os.O_CREAT if make else 0), 0o600)
            if make and index not in self._sized:
                os.posix_fallocate(self._fds[index], 0, self._size(index))
                self._sized.add(index)
            return self._fds[index]

    @contextmanager
    def _buffer(self) -> Iterator[Bytes]:
        """uint8 [slots of a piece, slot_bytes], aligned to a page. Nothing in it is kept."""
        with self._lock:
            memory = self._buffers.pop() if self._buffers else None
        memory = memory or mmap.mmap(-1, self._most * self._shape.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        yield np.frombuffer(memory, np.uint8).reshape(self._most, -1)
        with self._lock:
            if len(self._buffers) < BUFFERS:
                self._buffers.append(memory)


def measure(folder: Path, slot_bytes: int, clock: Callable[[], float] = time.monotonic) -> Rates | None:
    """Writes some slots and reads them back, in each way, and reads none of them from memory. Takes about two PROBE_S at most, if the disk
    answers. None: there is no room to find out. Raises OSError."""
    path = folder / "probe"
    length = padded(min(PROBE_SLOTS * slot_bytes, PIECE_BYTES))
    rates = []
    try:
        for how in (os.O_DIRECT, 0):
            try:
                rates.append(_rate(path, how, length, clock))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    return None
                if not how or error.errno != errno.EINVAL:
                    raise
                rates.append(0.0)
        return Rates(*rates)
    finally:
        path.unlink(missing_ok=True)


def prefers_direct(rates: Rates | None) -> bool:
    return rates is not None and rates.direct > 0 and rates.buffered < BETTER * rates.direct


def _rate(path: Path, how: int, length: int, clock: Callable[[], float]) -> float:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | how, 0o600)
    try:
        memory = mmap.mmap(-1, length)
        began, pieces = clock(), 0
        while pieces == 0 or (pieces < 4 and clock() - began < PROBE_S / 2):
            if os.pwrite(fd, memory, pieces * length) != length:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            pieces += 1
        if not how:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for piece in range(pieces):
            os.preadv(fd, [memory], piece * length)
        return 2 * pieces * length / max(clock() - began, 1e-9)
    finally:
        os.close(fd)
