"""Tokens wait for each other only while the router's loop is behind, and never for long."""

import asyncio
import time

import pytest

from router.inbox import Inbox
from router.lateness import LATE_S, MOST_S, TICK_S, TURNS, Lateness


def test_a_loop_in_time_sends_each_token_as_it_comes() -> None:
    lateness = Lateness()
    for _ in range(100):
        lateness.note(LATE_S / 2)
    assert lateness.interval_s() == 0.0


def test_the_wait_grows_with_the_lateness_up_to_its_bound_and_goes_away_again() -> None:
    lateness, waits = Lateness(), []
    for late_s in [0.0015] * 50 + [1.0] * 50:
        lateness.note(late_s)
        waits.append(lateness.interval_s())
    assert waits == sorted(waits) and waits[49] == pytest.approx(TURNS * 0.0015, rel=0.01) and waits[-1] == MOST_S
    for _ in range(100):
        lateness.note(0.0)
    assert lateness.interval_s() == 0.0


def test_a_configured_interval_is_kept_whatever_the_loop_does() -> None:
    lateness = Lateness(0.05)
    lateness.note(1.0)
    assert lateness.interval_s() == 0.05


async def test_a_loop_that_is_kept_busy_is_found_late() -> None:
    lateness = Lateness()
    running = asyncio.create_task(lateness.run())
    until = time.monotonic() + 20
    while lateness.interval_s() < MOST_S:
        assert time.monotonic() < until
        time.sleep(2 * TICK_S)  # what a turn of the loop must not do
        await asyncio.sleep(0)
    running.cancel()


async def test_tokens_that_come_while_the_loop_is_behind_travel_together() -> None:
    wait_s = 0.0
    inbox = Inbox[str](lambda: wait_s)
    inbox.put_token(b"1")
    assert (await inbox.take(1 << 20))[0] == [b"1"], "the first one never waits"
    inbox.put_token(b"2")
    wait_s = 0.05
    assert (await inbox.take(1 << 20))[0] == [b"2"]
    inbox.put_token(b"3")
    taking = asyncio.create_task(inbox.take(1 << 20))
    await asyncio.sleep(0)
    assert not taking.done()
    inbox.put_token(b"4")
    wait_s = 0.0
    assert (await taking)[0] == [b"3", b"4"]
    inbox.put_token(b"5")
    taking = asyncio.create_task(inbox.take(1 << 20))
    await asyncio.sleep(0)
    assert taking.done() and taking.result()[0] == [b"5"], "the loop has caught up"
    wait_s = 100.0
    inbox.put_token(b"6")
    await inbox.take(1 << 20)
    inbox.put_token(b"7")
    inbox.put("the end")
    assert (await inbox.take(1 << 20))[0] == [b"7", "the end"], "the end never waits, and takes the tokens before it along"
