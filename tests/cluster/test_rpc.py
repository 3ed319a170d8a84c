"""gRPC as our processes use it: every reason survives the wire, foreign errors are classified, and no failure looks like a success."""

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from baton.client import to_error as client_error
from baton.cluster.address import target
from baton.cluster.config import ClusterConfig, Config, SecurityConfig
from baton.cluster.errors import BatonError, Reason, Violation
from baton.cluster.rpc import CLIENT_ANSWER_S, Answering, Context, Server, Tasks, abort, channel, to_error, to_status
from baton.v1 import generation_pb2, generation_pb2_grpc, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Scripted(worker_pb2_grpc.KvExchangeServicer):
    """Runs `act` for each call and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.act: Callable[[Context], object] = lambda context: None

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        self.calls += 1
        async with Answering(context):
            done = self.act(context)
            if asyncio.iscoroutine(done):
                await done
            return pb.RenewResponse(ttl_ms=len(request.handle))


@asynccontextmanager
async def serving(port: int = 0, config: Config | None = None) -> AsyncIterator[tuple[Scripted, str]]:
    server, servicer = Server(config or Config(), 1 << 20), Scripted()
    worker_pb2_grpc.add_KvExchangeServicer_to_server(servicer, server.grpc)
    address = server.bind(port)
    await server.start()
    try:
        yield servicer, address
    finally:
        await server.stop(None)


async def ask(address: str, timeout_s: float = 5.0) -> pb.RenewResponse:
    async with channel(address, SecurityConfig()) as opened:
        response: pb.RenewResponse = await worker_pb2_grpc.KvExchangeStub(opened).Renew(pb.RenewRequest(handle=b"ab"), timeout=timeout_s)
        return response


async def failure(address: str, timeout_s: float = 5.0) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(address, timeout_s)
    return caught.value


SUSPENDED = """
import sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(sys.argv[1], [("grpc.enable_http_proxy", 0)]) as channel:
    try:
        for told in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60):
            print(told.status, flush=True)
    except grpc.RpcError as error:
        print(error.code().name, flush=True)
"""


@pytest.mark.parametrize(("answer_s", "told"), [(CLIENT_ANSWER_S, str(NOT_SERVING)), (0.2, "UNAVAILABLE")], ids=["as clients", "shorter"])
async def test_a_client_that_is_suspended_for_seconds_is_not_lost(answer_s: float, told: str) -> None:
    server = Server(Config(), 1 << 20, answer_s=answer_s)
    await server.health.set("", health_pb2.HealthCheckResponse.SERVING)
    address = server.bind(0)
    await server.start()
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", SUSPENDED, address, stdout=asyncio.subprocess.PIPE)
    assert client.stdout is not None
    try:
        assert int(await asyncio.wait_for(client.stdout.readline(), 60)) == health_pb2.HealthCheckResponse.SERVING
        client.send_signal(signal.SIGSTOP)
        await asyncio.sleep(3.5)  # the ping of a second, and more than one of our own processes would have to answer it
        client.send_signal(signal.SIGCONT)
        await server.health.set("", NOT_SERVING)
        assert (await asyncio.wait_for(client.stdout.readline(), 60)).decode().strip() == told
    finally:
        client.kill()
        await client.wait()
        await server.stop(None)


MESSAGES = ["no", "", "line\nbreak and percent % 20", "Grüße 👩‍👩‍👧 \x00", "long " * 400]


@pytest.mark.parametrize("reason", Reason)
async def test_every_reason_survives_the_wire(reason: Reason) -> None:
    async with serving() as (servicer, address):
        for message in MESSAGES:
            violations = (
                (Violation("sampling.top_p", "must be at most 1"), Violation("text", "é")) if reason is Reason.INVALID_FIELD else ()
            )
            told = BatonError(reason, message, violations, {"tokens_emitted": "3"})
            servicer.act = partial(abort, error=told)
            error = await failure(address)
            assert error.code().name == reason.value.grpc and error.details() == message
            back = to_error(error)
            assert (back.reason, back.message, back.violations, back.metadata) == (reason, message, violations, told.metadata)


async def test_a_connection_that_is_too_old_is_replaced_and_its_calls_finish() -> None:
    server, servicer = Server(Config(), 1 << 20, age_s=1.0), Scripted()
    worker_pb2_grpc.add_KvExchangeServicer_to_server(servicer, server.grpc)
    address, finish = server.bind(0), asyncio.Event()
    servicer.act = lambda context: finish.wait()
    await server.start()
    try:
        async with channel(address, SecurityConfig()) as opened:
            stub = worker_pb2_grpc.KvExchangeStub(opened)
            running = asyncio.ensure_future(stub.Renew(pb.RenewRequest(handle=b"ab"), timeout=30))
            await arrived(servicer)
            await until_state(opened, grpc.ChannelConnectivity.IDLE)  # told to connect again
            assert not running.done()
            finish.set()
            assert (await running).ttl_ms == 2
            assert (await stub.Renew(pb.RenewRequest(handle=b"abc"), timeout=30)).ttl_ms == 3
    finally:
        await server.stop(None)


async def test_a_stopping_server_tells_its_clients_and_lets_calls_finish() -> None:
    server, servicer = Server(Config(), 1 << 20), Scripted()
    worker_pb2_grpc.add_KvExchangeServicer_to_server(servicer, server.grpc)
    address, finish = server.bind(0), asyncio.Event()
    servicer.act = lambda context: finish.wait()
    await server.start()
    async with channel(address, SecurityConfig()) as opened:
        running = asyncio.ensure_future(worker_pb2_grpc.KvExchangeStub(opened).Renew(pb.RenewRequest(handle=b"ab"), timeout=30))
        await arrived(servicer)
        stopping = asyncio.ensure_future(server.stop(30))
        await until_state(opened, grpc.ChannelConnectivity.IDLE)
        assert not running.done() and not stopping.done()
        finish.set()
        assert (await running).ttl_ms == 2
        await asyncio.wait_for(stopping, 20)


async def arrived(servicer: Scripted) -> None:
    async with asyncio.timeout(20):
        while not servicer.calls:
            await asyncio.sleep(0.01)


async def until_state(opened: grpc.aio.Channel, wanted: grpc.ChannelConnectivity) -> None:
    async with asyncio.timeout(20):
        while (state := opened.get_state()) is not wanted:
            await opened.wait_for_state_change(state)


@pytest.mark.parametrize("reason", Reason)
async def test_a_client_can_read_an_error_raised_by_a_method(reason: Reason) -> None:
    async with serving() as (servicer, address):

        async def fail(context: Context) -> None:
            raise BatonError(reason, "no", (Violation("text", "is bad"),), {"a": "b"})

        servicer.act = fail
        read = client_error(await failure(address))
    assert (read.code, read.reason, read.message) == (reason.value.grpc, reason.name, "no")
    assert read.violations == (("text", "is bad"),) and read.metadata == {"a": "b"}
    assert read.retry_after_s == reason.value.retry_after


def test_only_retryable_reasons_have_a_retry_delay() -> None:
    for reason in Reason:
        kinds = [detail.type_url.rpartition(".")[2] for detail in to_status(BatonError(reason, "no")).details]
        assert kinds == ["ErrorInfo", *(["RetryInfo"] if reason.value.retry_after is not None else [])]


async def test_an_unexpected_exception_is_internal_and_reveals_nothing() -> None:
    async with serving() as (servicer, address):

        async def fail(context: Context) -> None:
            raise ValueError("the prompt was: my secret")

        servicer.act = fail
        error = await failure(address)
    assert error.code() is grpc.StatusCode.INTERNAL and "secret" not in error.details()
    assert to_error(error).reason is Reason.INTERNAL


async def test_a_timeout_on_the_server_is_the_deadline() -> None:
    async with serving() as (servicer, address):

        async def fail(context: Context) -> None:
            raise TimeoutError

        servicer.act = fail
        assert to_error(await failure(address)).reason is Reason.DEADLINE


async def test_a_successful_call_stays_successful() -> None:
    async with serving() as (_, address):
        assert (await ask(address)).ttl_ms == 2


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE),
        (grpc.StatusCode.CANCELLED, Reason.WORKER_LOST),
        (grpc.StatusCode.UNAVAILABLE, Reason.WORKER_LOST),
        (grpc.StatusCode.UNAUTHENTICATED, Reason.UNAUTHENTICATED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.INTERNAL),
        (grpc.StatusCode.UNIMPLEMENTED, Reason.INTERNAL),
        (grpc.StatusCode.UNKNOWN, Reason.INTERNAL),
    ],
)
async def test_a_bare_status_is_classified_by_its_code(code: grpc.StatusCode, reason: Reason) -> None:
    async with serving() as (servicer, address):
        servicer.act = lambda context: context.abort(code, "bare")
        back = to_error(await failure(address))
    assert (back.reason, back.message) == (reason, "bare")


def odd_details() -> dict[str, status_pb2.Status]:
    foreign, unknown = any_pb2.Any(), any_pb2.Any()
    foreign.Pack(error_details_pb2.ErrorInfo(reason="DEADLINE", domain="elsewhere.example"))
    unknown.Pack(error_details_pb2.ErrorInfo(reason="OF_THE_FUTURE", domain="baton"))
    return {
        "foreign": status_pb2.Status(code=14, message="m", details=[foreign]),
        "unknown": status_pb2.Status(code=14, message="m", details=[unknown]),
        "other code": status_pb2.Status(code=3, message="m"),
        "other message": status_pb2.Status(code=14, message="another"),
    }


@pytest.mark.parametrize("name", odd_details())
async def test_foreign_or_inconsistent_details_are_ignored(name: str) -> None:
    details = odd_details()[name].SerializeToString()
    async with serving() as (servicer, address):
        servicer.act = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "m", (("grpc-status-details-bin", details),))
        error = await failure(address)
    assert to_error(error).reason is Reason.WORKER_LOST and to_error(error).message == "m"
    assert client_error(error).code == "UNAVAILABLE"


async def test_undecodable_details_are_ignored() -> None:
    async with serving() as (servicer, address):
        servicer.act = lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "m", (("grpc-status-details-bin", b"\xff\xff"),))
        error = await failure(address)
    assert to_error(error).reason is Reason.WORKER_LOST
    assert client_error(error).code == "UNAVAILABLE" and client_error(error).reason == ""


async def test_an_unreachable_worker_is_reported_as_lost_immediately() -> None:
    async with serving() as (_, address):
        pass
    began = time.monotonic()
    assert to_error(await failure(address)).reason is Reason.WORKER_LOST
    assert time.monotonic() - began < 2


async def test_calls_that_meet_the_end_of_their_server_are_reported_as_lost() -> None:
    codes = set()

    async def load(address: str) -> None:
        async with channel(address, SecurityConfig()) as opened:
            while True:
                try:
                    await worker_pb2_grpc.KvExchangeStub(opened).Renew(pb.RenewRequest(handle=b"ab"), timeout=5)
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code())
                    assert to_error(error).reason is Reason.WORKER_LOST
                    return

    for _ in range(50):
        async with serving() as (servicer, address):
            servicer.act = lambda context: asyncio.sleep(0.001)
            calls = [asyncio.create_task(load(address)) for _ in range(20)]
            await asyncio.sleep(0.02)
        await asyncio.gather(*calls)
        if grpc.StatusCode.CANCELLED in codes:  # what gRPC does to a few of them, with no reason
            return
    raise AssertionError(f"no call was dropped: {codes}")


async def test_a_call_that_exceeds_its_deadline_is_reported_as_deadline() -> None:
    async with serving() as (servicer, address):
        servicer.act = lambda context: asyncio.sleep(30)
        assert to_error(await failure(address, 0.1)).reason is Reason.DEADLINE


# Bytes that cannot be decoded


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x05ab", b"\x12\x02\xed\xa0"], ids=["invalid tag", "truncated", "invalid UTF-8"])
async def test_undecodable_bytes_are_an_invalid_argument(data: bytes) -> None:
    async with serving() as (servicer, address), grpc.aio.insecure_channel(address) as opened:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await opened.unary_unary("/baton.v1.KvExchange/Renew")(data, timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [v.field for v in to_error(caught.value).violations] == ["request"]
        assert servicer.calls == 0
        assert (await ask(address)).ttl_ms == 2


async def test_without_our_decoder_undecodable_bytes_are_unknown() -> None:
    """Negative control: this is the status that gRPC itself returns."""
    server = grpc.aio.server()
    worker_pb2_grpc.add_KvExchangeServicer_to_server(Scripted(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await opened.unary_unary("/baton.v1.KvExchange/Renew")(b"\xff\xff\xff", timeout=5)
    await server.stop(None)
    assert caught.value.code() is grpc.StatusCode.UNKNOWN


async def test_a_message_that_is_too_large_is_refused() -> None:
    async with serving() as (servicer, address), grpc.aio.insecure_channel(address) as opened:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await opened.unary_unary("/baton.v1.KvExchange/Renew")(bytes(2 << 20), timeout=5)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and servicer.calls == 0


# Connections


@dataclass
class Line:
    """A proxy to a server; it delays everything by `seconds` and delivers nothing unless `open` is set."""

    server: str
    seconds: float
    open: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    async def __aenter__(self) -> Self:
        self.open.set()
        self._ends: set[asyncio.Task[None]] = set()
        self._proxy = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._proxy.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._proxy.close()
        for end in self._ends:
            end.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.server.rpartition(":")
        back, there = await asyncio.open_connection(host, int(port))
        self._ends |= {asyncio.create_task(self._carry(reader, there)), asyncio.create_task(self._carry(back, writer))}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self.seconds)
                await self.open.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


async def test_a_worker_that_is_slow_to_connect_is_not_lost() -> None:
    """A busy or distant host needs more than a moment for its first frame."""
    async with serving() as (_, address), Line(address, 0.3) as line:
        assert (await ask(line.address)).ttl_ms == 2


async def test_a_server_that_comes_back_is_found_soon() -> None:
    async with serving() as (_, address):
        pass
    async with channel(address, SecurityConfig()) as opened:
        stub = worker_pb2_grpc.KvExchangeStub(opened)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Renew(pb.RenewRequest(), timeout=1)
        async with serving(int(address.rpartition(":")[2])):
            async with asyncio.timeout(10):
                while True:
                    try:
                        await stub.Renew(pb.RenewRequest(), timeout=1)
                        break
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.02)


async def test_a_hung_server_is_noticed_within_seconds() -> None:
    """Keepalive: the connection is up, but nothing answers. Negative control: a channel without our options keeps waiting."""
    async with serving() as (servicer, address), Line(address, 0.0) as line, grpc.aio.insecure_channel(line.address) as plain:
        servicer.act = lambda context: asyncio.sleep(60)
        ours = asyncio.create_task(failure(line.address, 60))
        theirs = asyncio.ensure_future(worker_pb2_grpc.KvExchangeStub(plain).Renew(pb.RenewRequest(), timeout=60))
        while servicer.calls < 2:
            await asyncio.sleep(0.01)
        line.open.clear()
        async with asyncio.timeout(30):
            assert to_error(await ours).reason is Reason.WORKER_LOST
        assert not theirs.done()
        theirs.cancel()


async def test_binding_a_taken_port_is_an_error() -> None:
    async with serving() as (_, address):
        with pytest.raises(BatonError, match="cannot listen on") as caught:
            Server(Config(), 1 << 20).bind(int(address.rpartition(":")[2]))
    assert caught.value.reason is Reason.INTERNAL


async def test_health_reports_the_status_that_was_set() -> None:
    server = Server(Config(cluster=ClusterConfig(host="127.0.0.1")), 1 << 20)
    address = server.bind(0)
    await server.start()
    async with grpc.aio.insecure_channel(address) as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        for status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING):
            await server.health.set("", status)
            assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status == status
    await server.stop(None)


# Tasks


async def test_a_failed_task_is_reported_once_and_a_cancelled_one_is_not() -> None:
    failures: list[BaseException] = []
    tasks = Tasks(failures.append)

    async def fail() -> None:
        raise ValueError("no")

    async def wait() -> None:
        await asyncio.Event().wait()

    broken, waiting, done = tasks.start(fail(), "fails"), tasks.start(wait(), "waits"), tasks.start(asyncio.sleep(0), "ends")
    await asyncio.sleep(0.01)
    assert broken.done() and done.done() and not waiting.done()
    await tasks.close()
    assert waiting.cancelled() and [str(error) for error in failures] == ["no"]


def test_grpc_status_understands_our_status() -> None:
    packed = rpc_status.to_status(to_status(BatonError(Reason.SATURATED, "full")))
    assert packed.code is grpc.StatusCode.RESOURCE_EXHAUSTED and packed.details == "full"


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("localhost", "localhost:80")])
def test_addresses_have_the_form_that_grpc_uses(host: str, address: str) -> None:
    assert target(host, 80) == address


async def test_a_server_listens_on_ipv6_too() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    server = Server(Config(cluster=ClusterConfig(host="::1")), 1 << 20)
    address = server.bind(0)
    await server.start()
    try:
        async with channel(address, SecurityConfig()) as open_channel:
            await asyncio.wait_for(open_channel.channel_ready(), 5)
    finally:
        await server.stop(0)


# Streams


class Talker(generation_pb2_grpc.GenerationServicer):
    """Sends the same response forever and counts its streams."""

    def __init__(self) -> None:
        self.open = self.ended = self.said = 0

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async with Answering(context):
            self.open += 1
            try:
                while True:
                    self.said += 1
                    yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(request_id="x" * 10_000))
                    await asyncio.sleep(0)
            finally:
                self.open -= 1
                self.ended += 1


@asynccontextmanager
async def talking(stall_s: float | None) -> AsyncIterator[tuple[Talker, generation_pb2_grpc.GenerationStub]]:
    server, talker = Server(Config(), 1 << 20, stall_s), Talker()
    generation_pb2_grpc.add_GenerationServicer_to_server(talker, server.grpc)
    address = server.bind(0)
    await server.start()
    async with channel(address, SecurityConfig()) as opened:
        yield talker, generation_pb2_grpc.GenerationStub(opened)
    await server.stop(None)


async def settled(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_unread_streams_end_and_report_the_stall_when_read() -> None:
    async with talking(stall_s=0.3) as (talker, stub):
        calls = [stub.Generate(generation_pb2.GenerateRequest()) for _ in range(3)]
        await settled(lambda: talker.ended == 3)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert to_error(caught.value).reason is Reason.STALLED


async def test_a_slowly_read_stream_continues() -> None:
    """Negative control: it lasts several times as long as the limit."""
    async with talking(stall_s=0.3) as (talker, stub):
        call = stub.Generate(generation_pb2.GenerateRequest())
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            for _ in range(200):
                await call.read()
            await asyncio.sleep(0.02)
        assert talker.open == 1
        call.cancel()
        await settled(lambda: talker.ended == 1)


async def test_without_a_limit_a_stream_waits_for_its_reader() -> None:
    """Negative control."""
    async with talking(stall_s=None) as (talker, stub):
        call = stub.Generate(generation_pb2.GenerateRequest())
        await call.read()
        said = -1
        while said != talker.said:
            said = talker.said
            await asyncio.sleep(0.5)
        assert talker.open == 1
        call.cancel()
        await settled(lambda: talker.ended == 1)


@pytest.mark.parametrize("stalled", [False, True])
async def test_clients_that_leave_cause_no_error_logs(stalled: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with talking(stall_s=0.2 if stalled else None) as (talker, stub):
        calls = [stub.Generate(generation_pb2.GenerateRequest()) for _ in range(40)]
        if stalled:
            await settled(lambda: talker.ended == len(calls))
        else:
            await asyncio.gather(*(call.read() for call in calls))
            await asyncio.sleep(0.5)
        for call in calls:
            call.cancel()
        await settled(lambda: talker.ended == len(calls))
        await asyncio.sleep(0.2)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
