"""The decode worker's stream: a router that stops reading or sends invalid commands does not harm others."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from handoff_pair import Pair, expected, pair

from baton.cluster.errors import BatonError, Reason
from baton.v1 import generation_pb2, worker_pb2
from baton.worker.identity import Identity
from decode_worker import door
from decode_worker.door import DecodeDoor, Session

ME = Identity("decode-0", 5, "toy")
TO = worker_pb2.Addressee(worker="decode-0", incarnation=5, model_fingerprint="toy")


def start(call_id: int, tokens: list[int], **fields: Any) -> worker_pb2.DecodeCommand:
    sampling = generation_pb2.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    job = worker_pb2.Job(request_id=f"r{call_id}", token_ids=tokens, prompt_tokens=len(tokens), sampling=sampling)
    return worker_pb2.DecodeCommand(call_id=call_id, start=worker_pb2.DecodeStart(job=job, timeout_ms=20_000, **{"to": TO, **fields}))


async def commands(*given: worker_pb2.DecodeCommand) -> AsyncIterator[worker_pb2.DecodeCommand]:
    for command in given:
        yield command
    await asyncio.Event().wait()


async def read(p: Pair, *given: worker_pb2.DecodeCommand) -> list[worker_pb2.DecodeEvent]:
    """Returns the events until every call has ended."""
    stream = DecodeDoor(p.decode, ME).Session(commands(*given), None)
    assert isinstance(stream, AsyncGenerator)
    events: list[worker_pb2.DecodeEvent] = []
    open_calls = {command.call_id for command in given}
    async for message in stream:
        events += message.events
        open_calls -= {event.call_id for event in message.events if event.WhichOneof("event") in ("finished", "error")}
        if not open_calls:
            break
    await stream.aclose()
    return events


async def test_calls_share_a_stream_and_invalid_ones_end_with_an_error() -> None:
    async with pair() as p:
        prompt = list(range(1, 19))
        events = await read(p, start(1, prompt), start(2, [999]), start(3, []), start(4, prompt, handle=b"\xff"))
        tokens = [event.token.id for event in events if event.call_id == 1 and event.WhichOneof("event") == "token"]
        assert tokens == expected()
        reasons = {event.call_id: event.error.reason for event in events if event.WhichOneof("event") == "error"}
        assert reasons == {2: "INVALID_FIELD", 3: "INVALID_FIELD", 4: "LEASE_REFUSED"}
        await p.settled()


async def test_a_router_that_stops_reading_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_OUTBOX", 4)
    async with pair() as p:
        p.runners[1].step_delay_s = 0.01
        stream = DecodeDoor(p.decode, ME).Session(commands(start(1, [1, 2, 3])), None)
        await anext(stream)
        while p.engines[1].sequences:  # a dozen events accumulate meanwhile
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert [message async for message in stream] == []  # the stream ends: the router considers the worker lost and retries elsewhere
        await p.settled()


async def test_a_reused_call_id_ends_the_stream_and_all_its_calls() -> None:
    """The router could not tell apart the answers to two calls with one id."""
    async with pair() as p:
        p.runners[1].step_delay_s = 0.01
        session = Session(p.decode, ME)
        obeying = asyncio.create_task(session.obey(commands(start(7, [1, 2, 3]), start(8, [1, 2]), start(7, [4, 5, 6]))))
        with pytest.raises(BatonError, match=r"call_id: 7") as caught:
            while True:
                await session.next_events()
        assert caught.value.reason is Reason.INVALID_FIELD
        await session.close()
        obeying.cancel()
        await asyncio.gather(obeying, return_exceptions=True)
        await p.settled()


async def test_each_new_call_id_starts_a_call() -> None:
    """Negative control."""
    async with pair() as p:
        events = await read(p, start(7, [1, 2, 3]), start(8, [1, 2]))
        assert {event.call_id for event in events if event.WhichOneof("event") == "finished"} == {7, 8}
        await p.settled()


def addressed(**change: Any) -> worker_pb2.Addressee:
    return worker_pb2.Addressee(**{"worker": ME.worker, "incarnation": ME.incarnation, "model_fingerprint": ME.model_fingerprint, **change})


@pytest.mark.parametrize(
    ("to", "field"),
    [
        (addressed(worker="decode-1"), "worker"),
        (addressed(incarnation=4), "incarnation"),
        (addressed(model_fingerprint="other"), "model_fingerprint"),
        (None, "worker"),
    ],
)
async def test_a_call_for_another_worker_is_refused_and_names_the_field(to: worker_pb2.Addressee | None, field: str) -> None:
    with pytest.raises(BatonError) as refused:
        ME.check(to or worker_pb2.Addressee())
    assert refused.value.reason is Reason.WRONG_WORKER and refused.value.metadata == {"field": field}
    assert Reason.WRONG_WORKER.value.retry_elsewhere
    async with pair() as p:
        (event,) = await read(p, start(1, [1, 2, 3], to=to))
        assert event.error.reason == "WRONG_WORKER" and event.error.message.startswith(field)
        assert p.engines[1].counts.computed_tokens == 0
        await p.settled()
