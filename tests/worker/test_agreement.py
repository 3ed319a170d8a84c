"""What a worker does where the registry answers, does not, or has lost its contents. In virtual time, but for the thread that asks."""

import asyncio

import pytest

from baton.simulate.memory_registry import MemoryRegistry
from baton.simulate.virtual_time import run
from baton.worker import agreement
from baton.worker.agreement import EVERY, HOLDS_S, WITHIN_S, Agreement

BEAT_S = 1.0


async def test_an_engine_asks_from_its_own_thread() -> None:
    registry = MemoryRegistry()
    one, other = Agreement(registry, BEAT_S), Agreement(registry, BEAT_S)
    assert await asyncio.to_thread(one.ask, "topic", "") == ""
    assert await asyncio.to_thread(one.ask, "topic", "this") == "this" == await asyncio.to_thread(other.ask, "topic", "that")


def test_a_worker_waits_for_the_registry_but_not_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        registry, loop = MemoryRegistry(), asyncio.get_running_loop()
        registry.available = False
        soon, never = Agreement(registry, BEAT_S), Agreement(registry, BEAT_S)
        asking = loop.create_task(soon._ask("topic", "this"))
        await asyncio.sleep(WITHIN_S / 2)
        assert not asking.done()
        registry.available = True
        assert await asking == "this"
        registry.available = False
        assert await never._ask("topic", "") == "" and await never._ask("topic", "that") == "that"
        assert loop.time() <= WITHIN_S + 2 * BEAT_S, "what has waited once does not wait again"

    run(main())
    assert "decides alone" in caplog.text


def test_running_workers_keep_and_restore_what_holds(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        registry = MemoryRegistry()
        worker = Agreement(registry, BEAT_S)
        assert await worker._ask("topic", "this") == "this"
        upholding = asyncio.create_task(worker.uphold())
        await asyncio.sleep(3 * HOLDS_S)
        assert await registry.agree("topic", "that", HOLDS_S) == "this"
        registry._agreed.clear()
        await asyncio.sleep(EVERY * BEAT_S)
        assert await registry.agree("topic", "that", HOLDS_S) == "this"
        registry._agreed["topic"] = "that", HOLDS_S * 9  # told by one that started while the registry was empty
        await asyncio.sleep(EVERY * BEAT_S * 3)
        upholding.cancel()

    run(main())
    (line,) = [record.getMessage() for record in caplog.records if record.name == agreement.__name__]
    assert "that for other workers and this for this one" in line
