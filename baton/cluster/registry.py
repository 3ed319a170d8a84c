"""The registry: which workers and routers are alive, what the workers' caches hold, how large the pools should be.

It is a cache of facts that workers can rebuild: if it is lost or flushed, no request fails, and no request waits for it. The implementation
is `baton.cluster.redis_registry`. Tests have a second one, in memory, for outages and clocks that they control; the same behaviour suite
runs on both.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from baton.cluster.records import BlockEvent, Kind, Pools, Record, RouterRecord, StartRecord, WorkerRecord

Office = Literal["planner", "prover"]  # what one process at a time does: the pools' sizes; the proofs of workers that have started
EVENTS_BATCH = 256  # most events that one call of `events` returns
# A writer with an old incarnation is refused for this many record lifetimes after the last write of a newer one. It is not refused for
# ever: a host whose clock was set back draws a lower incarnation than before, and must be able to join again.
FENCE_LIFETIMES = 10


class RegistryUnavailable(Exception):
    """The registry cannot answer now. `kind` says why: down, slow, loading, auth, readonly, oom or refused."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class StaleIncarnation(Exception):
    """A newer process of the same name has joined since. The writer is a ghost and should stop."""

    def __init__(self, name: str, incarnation: int, newest: int) -> None:
        super().__init__(f"{name}: incarnation {incarnation} is older than {newest}")
        self.newest = newest


class Registry(Protocol):
    """If the registry is unreachable, every method soon raises RegistryUnavailable instead of waiting; it may then be called again."""

    garbage: int  # number of values found that none of our workers wrote; they are skipped

    async def join(self, record: Record) -> None:
        """Write or refresh a record, which then expires. Writes nothing and raises StaleIncarnation when a newer incarnation has joined."""

    async def leave(self, name: str, incarnation: int, kind: Kind = "worker") -> None:
        """Remove the record of `name` if this incarnation wrote it."""

    async def members(self) -> list[WorkerRecord]:
        """The workers' records that have not expired, sorted by name."""

    async def routers(self) -> list[RouterRecord]:
        """The routers' records that have not expired, sorted by name."""

    async def starts(self) -> list[StartRecord]:
        """The records of workers that are starting, sorted by name."""

    async def publish(self, events: Sequence[BlockEvent]) -> None:
        """Append `events` in order. A call that failed may still have stored them: publish them again, readers drop duplicates."""

    async def events(self, after: str | None, wait_s: float) -> tuple[list[BlockEvent], str]:
        """Returns at most EVENTS_BATCH events after the cursor `after`, and the next call's cursor; waits up to `wait_s` for a first one.

        `after` None means from now on, and returns a cursor immediately. Old events are dropped: a reader that is too far behind, or whose
        registry lost its contents, sees a gap in `BlockEvent.sequence`.
        """

    async def desire(self, pools: Pools) -> None:
        """Store the wanted pool sizes; they do not expire."""

    async def desired(self) -> Pools | None:
        """The wanted pool sizes; None if none were stored."""

    async def lead(self, who: str, ttl_s: float, term: int = 0, office: Office = "planner") -> int:
        """Take, or with the number of one's own term keep, the lease of an office for so long. Returns the number of the term, which grows
        with each new one; 0 while another leads. `who` must be a name that no other process ever has."""

    async def leader(self, office: Office = "planner") -> str:
        """Who leads now; empty: nobody."""

    async def resign(self, who: str, term: int, office: Office = "planner") -> None:
        """End one's own term; no other is touched."""

    async def plan(self, who: str, term: int, before: Pools, wanted: Pools) -> bool:
        """`desire(wanted)`, but only if this term of the planner leads and `before` is still what is wanted, at one
        moment. Returns whether it did."""

    async def note_change(self, who: str, term: int, change: bytes) -> bool:
        """Store the change that a planner makes, or what became of it, for the next one; only if this term leads. Returns whether so."""

    async def noted_change(self) -> bytes | None:
        """What was stored last."""

    async def note_plan(self, note: bytes, keep: int) -> None:
        """Append what a planner decided; the last `keep` are kept."""

    async def noted_plans(self, last: int) -> list[bytes]:
        """The last notes, oldest first."""

    async def agree(self, topic: str, mine: str, ttl_s: float) -> str:
        """What all processes do alike: `mine` if nothing holds for `topic` yet; it holds for so long after the last call. Without `mine`,
        only asks: empty if nothing holds."""

    async def ping(self) -> None:
        """Return when the registry answers."""

    async def close(self) -> None:
        """Free the connections. Never raises."""
