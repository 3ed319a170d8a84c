"""Cores that are shared: who waits, and for how long."""

import asyncio
import random

import pytest

from baton.simulate.cores import Cores, Kind, OwnCores, Speeds, Thread
from baton.simulate.virtual_time import run


def ends(cores: Cores | OwnCores, jobs: list[tuple[float, float]]) -> list[float]:
    """When each job (when it comes, seconds of work) has ended."""

    async def one(at: float, seconds: float) -> float:
        await asyncio.sleep(at)
        await cores.work(seconds)
        return asyncio.get_running_loop().time()

    async def main() -> list[float]:
        return list(await asyncio.gather(*(one(*job) for job in jobs)))

    return run(main())


def test_as_many_jobs_as_cores_do_not_wait_and_more_share() -> None:
    assert ends(Cores(2), [(0, 3), (0, 3)]) == pytest.approx([3, 3])
    assert ends(Cores(2), [(0, 3), (0, 3), (0, 3)]) == pytest.approx([4.5] * 3)
    assert ends(OwnCores(), [(0, 3), (0, 3), (0, 3)]) == pytest.approx([3] * 3), "negative control: nobody shares"


def test_a_short_job_that_comes_later_slows_the_others_while_it_lasts() -> None:
    """Two alone until 1; then three at two thirds until the short one has had its second at 2.5; then 1 of the first two are left."""
    assert ends(Cores(2), [(0, 3), (0, 3), (1, 1)]) == pytest.approx([3.5, 3.5, 2.5])


@pytest.mark.parametrize(
    ("jobs", "ended"),
    [
        ([("prompt", 4), ("prompt", 3)], [4.75, 3.75]),  # the last second alone
        ([("decode", 4), ("decode", 3)], [7, 6]),
        ([("prompt", 4), ("decode", 3)], [4 / 0.6, 7]),  # the decode's last third of a second alone
        ([("decode", 4), ("other", 3)], [5.5, 3]),  # three seconds at half of its speed
        ([("prompt", 4), ("other", 4)], [4.4, 4]),
        ([("decode", 2), ("prompt", 100), ("other", 100)], [2 / 0.45 * 1.5]),  # two of three run: it is beside either as often as the other
    ],
)
def test_how_fast_a_core_goes_depends_on_what_it_and_another_do(jobs: list[tuple[Kind, float]], ended: list[float]) -> None:
    async def main() -> list[float]:
        cores, loop = Cores(2, Speeds(0.8, 0.5, 0.6, 0.4, prompt_crowded=0.9, decode_crowded=0.5)), asyncio.get_running_loop()

        async def one(kind: Kind, seconds: float) -> float:
            await cores.work(seconds, kind)
            return loop.time()

        return list(await asyncio.gather(*(one(*job) for job in jobs)))

    assert run(main())[: len(ended)] == pytest.approx(ended)
    with pytest.raises(ValueError, match="above 0"):
        Speeds(decode=0.0)


def test_no_work_is_lost_and_none_is_done_twice() -> None:
    rng = random.Random(5)
    jobs = [(rng.random() * 10, rng.random()) for _ in range(200)]
    done = ends(Cores(2), jobs)
    total = sum(seconds for _, seconds in jobs)
    assert max(done) >= total / 2 and all(end >= at + seconds - 1e-9 for end, (at, seconds) in zip(done, jobs, strict=True))
    assert max(done) <= 10 + total / 2 + 1


def test_a_job_that_is_given_up_takes_nothing_more() -> None:
    async def main() -> float:
        cores = Cores(1)
        other = asyncio.create_task(cores.work(10))
        mine = asyncio.create_task(cores.work(3))
        await asyncio.sleep(2)
        other.cancel()
        await mine
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(4)


def test_a_thread_does_one_thing_after_the_other_and_a_given_up_turn_is_passed_on() -> None:
    async def main() -> list[float]:
        thread, loop = Thread(OwnCores()), asyncio.get_running_loop()

        async def one(seconds: float) -> float:
            await thread.work(seconds)
            return loop.time()

        first, second, third = (asyncio.create_task(one(seconds)) for seconds in (2, 5, 1))
        await asyncio.sleep(1)
        second.cancel()
        return [await first, await third]

    assert run(main()) == pytest.approx([2, 3])
