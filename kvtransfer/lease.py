"""Leases on blocks: pinned for a reader until released or expired. Decides only: `now` (monotonic seconds) is an argument.

Expiry never depends on new work arriving nor on any order: the reaper asks for all that has expired, on its own timer. A lease
that ended never comes back, and its number is never used again, so "it is alive now" means "it was alive all along".
"""

from dataclasses import dataclass, field
from enum import Enum


class LeaseState(Enum):
    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"


MOVES = {
    (LeaseState.HELD, "renew"): LeaseState.HELD,
    (LeaseState.HELD, "release"): LeaseState.RELEASED,
    (LeaseState.HELD, "expire"): LeaseState.EXPIRED,
}


@dataclass(slots=True)
class Lease:
    id: int
    request_id: str
    expires_at: float
    state: LeaseState = LeaseState.HELD


class IllegalLeaseMove(RuntimeError):
    """An event that the lease's state does not know. Nothing was changed."""


@dataclass(slots=True)
class LeaseTable:
    ttl: float  # seconds
    _held: dict[int, Lease] = field(default_factory=dict)
    _last_id: int = 0

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, request_id: str, now: float) -> Lease:
        self._last_id += 1
        lease = Lease(self._last_id, request_id, now + self.ttl)
        self._held[lease.id] = lease
        return lease

    def get(self, lease_id: int, now: float) -> Lease | None:
        """The lease if it is alive. One that is past its time is dead even if the reaper has not come by yet."""
        lease = self._held.get(lease_id)
        return lease if lease is not None and now < lease.expires_at else None

    def renew(self, lease_id: int, now: float) -> bool:
        """Extend by the full ttl from now. False: it is not alive, and stays so."""
        lease = self.get(lease_id, now)
        if lease is None:
            return False
        move(lease, "renew")
        lease.expires_at = now + self.ttl
        return True

    def release(self, lease_id: int, now: float) -> Lease | None:
        """End a lease that is alive. None: it had ended before; the reaper frees what an expired one pinned."""
        lease = self.get(lease_id, now)
        if lease is None:
            return None
        move(lease, "release")
        return self._held.pop(lease_id)

    def expire(self, now: float) -> list[Lease]:
        """All leases whose time is over; they are gone from the table."""
        expired = [lease for lease in self._held.values() if now >= lease.expires_at]
        for lease in expired:
            move(lease, "expire")
            del self._held[lease.id]
        return expired


def move(lease: Lease, event: str) -> None:
    target = MOVES.get((lease.state, event))
    if target is None:
        raise IllegalLeaseMove(f"lease {lease.id} is {lease.state.value}: {event!r} is not possible")
    lease.state = target
