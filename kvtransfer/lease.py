"""Leases pin blocks for a reader until they are released, revoked or expired. This module only decides: `now` (monotonic seconds) is an
argument.

A lease is open while its holder still computes the blocks that it covers. A reader may already take the sealed blocks, and the lease does
not expire, because the holder's own call has a deadline. Then the lease is complete and expires unless it is renewed. Expiry never depends
on new work or on any order: the reaper asks for all expired leases on its own timer. A lease that ended never comes back, and its number is
never used again, so "it is alive now" means "it was alive all along".
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from baton.moves import Moves


class LeaseState(Enum):
    OPEN = "open"
    COMPLETE = "complete"
    RELEASED = "released"
    REVOKED = "revoked"
    EXPIRED = "expired"


MOVES = Moves(
    {
        (LeaseState.OPEN, "renew"): LeaseState.OPEN,
        (LeaseState.OPEN, "complete"): LeaseState.COMPLETE,
        (LeaseState.OPEN, "release"): LeaseState.RELEASED,
        (LeaseState.OPEN, "revoke"): LeaseState.REVOKED,
        (LeaseState.COMPLETE, "renew"): LeaseState.COMPLETE,
        (LeaseState.COMPLETE, "release"): LeaseState.RELEASED,
        (LeaseState.COMPLETE, "revoke"): LeaseState.REVOKED,
        (LeaseState.COMPLETE, "expire"): LeaseState.EXPIRED,
    }
)


@dataclass(slots=True)
class Lease:
    id: int
    expires_at: float = math.inf
    state: LeaseState = LeaseState.OPEN


@dataclass(slots=True)
class LeaseTable:
    """The leases that are alive."""

    ttl: float  # seconds
    _alive: dict[int, Lease] = field(default_factory=dict)
    _last_id: int = 0

    def __len__(self) -> int:
        return len(self._alive)

    def grant(self) -> Lease:
        """Grants an open lease."""
        self._last_id += 1
        lease = Lease(self._last_id)
        self._alive[lease.id] = lease
        return lease

    def get(self, lease_id: int, now: float) -> Lease | None:
        """Returns the lease if it is alive. An expired lease is dead even if the reaper has not removed it yet."""
        lease = self._alive.get(lease_id)
        return lease if lease is not None and now < lease.expires_at else None

    def renew(self, lease_id: int, now: float) -> bool:
        """A reader still needs the lease: a complete one now lives for the full ttl. Returns False if it is not alive, which is final."""
        lease = self.get(lease_id, now)
        if lease is None:
            return False
        move(lease, "renew")
        if lease.state is LeaseState.COMPLETE:
            lease.expires_at = now + self.ttl
        return True

    def complete(self, lease_id: int, now: float) -> bool:
        """The holder has computed everything that the lease covers: its ttl starts. Returns False if it is no longer alive."""
        lease = self.get(lease_id, now)
        if lease is None:
            return False
        move(lease, "complete")
        lease.expires_at = now + self.ttl
        return True

    def release(self, lease_id: int, now: float) -> Lease | None:
        """Ends a live lease. Returns None if it had ended before; the reaper frees the blocks of an expired one."""
        return self._end(lease_id, now, "release")

    def revoke(self, lease_id: int, now: float) -> Lease | None:
        """The holder takes its blocks back: a reader learns at the end that the lease was gone. Returns None if it had ended before."""
        return self._end(lease_id, now, "revoke")

    def expire(self, now: float) -> list[Lease]:
        """Removes all expired leases from the table and returns them."""
        expired = [lease for lease in self._alive.values() if now >= lease.expires_at]
        for lease in expired:
            move(lease, "expire")
            del self._alive[lease.id]
        return expired

    def _end(self, lease_id: int, now: float, event: str) -> Lease | None:
        lease = self.get(lease_id, now)
        if lease is None:
            return None
        move(lease, event)
        return self._alive.pop(lease_id)


def move(lease: Lease, event: str) -> None:
    lease.state = MOVES.after(lease.state, event, f"lease {lease.id}")
