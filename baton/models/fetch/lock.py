"""One fetcher at a time for a folder. The kernel frees the lock of a process that dies."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.models.fetch.selection import OWN
from baton.models.fetch.store import FetchError

FILE = f"{OWN}.lock"
POLL_S = 0.5


@contextmanager
def held(folder: Path, within_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Raises FetchError if another fetcher has the folder for that long, or if the file system has no locks."""
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o664)
    try:
        deadline = time.monotonic() + within_s
        if not _taken(descriptor, folder):
            say(f"another process fetches into {folder}; waiting for it")
            while not _taken(descriptor, folder):
                if time.monotonic() > deadline:
                    raise FetchError(f"{folder}: another process has been fetching into it for {within_s:g} s")
                time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise FetchError(f"{folder}: its file system has no locks ({error.strerror})") from None
    return True
