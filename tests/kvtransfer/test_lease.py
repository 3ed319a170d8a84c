"""The lease table under a manual clock: no expired lease is served, no live lease is reaped, and no lease is lost."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.moves import IllegalMove
from kvtransfer.lease import Lease, LeaseState, LeaseTable, move

TTL = 10.0


class LeaseMachine(RuleBasedStateMachine):
    """The model is a dictionary of expiry times; the machine advances the clock in steps shorter and longer than the TTL."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(TTL)
        self.now = 0.0
        self.expires: dict[int, float] = {}  # leases that were neither released nor reaped yet
        self.used: set[int] = set()
        self.complete_ones: set[int] = set()

    def alive(self, lease_id: int) -> bool:
        return lease_id in self.expires and self.now < self.expires[lease_id]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([*sorted(self.used), 999]))

    @rule(step=st.sampled_from([0.0, 0.1, 4.0, 9.9, 10.0, 25.0]))
    def time_passes(self, step: float) -> None:
        self.now += step

    @rule()
    def grant(self) -> None:
        lease = self.table.grant()
        assert lease.id not in self.used
        self.used.add(lease.id)
        self.expires[lease.id] = math.inf

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        lease_id = self.pick(data)
        if lease_id in self.complete_ones:
            return
        assert self.table.complete(lease_id, self.now) == self.alive(lease_id)
        if self.alive(lease_id):
            self.complete_ones.add(lease_id)
            self.expires[lease_id] = self.now + TTL

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease_id = self.pick(data)
        assert self.table.renew(lease_id, self.now) == self.alive(lease_id)
        if self.alive(lease_id) and lease_id in self.complete_ones:
            self.expires[lease_id] = self.now + TTL

    @rule(data=st.data(), how=st.sampled_from(["release", "revoke"]))
    def end(self, data: st.DataObject, how: str) -> None:
        lease_id = self.pick(data)
        lease = getattr(self.table, how)(lease_id, self.now)
        assert (lease is not None) == self.alive(lease_id)
        if lease is not None:
            del self.expires[lease_id]

    @rule()
    def reap(self) -> None:
        reaped = {lease.id for lease in self.table.expire(self.now)}
        assert reaped == {lease_id for lease_id, at in self.expires.items() if self.now >= at}
        for lease_id in reaped:
            del self.expires[lease_id]

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.table) == len(self.expires)
        for lease_id in self.used:
            assert (self.table.get(lease_id, self.now) is not None) == self.alive(lease_id)


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def granted(table: LeaseTable, now: float) -> Lease:
    lease = table.grant()
    table.complete(lease.id, now)
    return lease


def test_the_reaper_skips_a_renewed_lease_at_the_front() -> None:
    table = LeaseTable(TTL)
    first, second = granted(table, 0.0), granted(table, 1.0)
    table.renew(first.id, 9.0)
    assert table.expire(12.0) == [second]


def test_an_expired_lease_is_dead_before_the_reaper_comes() -> None:
    table = LeaseTable(TTL)
    lease = granted(table, 0.0)
    assert table.get(lease.id, TTL - 0.1) is lease
    assert table.get(lease.id, TTL) is None and not table.renew(lease.id, TTL) and table.release(lease.id, TTL) is None
    assert table.expire(TTL) == [lease]


def test_an_open_lease_does_not_expire() -> None:
    table = LeaseTable(TTL)
    lease = table.grant()
    assert table.renew(lease.id, 1000.0) and not table.expire(1000.0)
    assert table.complete(lease.id, 1000.0) and not table.expire(1000.0 + TTL - 1)
    assert table.expire(1000.0 + TTL) == [lease]


@pytest.mark.parametrize(("events", "state"), [(["release"], "released"), (["revoke"], "revoked"), (["complete", "expire"], "expired")])
@pytest.mark.parametrize("event", ["renew", "complete", "release", "revoke", "expire"])
def test_an_ended_lease_never_becomes_live_again(events: list[str], state: str, event: str) -> None:
    lease = LeaseTable(TTL).grant()
    for earlier in events:
        move(lease, earlier)
    with pytest.raises(IllegalMove, match=rf"{state}.*'{event}'"):
        move(lease, event)
    assert lease.state is LeaseState(state)
