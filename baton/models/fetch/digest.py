"""Checksums by which stores let their files be verified."""

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Check:
    kind: str  # one of `kinds()`
    value: str  # hex


class Crc:
    def __init__(self, function: Callable[[bytes, int], int], bits: int) -> None:
        self._function, self._digits = function, bits // 4
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = self._function(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:0{self._digits}x}"


def new(kind: str, size: int) -> Digest:
    """A digest of a file of `size` bytes. `git` is the name that git gives to the file's content."""
    match kind:
        case "git":
            return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        case "md5":
            return hashlib.md5(usedforsecurity=False)
        case "crc32":
            return Crc(zlib.crc32, 32)
        case "crc32c" | "crc64nvme":
            from awscrt import checksums

            return Crc(checksums.crc32c, 32) if kind == "crc32c" else Crc(checksums.crc64nvme, 64)
    return hashlib.new(kind)
