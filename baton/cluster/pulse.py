"""Signs of life for the supervisor of this process.

The supervisor passes in the write end of a pipe. At intervals, the event loop writes a line into it: the number of seconds for which the
engine has made no progress. A blocked event loop writes nothing. A process that was started by hand has no pipe and sends nothing.
"""

import asyncio
import os
from collections.abc import Callable

VARIABLE = "BATON_PULSE_FD"
BEAT_EVERY_S = 0.5


async def beat(stalled_s: Callable[[], float] = lambda: 0.0) -> None:
    """Runs until it is cancelled or the other end of the pipe is closed."""
    fd = os.environ.pop(VARIABLE, None)  # our own children must not inherit it
    while fd is not None:
        try:
            os.write(int(fd), f"{stalled_s():.3f}\n".encode())
        except BlockingIOError:  # the supervisor has not read for a long time, and will find enough when it does
            pass
        except OSError:
            return
        await asyncio.sleep(BEAT_EVERY_S)


def read(fd: int) -> float | None:
    """The newest complete line since the last call; None if there is none. `fd` must not block."""
    try:
        lines = os.read(fd, 1 << 16).split(b"\n")
        return float(lines[-2]) if len(lines) > 1 else None
    except (BlockingIOError, ValueError):
        return None
