"""The file that this process's output goes to. Whoever started the process says where it is, and `baton logs` reads it from anywhere.

The file outlives the process: after a restart, it still holds the last words of the process before.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from baton.cluster.errors import BatonError, Reason, invalid

VARIABLE = "BATON_LOG_FILE"
MOST_LINES = 10_000
MOST_BYTES = 4 << 20  # that are searched for the first line
PAGE = 64 << 10
LOOK_EVERY_S = 0.2
READERS = 16  # that follow at the same time

_following = 0


async def read(name: str, lines: int, follow: bool) -> AsyncGenerator[bytes, None]:
    """Yields the last `lines` lines, and with `follow` whatever is written later, until the reader leaves. `name`: of this process. Raises
    BatonError(INVALID_FIELD, SATURATED)."""
    global _following
    if not 0 <= lines <= MOST_LINES:
        raise invalid("lines", f"must be from 0 to {MOST_LINES}")
    if not (path := os.environ.get(VARIABLE)):
        raise invalid("name", f"{name} does not write to a file; look where it was started")
    if follow and _following >= READERS:
        raise BatonError(Reason.SATURATED, f"{READERS} readers follow {name} already")
    _following += follow
    try:
        at = await asyncio.to_thread(start_of, Path(path), lines)
        while True:
            text = await asyncio.to_thread(_page, Path(path), at)
            if text:
                at += len(text)
                yield text
            elif not follow:
                return
            else:
                await asyncio.sleep(LOOK_EVERY_S)
                if await asyncio.to_thread(_size, Path(path)) < at:  # someone emptied it
                    at = 0
    except OSError as error:
        raise BatonError(Reason.INTERNAL, f"the log of {name} cannot be read: {error.strerror}") from None
    finally:
        _following -= follow


def start_of(path: Path, lines: int) -> int:
    """Where the last `lines` lines begin; at most MOST_BYTES from the end. Raises OSError."""
    size = _size(path)
    first = max(0, size - MOST_BYTES)
    with path.open("rb") as file:
        file.seek(first)
        data = file.read(size - first)
    at = len(data)
    for _ in range(lines):
        if at <= 0:
            break
        at = data.rfind(b"\n", 0, at - 1) + 1
    return first + max(0, at)


def _page(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(PAGE)


def _size(path: Path) -> int:
    return path.stat().st_size
