"""The generator's share of the processors. It needs little, but at once: on a machine that its workers fill, it would be late.

It takes a higher priority during a run, which needs a privilege (root, CAP_SYS_NICE or a limit that allows it). Without that, the clusters
get a lower one. Every arm of a campaign is treated alike.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RAISED = -10  # niceness of the generator
YIELDING = 5  # niceness of the clusters, if the generator's cannot be raised; more would stop them beside any other program


@contextmanager
def raised() -> Iterator[None]:
    """Raises the priority of all threads of this process, if it may. Start no process within: it would inherit the priority."""
    before: dict[int, int] = {}
    for thread in _threads():
        with suppress(OSError):  # not allowed, or the thread has ended
            niceness = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(niceness, RAISED))
            before[thread] = niceness
    try:
        yield
    finally:
        for thread in _threads():
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, before.get(thread, max(before.values(), default=0)))


def cluster_niceness() -> int:
    """What to add to the niceness of a cluster's processes."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(niceness, RAISED))
    except OSError:
        return YIELDING
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    return 0


def _threads() -> list[int]:
    """Each thread has its own priority on Linux; elsewhere there is one for the process, which 0 names."""
    folder = Path("/proc/self/task")
    return [int(entry.name) for entry in folder.iterdir()] if folder.is_dir() else [0]
