"""Where the next call of a request goes, when, and which failures are final."""

import pytest

from baton.attempts import BACKOFF_S, LONGEST_BACKOFF_S, PATIENCE_S, Attempts, Failure

DOWN, BUSY = Failure("UNAVAILABLE"), Failure("RESOURCE_EXHAUSTED", "SATURATED", 1.0)


def attempts(addresses: int = 1, *, draw: float = 1.0, deadline: float | None = None, at: int = 0, max_resumes: int = 8) -> Attempts:
    return Attempts(addresses, at, 0.0, deadline, max_resumes, addresses > 1, lambda: draw)


def test_with_one_address_a_refusal_is_final() -> None:
    assert attempts().wait_s(DOWN, 0.0) is None and attempts().wait_s(BUSY, 0.0) is None


def test_every_address_is_tried_before_any_is_asked_again() -> None:
    tries, asked = attempts(3, at=1, draw=0.0), []
    for _ in range(6):
        asked.append(tries.at)
        assert tries.wait_s(DOWN, 0.0) == 0.0
    assert asked == [1, 2, 0, 1, 2, 0]


def test_no_address_is_asked_again_before_the_time_that_it_named() -> None:
    tries = attempts(2, draw=0.0)
    assert tries.wait_s(BUSY, 10.0) == 0.0 and tries.at == 1, "the other one named no time yet"
    assert tries.wait_s(BUSY, 10.5) == 0.5 and tries.at == 0
    assert tries.wait_s(BUSY, 11.0) == 0.5 and tries.at == 1
    assert tries.wait_s(Failure("UNAVAILABLE", "NO_WORKER", 0.2), 13.0) == 0.0 and tries.at == 0, "its time has passed"


def test_the_wait_doubles_up_to_a_limit_and_is_drawn_from_its_whole_range() -> None:
    tries = attempts(2)
    waits = [tries.wait_s(DOWN, 0.0) for _ in range(20)]
    rounds = [BACKOFF_S * 2**i for i in range(5)]
    assert waits[:9] == [BACKOFF_S, *(each for wait in rounds[1:] for each in (wait, wait))]
    assert waits[-1] == LONGEST_BACKOFF_S
    assert attempts(2, draw=0.25).wait_s(DOWN, 0.0) == BACKOFF_S / 4


def test_a_wait_never_reaches_the_deadline() -> None:
    assert attempts(2, deadline=5.0).wait_s(BUSY, 4.0) == BACKOFF_S
    tries = attempts(2, deadline=5.0)
    tries.wait_s(BUSY, 4.0)
    assert tries.wait_s(BUSY, 4.5) is None, "both want to be left alone until the deadline has passed"


def test_without_a_deadline_patience_is_limited() -> None:
    assert attempts(2).wait_s(DOWN, PATIENCE_S - 1) is not None and attempts(2).wait_s(DOWN, PATIENCE_S) is None
    broken = attempts()
    broken.accept(True)
    assert broken.wait_s(DOWN, 1000.0) is not None, "it counts from the break"
    assert broken.wait_s(DOWN, 1000.0 + PATIENCE_S) is None


@pytest.mark.parametrize(
    "final",
    [
        Failure("INVALID_ARGUMENT", "INVALID_FIELD"),
        Failure("DEADLINE_EXCEEDED", "DEADLINE"),
        Failure("DEADLINE_EXCEEDED"),
        Failure("INTERNAL", "POISONOUS"),
        Failure("INTERNAL", "INTERNAL"),
        Failure("CANCELLED", "CANCELLED"),
        Failure("ABORTED", "STALLED"),
        Failure("UNAUTHENTICATED", "UNAUTHENTICATED"),
        Failure("RESOURCE_EXHAUSTED"),  # gRPC's own: the message is too large
    ],
    ids=str,
)
def test_a_final_failure_is_neither_tried_elsewhere_nor_resumed(final: Failure) -> None:
    assert attempts(2).wait_s(final, 0.0) is None
    begun = attempts(2)
    begun.accept(True)
    assert begun.wait_s(final, 0.0) is None


LOST = [Failure("UNKNOWN"), Failure("INTERNAL"), Failure("CANCELLED")]


@pytest.mark.parametrize(
    ("failure", "again"), [(Failure("CANCELLED"), True), (Failure("UNKNOWN"), False), (Failure("INTERNAL"), False)], ids=str
)
def test_a_call_that_an_ending_server_dropped_is_tried_elsewhere(failure: Failure, again: bool) -> None:
    assert (attempts(2).wait_s(failure, 0.0) is not None) == again
    assert attempts(1).wait_s(failure, 0.0) is None


@pytest.mark.parametrize("broken", [DOWN, *LOST, Failure("UNAVAILABLE", "RETRIES_SPENT", 1.0)], ids=str)
def test_a_stream_that_breaks_is_resumed_even_at_the_same_address(broken: Failure) -> None:
    tries = attempts(draw=0.0)
    tries.accept(True)
    assert tries.wait_s(broken, 0.0) == (broken.retry_after_s or 0.0)
    assert tries.wait_s(DOWN, 0.0) == 0.0, "the router is not up yet: a refusal of the continuation is no break"
    tries.accept(True)
    assert tries.resumes == 1


def test_without_a_receipt_no_stream_is_resumed() -> None:
    tries = attempts(2)
    tries.accept(False)
    assert tries.wait_s(DOWN, 0.0) is None


def test_a_broken_stream_goes_on_at_another_address() -> None:
    tries = attempts(3, at=1)
    tries.accept(True)
    tries.wait_s(DOWN, 7.0)
    assert tries.at == 2


@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_number_of_resumes_is_limited(most: int) -> None:
    tries = attempts(2, max_resumes=most)
    for _ in range(most):
        tries.accept(True)
        assert tries.wait_s(DOWN, 0.0) is not None
    tries.accept(True)
    assert tries.wait_s(DOWN, 0.0) is None and tries.resumes == most
