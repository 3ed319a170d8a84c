"""The measure of a loop's turns: what is long is found and named, and what only waits, or gives way, is not."""

import asyncio
import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest
from turns import watched

BOUND_S, LONG_S = 0.020, 0.050


def work(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


async def greedy() -> None:
    await asyncio.sleep(0)
    work(LONG_S)
    await asyncio.sleep(0)


async def test_a_callback_that_takes_long_is_found_and_named() -> None:
    with watched() as turns:
        await greedy()
        await asyncio.sleep(0)
    assert turns.longest.cpu_s >= LONG_S and "greedy" in turns.longest.worst
    with pytest.raises(AssertionError, match="greedy"):
        turns.check(BOUND_S)


async def test_a_timer_that_takes_long_is_found_and_named() -> None:
    with watched() as turns:
        asyncio.get_running_loop().call_later(0.001, work, LONG_S)
        await asyncio.sleep(0.1)
    assert turns.longest.cpu_s >= LONG_S and turns.longest.worst == "work"


async def test_the_last_turn_counts_as_far_as_it_has_come() -> None:
    with watched() as turns:
        await asyncio.sleep(0)
        work(LONG_S)
    assert turns.longest.cpu_s >= LONG_S and "test_the_last_turn" in turns.longest.worst


async def test_callbacks_that_are_ready_together_are_one_turn() -> None:
    with watched() as turns:
        for _ in range(50):
            asyncio.get_running_loop().call_soon(work, 0.001)
        await asyncio.sleep(0.1)
    assert turns.longest.cpu_s >= LONG_S and turns.longest.callbacks >= 50


async def test_work_that_gives_way_makes_no_long_turn() -> None:
    with watched() as turns:
        for _ in range(50):
            work(0.001)
            await asyncio.sleep(0)
    assert turns.count >= 49
    turns.check(BOUND_S)


async def test_neither_waiting_nor_the_garbage_collector_counts() -> None:
    heap = [[i] for i in range(300_000)]
    began = time.thread_time()
    with watched() as turns:
        await asyncio.sleep(0)
        time.sleep(LONG_S)  # as on a machine where others run
        while time.thread_time() < began + 3 * BOUND_S:
            gc.collect()
        await asyncio.sleep(0)
    del heap
    turns.check(BOUND_S)


async def test_the_loop_is_left_as_it_was() -> None:
    loop, handles = asyncio.get_running_loop(), vars(asyncio.Handle)
    before = handles["_run"]
    with watched() as turns:
        await asyncio.sleep(0)
    counted = turns.count
    await asyncio.sleep(0)
    assert turns.count == counted and handles["_run"] is before and "_run_once" not in vars(loop)


NOISY = """
from turns import within

trials = []

def test_noise():
    trials.append("noise")
    within(0.1 if len(trials) == 1 else 0.01, 0.02)

def test_code():
    within(0.1, 0.001, "a turn")

def test_other():
    trials.append("other")
    assert trials.count("other") > 1
"""


def test_a_test_that_measured_too_much_is_repeated_and_no_other(tmp_path: Path) -> None:
    written = tmp_path / "test_noisy.py"
    written.write_text(NOISY)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(Path(__file__).parents[1] / "pyproject.toml"),
        "-p",
        "no:cacheprovider",
        str(written),
    ]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "2 failed, 1 passed, 3 rerun" in said and "TooLong: a turn is more than 0.001 s" in said, said
