"""An engine of the toy with tiers under its pool, and a store that fails when it is told to."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_128_digest

from baton.engine.core.block_key import HOST, extend_keys, root_key
from baton.engine.core.colder import TierPolicy
from baton.engine.core.contract import CacheEvent, Listener
from baton.engine.core.engine import Engine, Output
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.loop import EngineLoop
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import ToyRunner, naive
from baton.tiers.slots import Pins
from baton.tiers.store import StoreFailed, Unit, Wanted
from baton.tiers.tier import Bounds
from baton.tiers.tiers import Tiers

BLOCK = 4
UNIT = 2 * BLOCK * 8 * 8  # bytes of a block of the toy
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8, "token_delay_us": 100}
WITHIN_S = 20.0


class PlainStore:
    """A dictionary that is a `baton.tiers.store.Store`. Its medium can break, hang, and be told not to verify."""

    def __init__(self, capacity: int, medium: str = HOST, unit_bytes: int = UNIT) -> None:
        self.medium, self.unit_bytes, self.capacity = medium, unit_bytes, capacity
        self.units: OrderedDict[bytes, tuple[bytes, bytearray]] = OrderedDict()
        self.pins = Pins()
        self.holding, self.forgetful = True, False  # whether it heeds its pins, and whether it gives back nothing
        self.refreshes = True  # what is read is the youngest
        self.broken = False
        self.verifies = True
        self.gate = threading.Event()
        self.gate.set()
        self.hung: set[str] = set()  # calls that do not return while their name is here
        self._lock = threading.Lock()
        self.closed = False

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self.units)

    def holds(self, keys: Seq[bytes]) -> list[bool]:
        with self._lock:
            return [key in self.units for key in keys]

    def put(self, units: Seq[Unit]) -> list[bytes]:
        self._wait()
        with self._lock:
            for key, digest, data in units:
                self.units.setdefault(key, (digest, bytearray(data)))
            loose = [key for key in self.units if not (self.holding and key in self.pins)]
            lost = loose[: max(0, len(self.units) - self.capacity)]
            for key in lost:
                del self.units[key]
            return lost

    def get(self, wanted: Seq[Wanted]) -> list[bool]:
        self._wait()
        while "get" in self.hung:
            time.sleep(0.002)
        with self._lock:
            return [self._get(one) for one in wanted]

    def drop(self, keys: Seq[bytes]) -> None:
        with self._lock:
            for key in keys:
                self.units.pop(key, None)

    def close(self) -> None:
        self.closed = True

    def _get(self, one: Wanted) -> bool:
        found = self.units.get(one.key)
        if found is None or self.forgetful:
            self.units.pop(one.key, None)
            return False
        one.into[:] = found[1]
        if self.verifies and xxh3_128_digest(one.into) != found[0]:
            del self.units[one.key]
            return False
        if self.refreshes:
            self.units.move_to_end(one.key)
        return True

    def _wait(self) -> None:
        assert self.gate.wait(WITHIN_S)
        if self.broken:
            raise StoreFailed("the medium is broken")


@dataclass
class Tiered:
    loop: EngineLoop
    engine: Engine
    tiers: Tiers
    stores: list[PlainStore]
    outputs: list[Output] = field(default_factory=list)
    events: list[CacheEvent] = field(default_factory=list)

    async def run(self, *seqs: Sequence) -> None:
        """Adds these and waits until the engine has none left."""
        for seq in seqs:
            await self.loop.add(seq)
        await until(lambda: not self.engine.sequences)

    async def settled(self) -> None:
        """Waits until nothing is saved or loaded."""
        await until(lambda: self.engine.pool.num_owned == 0 and self.engine.idle and not self.engine.scheduler.loading)
        await self.loop.call(lambda engine: engine.pool.check())

    def held(self, medium: str) -> set[bytes]:
        """What a reader of the events believes."""
        keys: set[bytes] = set()
        for event in self.events:
            if event.medium == medium:
                keys = keys | set(event.keys) if event.kind == "stored" else keys - set(event.keys)
        return keys


@asynccontextmanager
async def tiered(
    *stores: PlainStore,
    blocks: int = 16,
    policy: TierPolicy | None = None,
    seqs: int = 4,
    max_len: int = 0,
    tiers: Tiers | None = None,
    long_contexts: int = 0,
) -> AsyncIterator[Tiered]:
    """`tiers`: in place of `stores`."""
    runner = ToyRunner(CONFIG, "toy", BLOCK)
    runner.attach(KvPool(runner.layout, blocks))
    engine = Engine(runner, Limits(seqs, 32, 0.5), max_len or blocks * BLOCK, long_contexts=long_contexts)
    outputs: list[Output] = []
    events: list[CacheEvent] = []
    failures: list[BaseException] = []
    loop = EngineLoop(engine, Listener(outputs.extend, events.extend, failures.append))
    tiers = tiers or Tiers(lambda pool: [(store, Bounds()) for store in stores], policy or TierPolicy(wait_s=WITHIN_S))
    loop.attach(tiers)
    loop.start()
    try:
        yield Tiered(loop, engine, tiers, list(stores), outputs, events)
    finally:
        for store in stores:
            store.gate.set()
        await asyncio.to_thread(tiers.close)
        await asyncio.wait_for(loop.close(), WITHIN_S)
    assert not failures and all(store.closed for store in stores)


def make_seq(name: str, tokens: Seq[int], max_tokens: int = 4, salt: str = "", **params: Any) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)
    return Sequence(name, list(tokens), len(tokens), sampling, root_key("toy", salt))


async def until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.002)


def expected(seq: Sequence) -> list[int]:
    return naive(seq.tokens[: seq.prompt_len], seq.params, CONFIG["kv_width"])


def prompt(number: int, length: int = 33) -> list[int]:
    return [(number * 37 + i * 11) % 256 for i in range(length)]


def said(seq: Sequence) -> list[int]:
    return seq.tokens[seq.prompt_len :]


async def visit(t: Tiered, *numbers: int, tag: str = "") -> list[Sequence]:
    """One request after the other, each with a prompt of eight full blocks, and their answers checked."""
    seqs = [make_seq(f"{tag}{number}", prompt(number)) for number in numbers]
    for seq in seqs:
        await t.run(seq)
        await t.settled()
        assert said(seq) == expected(seq)
    return seqs


def make_keys(number: int, salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key("toy", salt), prompt(number), BLOCK)
    return keys
