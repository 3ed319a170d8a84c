"""Which unit is in which slot, as a log that is replayed: records of one size, appended after the bytes that they tell of.

A later record of a slot ends what an earlier one put there, so an eviction needs none. A record is 44 bytes, little-endian:

    crc32 of the rest | kind, 1 byte | 3 of padding | slot, 4 | key, 16 | digest, 16
"""

import errno
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from baton.tiers.slots import SlotEntry

RECORD = struct.Struct("<IB3xI16s16s")
PUT, DROP = 1, 2
SPARE = 1024  # records; a log shorter than that is never rewritten


class Log:
    """Not thread-safe. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open(path)
        self.records = 0
        self.damaged = 0  # records that the last replay found torn or altered

    def replay(self, capacity: int) -> list[SlotEntry]:
        """What is held, in the order in which it was put."""
        with open(self._fd, "rb", closefd=False) as file:
            data = memoryview(file.read())
        self.records, rest = divmod(len(data), RECORD.size)
        self.damaged = int(rest > 0)
        held = _Held()
        for at in range(0, self.records * RECORD.size, RECORD.size):
            record = data[at : at + RECORD.size]
            crc, kind, slot, key, digest = RECORD.unpack(record)
            if zlib.crc32(record[4:]) != crc or kind not in (PUT, DROP):
                self.damaged += 1
            elif kind == DROP:
                held.drop(SlotEntry(key, digest, slot))
            else:
                held.put(SlotEntry(key, digest, slot))
        return [entry for entry in held.by_key.values() if entry.slot < capacity]

    def too_long(self, held: int) -> bool:
        return self.records > 2 * held + SPARE

    def append(self, kind: int, entries: Sequence[SlotEntry], sync: bool = False) -> None:
        _write(self._fd, _records(kind, entries))
        self.records += len(entries)
        if sync:
            os.fdatasync(self._fd)

    def rewrite(self, entries: Sequence[SlotEntry]) -> None:
        """Keeps only these of all that was told, the longest unused first."""
        path = self._path.with_suffix(".new")
        path.unlink(missing_ok=True)
        fd = self._open(path)
        try:
            _write(fd, _records(PUT, entries))
            os.fdatasync(fd)
            path.rename(self._path)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self.records, self.damaged = fd, len(entries), 0

    def close(self) -> None:
        os.close(self._fd)

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class _Held:
    def __init__(self) -> None:
        self.by_key: dict[bytes, SlotEntry] = {}
        self._by_slot: dict[int, SlotEntry] = {}

    def put(self, entry: SlotEntry) -> None:
        for old in (self._by_slot.get(entry.slot), self.by_key.get(entry.key)):
            if old is not None:
                self._remove(old)
        self.by_key[entry.key] = self._by_slot[entry.slot] = entry

    def drop(self, entry: SlotEntry) -> None:
        old = self.by_key.get(entry.key)
        if old is not None and (old.slot, old.digest) == (entry.slot, entry.digest):
            self._remove(old)

    def _remove(self, entry: SlotEntry) -> None:
        self.by_key.pop(entry.key, None)
        self._by_slot.pop(entry.slot, None)


def _records(kind: int, entries: Iterable[SlotEntry]) -> bytes:
    found = bytearray()
    for entry in entries:
        body = RECORD.pack(0, kind, entry.slot, entry.key, entry.digest)[4:]
        found += zlib.crc32(body).to_bytes(4, "little") + body
    return bytes(found)


def _write(fd: int, data: bytes) -> None:
    if data and os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
