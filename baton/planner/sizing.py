"""Who keeps the sizes of the pools, and how a planner asks for others."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.cluster.records import Pools
from baton.cluster.registry import Registry
from baton.planner.change import Resize


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of the planner that leads. `holds`: whether it still leads, as far as it knows."""

    who: str
    term: int
    holds: Callable[[], bool]


class Sizing(Protocol):
    async def wanted(self) -> Pools | None:
        """None: nobody keeps any sizes. Raises RegistryUnavailable, BatonError."""

    async def resize(self, lease: Lease, asked: Resize, leaving: Sequence[str]) -> str:
        """Asks for other sizes, if the lease holds and those of before are still wanted. `leaving`: the workers that are to go. Returns why
        that was refused; empty: it was not. Raises RegistryUnavailable, BatonError."""

    def in_pool(self, worker: str, pool: str) -> bool:
        """Whether the worker is one of those whose number is chosen here."""

    async def close(self) -> None: ...


class RegistrySizing:
    """The supervisor of `baton up` keeps the sizes that are written in the registry. It takes the newest workers of a pool, as the planner
    thinks it does."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def wanted(self) -> Pools | None:
        return await self._registry.desired()

    async def resize(self, lease: Lease, asked: Resize, leaving: Sequence[str]) -> str:
        done = await self._registry.plan(lease.who, lease.term, asked.before, asked.pools)
        return "" if done else "this planner does not lead any more, or somebody has asked for other sizes"

    def in_pool(self, worker: str, pool: str) -> bool:
        """Hosts that joined give their workers other names."""
        return re.fullmatch(rf"{pool}-\d+", worker) is not None

    async def close(self) -> None:
        pass
