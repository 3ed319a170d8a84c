"""The contract of all launchers (`pool_contract`) and that of those that own their processes, with real child processes and a real Ray
cluster; then tests of what is specific to each. The third launcher, for Kubernetes, has its tests in tests/kube.

The Ray cluster belongs to another process (`launching.py`), as it would in production. Each test joins it.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from pool_contract import CONTRACT, Bench
from ray._raylet import Config  # type: ignore[attr-defined]  # its stubs lack it

from baton.cluster.errors import BatonError, Reason
from baton.cluster.gpus import Device
from baton.launch import ray_launcher
from baton.launch.child import MOVES, Life, move
from baton.launch.launcher import Launcher, ProcessState, RestartRule, Restarts, Roster, Template, Watchdog
from baton.launch.local_launcher import LocalLauncher
from baton.launch.placing import Gpus
from baton.launch.ray_launcher import RayLauncher
from baton.moves import IllegalMove

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TWO = Gpus(tuple(Device(str(index), index, "H100", 80 << 30, 0) for index in range(2)))
RULE = RestartRule(backoff_s=0.1, max_backoff_s=1.0, stable_s=5.0)
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}  # otherwise Ray writes one under the home directory

Launch = Callable[..., Awaitable[Launcher]]


# Helpers


async def until(condition: Callable[[], Any], timeout_s: float = 40.0) -> Any:
    """Waits for and returns the first truthy answer of a function or coroutine function."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        answer = await answer if asyncio.iscoroutine(answer) else answer
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{condition} is still {answer!r}"
        await asyncio.sleep(0.05)


def told(folder: Path, name: str, event: str = "start") -> list[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # whole ones: the process may be writing the next
    return [fact for fact in map(json.loads, lines) if fact["event"] == event]


async def born(folder: Path, name: str, times: int = 1) -> dict[str, Any]:
    """Waits for at least `times` starts and returns what the process reported at the latest."""
    starts: list[dict[str, Any]] = await until(lambda: len(told(folder, name)) >= times and told(folder, name))
    return starts[-1]


def alive(pid: int) -> bool:
    """Zombies do not count: the process that inherits an orphan may be slow to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(*pids: int) -> None:
    await until(lambda: not any(map(alive, pids)))


async def ask(port: int) -> int:
    """Returns the pid that the process on this port answers."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return int(await reader.read(64))
        finally:
            writer.close()


async def state_of(launcher: Launcher, name: str) -> ProcessState:
    return next(state for state in await launcher.processes() if state.name == name)


async def in_state(launcher: Launcher, name: str, state: str, restarts: int = 0) -> ProcessState:
    async def reached() -> ProcessState | None:
        now = await state_of(launcher, name)
        return now if now.state == state and now.restarts >= restarts else None

    found: ProcessState = await until(reached)
    return found


@pytest.fixture
def template(tmp_path: Path) -> Callable[..., Template]:
    def make(behaviour: str = "serve", role: str = "decode", **more: Any) -> Template:
        return Template(role, (sys.executable, str(HERE / "launched.py"), behaviour, str(tmp_path)), **{"grace_s": 5.0, **more})

    return make


@pytest.mark.parametrize("state", ["idle", "running", "backoff", "stopping", "exited"])
@pytest.mark.parametrize("event", ["start", "end", "retry", "ask", "gone"])
def test_a_child_follows_its_state_table(state: Life, event: str) -> None:
    if (state, event) in MOVES:
        assert move(state, event) == MOVES[state, event]
        return
    with pytest.raises(IllegalMove, match=f"{state}.*{event}"):
        move(state, event)


async def test_a_hurried_drain_ends_immediately(template: Callable[..., Template], tmp_path: Path) -> None:
    """The process ignores SIGTERM, and its grace alone would last five minutes."""
    launcher = LocalLauncher(RULE)
    await launcher.start()
    await launcher.add(template("stubborn", grace_s=300.0), 1)
    born_as = await born(tmp_path, "decode-0")
    stopping = asyncio.create_task(launcher.stop())
    await in_state(launcher, "decode-0", "stopping")
    done, _ = await asyncio.wait({stopping}, timeout=0.5)
    assert not done, "without `hurry`, the stop must wait for the grace"
    await launcher.hurry()
    async with asyncio.timeout(60):
        assert [ended.state for ended in await stopping] == ["exited"]
    await gone(born_as["pid"])


async def test_processes_that_hand_out_work_are_gone_before_the_others_are_drained(template: Any, tmp_path: Path) -> None:
    launcher = LocalLauncher(RULE)
    await launcher.start()
    await launcher.add(template("stubborn", grace_s=300.0), 1)
    await launcher.add(template("stubborn", role="router", grace_s=1.5, leads=True), 1)
    pids = {name: (await born(tmp_path, name))["pid"] for name in ("decode-0", "router-0")}
    stopping = asyncio.create_task(launcher.stop())
    await until(lambda: told(tmp_path, "router-0", "asked"))
    assert (await state_of(launcher, "decode-0")).state == "running" and not told(tmp_path, "decode-0", "asked")
    await until(lambda: told(tmp_path, "decode-0", "asked"))
    assert not alive(pids["router-0"])
    await launcher.hurry()
    async with asyncio.timeout(60):
        assert {ended.name for ended in await stopping} == set(pids)
    await gone(*pids.values())


async def test_hurry_also_ends_those_whose_turn_has_not_come(template: Any, tmp_path: Path) -> None:
    launcher = LocalLauncher(RULE)
    await launcher.start()
    await launcher.add(template("stubborn", grace_s=300.0), 1)
    await launcher.add(template("stubborn", role="router", grace_s=300.0, leads=True), 1)
    for name in ("decode-0", "router-0"):
        await born(tmp_path, name)
    stopping = asyncio.create_task(launcher.stop())
    await until(lambda: told(tmp_path, "router-0", "asked"))
    await launcher.hurry()
    async with asyncio.timeout(60):
        assert len(await stopping) == 2


class Program:
    """Runs `launching.py` in another process."""

    def __init__(self, how: str, folder: Path, *address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "launching.py"), how, str(folder), *address],
            env={**os.environ, **TOKEN, "PYTHONPATH": str(ROOT)},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> Any:
        """Returns the next JSON that it prints. Skips what Ray prints in between."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith(("{", "[{", "[0", "[-", "[]")):
                return json.loads(text)
        raise AssertionError("the program exited")

    def stop(self) -> Any:
        out, _ = self.process.communicate(timeout=30)
        return json.loads(out.splitlines()[-1])

    def kill(self) -> None:
        """Does not wait for the end of its stdout, because a child may hold it open."""
        with self.process:
            self.process.kill()


@pytest.fixture(scope="module")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in TOKEN.items():
            patch.setenv(key, value)
        Config.initialize("")  # Ray read the mode at import; normally the environment is set before that
        program = Program("ray-empty", tmp_path_factory.mktemp("host"))
        try:
            yield program.line()["address"]
            program.stop()
        finally:
            program.kill()


@pytest.fixture(params=["local", "ray"])
async def launch(request: pytest.FixtureRequest) -> AsyncIterator[Launch]:
    """Starts a launcher of either kind, each with two GPUs to distribute."""
    launchers: list[Launcher] = []

    async def start(**more: Any) -> Launcher:
        launcher: Launcher
        if request.param == "local":
            launcher = LocalLauncher(more.pop("rule", RULE), gpus=TWO, **more)
        else:
            launcher = RayLauncher(request.getfixturevalue("ray_address"), more.pop("rule", RULE), place_timeout_s=10.0, **more)
        launchers.append(launcher)
        await launcher.start()
        return launcher

    yield start
    for launcher in launchers:
        await launcher.stop()


# The contract of all launchers


class OwnBench:
    """A launcher that owns its processes, which share GPUs by halves: four have room."""

    role = "decode"
    patience_s = 40.0

    def __init__(self, manager: Launcher, make: Callable[..., Template], folder: Path) -> None:
        self.manager = manager
        self._make = partial(make, gpus=0.5)
        self._folder = folder

    async def begin(self, count: int) -> None:
        await self.manager.add(self.template(), count)

    def template(self) -> Template:
        return self._make()

    async def ask(self, name: str) -> object:
        start = (await born(self._folder, name))["port"]
        return await ask(start)

    async def end(self, name: str) -> None:
        os.kill((await born(self._folder, name))["pid"], signal.SIGKILL)

    async def fill(self) -> None:
        await self.manager.resize(self.role, 4)
        if isinstance(self.manager, RayLauncher):
            self.manager._place_timeout_s = 0.5


@pytest.mark.parametrize("behaviour", CONTRACT, ids=lambda behaviour: behaviour.__name__)
async def test_the_contract(behaviour: Callable[[Bench], Awaitable[None]], launch: Launch, template: Any, tmp_path: Path) -> None:
    await behaviour(OwnBench(await launch(), template, tmp_path))


# Both launchers that own their processes


def test_each_process_gets_its_share_of_the_roles_cores() -> None:
    """Two colocated workers on two cores must not compete for one of them, or the arms of a comparison would not be equal."""
    two = Template("decode", ("x",), cores=(4, 5, 6, 7), cores_each=2)
    assert [two.cores_of(f"decode-{i}") for i in range(3)] == [(4, 5), (6, 7), (4, 5)]
    assert replace(two, cores_each=None).cores_of("decode-1") == (4, 5, 6, 7) == replace(two, cores_each=9).cores_of("decode-1")
    assert replace(two, cores=None).cores_of("decode-1") == () and two.cores_of("router") == (4, 5)


async def test_processes_start_with_their_names_and_environment(launch: Launch, template: Any, tmp_path: Path, monkeypatch: Any) -> None:
    launcher = await launch()
    await launcher.add(template(env={"BATON_COLOUR": "blue"}, cores=(0,)), 2)
    await launcher.add(template(role="prefill"), 1)
    states = await launcher.processes()
    assert [(state.name, state.role, state.state, state.restarts, state.last_exit) for state in states] == [
        ("decode-0", "decode", "running", 0, None),
        ("decode-1", "decode", "running", 0, None),
        ("prefill-0", "prefill", "running", 0, None),
    ]
    for state in states:
        start = await born(tmp_path, state.name)
        assert start["pid"] == state.pid == start["session"]
        assert await ask(start["port"]) == state.pid
        assert state.node
        assert start["env"]["HOME"] == os.environ["HOME"]
        assert start["env"].get("BATON_COLOUR") == ("blue" if state.role == "decode" else None)
        assert start["cores"] == ([0] if state.role == "decode" else sorted(os.sched_getaffinity(0)))
        # The same as for a process started by hand, without what Ray changes for its own workers.
        assert (start["nice"], start["blocked"], start["cwd"]) == (os.nice(0), [], os.getcwd())
        assert start["env"].get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS")
        assert "RAY_JOB_ID" not in start["env"] and "RAY_RAYLET_PID" not in start["env"]


async def test_a_killed_process_is_restarted_under_its_name(launch: Launch, template: Any, tmp_path: Path) -> None:
    launcher = await launch()
    await launcher.add(template(), 2)
    first, other = await born(tmp_path, "decode-0"), await born(tmp_path, "decode-1")
    os.kill(first["pid"], signal.SIGKILL)
    second = await born(tmp_path, "decode-0", times=2)
    assert second["pid"] != first["pid"] and second["incarnation"] != first["incarnation"]
    state = await in_state(launcher, "decode-0", "running", restarts=1)
    assert (state.pid, state.restarts, state.last_exit) == (second["pid"], 1, -signal.SIGKILL)
    assert await ask(second["port"]) == second["pid"]
    unharmed = await state_of(launcher, "decode-1")
    assert (unharmed.pid, unharmed.restarts) == (other["pid"], 0)


@pytest.mark.parametrize("how", ["hang", "stall"])
async def test_a_hung_process_is_killed_and_restarted(launch: Launch, template: Any, tmp_path: Path, how: str) -> None:
    launcher = await launch(rule=replace(RULE, hang_s=1.0))
    await launcher.add(template(), 1)  # sends no pulses at all, like a program that is not ours
    await launcher.add(template(how, role="prefill", grace_s=0.5), 1)
    first, other = await born(tmp_path, "prefill-0"), await born(tmp_path, "decode-0")
    second = await born(tmp_path, "prefill-0", times=2)
    assert second["pid"] != first["pid"] and not alive(first["pid"]) and second["at"] - first["at"] >= 1.0
    state = await in_state(launcher, "prefill-0", "running", restarts=1)
    assert state.last_exit == -signal.SIGKILL
    unharmed = await state_of(launcher, "decode-0")
    assert (unharmed.pid, unharmed.restarts) == (other["pid"], 0)


async def test_a_briefly_silent_process_is_not_killed(launch: Launch, template: Any, tmp_path: Path) -> None:
    """Negative control for the test above: the same silence, but within the limit."""
    launcher = await launch(rule=replace(RULE, hang_s=30.0))
    await launcher.add(template("hang", grace_s=0.5), 1)
    process = await born(tmp_path, "decode-0")
    await asyncio.sleep(1.5)
    assert (await state_of(launcher, "decode-0")).pid == process["pid"]


async def test_a_crash_loop_backs_off_and_leaves_other_processes_alone(launch: Launch, template: Any, tmp_path: Path) -> None:
    launcher = await launch()
    await launcher.add(template(), 1)
    await launcher.add(template("crash", role="prefill"), 1)
    healthy = await born(tmp_path, "decode-0")
    waiting = await in_state(launcher, "prefill-0", "backoff", restarts=2)
    assert (waiting.pid, waiting.last_exit) == (None, 3)
    await born(tmp_path, "prefill-0", times=5)
    starts = [start["at"] for start in told(tmp_path, "prefill-0")]
    # The time between two starts is at least the wait. Without a wait it would be 0.2 s.
    assert all(later - earlier >= wait for earlier, later, wait in zip(starts, starts[1:], (0.1, 0.2, 0.4, 0.8), strict=False))
    assert await ask(healthy["port"]) == healthy["pid"]
    assert (await state_of(launcher, "decode-0")).restarts == 0


async def test_shrinking_drains_the_highest_numbers_by_sigterm(launch: Launch, template: Any, tmp_path: Path) -> None:
    launcher = await launch()
    await launcher.add(template(), 3)
    starts = [await born(tmp_path, f"decode-{index}") for index in range(3)]
    ended = await launcher.resize("decode", 1)
    assert [(state.name, state.state, state.pid, state.last_exit) for state in ended] == [
        ("decode-2", "exited", None, 0),
        ("decode-1", "exited", None, 0),
    ]
    assert told(tmp_path, "decode-1", "asked") and told(tmp_path, "decode-2", "asked")
    assert not any(alive(start["pid"]) for start in starts[1:])
    await launcher.resize("decode", 2)
    assert [state.name for state in await launcher.processes()] == ["decode-0", "decode-3"]


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(launch: Launch, template: Any, tmp_path: Path) -> None:
    launcher = await launch()
    await launcher.add(template("stubborn", grace_s=1.0), 1)
    pid = (await born(tmp_path, "decode-0"))["pid"]
    shrinking = asyncio.create_task(launcher.resize("decode", 0))
    await until(lambda: told(tmp_path, "decode-0", "asked"))
    assert (await state_of(launcher, "decode-0")).state == "stopping" and alive(pid)
    assert [(state.state, state.last_exit) for state in await shrinking] == [("exited", -signal.SIGKILL)]
    assert not alive(pid)
    assert await launcher.processes() == []


async def test_a_drain_continues_when_its_caller_is_cancelled(launch: Launch, template: Any, tmp_path: Path) -> None:
    launcher = await launch()
    await launcher.add(template("stubborn", grace_s=1.0), 1)
    pid = (await born(tmp_path, "decode-0"))["pid"]
    shrinking = asyncio.create_task(launcher.resize("decode", 0))
    await until(lambda: told(tmp_path, "decode-0", "asked"))
    shrinking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await shrinking
    assert (await state_of(launcher, "decode-0")).state == "stopping"

    async def empty() -> bool:
        return await launcher.processes() == []

    await until(empty)
    assert not alive(pid)


async def test_stop_leaves_nothing_running(launch: Launch, template: Any, tmp_path: Path) -> None:
    launcher = await launch(rule=replace(RULE, backoff_s=60.0, max_backoff_s=60.0))  # so that what crashed has not started again
    await launcher.add(template("stubborn", grace_s=1.0), 2)
    await launcher.add(template("parent", role="prefill"), 1)
    await launcher.add(template("crash", role="router"), 1)
    starts = [await born(tmp_path, name) for name in ("decode-0", "decode-1", "prefill-0")]
    await in_state(launcher, "router-0", "backoff")
    ended = await launcher.stop()
    assert [(state.name, state.last_exit) for state in ended] == [("decode-0", -9), ("decode-1", -9), ("prefill-0", -15), ("router-0", 3)]
    await gone(*(start["pid"] for start in starts), starts[2]["grandchild"])
    # All received SIGTERM before any was killed: they stop in parallel, not one after another.
    assert told(tmp_path, "decode-0", "asked") and told(tmp_path, "decode-1", "asked")
    assert await launcher.processes() == [] and await launcher.stop() == []
    with pytest.raises(BatonError) as refused:
        await launcher.add(template(), 1)
    assert refused.value.reason is Reason.DRAINING


async def test_gpus_are_distributed_and_reused_after_a_drain(launch: Launch, template: Any, tmp_path: Path) -> None:
    launcher = await launch()
    await launcher.add(template(role="prefill", gpus=1.0), 2)
    await launcher.add(template(role="router"), 1)
    given = {name: (await born(tmp_path, name))["env"]["CUDA_VISIBLE_DEVICES"] for name in ("prefill-0", "prefill-1", "router-0")}
    assert sorted(given.values()) == ["", "0", "1"] and given["router-0"] == ""
    await launcher.resize("prefill", 1)
    await launcher.add(template(gpus=1.0), 1)
    assert (await born(tmp_path, "decode-0"))["env"]["CUDA_VISIBLE_DEVICES"] == given["prefill-1"]


async def test_a_gpu_is_shared_by_those_that_ask_for_a_part_of_one(launch: Launch, template: Any, tmp_path: Path) -> None:
    launcher = await launch()
    await launcher.add(template(role="prefill", gpus=0.5), 2)
    await launcher.add(template(gpus=1.0), 1)
    given = {name: (await born(tmp_path, name))["env"]["CUDA_VISIBLE_DEVICES"] for name in ("prefill-0", "prefill-1", "decode-0")}
    assert given["prefill-0"] == given["prefill-1"] and {given["prefill-0"], given["decode-0"]} == {"0", "1"}


async def test_a_process_of_several_ranks_gets_as_many_gpus(launch: Launch, template: Any, tmp_path: Path) -> None:
    launcher = await launch()
    await launcher.add(template(gpus=2.0), 1)
    assert sorted((await born(tmp_path, "decode-0"))["env"]["CUDA_VISIBLE_DEVICES"].split(",")) == ["0", "1"]


async def test_processes_without_room_are_refused_and_none_starts(launch: Launch, template: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = await launch()

    async def refused(attempt: Awaitable[Any], message: str) -> None:
        with monkeypatch.context() as patch, pytest.raises(BatonError, match=message) as error:
            patch.setattr(launcher, "_place_timeout_s", 0.5, raising=False)
            await attempt
        assert error.value.reason is Reason.SATURATED

    await refused(launcher.add(template(role="prefill", gpus=1.0), 3), r"prefill: no room for 3 processes of .*1 GPUs each")
    assert await launcher.processes() == []
    await launcher.add(template(role="prefill", gpus=1.0), 2)
    await refused(launcher.add(template(gpus=0.5), 1), r"decode: no room for 1 processes of .*0\.5 GPUs each")
    assert {state.role for state in await launcher.processes()} == {"prefill"}


# Local


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
async def test_a_killed_launcher_leaves_no_child(tmp_path: Path) -> None:
    program = Program("local", tmp_path)
    (child,) = (await asyncio.to_thread(program.line))["children"]
    await born(tmp_path, "decode-0")
    program.kill()
    try:
        await gone(child)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)
    assert not told(tmp_path, "decode-0", "asked")


async def test_without_its_leash_the_child_of_a_killed_launcher_lives_on(tmp_path: Path) -> None:
    """Negative control for the test above."""
    program = Program("local-without-leash", tmp_path)
    (child,) = (await asyncio.to_thread(program.line))["children"]
    try:
        start = await born(tmp_path, "decode-0")
        program.kill()
        await asyncio.sleep(0.5)
        assert await ask(start["port"]) == child
    finally:
        os.kill(child, signal.SIGKILL)


async def test_output_goes_to_the_log_named_after_the_process(tmp_path: Path) -> None:
    launcher = LocalLauncher(RULE, log_dir=tmp_path / "logs")
    await launcher.start()
    await launcher.add(Template("router", ("/no/such/program",)), 1)
    state = await in_state(launcher, "router-0", "backoff", restarts=1)
    assert state.last_exit == 1
    await launcher.stop()
    assert "cannot start /no/such/program" in (tmp_path / "logs" / "router-0.log").read_text()


async def test_the_end_of_the_event_loop_ends_the_children(tmp_path: Path, template: Any) -> None:
    """Nothing called stop(), but asyncio.run cancels the remaining tasks."""

    async def careless() -> int:
        launcher = LocalLauncher(RULE)
        await launcher.add(template("stubborn"), 1)
        return int((await born(tmp_path, "decode-0"))["pid"])

    await gone(await asyncio.to_thread(asyncio.run, careless()))


# Ray


async def joined(address: str, **more: Any) -> RayLauncher:
    launcher = RayLauncher(address, RULE, **more)
    await launcher.start()
    return launcher


async def test_a_killed_supervisor_comes_back_with_one_child(ray_address: str, template: Any, tmp_path: Path) -> None:
    launcher = await joined(ray_address)
    try:
        await launcher.add(template("parent"), 1)
        first = await born(tmp_path, "decode-0")
        supervisor = int(Path(f"/proc/{first['pid']}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(supervisor, signal.SIGKILL)
        second = await born(tmp_path, "decode-0", times=2)
        assert not alive(first["pid"]) and second["incarnation"] != first["incarnation"]
        state = await in_state(launcher, "decode-0", "running", restarts=1)
        assert (state.pid, state.restarts) == (second["pid"], 1)
    finally:
        await launcher.stop()
    await gone(second["pid"])


async def test_a_killed_driver_leaves_no_child_but_leaves_the_ray_cluster_running(ray_address: str, tmp_path: Path) -> None:
    program = Program("ray", tmp_path, ray_address)
    (child,) = (await asyncio.to_thread(program.line))["children"]
    assert (await born(tmp_path, "decode-0"))["env"]["PYTHONPATH"] == str(ROOT)
    program.kill()
    await gone(child)
    await (await joined(ray_address)).stop()


async def test_a_shrunk_group_keeps_its_resources_for_reuse_until_it_is_empty(ray_address: str, template: Any) -> None:
    launcher = await joined(ray_address)
    try:
        await free_cpus(8)
        await launcher.add(template(cpus=2.0), 2)
        await launcher.resize("decode", 3)
        await free_cpus(2)
        await launcher.resize("decode", 1)
        await free_cpus(4)  # the third place is freed; of the first two, the unused one stays reserved
        await launcher.add(template(role="prefill", cpus=2.0), 1)
        await free_cpus(4)
        await launcher.resize("decode", 0)
        await launcher.resize("prefill", 0)
        await free_cpus(8)
    finally:
        await launcher.stop()


async def test_a_cancelled_growth_leaves_nothing_behind(ray_address: str, template: Any) -> None:
    launcher = await joined(ray_address)
    try:
        await launcher.add(template(cpus=1.0), 1)
        growing = asyncio.create_task(launcher.resize("decode", 2))
        await free_cpus(6)
        growing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await growing
        assert [state.name for state in await launcher.processes()] == ["decode-0"]
        await free_cpus(7)
    finally:
        await launcher.stop()


async def test_placement_packs_or_spreads_over_two_nodes(second_node: str, template: Any) -> None:
    launcher = await joined(second_node)
    try:
        for role, placement, nodes in (("prefill", "pack", 1), ("decode", "spread", 2), ("router", "strict-spread", 2)):
            await launcher.add(template(role=role, placement=placement), 2)
            assert len({state.node for state in await launcher.processes() if state.role == role}) == nodes
    finally:
        await launcher.stop()
    launcher = await joined(second_node, place_timeout_s=2.0)
    try:
        with pytest.raises(BatonError, match="no room for 3 processes") as refused:
            await launcher.add(template(role="other", placement="strict-spread"), 3)
        assert refused.value.reason is Reason.SATURATED
    finally:
        await launcher.stop()


async def free_cpus(count: float) -> None:
    await until(lambda: ray.available_resources().get("CPU", 0) == count)


@pytest.fixture
async def second_node(ray_address: str, tmp_path: Path) -> AsyncIterator[str]:
    """Returns the address of a cluster with a second node that has 4 CPUs."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--address", ray_address, "--num-cpus", "4", "--block"]
    with open(tmp_path / "node.log", "wb") as log:
        node = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        launcher = await joined(ray_address)
        await free_cpus(12)
        await launcher.stop()
        yield ray_address
    finally:
        node.terminate()
        node.wait(20)


async def test_a_ray_cluster_that_the_launcher_started_ends_with_stop(tmp_path: Path) -> None:
    program = Program("ray", tmp_path)
    try:
        up = await asyncio.to_thread(program.line)
        await born(tmp_path, "decode-0")
        family = descendants(up["pid"])
        assert up["children"][0] in family and len(family) > 4  # GCS, raylet, agents, supervisor, child
        assert await asyncio.to_thread(program.stop) == [0]
        await gone(*family)
    finally:
        program.kill()


async def test_a_ray_cluster_that_the_launcher_starts_hands_out_the_gpus_that_were_settled_on(
    template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their own names: numbers would mean others, where CUDA_VISIBLE_DEVICES or a full GPU has left some out."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    names = ("GPU-5a5a", "GPU-7b7b")
    launcher = RayLauncher(
        None, RULE, ray_num_cpus=4, gpus=Gpus(tuple(Device(name, at, "H100", 80 << 30, 0) for at, name in enumerate(names)))
    )
    await launcher.start()
    try:
        assert await launcher.gpus() == 2.0
        await launcher.add(template(gpus=1.0), 2)
        given = [(await born(tmp_path, f"decode-{number}"))["env"]["CUDA_VISIBLE_DEVICES"] for number in range(2)]
        assert sorted(given) == [*names]
    finally:
        await launcher.stop()


def test_a_driver_takes_its_time_after_a_sigterm(tmp_path: Path, ray_address: str) -> None:
    program = Program("ray-empty", tmp_path, ray_address)
    try:
        os.kill(program.line()["pid"], signal.SIGTERM)
        assert program.line() == [0, "SIGTERM"]
        with pytest.raises(subprocess.TimeoutExpired):
            program.process.wait(6)
        assert program.stop() == [] and program.process.returncode == 0
    finally:
        program.kill()


def test_with_the_handler_of_ray_it_is_aborted(tmp_path: Path, ray_address: str) -> None:
    """Negative control."""
    program = Program("ray-aborting", tmp_path, ray_address)
    try:
        os.kill(program.line()["pid"], signal.SIGTERM)
        assert program.line() == [0, "SIGTERM"]
        assert program.process.wait(30) == -signal.SIGABRT
    finally:
        program.kill()


def descendants(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]


async def test_a_dead_address_is_refused_quickly() -> None:
    with pytest.raises(BatonError, match=r"no Ray cluster at 127\.0\.0\.1:9"):
        await joined("127.0.0.1:9")


async def test_a_ray_that_does_not_start_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error without a text is told by its kind."""
    monkeypatch.setattr(ray_launcher, "JOIN_S", 0.01)
    monkeypatch.setattr(RayLauncher, "_connect", lambda self: time.sleep(0.1))
    with pytest.raises(BatonError, match=r"no Ray cluster at this machine: TimeoutError$"):
        await joined("")


# Rules, with a manual clock


def test_the_wait_doubles_up_to_its_maximum_and_resets_after_a_stable_run() -> None:
    restarts = Restarts(RestartRule(backoff_s=0.5, max_backoff_s=3.0, stable_s=10.0))
    waits = []
    for now in range(0, 50, 5):  # each run takes a second
        restarts.started(now)
        waits.append(restarts.exited(now + 1))
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    restarts.started(100)
    assert restarts.exited(109.9) == 3.0
    restarts.started(200)
    assert [restarts.exited(210), restarts.count] == [0.5, 11]


def test_the_watchdog_judges_only_processes_that_have_sent_a_pulse() -> None:
    watchdog = Watchdog(10.0, 0.0)
    looks = [watchdog.look(now / 10, None) for now in range(6000)]
    assert not any(looks), "a process that loads its model, or never sends pulses, must not be judged"
    assert watchdog.look(600.0, 0.0) is None
    assert [watchdog.look(600.1 + now / 10, None) is None for now in range(98)] == [True] * 98
    assert watchdog.look(610.1, None) is not None


def test_the_watchdog_acts_on_the_stall_time_that_a_process_reports() -> None:
    watchdog = Watchdog(10.0, 0.0)
    assert watchdog.look(0.1, 9.9) is None and watchdog.look(0.2, None) is None and watchdog.look(0.3, 0.0) is None
    assert "no progress" in (watchdog.look(0.4, 10.0) or "")


def test_a_pause_of_the_supervisor_does_not_count_against_the_process() -> None:
    """If the machine or the supervisor was suspended, the pulses of that time were not sent or not read."""
    watchdog = Watchdog(10.0, 0.0)
    assert watchdog.look(0.1, 0.0) is None
    assert watchdog.look(3600.0, None) is None and watchdog.look(3600.1, None) is None
    assert watchdog.look(3600.2, 0.0) is None


def test_restarts_never_give_up() -> None:
    restarts = Restarts(RestartRule())
    for now in range(5000):
        restarts.started(now)
        assert 0 < restarts.exited(now) <= 30.0


def test_the_roster_never_uses_a_name_twice() -> None:
    roster, template = Roster(), Template("decode", ("x",))
    assert roster.add(template, 2) == ["decode-0", "decode-1"]
    assert roster.resize("decode", 4) == (["decode-2", "decode-3"], [])
    assert roster.resize("decode", 1) == ([], ["decode-3", "decode-2", "decode-1"])
    assert roster.resize("decode", 2) == (["decode-4"], [])
    roster.withdraw("decode", ["decode-4"])
    assert roster.resize("decode", 1) == ([], [])
    roster.resize("decode", 0)
    assert roster.add(template, 1) == ["decode-5"]  # an empty role may get another template


def test_the_roster_refuses_invalid_changes() -> None:
    roster, template = Roster(), Template("decode", ("x",))
    roster.add(template, 1)
    for attempt in (
        lambda: roster.resize("encode", 1),
        lambda: roster.resize("decode", -1),
        lambda: roster.add(template, 1),
        lambda: roster.add(Template("prefill", ("x",)), -1),
    ):
        with pytest.raises(BatonError) as refused:
            attempt()
        assert refused.value.reason is Reason.INVALID_FIELD
    assert roster.resize("decode", 1) == ([], [])


@pytest.mark.parametrize("wrong", [{"role": ""}, {"argv": ()}, {"gpus": 1.5}, {"cpus": -1.0}, {"grace_s": -1.0}])
def test_an_invalid_template_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BatonError) as refused:
        Template(**{"role": "decode", "argv": ("x",), **wrong})
    assert refused.value.reason is Reason.INVALID_FIELD
