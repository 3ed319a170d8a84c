"""The client against routers that refuse, break and die: its reader sees one stream, or an error that is final."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import pytest

from baton.client import AsyncClient, Client, GenerateError, Result, Token, channel_options, targets_of
from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import Context, abort
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc

LENGTH = 10  # tokens of an answer
RESOLVED = pb.SamplingParams(seed=5, max_tokens=LENGTH, stop=["x"])
ANY: dict[str, Any] = {"max_tokens": LENGTH, "timeout_s": 20}
Fault: TypeAlias = BatonError | grpc.StatusCode | str | None


@dataclass
class Router(generation_pb2_grpc.GenerationServicer):
    """Token number i is i, and its text a letter. Each call uses up a fault: it breaks after so many tokens (-1: before it is accepted)."""

    faults: list[tuple[int, Fault]] = field(default_factory=list)
    receipt: bytes = b"receipt"
    forgets: bool = False  # begins again at the first token
    asked: list[pb.GenerateRequest] = field(default_factory=list)
    address: str = ""
    hangs: threading.Event = field(default_factory=threading.Event)  # whoever asked has been sent what there was before

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        self.asked.append(request)
        left, fault = self.faults.pop(0) if self.faults else (LENGTH + 1, None)
        if left < 0:
            await self._strike(context, fault)
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id="r", prompt_tokens=3, sampling=RESOLVED, resume=self.receipt))
        known = 0 if self.forgets else len(request.output_so_far.ids)
        for i in range(known, LENGTH):
            if i - known == left:
                await self._strike(context, fault)
            yield pb.GenerateResponse(tokens=pb.Tokens(tokens=[pb.Token(index=i, id=i, text=chr(97 + i))]))
            await asyncio.sleep(0)
        if left == LENGTH:
            await self._strike(context, fault)
        usage = pb.Usage(prompt_tokens=3, completion_tokens=LENGTH)
        yield pb.GenerateResponse(finished=pb.Finished(request_id="r", reason=pb.FINISH_REASON_LENGTH, text="!", usage=usage))

    async def _strike(self, context: Context, fault: Fault) -> None:
        if isinstance(fault, BatonError):
            await abort(context, fault)
        elif isinstance(fault, grpc.StatusCode):
            await context.abort(fault, "bare")
        else:
            self.hangs.set()
            await asyncio.sleep(60)


@contextmanager
def serving(router: Router) -> Iterator[threading.Event]:
    """Runs the router on a thread of its own. Setting the event kills it: its connections end, and nothing listens there."""
    stop, ready = threading.Event(), threading.Event()

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        generation_pb2_grpc.add_GenerationServicer_to_server(router, server)
        router.address = f"127.0.0.1:{server.add_insecure_port(router.address or '127.0.0.1:0')}"
        await server.start()
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        await server.stop(None)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, serve())
        assert ready.wait(10)
        try:
            yield stop
        finally:
            stop.set()
            running.result(10)


Take = Callable[..., tuple[list[Token], Result]]


def take_sync(address: Any, max_resumes: int = 8, **ask: Any) -> tuple[list[Token], Result]:
    with Client(address, max_resumes=max_resumes) as client, client.generate("x", **{**ANY, **ask}) as stream:
        return list(stream), stream.result


def take_async(address: Any, max_resumes: int = 8, **ask: Any) -> tuple[list[Token], Result]:
    async def take() -> tuple[list[Token], Result]:
        async with AsyncClient(address, max_resumes=max_resumes) as client, client.generate("x", **{**ANY, **ask}) as stream:
            return [token async for token in stream], stream.result

    return asyncio.run(take())


both = pytest.mark.parametrize("take", [take_sync, take_async], ids=["sync", "async"])
GONE = grpc.StatusCode.UNAVAILABLE


def failed(take: Take, *arguments: Any, **ask: Any) -> GenerateError:
    with pytest.raises(GenerateError) as caught:
        take(*arguments, **ask)
    return caught.value


def check(tokens: Sequence[Token], result: Result, resumes: int) -> None:
    assert [(token.index, token.id) for token in tokens] == [(i, i) for i in range(LENGTH)]
    assert result.text == "abcdefghij!" and result.token_ids == tuple(range(LENGTH)) and result.resumes == resumes
    assert result.usage.completion_tokens == LENGTH


# Streams that break


@both
@pytest.mark.parametrize("after", range(LENGTH + 1))
def test_a_stream_that_breaks_after_any_token_is_resumed(take: Take, after: int) -> None:
    router = Router([(after, GONE)])
    with serving(router):
        check(*take(router.address), resumes=1)
    first, second = router.asked
    assert not first.resume and not first.output_so_far.ids and not first.sampling.HasField("seed")
    assert second.resume == b"receipt" and list(second.output_so_far.ids) == list(range(after))
    assert second.sampling == RESOLVED and second.text == first.text


@both
@pytest.mark.parametrize("code", [GONE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED])
def test_whatever_says_that_the_connection_is_lost_is_a_break(take: Take, code: grpc.StatusCode) -> None:
    router = Router([(3, code)])
    with serving(router):
        check(*take(router.address), resumes=1)


@both
@pytest.mark.parametrize("reason", [reason for reason in Reason if reason.value.retry_after is None and reason.value.grpc != "UNAVAILABLE"])
def test_a_final_error_ends_the_stream(take: Take, reason: Reason) -> None:
    router = Router([(3, BatonError(reason, "because"))])
    with serving(router):
        assert failed(take, router.address).reason == reason.name
    assert len(router.asked) == 1


@both
@pytest.mark.parametrize("code", [GONE, grpc.StatusCode.CANCELLED])  # gRPC says CANCELLED of a call that meets the end of its server
def test_a_stream_that_breaks_too_often_is_lost(take: Take, code: grpc.StatusCode) -> None:
    router = Router([(1, code)] * 4)
    with serving(router):
        assert failed(take, router.address, 3).code == "UNAVAILABLE"
        assert [len(asked.output_so_far.ids) for asked in router.asked] == [0, 1, 2, 3]
        router.faults = [(1, GONE)] * 3
        check(*take(router.address, 3), resumes=3)


@both
def test_without_resumes_a_break_is_an_error(take: Take) -> None:
    """Negative control: it is the client that resumes."""
    router = Router([(3, GONE)])
    with serving(router):
        assert failed(take, router.address, 0).code == "UNAVAILABLE"
    assert len(router.asked) == 1


@both
def test_a_router_without_receipts_is_not_asked_to_continue(take: Take) -> None:
    router = Router([(3, GONE)], receipt=b"")
    with serving(router):
        assert failed(take, router.address).code == "UNAVAILABLE"
    assert len(router.asked) == 1


@both
def test_a_router_that_begins_again_is_noticed(take: Take) -> None:
    router = Router([(3, GONE)], forgets=True)
    with serving(router):
        assert failed(take, router.address).code == "DATA_LOSS"


@both
def test_the_deadline_bounds_all_calls_together(take: Take) -> None:
    router = Router([(1, GONE), (1, GONE), (1, "hang")])
    began = time.monotonic()
    with serving(router):
        assert failed(take, router.address, timeout_s=1.0).code == "DEADLINE_EXCEEDED"
    assert time.monotonic() - began < 8 and len(router.asked) == 3


@both
def test_a_stream_waits_for_its_router_to_be_restarted(take: Take) -> None:
    router = Router([(4, "hang")])
    with ExitStack() as stack:
        kill = stack.enter_context(serving(router))

        def restart() -> None:
            assert router.hangs.wait(30)
            kill.set()
            time.sleep(0.7)
            stack.enter_context(serving(router))

        restarting = threading.Thread(target=restart)
        restarting.start()
        check(*take(router.address), resumes=1)
        restarting.join()
    assert len(router.asked) == 2


@both
def test_leaving_while_a_stream_waits_for_its_router_is_possible(take: Take) -> None:
    router = Router([(2, GONE), *[(-1, BatonError(Reason.DRAINING, "", retry_after=30.0))] * 9])
    with serving(router):
        if take is take_sync:
            with Client(router.address) as client, client.generate("x", **{**ANY, "timeout_s": 100}) as stream:
                threading.Timer(0.5, stream.cancel).start()
                with pytest.raises(GenerateError, match="cancelled on this side"):
                    list(stream)
            return

        async def leave() -> None:
            async with AsyncClient(router.address) as client, client.generate("x", **{**ANY, "timeout_s": 100}) as stream:
                asyncio.get_running_loop().call_later(0.5, stream.cancel)
                with pytest.raises(GenerateError, match="cancelled on this side"):
                    [token async for token in stream]

        began = time.monotonic()
        asyncio.run(leave())
        assert time.monotonic() - began < 10


# Several addresses


@both
@pytest.mark.parametrize("form", ["list", "text"])
def test_a_request_goes_to_the_next_address_if_one_is_dead_or_refuses(take: Take, form: str) -> None:
    dead, full, good = Router(), Router([(-1, BatonError(Reason.SATURATED, "full", retry_after=60.0))] * 9), Router()
    with serving(dead):
        pass
    with serving(full), serving(good):
        addresses = [dead.address, full.address, good.address]
        for _ in range(3):  # wherever the first call goes
            check(*take(addresses if form == "list" else ", ".join(addresses)), resumes=0)
    assert len(good.asked) == 3


@both
def test_a_final_refusal_is_not_tried_elsewhere(take: Take) -> None:
    routers = [Router([(-1, BatonError(Reason.INVALID_FIELD, "no"))]) for _ in range(2)]
    with serving(routers[0]), serving(routers[1]):
        assert failed(take, [router.address for router in routers]).reason == "INVALID_FIELD"
    assert sum(len(router.asked) for router in routers) == 1


@both
def test_with_one_address_a_refusal_is_an_answer(take: Take) -> None:
    router = Router([(-1, BatonError(Reason.SATURATED, "full", retry_after=0.1))])
    with serving(router):
        assert failed(take, router.address).reason == "SATURATED"
    assert len(router.asked) == 1


@both
def test_once_all_have_refused_each_is_left_alone_for_the_time_that_it_named(take: Take) -> None:
    routers = [Router([(-1, BatonError(Reason.NO_WORKER, "", retry_after=1.5))]) for _ in range(2)]
    with serving(routers[0]), serving(routers[1]):
        began = time.monotonic()
        check(*take([router.address for router in routers]), resumes=0)
        assert time.monotonic() - began >= 1.5
        for router in routers:
            router.faults = [(-1, BatonError(Reason.NO_WORKER, "", retry_after=30.0))]
        began = time.monotonic()
        assert failed(take, [router.address for router in routers], timeout_s=10).reason == "NO_WORKER"
        assert time.monotonic() - began < 8, "a retry after the deadline is not worth waiting for"


@both
def test_a_stream_goes_on_at_another_router_when_its_own_is_killed(take: Take) -> None:
    routers = [Router([(4, "hang")]) for _ in range(2)]
    with serving(routers[0]) as kill_0, serving(routers[1]) as kill_1:

        def kill() -> None:
            while not any(router.hangs.is_set() for router in routers):
                time.sleep(0.01)
            mine, other, event = (0, 1, kill_0) if routers[0].asked else (1, 0, kill_1)
            routers[other].faults = []
            assert not routers[other].asked and routers[mine].asked
            event.set()

        killing = threading.Thread(target=kill)
        killing.start()
        check(*take([router.address for router in routers]), resumes=1)
        killing.join()


def test_calls_are_spread_over_all_addresses() -> None:
    routers = [Router() for _ in range(3)]
    with ExitStack() as stack:
        for router in routers:
            stack.enter_context(serving(router))
        with Client([router.address for router in routers]) as client:
            for _ in range(9):
                list(client.generate("x"))
        assert [len(router.asked) for router in routers] == [3, 3, 3]
        for _ in range(30):  # clients that each ask once
            take_sync([router.address for router in routers])
    assert min(len(router.asked) for router in routers) > 3, "they do not all begin at the same one"


@both
def test_a_target_that_stands_for_several_addresses_uses_all_of_them(take: Take) -> None:
    routers = [Router(), Router()]
    with serving(routers[0]), serving(routers[1]):
        target = "ipv4:" + ",".join(router.address for router in routers)
        with Client(target) as client:
            deadline = time.monotonic() + 20
            while not all(router.asked for router in routers) and time.monotonic() < deadline:
                list(client.generate("x"))
        assert all(router.asked for router in routers)
        routers[0].faults, routers[1].faults = [(3, GONE)] * 2, [(3, GONE)] * 2
        check(*take(target), resumes=3)


@pytest.mark.parametrize(
    ("address", "targets"),
    [
        ("a:1", ("a:1",)),
        (" a:1 , b:2,", ("a:1", "b:2")),
        (["a:1", "b:2,c:3", "a:1"], ("a:1", "b:2", "c:3")),
        ("[::1]:1,[::1]:2", ("[::1]:1", "[::1]:2")),
        ("dns:///name:1", ("dns:///name:1",)),
        ("ipv4:1.1.1.1:1,2.2.2.2:2", ("ipv4:1.1.1.1:1,2.2.2.2:2",)),
    ],
)
def test_every_form_of_an_address_is_understood(address: Any, targets: tuple[str, ...]) -> None:
    assert targets_of(address) == targets


@pytest.mark.parametrize("address", ["", " , ", []])
def test_a_client_needs_an_address(address: Any) -> None:
    with pytest.raises(ValueError, match="no address"):
        Client(address)


def test_options_of_the_caller_replace_ours() -> None:
    assert ("grpc.keepalive_time_ms", 10_000) in channel_options("a:1")
    assert [value for name, value in channel_options("a:1", [("grpc.keepalive_time_ms", 5)]) if "keepalive_time_ms" in name] == [5]
    names = {address: "grpc.service_config" in dict(channel_options(address)) for address in ("a:1", "dns:///a:1", "ipv4:1.1.1.1:1")}
    assert names == {"a:1": False, "dns:///a:1": True, "ipv4:1.1.1.1:1": True}
