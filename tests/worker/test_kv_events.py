"""The prefix cache of a worker, read back by a subscriber with vLLM's own types."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from toy_worker import toy_worker

from baton.cluster.config import ConfigError
from baton.cluster.config_engine import KvConfig
from baton.cluster.lifecycle import Stop
from baton.engine.build import BuildError, check
from baton.engine.core.block_key import block_key, root_key
from baton.engine.core.blocks import BlockContent
from baton.engine.core.contract import CacheEvent, cache_events
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import ToyRunner
from baton.engine.options import Options
from baton.worker import kv_events
from baton.worker.kv_events import END, KvEventPublisher, told

BLOCK = 4
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
ANY = "tcp://127.0.0.1:0"


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    made = KvEventPublisher(ANY, ANY, "kv@w@m", BLOCK, lambda: 7.0)
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


class Subscriber:
    """Knows what vLLM's subscribers know: parents, tokens and hashes of the blocks that a worker holds."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        self.next = 0

    def take(self, number: int, batch: KVEventBatch) -> None:
        assert number == self.next and batch.ts == 7.0 and batch.data_parallel_rank == 0
        self.next += 1
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.blocks.clear()
                case BlockRemoved():
                    for key in event.block_hashes:
                        del self.blocks[key]  # type: ignore[arg-type]
                case BlockStored():
                    parent: Any = event.parent_block_hash
                    assert event.medium == "GPU" and len(event.token_ids) == event.block_size * len(event.block_hashes)
                    for i, key in enumerate(event.block_hashes):
                        assert isinstance(key, bytes)
                        self.blocks[key] = parent, tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
                        parent = key


def asked(context: "zmq.Context[Any]", address: str, first: int = 0) -> list[tuple[int, KVEventBatch]]:
    """What a subscriber missed, from `first` on."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 30_000)
        socket.connect(address)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, KVEventBatch]] = []
        while True:
            _, topic, number, payload = socket.recv_multipart()
            if number == END:
                return found
            assert topic == b"kv@w@m"
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=KVEventBatch)))


def until(context: "zmq.Context[Any]", publisher: KvEventPublisher, count: int) -> list[tuple[int, KVEventBatch]]:
    """All batches, once `count` were sent."""
    assert publisher.replay is not None
    while len(found := asked(context, publisher.replay)) < count:
        time.sleep(0.01)
    return found


def stored(number: int, size: int = 1) -> CacheEvent:
    return CacheEvent(number, "stored", tuple(bytes([i]) * 16 for i in range(size)), "device")


def test_a_subscriber_knows_what_the_engine_caches(publisher: KvEventPublisher, context: "zmq.Context[Any]") -> None:
    """A small pool: blocks are evicted all the time."""
    rng, root = random.Random(3), root_key("toy")
    runner = ToyRunner(CONFIG, "toy", BLOCK)
    runner.attach(KvPool(runner.layout, 24))
    engine = Engine(runner, Limits(max_num_seqs=4, max_num_batched_tokens=16, reserve_growth=0.0), 96)
    engine.pool.describes = True
    number = batches = 0
    starts = [[rng.randrange(256) for _ in range(8)] for _ in range(3)]
    for i in range(40):
        tokens = rng.choice(starts) + [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        engine.add(Sequence(str(i), tokens, len(tokens), SamplingParams(max_tokens=9, seed=i), root))
        while not engine.idle:
            engine.step()
            if events := cache_events(engine.pool.drain_changes(), number):
                number, batches = number + len(events), batches + 1
                publisher.publish(events)
    reader = Subscriber()
    for at, batch in until(context, publisher, batches + 1):
        reader.take(at, batch)
    assert set(reader.blocks) == set(engine.pool.sealed_keys()) and len(reader.blocks) > 8
    for key, (parent, content) in reader.blocks.items():
        assert key == block_key(root if parent is None else parent, content)


def test_a_subscriber_gets_batches_as_they_come_and_later_those_that_it_missed(
    publisher: KvEventPublisher, context: "zmq.Context[Any]"
) -> None:
    with context.socket(zmq.SUB) as live:
        live.setsockopt(zmq.SUBSCRIBE, b"kv@w")
        live.setsockopt(zmq.RCVTIMEO, 30_000)
        live.connect(publisher.address)
        while not live.poll(20):  # until the subscription has arrived
            publisher.publish([stored(1)])
        topic, first, payload = live.recv_multipart()
        assert topic == b"kv@w@m" and msgspec.msgpack.decode(payload, type=KVEventBatch).events
        at = int.from_bytes(first, "big")
        publisher.publish([stored(2), CacheEvent(3, "removed", (b"k" * 16,), "host")])
        while (got := live.recv_multipart())[1] != until(context, publisher, at + 2)[-1][0].to_bytes(8, "big"):
            pass
        assert msgspec.msgpack.decode(got[2], type=KVEventBatch).events[-1] == BlockRemoved([b"k" * 16], "CPU")
    whole = until(context, publisher, at + 2)
    assert [number for number, _ in whole] == list(range(len(whole))) and whole[0][1].events == [AllBlocksCleared()]
    assert publisher.replay is not None and asked(context, publisher.replay, len(whole) - 1) == whole[-1:]
    assert asked(context, publisher.replay, 1 << 40) == []


def test_who_does_not_read_stops_nobody(monkeypatch: pytest.MonkeyPatch, context: "zmq.Context[Any]") -> None:
    monkeypatch.setattr(kv_events, "WAITING", 20)
    monkeypatch.setattr(kv_events, "UNREAD", 20)
    publisher = KvEventPublisher(ANY, ANY, "kv@w@m", BLOCK, lambda: 7.0)
    try:
        with context.socket(zmq.SUB) as slow:
            slow.setsockopt(zmq.RCVHWM, 1)
            slow.setsockopt(zmq.SUBSCRIBE, b"")
            slow.connect(publisher.address)
            while not slow.poll(20):
                publisher.publish([stored(0)])
            for number in range(500):
                publisher.publish([stored(number, 64)])
                assert publisher._waiting.qsize() <= 20
            assert until(context, publisher, 1), "requests are answered as before"
            got = 0
            while slow.poll(100):
                slow.recv_multipart()
                got += 1
            assert got < publisher._number, "what it did not read in time is gone for it, and for nobody else"
    finally:
        publisher.close()


def test_after_batches_were_lost_all_blocks_are_cleared(monkeypatch: pytest.MonkeyPatch, context: "zmq.Context[Any]") -> None:
    monkeypatch.setattr(kv_events, "WAITING", 2)
    waits = threading.Event()
    real = KvEventPublisher._send
    monkeypatch.setattr(KvEventPublisher, "_send", lambda self, batch: (waits.wait(), real(self, batch))[1])
    publisher = KvEventPublisher(ANY, ANY, "kv@w@m", BLOCK, lambda: 7.0)
    try:
        while publisher._waiting.qsize():  # until the thread holds the first batch
            time.sleep(0.01)
        for number in range(9):
            publisher.publish([stored(number)])
        waits.set()
        while publisher._waiting.qsize():
            time.sleep(0.01)
        for number in range(2):
            publisher.publish([stored(number)])
        kinds = [[type(event) for event in batch.events] for _, batch in until(context, publisher, 5)]
        assert kinds == [[AllBlocksCleared], [BlockStored], [BlockStored], [AllBlocksCleared, BlockStored], [BlockStored]]
    finally:
        waits.set()
        publisher.close()


def test_chains_become_events_with_their_parent() -> None:
    a, b, c, d = (bytes([i]) * 16 for i in range(4))
    contents = (BlockContent(None, (1, 2)), BlockContent(a, (3, 4)), BlockContent(a, (5, 6)), None)
    events = list(told(CacheEvent(1, "stored", (a, b, c, d), "disk", contents), 2))
    assert [(e["block_hashes"], e["parent_block_hash"], e["token_ids"], e["medium"]) for e in events] == [
        ([a, b], None, [1, 2, 3, 4], "STORAGE"),
        ([c], a, [5, 6], "STORAGE"),
        ([d], None, [], "STORAGE"),
    ]


def test_several_workers_of_a_host_take_the_next_ports() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        made = KvEventPublisher(f"tcp://127.0.0.1:{port}", None, "", BLOCK)
        try:
            assert port < int(made.address.rpartition(":")[2]) < port + kv_events.TRIED_PORTS
        finally:
            made.close()
    with pytest.raises(ConfigError, match=r"kv\.events: .*192\.0\.2\.1"):
        KvEventPublisher("tcp://192.0.2.1:5557", None, "", BLOCK)


@pytest.mark.parametrize("kv", [{"events": "5557"}, {"events": "udp://x:1"}, {"events_replay": ANY}, {"events": "tcp://a b:1"}])
def test_addresses_that_are_none_are_refused(kv: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="events"):
        KvConfig(**kv)


def test_only_our_engine_tells_what_blocks_hold() -> None:
    for address in ("tcp://*:5557", "tcp://[::1]:5557", "tcp://localhost:0"):
        assert KvConfig(events=address).events == address
    given = Options.of(Path("x"), kind="vllm")
    with pytest.raises(BuildError, match=r"kv\.events: needs engine\.kind baton"):
        check(replace(given, describes=True))


async def test_a_worker_publishes_if_it_is_told_to(tmp_path: Path, context: "zmq.Context[Any]") -> None:
    process = toy_worker(tmp_path, Stop(), events=ANY, events_replay=ANY)
    try:
        await process.start()
        host = process.host
        publisher = host._publisher
        assert publisher is not None and publisher._topic == f"kv@{host.name}@toy".encode()
        size, prompt = host.engine.pool.layout.block_size, list(range(100))
        await host.engine.add(Sequence("s", prompt, len(prompt), SamplingParams(max_tokens=1), root_key("x")))
        assert publisher.replay is not None
        publisher._topic = b"kv@w@m"
        while len(found := await asyncio.to_thread(asked, context, publisher.replay, 1)) < 1:
            await asyncio.sleep(0.01)
        (event,) = found[0][1].events
        assert isinstance(event, BlockStored) and event.token_ids == prompt[: len(prompt) // size * size] and event.block_size == size
    finally:
        await process.close()
