"""From request to answer: which requests are admitted and when, what text the tokens become, and that every outcome frees the place."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from fake_workers import MODEL, FakeWorkers, record
from turns import watched

from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.metrics import Book
from baton.cluster.telemetry import Tracer
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import naive
from baton.engine.facts.model_facts import Fact, Recommended
from baton.models.make_small import make_toy
from baton.stages import Stage
from router.admission import Admission
from router.dispatch import Dispatcher
from router.door import to_response
from router.events import Accepted, Event, Finished, Pieces, TextPiece, parts
from router.journal import Journal, JournalEntry
from router.rates import Unlimited
from router.request import FinishReason, Request, Stopwatch, Token, Tokens
from router.service import Draws, GenerateService, ModelText
from router.tokenizer import Tokenizer
from router.validate import Ask, AskSampling
from router.view import ClusterView

HELLO = "Grüße 👩‍👩‍👧‍👦 مرحبا!"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer in which each byte is its own token id, and 256 ends the text."""
    path = tmp_path_factory.mktemp("toy")
    make_toy(path)
    return Tokenizer.load(path)


@dataclass
class Script:
    """A stand-in for the dispatcher: yields `ids`, `joins` at a time, then raises `error` or sets `finish`. Waits at `gate` first."""

    ids: Sequence[int] = b"abc"
    finish: FinishReason | None = "length"
    error: BatonError | None = None
    gate: asyncio.Event | None = None
    joins: int = 1
    begun: list[Request] = field(default_factory=list)
    ended: int = 0
    said: int = 0

    async def generate(self, request: Request) -> AsyncGenerator[Tokens, None]:
        self.begun.append(request)
        try:
            if self.gate is not None:
                await self.gate.wait()
            for at in range(0, len(self.ids), self.joins):
                await asyncio.sleep(0)
                ids = self.ids[at : at + self.joins]
                request.tokens.extend(ids)
                self.said += len(ids)
                yield tuple(Token(id_) for id_ in ids)
            if self.error is not None:
                raise self.error
            request.finish = self.finish
        finally:
            self.ended += 1


@dataclass
class House:
    tokenizer: Any
    script: Any = field(default_factory=Script)
    config: RouterConfig = field(default_factory=RouterConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    context: int = 4096

    def __post_init__(self) -> None:
        self.view = ClusterView({MODEL: self.tokenizer.fingerprint})
        self.view.update([record("d0", tokenizer_fingerprint=self.tokenizer.fingerprint, max_model_len=self.context)], 0.0)
        self.admission = Admission(self.config.max_inflight, self.config.max_queue)
        numbers = count(1)
        self.book = Book("router", model="toy")
        self.journal = Journal(self.book, Tracer(), "toy", self.slo, keep=100)
        self.service = GenerateService(
            model=self.view.models[MODEL],
            text=ModelText(self.tokenizer),
            dispatcher=self.script,
            admission=self.admission,
            config=self.config,
            journal=self.journal,
            draws=Draws(lambda: 77, lambda: f"req-{next(numbers)}"),
        )

    async def ask(self, text: str = "hello", timeout_s: float | None = 10, **sampling: Any) -> list[Event]:
        async with aclosing(self.service.generate(Ask(text=text, sampling=AskSampling(**sampling)), timeout_s)) as events:
            return [event async for event in events]

    async def refused(self, *arguments: Any, **sampling: Any) -> BatonError:
        with pytest.raises(BatonError) as caught:
            await self.ask(*arguments, **sampling)
        return caught.value

    def check(self) -> None:
        """Checks that no request is being served and none is waiting."""
        self.admission.check()
        assert self.service.idle and not self.service._gate._waiting
        assert (self.admission.inflight, self.admission.queued) == (0, 0)


def text_of(events: list[Event]) -> str:
    return "".join(part.text for event in events for part in parts(event) if isinstance(part, TextPiece | Finished))


def pieces_of(events: list[Event]) -> list[TextPiece]:
    return [part for event in events for part in parts(event) if isinstance(part, TextPiece)]


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[0], Accepted) and isinstance(events[-1], Finished)
    assert [piece.index for piece in pieces_of(events)] == list(range(len(pieces_of(events))))
    return events[-1]


# Answers


async def test_a_request_gets_its_answer(tokenizer: Tokenizer) -> None:
    house = House(tokenizer)
    events = await house.ask("hello", max_tokens=5, temperature=0.5)
    end = finished(events)
    assert isinstance(events[0], Accepted) and (events[0].request_id, events[0].model, events[0].prompt_tokens) == ("req-1", "toy", 5)
    assert (text_of(events), end.reason, end.text, end.stop) == ("abc", "length", "", None)
    request = house.script.begun[0]
    assert request.tokens == [*b"hello", *b"abc"] and request.prompt_len == 5
    assert request.params == events[0].params == SamplingParams(max_tokens=5, temperature=0.5, seed=77)
    house.check()


async def test_the_request_id_and_the_seed_of_the_caller_are_kept(tokenizer: Tokenizer) -> None:
    house = House(tokenizer)
    ask = Ask(request_id="mine", token_ids=(1, 2), cache_salt="s", sampling=AskSampling(seed=5))
    async with aclosing(house.service.generate(ask, 10)) as events:
        accepted = await anext(events)
        assert isinstance(accepted, Accepted) and (accepted.request_id, accepted.prompt_tokens) == ("mine", 2)
        async for _ in events:
            pass
    request = house.script.begun[0]
    assert (request.id, request.salt, request.params.seed, request.params.max_tokens) == ("mine", "s", 5, 256)


async def test_requests_with_the_same_id_do_not_share_a_place(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event()), RouterConfig(max_inflight=1))
    ask = Ask(request_id="mine", text="x")

    async def one() -> list[Event]:
        async with aclosing(house.service.generate(ask, 10)) as events:
            return [event async for event in events]

    both = [asyncio.create_task(one()) for _ in range(2)]
    await until(lambda: house.script.begun and house.admission.queued)
    assert house.admission.inflight == 1
    house.script.gate.set()
    assert [text_of(events) for events in await asyncio.gather(*both)] == ["abc", "abc"]
    house.check()


async def test_tokens_that_are_ready_together_are_one_event(tokenizer: Tokenizer) -> None:
    events = await House(tokenizer, Script(b"abcdefgh", joins=3)).ask()
    assert [[(piece.index, piece.text) for piece in event.pieces] for event in events if isinstance(event, Pieces)] == [
        [(0, "a"), (1, "b"), (2, "c")], [(3, "d"), (4, "e"), (5, "f")], [(6, "g"), (7, "h")],
    ]  # fmt: skip
    message = to_response(events[1])
    assert [(token.index, token.id, token.text) for token in message.tokens.tokens] == [(0, 97, "a"), (1, 98, "b"), (2, 99, "c")]


async def test_characters_are_never_split(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(HELLO.encode()))
    events = await house.ask()
    pieces = [piece.text for piece in pieces_of(events)]
    assert text_of(events) == HELLO and "\ufffd" not in "".join(pieces)
    assert len(pieces) == len(HELLO.encode()) and max(map(len, pieces)) == 1


async def test_the_rest_of_an_incomplete_character_comes_at_the_end(tokenizer: Tokenizer) -> None:
    events = await House(tokenizer, Script("né".encode()[:2])).ask()
    assert text_of(events[:-1]) == "n" and finished(events).text == "\ufffd"


@pytest.mark.parametrize("seed", range(5))
async def test_the_pieces_and_the_final_text_form_the_whole_output(tokenizer: Tokenizer, seed: int) -> None:
    """For any bytes that a model writes, including those that look like the beginning of a stop string."""
    rng = random.Random(seed)
    ids = [rng.choice([rng.randrange(256), *b"ab"]) for _ in range(400)]
    events = await House(tokenizer, Script(ids)).ask(stop=("\x00" * 9, "ab" * 7), max_tokens=400)
    assert finished(events).reason == "length" and text_of(events) == tokenizer.decode(ids)


# Stop strings and stop tokens


@pytest.mark.parametrize(
    ("said", "stops", "shown", "stop", "tokens"),
    [
        ("one two three", ("two",), "one ", "two", 7),
        ("one two three", (" three", "one two t"), "", "one two t", 9),
        ("one two three", ("o three",), "one tw", "o three", 13),
        ("aaab", ("aab",), "a", "aab", 4),
        (HELLO, ("👩‍👩",), "Grüße ", "👩‍👩", len("Grüße 👩‍👩".encode())),
        ("one two", ("twos", "e t", "one"), "", "one", 3),
    ],
)
@pytest.mark.parametrize("joins", [1, 2, 5, 99])
async def test_a_stop_string_ends_the_output(
    tokenizer: Tokenizer, said: str, stops: Any, shown: str, stop: str, tokens: int, joins: int
) -> None:
    """Tokens after it that were ready, too, are not part of the output."""
    house = House(tokenizer, Script(said.encode() + b" and on and on", joins=joins))
    events = await house.ask(stop=stops)
    end = finished(events)
    assert (text_of(events), end.reason, end.stop) == (shown, "stop", stop)
    assert tokens == len(end.request.output) == len(pieces_of(events)) and bytes(end.request.output) == house.script.ids[:tokens]
    assert house.script.said == min(-(-tokens // joins) * joins, len(house.script.ids)), "no further token was requested"
    assert house.script.ended == 1
    house.check()


async def test_text_held_back_as_a_possible_stop_string_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    events = await House(tokenizer, Script(b"one tw")).ask(stop=("two",))
    end = finished(events)
    assert (text_of(events[:-1]), end.text, end.reason, end.stop) == ("one ", "tw", "length", None)


async def test_the_end_of_the_output_can_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    """An incomplete character becomes a replacement character at the end, and that completes the match."""
    events = await House(tokenizer, Script("né".encode()[:2])).ask(stop=("n\ufffd",))
    end = finished(events)
    assert (text_of(events), end.reason, end.stop) == ("", "stop", "n\ufffd")


async def test_a_stop_token_is_not_shown(tokenizer: Tokenizer) -> None:
    events = await House(tokenizer, Script(b"abX", "stop")).ask(stop_token_ids=(ord("X"),))
    assert text_of(events) == "ab" and len(events) == 5 and finished(events).reason == "stop"


async def test_a_stop_token_before_min_tokens_is_shown(tokenizer: Tokenizer) -> None:
    events = await House(tokenizer, Script(b"aXbX", "stop")).ask(stop_token_ids=(ord("X"),), min_tokens=3, max_tokens=9)
    assert text_of(events) == "aXb" and finished(events).reason == "stop"


async def test_the_end_of_text_token_is_not_shown(tokenizer: Tokenizer) -> None:
    events = await House(tokenizer, Script([*b"ab", 256], "stop")).ask()
    assert text_of(events) == "ab" and finished(events).reason == "stop"


async def test_an_output_that_ends_without_a_reason_is_an_internal_error(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(finish=None))
    assert (await house.refused()).reason is Reason.INTERNAL
    house.check()


# Refusals


async def test_invalid_input_is_refused_before_any_work(tokenizer: Tokenizer) -> None:
    house = House(tokenizer)
    error = await house.refused("hello", max_tokens=0)
    assert error.reason is Reason.INVALID_FIELD and [v.field for v in error.violations] == ["sampling.max_tokens"]
    assert (await house.refused("x" * 5000)).reason is Reason.CONTEXT_LENGTH
    assert not house.script.begun
    house.check()


async def test_without_a_model_nothing_is_served(tokenizer: Tokenizer) -> None:
    house = House(tokenizer)
    house.view.models[MODEL].served = None
    assert (await house.refused()).reason is Reason.NO_WORKER


async def test_a_draining_router_refuses_new_requests_and_finishes_the_others(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event()), RouterConfig(max_inflight=1))
    running = [asyncio.create_task(house.ask()) for _ in range(2)]
    await until(lambda: house.script.begun and house.admission.queued)
    house.service.draining = True
    assert (await house.refused()).reason is Reason.DRAINING
    assert not house.service.idle
    house.script.gate.set()
    assert [text_of(await task) for task in running] == ["abc", "abc"]
    house.check()


@pytest.mark.parametrize(
    ("given", "kept"), [(None, 300.0), (5.0, 5.0), (1e9, 600.0), (float("inf"), 600.0)], ids=["none", "short", "absurd", "infinite"]
)
async def test_the_deadline_has_a_default_and_a_maximum(tokenizer: Tokenizer, given: float | None, kept: float) -> None:
    house = House(tokenizer)
    now = time.monotonic()
    await house.ask("hello", given)
    assert house.script.begun[0].deadline - now == pytest.approx(kept, abs=2)


@pytest.mark.parametrize("given", [0.0, -5.0, -1e9])
async def test_a_deadline_in_the_past_is_refused_immediately(tokenizer: Tokenizer, given: float) -> None:
    house = House(tokenizer)
    assert (await house.refused("hello", given)).reason is Reason.DEADLINE
    assert not house.script.begun
    house.check()


async def test_a_request_does_not_wait_for_the_tokenizer_beyond_its_deadline(tokenizer: Tokenizer) -> None:
    class Slow:
        fingerprint, vocab_size, piece, longest_spelling = tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.piece, 1

        def encode(self, text: str, most: int, **how: bool) -> list[int]:
            assert go.wait(60)
            return [1]

    house, go = House(Slow()), threading.Event()
    async with asyncio.timeout(30):
        error = await house.refused("hello", 0.05)
    go.set()
    assert error.reason is Reason.DEADLINE and not house.script.begun


# Admission


async def until(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def full(tokenizer: Tokenizer, **config: Any) -> House:
    """A house with one place, whose holder keeps it until the gate opens."""
    return House(tokenizer, Script(gate=asyncio.Event()), RouterConfig(**{"max_inflight": 1, "max_queue": 3, **config}))


def entered(house: House, requests: int) -> Callable[[], bool]:
    return lambda: house.admission.inflight + house.admission.queued == requests


async def occupy(house: House, waiting: int = 0) -> "list[asyncio.Task[list[Event]]]":
    tasks = []
    for number in range(1 + waiting):
        tasks.append(asyncio.create_task(house.ask(f"{number}")))
        await until(entered(house, number + 1))
    await until(lambda: house.script.begun)
    return tasks


async def test_a_full_queue_refuses_immediately(tokenizer: Tokenizer) -> None:
    house = full(tokenizer)
    tasks = await occupy(house, waiting=3)
    began = time.monotonic()
    error = await house.refused()
    assert error.reason is Reason.SATURATED and time.monotonic() - began < 5, "it waited for its deadline, ten seconds"
    assert (house.admission.inflight, house.admission.queued) == (1, 3), "the waiting requests are not disturbed"
    house.script.gate.set()
    await asyncio.gather(*tasks)
    house.check()


async def test_waiting_requests_are_served_by_lowest_priority_number_first(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    house = House(tokenizer, Script(gate=gate), RouterConfig(max_inflight=1))

    async def ask(name: str, priority: int) -> None:
        async with aclosing(house.service.generate(Ask(request_id=name, text="x", priority=priority), 10)) as events:
            [event async for event in events]

    asking = []
    for name, priority in (("served", 9), ("late", 1), ("soon", 0), ("first", -1), ("second", -1)):
        asking.append(asyncio.create_task(ask(name, priority)))
        await asyncio.sleep(0.01)
    gate.set()
    await asyncio.gather(*asking)
    assert [request.id for request in house.script.begun] == ["served", "first", "second", "soon", "late"]
    house.check()


async def test_places_are_given_in_order_of_arrival(tokenizer: Tokenizer) -> None:
    house = full(tokenizer)
    tasks = await occupy(house, waiting=3)
    house.script.gate.set()
    ends = await asyncio.gather(*tasks)
    assert [bytes(request.tokens[:1]).decode() for request in house.script.begun] == ["0", "1", "2", "3"]
    assert all(text_of(events) == "abc" for events in ends)
    house.check()


async def test_a_request_that_waits_too_long_is_refused_as_saturated(tokenizer: Tokenizer) -> None:
    house = full(tokenizer, queue_timeout_s=0.05)
    tasks = await occupy(house)
    async with asyncio.timeout(30):
        assert (await house.refused()).reason is Reason.SATURATED
        assert (await house.refused("x", 0.02)).reason is Reason.DEADLINE, "the deadline was shorter than the queue timeout"
    assert house.admission.queued == 0
    house.script.gate.set()
    await asyncio.gather(*tasks)
    house.check()


async def leave_finished(house: House, task: "asyncio.Task[Any]") -> None:
    house.script.gate.set()
    await task


async def leave_cancelled(house: House, task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def leave_failed(house: House, task: "asyncio.Task[Any]") -> None:
    house.script.error = BatonError(Reason.RETRIES_SPENT, "no")
    house.script.gate.set()
    with pytest.raises(BatonError):
        await task
    house.script.error = None


@pytest.mark.parametrize("leave", [leave_finished, leave_cancelled, leave_failed])
async def test_every_outcome_gives_the_place_to_the_next_request(tokenizer: Tokenizer, leave: Callable[..., Any]) -> None:
    house = full(tokenizer)
    first, second = await occupy(house, waiting=1)
    await leave(house, first)
    await until(lambda: len(house.script.begun) == 2)
    house.script.gate.set()
    assert text_of(await second) == "abc"
    assert house.script.ended == 2
    house.check()


async def test_a_request_that_leaves_the_queue_does_not_admit_another(tokenizer: Tokenizer) -> None:
    house = full(tokenizer)
    first, second, third = await occupy(house, waiting=2)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert (house.admission.inflight, house.admission.queued) == (1, 1) and len(house.script.begun) == 1
    house.script.gate.set()
    await asyncio.gather(first, third)
    house.check()


@pytest.mark.parametrize("taken", range(6))
async def test_closing_after_any_event_ends_the_request(tokenizer: Tokenizer, taken: int) -> None:
    house = House(tokenizer, config=RouterConfig(max_inflight=1))
    events = house.service.generate(Ask(text="hello"), 10)
    for _ in range(taken):
        await anext(events, None)
    await events.aclose()
    assert house.script.ended == len(house.script.begun) == (taken > 1)
    house.check()


async def test_cancelling_at_any_turn_frees_the_place(tokenizer: Tokenizer) -> None:
    """Covers everything from admission on. The prompts are token ids, so no tokenizer thread takes part."""
    for turns in range(40):
        house = full(tokenizer)
        house.script.gate.set()
        first = asyncio.create_task(ids(house))
        second = asyncio.create_task(ids(house))
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in random.Random(turns).sample([first, second], 2):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert house.script.ended == len(house.script.begun)
        house.check()
    assert first.done() and not first.cancelled()


async def ids(house: House) -> list[Event]:
    async with aclosing(house.service.generate(Ask(token_ids=(1, 2, 3)), 10)) as events:
        return [event async for event in events]


async def test_a_place_that_is_not_freed_is_detected(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    house = House(tokenizer)
    monkeypatch.setattr(house.admission, "leave", lambda request_id, now: [])
    await house.ask()
    with pytest.raises(AssertionError):
        house.check()


# With the real dispatcher


async def test_a_stop_string_ends_the_work_on_the_worker(tokenizer: Tokenizer) -> None:
    prompt = "hello, this is a prompt of more than one block"
    whole = tokenizer.decode(naive(list(prompt.encode()), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)))
    stop = next(whole[i : i + 2] for i in range(10, 50) if "\ufffd" not in whole[i : i + 2] and whole.index(whole[i : i + 2]) == i)
    workers = FakeWorkers()
    house = House(tokenizer)
    members = [record(name, tokenizer_fingerprint=tokenizer.fingerprint) for name in ("p0", "d0")]
    house.view.update(members, 1.0)
    house.service._dispatcher = Dispatcher(house.view.models[MODEL], workers, house.config)
    events = await house.ask(prompt, max_tokens=60, temperature=0.0, ignore_eos=True, stop=(stop,))
    assert text_of(events) == whole[: whole.index(stop)] and finished(events).stop == stop
    assert [call.kind for call in workers.calls] == ["prefill", "decode"] and workers.ends == {"well": 1, "cancelled": 1}
    assert not workers.leases and house.view.members.unreported_decode_tokens("d0") == 0
    house.check()


# Stages


def test_each_moment_belongs_to_exactly_one_stage() -> None:
    now = 100.0
    watch = Stopwatch(lambda: now)
    entries: list[tuple[float, Stage]] = [
        (101.0, "prefill"),
        (104.0, "transfer"),
        (104.5, "decode"),
        (106.5, "decode"),
        (107.0, "prefill"),
        (107.25, "decode"),
    ]
    for at, stage in entries:
        now = at
        watch.enter(stage)
    now = 110.0
    watch.stop()
    assert watch.seconds == {"queue": 1.0, "prefill": 3.25, "transfer": 0.5, "decode": 5.25}
    assert [lap.stage for lap in watch.laps] == ["queue", "prefill", "transfer", "decode", "prefill", "decode"]
    assert sum(watch.seconds.values()) == now - 100.0
    watch.stop()
    assert sum(watch.seconds.values()) == now - 100.0


def test_a_lap_ends_when_the_worker_changes() -> None:
    now = 100.0
    watch = Stopwatch(lambda: now)
    watch.enter("transfer")
    for at, worker in ((101.0, "d0"), (102.0, "d0"), (103.0, "d1")):
        now = at
        watch.at(worker)
    now = 104.0
    watch.stop()
    laps = [(lap.stage, lap.worker, lap.start, lap.end) for lap in watch.laps[1:]]
    assert laps == [("transfer", "d0", 100.0, 103.0), ("transfer", "d1", 103.0, 104.0)], "the first worker is added to the current lap"
    assert watch.seconds["transfer"] == 4.0


# The journal


def counted(house: House) -> dict[tuple[str, str], int]:
    families = {family.name: family for family in house.book.families()}
    return {
        (series.labels["outcome"], series.labels["reason"]): int(series.value) for series in families["baton_router_requests_total"].series
    }


async def test_every_outcome_is_counted_once(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(), RouterConfig(max_inflight=1, max_queue=0))
    await house.ask()
    await house.ask(stop=("b",))
    await house.refused(max_tokens=0)
    await house.refused("hello", 0.0)
    house.script.gate = asyncio.Event()
    blocker = asyncio.create_task(house.ask())
    await until(lambda: len(house.script.begun) == 3)
    await house.refused()
    blocker.cancel()
    await asyncio.gather(blocker, return_exceptions=True)
    house.script.gate, house.script.error = None, BatonError(Reason.RETRIES_SPENT, "given up")
    await house.refused()
    house.script.error = None
    async with aclosing(house.service.generate(Ask(text="x"), 10)) as events:
        async for event in events:
            if isinstance(event, Pieces):
                break
    house.service.draining = True
    await house.refused()
    assert counted(house) == {
        ("ok", "length"): 1,
        ("ok", "stop"): 1,
        ("invalid", "INVALID_FIELD"): 1,
        ("failed", "DEADLINE"): 1,
        ("refused", "SATURATED"): 1,
        ("cancelled", "CANCELLED"): 2,
        ("failed", "RETRIES_SPENT"): 1,
        ("refused", "DRAINING"): 1,
    }
    assert [record.reason for record in house.journal.last(3)] == ["DRAINING", "CANCELLED", "RETRIES_SPENT"]
    house.check()


async def test_a_client_that_disconnects_at_its_deadline_counts_as_late(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event()))
    task = asyncio.create_task(house.ask())
    await until(lambda: house.script.begun)
    [entry] = house.journal.open_entries
    assert entry.deadline == house.script.begun[0].deadline
    entry.deadline = time.monotonic()  # as if that much time had passed
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert counted(house) == {("failed", "DEADLINE"): 1}
    house.check()


async def test_a_client_that_disconnects_after_its_answer_counts_as_served(tokenizer: Tokenizer) -> None:
    house = House(tokenizer)
    async with aclosing(house.service.generate(Ask(text="x"), 10)) as events:
        async for event in events:
            if isinstance(event, Finished):
                break
    assert counted(house) == {("ok", "length"): 1}


async def test_the_journal_distinguishes_chat_from_completion_and_gets_traceparent_and_tenant(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tokenizer)
    opened: list[tuple[str, ...]] = []
    real = house.journal.open

    def note(operation: str, request_id: str, traceparent: str, tenant: str, tracestate: str) -> JournalEntry:
        opened.append((operation, request_id, traceparent, tenant, tracestate))
        return real(operation, request_id, traceparent, tenant, tracestate=tracestate)

    monkeypatch.setattr(house.journal, "open", note)
    for ask in (Ask(text="x", traceparent="00-a", tenant="shop", tracestate="a=1"), Ask(messages=(("user", "x"),), request_id="mine")):
        async with aclosing(house.service.generate(ask, 10)) as events:
            async for _ in events:
                pass
    assert opened == [("text_completion", "", "00-a", "shop", "a=1"), ("chat", "mine", "", "", "")]


# Limits of tenants


@dataclass
class Counter(Unlimited):
    """A stand-in for `Rates`."""

    said: list[tuple[str, str, int]] = field(default_factory=list)
    error: BatonError | None = None  # raised when the prompt is counted
    used_up: BatonError | None = None
    checks: int = 0

    async def check(self, tenant: str) -> None:
        self.checks += 1
        if self.used_up:
            raise self.used_up

    async def refund(self, tenant: str, prompt_tokens: int) -> None:
        self.said.append(("back", tenant, prompt_tokens))

    async def admit(self, tenant: str, prompt_tokens: int) -> None:
        if self.error:
            raise self.error
        self.said.append(("prompt", tenant, prompt_tokens))

    async def charge(self, tenant: str, output_tokens: int) -> None:
        self.said.append(("output", tenant, output_tokens))


async def test_a_tenant_is_charged_for_the_tokens_it_received_whatever_the_outcome(tokenizer: Tokenizer) -> None:
    house, counter = House(tokenizer), Counter()
    house.service._rates = counter
    ask = Ask(text="hello", tenant="shop")
    async with aclosing(house.service.generate(ask, 10)) as events:
        assert len([event async for event in events]) == 5
    async with aclosing(house.service.generate(ask, 10)) as events:
        async for event in events:
            if isinstance(event, Pieces):
                break  # the client disconnects
    house.script.error = BatonError(Reason.RETRIES_SPENT, "")
    with pytest.raises(BatonError):
        async with aclosing(house.service.generate(ask, 10)) as events:
            [event async for event in events]
    assert counter.said == [(kind, "shop", tokens) for got in (3, 1, 3) for kind, tokens in (("prompt", 5), ("output", got))]
    house.check()


async def test_a_worker_that_says_nothing_of_the_prompt_is_an_error(tokenizer: Tokenizer) -> None:
    """An older one does not know that it was asked."""
    house = House(tokenizer)
    error = await house.refused(prompt_logprobs=1)
    assert error.reason is Reason.INTERNAL and "1 of 5 tokens of the prompt" in error.message
    house.check()


@pytest.mark.parametrize("best_of", [None, 5])
async def test_several_choices_are_charged_one_prompt_and_all_that_was_computed(tokenizer: Tokenizer, best_of: int | None) -> None:
    house, counter = House(tokenizer), Counter()
    house.service._rates = counter
    async with aclosing(house.service.generate(Ask(text="hello", tenant="shop", n=3, best_of=best_of), 10)) as events:
        ends = [event for event in [event async for event in events] if isinstance(event, Finished)]
    made = 3 * (best_of or 3)
    assert counter.said == [("prompt", "shop", 5), ("output", "shop", made)]
    assert len(ends) == 3 and sum(end.request.output_len + end.discarded_tokens for end in ends) == made
    assert [record.choices for record in house.journal.last(9)] == [best_of or 3] * (best_of or 3)
    assert (house.journal.totals.prompt_tokens, house.journal.totals.output_tokens) == (5, made)
    house.check()


@dataclass
class Watched:
    """A tokenizer that counts how often it encodes."""

    inner: Tokenizer
    asked: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def encode(self, text: str, most: int | None = None, **how: bool) -> list[int]:
        self.asked += 1
        return self.inner.encode(text, most, **how)


async def test_a_tenant_that_used_up_its_quota_is_refused_before_any_work(tokenizer: Tokenizer) -> None:
    house, counter = House(Watched(tokenizer)), Counter(used_up=BatonError(Reason.RATE_LIMITED, "", retry_after=7.0))
    house.service._rates = counter
    error = await house.refused()
    assert error.reason is Reason.RATE_LIMITED and not house.script.begun and not counter.said
    assert house.tokenizer.asked == 0, "no prompt was tokenized"
    assert house.journal.last()[0].outcome == "refused"
    house.check()


async def test_a_tenant_whose_quota_ran_out_in_the_meantime_is_refused_before_dispatch(tokenizer: Tokenizer) -> None:
    house, counter = House(tokenizer), Counter(error=BatonError(Reason.RATE_LIMITED, "", retry_after=7.0))
    house.service._rates = counter
    assert (await house.refused()).reason is Reason.RATE_LIMITED and not house.script.begun and not counter.said
    house.check()


async def test_a_full_router_tokenizes_nothing_and_charges_nothing(tokenizer: Tokenizer) -> None:
    """Neither for the requests that it refuses nor for those that wait. Of those that it refuses, it asks nobody what their tenant has
    left, which would be Redis."""
    house, counter = full(Watched(tokenizer), max_queue=1), Counter()  # type: ignore[arg-type]
    house.service._rates = counter
    tasks = await occupy(house, waiting=1)
    for _ in range(5):
        assert (await house.refused()).reason is Reason.SATURATED
    assert house.tokenizer.asked == 1 and counter.said == [("prompt", "", 1)] and counter.checks == 2
    assert house.admission._refusals.maxlen and len(house.admission._refusals) == 5, "each refusal counts once"
    house.script.gate.set()
    await asyncio.gather(*tasks)
    assert house.tokenizer.asked == 2 and counter.checks == 2
    house.check()


async def test_a_request_that_is_refused_after_admission_is_charged_nothing(tokenizer: Tokenizer) -> None:
    house, counter = House(tokenizer, Script(ids=b"", error=BatonError(Reason.NO_WORKER, ""))), Counter()
    house.service._rates = counter
    assert (await house.refused()).reason is Reason.NO_WORKER
    assert counter.said == [("prompt", "", 5), ("back", "", 5), ("output", "", 0)]
    house.script.ids = b"a"
    await house.refused()
    assert counter.said[3:] == [("prompt", "", 5), ("output", "", 1)], "served tokens are not refunded"
    house.check()


async def test_a_prompt_with_too_many_bytes_to_fit_is_refused_before_any_work(tokenizer: Tokenizer) -> None:
    house = House(Watched(tokenizer))
    longest = len("<|eos|>")  # it is read as one token
    for ask in (
        Ask(text="x" * 5000, parse_special=False),
        Ask(text="x" * 4096 * longest),
        Ask(token_ids=(1,) * 5000),
        Ask(messages=(("user", "x" * 3000),) * 2),
    ):
        with pytest.raises(BatonError) as caught:
            async with aclosing(house.service.generate(ask, 10)) as events:
                await anext(events)
        assert caught.value.reason is Reason.CONTEXT_LENGTH and caught.value.metadata["context"] == "4096"
    assert house.tokenizer.asked == 0
    house.check()


async def test_the_queue_of_the_tokenizer_is_limited(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, config=RouterConfig(max_inflight=2, tokenizer_threads=1))
    go = threading.Event()
    waiting = [asyncio.create_task(house.service._pool.run(go.wait, within_s=5)) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(BatonError) as caught:
        await house.service.tokenize(Ask(text="x"))
    assert caught.value.reason is Reason.SATURATED
    waiting[2].cancel()  # a cancelled task counts until a thread has reached it
    go.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await house.service.tokenize(Ask(text="x")) == [ord("x")]


# Overload


async def warm(house: House, held_s: float) -> None:
    """Teaches the admission that requests hold their place for `held_s`."""
    for _ in range(200):
        house.admission.pace.note(held_s, held_s / 10, 40)


async def test_a_request_that_could_not_be_served_in_time_is_refused_immediately_with_a_retry_time(tokenizer: Tokenizer) -> None:
    house = full(tokenizer, max_queue=100)
    await warm(house, 1.0)
    tasks = await occupy(house, waiting=3)
    began = time.monotonic()
    error = await house.refused("late", 3.0)
    assert error.reason is Reason.SATURATED and time.monotonic() - began < 2.5, "it waited for its deadline"
    assert error.retry_after is not None and 1.0 <= error.retry_after <= 4.0, "four requests are ahead, each for a second"
    patient = asyncio.create_task(house.ask("patient", 300.0))
    await until(lambda: house.admission.queued == 4)
    house.script.gate.set()
    await asyncio.gather(*tasks, patient)
    house.check()


async def test_a_request_that_becomes_hopeless_in_the_queue_is_dropped_before_any_work(tokenizer: Tokenizer) -> None:
    house = full(Watched(tokenizer), max_queue=100)  # type: ignore[arg-type]
    await warm(house, 0.2)
    tasks = await occupy(house)
    error = await house.refused("hopeless", 0.5)  # the occupied place is never freed
    assert error.reason is Reason.SATURATED and "in time" in error.message and error.retry_after is not None
    assert len(house.script.begun) == 1 and house.tokenizer.asked == 1
    house.script.gate.set()
    await asyncio.gather(*tasks)
    house.check()


async def test_objectives_count_as_deadlines(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event()), RouterConfig(max_inflight=1), SloConfig(ttft_s=1.0))
    await warm(house, 0.5)
    tasks = await occupy(house, waiting=1)
    assert (await house.refused("third", 300.0)).reason is Reason.SATURATED
    house.script.gate.set()
    await asyncio.gather(*tasks)
    house.check()


async def test_the_number_of_places_follows_the_workers(tokenizer: Tokenizer) -> None:
    """A worker that joins lets waiting requests in immediately."""
    house = House(tokenizer, Script(gate=asyncio.Event()))

    def show(*names: str) -> None:
        members = [record(name, tokenizer_fingerprint=tokenizer.fingerprint, max_num_seqs=1) for name in names]
        house.view.update(members, 1.0)

    show("d0")
    tasks = [asyncio.create_task(house.ask()) for _ in range(4)]
    await until(lambda: house.admission.queued == 2 and len(house.script.begun) == 2)
    show("d0", "d1")
    await until(lambda: len(house.script.begun) == 4)
    house.script.gate.set()
    await asyncio.gather(*tasks)
    house.check()


RECOMMENDED = Recommended({"temperature": Fact(0.6, ""), "top_k": Fact(20, "")}, Fact(100, ""))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (0.6, 20, 1.0, 100)),
        ({"temperature": 0.0, "max_tokens": 300}, (0.0, 20, 1.0, 300)),
        ({"top_k": 0, "top_p": 0.5}, (0.6, 0, 0.5, 100)),
        ({"default_max_tokens": 16}, (0.6, 20, 1.0, 16)),  # of an API
        ({"default_max_tokens": 1 << 31}, (0.6, 20, 1.0, 100)),  # the rest of the context
    ],
)
async def test_what_a_request_does_not_set_is_as_the_model_recommends(
    tokenizer: Tokenizer, asked: dict[str, Any], expected: tuple[float, int, float, int]
) -> None:
    house = House(tokenizer)
    house.service._recommended = RECOMMENDED
    accepted, *_ = await house.ask("hello", **asked)
    assert isinstance(accepted, Accepted)
    params = accepted.params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == expected


async def test_without_a_recommendation_baton_has_defaults_of_its_own(tokenizer: Tokenizer) -> None:
    """Negative control of the test above."""
    accepted, *_ = await House(tokenizer).ask("hello")
    assert isinstance(accepted, Accepted) and (accepted.params.temperature, accepted.params.top_k) == (1.0, 0)


async def test_many_choices_of_a_long_prompt_are_made_over_turns(tokenizer: Tokenizer) -> None:
    """Made in one turn, 128 copies of such a prompt took three times as long as a turn may."""
    house = House(tokenizer, Script(gate=asyncio.Event()), context=1 << 17)
    ask = Ask(token_ids=tuple(i % 256 for i in range(60_000)), n=128, sampling=AskSampling(max_tokens=1))

    async def answer() -> list[Event]:
        async with aclosing(house.service.generate(ask, 60)) as events:
            return [event async for event in events]

    with watched() as turns:
        task = asyncio.create_task(answer())
        await until(lambda: len(house.script.begun) == 128)
    house.script.gate.set()
    events = await task
    assert len([event for event in events if isinstance(event, Finished)]) == 128
    assert {len(request.tokens) for request in house.script.begun} == {60_003} and len({id(r.tokens) for r in house.script.begun}) == 128
    turns.check(0.020)
    house.check()
