"""What the workers of a cluster do alike, in the registry: the first one's choice holds for those that start later, on any host."""

import asyncio
import logging

from baton.cluster.registry import Registry, RegistryUnavailable

log = logging.getLogger(__name__)
WITHIN_S = 20.0  # after its start, a worker without the registry decides for itself
HOLDS_S = 600.0  # after the last worker has ended
EVERY = 5  # heartbeats: a registry that has lost its contents gets them back


class Agreement:
    def __init__(self, registry: Registry, heartbeat_s: float) -> None:
        """Must be called within a running loop."""
        self._registry, self._heartbeat_s = registry, heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + WITHIN_S
        self._held: dict[str, str] = {}  # topic → what this worker does

    def ask(self, topic: str, mine: str) -> str:
        """A `baton.engine.core.agreed.Agree`, called in another thread."""
        return asyncio.run_coroutine_threadsafe(self._ask(topic, mine), self._loop).result()

    async def _ask(self, topic: str, mine: str) -> str:
        while True:
            try:
                held = await self._registry.agree(topic, mine, HOLDS_S)
                break
            except RegistryUnavailable as error:
                if self._loop.time() >= self._deadline:
                    log.warning("%s: this worker decides alone, and may be of no use to others: the registry is %s", topic, error)
                    held = mine
                    break
            await asyncio.sleep(self._heartbeat_s)
        if held:
            self._held[topic] = held
        return held

    async def uphold(self) -> None:
        """Keeps what holds from expiring. Runs until it is cancelled."""
        unlike = dict[str, str]()
        while True:
            await asyncio.sleep(EVERY * self._heartbeat_s)
            for topic, mine in list(self._held.items()):
                try:
                    held = await self._registry.agree(topic, mine, HOLDS_S)
                except RegistryUnavailable:
                    break
                if held not in (mine, unlike.get(topic)):
                    unlike[topic] = held
                    log.warning("%s: %s for other workers and %s for this one: start it again, they share no KV", topic, held, mine)
