"""Lists of the requests that have ended: which of them, in which order, and how far."""

from dataclasses import replace
from typing import Any

import pytest

from baton.cluster.errors import BatonError, Reason
from router.journal import Record
from router.listing import MOST_LISTED, VALUES, Query, choose
from router.request import Failure, Lap, Stopwatch, Trace
from router.slo import RequestTimes


def record(name: str, at: float = 0.0, outcome: str = "ok", tokens: int = 1, ttft: float | None = 0.5, **stages: float) -> Record:
    spent = {"queue": 0.0, "prefill": 0.0, "transfer": 0.0, "decode": 0.0, **stages}
    times = RequestTimes(spent, sum(spent.values()), ttft)
    return Record(name, at, outcome, "stop", 3, tokens, times, Trace(Stopwatch(lambda: 0.0)), "", None)


KEPT = [
    record("d", 4.0, tokens=9, queue=0.1, prefill=0.2, decode=1.0),
    record("c", 3.0, "failed", ttft=None, queue=9.0),
    record("b", 2.0, tokens=20, ttft=0.9, queue=0.1, prefill=0.8, transfer=0.1, decode=2.0),
    record("a", 1.0, "cancelled", ttft=0.1, queue=0.2, decode=0.5),
]  # newest first, as the journal lists them


def names(**query: Any) -> str:
    listed, _ = choose(KEPT, Query(limit=9, **query))
    return "".join(one.record.request_id for one in listed)


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("age", "dcba"),
        ("total", "cbda"),
        ("ttft", "bdac"),  # the one without a first token comes last
        ("queue", "cadb"),  # equals stay in the order of their age
        ("prefill", "bdca"),
        ("transfer", "bdca"),
        ("decode", "bdac"),
        ("tokens", "bdca"),
    ],
)
def test_a_list_is_sorted_by_any_of_its_columns(sort: str, order: str) -> None:
    assert names(sort=sort) == order
    assert {sort for sort in VALUES} == {"age", "total", "ttft", "tokens", "queue", "prefill", "transfer", "decode"}


def test_ascending_turns_the_order_around_but_not_what_has_no_value() -> None:
    assert names(sort="age", ascending=True) == "abcd"
    assert names(sort="ttft", ascending=True) == "adbc"


def test_a_list_can_be_narrowed() -> None:
    assert names(failed=True) == "ca" and names(slower_than=3.0) == "cb" and names(slower_than=3.0, failed=True) == "c"


def test_a_list_is_narrowed_to_an_outcome_a_worker_and_a_tenant() -> None:
    one, other, failed = record("one"), record("other", outcome="failed"), record("failed", outcome="failed")
    one.trace.watch.laps += [Lap("prefill", 0.1, "prefill-0"), Lap("decode", 0.2, "decode-1")]
    other.trace.watch.laps.append(Lap("prefill", 0.1, "prefill-1"))
    failed.trace.failures.append(Failure(0.1, "decode-1", "WORKER_LOST"))
    kept = [one, replace(other, tenant="shop"), failed]

    def found(**query: Any) -> list[str]:
        listed, matched = choose(kept, Query(limit=9, **query))
        assert matched == len(listed)
        return [each.record.request_id for each in listed]

    assert found(worker="decode-1") == ["one", "failed"] and found(worker="decode") == [] and found(worker="prefill-1") == ["other"]
    assert found(outcome="failed") == ["other", "failed"] and found(outcome="failed", worker="decode-1") == ["failed"]
    assert found(tenant="shop") == ["other"] and found(tenant="bank") == [] and found() == ["one", "other", "failed"]


def test_a_list_ends_at_its_limit_and_says_how_many_match() -> None:
    listed, matched = choose(KEPT, Query("total", skip=1, limit=1))
    assert [one.record.request_id for one in listed] == ["c", "b"] and matched == 4, "what is skipped is needed to merge lists"


def test_lists_of_two_routers_merge_by_their_places() -> None:
    query = Query("total", limit=9)
    parts = [choose(KEPT[:2], query)[0], choose(KEPT[2:], query)[0]]
    merged = sorted((one for part in parts for one in part), key=lambda one: one.place)
    assert [one.record.request_id for one in merged] == list("cbda")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"sort": "colour"}, "sort"),
        ({"slower_than": float("nan")}, "slower_than"),
        ({"slower_than": -1.0}, "slower_than"),
        ({"outcome": "lost"}, "outcome"),
        ({"worker": "w" * 129}, "worker"),
        ({"tenant": "t" * 129}, "tenant"),
        ({"limit": 0}, "limit"),
        ({"limit": MOST_LISTED + 1}, "limit"),
        ({"skip": MOST_LISTED}, "skip"),
    ],
)
def test_a_list_that_cannot_be_is_refused_by_the_name_of_its_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(BatonError) as caught:
        Query(**wrong)
    assert caught.value.reason is Reason.INVALID_FIELD and caught.value.violations[0].field == field
