"""Clients that cost next to nothing, in a process of their own: requests come at their moments (Poisson) whatever becomes of earlier ones.

    python benchmarks/flood.py < RUNS        each line of the input is a run, and each line of the output what its clients saw

A client of grpc.aio takes as much of a core for a refused call as the router that refuses it, which no client on a machine of its own takes
from the workers. Here requests are written before the clock runs, answers are read by hand, and a run says how much it cost and how late it
sent. gRPC is HTTP/2 on one connection (RFC 9113); its headers come without a dynamic table, because our settings allow none (RFC 7541,
4.2). HTTP/1.1 takes a connection for each request that is open, and keeps it.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Awaitable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, Self

from google.rpc import error_details_pb2, status_pb2

from baton.v1 import generation_pb2 as pb

Door = Literal["grpc", "http"]
METHOD, COMPLETIONS = b"/baton.v1.Generation/Generate", b"/v1/completions"
SPARE, PATIENCE_S = 64, 2.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
# No dynamic table, no push, a window of any size, and gRPC's own: metadata in bytes, not in base64 with a Huffman code.
OFFERED = ((1, 0), (2, 0), (4, (1 << 31) - 1), (0xFE03, 1))
WINDOW = 65535  # of a connection, before the peer gives more
STATUS = {0: "", 4: "DEADLINE_EXCEEDED", 8: "RESOURCE_EXHAUSTED", 14: "UNAVAILABLE"}
OF_HTTP = {200: "", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}


@dataclass(frozen=True, slots=True)
class Run:
    """`rate`: requests a second; 0: `at_once` clients, each of which asks again when it has its answer. `urgent`: the share of requests of
    priority 0; the others have 1. `ids`: how many token ids the prompts use."""

    door: Door
    address: str
    seconds: float
    rate: float = 0.0
    at_once: int = 0
    seed: int = 0
    prompt: int = 100
    output: int = 40
    ids: int = 256
    urgent: float = 1.0
    deadline_s: float = 5.0


@dataclass(slots=True)
class Seen:
    """What one client saw; seconds."""

    ttft_s: float = 0.0
    e2e_s: float = 0.0
    status: str = "UNANSWERED"  # empty: complete
    retry_after_s: float | None = None
    tokens: int = 0
    degraded: bool = False  # it got less, and was told so
    urgent: bool = True


@dataclass(slots=True)
class Call:
    seen: Seen
    began: float
    done: "asyncio.Future[None]"
    received: bytearray = field(default_factory=bytearray)
    messages: int = 0
    last: bytes = b""

    def token(self) -> None:
        if not self.seen.ttft_s:
            self.seen.ttft_s = time.perf_counter() - self.began

    def end(self, status: str) -> None:
        self.seen.e2e_s, self.seen.status = time.perf_counter() - self.began, status
        if not self.done.done():
            self.done.set_result(None)


class Asking(Protocol):
    def request(self, ids: list[int], run: Run, priority: int) -> bytes: ...
    def ask(self, request: bytes, call: Call) -> Awaitable[None] | None: ...
    def close(self) -> None: ...


class Grpc(asyncio.Protocol):
    """One connection. Raises ValueError for an answer that it cannot read."""

    def __init__(self, address: str, deadline_s: float) -> None:
        sent = {":method": b"POST", ":scheme": b"http", ":path": METHOD, ":authority": address.encode(), "te": b"trailers"}
        sent |= {"content-type": b"application/grpc", "grpc-timeout": b"%dm" % int(deadline_s * 1000)}
        self._headers = b"".join(literal(name.encode(), value) for name, value in sent.items())
        self._received = bytearray()
        self._calls: dict[int, Call] = {}
        self._stream, self._window = -1, WINDOW

    @classmethod
    async def open(cls, run: Run) -> Self:
        host, _, port = run.address.rpartition(":")
        _, made = await asyncio.get_running_loop().create_connection(lambda: cls(run.address, run.deadline_s), host.strip("[]"), int(port))
        return made

    def request(self, ids: list[int], run: Run, priority: int) -> bytes:
        sampling = pb.SamplingParams(max_tokens=run.output, temperature=0.0, ignore_eos=True)
        body = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling, priority=priority).SerializeToString()
        return b"\0" + len(body).to_bytes(4, "big") + body

    def ask(self, request: bytes, call: Call) -> None:
        if len(request) > self._window:
            return call.end("WINDOW")  # the server reads too slowly for us
        self._window -= len(request)
        self._stream += 2
        self._calls[self._stream] = call
        self._to.write(frame(HEADERS, END_HEADERS, self._stream, self._headers) + frame(DATA, END_STREAM, self._stream, request))

    def close(self) -> None:
        self._to.abort()

    def connection_made(self, transport: Any) -> None:
        self._to = transport
        settings = b"".join(number.to_bytes(2, "big") + value.to_bytes(4, "big") for number, value in OFFERED)
        more = ((1 << 31) - 1 - WINDOW).to_bytes(4, "big")
        transport.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more))

    def connection_lost(self, error: Exception | None) -> None:
        for call in self._calls.values():
            call.end("UNAVAILABLE")
        self._calls.clear()

    def data_received(self, data: bytes) -> None:
        received, at = self._received, 0
        received += data
        while len(received) - at >= 9 and len(received) - at >= 9 + (size := int.from_bytes(received[at : at + 3], "big")):
            stream = int.from_bytes(received[at + 5 : at + 9], "big")
            self._take(received[at + 3], received[at + 4], stream, bytes(received[at + 9 : at + 9 + size]))
            at += 9 + size
        del received[:at]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA and (call := self._calls.get(stream)):
            _take_messages(call, payload)
        elif kind == HEADERS and flags & END_STREAM and (call := self._calls.pop(stream, None)):
            _end(call, payload)
        elif kind == RESET and (call := self._calls.pop(stream, None)):
            call.end(f"RESET {int.from_bytes(payload, 'big')}")
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self._to.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == GOAWAY:
            self._to.close()
        elif kind == WINDOW_UPDATE and not stream:
            self._window += int.from_bytes(payload, "big")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header without a table (RFC 7541, 6.2.2)."""
    assert max(len(name), len(value)) < 127
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def header(block: bytes, name: bytes) -> bytes:
    """Its value; empty if it is not there. Raises ValueError for one that is Huffman-coded."""
    at = block.find(bytes((len(name),)) + name)
    if at < 0:
        return b""
    at += 1 + len(name)
    size, at = block[at], at + 1
    if size & 0x80:
        raise ValueError(f"the value of {name.decode()} has a Huffman code")
    if size == 127:
        shift = 0
        while True:
            size += (block[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if not block[at - 1] & 0x80:
                break
    return block[at : at + size]


def _take_messages(call: Call, data: bytes) -> None:
    received = call.received
    received += data
    while len(received) >= 5 and len(received) >= 5 + (size := int.from_bytes(received[1:5], "big")):
        call.last = bytes(received[5 : 5 + size])
        del received[: 5 + size]
        call.messages += 1
        if call.messages == 1:
            call.seen.degraded = bool(pb.GenerateResponse.FromString(call.last).accepted.degraded)
        elif call.messages == 2:
            call.token()


def _end(call: Call, trailers: bytes) -> None:
    status = header(trailers, b"grpc-status")
    if not status:
        raise ValueError(f"no status in {trailers!r}")
    call.end(STATUS.get(int(status), f"STATUS {status.decode()}"))
    if not call.seen.status:
        call.seen.tokens = pb.GenerateResponse.FromString(call.last).finished.usage.completion_tokens
    elif details := header(trailers, b"grpc-status-details-bin"):
        for detail in status_pb2.Status.FromString(details[1:]).details:
            if detail.type_url.endswith("RetryInfo"):
                told = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                call.seen.retry_after_s = told.seconds + told.nanos / 1e9


class Http:
    """Connections that are kept: one for each request that is open."""

    def __init__(self, run: Run) -> None:
        self._address = run.address.rpartition("//")[2]
        self._free: list[Connection] = []
        self._all: list[Connection] = []
        self._head = b"POST %s HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\nx-request-timeout-ms: %d\r\n" % (
            COMPLETIONS, self._address.encode(), int(run.deadline_s * 1000)
        )  # fmt: skip

    def request(self, ids: list[int], run: Run, priority: int) -> bytes:
        asked = {"prompt": ids, "max_tokens": run.output, "temperature": 0, "ignore_eos": True, "stream": True}
        asked |= {"priority": priority} if priority else {}  # nobody names the default
        body = json.dumps(asked | {"stream_options": {"include_usage": True}}, separators=(",", ":")).encode()
        return self._head + b"content-length: %d\r\n\r\n" % len(body) + body

    async def ask(self, request: bytes, call: Call) -> None:
        if self._free:
            return self._free.pop().send(request, call)
        host, _, port = self._address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: Connection(self._free), host.strip("[]"), int(port))
        self._all.append(made)
        made.send(request, call)

    def close(self) -> None:
        for connection in self._all:
            connection.to.abort()


class Connection(asyncio.Protocol):
    def __init__(self, free: "list[Connection]") -> None:
        self._free = free
        self._call: Call | None = None

    def connection_made(self, transport: Any) -> None:
        self.to = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._free:
            self._free.remove(self)
        if self._call is not None:
            self._call.end("UNAVAILABLE")

    def send(self, request: bytes, call: Call) -> None:
        self._call, self._head = call, ""
        self.to.write(request)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            return
        received = call.received
        received += data
        if not self._head:
            head, found, _ = received.partition(b"\r\n\r\n")
            if not found:
                return
            self._head = head.decode("latin-1").lower()
            del received[: len(head) + 4]
        if self._head[9:12] == "200":
            if b'"text"' in received:
                call.token()
            complete = received.endswith(b"0\r\n\r\n")
        else:
            complete = len(received) >= int(_of(self._head, "content-length") or 0)
        if complete:
            self._call = None
            self._free.append(self)
            _end_http(call, self._head)


def _of(head: str, name: str) -> str:
    found = re.search(rf"\r\n{name}: *([^\r]*)", head)
    return found[1] if found else ""


def _end_http(call: Call, head: str) -> None:
    status = int(head[9:12])
    call.end(OF_HTTP.get(status, f"STATUS {status}"))
    call.seen.degraded = bool(_of(head, "x-baton-degraded"))
    if after := _of(head, "retry-after"):
        call.seen.retry_after_s = float(after)
    if status == 200 and (usage := re.findall(rb'"completion_tokens":([0-9]+)', call.received)):
        call.seen.tokens = int(usage[-1])
    elif status == 200:  # a stream that broke tells why in its last event
        call.seen.status = "DEADLINE_EXCEEDED" if b"deadline" in call.received else "BROKEN"


class Flood:
    def __init__(self, run: Run, door: Asking) -> None:
        self._run, self._door, self._rng = run, door, random.Random(run.seed)
        count = int(run.rate * run.seconds * 1.2) + SPARE * (1 + run.at_once)  # no prompt is sent twice: it would be cached
        self._requests = [self._request(door) for _ in range(count)]
        self.seen: list[Seen] = []
        self.lags: list[float] = []
        self._opening: set[asyncio.Task[None]] = set()

    def _request(self, door: Asking) -> tuple[bytes, bool]:
        urgent = self._rng.random() < self._run.urgent
        ids = self._rng.choices(range(self._run.ids), k=self._run.prompt)
        return door.request(ids, self._run, 0 if urgent else 1), urgent

    def ask(self) -> "asyncio.Future[None]":
        request, urgent = self._requests[len(self.seen) % len(self._requests)]
        self.seen.append(Seen(urgent=urgent))
        call = Call(self.seen[-1], time.perf_counter(), asyncio.get_running_loop().create_future())
        opening = self._door.ask(request, call)
        if opening is not None:
            task = asyncio.ensure_future(opening)
            self._opening.add(task)  # kept: the loop has only a weak reference to it
            task.add_done_callback(self._opening.discard)
        return call.done

    async def open(self) -> None:
        asked, due, began = [], 0.0, time.perf_counter()
        while (due := due + self._rng.expovariate(self._run.rate)) < self._run.seconds:
            if (early := due - (time.perf_counter() - began)) > 0:
                await asyncio.sleep(early)
            self.lags.append(max(0.0, time.perf_counter() - began - due))
            asked.append(self.ask())
        if asked:
            await asyncio.wait(asked, timeout=self._run.deadline_s + PATIENCE_S)

    async def closed(self) -> None:
        until = time.perf_counter() + self._run.seconds

        async def one() -> None:
            while time.perf_counter() < until:
                await asyncio.wait([self.ask()], timeout=self._run.deadline_s + PATIENCE_S)

        await asyncio.gather(*(one() for _ in range(self._run.at_once)))


async def flood(run: Run) -> dict[str, Any]:
    door: Asking = await Grpc.open(run) if run.door == "grpc" else Http(run)
    try:
        clients = Flood(run, door)
        spent = time.process_time()
        await (clients.open() if run.rate else clients.closed())
        return {"seen": [asdict(one) for one in clients.seen], "cpu_s": time.process_time() - spent, "lags_s": clients.lags}
    finally:
        door.close()


def main(lines: Iterable[str]) -> None:
    for line in lines:
        print(json.dumps(asyncio.run(flood(Run(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main(sys.stdin)
