"""Where compiled kernels are kept on disk: under a key of what they are made from. So all checkouts and processes of a user share them, and
one process at a time compiles what is missing.

    ROOT/KEY/panels.py      stands for the file of the same name in this folder
    ROOT/KEY/__pycache__/   what Numba keeps beside it
    ROOT/KEY/complete-all   all kernels that every float32 model needs are there, so nobody needs the lock for them; likewise
                            complete-all-bfloat16, complete-int4 …
    ROOT/KEY/lock           held by the process that compiles

Numba knows a kernel by the path of the file that defines it, and would compile again in every checkout. So a kernel is given, in place of
its own file, one beside which Numba may write and whose path is the key. No internals of Numba are involved.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from numba import config

from baton.engine.core.progress import Step, tell
from baton.engine.cpu.features import FEATURES, compiler, target

VARIABLE = "BATON_KERNEL_CACHE"  # names the root
HERE = Path(__file__).parent
OWN = Path(__file__)  # has the key of every file of this folder
GROUPS = "experts", "groups", "int4", "int8", "kv_int5", "kv_int8"  # files whose kernels only some models need; the others belong to ALL
ALL = "all"
MOST_KEYS = 16  # the folders of older keys are removed, those last used first
WITHIN_S = 300.0  # for another process to compile one kernel; then this one compiles it, too
LOOK_S = 0.05
SAME_TIME = 1_000_000_000  # older versions of Numba compare times


@dataclass(frozen=True, slots=True)
class Place:
    """Where the kernels that one file defines are kept."""

    folder: Path
    file: Path  # stands for that file
    part: str  # of all kernels, which are compiled together

    @property
    def complete(self) -> bool:
        return self._mark.exists()

    @property
    def _mark(self) -> Path:
        return self.folder / f"complete-{self.part}"

    def moved(self, function: Callable[..., Any]) -> Any:
        """The same function, as if this place's file defined it."""
        code = function.__code__.replace(co_filename=str(self.file))
        made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        return made

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process compiles meanwhile, unless it takes longer than any kernel should, or the disk knows no locks."""
        if self.complete:
            yield
            return
        with _opened(self.folder / "lock") as lock:
            if lock is not None:
                _wait_for(lock)
            yield  # closing the file ends the lock, and so does the end of this process

    def finish(self) -> None:
        """All kernels of the part are there."""
        with suppress(OSError):
            self._mark.touch()


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield None
        return
    try:
        yield lock
    finally:
        os.close(lock)


def _wait_for(lock: int) -> None:
    deadline, waits = time.monotonic() + WITHIN_S, False
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not waits:
                waits = True
                tell(Step("waiting for another process that compiles kernels"))
            time.sleep(LOOK_S)
        except OSError:
            return


def place_of(file: Path, half: bool = False) -> Place | None:
    """Where the kernels of a file are kept that compute with float32, or with bfloat16 (`half`). None if they can be kept nowhere."""
    top = root()
    if top is None:
        return None
    folder = top / key_of(file)
    stand_in = folder / file.name
    try:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            _forget_old(top)
        with suppress(PermissionError):
            os.utime(folder)  # used now
        if not stand_in.exists():
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as whole:
                whole.write(f"# stands for {file.name} (see baton/engine/cpu/kernel_cache.py)\n")
            os.chmod(whole.name, 0o644)
            os.utime(whole.name, (SAME_TIME, SAME_TIME))
            os.replace(whole.name, stand_in)
    except OSError:
        return None
    return Place(folder, stand_in, part_of(group_of(file), half))


def group_of(file: Path) -> str:
    return file.stem if file.parent == HERE and file.stem in GROUPS else ALL


def part_of(group: str, half: bool) -> str:
    return f"{group}-bfloat16" if half else group


def _forget_old(top: Path) -> None:
    """Also what another process is using, at worst: that one would compile again."""
    used = sorted((entry.stat().st_mtime, entry) for entry in top.iterdir() if entry.is_dir())
    for _, folder in used[:-MOST_KEYS]:
        shutil.rmtree(folder, ignore_errors=True)


def key_of(file: Path) -> str:
    """The key of the kernels in `file`: a digest of whatever their code depends on. All files of this folder count, for each may use any
    other, and of the processor only what they are compiled for: an image is built on another one."""
    own = b"" if file.parent == HERE else file.read_bytes()
    known = repr((sys.implementation.cache_tag, compiler(), target(), config.CPU_FEATURES, sorted(FEATURES), _sources())).encode()
    return hashlib.sha256(known + own).hexdigest()[:24]


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for file in sorted(HERE.glob("*.py")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def root() -> Path | None:
    """Where to keep them: in BATON_KERNEL_CACHE or NUMBA_CACHE_DIR; otherwise in the user's cache, or if that cannot be written, in this
    user's folder for temporary files. What is in there is run, so it must be nobody else's."""
    if given := os.environ.get(VARIABLE) or config.CACHE_DIR:
        return Path(given) if _made(Path(given)) else None
    homes = [Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "baton"]
    homes.append(Path(os.environ.get("TMPDIR") or "/tmp") / f"baton-{os.getuid()}")
    return next((home / "kernels" for home in homes if home.is_absolute() and _made(home / "kernels") and _ours(home)), None)


def _made(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _ours(home: Path) -> bool:
    return all(folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o002 for folder in (home, home / "kernels"))
