"""Calls of a library in threads: how many at a time, how long, and what is left of those that never return."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from baton.tiers.calls import Calls

WITHIN_S = 20.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def test_results_come_in_the_order_of_the_calls() -> None:
    calls = Calls(3, WITHIN_S)
    assert calls.all([lambda n=n: n * n for n in range(20)]) == [n * n for n in range(20)]  # type: ignore[misc]
    assert calls.all([]) == []
    until(lambda: calls._running == 0)


def test_so_many_run_at_a_time_over_all_callers(gate: threading.Event) -> None:
    calls, running, most, lock = Calls(3, WITHIN_S), [0], [0], threading.Lock()

    def call() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        gate.wait(WITHIN_S)
        with lock:
            running[0] -= 1

    callers = [threading.Thread(target=calls.all, args=([call] * 5,)) for _ in range(4)]
    for caller in callers:
        caller.start()
    until(lambda: running[0] == 3)
    gate.set()
    for caller in callers:
        caller.join(WITHIN_S)
        assert not caller.is_alive()
    assert most == [3]


def test_the_first_error_is_raised_and_no_other_call_is_begun() -> None:
    begun = []

    def call(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise KeyError("of a library")

    with pytest.raises(KeyError, match="of a library"):
        Calls(1, WITHIN_S).all([lambda n=n: call(n) for n in range(9)])  # type: ignore[misc]
    assert begun == [0, 1]


def test_a_call_that_never_returns_costs_one_deadline_and_the_next_nothing(gate: threading.Event) -> None:
    calls = Calls(2, 0.05)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="no answer for 0"):
            calls.all([lambda: gate.wait(WITHIN_S)])
    calls.deadline_s = WITHIN_S
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="2 calls before this one have had no answer"):
        calls.all([lambda: True])
    assert time.monotonic() - began < WITHIN_S / 2
    gate.set()
    until(lambda: calls._running == 0)
    assert calls.all([lambda: True]) == [True] and calls._stuck == 0


def test_a_free_thread_serves_while_another_is_stuck(gate: threading.Event) -> None:
    calls = Calls(2, 0.05)
    with pytest.raises(TimeoutError):
        calls.all([lambda: gate.wait(WITHIN_S)])
    calls.deadline_s = WITHIN_S
    assert calls.all([lambda n=n: n for n in range(5)]) == list(range(5))  # type: ignore[misc]


def test_a_caller_waits_for_a_thread_no_longer_than_a_deadline(gate: threading.Event) -> None:
    calls = Calls(1, WITHIN_S)
    other = threading.Thread(target=calls.all, args=([lambda: gate.wait(WITHIN_S)],))
    other.start()
    until(lambda: calls._running == 1)
    with pytest.raises(TimeoutError, match="1 calls before this one"):
        calls.all([lambda: True], 0.05)
    gate.set()
    other.join(WITHIN_S)


def test_many_calls_have_as_many_deadlines_as_they_have_rounds() -> None:
    calls = Calls(2, 1.0)
    assert calls.all([lambda: time.sleep(0.25) for _ in range(10)]) == [None] * 10, "1.25 s together"
