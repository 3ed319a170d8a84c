"""The router's clock: that of the event loop. A loop whose time is virtual runs the router, too."""

import asyncio


def loop_time() -> float:
    """Seconds since some moment; never set back. Raises RuntimeError where no loop runs."""
    return asyncio.get_running_loop().time()
