"""Signs of life for whoever supervises this process.

The supervisor passes the writing end of a pipe. The event loop writes a line into it at intervals: for how many seconds the engine has made
no progress. An event loop that is blocked writes nothing. A process that was started by hand has no pipe, and is silent.
"""

import asyncio
import os
from collections.abc import Callable

VARIABLE = "BATON_PULSE_FD"
BEAT_EVERY_S = 0.5


async def beat(stalled_s: Callable[[], float] = lambda: 0.0) -> None:
    """Until cancelled, or until nobody listens any more."""
    fd = os.environ.pop(VARIABLE, None)  # not for our own children
    while fd is not None:
        try:
            os.write(int(fd), f"{stalled_s():.3f}\n".encode())
        except BlockingIOError:  # the supervisor has not read for long, and finds enough when it does
            pass
        except OSError:
            return
        await asyncio.sleep(BEAT_EVERY_S)


def read(fd: int) -> float | None:
    """The newest complete line that has come since the last call; None: there is none. `fd` does not block."""
    try:
        lines = os.read(fd, 1 << 16).split(b"\n")
        return float(lines[-2]) if len(lines) > 1 else None
    except (BlockingIOError, ValueError):
        return None
