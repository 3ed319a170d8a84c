"""The lease of a prompt's KV: exactly one side ends it, whatever happens."""

from collections.abc import Callable

import pytest
from fake_workers import record

from baton.moves import IllegalMove
from router.prompt_lease import MOVES, Lent, PromptLease, Started

D0 = record("d0")
CALLS: dict[str, Callable[[PromptLease], object]] = {
    "read": lambda lease: lease.read(Started(D0, "work", 1)),
    "hold": lambda lease: lease.prefilled(b"handle"),
    "nothing": lambda lease: lease.prefilled(b""),
    "adopt": lambda lease: lease.adopt(),
    "release": lambda lease: lease.release(),
}


@pytest.mark.parametrize("state", Lent)
@pytest.mark.parametrize("event", CALLS)
def test_every_event_in_every_state(state: Lent, event: str) -> None:
    lease = PromptLease(record("p0"), state, _handle=b"handle" if state is Lent.HELD else b"")
    if target := MOVES.get((state, event)):
        CALLS[event](lease)
        assert lease.state is target
    else:
        with pytest.raises(IllegalMove, match=f"^the lease of p0 is {state.value}: '{event}' is not possible$"):
            CALLS[event](lease)
        assert lease.state is state and lease.reader is None, "nothing was changed"
    assert lease.held is bool(lease.handle) is (lease.state is Lent.HELD), "only what is ours has a handle"


def test_only_a_lease_that_is_held_is_released_and_only_once() -> None:
    lease = PromptLease(record("p0"))
    lease.prefilled(b"handle")
    assert lease.release() == b"handle" and lease.handle == b""
    with pytest.raises(IllegalMove):
        lease.release()


def test_a_live_call_that_has_read_everything_owns_the_lease() -> None:
    lease = PromptLease(record("p0"))
    lease.read(Started(D0, "work", 1))
    lease.prefilled(b"")
    lease.adopt()  # what the call reports when the prefill has ended
    assert lease.state is Lent.GIVEN and lease.reader is not None


def test_a_lease_that_was_read_to_the_end_of_the_prefill_may_go_to_another_worker() -> None:
    lease = PromptLease(record("p0"))
    lease.read(Started(D0, "work", 1))
    lease.prefilled(b"handle")
    assert lease.handle == b"handle"
    lease.adopt()
    assert lease.handle == b""
