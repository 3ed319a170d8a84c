"""The clock of all that acts in an event loop: that of the loop. A loop whose time is virtual runs it, too."""

import asyncio
from collections.abc import Callable


def loop_time() -> float:
    """Seconds since some moment; never set back. Raises RuntimeError where no loop runs.

    The loops of asyncio read `time.monotonic`, as an engine's thread does: times of the two may be compared.
    """
    return asyncio.get_running_loop().time()


def clock_of_loop() -> Callable[[], float]:
    """`loop_time` of the loop that runs now, for whoever reads it often: to find the loop takes longer than to read its clock, because
    Python asks the system each time which process this is. Raises RuntimeError where no loop runs."""
    return asyncio.get_running_loop().time
