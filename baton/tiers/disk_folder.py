"""The folder of a disk store: whose it is, which model's units it holds, and that nobody else has it.

    baton-kv.json   what the units are: format, fingerprint of model and layout, sizes
    lock            locked by the process that uses the folder; names it
    log             see `disk_log`
    units-00000 …   see `disk_files`

Nothing is deleted or altered in a folder that is refused.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from baton.tiers.kind import UnitKind

FORMAT = "baton-kv-1"
HEADER, LOCK, LOG = "baton-kv.json", "lock", "log"
OURS = {HEADER, f"{HEADER}.new", LOCK, LOG, f"{LOG}.new", "probe"}
SECTOR = 4096  # addresses, offsets and lengths of direct I/O are multiples of this
FILE_BYTES = 256 << 20  # of a file of units
FILES = 256  # at most, when the folder is made


class Shape(NamedTuple):
    unit_bytes: int
    slot_bytes: int
    slots_per_file: int


def padded(unit_bytes: int) -> int:
    """Bytes that a unit takes on the disk."""
    return -(-unit_bytes // SECTOR) * SECTOR


def units_name(index: int) -> str:
    return f"units-{index:05}"


class Folder:
    """An open folder, and its lock. Raises ValueError for what is refused, OSError for what the disk refuses."""

    def __init__(self, path: Path, kind: UnitKind, capacity: int, device: int | None = None) -> None:
        """`device`: the disk on which it must lie (`st_dev`); None: any."""
        slot = padded(kind.unit_bytes)
        shape = Shape(kind.unit_bytes, slot, max(FILE_BYTES // slot, -(-capacity // FILES), 1))
        self.path = path
        place = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not place.is_dir():
            raise ValueError(f"{place} is not a folder")
        self.device = place.stat().st_dev
        if device not in (None, self.device):
            raise OSError(errno.ENODEV, "another disk is in its place")
        _check_room(path, place, capacity * slot)
        path.mkdir(parents=True, exist_ok=True)
        _check_ours(path)
        self._lock = _locked(path / LOCK)
        try:
            stat = os.fstat(self._lock)
            self._identity = stat.st_dev, stat.st_ino
            self.shape = _agreed(path, kind, shape)
        except BaseException:
            os.close(self._lock)
            raise

    def check(self) -> None:
        """Raises OSError if this folder is no longer where it was: what is open would still take bytes that nobody finds again."""
        stat = os.stat(self.path / LOCK)
        if (stat.st_dev, stat.st_ino) != self._identity:
            raise OSError(errno.ESTALE, "another folder is in its place")

    def close(self) -> None:
        os.close(self._lock)


def _check_room(path: Path, place: Path, size: int) -> None:
    """A disk that others have filled since is full, and no error of the configuration."""
    disk = os.statvfs(place)
    most, what = disk.f_blocks * disk.f_frsize, "has"
    if not (path / HEADER).exists():
        most, what = disk.f_bavail * disk.f_frsize, "has free"
    if size > most:
        raise ValueError(f"{path}: {size} bytes are more than its disk {what}: {most}")


def _check_ours(path: Path) -> None:
    if not (path / HEADER).exists():
        foreign = next(_foreign(path), None)
        if foreign is not None:
            raise ValueError(f"{path} is not a folder of Baton's KV: it holds {foreign!r}; name an empty or a new one")


def _foreign(path: Path) -> Iterator[str]:
    return (name for name in sorted(os.listdir(path)) if name not in OURS and name != "lost+found")


def _locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"process %d\n" % os.getpid(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 100, 0).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise ValueError(f"{path.parent} is used by {holder}: each worker needs a folder of its own") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _agreed(path: Path, kind: UnitKind, shape: Shape) -> Shape:
    """That of the folder, which becomes ours if it is new."""
    header = path / HEADER
    if not header.exists():
        _write(header, json.dumps({"format": FORMAT, **kind.facts, **shape._asdict()}, indent=1) + "\n")
        return shape
    try:
        found = dict(json.loads(header.read_text()))
    except (ValueError, TypeError):
        raise ValueError(f"{header} is damaged, or not Baton's: name another folder, or delete this one") from None
    if found.get("format") != FORMAT:
        raise ValueError(f"{header}: format {found.get('format')!r}, this version reads {FORMAT!r}")
    kind.check(found, str(path))
    slot_bytes, per_file = found.get("slot_bytes"), found.get("slots_per_file")
    if slot_bytes != shape.slot_bytes or not isinstance(per_file, int) or per_file < 1:
        raise ValueError(f"{header}: slots of {slot_bytes} bytes, {per_file} a file; this version has slots of {shape.slot_bytes} bytes")
    return shape._replace(slots_per_file=per_file)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, also if the power fails."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
