"""A worker's prefix cache told to others as vLLM tells its own (vllm/distributed/kv_events.py of 0.32): batches of BlockStored,
BlockRemoved and AllBlocksCleared in msgpack, numbered from 0, on a PUB socket; a ROUTER socket sends those of the last while again.

    PUB      topic, number (8 bytes, big endian), batch
    ROUTER   asked with a number: the same messages from that one on, then one with the number -1

Nothing here waits for a subscriber: what one does not read in time, its socket drops, and it sees a gap in the numbers. If even this
thread cannot follow the engine, the next batch says that all blocks are cleared: who reads it knows too little, never too much.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import zmq

from baton.cluster.config import ConfigError
from baton.engine.core.block_key import DEVICE, DISK, HOST, REMOTE
from baton.engine.core.contract import CacheEvent

log = logging.getLogger(__name__)
MEDIUM = {DEVICE: "GPU", HOST: "CPU", DISK: "STORAGE", REMOTE: "STORAGE"}
TRIED_PORTS = 32  # workers on one host: each takes the first free one
WAITING = 1000  # batches that may wait for the thread
UNREAD = 1000  # batches that may wait for one subscriber
REPLAYED, REPLAYED_BYTES = 10_000, 64 << 20  # what is kept to be sent again
LOOK_S = 0.1  # how often the thread looks for requests
END = (-1).to_bytes(8, "big", signed=True)
ASKED_BYTES = 64  # of a request, at most

_Json = dict[str, Any]
CLEARED: _Json = {"type": "AllBlocksCleared"}


def told(event: CacheEvent, block_size: int) -> Iterator[_Json]:
    """A stored event for each chain of blocks: the first block's parent stands for those of all. Blocks whose content is not known stand
    alone, without tokens."""
    if event.kind == "removed":
        yield {"type": "BlockRemoved", "block_hashes": list(event.keys), "medium": MEDIUM[event.medium]}
        return
    contents = event.contents or (None,) * len(event.keys)
    starts = [0, *(i for i in range(1, len(contents)) if (now := contents[i]) is None or now.parent != event.keys[i - 1]), len(contents)]
    for start, end in pairwise(starts):
        first = contents[start]
        yield {
            "type": "BlockStored",
            "block_hashes": list(event.keys[start:end]),
            "parent_block_hash": None if first is None else first.parent,
            "token_ids": [token for content in contents[start:end] if content is not None for token in content.tokens],
            "block_size": block_size,
            "lora_id": None,
            "medium": MEDIUM[event.medium],
            "lora_name": None,
        }


class KvEventPublisher:
    """`publish` and `close` belong to the event loop; a thread owns the sockets."""

    def __init__(self, address: str, replay: str | None, topic: str, block_size: int, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch, for readers elsewhere. Raises ConfigError for an address that cannot be bound."""
        self._topic = topic.encode()
        self._block_size = block_size
        self._clock = clock
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.setsockopt(zmq.SNDHWM, UNREAD)
        self._asked = self._context.socket(zmq.ROUTER)
        self._asked.setsockopt(zmq.SNDHWM, REPLAYED + 1)
        self._asked.setsockopt(zmq.MAXMSGSIZE, ASKED_BYTES)
        try:
            self._bind(address, replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv.events: {address} (kv.events_replay: {replay}) cannot be bound: {error}") from None
        self._waiting: queue.Queue[list[_Json] | None] = queue.Queue(WAITING)
        self._lost = False  # a batch found no room
        self._closing = threading.Event()
        self._sent: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self._put([CLEARED])  # a process that has just started holds nothing
        log.info("block events on %s, sent again on %s", self.address, self.replay or "no address")

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Never waits."""
        self._put([*([CLEARED] if self._lost else ()), *(one for event in events for one in told(event, self._block_size))])

    def close(self) -> None:
        """Waits for the thread, which ends soon: it waits for nobody."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _put(self, batch: list[_Json]) -> None:
        try:
            self._waiting.put_nowait(batch)
            self._lost = False
        except queue.Full:
            if not self._lost:
                log.warning("block events come faster than they can be sent: subscribers will be told that all blocks are cleared")
            self._lost = True

    def _bind(self, address: str, replay: str | None) -> None:
        for further in range(TRIED_PORTS):
            try:
                self.address = _bound(self._events, address, further)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or further == TRIED_PORTS - 1:
                    raise
                continue
            self.replay = _bound(self._asked, replay, further) if replay is not None else None
            return

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                if self._asked.poll(0):
                    self._send_again()
                self._send(self._waiting.get(timeout=LOOK_S))
            except queue.Empty:
                continue
            except zmq.ZMQError:
                log.exception("block events could not be sent")

    def _send(self, batch: list[_Json] | None) -> None:
        payload = msgspec.msgpack.encode([self._clock(), batch, 0])
        number, self._number = self._number, self._number + 1
        self._sent.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._sent) > REPLAYED or self._kept_bytes > REPLAYED_BYTES:
            self._kept_bytes -= len(self._sent.popleft()[1])
        self._events.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    def _send_again(self) -> None:
        asked = self._asked.recv_multipart(zmq.NOBLOCK)
        if len(asked) != 3 or len(asked[2]) != 8:
            return
        who, first = asked[0], int.from_bytes(asked[2], "big")
        for number, payload in self._sent:
            if number >= first:
                self._asked.send_multipart((who, b"", self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self._asked.send_multipart((who, b"", b"", END, b""), zmq.NOBLOCK)


def _bound(socket: "zmq.Socket[bytes]", address: str, further: int) -> str:
    """Binds the port of `address`, or one further; 0 stays any free one. Returns the address."""
    host, _, port = address.rpartition(":")
    socket.setsockopt(zmq.IPV6, "[" in host)
    socket.bind(f"{host}:{int(port) + further if int(port) else 0}")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
