"""Calls that begin with another one: one handoff, one computed prompt, and answers with lives of their own."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from handoff_pair import PROMPT, Pair, greedy, pair

from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import from_status
from baton.engine.core.toy import naive
from baton.v1 import generation_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.identity import WorkerIdentity
from baton.worker.session import Session
from baton.worker.wire import pack_handle
from decode_worker.door import DecodeDoor

CHOICES = 4
LAST = ("finished", "error")
ME = WorkerIdentity("decode-0", 5, "toy")


def params(seed: int) -> Any:
    return greedy(temperature=1.0, seed=seed)


def answer(seed: int) -> list[int]:
    return naive(PROMPT, params(seed))


def start(tokens: list[int], forks: list[int], **fields: Any) -> Any:
    sampling = generation_pb2.SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, seed=0)
    job = pb.Job(request_id="r", token_ids=tokens, prompt_tokens=len(PROMPT), sampling=sampling)
    others = [pb.DecodeFork(call_id=10 + seed, seed=seed, request_id=f"r-{seed}") for seed in forks]
    whole = {"timeout_ms": 20_000, "to": pb.Addressee(worker="decode-0", incarnation=5, model_fingerprint="toy"), "forks": others, **fields}
    return pb.DecodeCommand(call_id=10, start=pb.DecodeStart(job=job, **whole))


@dataclass
class Talk:
    """With a decode worker: what it has said, by call."""

    commands: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue)
    events: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    told: asyncio.Event = field(default_factory=asyncio.Event)

    async def sent(self) -> AsyncIterator[Any]:
        while True:
            yield pb.DecodeCommands(commands=await self.commands.get())

    def tokens(self, seed: int) -> list[int]:
        return [event.token.id for event in self.events[10 + seed] if event.HasField("token")]

    def kinds(self, seed: int) -> list[str]:
        return [event.WhichOneof("event") for event in self.events[10 + seed]]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.told.clear()
                await self.told.wait()

    async def ended(self, *seeds: int) -> None:
        await self.until(lambda: all(self.events[10 + seed] and self.kinds(seed)[-1] in LAST for seed in seeds))


@asynccontextmanager
async def talking(p: Pair) -> AsyncIterator[Talk]:
    talk = Talk()
    stream = DecodeDoor(p.decode, ME).Session(talk.sent(), None)
    assert isinstance(stream, AsyncGenerator)

    async def listen() -> None:
        async for message in stream:
            for event in message.events:
                talk.events[event.call_id].append(event)
            talk.told.set()

    listening = asyncio.create_task(listen())
    try:
        yield talk
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await stream.aclose()
        await p.settled()


async def test_one_handoff_serves_all_answers_and_the_prompt_is_computed_once() -> None:
    async with pair() as p, talking(p) as talk:
        first = await p.hand_over(params=params(0))
        assert first.handle is not None
        talk.commands.put_nowait([start([*PROMPT, first.sampled.token], [1, 2, 3], handle=pack_handle(first.handle))])
        await talk.ended(*range(CHOICES))
        assert [first.sampled.token, *talk.tokens(0)] == answer(0)
        for seed in range(CHOICES):
            assert talk.kinds(seed)[0] == "adopted" and talk.kinds(seed)[-1] == "finished"
            assert seed == 0 or talk.tokens(seed) == answer(seed)
        moved = [talk.events[10 + seed][0].adopted.handoff.blocks for seed in range(CHOICES)]
        assert moved == [5, 0, 0, 0]
        counts = p.engines[1].counts
        # The first goes on from its first token, the others from the prompt's last position.
        assert counts.forks == 3 and counts.computed_tokens == 11 + 3 * 12
        assert p.engines[0].counts.computed_tokens == len(PROMPT)
        assert all(talk.events[10 + seed][-1].finished.handoff.recomputed_tokens == 0 for seed in range(CHOICES))


async def test_a_prompt_that_the_worker_computes_itself_is_computed_once() -> None:
    async with pair() as p, talking(p) as talk:
        talk.commands.put_nowait([start(PROMPT, [1, 2, 3])])
        await talk.ended(*range(CHOICES))
        assert [talk.tokens(seed) for seed in range(CHOICES)] == [answer(seed) for seed in range(CHOICES)]
        assert p.engines[1].counts.computed_tokens == len(PROMPT) + 11 + 3 * 12


async def test_what_was_cached_of_a_prompt_that_is_computed_here_is_told_before_its_first_token() -> None:
    """By the call that it was computed for: its reader may have enough before the end."""
    async with pair() as p:
        for cached in (False, True):
            async with talking(p) as talk:
                talk.commands.put_nowait([start(PROMPT, [1, 2, 3])])
                await talk.ended(*range(CHOICES))
            assert talk.kinds(0)[:2] == ["adopted", "token"] and talk.kinds(0).count("adopted") == 1
            assert talk.events[10][0].adopted.cached_tokens == talk.events[10][-1].finished.cached_tokens
            assert bool(talk.events[10][0].adopted.cached_tokens) == cached
            assert all("adopted" not in talk.kinds(seed) for seed in range(1, CHOICES))


async def test_a_handoff_that_fails_is_computed_once_for_all() -> None:
    async with pair() as p, talking(p) as talk:
        first = await p.hand_over(params=params(0))
        assert first.handle is not None
        p.runners[0].pool.flip((await p.blocks_of(first.handle))[2])
        talk.commands.put_nowait([start([*PROMPT, first.sampled.token], [1, 2, 3], handle=pack_handle(first.handle))])
        await talk.ended(*range(CHOICES))
        assert [first.sampled.token, *talk.tokens(0)] == answer(0)
        assert [talk.tokens(seed) for seed in range(1, CHOICES)] == [answer(seed) for seed in range(1, CHOICES)]
        assert talk.events[10][0].adopted.handoff.failure == "DIGEST_MISMATCH" and p.engines[1].counts.forks == 3
        p.prefill.port.exporter.release(first.handle, "r")


@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("when", ["with the start", "while it reads", "later"])
async def test_an_answer_that_nobody_wants_ends_alone(when: str, left: int) -> None:
    """Whichever it is, also the one that they began with."""
    async with pair() as p, talking(p) as talk:
        first = await p.hand_over(params=params(0))
        assert first.handle is not None
        reached, gate = p.wire.hang("piece")
        begin = start([*PROMPT, first.sampled.token], [1, 2, 3], handle=pack_handle(first.handle))
        leave = pb.DecodeCommand(call_id=10 + left, cancel=pb.CallCancel())
        talk.commands.put_nowait([begin, leave] if when == "with the start" else [begin])
        if when == "while it reads":
            await asyncio.wait_for(reached.wait(), 30)
            talk.commands.put_nowait([leave])
            await asyncio.sleep(0)
        if when == "later":
            gate.set()
            await talk.until(lambda: talk.tokens(left))
            talk.commands.put_nowait([leave])
        gate.set()
        others = [seed for seed in range(CHOICES) if seed != left]
        await talk.ended(*others)
        for seed in others:
            assert ([first.sampled.token] if seed == 0 else []) + talk.tokens(seed) == answer(seed)
        if p.prefill.port.exporter.num_leases:  # the reader was cancelled before it could end it
            p.prefill.port.exporter.release(first.handle, "r")


async def test_an_answer_that_is_leaving_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may take its time to say that it holds nothing of it, and the others are placed meanwhile."""
    async with pair() as p, talking(p) as talk:
        first = await p.hand_over(params=params(0))
        assert first.handle is not None
        reached, gate = p.wire.hang("piece")
        leaving, left, withdraw = asyncio.Event(), asyncio.Event(), p.decode.port.withdraw

        async def slow(*given: Any) -> None:
            await withdraw(*given)
            leaving.set()
            await left.wait()

        monkeypatch.setattr(p.decode.port, "withdraw", slow)
        talk.commands.put_nowait([start([*PROMPT, first.sampled.token], [1, 2], handle=pack_handle(first.handle))])
        await asyncio.wait_for(reached.wait(), 30)
        talk.commands.put_nowait([pb.DecodeCommand(call_id=11, cancel=pb.CallCancel())])
        await asyncio.wait_for(leaving.wait(), 30)
        gate.set()
        await talk.ended(0, 2)
        left.set()
        assert [first.sampled.token, *talk.tokens(0)] == answer(0) and talk.tokens(2) == answer(2)
        assert p.engines[1].counts.forks == 1 and not talk.events[10][0].adopted.handoff.failure


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"to": pb.Addressee(worker="decode-9", incarnation=5, model_fingerprint="toy")}, Reason.WRONG_WORKER),
        ({"tokens": [400] * len(PROMPT)}, Reason.INVALID_FIELD),
        ({"handle": b"no handle"}, Reason.LEASE_REFUSED),
    ],
)
async def test_why_it_cannot_be_placed_is_told_to_all(wrong: dict[str, Any], reason: Reason) -> None:
    async with pair() as p, talking(p) as talk:
        talk.commands.put_nowait([start(**{"tokens": PROMPT, "forks": [1, 2, 3], **wrong})])
        await talk.ended(*range(CHOICES))
        assert [from_status(talk.events[10 + seed][0].error.status).reason for seed in range(CHOICES)] == [reason] * CHOICES


async def test_the_same_number_for_two_answers_breaks_the_protocol() -> None:
    async with pair() as p:
        told = Session(DecodeDoor(p.decode, ME).form)
        await told.obey(sent(start(PROMPT, [1, 1])))
        with pytest.raises(BatonError, match="11 is the number of a call that has not ended"):
            await told.next_events()
        await told.close()
        await p.settled()


async def sent(command: Any) -> AsyncIterator[Any]:
    yield pb.DecodeCommands(commands=[command])
