"""The routes of the HTTP door. One request, top to bottom:

__call__     its id; every failure becomes an error object
_caller      API key → tenant
_body        type, size, time
Api.read     JSON → one Ask for each choice
_events      the service's events of all choices, as they arrive
Api.writer   events → one answer, or the events of a stream
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.cluster import semconv
from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.keys import ApiKeys
from baton.cluster.packages import version
from baton.cluster.page_server import Headers as RawHeaders
from baton.cluster.page_server import Page
from router.doorman import Arrival
from router.events import Accepted, Event, Pieces, parts
from router.found import Found
from router.http import messages_in, messages_out, openai_in, openai_out, tokens_in, unserved
from router.http.api import Api, Writer
from router.http.body import UNSUPPORTED
from router.http.encoding import IDENTITY, check_encoding, unpack
from router.http.errors import DEGRADED_HEADER, HttpError, bad_value, to_http, to_json
from router.http.event_id import HEADER, Numbering, asks_for_ids, last_event, resume
from router.http.event_stream import EventStream, chunks
from router.http.explained import explains
from router.http.openai_in import Asked, Caller
from router.http.openai_out import REASONING
from router.http.openapi import document
from router.http.pieces import InPieces, gather, list_of_ids, members
from router.http.responses import Responses
from router.http.stream import ClientGone, while_connected
from router.http.tokens_out import GenerateWriter
from router.merging import merge
from router.request import Scores
from router.service import GenerateService
from router.tokenizer import Tokenizer
from router.turn_budget import TurnBudget
from router.validate import Ask

log = logging.getLogger(__name__)
AT_ONCE_BYTES = 64 << 10  # a longer body is read in a thread: others then wait for one step at a time, not for all of them
MAY_HAVE_PRIORITY = b"priority", b"\\u"  # JSON may write any letter of a name as an escape
TIMEOUT_HEADER = "x-request-timeout-ms"
T = TypeVar("T")


@cache
def _document() -> bytes:
    return to_json(document())


class HttpDoor:
    """An ASGI application."""

    def __init__(
        self,
        service: GenerateService,
        tokenizer: Tokenizer,
        keys: ApiKeys,
        config: RouterConfig,
        serving: Callable[[], bool],
        draw_id: Callable[[], str],
        metrics: Callable[[bytes, RawHeaders], Awaitable[Page]] | None = None,
        budget: TurnBudget | None = None,
    ) -> None:
        """`serving` returns whether a request could be answered now; `metrics` answers GET /metrics, to those who may read them."""
        self._service = service
        self._tokenizer = tokenizer
        self._keys = keys
        self._config = config
        self._serving = serving
        self._draw_id = draw_id
        self._metrics = metrics
        self._budget = budget or TurnBudget()
        self._reasoning = REASONING if config.reasoning_field == "both" else (config.reasoning_field,)
        self._chats = openai_out.api(openai_in.chat, self._writer)
        self._completions = openai_out.api(openai_in.completion, self._writer)
        self._responses = Responses(service, tokenizer, draw_id)
        self._token_lists = openai_out.api(tokens_in.generate, self._token_writer)
        self._messages = messages_out.api(messages_in.message, self._message_writer)
        self._created = int(time.time())
        self._document = _document()
        self._router = Router(self._routes(), redirect_slashes=False, default=_not_found)

    def _routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/responses", self._respond, methods=["POST"]),
            Route("/v1/responses/{id}", self._response, methods=["GET", "DELETE"]),
            Route("/v1/chat/completions/render", self._render, methods=["POST"]),
            Route("/inference/v1/generate", self._tokens, methods=["POST"]),
            Route("/v1/messages", self._message, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/health", self._ready),
            Route("/readyz", self._ready),
            Route("/livez", self._live),
            Route("/version", self._version),
            Route("/openapi.json", self._openapi),
            *([] if self._metrics is None else [Route("/metrics", self._scrape)]),
        ]

    def _writer(self, asked: Asked, request_id: str) -> Writer:
        return openai_out.OpenAiWriter(asked, self._tokenizer, request_id, self._service.model_name, reasoning=self._reasoning)

    def _token_writer(self, asked: Asked, request_id: str) -> Writer:
        return GenerateWriter(asked, self._tokenizer, request_id, self._service.model_name)

    def _message_writer(self, asked: Asked, request_id: str) -> Writer:
        return messages_out.MessageWriter(asked, self._tokenizer, request_id, self._service.model_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if openai_in.REQUEST_ID.fullmatch(given) else self._draw_id()
        scope["app"] = self  # starlette's router looks for it before it refuses
        scope["state"] = {"request_id": request_id}
        scope["path"] = scope["path"].rstrip("/") or "/"  # some clients end a path with a slash, and a redirect would lose their body
        api, started = self._api_of(scope["path"]), False

        async def tell(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *((name, request_id.encode()) for name in api.id_headers)]
                if lost := scope["state"].get("degraded"):
                    message["headers"].append((DEGRADED_HEADER.encode(), "; ".join(lost).encode()))
            await send(message)

        try:
            await self._router(scope, receive, tell)
        except (Exception, asyncio.CancelledError) as error:  # a server that closes cancels its requests
            if started:  # EventStream has already told the client
                raise
            refusal = self._refusal(error, request_id)
            response = _json(api.refusal(refusal), refusal.status, refusal.headers)
            await response(scope, receive, tell)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, self._chats)

    async def _completion(self, request: Request) -> Response:
        return await self._generate(request, self._completions)

    async def _respond(self, request: Request) -> Response:
        return await self._generate(request, self._responses.api)

    async def _response(self, request: Request) -> Response:
        tenant, id_ = self._caller(request).tenant, request.path_params["id"]
        if name := next(iter(request.query_params), None):
            raise bad_value(name[:80], "is not supported here: an answer that is kept is sent whole", UNSUPPORTED)
        if request.method == "DELETE":
            return _json(await self._responses.delete(tenant, id_))
        return Response(await self._responses.get(tenant, id_), media_type="application/json")

    async def _tokens(self, request: Request) -> Response:
        return await self._generate(request, self._token_lists)

    async def _render(self, request: Request) -> Response:
        caller = self._caller(request)
        asked = await self._read(request, lambda body: openai_in.chat(body, caller))
        for name, given in (("use_beam_search", asked.beams), ("prompt_logprobs", asked.prompt_logprobs is not None)):
            if given:
                raise bad_value(name, "is not supported here: what is rendered cannot ask for it", UNSUPPORTED)
        try:
            made = await self._service.render(asked.asks[0])
        except BatonError as error:
            raise to_http(error, asked.names) from None
        return _json(tokens_in.rendered(asked, made, caller.request_id, self._service.model_name))

    def _api_of(self, path: str) -> Api:
        """Whose refusals the clients of a path read."""
        return self._messages if f"{path}/".startswith("/v1/messages/") else self._chats

    async def _message(self, request: Request) -> Response:
        messages_in.check_version(request.headers.get(messages_in.VERSION_HEADER))
        return await self._generate(request, self._messages)

    async def _count_tokens(self, request: Request) -> Response:
        messages_in.check_version(request.headers.get(messages_in.VERSION_HEADER))
        return _json({"input_tokens": len(await self._ids(request, messages_in.count_tokens))})

    async def _generate(self, request: Request, api: Api) -> Response:
        caller = self._caller(request)
        body, timeout_s = await self._body(request), _timeout_s(request)
        await self._turn_away(request, api, caller, body, timeout_s)
        asked = await _parsed(body, lambda body: api.read(body, caller))
        if explains(request.headers):
            asked = replace(asked, explains=True)
        if api.prepare is not None:
            asked = await api.prepare(asked)
        last = last_event(request.headers.get(HEADER)) if asked.stream else None
        if last is not None:
            chosen = caller.request_id == request.headers.get("x-request-id")
            asked = resume(asked, last, caller.request_id if chosen else "")
        events = self._events(asked, timeout_s, request.scope["state"])
        writer = api.writer(asked, caller.request_id)
        if asked.stream:
            numbering = Numbering(asked, last) if last is not None or asks_for_ids(asked, request.headers) else None
            written = chunks(api, events, writer, numbering, self._budget)
            return EventStream(api, writer, written, self._longest_s, partial(self._refusal, request_id=caller.request_id))
        async with while_connected(request.receive, self._longest_s), aclosing(events):
            async for index, event in events:
                for part in parts(event):
                    writer.take(index, part)
            if api.settle is not None:
                await api.settle(writer)
            return InPieces(await gather(writer.whole(), self._budget))

    async def _turn_away(self, request: Request, api: Api, caller: Caller, body: bytes, timeout_s: float | None) -> None:
        """Raises SATURATED for a body that has no chance, whatever it says. Only one that names a priority, or may, is read to find out."""
        if HEADER in request.headers or any(sign in body for sign in MAY_HAVE_PRIORITY):
            return
        operation = semconv.TEXT_COMPLETION if api in (self._completions, self._token_lists) else semconv.CHAT
        arrival = Arrival(operation, caller.request_id, caller.tenant, caller.traceparent, caller.tracestate)
        if (refusal := self._service.doorman.look(arrival, timeout_s)) is not None:
            async with self._budget.ending():
                raise refusal

    async def _events(self, asked: Asked, timeout_s: float | None, state: dict[str, Any]) -> AsyncGenerator[tuple[int, Event], None]:
        """Yields events of all choices, each with the choice's number, when the turn has room for the work on it, and notes in `state` what
        overload took from the request. Raises HttpError."""

        async def one(number: int, ask: Ask) -> AsyncGenerator[Event, None]:
            try:
                async with aclosing(self._service.generate(ask, timeout_s)) as events, self._budget.ending():
                    async for event in events:
                        yield event
            except BatonError as error:
                raise to_http(error, asked.names_of(number * asked.n)) from None

        async with aclosing(merge([one(number, ask) for number, ask in enumerate(asked.asks)])) as events:
            async for number, event in events:
                if isinstance(event, Accepted):
                    if event.degraded:
                        state["degraded"] = event.degraded
                    for choice in range(asked.n):
                        yield number * asked.n + choice, event.of(choice)
                    continue
                if isinstance(event, Pieces | Scores | Found):
                    await self._budget.spend(event.size)
                yield number * asked.n + event.choice, event

    async def _models(self, request: Request) -> Response:
        self._caller(request)
        return _json({"object": "list", "data": [self._describe()]})

    async def _model(self, request: Request) -> Response:
        self._caller(request)
        name = request.path_params["name"]
        if name != self._service.model_name:
            raise to_http(BatonError(Reason.MODEL_NOT_FOUND, f"model {name[:80]!r} is not served here"))
        return _json(self._describe())

    def _describe(self) -> dict[str, Any]:
        name = self._service.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": name,
            "parent": None,
            "max_model_len": self._service.max_model_len,
        }

    async def _ids(self, request: Request, read: Callable[[bytes], tuple[Ask, Mapping[str, str]]]) -> list[int]:
        """The prompt of a body as `read` reads it."""
        self._caller(request)
        ask, names = await self._read(request, read)
        try:
            return await self._service.tokenize(ask)
        except BatonError as error:
            raise to_http(error, names) from None

    async def _tokenize(self, request: Request) -> Response:
        ids = await self._ids(request, openai_in.tokenize)
        answer = members({"count": len(ids), "max_model_len": self._service.max_model_len}, tokens=list_of_ids(ids))
        return InPieces(await gather(answer, self._budget))

    async def _detokenize(self, request: Request) -> Response:
        self._caller(request)
        ask, names = await self._read(request, openai_in.detokenize)
        try:
            text = await self._service.detokenize(ask)
        except BatonError as error:
            raise to_http(error, names) from None
        return _json({"prompt": text})

    async def _ready(self, request: Request) -> Response:
        ready = self._serving() and not self._service.draining
        if not ready:
            reason = Reason.DRAINING if self._service.draining else Reason.NO_WORKER
            raise to_http(BatonError(reason, "this router is draining" if self._service.draining else "no worker is ready"))
        return _json({"status": "ok"})

    async def _live(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return _json({"version": version()})

    async def _scrape(self, request: Request) -> Response:
        """Stricter than the port for metrics: the public may reach this port through a proxy on the same host."""
        assert self._metrics is not None
        if self._keys and not self._keys.is_admin(request.headers.get("authorization")):
            raise BatonError(Reason.UNAUTHENTICATED, "metrics need an API key with admin=yes")
        status, kind, body = await self._metrics(b"/metrics", request.headers.raw)
        return Response(body, status, media_type=kind)

    async def _openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    @property
    def _longest_s(self) -> float:
        """A request ends at its deadline; only a client that reads slowly can make it last longer."""
        return self._config.max_timeout_s + self._config.stall_s

    def _caller(self, request: Request) -> Caller:
        """Raises BatonError(UNAUTHENTICATED)."""
        headers, api = request.headers, self._api_of(request.scope["path"])
        key = headers.get(api.key_header)
        tenant = self._keys.tenant(headers.get("authorization", key and f"Bearer {key}"))
        trace = headers.get("traceparent", ""), ",".join(headers.getlist("tracestate"))
        return Caller(request.scope["state"]["request_id"], tenant, *trace)

    async def _read(self, request: Request, read: Callable[[bytes], T]) -> T:
        return await _parsed(await self._body(request), read)

    async def _body(self, request: Request) -> bytes:
        """Raises HttpError for a body of another type, a body that is too long, and a body that does not arrive in time."""
        _check_type(request.headers)
        most = self._config.max_message_bytes
        too_long = HttpError(413, f"the body must have at most {most} bytes")
        if int(request.headers.get("content-length", "0")) > most:  # h11 accepts only a number
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.http_read_timeout_s):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_long
        except TimeoutError:
            raise HttpError(408, "the body did not arrive in time", headers={"connection": "close"}) from None
        if (encoding := _encoding(request.headers)) != IDENTITY:
            return await asyncio.to_thread(unpack, bytes(body), encoding, most)
        return bytes(body)

    def _refusal(self, error: BaseException, request_id: str) -> HttpError:
        refused = self._http_error(error)
        refused.request_id = request_id
        return refused

    def _http_error(self, error: BaseException) -> HttpError:
        match error:
            case HttpError():
                return error
            case BatonError():
                return to_http(error)
            case ClientGone() | ClientDisconnect():  # nobody will read this
                return to_http(BatonError(Reason.CANCELLED, "the client left or stopped reading"))
            case asyncio.CancelledError():
                return to_http(BatonError(Reason.DRAINING, "this router is closing"))
            case HTTPException():  # from starlette's router: wrong method
                return HttpError(error.status_code, error.detail, headers=error.headers)
        log.error("an HTTP request failed", exc_info=error)
        return to_http(BatonError(Reason.INTERNAL, "the request failed on our side"))


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets pages of `origins` use `app` from a browser. Keys travel in a header that the page sets itself, so no credentials are needed."""
    if not origins:
        return app
    told = ("x-request-id", "request-id", "retry-after", DEGRADED_HEADER)
    return CORSMiddleware(app, allow_origins=origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",), expose_headers=told)


async def _parsed(body: bytes, read: Callable[[bytes], T]) -> T:
    return read(body) if len(body) <= AT_ONCE_BYTES else await asyncio.to_thread(read, body)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HttpError(404, unserved.sentence(scope["path"]))


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


def _check_type(headers: Headers) -> None:
    kind, *options = [part.strip().lower() for part in headers.get("content-type", "").split(";")]
    charsets: Sequence[str] = [option.removeprefix("charset=").strip('"') for option in options if option.startswith("charset=")]
    if kind != "application/json" or any(charset not in ("utf-8", "utf8") for charset in charsets):
        raise HttpError(415, "send the body as content-type: application/json, in UTF-8")
    check_encoding(_encoding(headers))


def _encoding(headers: Headers) -> str:
    return headers.get("content-encoding", IDENTITY).strip().lower()


def _timeout_s(request: Request) -> float | None:
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", given):
        raise bad_value(TIMEOUT_HEADER, "must be a number of milliseconds")
    return int(given) / 1000
