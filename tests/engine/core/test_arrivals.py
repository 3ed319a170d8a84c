"""One order of arrival, whoever leaves it and comes back."""

import math

from baton.engine.core.arrivals import Arrivals
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence, State


def seq(name: str, expires_at: float = math.inf) -> Sequence:
    return Sequence(name, [1], 1, SamplingParams(1), b"root", expires_at=expires_at)


def test_a_sequence_that_comes_back_has_its_old_place() -> None:
    arrivals, one, two, three = Arrivals(), seq("one"), seq("two"), seq("three")
    for each in (one, two, three):
        arrivals.enqueue(each)
    del arrivals.waiting[:2]
    arrivals.enqueue(two)
    arrivals.enqueue(one)
    assert arrivals.waiting == [one, two, three]


def test_a_claim_is_in_the_way_of_those_that_came_later_only() -> None:
    arrivals, one, two, three = Arrivals(), seq("one"), seq("two"), seq("three")
    arrivals.enqueue(one)
    arrivals.claim(two)
    arrivals.enqueue(three)
    assert arrivals.is_next(one) and not arrivals.is_next(two)
    arrivals.waiting.remove(one)
    assert arrivals.is_next(two) and not arrivals.is_next(three)


def test_a_claim_that_joins_the_queue_is_in_nobodys_way_once_it_leaves() -> None:
    arrivals, one, two = Arrivals(), seq("one"), seq("two")
    arrivals.claim(one)
    arrivals.enqueue(two)
    arrivals.enqueue(one)
    assert arrivals.waiting == [one, two]
    arrivals.waiting.remove(one)
    assert arrivals.is_next(two)


def test_a_sequence_that_waits_too_long_is_taken_out() -> None:
    arrivals, soon, late = Arrivals(), seq("soon", 1.0), seq("late", 2.0)
    arrivals.enqueue(soon)
    arrivals.enqueue(late)
    assert arrivals.expire(0.5) == [] and arrivals.expire(1.0) == [soon]
    assert arrivals.waiting == [late] and soon.state is State.DONE
