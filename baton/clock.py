"""The clock of all that acts in an event loop: that of the loop. A loop whose time is virtual runs it, too."""

import asyncio


def loop_time() -> float:
    """Seconds since some moment; never set back. Raises RuntimeError where no loop runs.

    The loops of asyncio read `time.monotonic`, as an engine's thread does: times of the two may be compared.
    """
    return asyncio.get_running_loop().time()
