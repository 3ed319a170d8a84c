"""Settings of the whole suite: Hypothesis examples have no time limit, nothing that a test starts outlives the run, and parallel runs keep
certain tests in one process."""

import asyncio
import gc
import os

# Before torch is loaded. Its threads spin while one waits for the other, and beside other processes of tests keep each other off the cores:
# what takes 2 seconds of processor time took 66.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import signal
import sys
from collections.abc import Callable, Generator

import left_behind
import pytest
from hypothesis import HealthCheck, settings
from live_cluster import Cluster
from pytest_rerunfailures import StatusDB
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from baton.simulate.virtual_time import VirtualLoop

# A busy machine is not a failure. pytest-timeout stops a test that hangs.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")

# A shell's job in the background ignores SIGINT, and so would every process that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The sources are compiled once, not by each of the hundreds of processes that a run starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

left_behind.watch()

pytest.register_assert_rewrite("engine_contract")  # tests that several files run

# Collecting the tests makes millions of objects that all stay: the garbage collector would look at them again and again, now and later.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # In place of what remembers the tests of processes that crash and are started again: none is (`--max-worker-restart 0`). That asks a
    # server in two small packets, and TCP holds the second back until the first has been acknowledged: 40 ms a test.
    if hasattr(config, "workerinput"):
        config.failures_db = StatusDB()  # type: ignore[attr-defined]


class Virtual(VirtualLoop):
    """In it, no signal comes."""

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: object) -> None: ...

    def remove_signal_handler(self, sig: int) -> bool:
        return False


@pytest.hookimpl(optionalhook=True)  # some runs do without the plugin
def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What a test waits for costs no time, if it is marked so: nothing real is there to be waited for."""
    return {"virtual": Virtual} if item.get_closest_marker("virtual_time") else {"real": asyncio.new_event_loop}


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10000, 20, 20)
    gc.enable()


RAY = {"tests/launch/test_launcher.py", "tests/system/test_ray.py"}  # a machine has one Ray


def group(nodeid: str) -> str:
    """Tests of one group run one after another in one process. A file is never split, so that its fixtures are created once."""
    path, _, _ = nodeid.partition("::")
    return "ray" if path in RAY else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start clusters come first: a long file that begins last would keep one process busy while the others have nothing left."""
    items.sort(key=lambda item: item.get_closest_marker("system") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails beside others may pass alone: what its clusters logged is part of its report."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for live in (value for value in item.funcargs.values() if isinstance(value, Cluster)):
            for log in sorted(live.logs.glob("*.log")):
                report.sections.append((log.name, "\n".join(log.read_text(errors="replace").splitlines()[-40:])))
    return report


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


# Not `--dist loadgroup`: pytest-xdist 3.8 marks the groups in an attribute that pytest 9.2 does not read.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups:
    return Groups(config, log)
