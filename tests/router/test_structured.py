"""What the router does for a request that asks for a form: it compiles it before anything is computed, and says how the answer ended."""

import json
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from http_door import CHAT, HELLO, House, Script, toy_tokenizer
from turns import within

from baton.cluster.errors import BatonError, Reason
from baton.engine.core.grammar import Grammar
from baton.v1 import generation_pb2 as pb
from router.door import to_ask, to_response
from router.events import Accepted, Event, Finished
from router.validate import Ask, AskSampling

EOS = 256
REFUSED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(toy_tokenizer(tmp_path), path=tmp_path)


async def ask(house: House, form: Grammar | None, **given: Any) -> list[Event]:
    how = {name: given.pop(name) for name in ("output_so_far",) if name in given}
    asked = Ask(text="hi", sampling=AskSampling(structured=form, **given), **how)
    async with aclosing(house.service.generate(asked, 30)) as events:
        return [event async for event in events]


async def refused(house: House, form: Grammar, **given: Any) -> BatonError:
    with pytest.raises(BatonError) as caught:
        await ask(house, form, **given)
    house.check()
    assert not house.script.begun and caught.value.reason is Reason.INVALID_FIELD
    return caught.value


async def test_a_schema_that_cannot_be_enforced_is_refused_with_its_path_before_anything_is_computed(house: House) -> None:
    error = await refused(house, Grammar("json_schema", json.dumps(REFUSED)))
    (violation,) = error.violations
    assert violation.field == "sampling.structured" and violation.description.startswith("$.properties.a.uniqueItems: ")
    assert (await refused(house, Grammar("json_schema", json.dumps(REFUSED)))).message == error.message, "a refusal is remembered"
    assert (await refused(house, Grammar("poem", ""))).violations[0].field == "sampling.structured.kind"
    assert (await refused(house, Grammar("regex", "a" * 70_000))).violations[0].field == "sampling.structured.text"
    assert "does not fit" in (await refused(house, Grammar("choice", '["yes"]'), output_so_far=[ord("n")], max_tokens=9)).message


async def test_a_request_that_is_not_strict_is_told_what_it_does_not_get(house: House) -> None:
    accepted = (await ask(house, Grammar("json_schema", json.dumps(REFUSED), strict=False)))[0]
    assert isinstance(accepted, Accepted) and [each.split(":")[0] for each in accepted.relaxed] == ["$.properties.a.uniqueItems"]
    told = to_response(accepted).accepted
    assert told.relaxed == list(accepted.relaxed)
    assert to_ask(pb.GenerateRequest(text="hi", sampling=told.sampling)).sampling.structured == accepted.params.structured
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": REFUSED}}
    choice = (await house.post(CHAT, {**HELLO, "response_format": schema})).json["choices"][0]
    assert choice["relaxed"] == list(accepted.relaxed)


@pytest.mark.parametrize(
    "ids, finish, given, incomplete",
    [
        ((*b"yes", EOS), "stop", {}, False),
        (b"ye", "length", {"max_tokens": 2}, True),
        (b"yes", "stop", {"stop": ("s",)}, True),
        (b"yes", "stop", {"stop_token_ids": (ord("s"),)}, True),
    ],
)
async def test_a_document_that_was_cut_is_called_incomplete(
    house: House, ids: Any, finish: Any, given: dict[str, Any], incomplete: bool
) -> None:
    house.script = house.service._dispatcher = Script(ids, finish)  # type: ignore[assignment]
    form = Grammar("choice", '["yes", "yesterday"]')
    end = (await ask(house, form, **given))[-1]
    assert isinstance(end, Finished) and end.incomplete is incomplete
    assert to_response(end).finished.incomplete is incomplete
    free = (await ask(house, None, **given))[-1]
    assert isinstance(free, Finished) and not free.incomplete, "without a form there is nothing to complete"
    body = {**HELLO, "guided_choice": ["yes", "yesterday"], **{name: list(v) if isinstance(v, tuple) else v for name, v in given.items()}}
    choice = (await house.post(CHAT, body)).json["choices"][0]
    assert choice["finish_reason"] == ("length" if incomplete else "stop")


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": REFUSED, "strict": True}}},
         "response_format.json_schema.schema"),
        ({"guided_json": REFUSED}, "guided_json"),
        ({"structured_outputs": {"json": REFUSED}}, "structured_outputs"),
    ],
)  # fmt: skip
async def test_an_http_client_gets_the_name_of_its_parameter_and_the_path(house: House, fields: dict[str, Any], param: str) -> None:
    answer = await house.post(CHAT, {**HELLO, **fields})
    error = answer.json["error"]
    assert answer.status == 400 and error["param"] == param and "$.properties.a.uniqueItems" in error["message"]


async def test_the_parameters_in_force_name_the_form(house: House) -> None:
    body = {**HELLO, "guided_json": {"type": "null"}, "return_sampling": True}
    told = (await house.post(CHAT, body)).json["choices"][0]["sampling"]
    assert told["structured_outputs"] == {"json": {"type": "null"}, "strict": True}


def test_grpc_carries_the_form_and_strict_is_the_default() -> None:
    def form(**given: Any) -> Grammar | None:
        return to_ask(pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(**given))).sampling.structured

    assert form() is None
    assert form(structured={"kind": "regex", "text": "a"}) == Grammar("regex", "a")
    assert form(structured={"kind": "regex", "text": "a", "strict": False}) == Grammar("regex", "a", False)


async def test_hostile_grammars_take_no_turn_of_the_loop(house: House) -> None:
    """Each is compiled in a thread: the event loop's own processor time for all of them is that of looking at them."""
    schemas: list[Any] = [{"enum": list(range(i, 9_000 + i))} for i in range(5)]
    schemas += [{"properties": {f"k{i}{j}": {} for i in range(900)}} for j in range(5)]
    texts = [json.dumps(schema) for schema in schemas]
    began = time.thread_time()
    for text in texts:
        await ask(house, Grammar("json_schema", text))
    within((time.thread_time() - began) / len(texts), 0.02)
