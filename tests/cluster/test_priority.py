"""The niceness of a worker, in processes of their own, read back from outside."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.cluster import priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the read-back is Linux's")
SAID_S = 30.0
WAITS = "; print(flush=True); threading.Event().wait()"
EARLY = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


@contextmanager
def process(code: str, own_session: bool = True) -> Iterator[int]:
    """A process that has run the code and waits."""
    command = [sys.executable, "-c", f"import threading\n{EARLY}\n{code}{WAITS}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=own_session) as started:
        try:
            assert started.stdout is not None
            started.stdout.readline()
            yield started.pid
        finally:
            started.kill()


def until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SAID_S
    while not (found := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def niceness(pid: int) -> set[int]:
    """Of all threads."""
    return {os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()}


def autogroup(pid: int) -> str:
    """Empty for a process of no group."""
    return (Path(f"/proc/{pid}") / "autogroup").read_text()


def group(pid: int) -> int:
    """Its niceness. No session was ever begun for those without one: children of the first process."""
    told = autogroup(pid)
    return int(told.split()[-1]) if told else 0


GIVES_WAY = "from baton.cluster import priority; priority.give_way(3)"
has_groups = pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel has no autogroup")


def test_all_threads_of_a_worker_give_way_and_those_that_they_start() -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    later = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    with process(f"{GIVES_WAY}; {later}") as pid:
        assert niceness(pid) == {min(19, here + 3)}
    with process("from baton.cluster import priority; priority.give_way(0)") as pid:
        assert niceness(pid) == {here}, "negative control: unless it is asked for"
    with process("from baton.cluster import priority; priority.give_way(19); priority.give_way(19)") as pid:
        assert niceness(pid) == {19}


@has_groups
def test_a_session_gives_way_only_if_it_is_the_workers_own() -> None:
    """Several at once: Linux refuses a second change of a group within a tenth of a second to those who have no privilege."""
    ours = group(os.getpid())
    with process(GIVES_WAY) as one, process(GIVES_WAY) as two, process(GIVES_WAY, own_session=False) as other:
        if not autogroup(one):
            pytest.skip("sessions have no groups here")
        assert until(lambda: group(one) == group(two) == 3)
        assert group(other) == group(os.getpid()) == ours


def test_a_group_that_is_changed_too_often_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def write(path: Path, text: str) -> int:
        tries.append(text)
        if len(tries) < 3:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(priority, "BETWEEN_S", 0.001)
    priority._give_way_as_group(tmp_path / "autogroup", 7)
    assert tries == ["7", "7", "7"]
