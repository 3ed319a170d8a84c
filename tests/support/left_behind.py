"""What a run of tests started ends with it, however it ends: python -I -S left_behind.py MARK

Fixtures end what they started, but not in a process that gets a SIGKILL or a SIGTERM, or that xdist kills because the run was interrupted.
So each process that runs tests has a watcher: when its end of a pipe is closed, the watcher kills all processes that carry its mark in
their environment. Daemons, sessions and hosts (network namespaces) inherit a mark, but no tie to the parent.

Linux only: elsewhere, an interrupted run leaves its processes behind.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "STARTED_BY_TESTS_OF"  # no prefix that a test removes from the environment of what it starts
QUIET, PAUSE_S, WITHIN_S = 3, 0.1, 60.0  # so many looks in a row must find nothing: a process may be about to start another

_watchers: list["subprocess.Popen[bytes]"] = []  # they live as long as this process


def watch() -> None:
    """Marks what this process starts from now on, and starts the watcher. Refuses to start a process without the mark."""
    if sys.platform != "linux":
        return
    mark = f"{os.getpid()}-{time.time_ns()}"
    plain = {name: value for name, value in os.environ.items() if name != VARIABLE}
    silent: dict[str, Any] = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }  # somebody may wait for the end of ours
    command = [sys.executable, "-I", "-S", __file__, mark]
    _watchers.append(subprocess.Popen(command, env=plain, stdin=subprocess.PIPE, start_new_session=True, **silent))
    os.environ[VARIABLE] = mark

    def check(event: str, details: tuple[object, ...]) -> None:
        if event == "subprocess.Popen" and isinstance(env := details[3], dict):
            assert env.get(VARIABLE), f"{details[1]} would outlive an interrupted run: its environment needs {VARIABLE}"

    sys.addaudithook(check)


def marked(mark: str) -> set[int]:
    """The processes that carry the mark. A zombie carries nothing."""
    line, found = f"{VARIABLE}={mark}".encode(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if line in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def end(mark: str) -> None:
    deadline, quiet = time.monotonic() + WITHIN_S, 0
    while quiet < QUIET and time.monotonic() < deadline:
        found = marked(mark)
        quiet = 0 if found else quiet + 1
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.stdin.read()
    end(sys.argv[1])
