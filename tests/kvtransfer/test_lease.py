"""The lease table under a stopped clock: nothing expired is served, nothing alive is reaped, nothing is stranded."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.lease import IllegalLeaseMove, LeaseState, LeaseTable, move

TTL = 10.0


class LeaseMachine(RuleBasedStateMachine):
    """The model is a dictionary of expiry times; the machine moves the clock in jumps that straddle the ttl."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(TTL)
        self.now = 0.0
        self.expires: dict[int, float] = {}  # leases not yet released nor reaped
        self.used: set[int] = set()

    def alive(self, lease_id: int) -> bool:
        return lease_id in self.expires and self.now < self.expires[lease_id]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([*sorted(self.used), 999]))

    @rule(step=st.sampled_from([0.0, 0.1, 4.0, 9.9, 10.0, 25.0]))
    def time_passes(self, step: float) -> None:
        self.now += step

    @rule()
    def grant(self) -> None:
        lease = self.table.grant("r", self.now)
        assert lease.id not in self.used
        self.used.add(lease.id)
        self.expires[lease.id] = self.now + TTL

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease_id = self.pick(data)
        assert self.table.renew(lease_id, self.now) == self.alive(lease_id)
        if self.alive(lease_id):
            self.expires[lease_id] = self.now + TTL

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = self.pick(data)
        lease = self.table.release(lease_id, self.now)
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


def test_reaper_passes_over_a_renewed_lease_in_front() -> None:
    table = LeaseTable(TTL)
    first, second = table.grant("a", 0.0), table.grant("b", 1.0)
    table.renew(first.id, 9.0)
    assert table.expire(12.0) == [second]


def test_illegal_move_names_both_and_changes_nothing() -> None:
    lease = LeaseTable(TTL).grant("a", 0.0)
    move(lease, "release")
    with pytest.raises(IllegalLeaseMove, match=r"released.*'renew'"):
        move(lease, "renew")
    assert lease.state is LeaseState.RELEASED
