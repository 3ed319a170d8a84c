"""A stream that is cut after any of its events continues at another router, byte for byte, with nothing but the id of that event."""

import json
from typing import Any

import pytest
from http_door import CHAT, COMPLETION, HELLO, House, Script, toy_tokenizer

from router.http.errors import HttpError
from router.http.event_id import MAX_CHARACTERS, EventId
from router.tokenizer import Tokenizer

TEXT = "ab🙂c one tw".encode()
ASK: dict[str, Any] = {"stream": True, "stream_options": {"include_event_ids": True}}
STREAM = {**HELLO, **ASK}
WHOLE: dict[str, Any] = {"stop": "two", "stream": True, "return_token_ids": True, "logprobs": 1}
BODIES = {
    CHAT: {
        **HELLO,
        **WHOLE,
        "logprobs": True,
        "top_logprobs": 1,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_event_ids": True},
    },
    COMPLETION: {"prompt": "hello", **WHOLE, "max_tokens": 50, "stream_options": {"include_usage": True, "include_event_ids": True}},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


def router(tokenizer: Tokenizer, ids: bytes = TEXT) -> House:
    return House(tokenizer, Script(ids))


def clean(events: list[tuple[str, str]]) -> list[tuple[Any, str]]:
    """Without what is drawn for each HTTP request: its id and the time."""
    told = [(json.loads(data) if data != "[DONE]" else data, id_) for data, id_ in events]
    return [({**data, "id": "", "created": 0} if isinstance(data, dict) else data, id_) for data, id_ in told]


@pytest.mark.parametrize("joins", [1, 3])
@pytest.mark.parametrize("sends", ["nothing", "all ids", "some ids"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_cut_after_any_event_continues_as_if_nothing_had_happened(
    tokenizer: Tokenizer, path: str, sends: str, joins: int
) -> None:
    """`joins`: tokens that are ready together at the second router. Each is still an event."""
    body = BODIES[path]
    first = await router(tokenizer).post(path, body)
    whole = clean(first.events)
    assert first.status == 200 and len({id_ for _, id_ in whole}) == len(whole) and not whole[-1][1]
    assert "".join(map(str, whole)).count("token_ids") == len(TEXT)
    for cut in range(1, len(whole)):
        got, last = [], whole[cut - 1][1]
        for data, _ in whole[:cut]:
            got += [id_ for choice in data["choices"] for id_ in choice.get("token_ids", ())]
        known = {"nothing": [], "all ids": got, "some ids": got[: len(got) // 2]}[sends]
        house = router(tokenizer)
        house.script.joins = joins
        rest = await house.post(path, {**body, "output_so_far": known} if known else body, headers={"Last-Event-ID": last})
        assert rest.status == 200 and clean(rest.events) == whole[cut:], f"cut after {cut} events"
        assert house.script.said == (len(TEXT) - len(known) if known != list(TEXT) else 0)
        house.check()


async def test_ids_have_the_same_size_whatever_the_length_of_the_stream(tokenizer: Tokenizer) -> None:
    answer = await router(tokenizer, b"x" * 2000).post(CHAT, STREAM)
    sizes = [len(id_) for _, id_ in answer.events[:-1]]
    assert len(sizes) > 2000 and min(sizes) > 0 and max(sizes) - min(sizes) <= 3 and max(sizes) < 200


async def test_an_answer_that_cannot_be_computed_again_is_refused(tokenizer: Tokenizer) -> None:
    """Negative control of the digest: the second router computes other tokens, or fewer of them."""
    body = STREAM
    events = (await router(tokenizer, b"abcdef").post(CHAT, body)).events
    for other in (b"abXdef", b"abc"):
        for way, known in (("nothing", []), ("ids", list(b"ab"))):
            answer = await router(tokenizer, other).post(
                CHAT, {**body, "output_so_far": known} if known else body, headers={"last-event-id": events[5][1]}
            )
            assert (answer.status, answer.error["code"]) == (503, "retries_spent"), way


async def test_an_output_that_was_not_streamed_is_refused(tokenizer: Tokenizer) -> None:
    body = STREAM
    events = (await router(tokenizer, b"abcdef").post(CHAT, body)).events
    for known, says in ((b"abX", "other ids"), (b"abcd", "more than the events")):
        answer = await router(tokenizer, b"abcdef").post(
            CHAT, {**body, "output_so_far": list(known)}, headers={"last-event-id": events[3][1]}
        )
        assert (answer.status, answer.error["param"]) == (400, "output_so_far") and says in answer.error["message"]


@pytest.mark.parametrize(
    "header", ["", "x", "1", "1.2.3.4.5", "x" * (MAX_CHARACTERS + 1), "1.abcdefghijkl.1.1.a", "9" * 10 + ".abcdefghijkl.1.1.abcd", "é"]
)
async def test_a_header_that_is_no_id_is_refused_by_name(tokenizer: Tokenizer, header: str) -> None:
    house = router(tokenizer)
    answer = await house.post(CHAT, {**HELLO, "stream": True}, headers={"last-event-id": header})
    assert (answer.status, answer.error["param"]) == (400, "last-event-id") and not house.script.begun
    if len(header) > MAX_CHARACTERS:
        assert str(MAX_CHARACTERS) in answer.error["message"]
    assert (await house.post(CHAT, HELLO, headers={"last-event-id": header})).status == 200, "a whole answer has no events"


async def test_a_receipt_for_another_body_is_refused(tokenizer: Tokenizer) -> None:
    body = STREAM
    (_, id_), *_ = (await router(tokenizer).post(CHAT, body)).events
    other = {"messages": [{"role": "user", "content": "hullo"}], "stream": True}
    answer = await router(tokenizer).post(CHAT, other, headers={"last-event-id": id_})
    assert (answer.status, answer.error["param"]) == (400, "last-event-id") and "another prompt" in answer.error["message"]


async def test_the_request_keeps_the_id_that_it_began_with(tokenizer: Tokenizer) -> None:
    body = STREAM
    for chosen in ({}, {"x-request-id": "mine"}):
        first = await router(tokenizer).post(CHAT, body, headers=chosen)
        house = router(tokenizer)
        house.service._draws = house.service._draws.__class__(house.service._draws.seed, lambda: "drawn-anew")
        await house.post(CHAT, body, headers={**chosen, "last-event-id": first.events[2][1]})
        assert house.script.begun[0].id == first.headers["x-request-id"]


async def test_a_stream_of_several_choices_cannot_be_resumed(tokenizer: Tokenizer) -> None:
    one = await router(tokenizer).post(CHAT, STREAM)
    plain = {**HELLO, "stream": True, "n": 2}
    answer = await router(tokenizer).post(CHAT, plain, headers={"last-event-id": one.events[0][1]})
    assert (answer.status, answer.error["param"]) == (400, "last-event-id")
    for body, headers, param in (
        ({**STREAM, "n": 2}, {}, "stream_options.include_event_ids"),
        (plain, {"X-Event-Ids": "true"}, "x-event-ids"),
    ):
        house = router(tokenizer)
        answer = await house.post(CHAT, body, headers=headers)
        assert (answer.status, answer.error["param"]) == (400, param) and not house.script.begun


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_asks_for_no_ids_gets_data_and_nothing_else(tokenizer: Tokenizer, n: int) -> None:
    """Many clients take every line, or every chunk, for data."""
    for more in ({}, {"stream_options": {"include_usage": True}}, {"stream_options": {"include_event_ids": False}}):
        answer = await router(tokenizer).post(CHAT, {**HELLO, "stream": True, "n": n, **more}, headers={"x-event-ids": "false"})
        lines = answer.body.decode().split("\n")
        assert answer.status == 200 and lines.pop() == "" and all(line.startswith("data: ") for line in lines[::2]) and not any(lines[1::2])


async def test_ids_are_asked_for_in_the_body_or_in_a_header_and_a_resumed_stream_has_them(tokenizer: Tokenizer) -> None:
    plain = {**HELLO, "stream": True}
    asked = await router(tokenizer).post(CHAT, STREAM)
    headed = await router(tokenizer).post(CHAT, plain, headers={"X-Event-Ids": "true"})
    # Two requests: their receipts expire at different seconds, so that only the chunks are equal.
    assert [data for data, _ in clean(headed.events)] == [data for data, _ in clean(asked.events)]
    assert all(id_ for answer in (asked, headed) for _, id_ in answer.events[:-1])
    rest = await router(tokenizer).post(CHAT, plain, headers={"last-event-id": asked.events[2][1]})
    assert clean(rest.events) == clean(asked.events)[3:]


@pytest.mark.parametrize("value", ["", "1", "yes", "True"])
async def test_another_value_of_the_header_is_refused_by_name(tokenizer: Tokenizer, value: str) -> None:
    house = router(tokenizer)
    answer = await house.post(CHAT, {**HELLO, "stream": True}, headers={"x-event-ids": value})
    assert (answer.status, answer.error["param"]) == (400, "x-event-ids") and not house.script.begun


@pytest.mark.parametrize("body", [{"output_so_far": [97]}, {"output_so_far": [97], "stream": True, "n": 2}])
async def test_an_output_so_far_needs_a_stream_of_one_choice(tokenizer: Tokenizer, body: dict[str, Any]) -> None:
    answer = await router(tokenizer).post(CHAT, {**HELLO, **body})
    assert (answer.status, answer.error["param"]) == (400, "output_so_far")


async def test_an_output_so_far_without_an_id_is_continued(tokenizer: Tokenizer) -> None:
    body = {**HELLO, "stream": True, "output_so_far": list(TEXT[:4]), "max_tokens": 100}
    house = router(tokenizer)
    answer = await house.post(CHAT, body)
    assert house.script.begun[0].resumed == 4 and answer.chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    bad = await router(tokenizer).post(CHAT, {**body, "output_so_far": [1, 257]})
    assert (bad.status, bad.error["param"]) == (400, "output_so_far[1]")


@pytest.mark.parametrize("id_", [-1, 257, 1 << 32, 1 << 70])
async def test_an_id_outside_the_vocabulary_is_refused_by_name(tokenizer: Tokenizer, id_: int) -> None:
    body = STREAM
    events = (await router(tokenizer).post(CHAT, body)).events
    answer = await router(tokenizer).post(CHAT, {**body, "output_so_far": [97, id_]}, headers={"last-event-id": events[4][1]})
    assert (answer.status, answer.error["param"]) == (400, "output_so_far[1]")


async def test_a_whole_answer_names_its_token_ids_if_asked(tokenizer: Tokenizer) -> None:
    (choice,) = (await router(tokenizer).post(CHAT, {**HELLO, "return_token_ids": True})).json["choices"]
    assert choice["token_ids"] == list(TEXT)
    assert "token_ids" not in (await router(tokenizer).post(CHAT)).json["choices"][0]


def test_an_id_is_read_as_it_was_written() -> None:
    with pytest.raises(HttpError):
        EventId.parse("1.abcdefghijkl.1.1.")
    assert EventId.parse("7.abcdefghijkl.18446744073709551615.256.YWJj") == EventId(7, "abcdefghijkl", (1 << 64) - 1, 256, b"abc")
