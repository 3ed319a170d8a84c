"""gRPC as all our processes use it: server and channel options, TLS, and the translation of the error table in both directions.

Keepalive needs both timeouts: without `ping_timeout_ms`, a hung peer is noticed after a minute instead of seconds.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing
from typing import Any, NoReturn, Self, TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2_grpc
from grpc_status import rpc_status

from baton.cluster.address import advertised, is_loopback, target
from baton.cluster.config import Config, SecurityConfig
from baton.cluster.errors import BatonError, Reason, Violation, invalid
from baton.cluster.tls import TlsIdentity, certificates, channel_credentials, name_options, server_credentials

log = logging.getLogger(__name__)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Check: TypeAlias = Callable[[bytes], None]
Admit: TypeAlias = Callable[[str | None], None]
DOMAIN = "baton"
KEEPALIVE_S = 1.0
ANSWER_S = 2.0  # for one of our own processes to answer a ping
CLIENT_ANSWER_S = 20.0  # for anybody else's, as gRPC has it: a client that is busy, suspended or behind a port-forward is not lost


def _pings(answer_s: float) -> list[tuple[str, Any]]:
    return [
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(answer_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(answer_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


NO_PROXY = ("grpc.enable_http_proxy", 0)  # ignores the environment: there is no proxy between processes of one cluster
CHANNEL_OPTIONS = [
    *_pings(ANSWER_S),
    NO_PROXY,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the time a connection may take to come up: a busy or distant peer is not a lost one
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 64 << 20),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.http2.min_ping_interval_without_data_ms", 200),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]


class Server:
    """A gRPC server with the standard health service; in `health.set`, the name "" stands for the whole process."""

    def __init__(
        self,
        config: Config,
        max_message_bytes: int,
        stall_s: float | None = None,
        check: Check | None = None,
        age_s: float | None = None,
        admit: Admit | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`stall_s`: how long a response stream may wait for its client to read; None: for ever. `check` gets the bytes of a request before
        they are parsed; a BatonError that it raises becomes the answer. `age_s`: after this time a client is told to connect again, and its
        running calls finish on the old connection; None: never. `admit` gets the `authorization` of every call and raises a BatonError for
        one that is refused. `answer_s`: a client that does not answer a ping for so long is lost. Raises ConfigError for a certificate that
        cannot be used."""
        options = [*_pings(answer_s), *SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
        if age_s is not None:
            options.append(("grpc.max_connection_age_ms", int(age_s * 1000)))
        self._edge = Edge(stall_s, check, admit)
        self.grpc = grpc.aio.server(interceptors=[self._edge], options=options)
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        self._security = config.security
        self._credentials = server_credentials(config.security)  # kept: gRPC calls it at every new connection
        self._host = config.cluster.host
        self._advertised = advertised(config)

    @property
    def stalled(self) -> int:
        """Calls that were ended because their client did not read."""
        return self._edge.stalled

    def bind(self, port: int) -> str:
        """Bind a port (0: any free one); returns the `host:port` for others. Raises BatonError(INTERNAL) if the port is taken."""
        address = target(self._host, port)
        try:
            if self._credentials is not None:
                bound = self.grpc.add_secure_port(address, self._credentials)
            else:
                bound = self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise BatonError(Reason.INTERNAL, f"cannot listen on {address}: {error}") from None
        if not self._security.tls_ca and not is_loopback(self._host):
            log.warning(
                "%s is open to the network without mutual TLS: set security.tls_cert, tls_key and tls_ca", target(self._host, bound)
            )
        return target(self._advertised, bound)

    async def start(self) -> None:
        await self.grpc.start()

    async def stop(self, grace: float | None) -> None:
        """Tells every client to connect elsewhere (HTTP/2 GOAWAY), and accepts none from now on. Calls may run on for `grace` seconds."""
        await self.grpc.stop(grace)


class Edge(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Handles what gRPC itself would treat as our fault: bytes that are not a message of the method (it answers UNKNOWN), clients that
    leave (it logs a traceback), clients that do not read (it waits)."""

    def __init__(self, stall_s: float | None, check: Check | None = None, admit: Admit | None = None) -> None:
        self.stalled = 0
        self._stall_s = stall_s
        self._check = check
        self._admit = admit
        self._handled: dict[Any, Any] = {}  # a method's handler → ours: a server has a few, and each call asks

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if self._admit is not None:
            try:
                self._admit(first_of(metadata_of(details), "authorization"))
            except BatonError as refusal:
                return _refusing(refusal)
        if handler is None or handler.request_streaming:
            return handler
        if handler not in self._handled:
            self._handled[handler] = self._handle(handler)
        return self._handled[handler]

    def _handle(self, handler: Any) -> Any:
        if inspect.isasyncgenfunction(handler.unary_stream):
            stream = self._stream(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(stream, _read_with(handler, self._check), handler.response_serializer)
        if inspect.iscoroutinefunction(handler.unary_unary):
            answer = _answer(handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(answer, _read_with(handler, self._check), handler.response_serializer)
        return handler

    def _stream(self, method: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Awaitable[None]]:
        async def stream(request: Any, context: Context) -> None:
            if isinstance(request, BatonError):
                await abort(context, request)
            try:
                async with aclosing(method(request, context)) as responses:
                    async for first in responses:  # until it comes there is nothing to read: a call that is refused needs no patience
                        await self._send(context, first, responses)
            except _NotRead:  # the call has released everything that it held; gRPC queues the status behind the unread responses
                self.stalled += 1
                await abort(context, BatonError(Reason.STALLED, f"the client read nothing for {self._stall_s:g} s"))

        return stream

    async def _send(self, context: Context, first: Any, others: AsyncIterator[Any]) -> None:
        """All responses. Raises _NotRead."""
        async with _Patience(self._stall_s) as patience:
            await patience.write(context, first)
            async for response in others:
                await patience.write(context, response)


def metadata_of(call: Any) -> list[tuple[str, str]]:
    """`call`: a context, or the details of a call. gRPC makes the list anew each time it is asked."""
    found = call.invocation_metadata() if callable(call.invocation_metadata) else call.invocation_metadata
    return [(key, str(value)) for key, value in found or ()]


def first_of(metadata: Iterable[tuple[str, str]], name: str) -> str | None:
    return next((value for key, value in metadata if key == name), None)


def _refusing(refusal: BatonError) -> Any:
    async def refuse(request: Any, context: Context) -> None:
        await abort(context, refusal)

    return grpc.unary_unary_rpc_method_handler(refuse)


def _read_with(handler: Any, check: Check | None) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            if check is not None:
                check(data)
            return handler.request_deserializer(data)
        except BatonError as refusal:
            return refusal
        except DecodeError as error:
            return invalid("request", str(error))

    return read


def _answer(method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    async def answer(request: Any, context: Context) -> Any:
        if isinstance(request, BatonError):
            await abort(context, request)
        return await method(request, context)

    return answer


class _NotRead(Exception):
    pass


class _Patience:
    """Raises _NotRead in the block when a write has taken `stall_s`. One timer looks after all writes of a stream: a timeout around each
    would add 7 % to the cost of a streamed token."""

    def __init__(self, stall_s: float | None) -> None:
        self._since: float | None = None  # when the write under way began
        self._clock = asyncio.get_running_loop().time
        self._stall_s = stall_s
        self._scope = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._look()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._scope.__aexit__(*raised)
        except TimeoutError:
            raise _NotRead from None

    async def write(self, context: Context, response: Any) -> None:
        """Returns when the response fits into the flow-control window."""
        self._since = self._clock()
        try:
            await context.write(response)
        except grpc.aio.InternalError:
            raise _gone() from None
        self._since = None

    def _look(self) -> None:
        if self._stall_s is None:
            return
        now = self._clock()
        until = (self._since or now) + self._stall_s
        if until <= now:
            self._scope.reschedule(now)  # expires at once
        else:
            self._timer = asyncio.get_running_loop().call_at(until, self._look)


def _gone() -> asyncio.CancelledError:
    """The client left. gRPC will soon cancel the call; until then every operation fails, and gRPC would log each failure as our error."""
    return asyncio.CancelledError("the client left")


def channel(address: str, security: SecurityConfig) -> grpc.aio.Channel:
    """A channel to one of our own processes. Raises ConfigError for a certificate that cannot be used."""
    credentials = channel_credentials(security)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, *name_options(security.server_name)])


class ProcessChannels:
    """Channels to one of our own processes. When our certificates change, new calls use a channel with the new ones, so that a connection
    that has to be made again does not show an old one; running calls stay where they are."""

    def __init__(self, address: str, security: SecurityConfig) -> None:
        """Raises ConfigError for a certificate that cannot be used."""
        self._address = address
        self._security = security
        self._files = certificates(security)
        self._shown: TlsIdentity | None = None
        self._opened: list[grpc.aio.Channel] = []

    def channel(self) -> grpc.aio.Channel:
        now = self._files.current() if self._files else None
        if not self._opened or now is not self._shown:
            self._shown = now
            self._opened.append(channel(self._address, self._security))
        return self._opened[-1]

    async def close(self, grace: float | None = None) -> None:
        async with AsyncExitStack() as closers:  # all of them, even if this is cancelled
            for opened in self._opened:
                closers.push_async_callback(opened.close, grace)


async def abort(context: Context, error: BatonError) -> NoReturn:
    """End the call with google.rpc.Status: ErrorInfo always, BadRequest and RetryInfo if the error has them."""
    try:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))
    except grpc.aio.InternalError:
        raise _gone() from None
    raise AssertionError("abort returned")


def to_status(error: BatonError) -> status_pb2.Status:
    kind = error.reason.value
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason.name, domain=DOMAIN, metadata=error.metadata)]
    if error.violations:
        fields = [error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description) for v in error.violations]
        details.append(error_details_pb2.BadRequest(field_violations=fields))
    if error.retry_after is not None:
        delay = duration_pb2.Duration(nanos=int(error.retry_after % 1 * 1e9), seconds=int(error.retry_after))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        wrapper = any_pb2.Any()
        wrapper.Pack(detail)
        packed.append(wrapper)
    return status_pb2.Status(code=code_pb2.Code.Value(kind.grpc), message=error.message, details=packed)


def from_status(data: bytes) -> BatonError:
    """The error that another of our processes sent as a serialised google.rpc.Status."""
    status = status_pb2.Status()
    try:
        status.ParseFromString(data)
    except DecodeError:
        return BatonError(Reason.INTERNAL, "the error cannot be read")
    return _meant(status) or BatonError(Reason.INTERNAL, status.message)


def to_error(error: grpc.RpcError) -> BatonError:
    """The error that another of our processes meant: its own reason if it gave one, else the reason that fits the bare status.

    A bare CANCELLED is a loss: gRPC drops with it the calls that meet the end of their server. (A cancel of this side is not an RpcError.)
    """
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # details that contradict the status, or cannot be parsed
        status = None
    if status and (meant := _meant(status)):
        return meant
    reason = {
        grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE,
        grpc.StatusCode.CANCELLED: Reason.WORKER_LOST,
        grpc.StatusCode.UNAVAILABLE: Reason.WORKER_LOST,
        grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    }.get(error.code(), Reason.INTERNAL)
    return BatonError(reason, error.details() or error.code().name)


def _meant(status: status_pb2.Status) -> BatonError | None:
    """None: it names no reason that we know."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in Reason.__members__:
            return BatonError(Reason[info.reason], status.message, _violations(status), dict(info.metadata))
    return None


def _violations(status: status_pb2.Status) -> tuple[Violation, ...]:
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            return tuple(Violation(v.field, v.description) for v in bad.field_violations)
    return ()


class Answering:
    """`async with Answering(context):` turns an exception of the body into a status that the caller can act on."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            await abort(self._context, told(error))


def told(error: Exception) -> BatonError:
    """What the caller is told of an exception that ended its call. An unforeseen one is logged here, without its text for the caller, which
    may quote a prompt."""
    if isinstance(error, BatonError):
        return error
    if isinstance(error, TimeoutError):
        return BatonError(Reason.DEADLINE, "the deadline of the request has passed")
    log.error("a call failed", exc_info=error)
    return BatonError(Reason.INTERNAL, "the call failed on our side")


class Tasks:
    """Background tasks that end with their owner and whose failures are not lost."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure

    def start(self, coroutine: Any, name: str) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        tasks: Iterable[asyncio.Task[Any]] = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
