"""Choices of workers, each with the numbers that decide it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.records import BlockEvent, Load, RoleName, TierRecord, WorkerRecord
from baton.engine.core.block_key import DISK
from router.policy import TERMS, Bypass, Cached, Choice, NoWorker, Saturated, choose_decode, choose_hint, choose_prefill, places
from router.served import ServedModel
from router.view import ClusterView

BLOCK = 16
BLOCKS = 100  # of each worker: 1600 tokens
KEYS = [bytes([i]) * 16 for i in range(10)]  # of a prompt of 160 tokens
PROMPT = 160


def worker(name: str, **load: int) -> WorkerRecord:
    pool: RoleName = "prefill" if name.startswith("p") else "decode"
    told = Load(**{"credit_tokens": BLOCK * BLOCKS, **load})
    return WorkerRecord(name, pool, f"{name}:1", 1, "ready", 1, "host", "small", "model", "tokenizer", BLOCK, 4096, BLOCKS, "tcp", told)


def cluster(*workers: WorkerRecord, cached: dict[str, int] | None = None, tiers: dict[str, int] | None = None) -> ServedModel:
    """`cached`: how many blocks of the prompt each worker holds; `tiers`: on a disk."""
    view = ClusterView({"small": "tokenizer"})
    view.update(workers, 0.0)
    for name, blocks in (cached or {}).items():
        view.apply(BlockEvent(name, 1, 1, "stored", tuple(KEYS[:blocks])))
    for name, blocks in (tiers or {}).items():
        view.apply(BlockEvent(name, 1, 1 + (name in (cached or {})), "stored", tuple(KEYS[:blocks]), DISK))
    return view.models["small"]


def prefill(
    view: ServedModel, bypass_tokens: int = 0, longest: int = 200, exclude: Any = (), now: float = 0.0, **terms: Any
) -> Choice | Bypass | NoWorker | Saturated:
    """Nothing is fetched from another worker's cache unless `fetch_tokens` is given."""
    given = {"bypass_tokens": bypass_tokens, "fetch_tokens": 0} | terms
    return choose_prefill(view, KEYS, PROMPT, longest, now, exclude, replace(TERMS, **given))


def decode(view: ServedModel, longest: int = 200, exclude: Any = (), **terms: Any) -> Choice | Saturated | None:
    return choose_decode(view, KEYS, longest, 0.0, exclude, replace(TERMS, **terms))


IDLE = (worker("p0"), worker("p1"), worker("d0"), worker("d1"))


def test_an_idle_cluster_is_filled_in_order_of_names() -> None:
    assert prefill(cluster(*IDLE)) == Choice("p0", 0, 160, "least work")
    assert decode(cluster(*IDLE)) == Choice("d0", 0, 0, "fits")


def test_the_tie_of_a_request_decides_between_equal_workers() -> None:
    view, terms = cluster(*IDLE, worker("d2")), replace(TERMS, fetch_tokens=0, bypass_tokens=0)
    chosen = []
    for tie in range(6):
        first, second = choose_prefill(view, KEYS, PROMPT, 200, 0.0, (), terms, tie), choose_decode(view, KEYS, 200, 0.0, (), terms, tie)
        assert isinstance(first, Choice) and isinstance(second, Choice)
        chosen.append((first.worker, second.worker))
    assert chosen == [("p0", "d0"), ("p1", "d1"), ("p0", "d2"), ("p1", "d0"), ("p0", "d1"), ("p1", "d2")]
    view.members.start_decode("busy", "d1", 1)
    assert [decode_at(view, tie) for tie in range(6)] == ["d0", "d2"] * 3  # only equals count


def decode_at(view: ServedModel, tie: int) -> str:
    choice = choose_decode(view, KEYS, 200, 0.0, (), TERMS, tie)
    assert isinstance(choice, Choice)
    return choice.worker


def test_a_cached_prefix_attracts_requests_until_the_queue_there_costs_more() -> None:
    view = cluster(*IDLE, cached={"p0": 8})
    assert prefill(view) == Choice("p0", 8, 32, "cached prefix")
    view.members.start_prefill("a", "p0", 127)
    assert prefill(view) == Choice("p0", 8, 159, "cached prefix")
    view.members.start_prefill("b", "p0", 1)
    assert prefill(view) == Choice("p1", 0, 160, "least work")  # a tie: fewer tokens wait at p1


def test_a_prefix_that_was_just_sent_attracts_the_next_request() -> None:
    view = cluster(*IDLE)
    view.index.predict("p1", KEYS, 2.0)
    assert prefill(view, now=1.0) == Choice("p1", 10, 0, "cached prefix")
    assert prefill(view, now=2.0) == Choice("p0", 0, 160, "least work")


def test_the_work_of_this_router_spreads_requests() -> None:
    view = cluster(*IDLE)
    placed = []
    for request in "abcd":
        choice = prefill(view)
        assert isinstance(choice, Choice)
        view.members.start_prefill(request, choice.worker, PROMPT)
        placed.append(choice.worker)
    assert placed == ["p0", "p1", "p0", "p1"]


def test_work_from_other_routers_counts_while_it_lasts() -> None:
    view = cluster(*IDLE)
    view.members.note_others("p0", 1, 500, 10.0)
    assert prefill(view, now=10.0) == Choice("p1", 0, 160, "least work")
    assert prefill(view, now=20.0) == Choice("p1", 0, 160, "least work"), "nobody knows how fast it computes"
    view.members.note_prefill("p0", 1, 0.01)
    view.members.start_prefill("mine", "p1", 300)
    assert prefill(view, now=11.9) == Choice("p1", 0, 460, "least work")
    assert prefill(view, now=12.1) == Choice("p0", 0, 450, "least work"), "it has computed 210 of the 500 since"


def test_work_from_other_routers_counts_in_full_where_its_end_is_told() -> None:
    view = cluster(*IDLE)
    view.members.note_prefill("p0", 1, 0.01)
    view.members.note_others("p0", 1, 500, 10.0, news=True)
    view.members.start_prefill("mine", "p1", 300)
    assert prefill(view, now=19.0) == Choice("p1", 0, 460, "least work")
    view.members.note_others("p0", 1, 0, 19.1, news=True)
    assert prefill(view, now=19.1) == Choice("p0", 0, 160, "least work")


def test_what_a_worker_says_of_its_queue_is_not_counted_as_work_from_other_routers() -> None:
    """Its queue has our own prompts, and the cached part of those that wait: a router alone would shun the worker that caches most."""
    view = cluster(worker("p0", waiting_tokens=500), *IDLE[1:])
    assert prefill(view) == Choice("p0", 0, 160, "least work")


def test_a_worker_that_failed_the_request_is_excluded() -> None:
    view = cluster(*IDLE)
    assert prefill(view, exclude={("p0", 1)}) == Choice("p1", 0, 160, "least work")
    assert prefill(view, exclude={("p0", 1), ("p1", 1)}) == Bypass("no prefill worker")
    assert isinstance(prefill(view, exclude={("d0", 1), ("d1", 1)}), Choice)  # a decode worker may be back when the prompt is computed
    assert decode(view, exclude={("d0", 1)}) == Choice("d1", 0, 0, "fits")
    assert decode(view, exclude={("d0", 1), ("d1", 1)}) is None


def test_a_prompt_that_is_longer_than_the_pool_is_not_handed_over() -> None:
    """Pools of 96 and of 160 tokens, and contexts of 4,096."""
    small, large = replace(worker("d0", credit_tokens=96), kv_blocks=6), replace(worker("d1", credit_tokens=160), kv_blocks=10)
    assert prefill(cluster(*IDLE[:2], small)) == Bypass("longer than the pool")
    assert prefill(cluster(*IDLE[:2], small, large)) == Choice("p0", 0, 160, "least work"), "it goes where there is the most room"
    assert prefill(cluster(replace(worker("p0"), kv_blocks=9), *IDLE[1:])) == Choice("p1", 0, 160, "least work")
    assert prefill(cluster(replace(worker("p0"), kv_blocks=9), *IDLE[2:])) == Bypass("no prefill worker")
    chosen = decode(cluster(small))
    assert isinstance(chosen, Choice) and chosen.worker == "d0"


def test_a_restarted_worker_is_not_excluded() -> None:
    """It is a new process: (name, incarnation) failed, not the name."""
    view = cluster(worker("p0"), replace(worker("d0"), incarnation=2))
    assert decode(view, exclude={("d0", 1)}) == Choice("d0", 0, 0, "fits")
    assert prefill(view, exclude={("p0", 0)}) == Choice("p0", 0, 160, "least work")


def test_workers_that_are_down_are_excluded() -> None:
    view = cluster(*IDLE)
    for name in ("p0", "d0"):
        view.members.mark_down(name, 1)
    assert prefill(view) == Choice("p1", 0, 160, "least work") and decode(view) == Choice("d1", 0, 0, "fits")
    view.members.mark_down("p1", 1)
    assert prefill(view) == Bypass("no prefill worker")
    view.members.mark_down("d1", 1)
    assert prefill(view) == NoWorker() and decode(view) is None


def test_without_a_decode_worker_there_is_no_worker() -> None:
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
def test_a_bypass_depends_on_the_uncached_tokens(cached: int, bypass_tokens: int, expected: Bypass | None) -> None:
    view = cluster(*IDLE, cached={"d1": cached} if cached else {})
    answer = prefill(view, bypass_tokens)
    assert answer == expected if expected else isinstance(answer, Choice)


def test_a_prefix_cached_elsewhere_is_fetched_if_that_saves_more_than_it_costs() -> None:
    view = cluster(*IDLE, cached={"d1": 9})
    assert prefill(view, fetch_tokens=143) == Choice("p0", 9, 159, "fetched prefix", Cached("d1", 9))
    assert prefill(view, fetch_tokens=144) == Choice("p0", 0, 160, "least work")
    assert prefill(view) == Choice("p0", 0, 160, "least work")


def test_a_prefix_that_the_prefill_worker_caches_itself_is_not_fetched() -> None:
    view = cluster(*IDLE, cached={"d1": 9, "p1": 4})
    assert prefill(view, fetch_tokens=80) == Choice("p1", 4, 96, "cached prefix"), "80 tokens would be saved at a cost of 80"
    choice = prefill(view, fetch_tokens=79)
    assert isinstance(choice, Choice) and choice.source == Cached("d1", 9)


def test_what_a_worker_has_in_its_tiers_counts_if_that_saves_more_than_loading_costs() -> None:
    view = cluster(*IDLE, tiers={"p1": 9})
    assert prefill(view, load_tokens=143) == Choice("p1", 9, 159, "loaded prefix")
    assert prefill(view, load_tokens=144) == prefill(view, load_tokens=0) == Choice("p0", 0, 160, "least work")
    view.members.start_prefill("a", "p1", 100)
    assert prefill(view, load_tokens=64) == Choice("p0", 0, 160, "least work"), "100 + 64 + 16 is more"


def test_of_loading_and_fetching_the_cheaper_is_chosen_and_an_older_worker_lends_nothing_out_of_a_tier() -> None:
    view = cluster(*IDLE, cached={"d1": 9, "p1": 2}, tiers={"p1": 8})
    assert prefill(view, fetch_tokens=50, load_tokens=20) == Choice("p1", 8, 52, "loaded prefix")
    assert prefill(view, fetch_tokens=20, load_tokens=50) == Choice("p0", 9, 36, "fetched prefix", Cached("d1", 9))
    assert prefill(cluster(*IDLE, tiers={"d1": 9}), fetch_tokens=20) == Choice("p0", 0, 160, "least work")


BRINGS = [replace(each, brings=True) for each in IDLE]


def test_who_brings_up_what_its_tiers_hold_lends_it_and_is_slower_than_a_pool() -> None:
    assert prefill(cluster(*BRINGS, tiers={"d1": 9}), fetch_tokens=20, load_tokens=30) == Choice(
        "p0", 9, 20 + 30 + 16, "fetched prefix", Cached("d1", 9, 30.0)
    )
    view = cluster(*BRINGS, cached={"d0": 8}, tiers={"d1": 9})
    assert prefill(view, fetch_tokens=20, load_tokens=30) == Choice("p0", 8, 20 + 32, "fetched prefix", Cached("d0", 8))
    assert prefill(view, fetch_tokens=20, load_tokens=10) == Choice("p0", 9, 20 + 10 + 16, "fetched prefix", Cached("d1", 9, 10.0))
    gone = prefill(view, fetch_tokens=20, load_tokens=10, exclude={("d1", 1)})
    assert gone == Choice("p0", 8, 20 + 32, "fetched prefix", Cached("d0", 8))


def test_what_a_load_costs_follows_the_medium_that_holds_the_blocks() -> None:
    def at(cost: float) -> ServedModel:
        tiers = (TierRecord("host", "on", cost=0.01), TierRecord(DISK, "on", cost=cost))
        return cluster(*(replace(each, tiers=tiers, brings=True) for each in IDLE), tiers={"p1": 9})

    assert prefill(at(0.5), load_tokens=10) == Choice("p1", 9, 10 + 72 + 16, "loaded prefix")
    assert prefill(at(0.9), load_tokens=10) == Choice("p1", 9, 10 + 0.9 * 144 + 16, "loaded prefix")
    assert prefill(at(1.0), load_tokens=10) == Choice("p0", 0, 160, "least work")


def hint(view: ServedModel, exclude: Any = (), **terms: Any) -> Cached | None:
    return choose_hint(view, KEYS, PROMPT, 0.0, exclude, replace(TERMS, **terms))


def test_a_hint_goes_to_the_worker_that_would_load_for_the_request_or_lend_to_it() -> None:
    assert hint(cluster(*BRINGS, tiers={"p1": 9})) == Cached("p1", 9)
    assert hint(cluster(*BRINGS, tiers={"d1": 9}), fetch_tokens=20, load_tokens=20) == Cached("d1", 9, 20.0)
    assert hint(cluster(*BRINGS[2:], tiers={"d1": 9})) == Cached("d1", 9), "nobody else computes prompts"
    full = [replace(each, load=replace(each.load, credit_tokens=0, waiting=1)) for each in BRINGS]
    assert hint(cluster(*full, tiers={"p1": 9})) == Cached("p1", 9), "so it waits, and that is why it is told"


def test_no_hint_goes_where_it_is_of_no_use() -> None:
    assert hint(cluster(*IDLE, tiers={"p1": 9})) is None, "an older worker would not answer"
    assert hint(cluster(*BRINGS, cached={"p1": 9})) is None, "it is in the pool"
    assert hint(cluster(*BRINGS, cached={"p0": 9}, tiers={"p1": 9})) is None, "another one has it sooner"
    assert hint(cluster(*BRINGS, tiers={"p1": 9}), load_tokens=0) is None
    assert hint(cluster(*BRINGS, tiers={"p1": 9}), exclude={("p1", 1)}, fetch_tokens=0) is None


def test_tiers_of_who_decodes_count_only_where_it_computes_the_prompt() -> None:
    assert decode(cluster(*IDLE, tiers={"d1": 9}), load_tokens=20) == Choice("d0", 0, 0, "fits")
    assert decode(cluster(*IDLE[2:], tiers={"d1": 9}), load_tokens=20) == Choice("d1", 0, 20 - 144, "fits")
    assert decode(cluster(*IDLE[2:], tiers={"d1": 9}), load_tokens=0) == Choice("d0", 0, 0, "fits")


def test_an_idle_prefill_worker_fetches_from_a_busy_one() -> None:
    view = cluster(*IDLE, cached={"p1": 10})
    assert prefill(view, fetch_tokens=20) == Choice("p1", 10, 0, "cached prefix")
    view.members.start_prefill("a", "p1", 100)
    assert prefill(view, fetch_tokens=20) == Choice("p0", 10, 20, "fetched prefix", Cached("p1", 10))


def test_equal_sources_take_turns() -> None:
    view, terms = cluster(*IDLE, cached={"p1": 9, "d0": 9, "d1": 9}), replace(TERMS, bypass_tokens=0, fetch_tokens=20)
    view.members.start_prefill("much", "p1", 1000)
    chosen = [choose_prefill(view, KEYS, PROMPT, 200, 0.0, (), terms, tie) for tie in range(6)]
    assert chosen == [Choice("p0", 9, 36, "fetched prefix", Cached(source, 9)) for source in ("d0", "d1", "p1")] * 2


@pytest.mark.parametrize("gone", [("d1", 1)])
def test_nothing_is_fetched_from_a_worker_that_failed_the_request_or_is_down(gone: tuple[str, int]) -> None:
    view = cluster(*IDLE, cached={"d1": 9})
    assert prefill(view, fetch_tokens=20, exclude={gone}) == Choice("p0", 0, 160, "least work")
    view.members.mark_down(*gone)
    assert prefill(view, fetch_tokens=20) == Choice("p0", 0, 160, "least work")


def test_nothing_is_fetched_from_a_worker_that_does_not_lend() -> None:
    workers = (*IDLE[:3], replace(worker("d1"), lends=False))
    assert prefill(cluster(*workers, cached={"d1": 9, "d0": 6}), fetch_tokens=20) == Choice("p0", 6, 84, "fetched prefix", Cached("d0", 6))
    assert prefill(cluster(*workers, cached={"d1": 9}), fetch_tokens=20) == Choice("p0", 0, 160, "least work")


def test_what_a_worker_caches_counts_there_whether_it_lends_or_not() -> None:
    view = cluster(*(replace(each, lends=False) for each in IDLE), cached={"p1": 8, "d1": 9})
    assert prefill(view, fetch_tokens=20) == Choice("p1", 8, 32, "cached prefix")
    assert prefill(view, bypass_tokens=16) == Bypass("cached") and decode(view) == Choice("d1", 9, -144, "fits")


def test_a_bypass_considers_the_worker_that_would_decode() -> None:
    """d1 has the prefix but no room: the request would go to d0, which would have to compute the whole prompt."""
    view = cluster(worker("p0"), worker("d0"), worker("d1", credit_tokens=0), cached={"d1": 10})
    assert decode(view) == Choice("d0", 0, 0, "fits")
    assert prefill(view, bypass_tokens=32) == Choice("p0", 0, 160, "least work")


def test_bypass_and_decode_use_the_same_sequence_length() -> None:
    """d0 caches the prompt and has room for it, but not for the output: the request will go to d1, which caches nothing."""
    view = cluster(worker("p0"), worker("d0", credit_tokens=900), worker("d1", credit_tokens=1000), cached={"d0": 10})
    assert decode(view, longest=950) == Choice("d1", 0, 600, "fits")
    assert prefill(view, bypass_tokens=32, longest=950) == Choice("p0", 0, 160, "least work")
    assert prefill(view, bypass_tokens=32, longest=900) == Bypass("cached"), "d0 has room for a sequence of this length"


def test_bypass_and_decode_use_the_same_queue_limit() -> None:
    view = cluster(worker("p0"), worker("d0", waiting=9), cached={"d0": 10})
    assert decode(view, max_queue=8) == Saturated() == prefill(view, bypass_tokens=32, max_queue=8)
    assert prefill(view, bypass_tokens=32) == Bypass("cached")


def test_no_prompt_is_computed_while_no_decode_worker_can_accept_the_sequence() -> None:
    busy = worker("d0", credit_tokens=199, waiting=1)
    assert prefill(cluster(worker("p0"), busy)) == Saturated() == prefill(cluster(busy))
    assert isinstance(prefill(cluster(worker("p0"), busy, worker("d1"))), Choice)
    assert isinstance(prefill(cluster(worker("p0"), worker("d0", credit_tokens=200, waiting=1))), Choice), "the credit covers it"


def test_an_overcommitted_worker_without_a_queue_accepts_as_many_sequences_as_it_runs() -> None:
    """Credit counts every sequence at its full length, which few reach."""
    view = cluster(worker("p0"), replace(worker("d0", credit_tokens=-500), max_num_seqs=2))
    for request in "ab":
        assert isinstance(prefill(view), Choice)
        view.members.start_decode(request, "d0", 200)
    assert prefill(view) == Saturated()
    view.members.end_decode("a")
    assert isinstance(prefill(view), Choice)


def test_places_are_what_the_workers_run_plus_a_quarter() -> None:
    def of(name: str, max_num_seqs: int) -> WorkerRecord:
        return replace(worker(name), max_num_seqs=max_num_seqs)

    assert places(cluster(of("d0", 8))) == 10 and places(cluster(of("d0", 1))) == 2
    assert places(cluster(of("p0", 8), of("d0", 8), of("d1", 6))) == 8 + 6 + 2 + 2 + 2
    assert places(cluster(of("p0", 8))) is None and places(cluster(of("d0", 8), of("d1", 0))) is None


def test_decode_goes_to_the_worker_that_has_promised_less() -> None:
    view = cluster(worker("d0", credit_tokens=1000), worker("d1", credit_tokens=1100))
    assert decode(view) == Choice("d1", 0, 500, "fits")
    view = cluster(worker("d0", credit_tokens=1000), worker("d1", credit_tokens=1100, waiting_tokens=101))
    assert decode(view) == Choice("d0", 0, 600, "fits")


def test_decode_weighs_the_cache_against_the_load() -> None:
    view = cluster(worker("d0"), worker("d1", credit_tokens=1500), cached={"d1": 10})
    assert decode(view) == Choice("d1", 10, 100 - 160, "fits")
    assert decode(view, overlap_weight=0.5) == Choice("d0", 0, 0, "fits")


def test_promises_count_before_a_report_shows_them() -> None:
    view = cluster(worker("d0"), worker("d1", credit_tokens=1590))
    placed = []
    for request in "abc":
        choice = decode(view)
        assert isinstance(choice, Choice)
        view.members.start_decode(request, choice.worker, 200)
        placed.append(choice.worker)
    assert placed == ["d0", "d1", "d0"]


def test_room_that_was_just_given_away_is_not_given_away_again() -> None:
    view = cluster(worker("d0", credit_tokens=300), worker("d1", credit_tokens=250))
    assert decode(view) == Choice("d0", 0, 1300, "fits")
    view.members.start_decode("a", "d0", 200)
    assert decode(view) == Choice("d1", 0, 1350, "fits")


def test_without_counted_promises_every_request_goes_to_one_worker() -> None:
    """Negative control: load reports come only once a second."""
    view = cluster(worker("d0"), worker("d1", credit_tokens=1590))
    assert [decode(view) for _ in range(3)] == [Choice("d0", 0, 0, "fits")] * 3


def test_room_for_the_sequence_matters_more_than_cost() -> None:
    view = cluster(worker("d0", credit_tokens=199), worker("d1", credit_tokens=200, waiting_tokens=5000), cached={"d0": 10})
    assert decode(view, 200) == Choice("d1", 0, 1400 + 5000, "fits")


def test_without_room_the_request_queues_where_most_is_free() -> None:
    view = cluster(worker("d0", credit_tokens=-50), worker("d1", credit_tokens=150), worker("d2", credit_tokens=160, waiting=5))
    assert decode(view, 200) == Choice("d2", 0, 1440, "queues")
    assert decode(view, 200, max_queue=5) == Choice("d1", 0, 1450, "queues")


def test_full_queues_are_saturated() -> None:
    view = cluster(worker("d0", waiting=256), worker("d1", waiting=300))
    assert decode(view) == Saturated()
    assert decode(view, max_queue=301) == Choice("d0", 0, 0, "fits")


loads = st.builds(Load, waiting=st.integers(0, 300), credit_tokens=st.integers(-500, 1600), waiting_tokens=st.integers(0, 2000))


@given(st.lists(loads, max_size=4), st.lists(loads, max_size=4), st.lists(st.integers(0, 10), min_size=8, max_size=8), st.integers(0, 300))
def test_the_best_worker_of_any_cluster_is_chosen(prefills: list[Load], decodes: list[Load], cached: list[int], bypass_tokens: int) -> None:
    """The best worker is chosen, and the answer does not depend on the order of the records."""
    workers = [replace(worker(f"p{i}"), load=load) for i, load in enumerate(prefills)]
    workers += [replace(worker(f"d{i}"), load=load) for i, load in enumerate(decodes)]
    held = {record.name: blocks for record, blocks in zip(workers, cached, strict=False) if blocks}
    view, mirror = cluster(*workers, cached=held), cluster(*reversed(workers), cached=held)
    for number, load in enumerate(prefills):
        view.members.note_others(f"p{number}", 1, load.waiting_tokens, 0.0)
        mirror.members.note_others(f"p{number}", 1, load.waiting_tokens, 0.0)
    choice, target = prefill(view, bypass_tokens), decode(view)
    assert (choice, target) == (prefill(mirror, bypass_tokens), decode(mirror))
    if isinstance(choice, Choice):
        costs = {f"p{i}": load.waiting_tokens + PROMPT - held.get(f"p{i}", 0) * BLOCK for i, load in enumerate(prefills)}
        assert choice.cost == costs[choice.worker] == min(costs.values()) and choice.overlap_blocks == held.get(choice.worker, 0)
    elif isinstance(choice, Saturated):
        assert isinstance(target, Saturated) or (isinstance(target, Choice) and target.reason == "queues")
    else:
        assert isinstance(choice, NoWorker) is (not decodes)
    if isinstance(target, Choice):
        best = max(load.credit_tokens for load in decodes if load.waiting < 256)
        assert (target.reason == "fits") is (best >= 200) and view.members.record(target.worker).load.waiting < 256
        assert target.reason == "fits" or view.members.record(target.worker).load.credit_tokens == best
    else:
        assert (target is None) is (not decodes) and all(load.waiting >= 256 for load in decodes)
