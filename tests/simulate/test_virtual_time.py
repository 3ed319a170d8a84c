"""Time that jumps: order, time-outs, and what cannot be waited for."""

import asyncio
import threading

import pytest

from baton.simulate.virtual_time import Deadlock, run


async def test_this_loop_is_a_real_one() -> None:
    """Negative control: here an hour would take an hour."""
    before = asyncio.get_running_loop().time()
    await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - before < 60


def test_hours_pass_in_the_order_of_their_ends() -> None:
    ends: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        ends.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleeper("day", 86400), sleeper("hour", 3600), sleeper("moment", 0.001))

    run(main())
    assert [name for name, _ in ends] == ["moment", "hour", "day"]
    assert [at for _, at in ends] == pytest.approx([0.001, 3600, 86400])


def test_a_timeout_ends_a_wait_that_would_last_for_ever() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(1000)


def test_a_function_for_a_thread_runs_in_the_loops_own() -> None:
    async def main() -> tuple[int, float]:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return await asyncio.to_thread(threading.get_ident), asyncio.get_running_loop().time()

    assert run(main()) == (threading.get_ident(), 0.0)


def test_when_nothing_can_happen_any_more_the_run_ends() -> None:
    async def main() -> None:
        await asyncio.sleep(5)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="at 5 s everybody waits"):
        run(main())
