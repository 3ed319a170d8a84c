"""Which objective was missed and which stage is to blame, in agreement with the load test."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.record import Record
from loadtest.slo import FLOAT_NOISE_S, Slo, miss_reason
from router.slo import Attainment, Objectives, RequestTimes, missed_because

STAGES = {"queue": 0.1, "prefill": 0.4, "transfer": 0.2, "decode": 0.3}
TIMES = RequestTimes(STAGES, e2e_s=1.0, ttft_s=0.5, tpot_s=0.05, tpot_rest_s=0.03, prefill_wait_s=0.05, prefill_compute_s=0.3)

ANSWERED = Record(0, "", 0.0, 0.0, (), 0.0, "ok", "", 8, 0, 0, 0, {}, "prefill-0", "decode-0", 0, "tcp", 1, 1, 0)


@pytest.mark.parametrize(
    ("objectives", "times", "cause"),
    [
        (Objectives(), TIMES, None),
        (Objectives(0.5, 0.05, 1.0), TIMES, None),
        (Objectives(ttft_s=0.4), TIMES, "prefill_compute"),
        (Objectives(ttft_s=0.4), replace(TIMES, prefill_wait_s=0.32, prefill_compute_s=0.05), "prefill_wait"),
        (Objectives(ttft_s=0.4), replace(TIMES, prefill_wait_s=0.0, prefill_compute_s=0.0), "prefill"),
        (Objectives(ttft_s=0.4), replace(TIMES, stages={**STAGES, "queue": 0.5}), "queue"),
        (Objectives(tpot_s=0.04), TIMES, "transfer"),
        (Objectives(tpot_s=0.02), TIMES, "decode"),
        (Objectives(tpot_s=0.04), replace(TIMES, tpot_rest_s=None), "transfer"),
        (Objectives(tpot_s=0.04), replace(TIMES, stages={**STAGES, "transfer": 0.0}), "decode"),
        (Objectives(e2e_s=0.9), TIMES, "prefill"),
        (Objectives(e2e_s=0.9), replace(TIMES, stages={**STAGES, "decode": 0.9}), "decode"),
        (Objectives(0.4, 0.01, 0.1), TIMES, "prefill_compute"),
        (Objectives(0.6, 0.01, 0.1), TIMES, "decode"),
        (Objectives(ttft_s=0.1, tpot_s=0.001), replace(TIMES, ttft_s=None, tpot_s=None), None),
    ],
)
def test_a_miss_is_blamed_on_its_largest_part(objectives: Objectives, times: RequestTimes, cause: str | None) -> None:
    assert missed_because(objectives, times) == cause


SECONDS = st.integers(1, 2000).map(lambda milliseconds: milliseconds / 1000)


@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), st.lists(SECONDS, min_size=1, max_size=12), SECONDS, SECONDS)
def test_the_cause_agrees_with_the_load_test(
    stages: tuple[float, float, float, float], gaps: list[float], ttft_limit: float, tpot_limit: float
) -> None:
    """For a client that sees the same times as the router."""
    queue, wait, compute, transfer = stages
    first = queue + wait + compute
    times = [first]
    for gap in gaps:
        times.append(times[-1] + gap)
    told = {
        "queue": queue, "prefill": wait + compute, "transfer": transfer, "decode": 1.0, "prefill_wait": wait, "prefill_compute": compute,
    }  # fmt: skip
    record = replace(ANSWERED, token_times=tuple(times), output_tokens=len(times), stages_ms={name: 1000 * at for name, at in told.items()})
    miss = miss_reason(record, Slo(ttft_limit, tpot_limit))
    decoding = times[-1] - times[0]
    ours = RequestTimes(
        stages={name: told[name] for name in STAGES},
        e2e_s=times[-1],
        ttft_s=first,
        tpot_s=decoding / len(gaps),
        tpot_rest_s=(decoding - gaps[0]) / (len(gaps) - 1) if len(gaps) > 1 else None,
        prefill_wait_s=wait,
        prefill_compute_s=compute,
    )
    noise = FLOAT_NOISE_S
    assert missed_because(Objectives(ttft_limit + noise, tpot_limit + noise), ours) == (miss.where if miss else None)


class TestAttainment:
    def test_the_ratio_covers_the_last_requests_of_the_window(self) -> None:
        attainment = Attainment(window=4)
        assert attainment.ratio is None
        for met, ratio in ((True, 1.0), (False, 0.5), (False, 1 / 3), (False, 0.25), (True, 0.25), (True, 0.5)):
            attainment.note(met)
            assert attainment.ratio == ratio

    @given(st.integers(1, 20), st.lists(st.booleans(), min_size=1, max_size=60))
    def test_the_ratio_equals_a_plain_count(self, window: int, met: list[bool]) -> None:
        attainment = Attainment(window)
        for one in met:
            attainment.note(one)
        assert attainment.ratio == sum(met[-window:]) / len(met[-window:])
