"""The lifecycle of a process: it starts, drains and closes in order, a second stop request cuts this short, and a failure exits with 1."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from baton.clock import loop_time
from baton.cluster.config import Config, RedisConfig
from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.lifecycle import CANNOT, CLOSE_S, MOVES, YOUNG, Stage, Stop, move, run, settle
from baton.cluster.rpc import Server
from baton.engine.options import ModelOptions
from baton.models.make_small import make_toy
from baton.moves import IllegalMove
from router.wiring import RouterProcess

ROOT = Path(__file__).resolve().parents[2]


class Recorded:
    """A process that acts as the test specifies and records the calls it receives."""

    def __init__(self, **acts: Callable[[], Any]) -> None:
        self.acts = acts
        self.seen: list[str] = []

    async def start(self) -> None:
        await self._do("start")

    async def drain(self) -> None:
        await self._do("drain")

    async def close(self) -> None:
        await self._do("close")

    async def _do(self, name: str) -> None:
        self.seen.append(name)
        try:
            if (done := self.acts.get(name, lambda: None)()) is not None:
                await done
        except asyncio.CancelledError:
            self.seen.append(f"{name} given up")
            raise


def forever() -> Any:
    return asyncio.Event().wait()


def fails(error: BaseException) -> Callable[[], Any]:
    async def fail() -> None:
        raise error

    return fail


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def ended(task: "asyncio.Task[int]") -> int:
    async with asyncio.timeout(30):
        return await task


# Stages


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("event", ["ready", "drain", "close", "nonsense"])
def test_only_the_moves_in_the_table_are_legal(stage: Stage, event: str) -> None:
    if (stage, event) in MOVES:
        assert move(stage, event) is MOVES[stage, event]
        return
    with pytest.raises(IllegalMove, match=f"{stage.value}.*{event}"):
        move(stage, event)


def test_moves_only_lead_forward_and_never_out_of_closed() -> None:
    order = list(Stage)
    assert all(order.index(target) > order.index(stage) for (stage, _), target in MOVES.items())
    assert not [event for stage, event in MOVES if stage is Stage.CLOSED]


# Run


@pytest.mark.virtual_time
async def test_a_process_starts_drains_and_closes_in_order() -> None:
    process, stop = Recorded(), Stop()
    task = asyncio.create_task(run(process, stop))
    await until(lambda: process.seen == ["start"])
    await asyncio.sleep(0.05)
    assert not task.done()
    stop.ask()
    assert await ended(task) == 0 and process.seen == ["start", "drain", "close"]


@pytest.mark.virtual_time
async def test_a_second_stop_request_cuts_the_drain_short() -> None:
    process, stop = Recorded(drain=forever), Stop()
    task = asyncio.create_task(run(process, stop))
    await until(lambda: process.seen == ["start"])
    await asyncio.sleep(0.01)
    stop.ask()
    await until(lambda: "drain" in process.seen)
    await asyncio.sleep(0.05)
    assert not task.done(), "after one stop request the process waits for the drain"
    stop.ask()
    assert await ended(task) == 0 and process.seen == ["start", "drain", "drain given up", "close"]


async def test_a_stop_request_during_the_start_cancels_it_and_closes() -> None:
    process, stop = Recorded(start=forever), Stop()
    task = asyncio.create_task(run(process, stop))
    await until(lambda: process.seen)
    stop.ask()
    assert await ended(task) == 0 and process.seen == ["start", "start given up", "close"]


async def test_a_failed_start_closes_and_exits_with_1() -> None:
    process = Recorded(start=fails(RuntimeError("no model")))
    assert await ended(asyncio.create_task(run(process, Stop()))) == 1
    assert process.seen == ["start", "close"]


@pytest.mark.virtual_time
async def test_a_failed_drain_closes_and_exits_with_1() -> None:
    process, stop = Recorded(drain=fails(RuntimeError("no"))), Stop()
    task = asyncio.create_task(run(process, stop))
    await until(lambda: process.seen)
    await asyncio.sleep(0.01)
    stop.ask()
    assert await ended(task) == 1 and process.seen == ["start", "drain", "close"]


@pytest.mark.virtual_time
@pytest.mark.parametrize("acts", [{}, {"start": forever}], ids=["serving", "starting"])
async def test_a_fatal_failure_skips_the_drain(acts: dict[str, Any]) -> None:
    process, stop = Recorded(**acts), Stop()
    task = asyncio.create_task(run(process, stop))
    await until(lambda: process.seen)
    await asyncio.sleep(0.01)
    stop.fail(RuntimeError("the engine is gone"))
    stop.fail(RuntimeError("a later one"))
    assert await ended(task) == 1 and "drain" not in process.seen and process.seen[-1] == "close"
    assert str(stop.failure) == "the engine is gone"


@pytest.mark.virtual_time
async def test_a_fatal_failure_during_the_drain_cancels_it() -> None:
    process, stop = Recorded(drain=forever), Stop()
    task = asyncio.create_task(run(process, stop))
    await until(lambda: process.seen)
    await asyncio.sleep(0.01)
    stop.ask()
    await until(lambda: "drain" in process.seen)
    stop.fail(RuntimeError("no"))
    assert await ended(task) == 1 and process.seen[-2:] == ["drain given up", "close"]


@pytest.mark.virtual_time
async def test_a_second_stop_request_abandons_a_start_that_resists_cancellation() -> None:
    async def stubborn() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.5)
                return

    process, stop = Recorded(start=stubborn), Stop()
    task = asyncio.create_task(run(process, stop))
    await until(lambda: process.seen)
    stop.ask()
    await asyncio.sleep(0.05)
    assert process.seen == ["start"], "after one stop request the process waits for the start to clean up"
    stop.ask()
    await until(lambda: process.seen == ["start", "close"])
    assert await ended(task) == 0 and loop_time() < 0.5


@pytest.mark.virtual_time
async def test_a_second_stop_request_cuts_the_closing_short() -> None:
    process, stop, within = Recorded(close=forever), Stop(), list[float]()
    task = asyncio.create_task(run(process, stop, within.append))
    await until(lambda: process.seen)
    stop.ask()
    await until(lambda: "close" in process.seen)
    await asyncio.sleep(0.05)
    assert not task.done(), "after one stop request the process waits until everything is closed"
    stop.ask()
    assert await ended(task) == 0 and process.seen[-1] == "close given up"
    assert len(within) == 2 and within[1] < 1 < within[0], "the second request leaves the process less than a second"


@pytest.mark.virtual_time
async def test_closing_has_a_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    process, stop = Recorded(close=forever), Stop()
    stop.ask()
    assert await ended(asyncio.create_task(run(process, stop))) == 1
    assert process.seen[-1] == "close given up" and "closing" in caplog.text and loop_time() == CLOSE_S


async def test_an_unexpected_error_while_closing_is_a_failure_with_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    process, stop = Recorded(close=fails(KeyError("x"))), Stop()
    stop.ask()
    assert await ended(asyncio.create_task(run(process, stop))) == 1
    assert isinstance(stop.failure, KeyError) and caplog.records[-1].exc_info


@pytest.mark.parametrize(
    ("error", "traceback"),
    [
        (KeyError("x"), True),
        (TypeError("x"), True),
        (OSError("no file"), False),
        (BatonError(Reason.INTERNAL, "taken"), False),
        (ValueError("no"), False),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_only_unexpected_errors_are_logged_with_a_traceback(
    error: Exception, traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    status = CANNOT if isinstance(error, ValueError) else 1
    assert await ended(asyncio.create_task(run(Recorded(start=fails(error)), Stop()))) == status
    assert bool(caplog.records[-1].exc_info) == traceback and str(error) in caplog.records[-1].getMessage()


async def test_sigterm_requests_a_stop_and_its_handler_is_restored() -> None:
    process, stop = Recorded(), Stop()
    task = asyncio.create_task(run(process, stop))
    await until(lambda: process.seen)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await ended(task) == 0 and process.seen == ["start", "drain", "close"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# Real processes

HANGING = """
    import asyncio, sys
    from baton.cluster.lifecycle import Stop, run

    class Hanging:
        async def start(self):
            print("started", flush=True)
        async def drain(self):
            print("draining", flush=True)
            await asyncio.Event().wait()
        async def close(self):
            print("closed", flush=True)

    async def main():
        return await run(Hanging(), Stop())

    sys.exit(asyncio.run(main()))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_cuts_the_drain_of_a_real_process_short(number: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(HANGING)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "started\n"
        child.send_signal(number)
        assert child.stdout.readline() == "draining\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        child.send_signal(number)
        assert child.wait(5) == 0 and child.stdout.read() == "closed\n"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


STUCK = """
    import asyncio, sys, threading
    from baton.cluster.lifecycle import LastResort, Stop, run

    class Stuck:
        async def start(self):
            print("started", flush=True)
        async def drain(self):
            pass
        async def close(self):
            print("closing", flush=True)
            await asyncio.to_thread(threading.Event().wait)

    sys.exit(asyncio.run(run(Stuck(), Stop(), LastResort())))
"""


def test_a_second_signal_ends_a_process_with_a_hung_thread() -> None:
    """Both asyncio and the interpreter would wait for the thread."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STUCK)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "started\n"
        child.terminate()
        assert child.stdout.readline() == "closing\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
        child.terminate()
        assert child.wait(4) == 1
    finally:
        child.kill()
        child.communicate()


# The lifecycle of the router


def router(model: Path, stop: Stop, **ports: int) -> RouterProcess:
    fields: dict[str, Any] = {"port": 0, "admin_port": 0, "http_port": 0, "page_port": 0, **ports}
    config = RouterConfig(**fields)
    return RouterProcess(Config(model=ModelOptions(path=str(model)), redis=RedisConfig(url="redis://127.0.0.1:1"), router=config), stop)


async def stops_and_fails(server: Server, grace: float | None) -> None:
    await server.grpc.stop(grace)
    raise RuntimeError("does not stop")


async def note(seen: list[str], name: str) -> None:
    seen.append(name)


async def left() -> "set[asyncio.Task[Any]]":
    """Returns the tasks that are still running."""
    await asyncio.sleep(0)
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_a_router_without_its_model_fails_and_leaves_no_task(tmp_path: Path) -> None:
    stop = Stop()
    process = router(tmp_path / "nothing", stop)
    assert await run(process, stop) == CANNOT and "holds no tokenizer.json" in str(stop.failure) and process.stage is Stage.CLOSED
    assert not await left()


async def test_a_router_whose_port_is_taken_fails_and_names_the_port(tmp_path: Path) -> None:
    make_toy(tmp_path / "toy")
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    stop, port = Stop(), taken.sockets[0].getsockname()[1]
    assert await run(router(tmp_path / "toy", stop, admin_port=port), stop) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in str(stop.failure) and not await left()
    taken.close()


async def test_a_router_closes_every_part_even_if_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_toy(tmp_path / "toy")
    stop = Stop()
    process = router(tmp_path / "toy", stop)
    closed: list[str] = []
    monkeypatch.setattr(Server, "stop", stops_and_fails)
    for part in (process._workers, process._registry):
        process._closers.push_async_callback(note, closed, type(part).__name__)
    await process.start()
    with pytest.raises(RuntimeError, match="does not stop"):
        await process.close()
    assert closed == ["RedisRegistry", "GrpcWorkers"] and not await left()


async def test_a_router_starts_without_its_registry_and_leaves_no_task(tmp_path: Path) -> None:
    make_toy(tmp_path / "toy")
    stop = Stop()
    process = router(tmp_path / "toy", stop)
    task = asyncio.create_task(run(process, stop))
    await until(lambda: process.stage is Stage.READY or task.done())
    await asyncio.sleep(0.2)
    assert not task.done()
    stop.ask()
    assert await ended(task) == 0 and process.stage is Stage.CLOSED
    assert not await left()
    with pytest.raises(OSError):
        await asyncio.open_connection(*process.address.rsplit(":", 1))


@pytest.fixture
def collector() -> Iterator[None]:
    """The garbage collector is left as it was."""
    gc.unfreeze()  # Python's own few
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


async def test_what_the_start_made_is_not_looked_at_again(collector: None) -> None:
    frozen: list[int] = []
    process, stop = Recorded(start=lambda: frozen.append(gc.get_freeze_count())), Stop()
    running = asyncio.create_task(run(process, stop, settled=settle))
    await until(lambda: gc.get_freeze_count())
    stop.ask()
    assert await ended(running) == 0
    assert frozen == [0] and gc.get_freeze_count() > 10_000 and gc.get_threshold()[0] == YOUNG and gc.isenabled()


async def test_a_generator_that_nobody_closes_is_closed_after_it_settled(collector: None) -> None:
    closed = asyncio.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closed.set()

    settle()
    assert await anext(numbers()) == 1
    gc.collect()
    async with asyncio.timeout(30):
        await closed.wait()
