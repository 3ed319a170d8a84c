"""A beam search at the router: what may be asked, what is told of it, and that no failure shows half of an answer."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_workers import MODEL, TOKENIZER, FakeFork, FakeWorkers, record
from http_door import toy_tokenizer

from baton.answer import Assembly
from baton.client import build_request
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.metrics import Book
from baton.cluster.records import WorkerRecord
from baton.cluster.telemetry import Tracer
from baton.engine.core.beams import Beams, Hypothesis
from baton.engine.core.sampling import SamplingParams
from baton.engine.facts.model_facts import Fact, Recommended
from baton.v1 import generation_pb2 as pb
from router import service
from router.admission import Admission
from router.beams import MAX_TOKENS, check_fit
from router.conversation import Setting, Tool
from router.dispatch import Dispatcher
from router.door import to_ask, to_response
from router.events import Accepted, Event, Finished
from router.found import Found
from router.http.errors import HttpError, to_http
from router.http.openai_in import Caller, chat, completion
from router.http.openai_out import OpenAiWriter
from router.journal import Journal
from router.request import Request, Stopwatch, Trace
from router.service import Draws, GenerateService, ModelText
from router.tokenizer import Tokenizer
from router.validate import Ask, AskSampling
from router.view import ClusterView
from router.workers import DecodeEvent, Ended, Searched

PROMPT = list(range(1, 41))
TWO = Hypothesis((104, 105, 256), -0.5, True), Hypothesis((104, 0xC3), -0.75, False)
LOST = BatonError(Reason.WORKER_LOST, "connection reset")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


@dataclass
class Finder:
    """A stand-in for the dispatcher."""

    answer: tuple[Hypothesis, ...] = TWO
    seen: list[SamplingParams] = field(default_factory=list)

    async def generate(self, request: Request) -> AsyncGenerator[Any, None]:
        self.seen.append(request.params)
        request.found, request.finish = self.answer, "stop"
        for _ in ():
            yield _


class House:
    def __init__(self, tokenizer: Tokenizer, finder: Finder, recommended: Recommended | None = None, **served: Any) -> None:
        self.finder, self.config = finder, RouterConfig()
        self.view = ClusterView({MODEL: tokenizer.fingerprint})
        self.view.update([record("d0", tokenizer_fingerprint=tokenizer.fingerprint, **served)], 0.0)
        self.admission = Admission(self.config.max_inflight, self.config.max_queue)
        self.journal = Journal(Book("router", model="toy"), Tracer(), "toy", SloConfig(), keep=100)
        self.service = GenerateService(
            model=self.view.models[MODEL],
            text=ModelText(tokenizer, recommended or Recommended()),
            dispatcher=finder,  # type: ignore[arg-type]
            admission=self.admission,
            config=self.config,
            journal=self.journal,
            draws=Draws(lambda: 77, lambda: "req"),
        )


async def events_of(house: House, ask: Ask) -> list[Event]:
    async with aclosing(house.service.generate(ask, 10)) as events:
        return [event async for event in events]


# --- what may be asked ---------------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("beam.width", {"beams": Beams(1)}),
    ("beam.width", {"beams": Beams(33)}),
    ("beam.width", {"beams": Beams(0, 1)}),
    ("beam.count", {"beams": Beams(4, 5)}),
    ("beam.count", {"beams": Beams(4, 0)}),
    *[("beam.length_penalty", {"beams": Beams(4, 1, v)}) for v in (5.1, -6.0, float("nan"), float("inf"))],
    ("beam.early_stopping", {"beams": Beams(4, 1, 1.0, "sometimes")}),  # type: ignore[arg-type]
    *[
        (f"sampling.{name}", {"sampling": {name: value}})
        for name, value in {
            "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "top_a": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
            "frequency_penalty": 0.5, "logit_bias": {5: 1.0}, "logprobs": 0, "stop": ("x",),
        }.items()
    ],
    ("output_so_far.ids", {"output_so_far": (1,)}),
    ("n", {"n": 2}),
    ("n", {"best_of": 2}),
    ("sampling.max_tokens", {"beams": Beams(32), "sampling": {"max_tokens": MAX_TOKENS // 32 + 1}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), REFUSED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(REFUSED)])
async def test_what_the_search_would_have_to_ignore_is_refused_by_field(tokenizer: Tokenizer, name: str, fields: dict[str, Any]) -> None:
    house = House(tokenizer, Finder(), max_model_len=1 << 18, kv_blocks=1 << 20)
    ask = Ask(**{"text": "hello", "beams": Beams(4, 2), **fields, "sampling": AskSampling(**fields.get("sampling", {}))})
    with pytest.raises(BatonError) as refused:
        await events_of(house, ask)
    assert (refused.value.reason, [one.field for one in refused.value.violations]) == (Reason.INVALID_FIELD, [name])
    assert not house.finder.seen


async def test_tools_and_bounded_thinking_are_refused(tokenizer: Tokenizer) -> None:
    for name, setting in (("tools", Setting(tools=(Tool("f"),))), ("max_thinking_tokens", Setting(max_thinking=5, splits_reasoning=True))):
        with pytest.raises(BatonError) as refused:
            await events_of(House(tokenizer, Finder()), Ask(messages=(("user", "hi"),), setting=setting, beams=Beams(4)))
        assert refused.value.violations[0].field == name


async def test_what_asks_for_nothing_is_accepted_and_what_is_recommended_does_not_matter(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Finder(), Recommended({"temperature": Fact(0.8, "x")}, Fact(9, "y")))
    neutral = AskSampling(temperature=0.0, top_p=1.0, top_k=-1, seed=5, stop_token_ids=(7,), min_tokens=2, ignore_eos=True)
    await events_of(house, Ask(text="hello", beams=Beams(4), sampling=neutral))
    await events_of(house, Ask(text="hello", beams=Beams(4)))
    first, second = house.finder.seen
    assert (first.stop_token_ids, first.min_tokens, first.ignore_eos) == (frozenset([7]), 2, True)
    assert (second.beams, second.temperature, second.max_tokens) == (Beams(4), 1.0, 9)


def worker(**fields: Any) -> WorkerRecord:
    return record("d0", block_size=16, **{"kv_blocks": 100, "max_num_seqs": 8, **fields})


def test_a_search_needs_one_worker_with_room_for_it_alone() -> None:
    params = SamplingParams(160, beams=Beams(8))
    with pytest.raises(BatonError, match="the beams may need 108 blocks of KV; a worker has 100") as refused:
        check_fit(params, 330, [worker()])  # 20 in common, and 11 for each
    assert (refused.value.reason, refused.value.violations[0].field) == (Reason.CONTEXT_LENGTH, "beam.width")
    with pytest.raises(BatonError, match="a worker runs 7 sequences at a time"):
        check_fit(params, 330, [worker(max_num_seqs=7)])
    check_fit(params, 330, [worker(), worker(max_num_seqs=7), worker(kv_blocks=120, max_num_seqs=0)])
    check_fit(replace(params, beams=None), 10**6, [worker()])


# --- what is told --------------------------------------------------------------------------------------------------------------------


async def test_each_answer_is_told_once_with_its_own_text(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Finder())
    accepted, *found, finished = await events_of(house, Ask(text="hello", beams=Beams(4, 2)))
    assert isinstance(accepted, Accepted) and isinstance(finished, Finished) and all(isinstance(one, Found) for one in found)
    assert [(one.index, one.token_ids, one.text, one.reason, one.score) for one in found] == [  # type: ignore[union-attr]
        (0, (104, 105, 256), "hi", "stop", -0.5),
        (1, (104, 0xC3), "h\N{REPLACEMENT CHARACTER}", "length", -0.75),
    ]
    assert finished.request.output_len == 5 == house.journal.last()[0].output_tokens
    assert house.service.idle and (house.admission.inflight, house.admission.queued) == (0, 0)


async def test_a_long_answer_is_told_off_the_event_loop(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Hypothesis((104,) * 600, -1.0, False)
    house, calls = House(tokenizer, Finder(answer=(long, TWO[0]))), []
    real = house.service._off_loop

    async def seen(slow: bool, *arguments: Any) -> Any:
        calls.append(slow)
        return await real(slow, *arguments)

    monkeypatch.setattr(house.service, "_off_loop", seen)
    events = await events_of(house, Ask(text="hello", beams=Beams(4, 2), sampling=AskSampling(max_tokens=700)))
    assert calls[-2:] == [True, False] and isinstance(events[1], Found) and events[1].text == "h" * 600
    assert service.LONG_ANSWER < 600


async def test_grpc_tells_hypotheses_and_old_messages_have_none(tokenizer: Tokenizer) -> None:
    request = build_request("hello", beam={"width": 4, "count": 2, "early_stopping": "true"})
    assert to_ask(request).beams == Beams(4, 2, 1.0, "true") and to_ask(build_request("hello")).beams is None
    assert to_ask(build_request("hello", beam={"width": 3, "length_penalty": 0.0})).beams == Beams(3, 1, 0.0)
    assembly = Assembly()
    for event in await events_of(House(tokenizer, Finder()), to_ask(request)):
        assert assembly.take(pb.GenerateResponse.FromString(to_response(event).SerializeToString()), 0) == []
    assert assembly.result is not None
    assert (assembly.result.text, assembly.result.token_ids, assembly.result.finish_reason) == ("hi", (104, 105, 256), "stop")
    assert [(one.text, one.score) for one in assembly.result.hypotheses] == [("hi", -0.5), ("h\N{REPLACEMENT CHARACTER}", -0.75)]


def test_a_search_that_was_begun_again_replaces_what_its_client_had() -> None:
    assembly = Assembly(accepted=pb.Accepted(resume=b"r"))
    for index in (0, 1, 0, 1, 2):
        assembly.take(pb.GenerateResponse(hypothesis=pb.Hypothesis(index=index, token_ids=[index])), 1)
    assert [one.token_ids for one in assembly.hypotheses] == [(0,), (1,), (2,)]
    assert not assembly.to_continue(build_request("x", beam={"width": 4})).output_so_far.ids


async def test_the_tokens_of_all_beams_are_paid_for(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for one answer of eight beams has as much computed as whoever asks for all."""
    house, paid = House(tokenizer, Finder(TWO[:1])), list[int]()

    async def charge(tenant: str, output_tokens: int) -> None:
        paid.append(output_tokens)

    monkeypatch.setattr(house.service._rates, "charge", charge)
    *_, finished = await events_of(house, Ask(text="hello", beams=Beams(8, 1)))
    assert isinstance(finished, Finished) and finished.request.output_len == 3 and paid == [8 * 3]


@pytest.mark.parametrize(("steps", "stays", "pays"), [(5, True, 8 * 5), (0, True, 0), (5, False, 8 * 5)])
async def test_a_search_pays_for_what_it_computed_also_when_its_client_leaves(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, steps: int, stays: bool, pays: int
) -> None:
    """Without that, a client that leaves just before the end pays nothing. The third goes on for longer than its best answers are."""
    house, paid, told = House(tokenizer, Finder()), list[int](), list[Request]()
    workers = Searching()
    workers.steps, workers.stays = steps, stays
    dispatcher = Dispatcher(house.view.models[MODEL], workers, house.config)

    async def charge(tenant: str, output_tokens: int) -> None:
        paid.append(output_tokens)

    def generate(request: Request) -> AsyncGenerator[Any, None]:
        told.append(request)
        return dispatcher.generate(request)

    monkeypatch.setattr(house.service._rates, "charge", charge)
    monkeypatch.setattr(house.finder, "generate", generate)
    task = asyncio.create_task(events_of(house, Ask(text="hello", beams=Beams(8, 1))))
    async with asyncio.timeout(10):
        while not task.done() and not (told and told[0].searched == steps and workers.calls):
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert paid == [pays]


# --- HTTP ----------------------------------------------------------------------------------------------------------------------------


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hello", "use_beam_search": True, "n": 2, **fields}).encode()


def test_http_reads_vllms_names() -> None:
    for fields, beams in (
        ({}, Beams(2, 2)),
        ({"best_of": 6, "length_penalty": 0.5, "early_stopping": True, "temperature": 0}, Beams(6, 2, 0.5, "true")),
        ({"early_stopping": "never"}, Beams(2, 2, 1.0, "never")),
    ):
        asked = completion(body(**fields), Caller("r"))
        assert [ask.beams for ask in asked.asks] == [beams] and (asked.n, asked.beams) == (2, True)
    talk = json.dumps({"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 3}).encode()
    assert [ask.beams for ask in chat(talk, Caller("r")).asks] == [Beams(3, 3)]
    several = completion(body(prompt=["a", "b"]), Caller("r"))
    assert [ask.text for ask in several.asks] == ["a", "b"]
    assert several.names_of(several.n)["text"] == "prompt[1]" and completion(body(), Caller("r")).names_of(0)["text"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"early_stopping": "maybe"}, "early_stopping"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"prompt": ["a"] * 65}, "n"),
    ],
)
def test_http_refuses_by_parameter(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as refused:
        completion(body(**fields), Caller("r"))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 1}, "n"), ({"best_of": 40}, "best_of"), ({"best_of": 2, "n": 3}, "n"), ({"length_penalty": 9.0}, "length_penalty")],
)
async def test_http_names_what_the_service_refuses(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    asked = completion(body(**fields), Caller("r"))
    with pytest.raises(BatonError) as refused:
        await events_of(House(tokenizer, Finder()), asked.asks[0])
    assert to_http(refused.value, asked.names_of(0)).param == param


async def test_http_tells_a_choice_for_each_answer_and_the_prompt_once(tokenizer: Tokenizer) -> None:
    asked = completion(body(prompt=["hello", "you"], return_token_ids=True), Caller("r"))
    writer = OpenAiWriter(asked, tokenizer, "r", "m")
    for i, ask in enumerate(asked.asks):
        for event in await events_of(House(tokenizer, Finder()), ask):
            for choice in range(asked.n) if isinstance(event, Accepted) else (event.choice,):  # as the door does
                writer.take(i * asked.n + choice, event)  # type: ignore[arg-type]
    answer = json.loads(b"".join(writer.whole()))
    told = [(one["index"], one["text"], one["token_ids"], one["finish_reason"], one["score"]) for one in answer["choices"]]
    assert told[:2] == [(0, "hi", [104, 105, 256], "stop", -0.5), (1, "h\N{REPLACEMENT CHARACTER}", [104, 0xC3], "length", -0.75)]
    assert [one[0] for one in told] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (8, 10)


# --- failures ------------------------------------------------------------------------------------------------------------------------


class Searching(FakeWorkers):
    """The first calls end in `breaks` after one hypothesis. Calls tell of `steps` steps before, and with `stays` they end there."""

    breaks = 0
    silent = stays = False
    steps = 0

    async def decode(
        self,
        worker: WorkerRecord,
        request: Request,
        handle: bytes,
        timeout_s: float,
        first: "asyncio.Future[int] | None" = None,
        forks: Sequence[FakeFork] = (),
    ) -> AsyncGenerator[DecodeEvent, None]:
        assert len(request.tokens) == request.prompt_len, "the token of the prefill is none of the answer"
        inner = super().decode(worker, request, handle, timeout_s, first)
        async with aclosing(inner) as events:
            async for event in events:
                if isinstance(event, tuple):
                    break
                yield event
        for step in range(self.steps):
            yield Searched(step + 1)
        if self.stays:
            await asyncio.Event().wait()
        for token in () if self.silent else (0, 77):
            yield Hypothesis((token + self.breaks,), -1.0 - token, False)
            if self.breaks:
                self.breaks -= 1
                raise LOST
        yield Ended("length", 0, 0)


def searching(*names: str) -> tuple[Dispatcher, Searching]:
    view, workers = ClusterView({MODEL: TOKENIZER}), Searching()
    view.update([record(name) for name in names], 0.0)
    return Dispatcher(view.models[MODEL], workers, RouterConfig(bypass_tokens=8, recover_wait_s=0.2)), workers


def asking(prompt: list[int], beams: Beams | None) -> Request:
    params = SamplingParams(8, beams=beams)
    return Request("r", list(prompt), len(prompt), params, "", time.monotonic() + 10, Trace(Stopwatch(time.monotonic)))


@pytest.mark.parametrize("opens", [False, True])
async def test_a_worker_that_dies_leaves_nothing_of_its_answer(opens: bool) -> None:
    dispatcher, workers = searching("p0", "d0", "d1")
    workers.opens, workers.breaks = opens, 1
    request = asking(PROMPT, Beams(2, 2))
    assert [tokens async for tokens in dispatcher.generate(request)] == []
    assert request.found == (Hypothesis((0,), -1.0, False), Hypothesis((77,), -78.0, False))
    assert (request.trace.retries, request.tokens, request.finish) == (1, PROMPT, "length")
    assert request.longest == len(PROMPT) + 16 and request.trace.first_at
    await asyncio.sleep(0.05)
    assert not workers.leases, "every lease was ended"


@pytest.mark.parametrize("beams", [None, Beams(2)])
async def test_an_end_with_the_answer_to_another_question_is_an_error(beams: Beams | None) -> None:
    dispatcher, workers = searching("d0")
    workers.silent = beams is not None
    with pytest.raises(BatonError, match=r"the worker ended with [02] hypotheses"):
        async for _ in dispatcher.generate(asking(PROMPT[:3], beams)):
            pass
