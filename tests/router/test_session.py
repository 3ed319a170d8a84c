"""The router's side of a session, on a stream that the test drives: what is sent, in which messages, and what a loss means for a call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.cluster.errors import BatonError, Reason
from baton.v1 import worker_pb2 as pb
from router.session import COMMANDS_AT_ONCE, TOKENS_AT_ONCE, Session
from router.workers import Died


class Lost(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, text: str) -> None:
        self._text = text

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Stream:
    """A gRPC call. Each write waits for `flows`."""

    def __init__(self) -> None:
        self.flows = asyncio.Semaphore(0)
        self.written: list[pb.PrefillCommands] = []
        self.says: asyncio.Queue[pb.PrefillEvents | Exception | None] = asyncio.Queue()

    async def write(self, message: pb.PrefillCommands) -> None:
        self.written.append(message)
        await self.flows.acquire()

    def cancel(self) -> None: ...

    async def __aiter__(self) -> AsyncIterator[pb.PrefillEvents]:
        while (said := await self.says.get()) is not None:
            if isinstance(said, Exception):
                raise said
            yield said


@asynccontextmanager
async def session() -> AsyncIterator[tuple[Session[pb.PrefillEvent], Stream]]:
    stream = Stream()
    made: Session[pb.PrefillEvent] = Session("p0", stream, pb.PrefillCommand, pb.PrefillCommands)
    try:
        yield made, stream
    finally:
        await made.close()


async def call(made: Session[pb.PrefillEvent], tokens: int = 4, timeout_s: float = 60.0) -> pb.PrefillEvent:
    come: asyncio.Queue[pb.PrefillEvent | BatonError] = asyncio.Queue()
    with made.start(pb.PrefillCommand(start=pb.PrefillStart()), tokens, timeout_s, lambda _, event: come.put_nowait(event)):
        event = await come.get()
        if isinstance(event, BatonError):
            raise event
        return event


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def told(stream: Stream) -> list[list[tuple[int, str | None]]]:
    """Of each message: the calls and the commands."""
    return [[(command.call_id, command.WhichOneof("command")) for command in message.commands] for message in stream.written]


def starts(*calls: int) -> list[tuple[int, str | None]]:
    return [(number, "start") for number in calls]


def done(*calls: int) -> pb.PrefillEvents:
    return pb.PrefillEvents(events=[pb.PrefillEvent(call_id=number, done=pb.PrefillDone()) for number in calls])


async def test_what_waits_while_a_message_is_sent_travels_in_the_next() -> None:
    async with session() as (made, stream):
        calls = [asyncio.create_task(call(made))]
        await settle()
        calls += [asyncio.create_task(call(made)) for _ in range(COMMANDS_AT_ONCE + 1)]
        await settle()
        assert told(stream) == [starts(1)]
        for _ in range(2):
            stream.flows.release()
            await settle()
        assert told(stream)[1:] == [starts(*range(2, COMMANDS_AT_ONCE + 2)), starts(COMMANDS_AT_ONCE + 2)]
        stream.says.put_nowait(done(*range(1, len(calls) + 1)))
        assert {event.call_id for event in await asyncio.gather(*calls)} == set(range(1, len(calls) + 1))
        assert len(stream.written) == 3, "nothing to cancel"


async def test_a_long_prompt_travels_alone() -> None:
    async with session() as (made, stream):
        stream.flows = asyncio.Semaphore(100)
        sizes = [1, 4, TOKENS_AT_ONCE + 1, 5, TOKENS_AT_ONCE, 6]
        calls = [asyncio.create_task(call(made, tokens)) for tokens in sizes]
        await settle()
        assert told(stream) == [starts(1, 2), starts(3), starts(4), starts(5), starts(6)]
        stream.says.put_nowait(done(*range(1, len(calls) + 1)))
        await asyncio.gather(*calls)


async def test_a_call_that_ends_before_it_was_sent_is_never_sent() -> None:
    async with session() as (made, stream):
        calls = [asyncio.create_task(call(made)) for _ in range(3)]
        await settle()  # the first message is on its way, with all three
        late = asyncio.create_task(call(made, timeout_s=0.001))
        unwanted = asyncio.create_task(call(made))
        await settle()
        unwanted.cancel()
        calls[0].cancel()
        with pytest.raises(BatonError) as caught:
            await late
        assert caught.value.reason is Reason.DEADLINE
        for _ in range(3):
            stream.flows.release()
            await settle()
        assert told(stream) == [starts(1, 2, 3), [(1, "cancel")]]
        assert not made._unsent


async def test_a_call_is_cancelled_unless_its_worker_has_ended_it() -> None:
    """By its last event, or by an error."""
    async with session() as (made, stream):
        stream.flows = asyncio.Semaphore(100)
        calls = [asyncio.create_task(call(made, timeout_s=0.05 if i == 2 else 60)) for i in range(3)]
        await settle()
        stream.says.put_nowait(done(1))
        assert (await calls[0]).call_id == 1
        calls[1].cancel()
        await settle()
        with pytest.raises(BatonError, match="deadline"):
            await calls[2]
        await settle()
        assert told(stream) == [starts(1, 2, 3), [(2, "cancel")], [(3, "cancel")]]
        stream.says.put_nowait(done(2, 3, 4))  # too late, and of no call: nobody hears it
        await settle()
        assert not made.lost and not made._calls


@pytest.mark.parametrize(
    ("loss", "reached"),
    [(Lost("Socket closed"), Died), (Lost("failed to connect to all addresses"), BatonError), (None, BatonError)],
    ids=["died", "nobody listens", "ended"],
)
async def test_a_lost_stream_ends_all_its_calls_and_says_which_its_worker_has_seen(loss: Any, reached: type) -> None:
    """A worker may have died of a call that it has seen, and of no other."""
    async with session() as (made, stream):
        seen = [asyncio.create_task(call(made)) for _ in range(2)]
        await settle()
        unseen = [asyncio.create_task(call(made)) for _ in range(2)]
        await settle()
        stream.says.put_nowait(loss)
        errors = await asyncio.gather(*seen, *unseen, return_exceptions=True)
        assert [type(error) for error in errors] == [reached, reached, BatonError, BatonError]
        assert all(isinstance(error, BatonError) and error.reason is Reason.WORKER_LOST for error in errors)
        assert made.lost and not made._calls
        with pytest.raises(BatonError, match="p0 is gone"):
            await call(made)


async def test_a_message_that_cannot_be_made_ends_all_calls_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with session() as (made, stream):
        ended: list[Any] = []
        made._commands = lambda commands: 1 / 0
        with made.start(pb.PrefillCommand(start=pb.PrefillStart()), 1, 60.0, lambda call, event: ended.append(event)):
            await asyncio.sleep(0.01)
        (error,) = ended
        assert isinstance(error, BatonError) and error.reason is Reason.INTERNAL and made.lost and not stream.written


async def test_a_closed_session_leaves_no_task_and_no_timer() -> None:
    before = asyncio.all_tasks()
    async with session() as (made, _):
        calls = [asyncio.create_task(call(made)) for _ in range(2)]
        await settle()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [Died, Died]
    assert asyncio.all_tasks() == before
    assert not [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]


async def forked(made: Session[pb.PrefillEvent]) -> tuple[Any, Any, "asyncio.Queue[pb.PrefillEvent | BatonError]"]:
    """A call that waits behind another one, and one that begins with it."""
    come: asyncio.Queue[pb.PrefillEvent | BatonError] = asyncio.Queue()
    fork = made.join(60.0, lambda _, event: come.put_nowait(event))
    leader = made.start(pb.PrefillCommand(start=pb.PrefillStart()), 4, 60.0, lambda _, event: None, [fork])
    return leader, fork, come


async def test_a_call_that_begins_with_another_and_is_cancelled_before_is_cancelled_behind_it() -> None:
    async with session() as (made, stream):
        first = asyncio.create_task(call(made))
        await settle()
        leader, fork, _ = await forked(made)
        with leader:
            fork.cancel()
            stream.flows.release()
            await settle()
            assert told(stream) == [starts(1), [(leader.number, "start"), (fork.number, "cancel")]]
            stream.says.put_nowait(done(1))
            await first


async def test_a_call_whose_leader_was_never_sent_is_told_at_once() -> None:
    async with session() as (made, stream):
        first = asyncio.create_task(call(made))
        await settle()
        leader, fork, come = await forked(made)
        with fork:
            leader.cancel()
            stream.flows.release()
            await settle()
            assert told(stream) == [starts(1)], "neither was sent"
            error = await come.get()
            assert isinstance(error, BatonError) and error.reason is Reason.SATURATED
        stream.says.put_nowait(done(1))
        await first


async def test_a_loss_ends_a_call_that_began_with_another() -> None:
    async with session() as (made, stream):
        leader, fork, come = await forked(made)
        with leader, fork:
            await settle()
            stream.says.put_nowait(Lost("Socket closed"))
            assert isinstance(await come.get(), Died), "the worker had seen it"
