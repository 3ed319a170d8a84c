"""A stream that is cut after any token continues at another router as if nothing had happened: same tokens, texts, end and usage."""

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from fake_workers import MODEL, FakeWorkers, record, toy_model
from http_door import House, toy_tokenizer

from baton.cluster.errors import BatonError, Reason
from baton.v1 import generation_pb2 as pb
from router.dispatch import Dispatcher
from router.door import to_ask, to_response
from router.events import Event
from router.rates import Unlimited
from router.request import Request
from router.tokenizer import Tokenizer
from router.transcript import Transcript

HELLO = "Grüße 👩‍👩‍👧‍👦 مرحبا! Grüße"
Model = Callable[[list[int], Request], int]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


@dataclass
class Counter(Unlimited):
    """A stand-in for `Rates`."""

    said: list[tuple[str, int]] = field(default_factory=list)
    error: BatonError | None = None

    async def check(self, tenant: str) -> None:
        if self.error:
            raise self.error

    async def admit(self, tenant: str, prompt_tokens: int) -> None:
        self.said.append(("prompt", prompt_tokens))

    async def refund(self, tenant: str, prompt_tokens: int) -> None:
        self.said.append(("back", prompt_tokens))

    async def charge(self, tenant: str, output_tokens: int) -> None:
        self.said.append(("output", output_tokens))


class Router:
    """A router of its own, with workers that compute `model`."""

    def __init__(self, tokenizer: Tokenizer, model: Model = toy_model, key: bytes = b"k" * 32, seed: int = 77, **worker: Any) -> None:
        """`seed`: for requests without one."""
        self.house = House(tokenizer, receipt_key=key)
        self.house.service._draws = replace(self.house.service._draws, seed=lambda: seed)
        self.model, view = self.house.view.models[MODEL], self.house.view
        self.model.served = None
        view.update([record(name, tokenizer_fingerprint=tokenizer.fingerprint, **worker) for name in ("p0", "d0")], 1.0)
        self.workers = FakeWorkers()
        self.workers.model = model
        self.house.service._dispatcher = Dispatcher(self.model, self.workers, self.house.config)
        self.counter = self.house.service._rates = Counter()

    async def serve(self, asked: pb.GenerateRequest, tenant: str = "", cut: int | None = None) -> list[pb.GenerateResponse]:
        """All events, or those up to `cut` tokens."""
        ask = to_ask(asked, "", tenant, self.house.service.max_model_len)
        got: list[Event] = []
        async with aclosing(self.house.service.generate(ask, 30)) as events:
            async for event in events:
                got.append(event)
                if cut is not None and len(got) > cut:
                    break
        self.house.admission.check()
        assert self.house.service.idle and not self.workers.leases
        return [to_response(event) for event in got]

    async def refused(self, asked: pb.GenerateRequest, tenant: str = "") -> BatonError:
        with pytest.raises(BatonError) as caught:
            await self.serve(asked, tenant)
        return caught.value


def again(asked: pb.GenerateRequest, got: list[pb.GenerateResponse], receipt: bool = True) -> pb.GenerateRequest:
    """What the rule in generation.proto tells a client to send."""
    accepted = got[0].accepted
    ids = [token.id for response in got[1:] for token in response.tokens.tokens]
    request = pb.GenerateRequest(sampling=accepted.sampling, resume=accepted.resume if receipt else b"", output_so_far=pb.TokenIds(ids=ids))
    copy = pb.GenerateRequest()
    copy.CopyFrom(asked)
    copy.ClearField("sampling")
    copy.MergeFrom(request)
    return copy


def ends(responses: list[pb.GenerateResponse]) -> pb.Finished:
    """What `Finished` says about the output; the times and workers are those of one router."""
    finished = pb.Finished()
    finished.CopyFrom(responses[-1].finished)
    for name in ("stages", "workers", "handoff"):
        finished.ClearField(name)
    for name in ("cached_tokens", "cache"):
        finished.usage.ClearField(name)
    return finished


def story(text: str, end: int | None = None) -> Model:
    """A model that writes `text`. With a penalty, it writes another letter in place of one that the output already has; so what counts as
    output matters. `end`: the token after the text."""

    def model(known: list[int], request: Request) -> int:
        written = text.encode()
        at = len(known) - request.prompt_len
        if at >= len(written):
            return end if end is not None else 46
        token = written[at]
        penalised = request.params.frequency_penalty and token < 128
        return (token + known[request.prompt_len :].count(token)) % 128 if penalised else token

    return model


NAMED: dict[str, tuple[Model, dict[str, Any]]] = {
    "greedy": (toy_model, {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}),
    "drawn seed": (toy_model, {"max_tokens": 20, "ignore_eos": True}),
    "seed and logprobs": (toy_model, {"seed": 7, "logprobs": 3, "max_tokens": 20}),
    "characters of several bytes": (story(HELLO), {"max_tokens": len(HELLO.encode())}),
    "a cut character at the end": (story(HELLO), {"max_tokens": len("Grüße 👩".encode()) - 1}),
    "stop string": (story(HELLO + "one two three and on"), {"stop": ["two thr", "👩‍👩‍👧‍👧"], "max_tokens": 200}),
    "stop string before min_tokens": (story("ab near cd near ef"), {"stop": [" near"], "min_tokens": 8, "max_tokens": 50}),
    "almost a stop string": (story("one two thre"), {"stop": ["two three"], "max_tokens": 12}),
    "stop string at the very end": (story("aaab"), {"stop": ["aab"], "max_tokens": 4}),
    "stop token": (story("abXcdX"), {"stop_token_ids": [88], "min_tokens": 4, "max_tokens": 50}),
    "end token": (story("ab", 256), {"max_tokens": 50}),
    "end token before min_tokens": (story("ab", 256), {"min_tokens": 6, "max_tokens": 50}),
    "penalties": (story("abcabcabcabc"), {"frequency_penalty": 0.5, "presence_penalty": 0.5, "max_tokens": 12}),
    "one token": (story("x"), {"max_tokens": 1}),
}
PROMPTS: list[dict[str, Any]] = [{"text": "a prompt of more than two blocks of sixteen tokens"}, {"text": "x"}]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["two workers", "bypass"])
@pytest.mark.parametrize("name", NAMED)
async def test_a_stream_cut_at_any_token_continues_as_if_nothing_had_happened(tokenizer: Tokenizer, name: str, prompt: Any) -> None:
    model, sampling = NAMED[name]
    asked = pb.GenerateRequest(**prompt, sampling=pb.SamplingParams(**sampling))
    whole = await Router(tokenizer, model).serve(asked)
    tokens = whole[1:-1]
    assert tokens and whole[-1].WhichOneof("event") == "finished"
    for cut in range(len(tokens) + 1):
        first = await Router(tokenizer, model).serve(asked, cut=cut)
        assert len(first) == cut + 1
        router = Router(tokenizer, model, seed=99)
        rest = await router.serve(again(asked, first))
        assert rest[0].accepted == first[0].accepted
        assert first[1:] + rest[1:-1] == tokens, f"cut after {cut} tokens"
        assert ends(rest) == ends(whole)
        assert bool(router.workers.calls) == (cut < len(tokens)), "no worker is asked for an output that has ended"


def text_of(responses: list[pb.GenerateResponse]) -> str:
    return "".join(token.text for response in responses for token in response.tokens.tokens) + responses[-1].finished.text


@pytest.mark.parametrize(("least", "text"), [(0, "ab"), (7, "ab"), (8, "ab near cd"), (15, "ab near cd"), (16, "ab near cd near ef ")])
async def test_no_stop_string_ends_an_output_of_fewer_tokens_than_min_tokens(tokenizer: Tokenizer, least: int, text: str) -> None:
    asked = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=[" near"], min_tokens=least, max_tokens=18 + (least == 16)))
    assert text_of(await Router(tokenizer, story("ab near cd near ef ")).serve(asked)) == text


@pytest.mark.parametrize("ignore_eos", [True, False])
async def test_a_stop_string_that_spells_a_control_token_ends_the_output_there(tokenizer: Tokenizer, ignore_eos: bool) -> None:
    router = Router(tokenizer, story("ab", 256), eos_token_ids=())
    asked = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=["<|eos|>"], ignore_eos=ignore_eos, max_tokens=9))
    answer = await router.serve(asked)
    assert list(answer[0].accepted.sampling.stop_token_ids) == [256]
    assert (text_of(answer), answer[-1].finished.stop_token_id) == ("ab", 256)
    error = await router.refused(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=["b<|eos|>"])))
    assert error.violations[0].field == "sampling.stop[0]"


async def test_a_stream_can_be_cut_again_and_again(tokenizer: Tokenizer) -> None:
    asked = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(seed=1, max_tokens=12, ignore_eos=True))
    whole = await Router(tokenizer).serve(asked)
    got: list[pb.GenerateResponse] = []
    request, receipts = asked, set()
    for _ in range(12):
        answer = await Router(tokenizer).serve(request, cut=1)
        receipts.add(answer[0].accepted.resume)
        got += answer[1:]
        request = again(asked, [answer[0], *got])
    last = await Router(tokenizer).serve(request)
    assert got == whole[1:-1] and len(last) == 2 and ends(last) == ends(whole)
    assert len(receipts) == 1, "a continuation does not prolong the life of a receipt"


@pytest.mark.parametrize("broken", ["text is not replayed", "output counts as prompt"])
async def test_a_continuation_without_a_protection_is_noticed(tokenizer: Tokenizer, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison above."""
    model, sampling = (story("a🙂b"), {}) if broken == "text is not replayed" else NAMED["penalties"]
    asked = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**{"max_tokens": 6, **sampling}))
    whole = await Router(tokenizer, model).serve(asked)
    first = await Router(tokenizer, model).serve(asked, cut=3)
    request = again(asked, first)
    if broken == "text is not replayed":
        monkeypatch.setattr(Transcript, "replay", lambda self, output, eos: None)
    else:
        ids = [*b"x", *request.output_so_far.ids]
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=request.sampling)
        request.sampling.max_tokens -= 3
    rest = await Router(tokenizer, model).serve(request)
    assert first[1:] + rest[1:-1] != whole[1:-1]


# The receipt


ASKED = pb.GenerateRequest(text="hello", request_id="mine", sampling=pb.SamplingParams(seed=1, max_tokens=6, ignore_eos=True))


async def broken(tokenizer: Tokenizer, asked: pb.GenerateRequest = ASKED, tenant: str = "shop") -> pb.GenerateRequest:
    """The request that continues a stream of `tenant` which broke after two tokens."""
    return again(asked, await Router(tokenizer).serve(asked, tenant, cut=2))


async def test_a_tenant_is_charged_once(tokenizer: Tokenizer) -> None:
    first, second = Router(tokenizer), Router(tokenizer)
    got = await first.serve(ASKED, "shop", cut=2)
    await second.serve(again(ASKED, got), "shop")
    assert first.counter.said + second.counter.said == [("prompt", 5), ("output", 2), ("output", 4)]


async def test_without_a_receipt_prompt_and_output_so_far_are_charged(tokenizer: Tokenizer) -> None:
    """Negative control: it is the receipt that makes them free."""
    first, second = Router(tokenizer), Router(tokenizer)
    got = await first.serve(ASKED, "shop", cut=2)
    rest = await second.serve(again(ASKED, got, receipt=False), "shop")
    assert second.counter.said == [("prompt", 7), ("output", 4)]
    assert (rest[-1].finished.usage.prompt_tokens, rest[-1].finished.usage.completion_tokens) == (5, 6)


async def test_a_tenant_that_has_used_up_its_minute_may_finish_its_streams(tokenizer: Tokenizer) -> None:
    router, request = Router(tokenizer), await broken(tokenizer)
    router.counter.error = BatonError(Reason.RATE_LIMITED, "used up")
    assert (await router.serve(request, "shop"))[-1].HasField("finished")
    request.ClearField("resume")
    assert (await router.refused(request, "shop")).reason is Reason.RATE_LIMITED


async def test_a_continuation_that_is_refused_later_refunds_nothing(tokenizer: Tokenizer) -> None:
    router, request = Router(tokenizer), await broken(tokenizer)
    router.house.script.ids, router.house.script.error = b"", BatonError(Reason.NO_WORKER, "")
    router.house.service._dispatcher = cast(Dispatcher, router.house.script)
    assert (await router.refused(request, "shop")).reason is Reason.NO_WORKER
    assert router.counter.said == [("output", 0)]
    assert router.house.service._journal.last()[0].outcome == "refused"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text": "hullo"}, "another prompt"),
        ({"request_id": "other"}, "another request"),
        ({"resume": b"x" * 100}, "altered"),
        ({"resume": b"x" * 257}, "at most 256 bytes"),
    ],
)
async def test_a_receipt_for_something_else_is_refused_by_name(tokenizer: Tokenizer, change: dict[str, Any], says: str) -> None:
    router, request = Router(tokenizer), await broken(tokenizer)
    request.MergeFrom(pb.GenerateRequest(**change))
    error = await router.refused(request, "shop")
    assert error.reason is Reason.INVALID_FIELD and error.violations[0].field == "resume" and says in error.message
    assert not router.workers.calls and not router.counter.said


async def test_a_receipt_of_another_tenant_router_or_time_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    request = await broken(tokenizer)
    assert "another tenant" in (await Router(tokenizer).refused(request, "bank")).message
    assert "altered" in (await Router(tokenizer, key=b"x" * 32).refused(request, "shop")).message
    late = time.time() + 661
    monkeypatch.setattr("router.service.time", lambda: late)
    assert "expired" in (await Router(tokenizer).refused(request, "shop")).message


async def test_no_other_model_continues_a_stream(tokenizer: Tokenizer) -> None:
    router, request = Router(tokenizer, model_fingerprint="other"), await broken(tokenizer)
    error = await router.refused(request, "shop")
    assert error.reason is Reason.RETRIES_SPENT and "another model" in error.message and not router.workers.calls


async def test_the_model_of_a_continued_stream_may_not_change_while_it_runs(tokenizer: Tokenizer) -> None:
    router, request = Router(tokenizer), await broken(tokenizer)
    render = router.house.service._make_plan

    async def change_after(*arguments: Any) -> Any:
        plan = await render(*arguments)
        assert router.model.served is not None
        router.model.served = replace(router.model.served, model_fingerprint="other")
        return plan

    router.house.service._make_plan = change_after  # type: ignore[method-assign, assignment]
    assert (await router.refused(request, "shop")).reason is Reason.RETRIES_SPENT


async def test_the_model_of_a_continued_stream_may_not_change_while_it_waits(tokenizer: Tokenizer) -> None:
    router, request = Router(tokenizer), await broken(tokenizer)
    plan = router.house.service._make_plan

    async def change_before(*arguments: Any) -> Any:
        assert router.model.served is not None
        router.model.served = replace(router.model.served, model_fingerprint="other")
        return await plan(*arguments)

    router.house.service._make_plan = change_before  # type: ignore[method-assign, assignment]
    assert (await router.refused(request, "shop")).reason is Reason.RETRIES_SPENT and not router.workers.calls


async def test_the_receipt_supplies_the_id_that_the_router_drew(tokenizer: Tokenizer) -> None:
    asked = pb.GenerateRequest(text="hello", sampling=ASKED.sampling)
    got = await Router(tokenizer).serve(asked, cut=2)
    rest = await Router(tokenizer).serve(again(asked, got))
    assert rest[0].accepted.request_id == rest[-1].finished.request_id == got[0].accepted.request_id != ""


async def test_a_chat_template_that_gives_another_prompt_is_noticed(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")]), sampling=ASKED.sampling)
    request = await broken(tokenizer, asked)
    assert (await Router(tokenizer).serve(request, "shop"))[-1].HasField("finished")
    render = tokenizer.render
    monkeypatch.setattr(tokenizer, "render", lambda *arguments: [*render(*arguments), 7])
    assert "another prompt" in (await Router(tokenizer).refused(request, "shop")).message


# The output so far


@pytest.mark.parametrize(
    ("ids", "sampling", "field"),
    [
        ([1, 257], {"max_tokens": 9}, "output_so_far.ids[1]"),
        ([1, 2, 3], {"max_tokens": 2}, "output_so_far.ids"),
        ([1] * 257, {}, "output_so_far.ids"),
        ([1] * 5000, {"max_tokens": 5000}, "output_so_far.ids"),
        ([1, 256, 2], {"max_tokens": 9}, "output_so_far.ids[2]"),
        ([88, 1], {"max_tokens": 9, "stop_token_ids": [88]}, "output_so_far.ids[1]"),
        ([*b"ab", 1], {"max_tokens": 9, "stop": ["ab"]}, "output_so_far.ids[2]"),
    ],
)
async def test_an_output_that_cannot_be_is_refused_by_name(tokenizer: Tokenizer, ids: list[int], sampling: Any, field: str) -> None:
    router = Router(tokenizer)
    request = pb.GenerateRequest(text="x", output_so_far=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(**sampling))
    error = await router.refused(request)
    assert (error.reason, error.violations[0].field) == (Reason.INVALID_FIELD, field)
    assert not router.workers.calls and not router.counter.said


@pytest.mark.parametrize(
    ("ids", "sampling"),
    [
        ([1, 256, 2], {"max_tokens": 9, "ignore_eos": True}),
        ([88, 256, 1], {"max_tokens": 9, "stop_token_ids": [88], "min_tokens": 3}),
        ([*b"a"], {"max_tokens": 9, "stop": ["ab"]}),
    ],
)
async def test_an_output_that_has_not_ended_goes_on(tokenizer: Tokenizer, ids: list[int], sampling: dict[str, Any]) -> None:
    """Negative control of the test above."""
    router = Router(tokenizer, story("aa"))
    request = pb.GenerateRequest(text="x", output_so_far=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(**sampling))
    answer = await router.serve(request)
    assert answer[1].tokens.tokens[0].index == len(ids) and answer[-1].finished.usage.completion_tokens == 9


async def test_accepted_tells_everything_that_is_in_force(tokenizer: Tokenizer) -> None:
    """A client that sends it back asks for the same again, whatever the defaults of the next router are."""
    asked = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(stop=["x"], logprobs=2))
    told = (await Router(tokenizer).serve(asked, cut=0))[0].accepted.sampling
    absent = {"logit_bias", "stop_token_ids", "structured", "prompt_logprobs"}
    assert {field.name for field, _ in told.ListFields()} | absent == set(told.DESCRIPTOR.fields_by_name)
    assert (told.seed, told.max_tokens, list(told.stop), told.temperature) == (77, 256, ["x"], 1.0)
    once_more = (await Router(tokenizer, seed=99).serve(pb.GenerateRequest(text="hello", sampling=told), cut=0))[0]
    assert once_more.accepted.sampling == told


async def test_without_the_workers_end_tokens_the_end_of_an_output_is_not_noticed(tokenizer: Tokenizer) -> None:
    """Negative control: it is the workers' records from which the router knows them."""
    router = Router(tokenizer, story("ab", 256), eos_token_ids=())
    request = pb.GenerateRequest(text="x", output_so_far=pb.TokenIds(ids=[*b"ab", 256]), sampling=pb.SamplingParams(max_tokens=9))
    await router.serve(request)
    assert router.workers.calls
