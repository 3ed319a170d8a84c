"""Records survive a file, and every kind of bad line is reported."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.record import OUTCOMES, Record, RecordError, read, write

RECORD = Record(
    number=7,
    session="s1",
    scheduled=1.25,
    sent=1.2501,
    token_times=(1.45, 1.49, 1.49),
    ended=1.5,
    outcome="ok",
    reason="",
    prompt_tokens=100,
    output_tokens=3,
    asked_tokens=3,
    cached_tokens=16,
    stages_ms={"queue": 1.5, "prefill": 190.0, "transfer": 8.0, "decode": 40.0},
    prefill_worker="prefill-0",
    decode_worker="decode-1",
    retries=1,
    transport="nixl",
    kv_bytes=4096,
    kv_blocks=7,
    recomputed_tokens=4,
)
COUNTS = ("number", "prompt", "output", "asked", "cached", "retries", "kv_bytes", "kv_blocks", "recomputed")
TEXTS = ("session", "reason", "prefill_worker", "decode_worker", "transport")

microseconds = st.integers(0, 10**10).map(lambda us: us / 1e6)
counts = st.integers(0, 2**63)


@st.composite
def records(draw: st.DrawFn) -> Record:
    sent, *tokens, ended = sorted(draw(st.lists(microseconds, min_size=2, max_size=8)))
    stages = st.dictionaries(st.sampled_from(["queue", "prefill", "a new one"]), st.integers(0, 10**9).map(lambda us: us / 1000))
    numbers: dict[str, Any] = {name: draw(counts) for name in Record.__slots__ if name.endswith("_tokens") or name.startswith("kv_")}
    texts: dict[str, Any] = {name: draw(st.text(max_size=5)) for name in TEXTS}
    return Record(
        number=draw(counts),
        scheduled=draw(microseconds),
        sent=sent,
        token_times=tuple(tokens),
        ended=ended,
        outcome=draw(st.sampled_from(OUTCOMES)),
        stages_ms=draw(stages),
        retries=draw(counts),
        **numbers,
        **texts,
    )


def changed(**fields: Any) -> str:
    """The record's line with some fields changed; None removes a field."""
    told = {**json.loads(RECORD.to_json()), **fields}
    return json.dumps({key: value for key, value in told.items() if value is not None})


def refusal(line: str) -> str:
    with pytest.raises(RecordError) as caught:
        Record.from_json(line)
    return str(caught.value)


@given(records())
def test_a_record_survives_its_encoding(record: Record) -> None:
    line = record.to_json()
    assert "\n" not in line
    assert Record.from_json(line) == record


def test_every_field_of_the_record_is_in_its_line() -> None:
    """Detects two fields under one key, and a field that only the decoder fills in."""
    line = json.loads(RECORD.to_json())
    assert len(line) == len(Record.__slots__)
    for name in Record.__slots__:
        other = replace(RECORD, **{name: _other(getattr(RECORD, name))})
        assert sum(json.loads(other.to_json())[key] != line[key] for key in line) == 1, name


def _other(value: Any) -> Any:
    match value:
        case str():
            return value + "x"
        case dict():
            return {}
        case tuple():
            return ()
        case _:
            return value + 1


def test_times_are_kept_to_the_microsecond() -> None:
    record = replace(RECORD, scheduled=1 / 3, token_times=(4 / 3,), ended=5 / 3, stages_ms={"queue": 1 / 3})
    line = json.loads(record.to_json())
    assert (line["due"], line["token_times"], line["ended"], line["stages_ms"]) == (0.333333, [1.333333], 1.666667, {"queue": 0.333})


def test_a_time_that_is_not_finite_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(RECORD, ended=float("nan")).to_json()


@pytest.mark.parametrize("key", json.loads(RECORD.to_json()))
def test_a_missing_field_is_named(key: str) -> None:
    assert refusal(changed(**{key: None})) == f"{key}: missing"


def test_an_unknown_field_is_refused() -> None:
    assert refusal(changed(ttft=0.2, prio=1)) == "prio, ttft: unknown"


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [-1, 1.0, True, "1", [1]])
def test_a_count_must_be_a_whole_number(key: str, value: Any) -> None:
    assert refusal(changed(**{key: value})).startswith(f"{key}: ")


@pytest.mark.parametrize("key", TEXTS)
def test_a_text_field_must_be_text(key: str) -> None:
    assert refusal(changed(**{key: 1})).startswith(f"{key}: ")


@pytest.mark.parametrize("value", [True, "1", [], float("nan"), float("inf"), 10**400])
def test_a_time_must_be_a_finite_number(value: Any) -> None:
    for key in ("due", "sent", "ended"):
        assert refusal(changed(**{key: value})).startswith(f"{key}: ")
    assert refusal(changed(token_times=[1.45, value])).startswith("token_times[1]: ")
    assert refusal(changed(stages_ms={"queue": value})).startswith("stages_ms.queue: ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"outcome": "good"}, "outcome: 'good' is not one of ok, refused, failed, timeout, cancelled"),
        ({"token_times": 1.45}, "token_times: 1.45 is not a list"),
        ({"token_times": [1.45, 1.44]}, "token_times[1]: 1.44 is before 1.45"),
        ({"token_times": [1.25]}, "token_times[0]: 1.25 is before 1.2501"),
        ({"ended": 1.48}, "ended: 1.48 is before 1.49"),
        ({"token_times": [], "ended": 1.2}, "ended: 1.2 is before 1.2501"),
        ({"stages_ms": []}, "stages_ms: [] is not an object"),
        ({"stages_ms": {"read": -0.1}}, "stages_ms.read: -0.1 is negative"),
    ],
)
def test_the_error_for_an_invalid_field_names_it(fields: dict[str, Any], message: str) -> None:
    assert refusal(changed(**fields)).startswith(message)


def test_a_time_may_be_a_whole_number_and_sent_may_precede_due() -> None:
    record = Record.from_json(changed(due=2, sent=1, token_times=[2, 2], ended=2))
    assert record.token_times == (2.0, 2.0)
    assert isinstance(record.sent, float)


@pytest.mark.parametrize("line", ["", "[1]", "null", "{", "{}}", "[" * 100_000, '{"number": ' + "1" * 5000 + "}"])
def test_a_line_that_is_not_an_object_is_refused(line: str) -> None:
    assert refusal(line).startswith("is no")


@given(st.lists(records(), max_size=5))
def test_records_survive_a_file(tmp_path_factory: pytest.TempPathFactory, run: list[Record]) -> None:
    path = tmp_path_factory.mktemp("run") / "records.jsonl"
    write(path, run)
    file = read(path)
    assert list(file) == run
    assert not file.partial
    assert list(file) == run  # from the beginning again


def test_writing_replaces_the_file_and_a_kill_loses_at_most_one_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("old\n")

    def run() -> Any:
        for number in range(3):
            assert [record.number for record in read(path)] == list(range(number))  # what a kill would leave
            yield replace(RECORD, number=number)

    write(path, run())


def test_a_truncated_file_yields_its_whole_lines_and_is_partial(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    whole = (RECORD.to_json() + "\n").encode()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole + whole[:cut])
        file = read(path)
        complete = cut >= len(whole) - 1  # only the newline is missing: nothing is lost
        assert list(file) == [RECORD] * (1 + complete)
        assert file.partial == (0 < cut < len(whole) - 1), cut


def test_every_reading_checks_anew_whether_the_file_was_truncated(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(RECORD.to_json()[:-1])
    file = read(path)
    assert (list(file), file.partial) == ([], True)
    write(path, [RECORD])
    assert (list(file), file.partial) == ([RECORD], False)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: line[:-20] + b"\n",  # truncated, but not at the end of the file
        lambda line: b"\n",
        lambda line: line.replace(b'"sent"', b'"went"'),
        lambda line: b"\xff\n",
    ],
)
def test_a_bad_line_is_named_after_the_records_before_it_were_read(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "records.jsonl"
    whole = (RECORD.to_json() + "\n").encode()
    path.write_bytes(whole + spoil(whole) + whole)
    records = iter(read(path))
    assert next(records) == RECORD
    with pytest.raises(RecordError, match=r"records\.jsonl:2: "):
        next(records)


@pytest.mark.parametrize("last", [b"no record", changed(outcome="good").encode()])
def test_a_bad_last_line_is_not_mistaken_for_a_truncated_one(tmp_path: Path, last: bytes) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(RECORD.to_json().encode() + b"\n" + last)
    with pytest.raises(RecordError, match=r"records\.jsonl:2: "):
        list(read(path))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read(tmp_path / "records.jsonl"))
