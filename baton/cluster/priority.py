"""How a worker gives way to what shares its cores, above all to the router: a step takes long, and a router's turn is short and waited for.

On Linux every thread has its own niceness, and with autogroup (sched(7)) it counts only within a session: between sessions the group's
counts. So a worker that leads its session, as launchers start it, sets that, too; one that was started in a terminal leaves the session,
which the router may be in, as it is.
"""

import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)
MOST = 19
PROCESS = Path("/proc/self")
TRIES, BETWEEN_S = 100, 0.11  # Linux lets one group of the machine be changed in each 0.1 s


def give_way(by: int, process: Path = PROCESS) -> None:
    """Adds to the niceness of this process, with all of its threads and those that they start."""
    if not by:
        return
    niceness = min(MOST, os.getpriority(os.PRIO_PROCESS, 0) + by)
    threads = process / "task"
    for thread in [int(entry.name) for entry in threads.iterdir()] if threads.is_dir() else [0]:
        try:
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
        except OSError as error:
            log.debug("niceness of thread %d: %s", thread, error)
    group = process / "autogroup"
    if group.exists() and os.getsid(0) == os.getpid():
        threading.Thread(target=_give_way_as_group, args=(group, by), name="niceness", daemon=True).start()


def _give_way_as_group(group: Path, by: int) -> None:
    for _ in range(TRIES):
        try:
            group.write_text(str(by))
            return
        except BlockingIOError:  # another process was first
            threading.Event().wait(BETWEEN_S)
        except OSError as error:
            log.debug("niceness of the session: %s", error)
            return
