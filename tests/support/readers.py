"""Both doors of a router over a worker that follows a script, all in this process, and clients that read badly.

Everything of the router's that a token passes is real: the decode session, the dispatcher, the service, the doors and their sockets.
"""

import asyncio
import json
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
from fake_workers import MODEL, record

from baton.cluster.config import Config, SecurityConfig
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.keys import ApiKeys
from baton.cluster.metrics import Book
from baton.cluster.records import Load
from baton.cluster.rpc import Server, Tasks
from baton.cluster.telemetry import Tracer
from baton.v1 import generation_pb2, generation_pb2_grpc, worker_pb2
from router.admission import Admission
from router.clients import GrpcWorkers, Streams
from router.dispatch import Dispatcher
from router.door import GenerationDoor
from router.http.app import HttpDoor
from router.http.server import HttpServer
from router.journal import Journal
from router.service import Draws, GenerateService, ModelText
from router.tokenizer import Tokenizer
from router.turn_budget import TurnBudget
from router.view import ClusterView

EVENTS_IN_A_MESSAGE = 256
PROMPT = [104, 101, 108, 108, 111]


class Worker:
    """A decode worker that answers each call with `tokens` tokens, all calls in turn, as fast as the router reads."""

    def __init__(self, tokens: int, logprobs: int) -> None:
        self.tokens = tokens
        self.sent: dict[int, int] = {}  # call → its events
        self.cancelled: set[int] = set()
        self.pause_s = 0.0  # after each message
        top = [generation_pb2.TopLogprob(id=(97 + i) % 257, logprob=-0.5 - i) for i in range(logprobs)]
        token = worker_pb2.GeneratedToken(id=97, logprob=-0.5, top=top) if logprobs else worker_pb2.GeneratedToken(id=97)
        end = worker_pb2.DecodeFinished(reason=generation_pb2.FINISH_REASON_LENGTH)
        self._token = worker_pb2.DecodeEvent(token=token).SerializeToString()
        self._end = worker_pb2.DecodeEvent(finished=end).SerializeToString()
        self._news = asyncio.Event()

    async def session(self, commands: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        listener = asyncio.create_task(self._listen(commands))
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while events := self._next():
                    yield events
                    await asyncio.sleep(self.pause_s)
        finally:
            listener.cancel()

    async def _listen(self, commands: AsyncIterator[bytes]) -> None:
        async for data in commands:
            for command in worker_pb2.DecodeCommands.FromString(data).commands:
                match command.WhichOneof("command"):
                    case "start":
                        self.sent |= dict.fromkeys([command.call_id, *(fork.call_id for fork in command.start.forks)], 0)
                        self._news.set()
                    case "cancel":
                        self.cancelled.add(command.call_id)

    @property
    def done(self) -> bool:
        """Whether nothing is left to be sent."""
        return not self._running

    @property
    def _running(self) -> list[int]:
        return [call for call, sent in self.sent.items() if sent <= self.tokens and call not in self.cancelled]

    def _next(self) -> bytes:
        """A message, put together from bytes: its cost would count as the router's."""
        running, events = self._running, []
        for call in running[:EVENTS_IN_A_MESSAGE] * (EVENTS_IN_A_MESSAGE // max(1, len(running))):
            if self.sent[call] <= self.tokens:
                event = self._token if self.sent[call] < self.tokens else self._end
                number = b"\x08" + _varint(call)
                events.append(b"\x0a" + _varint(len(number) + len(event)) + number + event)
                self.sent[call] += 1
        return b"".join(events)


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


@dataclass
class Hall:
    worker: Worker
    service: GenerateService
    public: Server
    http: HttpServer
    http_address: str
    workers: GrpcWorkers
    tls: ssl.SSLContext | None
    name: str  # of the server, in its certificate
    channel: grpc.aio.Channel
    left: list[Any] = field(default_factory=list)

    async def http_reader(self, body: dict[str, Any], path: str = "/v1/chat/completions", headers: str = "x: y") -> "HttpReader":
        """It does not read yet."""
        host, port = self.http_address.rsplit(":", 1)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        named = self.name if self.tls else None
        reader, writer = await asyncio.open_connection(sock=sock, ssl=self.tls, server_hostname=named, limit=4096)
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}", headers]
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        self.left.append(writer)
        return HttpReader(reader, writer)

    def grpc_reader(self, max_tokens: int, logprobs: int | None) -> Any:
        sampling = generation_pb2.SamplingParams(max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True)
        ids = generation_pb2.TokenIds(ids=PROMPT)
        return generation_pb2_grpc.GenerationStub(self.channel).Generate(generation_pb2.GenerateRequest(token_ids=ids, sampling=sampling))

    async def until(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)

    @property
    def begun(self) -> int:
        return len(self.worker.sent)

    @property
    def waiting_bytes(self) -> list[int]:
        """For each call whose answer has not been read to its end."""
        return [inbox._backlog.size for inbox in self.workers._inboxes]

    @property
    def idle(self) -> bool:
        return self.service.idle and self.http.idle


@dataclass
class HttpReader:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def rest(self) -> bytes:
        """Reads to the end of the answer, or of the connection: an answer of a known length, or a stream."""
        self.writer.transport.resume_reading()  # type: ignore[attr-defined]
        got, length = bytearray(), -1  # length: of the answer; 0 if it does not say
        try:
            while data := await self.reader.read(1 << 16):
                got += data
                if length < 0 and b"\r\n\r\n" in got:
                    head = got[: got.index(b"\r\n\r\n") + 4]
                    told = re.search(rb"content-length: (\d+)", head)
                    length = len(head) + int(told[1]) if told else 0
                if got.endswith(b"\r\n0\r\n\r\n") or len(got) == length:
                    break
        except ConnectionResetError:
            pass
        return _unchunked(bytes(got))

    async def sip(self, size: int) -> None:
        self.writer.transport.resume_reading()  # type: ignore[attr-defined]
        with suppress(ConnectionResetError):
            await self.reader.read(size)
        with suppress(RuntimeError):  # the reader has paused it itself
            self.writer.transport.pause_reading()  # type: ignore[attr-defined]

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def _unchunked(answer: bytes) -> bytes:
    """Without the chunks of the transfer: each has one whole event or several."""
    return re.sub(rb"\r\n[0-9a-f]+\r\n(?=data: |$|\r\n)", b"\r\n", answer) if b"transfer-encoding" in answer else answer


@asynccontextmanager
async def hall(
    tokenizer: Tokenizer,
    tokens: int,
    logprobs: int,
    security: SecurityConfig | None = None,
    tls: tuple[ssl.SSLContext, grpc.ChannelCredentials, str] | None = None,
    **limits: Any,
) -> AsyncIterator[Hall]:
    config = Config(router=RouterConfig(**{"http_port": 0, "max_inflight": 4096, **limits}), security=security or SecurityConfig())
    async with AsyncExitStack() as stack:
        worker = Worker(tokens, logprobs)
        server = Server(Config(), 1 << 20)
        session = grpc.stream_stream_rpc_method_handler(worker.session)
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.Decode", {"Session": session}),))
        address = server.bind(0)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        view, budget = ClusterView({MODEL: tokenizer.fingerprint}), TurnBudget()
        facts = {"tokenizer_fingerprint": tokenizer.fingerprint, "max_model_len": 1 << 20, "load": Load(credit_tokens=1 << 40)}
        view.update([record("d0", address=address, **facts)], 0.0)
        workers = GrpcWorkers(SecurityConfig(), Streams(lambda: 0.0, config.router.backlog_bytes, budget))
        stack.push_async_callback(workers.close)
        numbers = count(1)
        service = GenerateService(
            model=view.models[MODEL],
            text=ModelText(tokenizer),
            dispatcher=Dispatcher(view.models[MODEL], workers, config.router, max_queue=4096),
            admission=(admission := Admission(config.router.max_inflight, config.router.max_queue)),
            config=config.router,
            journal=Journal(Book("router", model="toy"), Tracer(), "toy", SloConfig(), keep=10),
            draws=Draws(lambda: 77, lambda: f"req-{next(numbers)}"),
        )
        stack.callback(service.close)
        public = Server(config, config.router.max_message_bytes, config.router.stall_s)
        generation_pb2_grpc.add_GenerationServicer_to_server(GenerationDoor(service, ApiKeys(), budget), public.grpc)
        grpc_address = public.bind(0)
        await public.start()
        stack.push_async_callback(public.stop, 0)
        failures: list[BaseException] = []
        tasks = Tasks(failures.append)
        door = HttpDoor(service, tokenizer, ApiKeys(), config.router, lambda: True, lambda: f"req-{next(numbers)}", budget=budget)
        http = HttpServer(config, door, budget)
        http_address = http.bind(0)
        http.start(tasks)
        stack.push_async_callback(tasks.close)
        stack.push_async_callback(http.stop)
        options: list[tuple[str, Any]] = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
        if tls:
            options.append(("grpc.ssl_target_name_override", tls[2]))
        opened = grpc.aio.secure_channel(grpc_address, tls[1], options) if tls else grpc.aio.insecure_channel(grpc_address, options)
        channel = await stack.enter_async_context(opened)
        context, name = (tls[0], tls[2]) if tls else (None, "")
        made = Hall(worker, service, public, http, http_address, workers, context, name, channel)
        yield made
        worker.pause_s = 0
        for writer in made.left:
            writer.transport.abort()
        await made.until(lambda: made.idle)
        admission.check()
        assert not failures and not any(made.waiting_bytes)
