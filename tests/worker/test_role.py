"""The roles that a worker serves: mounted and drained by name, whichever role it was started with."""

from collections.abc import Callable

import pytest

from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import ROLES
from baton.moves import IllegalMove
from baton.worker.role import MOVES, Mount, Mounts


def test_a_worker_serves_the_role_it_was_started_with() -> None:
    mounts = Mounts("w", "prefill")
    assert mounts.serving == ("prefill",)
    mounts.admit("prefill")
    with pytest.raises(BatonError, match="w does not serve decode now") as caught:
        mounts.admit("decode")
    assert caught.value.reason is Reason.WRONG_ROLE and Reason.WRONG_ROLE.value.retry_elsewhere


def test_an_unwanted_role_drains_and_then_turns_off() -> None:
    mounts = Mounts("w", "prefill")
    mounts.wish(["decode"])
    assert (mounts.serving, mounts.draining) == (("decode",), ("prefill",))
    with pytest.raises(BatonError):
        mounts.admit("prefill")
    mounts.admit("decode")
    mounts.ended("prefill")
    assert (mounts.serving, mounts.draining) == (("decode",), ())


def test_a_draining_role_can_be_mounted_again() -> None:
    mounts = Mounts("w", "prefill")
    mounts.wish(["decode"])
    mounts.wish(["prefill", "decode"])
    assert (mounts.serving, mounts.draining) == (ROLES, ())


@pytest.mark.parametrize("wanted", [[], ["prefil"], ["prefill", "router"]])
def test_invalid_roles_are_refused_and_change_nothing(wanted: list[str]) -> None:
    mounts = Mounts("w", "prefill")
    with pytest.raises(BatonError, match="roles: must be one or both of prefill, decode") as caught:
        mounts.wish(wanted)
    assert caught.value.reason is Reason.INVALID_FIELD and mounts.serving == ("prefill",)


def test_a_stopping_worker_accepts_neither_work_nor_role_changes() -> None:
    mounts = Mounts("w", "prefill")
    mounts.stopping = True
    acts: list[Callable[[], object]] = [lambda: mounts.admit("prefill"), lambda: mounts.wish(["decode"])]
    for act in acts:
        with pytest.raises(BatonError, match="w is draining") as caught:
            act()
        assert caught.value.reason is Reason.DRAINING


def test_an_illegal_move_names_state_and_event_and_changes_nothing() -> None:
    mounts = Mounts("w", "prefill")
    with pytest.raises(IllegalMove, match="prefill is on: 'idle' is not possible"):
        mounts.ended("prefill")
    assert mounts.serving == ("prefill",)
    assert {state for state, _ in MOVES} == set(Mount)


def test_a_role_that_is_tried_accepts_work_and_is_not_told() -> None:
    mounts = Mounts("w", "prefill")
    mounts.wish(["decode"], prove=True)
    assert (mounts.serving, mounts.draining) == (("prefill",), ()), "nothing drains, nothing is announced"
    mounts.admit("decode")
    mounts.admit("prefill")
    mounts.wish(["decode"])
    assert (mounts.serving, mounts.draining) == (("decode",), ("prefill",))


def test_a_role_that_failed_its_proof_drains_and_is_refused() -> None:
    mounts = Mounts("w", "prefill")
    mounts.wish(["decode"], prove=True)
    mounts.wish(["prefill"])
    assert (mounts.serving, mounts.draining) == (("prefill",), ("decode",))
    with pytest.raises(BatonError, match="does not serve decode"):
        mounts.admit("decode")
    mounts.ended("decode")
    assert mounts.draining == ()
