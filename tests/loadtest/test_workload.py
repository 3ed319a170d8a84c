"""Synthetic workloads have the requested lengths, hit rate and sessions; scaling and bounding leave everything else unchanged."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.workload import (
    Fixed,
    Item,
    LogNormal,
    Synthetic,
    Uniform,
    Vocabulary,
    WorkloadError,
    bound,
    hit_rate,
    parse_seconds,
    parse_tokens,
    scale,
)

PLAIN = Synthetic(prompt=Uniform(100, 600), output=Uniform(10, 50), first_id=100, vocab=5000)
TREE = replace(PLAIN, hit_rate=0.4, prefix_depth=3, prefix_branching=3, prefix_tokens=64)
CHAT = replace(PLAIN, turns=Uniform(1, 5), think=Uniform(1, 3))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def naive_hit_rate(items: Sequence[Item]) -> float:
    """Compares every opening prompt with every earlier one."""
    openings: list[Item] = []
    for item in items:
        if not item.session or all(item.session != other.session for other in openings):
            openings.append(item)
    hits = sum(max((common(item.tokens, other.tokens) for other in openings[:i]), default=0) for i, item in enumerate(openings))
    return hits / sum(len(item.tokens) for item in openings)


# Distributions


def test_a_distribution_is_parsed_from_text() -> None:
    assert parse_tokens("512", "prompt") == Fixed(512)
    assert parse_tokens(" 100-600 ", "prompt") == Uniform(100, 600)
    assert parse_tokens("lognormal:512:0.6:4096", "prompt") == LogNormal(512, 0.6, 4096)
    assert parse_tokens("lognormal:512:0.6", "prompt") == LogNormal(512, 0.6, 1 << 20)
    assert parse_seconds("0", "think") == Fixed(0)
    assert parse_seconds("0.5-2", "think") == Uniform(0.5, 2)


def test_uniform_draws_both_ends_as_often_as_the_middle() -> None:
    rng = random.Random(0)
    drawn = [Uniform(3, 5).tokens(rng) for _ in range(9000)]
    assert {n: round(drawn.count(n) / 9000, 1) for n in set(drawn)} == {3: 0.3, 4: 0.3, 5: 0.3}


def test_lognormal_has_its_median_and_spread_and_respects_its_maximum() -> None:
    rng = random.Random(0)
    logs = sorted(LogNormal(512, 0.6, 1 << 20).tokens(rng) for _ in range(20_000))
    assert statistics.median(logs) == pytest.approx(512, rel=0.03)
    assert logs[int(0.841 * 20_000)] / 512 == pytest.approx(2.718**0.6, rel=0.05)
    assert max(LogNormal(512, 0.6, 600).tokens(rng) for _ in range(1000)) == 600
    assert min(LogNormal(1, 3, 600).tokens(rng) for _ in range(1000)) == 1


@pytest.mark.parametrize(
    "text",
    (
        *("", "0", "-5", "1.5", "x", "nan", "1e9", "9999999", "600-100", "100-", "-600", "1-2-3", "٣"),
        *("lognormal", "lognormal:512", "lognormal:0:0.5", "lognormal:512:0", "lognormal:512:nan", "lognormal:512:9", "lognormal:512:-1"),
        *("lognormal:512:1:100", "lognormal:5:1:9:9", "normal:5:1", "512:1"),
    ),
)
def test_the_error_for_a_bad_length_names_its_field(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"^prompt: .*"):
        parse_tokens(text, "prompt")


@pytest.mark.parametrize("text", ["-1", "inf", "100000", "2-1", "lognormal:0:1"])
def test_the_error_for_bad_seconds_names_their_field(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"^think: .*"):
        parse_seconds(text, "think")


# Synthetic


def test_items_depend_only_on_the_seed_and_a_longer_list_begins_with_the_shorter() -> None:
    for workload in (TREE, CHAT):
        assert workload.items(50, seed=1) == workload.items(80, seed=1)[:50]
        assert workload.items(50, seed=1) != workload.items(50, seed=2)


def test_two_seeds_have_no_prompt_in_common() -> None:
    for workload in (PLAIN, TREE):  # otherwise the second run would hit the cache of the first
        first, second = workload.items(50, seed=1), workload.items(50, seed=2)
        assert not {item.tokens[:8] for item in first} & {item.tokens[:8] for item in second}


def test_items_follow_the_distributions() -> None:
    items = TREE.items(500, seed=3)
    assert len(items) == 500
    assert all(100 <= len(item.tokens) <= 600 and 10 <= item.output_tokens <= 50 for item in items)
    assert all(100 <= token < 5000 for item in items for token in item.tokens)
    assert all(item.session == "" and item.at is None and item.think_s == 0 for item in items)
    assert len({len(item.tokens) for item in items}) > 100


def test_prompts_share_nothing_by_default() -> None:
    assert naive_hit_rate(PLAIN.items(200, seed=0)) < 0.001


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("asked", "depth", "branching", "tokens"), [(0.1, 1, 1, 256), (0.3, 1, 4, 128), (0.5, 4, 2, 64), (0.75, 20, 1, 16), (0.6, 3, 3, 90)]
)
def test_the_hit_rate_is_the_requested_one(asked: float, depth: int, branching: int, tokens: int, seed: int) -> None:
    workload = replace(PLAIN, hit_rate=asked, prefix_depth=depth, prefix_branching=branching, prefix_tokens=tokens)
    assert naive_hit_rate(workload.items(400, seed)) == pytest.approx(asked, abs=0.02)


def test_a_list_too_short_for_its_tree_stays_below_the_hit_rate() -> None:
    workload = replace(PLAIN, hit_rate=0.5, prefix_depth=3, prefix_branching=100, prefix_tokens=64)
    assert naive_hit_rate(workload.items(50, seed=0)) < 0.3


def test_the_prefixes_form_the_requested_tree() -> None:
    workload = replace(PLAIN, prompt=Fixed(200), hit_rate=0.8, prefix_depth=3, prefix_branching=3, prefix_tokens=60)
    prompts = [item.tokens for item in workload.items(600, seed=5)]
    for depth in (1, 2, 3):
        often = [prefix for prefix, group in groupby(sorted(prompt[: 60 * depth] for prompt in prompts)) if len(list(group)) > 1]
        assert len(often) == 3**depth  # nodes of that level
    assert len({prompt[180:] for prompt in prompts}) == len(prompts)


def test_the_hit_rate_changes_neither_lengths_nor_sessions() -> None:
    shape = [(len(i.tokens), i.output_tokens, i.session, i.think_s) for i in CHAT.items(200, seed=1)]
    shared = replace(CHAT, hit_rate=0.3, prefix_tokens=64, prefix_depth=3).items(200, seed=1)
    assert [(len(i.tokens), i.output_tokens, i.session, i.think_s) for i in shared] == shape


def test_sessions_have_turns_in_order_and_pauses_between_them() -> None:
    items = CHAT.items(1000, seed=2)[:-5]  # the last session may be cut
    sessions = [(name, list(group)) for name, group in groupby(items, key=lambda item: item.session) if name]
    assert len({name for name, _ in sessions}) == len(sessions)  # the turns of a session are contiguous
    assert {len(turns) for _, turns in sessions} == {2, 3, 4, 5}
    assert any(item.session == "" for item in items)
    for _, turns in sessions:
        assert turns[0].think_s == 0 and all(1 <= turn.think_s <= 3 for turn in turns[1:])


def test_the_hit_rate_of_sessions_is_that_of_their_openings() -> None:
    workload = replace(CHAT, hit_rate=0.4, prefix_depth=3, prefix_branching=2, prefix_tokens=64)
    items = workload.items(900, seed=0)
    assert naive_hit_rate(items) == pytest.approx(0.4, abs=0.02)
    openings: list[tuple[int, ...]] = []
    later: list[tuple[int, ...]] = []
    seen: set[str] = set()
    for item in items:
        (later if item.session and item.session in seen else openings).append(item.tokens[:16])
        seen.add(item.session)
    assert later and not set(later) & set(openings)


def test_an_unreachable_hit_rate_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"hit_rate: 0\.8 is out of reach.* 1 levels of 64 tokens give at most 0\.18"):
        replace(PLAIN, hit_rate=0.8, prefix_tokens=64)
    with pytest.raises(WorkloadError, match=r"at most 0\.00"):  # a prompt of one level has no token left to be unique
        replace(PLAIN, prompt=Fixed(64), hit_rate=0.1, prefix_tokens=64)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hit_rate", 1.0), ("hit_rate", -0.1), ("hit_rate", float("nan")), ("prefix_depth", 0), ("prefix_branching", 0), ("prefix_tokens", 0)],
)
def test_the_error_for_a_bad_field_names_it(field: str, value: float) -> None:
    changed: dict[str, Any] = {field: value}
    with pytest.raises(WorkloadError, match=f"^{field}: .* is not from "):
        replace(PLAIN, **changed)


@pytest.mark.parametrize(("first", "vocab"), [(5, 5), (-1, 10), (10, 5), (0, 1 << 30)])
def test_a_vocabulary_without_ids_is_refused(first: int, vocab: int) -> None:
    with pytest.raises(WorkloadError, match=r"^vocab: "):
        Vocabulary(first, vocab)
    with pytest.raises(WorkloadError, match=r"^vocab: "):
        replace(PLAIN, first_id=first, vocab=vocab)


def test_a_vocabulary_draws_all_its_ids_and_no_other() -> None:
    assert set(Vocabulary(3, 7).draw(random.Random(0), 500)) == {3, 4, 5, 6}


# Scaling, bounding, measuring

TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=40).map(tuple)
FACTORS = st.one_of(st.floats(0.01, 5.0), st.sampled_from([1 / 64, 0.1, 0.5, 1.0, 2.0, 3.0]))


@given(TOKENS, TOKENS, TOKENS, FACTORS)
def test_scaling_keeps_shared_prefixes_shared(prefix: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], factor: float) -> None:
    first, second = scale([Item(prefix + a, 1), Item(prefix + b, 1)], factor)
    least = min(int(len(prefix) * factor + 1e-9), len(first.tokens), len(second.tokens))
    assert common(first.tokens, second.tokens) >= least


@given(TOKENS, st.integers(1, 1000), FACTORS)
def test_scaled_lengths_are_rounded_and_at_least_one(tokens: tuple[int, ...], output: int, factor: float) -> None:
    (item,) = scale([Item(tokens, output, "s", 2.5, 1.5)], factor)
    assert (len(item.tokens), item.output_tokens) == (max(1, round(len(tokens) * factor)), max(1, round(output * factor)))
    assert (item.session, item.at, item.think_s) == ("s", 2.5, 1.5)
    assert set(item.tokens) <= set(tokens)


def test_scaling_takes_tokens_from_the_whole_prompt() -> None:
    assert scale([Item(tuple(range(10)), 10)], 0.5)[0].tokens == (0, 2, 4, 6, 8)
    assert scale([Item((1, 2, 3), 10)], 2)[0].tokens == (1, 1, 2, 2, 3, 3)
    assert scale([Item((1, 2, 3), 10)], 1)[0].tokens == (1, 2, 3)


@settings(max_examples=10, deadline=None)
@given(st.floats(0.1, 3.0))
def test_the_hit_rate_survives_scaling(factor: float) -> None:
    items = TREE.items(150, seed=0)
    assert naive_hit_rate(scale(items, factor)) == pytest.approx(naive_hit_rate(items), abs=0.03)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_an_invalid_factor_is_refused(factor: float) -> None:
    with pytest.raises(WorkloadError, match=r"^scale: "):
        scale([Item((1, 2), 3)], factor)


def test_items_that_exceed_the_window_are_dropped_and_counted() -> None:
    fits, beyond = Item((1,) * 60, 40), Item((1,) * 60, 41)
    assert bound([fits, beyond, fits], 100).items == (fits, fits)
    assert bound([fits, beyond, fits], 100).dropped == 1


def test_a_session_ends_before_the_turn_that_does_not_fit() -> None:
    first, second, third = Item((1,) * 30, 20, "a"), Item((1,) * 60, 1, "a"), Item((1,), 1, "a")
    other = Item((1,) * 30, 20, "b")
    result = bound([first, other, second, third, replace(second, session="b", tokens=(1,) * 40)], 100)
    assert [(item.session, len(item.tokens)) for item in result.items] == [("a", 30), ("b", 30), ("b", 40)]
    assert result.dropped == 2


def test_a_window_too_small_for_any_item_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"^max_tokens: 1 "):
        bound([], 1)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), st.sampled_from(["", "", "a", "b"])), max_size=12)
)
def test_the_measured_hit_rate_agrees_with_a_naive_implementation(drawn: list[tuple[tuple[int, ...], str]]) -> None:
    items = [Item(tokens, 1, session) for tokens, session in drawn]
    assert hit_rate(items) == pytest.approx(naive_hit_rate(items) if items else 0.0)


def test_only_whole_blocks_count_for_a_block_cache() -> None:
    items = [Item(tuple(range(40)), 1), Item((*range(35), *range(100, 105)), 1)]
    assert hit_rate(items, block=16) == 32 / 80
    assert hit_rate(items) == 35 / 80
