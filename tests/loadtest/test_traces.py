"""The readers of published traces, on samples in the exact formats and on typical defects of such files."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest import trace_lines
from loadtest.trace_formats import FORMATS
from loadtest.traces import Reading, Trace, detect, read
from loadtest.workload import Item, WorkloadError, bound, hit_rate, scale

SHAREGPT = json.dumps(
    [
        {
            "id": "QWJhYvA_0",
            "conversations": [
                {"from": "human", "value": "Summarise this"},
                {"from": "gpt", "value": "Here is a summary"},
                {"from": "human", "value": "Shorter"},
                {"from": "gpt", "value": "ok"},
            ],
        },
        {"id": "i6IyJda_0", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": 'Hello {"[,\\ there'}]},
    ]
)
MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1024, "output_length": 71, "hash_ids": [0, 1]}
{"timestamp": 5999, "input_length": 898, "output_length": 26, "hash_ids": [0, 3]}
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,API log
"""
BURSTGPT_3 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log
19440161.0,,2,ChatGPT,36,29,65,API log
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00+00:00,2399,6
2024-05-10 02:00:01.5+02:00,76,15
"""
PLAIN = """\
{"prompt_tokens": 5, "output_tokens": 7, "at": 1.5}
{"tokens": [1, 2, 3], "output_tokens": 2, "at": 0.5, "session": "a"}
{"prompt_tokens": 4, "output_tokens": 1, "session": "a", "think_s": 2}
"""
SAMPLES = {"sharegpt": SHAREGPT, "mooncake": MOONCAKE, "burstgpt": BURSTGPT, "azure": AZURE_2023, "plain": PLAIN}


def letters(text: str) -> list[int]:
    text.encode()  # like a real tokenizer, refuses half an emoji
    return [100 + ord(char) % 1000 for char in text]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Trace]:
    def load(content: str | bytes, **options: Any) -> Trace:
        path = tmp_path / "trace"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        given: dict[str, Any] = {"first_id": 100, "vocab": 30_000, "encode": letters} | options
        return read(path, Reading(**given))

    return load


def lengths(trace: Trace) -> list[tuple[float | None, int, int]]:
    return [(item.at, len(item.tokens), item.output_tokens) for item in trace.items]


# The formats


def test_sharegpt_conversations_are_sessions(load: Callable[..., Trace]) -> None:
    trace = load(SHAREGPT)
    assert trace.items == (
        Item(tuple(letters("Summarise this")), len("Here is a summary"), "c0"),
        Item(tuple(letters("Shorter")), 2, "c0"),
        Item(tuple(letters("Hi")), len('Hello {"[,\\ there')),
    )
    assert (trace.skipped, trace.format) == ({}, "sharegpt")


def test_sharegpt_messages_need_not_alternate(load: Callable[..., Trace]) -> None:
    def talk(*messages: tuple[str, str]) -> dict[str, Any]:
        return {"conversations": [{"from": who, "value": text} for who, text in messages]}

    trace = load(
        json.dumps(
            [
                talk(
                    ("gpt", "early"),
                    ("system", "S"),
                    ("human", "a"),
                    ("user", "b"),
                    ("gpt", "xy"),
                    ("chatgpt", "z"),
                    ("human", "no answer"),
                ),
                talk(("human", "no answer")),
                talk(("system", "S"), ("gpt", "unasked")),
                talk(),
                talk(("human", "a"), ("gpt", ""), ("human", ""), ("gpt", "to nothing"), ("human", "cd"), ("assistant", "e")),
            ]
        )
    )
    assert [(item.tokens, item.output_tokens) for item in trace.items] == [(tuple(letters("Sab")), 3), (tuple(letters("cd")), 1)]
    assert trace.skipped == {"no question with an answer": 3, "no output tokens": 1, "no prompt tokens": 1}


def test_every_conversation_is_a_separate_session(load: Callable[..., Trace]) -> None:
    trace = load(json.dumps(json.loads(SHAREGPT)[:1] * 2))  # ids repeat in published files
    assert [item.session for item in trace.items] == ["c0", "c0", "c1", "c1"]


def test_sharegpt_may_be_json_lines_and_contain_half_an_emoji(load: Callable[..., Trace]) -> None:
    line = '{"conversations": [{"from": "human", "value": "a\\ud83d"}, {"from": "gpt", "value": "b"}]}'
    assert [len(item.tokens) for item in load(f"{line}\n{line}\n").items] == [2, 2]


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
@pytest.mark.parametrize("indent", [None, 30])
def test_the_chunk_size_does_not_change_what_is_read_from_sharegpt(
    load: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    conversations = json.loads(SHAREGPT)
    conversations[0]["note"] = [None, True, -1.25e-7, 12345678901234567890, "é\u2028😀\\"]
    content = json.dumps(conversations, indent=indent) + "\n"
    whole = load(content)
    raw = json.dumps(conversations, indent=indent, ensure_ascii=False).encode("utf-8-sig")
    monkeypatch.setattr(trace_lines, "CHUNK", chunk)
    assert load(content) == load(raw) == whole
    assert len(whole.items) == 3


def test_sharegpt_stops_reading_at_the_limit(load: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_lines, "CHUNK", 64)
    assert len(load(SHAREGPT.replace(', {"id": "i6', "x" * 5000), limit=2).items) == 2
    with pytest.raises(WorkloadError, match="not JSON"):
        load(SHAREGPT.replace(', {"id": "i6', "x" * 5000), limit=3)


def test_mooncake_blocks_with_the_same_id_have_the_same_tokens(load: Callable[..., Trace]) -> None:
    trace = load(MOONCAKE)
    first, second, third = (item.tokens for item in trace.items)
    assert lengths(trace) == [(0.0, 1100, 500), (3.0, 1024, 71), (5.999, 898, 26)]
    assert first[:1024] == second and first[:512] == third[:512] and first[512:898] != third[512:]
    assert len({first[:512], first[512:1024], first[1024:]}) == 3
    assert load(MOONCAKE) == trace
    assert load(MOONCAKE.splitlines()[2]).items[0].tokens == third  # the tokens depend on the id, not on what was read before
    assert load(MOONCAKE, seed=1).items != trace.items


def test_mooncake_sharing_survives_scaling(load: Callable[..., Trace]) -> None:
    trace, small = load(MOONCAKE), load(MOONCAKE, factor=1 / 64)
    assert small.items == tuple(scale(trace.items, 1 / 64))
    assert hit_rate(small.items) == pytest.approx(hit_rate(trace.items), abs=0.02)
    assert hit_rate(trace.items) == pytest.approx((1024 + 512) / (1100 + 1024 + 898))


def test_mooncake_ids_may_be_missing_or_have_another_block_size(load: Callable[..., Trace]) -> None:
    line = '{"timestamp": 0, "input_length": 100, "output_length": 5}\n'
    assert hit_rate(load(line * 3).items) == 0
    ids = '{"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [7, 8]}'
    assert len(load(ids, block=64).items[0].tokens) == 100
    with pytest.raises(WorkloadError, match=r"line 1: hash_ids: not one for each block of 512 tokens: '2 for 100 tokens'"):
        load(ids)


def test_burstgpt_is_read_in_the_form_of_each_release(load: Callable[..., Trace]) -> None:
    assert lengths(load(BURSTGPT)) == [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]
    assert lengths(load(BURSTGPT_3)) == [(0.0, 906, 446), (51.0, 36, 29)]
    assert {item.session for item in load(BURSTGPT_3).items} == {""}


def test_requests_that_failed_in_the_trace_are_skipped_and_counted(load: Callable[..., Trace]) -> None:
    trace = load(BURSTGPT + "120,GPT-4,417,0,417,API log\n121,GPT-4,0,5,5,API log\n122,GPT-4,0,0,0,API log\n")
    assert len(trace.items) == 3
    assert trace.skipped == {"no output tokens": 1, "no prompt tokens": 2}


def test_azure_times_are_read_to_100_nanoseconds(load: Callable[..., Trace]) -> None:
    trace = load(AZURE_2023)
    assert [item.at for item in trace.items] == pytest.approx([0.0, 4.3145790, 4.5418770], abs=2e-8)
    assert [(n, m) for _, n, m in lengths(trace)] == [(374, 44), (396, 109), (879, 55)]


def test_azure_times_may_have_offsets_lack_fractions_and_be_unsorted(load: Callable[..., Trace]) -> None:
    trace = load(AZURE_2024)
    assert [item.at for item in trace.items] == pytest.approx([0.0, 0.00993, 1.5], abs=2e-8)
    assert [len(item.tokens) for item in trace.items] == [2399, 2162, 76]


def test_azure_times_may_span_midnight_and_a_leap_day(load: Callable[..., Trace]) -> None:
    rows = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-02-28 23:59:59.0 , 1 ,1\n2024-02-29T00:00:00Z,1,1\n2024-03-01 00:00:00-01:00,1,1\n"
    )
    assert [item.at for item in load(rows).items] == [0.0, 1.0, 1.0 + 86400 + 3600]


def test_plain_items_are_read_as_written(load: Callable[..., Trace]) -> None:
    trace = load(PLAIN)
    assert trace.items[0] == Item((1, 2, 3), 2, "a", 0.5)
    assert [(item.session, item.at, item.think_s) for item in trace.items] == [("a", 0.5, 0), ("a", None, 2), ("", 1.5, 0)]
    assert [len(item.tokens) for item in trace.items] == [3, 4, 5]


def test_plain_items_without_times_keep_their_order(load: Callable[..., Trace]) -> None:
    trace = load("".join(f'{{"prompt_tokens": {n}, "output_tokens": 1, "session": {n % 2}, "at": null}}\n' for n in (5, 2, 7, 4)))
    assert [(len(item.tokens), item.session, item.at) for item in trace.items] == [
        (5, "1", None),
        (2, "0", None),
        (7, "1", None),
        (4, "0", None),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt_tokens": 5, "output_tokens": 0, "at": 9}', "output_tokens: less than 1: 0"),
        ('{"prompt_tokens": 0, "output_tokens": 1, "at": 9}', "prompt_tokens: less than 1: 0"),
        ('{"prompt_tokens": 5, "at": 9}', "output_tokens: is missing"),
        ('{"prompt_tokens": 5, "tokens": [1], "output_tokens": 1, "at": 9}', "tokens: either"),
        ('{"output_tokens": 1, "at": 9}', "tokens: either"),
        ('{"tokens": [], "output_tokens": 1, "at": 9}', "tokens: not a list"),
        ('{"tokens": [1, 30000], "output_tokens": 1, "at": 9}', "tokens: not a token id below 30000: 30000"),
        ('{"tokens": [-1], "output_tokens": 1, "at": 9}', "tokens: not a token id"),
        ('{"tokens": [true], "output_tokens": 1, "at": 9}', "tokens: not a token id"),
        ('{"prompt_tokens": 5, "output_tokens": 1}', "at: is missing, but"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "at": 0.25, "session": "a"}', "at: earlier than the previous turn: 0.25"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "at": 9, "sesion": "a"}', "sesion: unknown"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "at": 9, "session": ["a"]}', "session: not a string"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "at": 9, "think_s": -1}', "think_s: less than 0"),
    ],
)
def test_the_error_for_a_wrong_plain_line_names_its_field(load: Callable[..., Trace], line: str, problem: str) -> None:
    with pytest.raises(WorkloadError, match=f"trace, line 4: {problem}"):
        load(PLAIN + line)
    trace = load(PLAIN + line + "\n" + '{"prompt_tokens": 9, "output_tokens": 1, "at": 3}', lenient=True)
    assert [len(item.tokens) for item in trace.items] == [3, 4, 5, 9]
    assert sum(trace.skipped.values()) == 1


def test_times_for_only_some_plain_items_are_refused(load: Callable[..., Trace]) -> None:
    with pytest.raises(WorkloadError, match="line 2: at: given, but earlier requests lack it"):
        load('{"prompt_tokens": 5, "output_tokens": 1}\n{"prompt_tokens": 5, "output_tokens": 1, "at": 1}')


# Every format


@pytest.mark.parametrize("format", FORMATS)
def test_the_format_is_detected_from_the_content(load: Callable[..., Trace], tmp_path: Path, format: str) -> None:
    assert load(SAMPLES[format]).format == format
    assert detect(tmp_path / "trace") == format
    assert load(SAMPLES[format], format=format) == load("\n \r\n" + SAMPLES[format])


@pytest.mark.parametrize("format", FORMATS)
def test_line_endings_and_byte_order_marks_change_nothing(load: Callable[..., Trace], format: str) -> None:
    whole = load(SAMPLES[format])
    assert load(SAMPLES[format].replace("\n", "\r\n")) == whole
    assert load(b"\xef\xbb\xbf" + SAMPLES[format].encode()) == whole
    assert load(SAMPLES[format].replace("\n", "\n\n")) == whole
    assert load(SAMPLES[format].rstrip("\n")) == whole


@pytest.mark.parametrize("format", FORMATS)
def test_limit_scale_and_window_apply_to_every_format(load: Callable[..., Trace], format: str) -> None:
    whole = load(SAMPLES[format])
    assert [len(load(SAMPLES[format], limit=n).items) for n in (1, 2, 3, 99)] == [1, 2, 3, 3]
    assert load(SAMPLES[format], factor=0.5).items == tuple(scale(whole.items, 0.5))
    longest = max(len(item.tokens) + item.output_tokens for item in whole.items)
    window = load(SAMPLES[format], max_tokens=longest - 1)
    kept = bound(whole.items, longest - 1)
    assert [(len(item.tokens), item.output_tokens) for item in window.items] == [(len(i.tokens), i.output_tokens) for i in kept.items]
    assert window.skipped == {"more than max_tokens": kept.dropped} and kept.dropped > 0


def test_requests_beyond_the_window_do_not_count_towards_the_limit(load: Callable[..., Trace]) -> None:
    trace = load(BURSTGPT, max_tokens=1000, limit=2)
    assert lengths(trace) == [(0.0, 472, 18), (113.0, 417, 276)]
    assert lengths(load(BURSTGPT, max_tokens=245, factor=0.5)) == [(0.0, 236, 9)]


def test_prompts_drawn_for_lengths_depend_on_the_seed_and_share_nothing(load: Callable[..., Trace]) -> None:
    for sample in (BURSTGPT, AZURE_2023):
        trace = load(sample, first_id=1000, vocab=1500)
        assert all(1000 <= token < 1500 for item in trace.items for token in item.tokens)
        assert hit_rate(trace.items) < 0.01
        assert load(sample) == load(sample) != load(sample, seed=1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"\xef\xbb\xbf \r\n\n", "the file is empty"),
        (b"hello\n", "unknown format: 'hello'"),
        (b'{"a": 1}\n', "unknown format"),
        (PLAIN.encode("utf-16"), "unknown format"),
        (b"[]", "no request in it"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n", "no request in it"),
        (b"Timestamp,Request tokens,Response tokens\n1,5,0\n", r"no request in it \(1 skipped: no output tokens\)"),
    ],
)
def test_a_file_without_requests_is_refused(load: Callable[..., Trace], content: bytes, problem: str) -> None:
    for lenient in (False, True):
        with pytest.raises(WorkloadError, match=f"trace: {problem}"):
            load(content, lenient=lenient)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(WorkloadError, match=str(path)):
            read(path, Reading(first_id=0, vocab=10))
        with pytest.raises(WorkloadError, match=str(path)):
            read(path, Reading(first_id=0, vocab=10, format="azure"))


MALFORMED = [
    (MOONCAKE, "{", "not JSON: '{'"),
    (MOONCAKE, "[1]", r"not a JSON object: \[1\]"),
    (MOONCAKE, "[" * 100_000, "not JSON"),
    (MOONCAKE, '{"timestamp": ' + "9" * 5000 + "}", "not JSON"),
    (MOONCAKE, '{"timestamp": NaN, "input_length": 5, "output_length": 5}', "timestamp: not a plausible number: nan"),
    (MOONCAKE, '{"timestamp": -1, "input_length": 5, "output_length": 5}', "timestamp: less than 0: -1"),
    (MOONCAKE, '{"timestamp": 1, "input_length": -5, "output_length": 5}', "input_length: less than 0: -5"),
    (MOONCAKE, '{"timestamp": 1, "input_length": true, "output_length": 5}', "input_length: not a number: True"),
    (MOONCAKE, '{"timestamp": 1, "input_length": 5.5, "output_length": 5}', "input_length: not a whole number: 5.5"),
    (MOONCAKE, '{"timestamp": 1, "input_length": 5, "output_length": 1e12}', "output_length: more than 1048576"),
    (MOONCAKE, '{"timestamp": 1, "input_length": 5}', "output_length: is missing"),
    (MOONCAKE, '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1, 2]}', "hash_ids: not one for each block of 512"),
    (MOONCAKE, '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": ["1"]}', "hash_ids: not a list of whole numbers"),
    (BURSTGPT, "119,GPT-4,x,5,5,API log", "Request tokens: not a number: 'x'"),
    (BURSTGPT, "119,GPT-4", "Request tokens: is missing"),
    (BURSTGPT, "119,GPT-4,,5,5,API log", "Request tokens: not a number: ''"),
    (BURSTGPT, "119,GPT-4,-3,5,2,API log", "Request tokens: less than 0: '-3'"),
    (BURSTGPT, "119,GPT-4,1_0,5,2,API log", "Request tokens: not a number: '1_0'"),
    (BURSTGPT, "inf,GPT-4,3,5,2,API log", "Timestamp: not a plausible number: 'inf'"),
    (BURSTGPT, "119,GPT-4,3,99999999999999999999,2,API log", "Response tokens: not a plausible number"),
    (BURSTGPT, '119,"GPT-4,3,5,2,API log', "not CSV"),
    (AZURE_2023, "2023-11-16,5,5", "TIMESTAMP: not a time such as 2023-11-16 18:15:46.6805900: '2023-11-16'"),
    (AZURE_2023, "2023-13-16 18:15:46.1,5,5", "TIMESTAMP: not a time"),
    (AZURE_2023, "2023-11-16 18:15:46.1+99:00,5,5", "TIMESTAMP: not a time"),
    (AZURE_2023, ",5,5", "TIMESTAMP: is missing"),
    (AZURE_2023, AZURE_2023.splitlines()[0], "TIMESTAMP: not a time"),
    (AZURE_2023, b"2023-11-16 18:15:46\xff,5,5", r"not UTF-8: b'\\xff"),
    (PLAIN, b'{"prompt_tokens": 5, "output_tokens": 1, "session": "\xe9"}', "not UTF-8"),
]


@pytest.mark.parametrize(("sample", "line", "problem"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_line_is_an_error_or_else_counted(load: Callable[..., Trace], sample: str, line: str | bytes, problem: str) -> None:
    raw = line.encode() if isinstance(line, str) else line
    before, last = sample.encode().rstrip(b"\n").rsplit(b"\n", 1)
    number = before.count(b"\n") + 2
    content = b"\n".join([before, raw, last])
    with pytest.raises(WorkloadError, match=f"trace, line {number}: {problem}") as caught:
        load(content)
    assert len(str(caught.value)) < 400
    trace, whole = load(content, lenient=True), load(sample)
    assert lengths(trace) == lengths(whole)
    assert list(trace.skipped.values()) == [1]
    assert all(len(reason) < 150 for reason in trace.skipped)


def test_skipped_lines_are_counted_by_kind_of_reason(load: Callable[..., Trace]) -> None:
    trace = load(BURSTGPT + "1,m,x,1\n2,m,y,1\n3,m,-1,1\n", lenient=True)
    assert trace.skipped == {"Request tokens: not a number": 2, "Request tokens: less than 0": 1}


def test_counts_written_as_floats_are_accepted(load: Callable[..., Trace]) -> None:
    assert lengths(load("Timestamp,Request tokens,Response tokens\n0, 906.0 ,4.0\n")) == [(0.0, 906, 4)]


def test_unsorted_times_are_sorted_and_equal_ones_keep_their_order(load: Callable[..., Trace]) -> None:
    rows = "Timestamp,Request tokens,Response tokens\n30,3,1\n10,1,1\n30,4,1\n20,2,1\n"
    assert lengths(load(rows)) == [(0.0, 1, 1), (10.0, 2, 1), (20.0, 3, 1), (20.0, 4, 1)]


def test_the_error_for_a_missing_column_names_it(load: Callable[..., Trace]) -> None:
    with pytest.raises(WorkloadError, match="line 1: GeneratedTokens: no such column"):
        load("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,5\n")
    with pytest.raises(WorkloadError, match="1 skipped: GeneratedTokens: no such column"):
        load("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,5\n", lenient=True)


def test_columns_are_found_by_name(load: Callable[..., Trace]) -> None:
    assert lengths(load('"Response Tokens",x,"request tokens", timestamp \n7,"a,b",5,1\n')) == [(0.0, 5, 7)]


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        ("5", "not a JSON object: 5"),
        ("{}", "conversations: is missing"),
        ('{"conversations": {}}', "conversations: not a list"),
        ('{"conversations": ["hi"]}', "conversations: a message is not a JSON object"),
        ('{"conversations": [{"from": "tool", "value": "x"}]}', "from: unknown role: 'tool'"),
        ('{"conversations": [{"from": ["human"], "value": "x"}]}', "from: unknown role"),
        ('{"conversations": [{"from": "human", "value": 3}]}', "value: not a string: 3"),
    ],
)
def test_a_malformed_conversation_is_an_error_or_else_counted(load: Callable[..., Trace], element: str, problem: str) -> None:
    content = SHAREGPT.replace(', {"id": "i6', f',\n\n{element},\n{{"id": "i6')
    with pytest.raises(WorkloadError, match=f"trace, line 3: {problem}"):
        load(content)
    trace = load(content, lenient=True)
    assert [item.tokens for item in trace.items] == [item.tokens for item in load(SHAREGPT).items]
    assert list(trace.skipped.values()) == [1]


@pytest.mark.parametrize("chunk", [3, 1 << 20])
@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        ("", "line 2: the file ends inside the JSON"),
        (',\n{"conversations": [{"from": "hum', "line 3: the file ends inside the JSON"),
        (',\n{"conversations":\n\nnonsense, and a little more of it}]', "line 5: not JSON; the rest of the file is left out: 'nonsense"),
        (",\n\nnonsense from here on", "line 4: not JSON; the rest of the file is left out: 'nonsense"),
        ('\n{"conversations": []}]', "line 3: not JSON"),
        (",\n]", "line 3: not JSON"),
        (b",\n\n\xff]", "line 4: not UTF-8; the rest"),
    ],
)
def test_the_error_for_broken_json_says_where_and_earlier_items_are_kept(
    load: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch, tail: str | bytes, problem: str, chunk: int
) -> None:
    monkeypatch.setattr(trace_lines, "CHUNK", chunk)
    content = ("\n" + SHAREGPT[:-1]).encode() + (tail.encode() if isinstance(tail, str) else tail)
    with pytest.raises(WorkloadError, match=f"trace, {problem}"):
        load(content)
    trace = load(content, lenient=True)
    assert trace.items == load(SHAREGPT).items
    assert list(trace.skipped.values()) == [1]


def test_a_line_that_is_too_long_is_refused(load: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_lines, "MAX_LINE", 200)
    with pytest.raises(WorkloadError, match="trace, line 4: longer than 200 bytes"):
        load(MOONCAKE + " " * 300)
    assert len(load(MOONCAKE + " " * 300, lenient=True).items) == 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"format": "csv"}, "format: 'csv' is not one of auto, sharegpt"),
        ({"limit": 0}, "limit: 0"),
        ({"block": 0}, "block: 0"),
        ({"factor": 0.0}, "scale: 0.0"),
        ({"max_tokens": 1}, "max_tokens: 1"),
        ({"vocab": 50}, "vocab: "),
        ({"encode": None}, r"tokenizer: a sharegpt file holds text.*--tokenizer"),
    ],
)
def test_the_error_for_an_invalid_option_names_it(load: Callable[..., Trace], options: dict[str, Any], problem: str) -> None:
    with pytest.raises(WorkloadError, match=f"^{problem}"):
        load(SHAREGPT, **options)


def test_requests_within_the_time_limit_are_kept_wherever_they_are(load: Callable[..., Trace]) -> None:
    rows = [(50, 7), (10, 1), (90, 9), (19.9, 2), (0.5, 3), (10.4, 4), (10.5, 5)]
    content = "Timestamp,Request tokens,Response tokens\n" + "".join(f"{at},{n},1\n" for at, n in rows)
    trace = load(content, within_s=10.0)
    assert [(item.at, len(item.tokens)) for item in trace.items] == [(0.0, 3), (9.5, 1), (pytest.approx(9.9), 4)]
    assert load(content, within_s=1000.0).items == load(content).items


def test_turns_without_a_time_stay_with_their_session(load: Callable[..., Trace]) -> None:
    content = "".join(
        f'{{"prompt_tokens": {n}, "output_tokens": 1, "session": "{session}"{at}}}\n'
        for n, session, at in ((1, "late", ', "at": 50'), (2, "early", ', "at": 1'), (3, "late", ""), (4, "early", ""))
    )
    assert [len(item.tokens) for item in load(content, within_s=10.0).items] == [2, 4]


def test_reading_ends_after_the_given_number_of_openings(load: Callable[..., Trace]) -> None:
    content = "".join(f'{{"prompt_tokens": {n}, "output_tokens": 1, "session": "{n // 2}"}}\n' for n in range(1, 20))
    trace = load(content + "no JSON\n", openings=3)
    assert [len(item.tokens) for item in trace.items] == [1, 2, 3, 4, 5], "the rest of the file is not read"


def test_a_long_file_is_read_in_bounded_memory_and_with_progress(tmp_path: Path) -> None:
    """Tokens are drawn only for the requests that are kept. For all of them they would be a thousand tokens of 8 bytes per row."""
    rows, path = 200_000, tmp_path / "long.csv"
    told: list[int] = []
    with path.open("w") as file:
        file.write("Timestamp,Request tokens,Response tokens\n")
        file.writelines(f"{i / 10},1000,10\n" for i in range(rows))
    tracemalloc.start()
    try:
        trace = read(path, Reading(first_id=10, vocab=256, within_s=20.0), told.append)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trace.items) == 200 and told == [50_000, 100_000, 150_000, 200_000]
    assert peak < 200 * 1000 * 8 * 3, f"{peak >> 20} MiB for 200 requests of {rows} rows"
