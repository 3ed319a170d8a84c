"""A run of tests that is interrupted or killed leaves no process: small runs of their own, with this suite's conftest."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import left_behind
import psutil
import pytest
from live_cluster import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of a process")

CONFTEST = ROOT / "tests" / "conftest.py"
CLUSTER = """
import os, time
from live_cluster import cluster, toy

def test_a_cluster(tmp_path):
    with cluster(toy(tmp_path / "toy"), detach=True) as live:
        pids = [live.pid, live.status()["router"]["pid"], *(worker["pid"] for worker in live.workers())]
        told = {folder!r} + "/{name}"
        with open(told + "~", "w") as file:
            print(os.getpid(), *pids, file=file)
        os.rename(told + "~", told)
        time.sleep(600)
"""
# Its parent has ended, it has a session of its own, and it ignores what can be ignored.
DAEMON = """
import os, subprocess, sys, time

CHILD = "import os, signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(os.getpid(), flush=True); time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True)"

def test_a_daemon():
    with open({folder!r} + "/{name}~", "w") as file:
        print(os.getpid(), file=file, flush=True)
        subprocess.run([sys.executable, "-c", PARENT], stdout=file, check=True)
    while os.path.getsize(file.name) < 8:
        time.sleep(0.01)
    os.rename(file.name, file.name[:-1])
    time.sleep(600)
"""


@contextmanager
def run(folder: Path, **texts: str) -> Iterator[tuple["subprocess.Popen[bytes]", dict[str, list[psutil.Process]]]]:
    """A run with a process for each file, and, once all have started theirs, name of the file → its process and those it started."""
    (folder / "conftest.py").write_text(f"{CONFTEST.read_text()}\nimport xdist.workermanage as w\nw.NodeManager.EXIT_TIMEOUT = 1\n")
    for name, text in texts.items():
        (folder / f"test_{name}.py").write_text(text.replace("{folder!r}", repr(str(folder))).replace("{name}", name))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}", "TMPDIR": str(folder), "OF_THIS_RUN": str(folder)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take a second to import
    options = (
        "-p",
        "xdist",
        "--max-worker-restart=0",
        "--numprocesses",
        str(len(texts)),
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    )
    command = [sys.executable, "-m", "pytest", *options, "-c", os.devnull, str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        soon(lambda: process.poll() is not None or all((folder / name).exists() for name in texts), 300)
        assert process.poll() is None, (folder / "log").read_text()
        yield process, {name: [psutil.Process(int(pid)) for pid in (folder / name).read_text().split()] for name in texts}
        process.wait(60)
        soon(lambda: not left(folder), 30)
    finally:
        process.kill()
        for each in left(folder):
            each.kill()


def left(folder: Path) -> list[psutil.Process]:
    """What the run has started that is alive, watchers included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("OF_THIS_RUN") == str(folder) and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def soon(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.system
def test_no_cluster_outlives_a_killed_process_of_tests_or_an_interrupted_run(tmp_path: Path) -> None:
    with run(tmp_path, cluster=CLUSTER, daemon=DAEMON) as (process, started):
        worker, *cluster = started["cluster"]
        assert len(cluster) == 4, "a supervisor, a router and two workers; their Redis is not listed"
        worker.kill()
        soon(lambda: not any(each.is_running() for each in cluster), 30)
        os.killpg(process.pid, signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_daemon_outlives_a_killed_run(tmp_path: Path, number: signal.Signals) -> None:
    with run(tmp_path, daemon=DAEMON) as (process, started):
        assert len(started["daemon"]) == 2
        process.send_signal(number)


def test_a_process_without_the_mark_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=left_behind.VARIABLE):
        subprocess.run([sys.executable, "-c", ""], env={}, timeout=60)
