"""The formulas, checked against timelines computed by hand and against independent implementations."""

import itertools
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from loadtest.distribution import Distribution, percentile
from loadtest.estimate import mean_and_interval, t_quantile
from loadtest.latency import e2e, itl, lag, server_time, stage_sum_gap, tpot, ttft, ttft_parts
from loadtest.record import Outcome, Record
from loadtest.slo import Miss, Slo, broken, meets, miss_reason, rounded_up
from loadtest.summary import summarise
from loadtest.window import Window, attainment, concurrency, goodput, max_output_tokens_per_s

WINDOW = Window(10.0)
LOOSE = Slo(ttft_s=100.0)


def answered(first: float = 0.2, *gaps: float, due: float = 0.0, lag: float = 0.0, **fields: Any) -> Record:
    """Due at `due`, first token `first` s later, then a token after each gap; handed off, without stages."""
    times = [due + first]
    for gap in gaps:
        times.append(times[-1] + gap)
    tokens = len(times)
    record = Record(
        number=0,
        session="",
        scheduled=due,
        sent=due + lag,
        token_times=tuple(times),
        ended=times[-1],
        outcome="ok",
        reason="",
        prompt_tokens=100,
        output_tokens=tokens,
        asked_tokens=tokens,
        cached_tokens=0,
        stages_ms={},
        prefill_worker="p0",
        decode_worker="d0",
        retries=0,
        transport="tcp",
        kv_bytes=1000,
        kv_blocks=7,
        recomputed_tokens=0,
    )
    return replace(record, **fields)


def lost(outcome: Outcome, reason: str = "", due: float = 0.0, **fields: Any) -> Record:
    """A request that received no token."""
    nothing = {"token_times": (), "output_tokens": 0, "prefill_worker": "", "decode_worker": "", "transport": ""}
    moved = {"prompt_tokens": 0, "kv_bytes": 0, "kv_blocks": 0}
    return answered(due=due, ended=due + 0.001, asked_tokens=8, outcome=outcome, reason=reason, **{**nothing, **moved, **fields})


def stages(**ms: float) -> dict[str, float]:
    names = ("queue", "prefill", "transfer", "decode", "prefill_wait", "prefill_compute", "connect", "read", "verify")
    return {**dict.fromkeys(names, 0.0), **ms}


@st.composite
def records(draw: st.DrawFn) -> Record:
    times = st.floats(0.0, 2.0)
    due, late = draw(st.floats(0.0, 12.0)), draw(st.floats(0.0, 0.1))
    outcome: Outcome = draw(st.sampled_from(["ok", "ok", "refused", "failed", "timeout", "cancelled"]))
    if outcome != "ok":
        return lost(outcome, draw(st.sampled_from(["", "SATURATED"])), due)
    stage_ms: Mapping[str, float] = draw(st.just({}) | st.builds(stages, queue=times, prefill=times, transfer=times, decode=times))
    first, gaps = late + draw(times), draw(st.lists(times, max_size=5))
    asked = len(gaps) + 1 + draw(st.sampled_from([0, 0, 1]))
    return answered(first, *gaps, due=due, lag=late, stages_ms=stage_ms, asked_tokens=asked)


slos = st.builds(
    Slo, ttft_s=st.floats(0.01, 3.0), tpot_s=st.none() | st.floats(0.01, 3.0), itl_p99_s=st.none() | st.floats(0.01, 3.0)
) | st.builds(Slo, tpot_s=st.floats(0.01, 3.0))


# One request


def test_a_worked_example_of_one_request() -> None:
    """TTFT 200 ms, 50 tokens, E2E 2200 ms: TPOT 40.8 ms."""
    record = answered(0.2, *[2.0 / 49] * 49, due=5.0, lag=0.05)
    assert ttft(record) == pytest.approx(0.2)
    assert e2e(record) == pytest.approx(2.2)
    assert tpot(record) == pytest.approx(0.0408, abs=5e-5)
    assert len(itl(record)) == 49
    assert lag(record) == pytest.approx(0.05)


def test_latencies_count_from_the_due_time_and_not_from_the_send_time() -> None:
    record = answered(0.5, 0.1, due=1.0, lag=0.4)
    assert ttft(record) == pytest.approx(0.5)
    assert e2e(record) == pytest.approx(0.6)


def test_itl_lists_every_gap() -> None:
    assert itl(answered(0.2, 0.1, 0.3, 0.0)) == pytest.approx((0.1, 0.3, 0.0))


def test_the_mean_of_the_gaps_is_the_tpot() -> None:
    record = answered(0.2, 0.1, 0.3, 0.05)
    assert tpot(record) == pytest.approx(statistics.fmean(itl(record)))


def test_one_token_has_a_ttft_and_no_tpot() -> None:
    record = answered(0.2)
    assert ttft(record) == e2e(record) == 0.2
    assert tpot(record) is None
    assert itl(record) == ()


def test_a_request_without_tokens_has_no_latencies() -> None:
    record = lost("failed")
    assert (ttft(record), tpot(record), e2e(record), itl(record)) == (None, None, None, ())
    assert (server_time(record), stage_sum_gap(record), ttft_parts(record)) == (None, None, None)


@given(records())
def test_ttft_and_gaps_add_up_to_e2e(record: Record) -> None:
    first, whole = ttft(record), e2e(record)
    if first is None or whole is None:
        reject()
    assert first + sum(itl(record)) == pytest.approx(whole)
    if (per_token := tpot(record)) is not None:
        assert first + per_token * (record.output_tokens - 1) == pytest.approx(whole)


def test_server_time_sums_the_consecutive_stages_and_not_their_parts() -> None:
    record = answered(
        0.2,
        0.8,
        lag=0.1,
        stages_ms=stages(queue=10, prefill=80, transfer=9, decode=783, prefill_wait=30, prefill_compute=45, read=5, verify=2),
    )
    assert server_time(record) == pytest.approx(0.882)
    assert stage_sum_gap(record) == pytest.approx((0.9 - 0.882) / 0.9)  # from `sent`: the lag is not the server's


def test_the_stage_gap_also_counts_stages_that_claim_too_much() -> None:
    assert stage_sum_gap(answered(0.5, 0.5, stages_ms=stages(decode=1100))) == pytest.approx(0.1)


def test_the_parts_of_the_ttft_add_up() -> None:
    record = answered(0.2, lag=0.01, stages_ms=stages(queue=10, prefill=150, prefill_wait=40, prefill_compute=100))
    expected = {"queue": 0.01, "prefill_wait": 0.04, "prefill_compute": 0.1, "prefill": 0.01, "client": 0.04}
    assert ttft_parts(record) == pytest.approx(expected)


def test_the_parts_of_the_ttft_are_never_negative() -> None:
    """After a retry the server's prefill time includes both attempts."""
    parts = ttft_parts(answered(0.2, stages_ms=stages(prefill=300, prefill_wait=10, prefill_compute=350)))
    assert parts is not None
    assert parts["client"] == parts["prefill"] == 0.0


# The SLO


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=500ms", Slo(ttft_s=0.5)),
        ("ttft=500ms,tpot=50ms,itl_p99=200ms", Slo(0.5, 0.05, 0.2)),
        (" tpot = 0.05s , ttft=1.5 s", Slo(1.5, 0.05)),
        ("itl_p99=.2s", Slo(itl_p99_s=0.2)),
    ],
)
def test_an_slo_is_read_from_text(text: str, slo: Slo) -> None:
    assert Slo.parse(text) == slo
    assert Slo.parse(str(slo)) == slo


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not one of ttft, tpot, itl_p99"),
        ("e2e=1s", "'e2e' is not one of"),
        ("ttft=1s,", "'' is not one of"),
        ("ttft", "ttft= is not a time"),
        ("ttft=500", "ttft=500 is not a time with its unit"),
        ("ttft=5us", "ttft=5us is not a time"),
        ("ttft=-5ms", "ttft=-5ms is not a time"),
        ("ttft=nans", "ttft=nans is not a time"),
        ("ttft=1s,tpot=0ms", "tpot=0ms must be positive"),
        ("ttft=" + "9" * 400 + "s", "must be positive and finite"),
        ("ttft=1s,ttft=2s", "ttft is given twice"),
    ],
)
def test_the_error_for_a_bad_slo_names_it(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slo.parse(text)


@pytest.mark.parametrize("limits", [{}, {"ttft_s": 0.0}, {"ttft_s": 1.0, "tpot_s": -1.0}, {"itl_p99_s": math.inf}, {"itl_p99_s": math.nan}])
def test_an_impossible_slo_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least one|positive and finite"):
        Slo(**limits)


@pytest.mark.parametrize(
    ("record", "slo", "what"),
    [
        (answered(0.2, 0.04, 0.06), Slo(0.2, 0.05, 0.06), None),  # each exactly at its limit
        (answered(0.2, due=0.9), Slo(ttft_s=0.2), None),  # (0.9 + 0.2) - 0.9 is a little more than 0.2
        (answered(0.201, 0.04, 0.06), Slo(0.2, 0.05, 0.06), "ttft"),
        (answered(0.2, 0.042, 0.06), Slo(0.2, 0.05, 0.06), "tpot"),
        (answered(0.2, 0.04, 0.06), Slo(0.2, 0.05, 0.0597), "itl_p99"),  # P99 of (40, 60) is 59.8 ms
        (answered(0.2, 0.04, 0.06), Slo(0.2, 0.05, 0.0599), None),
        (answered(0.3, 0.9, 0.9), Slo(0.2, 0.05, 0.06), "ttft"),  # all three: the first counts
        (answered(0.2, *[0.01] * 98, 0.5), Slo(tpot_s=0.05), None),  # a stall that only the gaps show
        (answered(0.2, *[0.01] * 9, 0.5), Slo(tpot_s=0.2, itl_p99_s=0.05), "itl_p99"),
        (answered(0.2), Slo(tpot_s=0.05, itl_p99_s=0.05), None),  # undefined for one token
        (answered(0.2, 0.01, asked_tokens=3), LOOSE, "short"),
        (answered(0.2, outcome="ok", token_times=(), output_tokens=0, asked_tokens=0), LOOSE, "short"),
        (answered(0.2, outcome="cancelled"), LOOSE, "cancelled"),
        (answered(0.2, outcome="failed", asked_tokens=9), LOOSE, "failed"),
        (lost("refused"), LOOSE, "refused"),
        (lost("timeout"), LOOSE, "timeout"),
    ],
)
def test_the_first_broken_limit_of_an_slo_is_named(record: Record, slo: Slo, what: str | None) -> None:
    assert broken(record, slo) == what
    assert meets(record, slo) == (what is None)


@pytest.mark.parametrize(
    ("told", "where"),
    [
        (stages(queue=400, prefill=90, prefill_wait=50, prefill_compute=40), "queue"),
        (stages(queue=50, prefill=440, prefill_wait=300, prefill_compute=130), "prefill_wait"),
        (stages(queue=50, prefill=440, prefill_wait=130, prefill_compute=300), "prefill_compute"),
        (stages(queue=50, prefill=440), "prefill"),  # bypass: computed on the decode worker
        (stages(queue=50, prefill=100, prefill_wait=20, prefill_compute=80), "client"),
        ({}, "unknown"),
    ],
)
def test_a_late_first_token_is_attributed_to_the_longest_part(told: dict[str, float], where: str) -> None:
    assert miss_reason(answered(0.5, stages_ms=told), Slo(ttft_s=0.2)) == Miss("ttft", where)


MOVED = stages(transfer=30)


@pytest.mark.parametrize(
    ("record", "slo", "miss"),
    [
        # Without the first gap the mean is 40 ms.
        (answered(0.1, 0.3, 0.04, 0.04, stages_ms=MOVED), Slo(tpot_s=0.05), Miss("tpot", "transfer")),
        (answered(0.1, 0.3, 0.06, 0.06, stages_ms=MOVED), Slo(tpot_s=0.05), Miss("tpot", "decode")),
        (answered(0.1, 0.04, 0.3, 0.04, stages_ms=MOVED), Slo(tpot_s=0.05), Miss("tpot", "decode")),
        (answered(0.1, 0.3, stages_ms=MOVED), Slo(tpot_s=0.05), Miss("tpot", "transfer")),  # two tokens: there is only one gap
        (answered(0.1, 0.3, 0.04, 0.04, stages_ms=stages()), Slo(tpot_s=0.05), Miss("tpot", "decode")),  # bypass: nothing moved
        (answered(0.1, 0.3, *[0.04] * 9, stages_ms=MOVED), Slo(itl_p99_s=0.1), Miss("itl_p99", "transfer")),
        (answered(0.1, 0.3, *[0.04] * 9, 0.3, stages_ms=MOVED), Slo(itl_p99_s=0.1), Miss("itl_p99", "decode")),
        # The handoff does not explain the ITL. The TPOT is met.
        (answered(0.1, 0.2, *[0.01] * 20, 0.2, stages_ms=MOVED), Slo(tpot_s=0.05, itl_p99_s=0.1), Miss("itl_p99", "decode")),
        (answered(0.1, 0.01, asked_tokens=3), LOOSE, Miss("short", "output")),
        (lost("refused", "SATURATED"), LOOSE, Miss("refused", "SATURATED")),
        (lost("timeout"), LOOSE, Miss("timeout", "unknown")),
        (answered(0.1), LOOSE, None),
    ],
)
def test_a_miss_is_attributed_to_its_cause(record: Record, slo: Slo, miss: Miss | None) -> None:
    assert miss_reason(record, slo) == miss


@given(records(), slos)
def test_only_a_missed_slo_has_a_reason(record: Record, slo: Slo) -> None:
    miss = miss_reason(record, slo)
    assert (miss is None) == meets(record, slo)
    assert (miss.what if miss else None) == broken(record, slo)


@given(records(), slos, st.floats(1.0, 10.0))
def test_a_looser_slo_is_met_whenever_the_tighter_one_is(record: Record, slo: Slo, factor: float) -> None:
    looser = Slo(**{f"{name}_s": limit * factor for name, limit in slo.limits.items()})
    assert meets(record, looser) or not meets(record, slo)


# Many requests


@pytest.mark.parametrize("times", [(0, 0, 0), (10, 5, 5), (10, 11, 0), (-1, 0, 0), (10, -1, 0), (math.inf, 0, 0), (math.nan, 0, 0)])
def test_an_impossible_window_is_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match=r"nothing is left|must be finite"):
        Window(*times)


def test_the_window_selects_requests_by_due_time_only() -> None:
    window = Window(duration_s=10.0, warm_up_s=2.0, cool_down_s=1.0)
    due = [1.999, 2.0, 8.999, 9.0]
    taken = window.select([answered(50.0, due=at, lag=5.0) for at in due])
    assert [record.scheduled for record in taken] == [2.0, 8.999]
    assert window.length == 7.0


def test_goodput_and_attainment_match_a_hand_calculation() -> None:
    """Ten seconds, five requests, two of them good: 0.2 a second, 40 %."""
    run = [answered(0.1), answered(0.3), answered(0.1, due=9.9), lost("refused"), lost("timeout"), answered(0.1, due=10.0)]
    slo = Slo(ttft_s=0.2)
    assert goodput(run, WINDOW, slo) == pytest.approx(0.2)
    assert attainment(run, WINDOW, slo) == pytest.approx(0.4)


def naive_good(record: Record, slo: Slo) -> bool:
    """A second implementation of the definitions, independent of the first."""
    times = record.token_times
    if record.outcome != "ok" or len(times) != record.asked_tokens:
        return False
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    rank = 0.99 * (len(gaps) - 1)
    values = [(times[0] - record.scheduled, slo.ttft_s)]
    if gaps:
        low = gaps[int(rank)]
        p99 = low + (gaps[min(int(rank) + 1, len(gaps) - 1)] - low) * (rank - int(rank))
        values += [((times[-1] - times[0]) / len(gaps), slo.tpot_s), (p99, slo.itl_p99_s)]
    return all(limit is None or value <= limit + 1e-9 for value, limit in values)


@given(st.lists(records(), max_size=20), slos, st.sampled_from([WINDOW, Window(10.0, 2.5, 1.5), Window(1.0)]))
def test_goodput_agrees_with_a_naive_implementation(run: list[Record], slo: Slo, window: Window) -> None:
    due = [r for r in run if window.warm_up_s <= r.scheduled < window.duration_s - window.cool_down_s]
    good = sum(naive_good(record, slo) for record in due)
    assert goodput(run, window, slo) * window.length == pytest.approx(good)
    assert attainment(run, window, slo) == (pytest.approx(good / len(due)) if due else None)


def test_a_late_generator_makes_the_run_void() -> None:
    late = [answered(due=i / 100, lag=0.05 if i % 10 == 0 else 0.001) for i in range(100)]
    told = summarise(late, WINDOW)
    assert told.late and told.void is not None
    assert "50.0 ms" in told.void
    assert "10 ms" in told.void
    assert summarise(late, WINDOW, max_lag_s=0.06).void is None


@pytest.mark.parametrize(
    ("slo", "tokens", "allowed"),
    [
        (Slo(ttft_s=2.0), 5, 0.2),
        (Slo(ttft_s=2.0, itl_p99_s=0.3), 5, 0.03),
        (Slo(ttft_s=2.0, itl_p99_s=0.03), 5, 0.01),  # never less than 10 ms
        (Slo(tpot_s=0.04), 11, 0.04),  # a delay of 40 ms lengthens the mean of ten gaps by 4 ms
        (Slo(tpot_s=0.4), 1, 0.04),
    ],
)
def test_the_allowed_lag_follows_the_tightest_objective(slo: Slo, tokens: int, allowed: float) -> None:
    assert slo.max_lag_s(tokens) == pytest.approx(allowed)
    assert slo.allowing(allowed * 3, tokens).max_lag_s(tokens) == pytest.approx(allowed * 3, rel=0.1) and slo.allowing(0.001, tokens) == slo
    for late, void in ((allowed * 0.99, False), (allowed * 1.01, True)):
        run = [answered(0.5, due=1.0, lag=late, asked_tokens=tokens)]
        told = summarise(run, WINDOW, slo)
        assert (told.late, bool(told.void)) == (void, void) and told.max_lag_ms == pytest.approx(1000 * allowed)


def test_a_proposed_limit_has_two_digits_and_is_not_below_what_was_seen() -> None:
    assert [rounded_up(value) for value in (0.1, 0.1234, 0.00991, 9.91, 0.099)] == [0.1, 0.13, 0.01, 10.0, 0.099]


def test_one_late_request_in_a_thousand_does_not_make_the_run_void() -> None:
    run = [answered(due=i / 1000, lag=0.5 if i == 7 else 0.010) for i in range(1000)]  # the limit itself is allowed
    assert summarise(run, WINDOW).void is None


def test_lag_outside_the_window_does_not_count_and_an_empty_window_is_void() -> None:
    run = [answered(due=0.0, lag=1.0, first=2.0)]
    assert summarise([*run, answered(due=5.0)], Window(10.0, warm_up_s=1.0)).void is None
    told = summarise(run, Window(10.0, warm_up_s=1.0))
    assert told.void == "no request was due in the window" and not told.late


def flight(sent: float, ended: float, **fields: Any) -> Record:
    return answered(due=sent, ended=ended, **fields)


def test_concurrency_matches_a_hand_calculation() -> None:
    """Two overlap for one second; the third starts as they end; the last ends before the window and was refused."""
    run = [flight(1, 4), flight(3, 5), flight(5, 6, outcome="failed"), flight(7, 7), flight(0.2, 0.9, outcome="refused")]
    seen = concurrency(run, Window(11.0, warm_up_s=1.0))
    assert dict(zip(seen.times, seen.in_flight, strict=True)) == {1: 1, 3: 2, 4: 1, 5: 1, 6: 0}
    assert seen.max == 2
    assert seen.mean == pytest.approx((3 + 2 + 1) / 10)


def test_concurrency_counts_requests_in_flight_at_the_edges_of_the_window() -> None:
    seen = concurrency([flight(0, 3), flight(9, 99), flight(50, 60)], Window(12.0, warm_up_s=2.0, cool_down_s=2.0))
    assert (seen.times, seen.in_flight) == ((2, 3, 9), (1, 0, 1))
    assert seen.mean == pytest.approx((1 + 1) / 8)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=12))
def test_concurrency_agrees_with_counting_at_each_moment(spans: list[tuple[int, int]]) -> None:
    """Times are whole seconds, so nothing changes within [t, t + 1) and counting at each t is exact."""
    seen = concurrency([flight(began, began + length) for began, length in spans], Window(18.0, 3.0, 2.0))
    counts = [sum(began <= t < began + length for began, length in spans) for t in range(3, 16)]
    assert seen.max == max(counts)
    assert seen.mean == pytest.approx(statistics.fmean(counts))


def test_the_busiest_second_counts_tokens_of_every_request() -> None:
    run = [answered(1.5, 0.6, 0.5), answered(2.2, outcome="failed"), answered(0.0, *[0.01] * 50)]  # tokens at 1.5, 2.1, 2.6 and 2.2
    assert max_output_tokens_per_s(run, Window(10.0, warm_up_s=1.0)) == 3
    assert max_output_tokens_per_s(run, Window(2.5, warm_up_s=1.0)) == 2  # from 1 to 2 one, from 2 to 2.5 two
    assert max_output_tokens_per_s(run, Window(10.0, warm_up_s=1.4)) == 3  # from 1.4 to 2.4 those at 1.5, 2.1 and 2.2
    assert max_output_tokens_per_s(run, Window(10.0, warm_up_s=1.55)) == 2  # from 1.55 to 2.55 two, then one


# A run


def test_percentiles_interpolate() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([4.0, 1.0], 99) == pytest.approx(3.97)
    assert percentile([], 99) is None


def test_a_distribution_matches_a_hand_calculation() -> None:
    values = Distribution.of([float(i) for i in range(101)])
    assert (values.count, values.mean, values.p50, values.p90, values.p99, values.max) == (101, 50.0, 50.0, 90.0, 99.0, 100.0)
    assert values.std == pytest.approx(math.sqrt((101**2 - 1) / 12))


def a_run() -> list[Record]:
    return [
        answered(
            0.2,
            0.1,
            0.3,
            due=1.0,
            lag=0.002,
            cached_tokens=40,
            retries=1,
            recomputed_tokens=5,
            stages_ms=stages(queue=10, prefill=180, prefill_wait=60, prefill_compute=110, transfer=20, read=12, verify=3, decode=380),
        ),
        answered(
            0.4,
            0.1,
            due=2.0,
            prompt_tokens=300,
            prefill_worker="",
            transport="",
            kv_bytes=0,
            kv_blocks=0,
            stages_ms=stages(queue=20, prefill=370, decode=100),
        ),
        answered(
            0.1, due=3.0, decode_worker="", transport="", kv_bytes=0, kv_blocks=0, stages_ms=stages(queue=30, prefill=60, prefill_wait=40)
        ),
        lost("refused", "SATURATED", due=4.0),
        lost("refused", "SATURATED", due=4.0),
        answered(
            0.5, 0.7, due=5.0, outcome="failed", asked_tokens=9, retries=2, recomputed_tokens=3, transport="", kv_bytes=0, kv_blocks=0
        ),
        answered(0.9, 0.9, due=20.0, lag=9.0, retries=7, recomputed_tokens=7),  # after the window
    ]


def test_a_summary_matches_a_hand_calculation() -> None:
    summary = summarise(a_run(), WINDOW, Slo(ttft_s=0.3, tpot_s=0.15))
    assert (summary.requests, summary.completed, summary.met) == (6, 3, 1)
    assert summary.outcomes == {"ok": 3, "refused": 2, "failed": 1}
    assert summary.reasons == {"SATURATED": 2, "unknown": 1}
    assert summary.misses == {
        Miss("tpot", "decode"): 1,
        Miss("ttft", "prefill"): 1,
        Miss("refused", "SATURATED"): 2,
        Miss("failed", "unknown"): 1,
    }
    assert summary.goodput == pytest.approx(0.1)
    assert summary.attainment == pytest.approx(1 / 6)
    assert summary.void is None
    assert (summary.ttft_ms.count, summary.tpot_ms.count, summary.itl_ms.count) == (3, 2, 3)
    assert summary.ttft_ms.p50 == pytest.approx(200) and summary.ttft_ms.max == pytest.approx(400)
    assert summary.tpot_ms.mean == pytest.approx(150) and summary.itl_ms.max == pytest.approx(300)
    assert summary.e2e_ms.mean == pytest.approx((600 + 500 + 100) / 3)
    assert (summary.max_concurrent_requests, summary.max_output_tokens_per_s) == (2, 3)
    assert summary.mean_concurrent_requests == pytest.approx((0.598 + 0.5 + 0.1 + 0.002 + 1.2) / 10)
    assert summary.lag_ms.max == pytest.approx(2)
    assert summary.lag_ms.count == 6
    assert (summary.input_tokens, summary.output_tokens) == (500, 6)
    assert summary.cached_share == pytest.approx(40 / 500)
    assert (summary.retries, summary.recomputed_tokens) == (3, 8)
    assert (summary.handoffs, summary.kv_bytes, summary.kv_blocks) == (1, 1000, 7)
    assert summary.stage_sum_gap.count == 3
    assert summary.stage_sum_gap.max == pytest.approx((100 - 90) / 100)


def test_stage_times_cover_only_the_requests_that_reached_the_stage() -> None:
    told = summarise(a_run(), WINDOW).stages_ms
    counts = {stage: values.count for stage, values in told.items()}
    of_handoff = dict.fromkeys(("transfer", "connect", "read", "verify"), 1)
    assert counts == {"queue": 3, "prefill": 3, "prefill_wait": 2, "prefill_compute": 2, **of_handoff, "decode": 2}
    assert told["queue"].p50 == 20
    assert told["prefill_wait"].p50 == 50
    assert told["transfer"].p99 == 20
    assert told["decode"].mean == 240


VLLM_KEYS = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
} | {f"{statistic}_{name}_ms" for statistic in ("mean", "median", "std", "p90", "p99") for name in ("ttft", "tpot", "itl", "e2el")}


def test_the_json_has_the_keys_of_vllm_with_the_same_meanings() -> None:
    told = summarise(a_run(), WINDOW, Slo(ttft_s=0.3, tpot_s=0.15)).as_json()
    assert set(told) >= VLLM_KEYS
    assert (told["duration"], told["completed"], told["failed"]) == (10.0, 3, 3)
    assert told["request_throughput"] == pytest.approx(0.3)
    assert told["request_goodput"] == pytest.approx(0.1)
    assert told["output_throughput"] == pytest.approx(0.6)
    assert told["input_throughput"] == pytest.approx(50.0)
    assert told["total_token_throughput"] == pytest.approx(50.6)
    assert told["offered_throughput"] == pytest.approx(0.6)
    assert told["median_ttft_ms"] == told["p50_ttft_ms"] == pytest.approx(200)
    assert told["p90_ttft_ms"] == pytest.approx(360)
    assert told["p99_ttft_ms"] == pytest.approx(396)
    assert told["mean_e2el_ms"] == pytest.approx(400)
    assert told["std_tpot_ms"] == pytest.approx(50)
    assert told["mean_itl_ms"] == pytest.approx(500 / 3)
    assert told["misses"] == {"tpot": {"decode": 1}, "ttft": {"prefill": 1}, "refused": {"SATURATED": 2}, "failed": {"unknown": 1}}
    assert told["slo"] == {"ttft_ms": 300, "tpot_ms": 150}
    assert told["stages_ms"]["transfer"]["p90"] == 20


def test_without_an_slo_there_is_no_goodput() -> None:
    summary = summarise(a_run(), WINDOW)
    assert (summary.met, summary.goodput, summary.attainment, summary.misses) == (None, None, None, {})
    assert summary.as_json()["request_goodput"] is None
    assert summary.as_json()["slo"] is None


@pytest.mark.parametrize("run", [[], [answered(due=11.0, lag=1.0, first=2.0)]])
def test_a_window_without_a_request_is_void_and_has_no_numbers(run: list[Record]) -> None:
    summary = summarise(run, WINDOW, LOOSE)
    assert summary.void == "no request was due in the window"
    assert (summary.goodput, summary.attainment, summary.cached_share) == (0.0, None, None)
    assert (summary.max_concurrent_requests, summary.mean_concurrent_requests, summary.max_output_tokens_per_s) == (0, 0.0, 0)
    told = summary.as_json()
    assert told["mean_ttft_ms"] is told["p99_itl_ms"] is told["stages_ms"]["queue"]["p50"] is None


def test_a_run_with_only_refusals_is_not_void_and_has_zero_goodput() -> None:
    summary = summarise([lost("refused", "SATURATED", due=i / 10) for i in range(100)], WINDOW, LOOSE)
    assert (summary.completed, summary.goodput, summary.attainment) == (0, 0.0, 0.0)
    assert summary.misses == {Miss("refused", "SATURATED"): 100}
    assert summary.ttft_ms == Distribution(0, None, None, None, None, None, None)
    assert summary.void is None
    assert "NaN" not in json.dumps(summary.as_json(), allow_nan=False)


def test_requests_in_flight_after_the_warm_up_are_part_of_the_load() -> None:
    """A request due before the window counts in no latency, but its tokens and its place on the server do count."""
    run = (record for record in [answered(2.5, 0.1, 0.1, due=0.0), answered(0.6, due=2.0)])
    summary = summarise(run, Window(10.0, warm_up_s=1.0))
    assert (summary.requests, summary.output_tokens) == (1, 1)
    assert (summary.max_concurrent_requests, summary.max_output_tokens_per_s) == (2, 4)
    assert summary.mean_concurrent_requests == pytest.approx((1.7 + 0.6) / 9)


def test_single_token_answers_have_no_tpot_and_meet_any_tpot_slo() -> None:
    summary = summarise([answered(0.2, due=float(i)) for i in range(10)], WINDOW, Slo(tpot_s=0.01))
    assert summary.attainment == 1.0
    assert summary.tpot_ms.count == summary.itl_ms.count == 0
    assert summary.as_json()["mean_tpot_ms"] is None


def test_the_summary_reports_a_late_generator() -> None:
    run = [answered(first=0.5, due=1.0, lag=0.02)]
    assert "late" in (summarise(run, WINDOW).void or "")
    assert summarise(run, WINDOW, max_lag_s=0.02).void is None


@given(st.lists(records(), max_size=12), slos)
def test_the_summary_counts_every_request_once_and_fits_into_json(run: list[Record], slo: Slo) -> None:
    summary = summarise(iter(run), WINDOW, slo)
    assert summary.met == summary.requests - sum(summary.misses.values())
    assert summary.goodput == pytest.approx((summary.met or 0) / WINDOW.length)
    assert sum(summary.outcomes.values()) == summary.requests
    assert sum(summary.reasons.values()) == summary.requests - summary.completed
    told = json.loads(json.dumps(summary.as_json(), allow_nan=False))
    assert sum(sum(where.values()) for where in told["misses"].values()) == summary.requests - (summary.met or 0)
    assert set(told) >= VLLM_KEYS


# Several seeds

# Two-sided 95 % and 99 % by degrees of freedom, from the printed tables (for example NIST/SEMATECH e-Handbook 1.3.6.7.2).
T_TABLE = {
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    3: (3.182, 5.841),
    4: (2.776, 4.604),
    5: (2.571, 4.032),
    6: (2.447, 3.707),
    7: (2.365, 3.499),
    8: (2.306, 3.355),
    9: (2.262, 3.250),
    10: (2.228, 3.169),
    15: (2.131, 2.947),
    20: (2.086, 2.845),
    29: (2.045, 2.756),
    30: (2.042, 2.750),
}


@pytest.mark.parametrize("freedom", T_TABLE)
def test_t_quantiles_agree_with_printed_tables(freedom: int) -> None:
    assert t_quantile(freedom, 0.95) == pytest.approx(T_TABLE[freedom][0], abs=5.1e-4)
    assert t_quantile(freedom, 0.99) == pytest.approx(T_TABLE[freedom][1], abs=5.1e-4)


def test_t_converges_to_the_normal_quantile() -> None:
    assert t_quantile(100_000, 0.95) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-4)


@pytest.mark.parametrize(("freedom", "confidence"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_t_outside_its_range_is_refused(freedom: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="no t for"):
        t_quantile(freedom, confidence)


def test_an_interval_matches_a_hand_calculation() -> None:
    """Mean 4, s = 2, n = 3: 4 +- 4.303 * 2 / sqrt(3)."""
    estimate = mean_and_interval([2.0, 4.0, 6.0])
    assert (estimate.count, estimate.mean) == (3, 4.0)
    assert estimate.half_width == pytest.approx(4.968, abs=1e-3)
    assert estimate.low == pytest.approx(-0.968, abs=1e-3) and estimate.high == pytest.approx(8.968, abs=1e-3)
    assert (mean_and_interval([2.0, 4.0, 6.0], 0.99).half_width or 0) > 2 * (estimate.half_width or 0)


def test_one_run_has_no_interval_and_no_runs_have_no_mean() -> None:
    one, none = mean_and_interval([3.0]), mean_and_interval([])
    assert (one.mean, one.half_width, one.low, one.high) == (3.0, None, None, None)
    assert (none.count, none.mean, none.half_width, none.low, none.high) == (0, None, None, None, None)


def test_a_mean_of_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        mean_and_interval([1.0, math.nan])


def test_the_interval_contains_the_true_mean_as_often_as_it_claims() -> None:
    """2000 experiments of four normal values: with normal quantiles the interval would contain the mean only 85 % of the time."""
    normal = statistics.NormalDist(10.0, 3.0)
    draws = normal.samples(8000, seed=1)
    held = 0
    for i in range(0, len(draws), 4):
        estimate = mean_and_interval(draws[i : i + 4])
        held += (estimate.low or 0) <= 10.0 <= (estimate.high or 0)
    assert held / 2000 == pytest.approx(0.95, abs=0.015)
