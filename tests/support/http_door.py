"""The HTTP door over a service whose dispatcher follows a script, and a client that speaks ASGI and can disconnect at any point."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from fake_workers import MODEL, record
from memory_answers import MemoryAnswers

from baton.cluster.config import Config
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError
from baton.cluster.keys import ApiKeys
from baton.cluster.metrics import Book
from baton.cluster.rpc import Tasks
from baton.cluster.telemetry import Tracer
from baton.engine.core.sampling import SamplingParams
from baton.models.make_small import make_toy
from router.admission import Admission
from router.http.app import HttpDoor
from router.http.server import HttpServer
from router.journal import Journal
from router.kept import Kept
from router.request import FinishReason, Request, Token, Tokens
from router.service import Draws, GenerateService, ModelText, Tenancy
from router.tokenizer import Tokenizer
from router.tools.forms import Forms
from router.uncached import Uncached
from router.view import ClusterView

CONTEXT = 4096  # tokens; of the worker in the view
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def toy_tokenizer(path: Path) -> Tokenizer:
    """Each byte is its own token id; 256 ends the text."""
    make_toy(path)
    return Tokenizer.load(path)


@dataclass
class Script:
    """Stands in for the dispatcher: sends `ids`, `joins` at a time, then `finish` or `error`. Waits at `gate` before token `gate_at`."""

    ids: Sequence[int] = b"abc"
    finish: FinishReason | None = "length"
    error: Exception | None = None
    cached: int = 0
    uncached: Uncached | None = None
    gate: asyncio.Event | None = None
    gate_at: int = 0
    joins: int = 1
    waits: Callable[[Request], bool] = lambda request: True  # whether the gate stops this request
    fails: Callable[[Request], bool] = lambda request: True
    begun: list[Request] = field(default_factory=list)
    ended: int = 0
    said: int = 0

    async def generate(self, request: Request) -> AsyncGenerator[Tokens, None]:
        self.begun.append(request)
        request.trace.cached_tokens, request.trace.uncached = self.cached, self.uncached
        ready: list[Token] = []
        try:
            for i, id_ in enumerate((*self.ids[request.output_len :], None)):
                if self.gate is not None and i == self.gate_at and self.waits(request):
                    await self.gate.wait()
                await asyncio.sleep(0)
                if id_ is not None:
                    self.said += 1
                    ready.append(told(id_, request.params))
                if ready and (id_ is None or len(ready) == self.joins):
                    request.tokens.extend(token.id for token in ready)
                    yield tuple(ready)
                    ready = []
            if self.error is not None and self.fails(request):
                raise self.error
            request.finish = self.finish
        finally:
            self.ended += 1


def told(id_: int, params: SamplingParams) -> Token:
    if params.logprobs is None:
        return Token(id_)
    return Token(id_, -0.5, tuple(((id_ + i) % 257, -0.5 - i) for i in range(params.logprobs)))


@dataclass
class House:
    tokenizer: Tokenizer
    script: Script = field(default_factory=Script)
    config: RouterConfig = field(default_factory=RouterConfig)
    keys: ApiKeys = field(default_factory=ApiKeys)
    serving: bool = True
    workers: bool = True
    shared_prefixes: bool = False
    receipt_key: bytes = b"k" * 32  # routers of one cluster have the same
    answers: MemoryAnswers | None = None  # where routers of one cluster keep them
    context: int = CONTEXT
    metrics: Any = None
    forms: Forms = field(default_factory=Forms)
    path: Path | None = None  # of the model, whose vocabulary holds outputs to grammars

    def __post_init__(self) -> None:
        self.view = view = ClusterView({MODEL: self.tokenizer.fingerprint})
        if self.workers:
            view.update([record("d0", tokenizer_fingerprint=self.tokenizer.fingerprint, max_model_len=self.context)], 0.0)
        self.admission = Admission(self.config.max_inflight, self.config.max_queue)
        self.journal = Journal(Book("router", model="toy"), Tracer(), "toy", SloConfig(), keep=10)
        numbers = count(1)
        draw_id = lambda: f"req-{next(numbers)}"  # noqa: E731
        self.service = GenerateService(
            model=view.models[MODEL],
            text=ModelText(self.tokenizer, forms=self.forms, path=self.path),
            dispatcher=self.script,  # type: ignore[arg-type]
            admission=self.admission,
            config=self.config,
            journal=self.journal,
            draws=Draws(lambda: 77, draw_id),
            tenancy=Tenancy(shared_prefixes=self.shared_prefixes, receipt_key=self.receipt_key, kept=self._kept()),
        )
        self.door = HttpDoor(self.service, self.tokenizer, self.keys, self.config, lambda: self.serving, draw_id, self.metrics)

    def _kept(self) -> Kept | None:
        if self.answers is None:
            return None
        return Kept(self.answers, self.receipt_key, self.config.responses_keep_s, self.config.response_bytes)

    async def post(self, path: str, body: Any = None, **options: Any) -> "Answer":
        return await Call(self.door, "POST", path, HELLO if body is None else body, **options).run()

    async def get(self, path: str, method: str = "GET", **options: Any) -> "Answer":
        return await Call(self.door, method, path, b"", **options).run()

    def check(self) -> None:
        """Asserts that no request is running or waiting."""
        self.admission.check()
        assert self.service.idle and self.script.ended == len(self.script.begun)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    pieces: list[bytes]

    @cached_property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(self.json) == {"error"} and set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str) and isinstance(error["code"], str)
        return error

    @property
    def data(self) -> list[str]:
        """The data of each server-sent event."""
        return [data for data, _ in self.events]

    @property
    def events(self) -> list[tuple[str, str]]:
        """The data and the id of each server-sent event; the id is empty if it has none."""
        assert self.headers["content-type"].startswith("text/event-stream") and self.body.endswith(b"\n\n")
        events = self.body.decode().split("\n\n")[:-1]
        told = [event.removeprefix("data: ").partition("\nid: ") for event in events]
        assert all(event.startswith("data: ") for event in events)
        assert not any("\n" in text for data, _, id_ in told for text in (data, id_))
        return [(data, id_) for data, _, id_ in told]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The chunks of a stream that is complete."""
        *chunks, done = self.data
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]


@dataclass
class Call:
    """One HTTP exchange. `leave_after`: the client disconnects after it has received this many pieces of the body."""

    app: Any
    method: str
    path: str
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)
    leave_after: int | None = None
    unfinished: bool = False  # the body is announced as incomplete, but the rest never comes
    status: int = 0

    def __post_init__(self) -> None:
        self.gone = asyncio.Event()
        self.received: list[bytes] = []
        self.told: dict[str, str] = {}
        self.pieces = 0
        self._parts = [self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()]
        self.complete = False

    async def run(self) -> Answer:
        path, _, query = self.path.partition("?")
        headers = {"content-type": "application/json", "content-length": str(len(self._parts[0])), **self.headers}
        scope = {
            "type": "http",
            "method": self.method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
        }
        await self.app(scope, self._receive, self._send)
        return Answer(self.status, self.told, self.received)

    @property
    def got(self) -> bytes:
        return b"".join(self.received)

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": self.unfinished}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            assert not self.status
            self.status = message["status"]
            self.told = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        assert self.status and not self.complete
        self.complete = not message.get("more_body", False)
        if not self.gone.is_set():
            self.received.append(message.get("body", b""))
            self.pieces += 1
            if self.pieces == self.leave_after:
                self.gone.set()


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """The address at which a real server serves an application."""
    server = HttpServer(Config(router=RouterConfig(http_port=0)), app)
    address = server.bind(0)
    failures: list[BaseException] = []
    tasks = Tasks(failures.append)
    server.start(tasks)
    try:
        yield address
    finally:
        await server.stop()
        await tasks.close()
    assert not failures


async def settled(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


def failing(error: BatonError, after: int = 0) -> Script:
    return Script(ids=b"abc"[:after], error=error)
