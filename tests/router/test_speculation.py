"""What a request says about guesses: refused by field where it cannot be had, sent to the workers, and told in what the client gets."""

import json
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from fake_workers import MODEL
from http_door import CHAT, COMPLETION, CONTEXT, HELLO, House, Script, toy_tokenizer

from baton.cluster.errors import BatonError
from baton.engine.core.speculation import Offer, Speculation
from baton.v1 import generation_pb2 as pb
from router.calls import to_job
from router.door import to_ask, to_response
from router.request import MAX_STEPS, Guesses, Token
from router.tokenizer import Tokenizer

ALL = Offer(("prompt_lookup", "prediction"), 8)
FILE = "first line\nsecond line\nthird line\n"
EDITED = "first line\nnew line\nthird line\n"
FEW = pb.SamplingParams(max_tokens=9)
BEAM = pb.Beam(width=4, count=1)
BODY = HELLO | {"prediction": {"type": "content", "content": FILE}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


def house_of(tokenizer: Tokenizer, offer: Offer = ALL, text: str = EDITED) -> House:
    house = House(tokenizer, Script(text.encode()))
    model = house.view.models[MODEL]
    assert model.served is not None
    model.served = replace(model.served, offer=offer)
    return house


async def serve(house: House, asked: pb.GenerateRequest, cut: int | None = None) -> list[pb.GenerateResponse]:
    got: list[pb.GenerateResponse] = []
    async with aclosing(house.service.generate(to_ask(asked, context=CONTEXT), 30)) as events:
        async for event in events:
            got.append(to_response(event))
            if cut is not None and len(got) > cut:
                break
    return got


def request(prediction: Any = None, **fields: Any) -> pb.GenerateRequest:
    asked = pb.GenerateRequest(text="change one line", **fields)
    if isinstance(prediction, str):
        asked.prediction.text = prediction
    elif prediction is not None:
        asked.prediction.token_ids.ids.extend(prediction)
    return asked


@pytest.mark.parametrize(
    ("offer", "asked", "field"),
    [
        (ALL, request(speculation=pb.Speculation(method="oracle")), "speculation.method"),
        (ALL, request(speculation=pb.Speculation(method="prediction")), "speculation.method"),
        (ALL, request(speculation=pb.Speculation(max_tokens=9)), "speculation.max_tokens"),
        (ALL, request(speculation=pb.Speculation(max_tokens=0)), "speculation.max_tokens"),
        (Offer(), request(speculation=pb.Speculation(max_tokens=1)), "speculation.max_tokens"),
        (Offer(), request(speculation=pb.Speculation(method="prompt_lookup")), "speculation.method"),
        (Offer(("prompt_lookup",), 8), request(FILE), "prediction"),
        (ALL, request("x" * (CONTEXT + 1)), "prediction.text"),
        (ALL, request("x" * (1 << 20) + "x"), "prediction.text"),
        (ALL, request([1] * (CONTEXT + 1)), "prediction.token_ids"),
        (ALL, request([1, 257]), "prediction.token_ids.ids[1]"),
        (ALL, request("x" * 3000, n=100, sampling=FEW), "prediction.text"),
        (ALL, request([1] * 3000, n=1, best_of=100, sampling=FEW), "prediction.token_ids"),
        (ALL, request(FILE, beam=BEAM), "prediction"),
        (ALL, request([1, 2], beam=BEAM), "prediction"),
        (ALL, request(beam=BEAM, n=2), "n"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_its_field(
    tokenizer: Tokenizer, offer: Offer, asked: pb.GenerateRequest, field: str
) -> None:
    house = house_of(tokenizer, offer)
    with pytest.raises(BatonError) as caught:
        await serve(house, asked)
    assert [each.field for each in caught.value.violations] == [field] and not house.script.begun
    house.check()


async def test_a_prediction_is_sent_to_the_decode_worker_as_token_ids_and_told_in_the_usage(tokenizer: Tokenizer) -> None:
    house = house_of(tokenizer)
    for given in (FILE, list(FILE.encode())):
        got = await serve(house, request(given, speculation=pb.Speculation(method="none", max_tokens=3)))
        asked = house.script.begun[-1].params.speculation
        assert asked == Speculation("none", 3, tuple(FILE.encode()))
        job = to_job(house.script.begun[-1])
        assert bytes(job.prediction) == FILE.encode() and (job.speculation.method, job.speculation.max_tokens) == ("none", 3)
        usage = got[-1].finished.usage
        wrong = len("second")  # "new" stands there
        assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (len(FILE) - wrong, wrong)
    got = await serve(house, request())
    assert got[-1].finished.usage.accepted_prediction_tokens == 0 and house.script.begun[-1].params.speculation == Speculation()


async def test_a_stream_that_goes_on_elsewhere_has_the_usage_of_one_that_did_not_break(tokenizer: Tokenizer) -> None:
    whole = (await serve(house_of(tokenizer), request(FILE)))[-1].finished.usage
    for cut in range(1, len(EDITED), 5):
        asked = request(FILE)
        got = await serve(house_of(tokenizer), asked, cut)
        asked.sampling.CopyFrom(got[0].accepted.sampling)
        asked.resume = got[0].accepted.resume
        asked.output_so_far.ids.extend(token.id for response in got[1:] for token in response.tokens.tokens)
        assert (await serve(house_of(tokenizer), asked))[-1].finished.usage == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http_it_has_the_names_of_openai(tokenizer: Tokenizer, stream: bool) -> None:
    house = house_of(tokenizer)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    parts = {"type": "content", "content": [{"type": "text", "text": line} for line in FILE.splitlines()]}
    for body, used in ((BODY, len(FILE) - 6), (HELLO | {"prediction": parts}, len(FILE) - 7), (HELLO, None)):
        answer = await house.post(CHAT, body | options | {"n": 2})
        text = answer.body.decode()
        told = json.loads(text.split("data: ")[-2]) if stream else json.loads(text)
        details = told["usage"]["completion_tokens_details"]
        assert details.get("accepted_prediction_tokens") == (None if used is None else 2 * used)
        assert ("rejected_prediction_tokens" in details) == (used is not None)
    house.check()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"prediction": {"type": "content", "content": "x" * (CONTEXT + 1)}}, "prediction.content"),
        (CHAT, {"prediction": {"type": "tokens", "content": "x"}}, "prediction.type"),
        (CHAT, {"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        (CHAT, {"prediction": "x"}, "prediction"),
        (CHAT, {"speculation": {"method": "oracle"}}, "speculation.method"),
        (CHAT, {"speculation": {"tokens": 1}}, "speculation.tokens"),
        (COMPLETION, {"prompt": "a", "speculation": {"max_tokens": 9}}, "speculation.max_tokens"),
        (COMPLETION, {"prompt": "a", "prediction": {"type": "content", "content": "x"}}, "prediction"),
    ],
)
async def test_over_http_it_is_refused_by_its_name_there(tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str) -> None:
    answer = await house_of(tokenizer).post(path, (HELLO if path == CHAT else {}) | body)
    assert answer.status == 400 and json.loads(answer.body)["error"]["param"] == param


def test_the_guesses_of_a_request_are_counted_step_by_step() -> None:
    right, last = Token(1, guessed=True), Token(1, guessed=True, rejected=2)
    guesses = Guesses()
    for token in (Token(1), right, right, Token(2, rejected=3), Token(3), right, Token(4), Token(5, rejected=1), right, last):
        guesses.note(token)
    assert list(guesses.steps) == [2, 3, 1, 0, 0, 1, 2, 2] and (guesses.drafted, guesses.accepted) == (11, 5)
    assert guesses.places == ({"1": 4, "2": 2, "3": 2, "4": 2, "5": 1}, {"1": 3, "2": 2})
    guesses.note(right)
    assert list(guesses.steps[-2:]) == [1, 0], "an output that ends with it"
    guesses.take_back((right,))
    assert guesses.accepted == 5
    for _ in range(MAX_STEPS):
        guesses.note(Token(2, rejected=3))
    assert len(guesses.steps) == 2 * MAX_STEPS and guesses.drafted == 12 + 3 * MAX_STEPS
