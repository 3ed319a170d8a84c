"""What a worker serves: mounted and drained by name, whatever it was started as."""

import pytest

from baton.cluster.errors import BatonError, Reason
from baton.worker.role import MOVES, NAMES, IllegalMount, Mount, Mounts


def test_a_worker_serves_what_it_was_started_as() -> None:
    mounts = Mounts("w", "prefill")
    assert mounts.serving == ("prefill",)
    mounts.admit("prefill")
    with pytest.raises(BatonError, match="w does not serve decode now") as caught:
        mounts.admit("decode")
    assert caught.value.reason is Reason.WRONG_ROLE and Reason.WRONG_ROLE.value.retry_elsewhere


def test_a_role_that_is_not_wished_for_drains_and_is_then_off() -> None:
    mounts = Mounts("w", "prefill")
    mounts.wish(["decode"])
    assert (mounts.serving, mounts.draining) == (("decode",), ("prefill",))
    with pytest.raises(BatonError):
        mounts.admit("prefill")
    mounts.admit("decode")
    mounts.ended("prefill")
    assert (mounts.serving, mounts.draining) == (("decode",), ())


def test_a_role_that_drains_can_be_mounted_again() -> None:
    mounts = Mounts("w", "prefill")
    mounts.wish(["decode"])
    mounts.wish(["prefill", "decode"])
    assert (mounts.serving, mounts.draining) == (NAMES, ())


@pytest.mark.parametrize("wanted", [[], ["prefil"], ["prefill", "router"]])
def test_wishes_that_mean_nothing_change_nothing(wanted: list[str]) -> None:
    mounts = Mounts("w", "prefill")
    with pytest.raises(BatonError, match="roles: must be one or both of prefill, decode") as caught:
        mounts.wish(wanted)
    assert caught.value.reason is Reason.INVALID_FIELD and mounts.serving == ("prefill",)


def test_a_worker_that_stops_accepts_neither_work_nor_wishes() -> None:
    mounts = Mounts("w", "prefill")
    mounts.stopping = True
    for act in (lambda: mounts.admit("prefill"), lambda: mounts.wish(["decode"])):
        with pytest.raises(BatonError, match="w is draining") as caught:
            act()
        assert caught.value.reason is Reason.DRAINING


def test_an_illegal_move_names_both_and_changes_nothing() -> None:
    mounts = Mounts("w", "prefill")
    with pytest.raises(IllegalMount, match="prefill is on: 'idle' is not possible"):
        mounts.ended("prefill")
    assert mounts.serving == ("prefill",)
    assert {state for state, _ in MOVES} == set(Mount)
