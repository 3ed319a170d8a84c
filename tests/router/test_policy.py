"""Choices, each with the numbers that make it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.records import BlockEvent, Load, WorkerRecord
from router.policy import Bypass, Choice, NoWorker, Saturated, choose_decode, choose_prefill
from router.view import ClusterView

BLOCK = 16
BLOCKS = 100  # of each worker: 1600 tokens
KEYS = [bytes([i]) * 16 for i in range(10)]  # of a prompt of 160 tokens
PROMPT = 160


def worker(name: str, **load: int) -> WorkerRecord:
    role = "prefill" if name.startswith("p") else "decode"
    told = Load(**{"credit_tokens": BLOCK * BLOCKS, **load})
    return WorkerRecord(name, role, f"{name}:1", 1, "ready", 1, "host", "small", "model", "tokenizer", BLOCK, 4096, BLOCKS, "tcp", told)


def cluster(*workers: WorkerRecord, cached: dict[str, int] | None = None) -> ClusterView:
    """`cached`: how many blocks of the prompt each worker holds."""
    view = ClusterView("tokenizer")
    view.update(workers, 0.0)
    for name, blocks in (cached or {}).items():
        view.index.apply(BlockEvent(name, 1, 1, "stored", tuple(KEYS[:blocks])))
    return view


def prefill(view: ClusterView, bypass_tokens: int = 0, **options: Any) -> Choice | Bypass | NoWorker:
    return choose_prefill(view, KEYS, PROMPT, bypass_tokens, 0.0, **options)


def decode(view: ClusterView, needed: int = 200, **options: Any) -> Choice | Saturated | None:
    return choose_decode(view, KEYS, needed, 0.0, **options)


IDLE = (worker("p0"), worker("p1"), worker("d0"), worker("d1"))


def test_an_idle_cluster() -> None:
    assert prefill(cluster(*IDLE)) == Choice("p0", 0, 160, "least work")
    assert decode(cluster(*IDLE)) == Choice("d0", 0, 0, "fits")


def test_a_cached_prefix_draws_until_the_queue_there_costs_more() -> None:
    view = cluster(*IDLE, cached={"p0": 8})
    assert prefill(view) == Choice("p0", 8, 32, "cached prefix")
    view.start_prefill("a", "p0", 127)
    assert prefill(view) == Choice("p0", 8, 159, "cached prefix")
    view.start_prefill("b", "p0", 1)
    assert prefill(view) == Choice("p1", 0, 160, "least work")  # a tie: fewer tokens wait there


def test_a_prefix_just_sent_draws_the_next_request() -> None:
    view = cluster(*IDLE)
    view.index.predict("p1", KEYS, 2.0)
    assert choose_prefill(view, KEYS, PROMPT, 0, 1.0) == Choice("p1", 10, 0, "cached prefix")
    assert choose_prefill(view, KEYS, PROMPT, 0, 2.0) == Choice("p0", 0, 160, "least work")


def test_our_own_work_spreads_requests() -> None:
    view = cluster(*IDLE)
    placed = []
    for request in "abcd":
        choice = prefill(view)
        assert isinstance(choice, Choice)
        view.start_prefill(request, choice.worker, PROMPT)
        placed.append(choice.worker)
    assert placed == ["p0", "p1", "p0", "p1"]


def test_what_others_put_there_counts() -> None:
    assert prefill(cluster(worker("p0", waiting_tokens=500), *IDLE[1:])) == Choice("p1", 0, 160, "least work")


def test_who_failed_the_request_is_left_out() -> None:
    view = cluster(*IDLE)
    assert prefill(view, exclude={"p0"}) == Choice("p1", 0, 160, "least work")
    assert prefill(view, exclude={"p0", "p1"}) == Bypass("no prefill worker")
    assert isinstance(prefill(view, exclude={"d0", "d1"}), Choice)  # a decode worker may be back by then
    assert decode(view, exclude={"d0"}) == Choice("d1", 0, 0, "fits")
    assert decode(view, exclude={"d0", "d1"}) is None


def test_workers_that_are_down_are_left_out() -> None:
    view = cluster(*IDLE)
    for name in ("p0", "d0"):
        view.mark_down(name, 1)
    assert prefill(view) == Choice("p1", 0, 160, "least work") and decode(view) == Choice("d1", 0, 0, "fits")
    view.mark_down("p1", 1)
    assert prefill(view) == Bypass("no prefill worker")
    view.mark_down("d1", 1)
    assert prefill(view) == NoWorker() and decode(view) is None


def test_no_decode_worker_is_no_worker() -> None:
    assert prefill(cluster(worker("p0"))) == NoWorker() == prefill(cluster())


@pytest.mark.parametrize(
    ("cached", "bypass_tokens", "expected"),
    [
        (0, 159, None),
        (0, 160, Bypass("short")),
        (8, 31, None),
        (8, 32, Bypass("cached")),
        (10, 0, Bypass("cached")),
        (0, 0, None),
    ],
)
def test_bypass(cached: int, bypass_tokens: int, expected: Bypass | None) -> None:
    view = cluster(*IDLE, cached={"d1": cached} if cached else {})
    answer = prefill(view, bypass_tokens)
    assert answer == expected if expected else isinstance(answer, Choice)


def test_bypass_looks_at_the_worker_that_would_decode() -> None:
    """d1 has the prefix but no room: the request would go to d0, which would compute all of it."""
    view = cluster(worker("p0"), worker("d0"), worker("d1", credit_tokens=0), cached={"d1": 10})
    assert decode(view) == Choice("d0", 0, 0, "fits")
    assert prefill(view, bypass_tokens=32) == Choice("p0", 0, 160, "least work")


def test_decode_goes_where_less_is_promised() -> None:
    view = cluster(worker("d0", credit_tokens=1000), worker("d1", credit_tokens=1100))
    assert decode(view) == Choice("d1", 0, 500, "fits")
    view = cluster(worker("d0", credit_tokens=1000), worker("d1", credit_tokens=1100, waiting_tokens=101))
    assert decode(view) == Choice("d0", 0, 600, "fits")


def test_decode_weighs_the_cache_against_the_load() -> None:
    view = cluster(worker("d0"), worker("d1", credit_tokens=1500), cached={"d1": 10})
    assert decode(view) == Choice("d1", 10, 100 - 160, "fits")
    assert decode(view, overlap_weight=0.5) == Choice("d0", 0, 0, "fits")


def test_promises_that_no_report_shows_yet() -> None:
    view = cluster(worker("d0"), worker("d1", credit_tokens=1590))
    placed = []
    for request in "abc":
        choice = decode(view)
        assert isinstance(choice, Choice)
        view.start_decode(request, choice.worker, 200)
        placed.append(choice.worker)
    assert placed == ["d0", "d1", "d0"]


def test_room_that_was_just_given_away_is_not_given_twice() -> None:
    view = cluster(worker("d0", credit_tokens=300), worker("d1", credit_tokens=250))
    assert decode(view) == Choice("d0", 0, 1300, "fits")
    view.start_decode("a", "d0", 200)
    assert decode(view) == Choice("d1", 0, 1350, "fits")


def test_without_them_all_would_go_to_one() -> None:
    """Negative control: reports come once a second."""
    view = cluster(worker("d0"), worker("d1", credit_tokens=1590))
    assert [decode(view) for _ in range(3)] == [Choice("d0", 0, 0, "fits")] * 3


def test_room_for_the_sequence_comes_before_cost() -> None:
    view = cluster(worker("d0", credit_tokens=199), worker("d1", credit_tokens=200, waiting_tokens=5000), cached={"d0": 10})
    assert decode(view, 200) == Choice("d1", 0, 1400 + 5000, "fits")


def test_without_room_it_queues_where_most_is_free() -> None:
    view = cluster(worker("d0", credit_tokens=-50), worker("d1", credit_tokens=150), worker("d2", credit_tokens=160, waiting=5))
    assert decode(view, 200) == Choice("d2", 0, 1440, "queues")
    assert decode(view, 200, max_queue=5) == Choice("d1", 0, 1450, "queues")


def test_full_queues_refuse() -> None:
    view = cluster(worker("d0", waiting=256), worker("d1", waiting=300))
    assert decode(view) == Saturated()
    assert decode(view, max_queue=301) == Choice("d0", 0, 0, "fits")


loads = st.builds(Load, waiting=st.integers(0, 300), credit_tokens=st.integers(-500, 1600), waiting_tokens=st.integers(0, 2000))


@given(st.lists(loads, max_size=4), st.lists(loads, max_size=4), st.lists(st.integers(0, 10), min_size=8, max_size=8), st.integers(0, 300))
def test_any_cluster(prefills: list[Load], decodes: list[Load], cached: list[int], bypass_tokens: int) -> None:
    """No better worker is passed over, and the answer does not depend on the order of the records."""
    workers = [replace(worker(f"p{i}"), load=load) for i, load in enumerate(prefills)]
    workers += [replace(worker(f"d{i}"), load=load) for i, load in enumerate(decodes)]
    held = {record.name: blocks for record, blocks in zip(workers, cached, strict=False) if blocks}
    view, mirror = cluster(*workers, cached=held), cluster(*reversed(workers), cached=held)
    choice, target = prefill(view, bypass_tokens), decode(view)
    assert (choice, target) == (prefill(mirror, bypass_tokens), decode(mirror))
    if isinstance(choice, Choice):
        costs = {f"p{i}": load.waiting_tokens + PROMPT - held.get(f"p{i}", 0) * BLOCK for i, load in enumerate(prefills)}
        assert choice.cost == costs[choice.worker] == min(costs.values()) and choice.overlap_blocks == held.get(choice.worker, 0)
    else:
        assert isinstance(choice, NoWorker) is (not decodes)
    if isinstance(target, Choice):
        best = max(load.credit_tokens for load in decodes if load.waiting < 256)
        assert (target.reason == "fits") is (best >= 200) and view.record(target.worker).load.waiting < 256
        assert target.reason == "fits" or view.record(target.worker).load.credit_tokens == best
    else:
        assert (target is None) is (not decodes) and all(load.waiting >= 256 for load in decodes)
