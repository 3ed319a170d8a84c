"""The stream of each role: a router that stops reading or sends invalid commands does not harm others, and calls end where they began."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from handoff_pair import CONFIG, PROMPT, Pair, expected, pair
from turns import watched

from baton.cluster.errors import BatonError, Reason, Violation
from baton.cluster.rpc import from_status
from baton.engine.core import scheduler
from baton.engine.core.block_key import extend_keys
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.toy import ToyRunner
from baton.v1 import generation_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker import session
from baton.worker.identity import WorkerIdentity
from baton.worker.prompts import Prompts
from baton.worker.role import Mounts
from baton.worker.session import Session, SessionDoor
from decode_worker.door import DecodeDoor
from prefill_worker.door import PrefillDoor

ROLES = ("prefill", "decode")
PREFILL, DECODE = WorkerIdentity("prefill-0", 5, "toy"), WorkerIdentity("decode-0", 5, "toy")
TYPES: dict[str, tuple[Any, Any, Any]] = {
    "prefill": (pb.PrefillCommands, pb.PrefillCommand, pb.PrefillStart),
    "decode": (pb.DecodeCommands, pb.DecodeCommand, pb.DecodeStart),
}
LAST = ("done", "finished", "error")


def addressed(role: str, **change: Any) -> pb.Addressee:
    me = PREFILL if role == "prefill" else DECODE
    return pb.Addressee(**{"worker": me.worker, "incarnation": me.incarnation, "model_fingerprint": me.model_fingerprint, **change})


def start(role: str, call_id: int, tokens: list[int], **fields: Any) -> Any:
    sampling = generation_pb2.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    job = pb.Job(request_id=f"r{call_id}", token_ids=tokens, prompt_tokens=len(tokens), sampling=sampling)
    _, command, begin = TYPES[role]
    return command(call_id=call_id, start=begin(job=job, **{"timeout_ms": 20_000, "to": addressed(role), **fields}))


def cancel(role: str, call_id: int) -> Any:
    return TYPES[role][1](call_id=call_id, cancel=pb.CallCancel())


async def commands(role: str, *given: Any) -> AsyncIterator[Any]:
    """One message."""
    yield TYPES[role][0](commands=given)
    await asyncio.Event().wait()


def door_of(p: Pair, role: str, prompts: Prompts | None = None) -> SessionDoor:
    return PrefillDoor(p.prefill, PREFILL, prompts or Prompts()) if role == "prefill" else DecodeDoor(p.decode, DECODE)


def engine_of(p: Pair, role: str) -> Engine:
    return p.engines[role == "decode"]


async def read(p: Pair, role: str, *given: Any) -> list[Any]:
    """Returns the events until every call has ended."""
    stream = door_of(p, role).Session(commands(role, *given), None)
    assert isinstance(stream, AsyncGenerator)
    events: list[Any] = []
    open_calls = {command.call_id for command in given}
    async for message in stream:
        events += message.events
        open_calls -= {event.call_id for event in message.events if event.WhichOneof("event") in LAST}
        if not open_calls:
            break
    await stream.aclose()
    return events


def errors(events: list[Any]) -> dict[int, BatonError]:
    return {event.call_id: from_status(event.error.status) for event in events if event.HasField("error")}


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_calls_share_a_stream_and_invalid_ones_end_with_an_error() -> None:
    async with pair() as p:
        given = [start("decode", 1, PROMPT), start("decode", 2, [999]), start("decode", 3, []), start("decode", 4, PROMPT, handle=b"\xff")]
        events = await read(p, "decode", *given)
        tokens = [event.token.id for event in events if event.call_id == 1 and event.WhichOneof("event") == "token"]
        assert tokens == expected()
        reasons = {call: error.reason for call, error in errors(events).items()}
        assert reasons == {2: Reason.INVALID_FIELD, 3: Reason.INVALID_FIELD, 4: Reason.LEASE_REFUSED}
        await p.settled()


@pytest.mark.parametrize("asks", [True, False])
async def test_a_search_tells_how_far_it_has_come_if_it_is_asked(asks: bool) -> None:
    """An older router ends a request when it gets an event that it does not know."""
    async with pair() as p:
        command = start("decode", 1, PROMPT, tells_search=asks)
        command.start.job.beam.CopyFrom(generation_pb2.Beam(width=2, count=1, length_penalty=1.0, early_stopping="false"))
        kinds = [event.WhichOneof("event") for event in await read(p, "decode", command)]
        assert kinds == ["searched"] * 12 * asks + ["hypothesis", "finished"]
        await p.settled()


async def test_prefills_share_a_stream_and_invalid_ones_end_with_an_error() -> None:
    async with pair(chunk=8) as p:
        events = await read(p, "prefill", start("prefill", 1, PROMPT), start("prefill", 2, [999]), start("prefill", 3, []))
        assert {call: error.reason for call, error in errors(events).items()} == {2: Reason.INVALID_FIELD, 3: Reason.INVALID_FIELD}
        opened, done = [event for event in events if event.call_id == 1]
        assert (opened.opened.handle, done.done.token.id) == (done.done.handle, expected()[0])
        p.clock.now += 1000  # nobody reads the KV
        await p.settled()


async def test_a_router_is_told_of_the_prompts_of_others_while_these_last() -> None:
    async with pair(chunk=8) as p:
        p.runners[0].step_delay_s = 0.01
        door = door_of(p, "prefill")
        mine = door.Session(commands("prefill", start("prefill", 1, [1, 2], asker="me", uncached_tokens=2)), None)
        assert isinstance(mine, AsyncGenerator)
        told, last = list[int](), False
        async with asyncio.timeout(30):
            while not last:  # its own prompt has ended
                message = await anext(mine)
                told += [message.others_tokens] if message.HasField("others_tokens") else []
                last = any(event.WhichOneof("event") in LAST for event in message.events)

            async def other() -> None:
                theirs = door.Session(commands("prefill", start("prefill", 1, PROMPT, asker="you", uncached_tokens=900)), None)
                async for message in theirs:
                    assert message.others_tokens == 0, "nobody's but its own"
                    if any(event.WhichOneof("event") in LAST for event in message.events):
                        return

            asking = asyncio.create_task(other())
            told += [(await anext(mine)).others_tokens, (await anext(mine)).others_tokens]
            await asking
        await mine.aclose()
        assert told == [0, 900, 0]
        p.clock.now += 1000  # nobody reads the KV
        await p.settled()


@pytest.mark.parametrize("role", ROLES)
async def test_a_router_that_stops_reading_loses_its_stream(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_OUTBOX", 4)
    async with pair() as p:
        heard = asyncio.Event()

        async def one_then_others() -> AsyncIterator[Any]:
            yield TYPES[role][0](commands=[start(role, 0, [1, 2, 3])])
            await heard.wait()  # else what is read first may be all there is
            yield TYPES[role][0](commands=[start(role, i, [1, 2, i]) for i in range(1, 9)])
            await asyncio.Event().wait()

        stream = door_of(p, role).Session(one_then_others(), None)
        await anext(stream)
        heard.set()
        async with asyncio.timeout(60):
            while engine_of(p, role).sequences or engine_of(p, role).counts.chunks < 9:  # their events accumulate meanwhile
                await asyncio.sleep(0.01)
                p.clock.now += 1000
            await asyncio.sleep(0.05)
            assert [
                message async for message in stream
            ] == []  # the stream ends: the router considers the worker lost and retries elsewhere
        await p.settled()


@pytest.mark.parametrize("role", ROLES)
async def test_a_reused_call_id_ends_the_stream_and_all_its_calls(role: str) -> None:
    """The router could not tell apart the answers to two calls with one id."""
    async with pair() as p:
        p.runners[role == "decode"].step_delay_s = 0.01
        stream = Session(door_of(p, role).form)
        given = commands(role, start(role, 7, [1, 2, 3]), start(role, 8, [1, 2]), start(role, 7, [4, 5, 6]))
        obeying = asyncio.create_task(stream.obey(given))
        with pytest.raises(BatonError, match=r"call_id: 7") as caught:
            while True:
                await stream.next_events()
        assert caught.value.reason is Reason.INVALID_FIELD
        await stream.close()
        await obeying
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize("role", ROLES)
async def test_each_new_call_id_starts_a_call(role: str) -> None:
    """Negative control."""
    async with pair() as p:
        events = await read(p, role, start(role, 7, [1, 2, 3]), start(role, 8, [1, 2]))
        assert {event.call_id for event in events if event.WhichOneof("event") in ("done", "finished")} == {7, 8}
        p.clock.now += 1000
        await p.settled()


async def test_a_server_that_stops_is_no_unexpected_failure(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC says so to who still reads; it happened in a drain, seldom, and stood in the log as a traceback."""

    async def stopped() -> AsyncIterator[Any]:
        raise grpc.aio.BaseError("Server already stopped.")
        yield

    async with pair() as p:
        stream = Session(door_of(p, "decode").form)
        await stream.obey(stopped())
        with pytest.raises(BatonError) as caught:
            await stream.next_events()
    assert caught.value.reason is Reason.DRAINING and not caplog.records


@pytest.mark.parametrize("role", ROLES)
async def test_commands_that_cannot_be_read_end_the_stream(role: str) -> None:
    """Its router would wait for every later answer to its deadline."""

    async def broken() -> AsyncIterator[Any]:
        yield TYPES[role][0](commands=[start(role, 1, PROMPT)])
        await until(lambda: engine_of(p, role).sequences)
        raise DecodeError("cut short")

    async with pair() as p:
        p.runners[role == "decode"].step_delay_s = 0.05
        stream = Session(door_of(p, role).form)
        obeying = asyncio.create_task(stream.obey(broken()))
        with pytest.raises(BatonError) as caught:
            async with asyncio.timeout(30):
                while True:
                    await stream.next_events()
        assert caught.value.reason is Reason.INTERNAL
        await stream.close()
        await obeying
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize("role", ROLES)
async def test_a_cancelled_call_frees_everything_and_no_other_call(role: str) -> None:
    async with pair(chunk=8) as p:
        p.runners[role == "decode"].step_delay_s = 0.005
        more: asyncio.Queue[Any] = asyncio.Queue()

        async def given() -> AsyncIterator[Any]:
            while True:
                yield TYPES[role][0](commands=[await more.get()])

        prompts = Prompts()
        stream = Session(door_of(p, role, prompts).form)
        obeying = asyncio.create_task(stream.obey(given()))
        long = {"asker": "me", "uncached_tokens": 90} if role == "prefill" else {}
        more.put_nowait(start(role, 1, list(range(1, 91)), **long))
        await until(lambda: len(engine_of(p, role).sequences) == 1 and engine_of(p, role).counts.computed_tokens)
        assert prompts.besides("you") == (90 if role == "prefill" else 0)
        more.put_nowait(start(role, 2, [1, 2, 3]))
        more.put_nowait(cancel(role, 1))
        more.put_nowait(cancel(role, 99))  # of no call
        events: list[Any] = []
        async with asyncio.timeout(30):
            while not any(event.WhichOneof("event") in LAST for event in events if event.call_id == 2):
                events += (await stream.next_events()).events
        assert not [event for event in events if event.call_id == 1 and event.WhichOneof("event") in LAST]
        assert engine_of(p, role).counts.computed_tokens < 90 and prompts.besides("you") == 0
        await stream.close()
        obeying.cancel()
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize("role", ROLES)
async def test_a_router_that_leaves_ends_its_calls(role: str) -> None:
    async with pair(chunk=8) as p:
        p.runners[role == "decode"].step_delay_s = 0.005
        stream = door_of(p, role).Session(commands(role, start(role, 1, list(range(1, 91)))), None)
        assert isinstance(stream, AsyncGenerator)
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: engine_of(p, role).sequences)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()
        await p.settled()
        assert engine_of(p, role).counts.computed_tokens < 90


@pytest.mark.parametrize("role", ROLES)
async def test_a_call_ends_at_its_deadline(role: str) -> None:
    async with pair(chunk=8) as p:
        p.runners[role == "decode"].step_delay_s = 0.05
        events = await read(p, role, start(role, 1, list(range(1, 91)), timeout_ms=200), start(role, 2, [1, 2]))
        assert {call: error.reason for call, error in errors(events).items()} == {1: Reason.DEADLINE}
        p.clock.now += 1000
        await p.settled()


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_that_is_not_served_refuses_its_calls(role: Any) -> None:
    async with pair() as p:
        mounts = Mounts("w", "decode" if role == "prefill" else "prefill")
        worker = p.prefill if role == "prefill" else p.decode
        worker.admit = lambda: mounts.admit(role)
        assert [error.reason for error in errors(await read(p, role, start(role, 1, [1, 2, 3]))).values()] == [Reason.WRONG_ROLE]
        mounts.stopping = True
        assert [error.reason for error in errors(await read(p, role, start(role, 1, [1, 2, 3]))).values()] == [Reason.DRAINING]
        await p.settled()


@pytest.mark.parametrize("role", ROLES)
async def test_an_error_arrives_with_its_details(role: str) -> None:
    refusal = BatonError(Reason.CONTEXT_LENGTH, "too long", (Violation("tokens", "too many"),), {"most": "128"})

    def refuse() -> None:
        raise refusal

    async with pair() as p:
        p.prefill.admit = p.decode.admit = refuse
        (error,) = errors(await read(p, role, start(role, 1, [1, 2, 3]))).values()
        assert (error.reason, error.message, error.violations, error.metadata) == (
            refusal.reason, refusal.message, refusal.violations, refusal.metadata,
        )  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
async def test_an_unforeseen_error_ends_its_call_without_its_text(role: str) -> None:
    def fail() -> None:
        raise KeyError("a secret of the prompt")

    async with pair() as p:
        p.prefill.admit = p.decode.admit = fail
        (error,) = errors(await read(p, role, start(role, 1, [1, 2, 3]))).values()
        assert error.reason is Reason.INTERNAL and "secret" not in error.message
        await p.settled()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"worker": "another"}, "worker"),
        ({"incarnation": 4}, "incarnation"),
        ({"model_fingerprint": "other"}, "model_fingerprint"),
        (None, "worker"),
    ],
)
async def test_a_call_for_another_worker_is_refused_and_names_the_field(role: str, change: dict[str, Any] | None, field: str) -> None:
    assert Reason.WRONG_WORKER.value.retry_elsewhere
    to = addressed(role, **change) if change else None
    async with pair() as p:
        (error,) = errors(await read(p, role, start(role, 1, [1, 2, 3], to=to))).values()
        assert (error.reason, error.metadata) == (Reason.WRONG_WORKER, {"field": field})
        assert engine_of(p, role).counts.computed_tokens == 0
        await p.settled()


LONG = [17 * i % 255 for i in range(79_000)]  # 220 KB of text


def roomy() -> Engine:
    """An engine for one long prompt, in steps as a prefill worker computes them."""
    runner = ToyRunner({**CONFIG, "max_position_embeddings": 1 << 17}, "toy", 16)
    runner.attach(KvPool(runner.layout, len(LONG) // 16 + 16))
    return Engine(runner, Limits(8, 16_384), len(LONG) + 100)


async def test_a_long_prompt_holds_nobody_up_at_either_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn of a loop takes long, and neither a loop nor an engine's thread hashes the blocks."""
    hashed: set[str] = set()

    def extend(keys: list[bytes], *more: Any) -> None:
        known = len(keys)
        extend_keys(keys, *more)
        if len(keys) > known + 1:
            hashed.add(threading.current_thread().name)

    monkeypatch.setattr(scheduler, "extend_keys", extend)
    async with pair(engines=(roomy(), roomy())) as p:
        with watched() as turns:
            *_, done = await read(p, "prefill", start("prefill", 1, LONG))
            events = await read(p, "decode", start("decode", 1, [*LONG, done.done.token.id], handle=done.done.handle))
        turns.check(0.020)
        assert events[0].WhichOneof("event") == "adopted" and events[-1].finished.handoff.recomputed_tokens == 0
        assert hashed and not hashed & {"engine", threading.main_thread().name}
        await p.settled()
