"""One file: its bytes go to NAME.TAG.part, which is continued where the last attempt ended, in this process or an earlier one. The file
gets its name when they are verified, so whatever has a name is right. Another version has another tag, so its bytes never meet these.
"""

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from baton.models.fetch import digest
from baton.models.fetch.manifest import ManifestEntry, sync
from baton.models.fetch.store import FetchError, Interrupted, RemoteFile, Store

ENOUGH = 1 << 20  # bytes; an attempt that brings as many is no failure
PIECE = 1 << 20
LONGEST_PAUSE_S, LONGEST_REQUESTED_S = 30.0, 300.0
MISMATCHES = 2  # whole files with a wrong checksum, after which a third would be no better
PART = re.compile(r"\.[0-9a-f]{16}\.part$")
FULL = (errno.ENOSPC, errno.EDQUOT)


class Patience:
    """How many attempts in a row may bring nothing."""

    def __init__(self, attempts: int, pause_s: float, say: Callable[[str], None]) -> None:
        self._attempts, self._pause_s, self._say = attempts, pause_s, say
        self._failed = 0

    def spend(self, what: str, error: Interrupted) -> None:
        """Waits until the next attempt is due. Raises FetchError after the last one."""
        self._failed += 1
        if self._failed >= self._attempts:
            raise FetchError(f"{what}: {error}; gave up after {self._failed} attempts in a row without progress") from None
        pause = min(self._pause_s * 2.0 ** (self._failed - 1), LONGEST_PAUSE_S)
        pause = max(pause, min(error.after_s, LONGEST_REQUESTED_S))
        self._say(f"{what}: {error}; attempt {self._failed + 1} of {self._attempts} in {pause:g} s")
        time.sleep(pause)

    def renew(self) -> None:
        self._failed = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    store: Store
    folder: Path
    patience: Patience
    say: Callable[[str], None]
    moved: Callable[[int], None]  # bytes that arrived, or that were there; fewer than 0: they were worth nothing

    def fetch(self, file: RemoteFile) -> ManifestEntry:
        """Raises Changed if the store has another version, FetchError."""
        part = part_of(self.folder, file)
        part.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(MISMATCHES):
            digests = self._whole(file, part)
            size = part.stat().st_size
            wrong = mismatch(file, digests) if size == file.size else f"{file.name}: wrong size: more than the {file.size} bytes listed"
            if not wrong:
                return self._name(file, part, digests)
            self.moved(-size)
            part.unlink()
            self.say(f"{wrong}; all of it was thrown away")
        raise FetchError(f"{wrong}, twice in a row")

    def adopt(self, file: RemoteFile) -> ManifestEntry | None:
        """A file that is there already, if its bytes are the store's."""
        path = self.folder / file.name
        if file.check is None or not path.is_file() or path.stat().st_size != file.size:
            return None
        digests = _digests(file)
        with path.open("rb") as stream:
            _read(stream, digests)
        return None if mismatch(file, digests) else _entry(file, digests)

    def _whole(self, file: RemoteFile, part: Path) -> dict[str, digest.Digest]:
        """Attempts until the part is as long as the file."""
        counted = 0
        while True:
            before = _size(part)
            self.moved(before - counted)
            counted = before
            try:
                return self._attempt(file, part)
            except Interrupted as error:
                counted = _size(part)
                if counted - before >= ENOUGH:
                    self.patience.renew()
                self.patience.spend(file.name, error)
            except OSError as error:
                if error.errno in FULL:
                    raise FetchError(f"{self.folder}: no space is left for {file.name}") from None
                raise

    def _attempt(self, file: RemoteFile, part: Path) -> dict[str, digest.Digest]:
        digests = _digests(file)
        with part.open("r+b" if part.exists() else "w+b") as out:
            have = _read(out, digests)
            if have >= file.size:
                return digests
            with self.store.open(file, have) as stream:
                if stream.start != have:  # the store cannot continue
                    self.moved(-have)
                    out.seek(0)
                    out.truncate()
                    digests, have = _digests(file), 0
                for piece in stream.pieces:
                    out.write(piece)
                    _update(digests, piece)
                    self.moved(len(piece))
                    have += len(piece)
                    if have > file.size:
                        return digests
        if have < file.size:
            raise Interrupted(f"the connection ended after {have} of {file.size} bytes")
        return digests

    def _name(self, file: RemoteFile, part: Path, digests: dict[str, digest.Digest]) -> ManifestEntry:
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(part, self.folder / file.name)
        sync(part.parent)
        return _entry(file, digests)


def part_of(folder: Path, file: RemoteFile) -> Path:
    return folder / f"{file.name}.{hashlib.sha256(file.tag.encode()).hexdigest()[:16]}.part"


def parts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.part") if PART.search(path.name)]


def missing(folder: Path, file: RemoteFile) -> int:
    """Bytes of a file that are still to come."""
    return max(file.size - _size(part_of(folder, file)), 0)


def mismatch(file: RemoteFile, digests: dict[str, digest.Digest]) -> str:
    """What is wrong with the bytes of a file; empty if nothing is."""
    if file.check is None:
        return ""
    found = digests[file.check.kind].hexdigest()
    if found == file.check.value.lower():
        return ""
    return f"{file.name}: wrong checksum: {file.check.kind} is {found}, and the store says {file.check.value}"


def _entry(file: RemoteFile, digests: dict[str, digest.Digest]) -> ManifestEntry:
    return ManifestEntry(file.size, digests["sha256"].hexdigest(), file.tag, file.check.kind if file.check else "")


def _digests(file: RemoteFile) -> dict[str, digest.Digest]:
    kinds = {"sha256"} | ({file.check.kind} if file.check else set())
    return {kind: digest.new(kind, file.size) for kind in kinds}


def _read(stream: BinaryIO, digests: dict[str, digest.Digest]) -> int:
    """The bytes that are there; the stream is at its end afterwards."""
    have = 0
    while piece := stream.read(PIECE):
        _update(digests, piece)
        have += len(piece)
    return have


def _update(digests: dict[str, digest.Digest], piece: bytes) -> None:
    for each in digests.values():
        each.update(piece)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
