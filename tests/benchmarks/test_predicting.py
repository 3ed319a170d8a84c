"""What is predicted of a GPU beside what it does, without one: which requests are sent, how errors are judged, and what is told of them."""

import json
from dataclasses import replace
from typing import Any

import benchmark_predictions
import pytest
from gpu_predict import BELIEVED, DEVICE, Case, asked, lines, part, predicted, rate_of, serves, settings, sheet_profile
from predicting import BODY, Judged, errors_of, fingerprint, judged, middle, objectives, whole_offer

from baton.profile.models import Fitted
from loadtest.plan import Workload
from loadtest.record import Record
from loadtest.window import Window

H200 = sheet_profile(DEVICE.raw, "NVIDIA H200")


def cell_of(case: Case) -> dict[str, Any]:
    return {"rate": rate_of(case, DEVICE, H200, H200), "load": DEVICE.load(case), "slo": [0.1, 0.02]}


@pytest.mark.parametrize("case", DEVICE.cases, ids=lambda case: case.name)
def test_every_case_for_a_device_sends_prompts_of_all_its_lengths_and_fits_into_the_model(case: Case) -> None:
    """A load that drops what is longer than its `max_tokens` would send nothing of the long ones."""
    offer, _ = asked(cell_of(case), DEVICE.seconds)
    due = [item for item, at in zip(offer.items, offer.times, strict=True) if offer.window.start <= at < offer.window.end]
    least, most = map(int, case.load["input"].split("-"))
    lengths = [len(item.tokens) for item in due]
    assert len(due) > 15 and min(lengths) < least + (most - least) / 3 and max(lengths) > most - (most - least) / 3
    assert max(len(item.tokens) + item.output_tokens for item in offer.items) <= DEVICE.longest
    assert DEVICE.amount.prompts[-1] >= most, "what is asked lies within what is profiled"


def test_a_load_that_leaves_requests_out_is_refused() -> None:
    with pytest.raises(ValueError, match="left out"):
        whole_offer(Workload(input="500-3000", output="100", max_tokens=2048), 4.0, Window(8.0))


def test_a_profile_chooses_rates_unless_it_is_far_from_the_sheet() -> None:
    chat, more = DEVICE.cases[:2]
    assert rate_of(more, DEVICE, H200, H200) == pytest.approx(more.share * serves(H200, more.load, DEVICE.chunk), rel=0.05)
    assert 1 < rate_of(chat, DEVICE, H200, H200) < rate_of(more, DEVICE, H200, H200) < DEVICE.most

    def times(factor: float) -> float:
        values = {name: factor * value for name, value in H200.values("step").items()}
        changed = replace(H200, models={**H200.models, "step": Fitted(values)})
        return rate_of(chat, DEVICE, changed, H200) / rate_of(chat, DEVICE, H200, H200)

    assert times(1.5) == pytest.approx(1 / 1.5, rel=0.05)
    assert times(20) == pytest.approx(1 / BELIEVED, rel=0.05) and times(0.05) == pytest.approx(BELIEVED, rel=0.05)


def test_the_sheet_is_that_of_the_device() -> None:
    assert sheet_profile(DEVICE.raw, "NVIDIA H100 80GB HBM3").source == "sheet h100"
    assert sheet_profile(DEVICE.raw, "").source == H200.source == "sheet h200"
    assert H200.engine["kv_blocks"] > 10_000 and H200.engine["max_num_batched_tokens"] == DEVICE.chunk


def test_objectives_are_times_of_an_idle_worker() -> None:
    slo = objectives(0.0421, 0.006, 2.5, 3.0)
    assert (slo.ttft_s, slo.tpot_s) == (0.11, 0.018) and middle("500-3000") == 1750 and middle("64") == 64


def test_predictions_are_of_the_requests_that_were_measured() -> None:
    case = {**cell_of(DEVICE.cases[0]), "rate": 1.0}
    offer, _ = asked(case, 8.0)
    assert fingerprint(offer) == fingerprint(asked(case, 8.0)[0]) != fingerprint(asked({**case, "rate": 1.1}, 8.0)[0])
    found: dict[str, Any] = {"raw": dict(DEVICE.raw), "device": "", "seconds": 8.0, "settings": settings(DEVICE), "cases": {"chat": case}}
    with pytest.raises(ValueError, match="other requests"):
        predicted({**found, "cases": {"chat": {**case, "requests": "none"}}}, 0)
    case |= {"requests": fingerprint(offer), "void": None, "measured": {"TTFT P50 (ms)": 40.0}}
    predicted(found, 0)
    assert [*found["judged"]] == ["sheet"], "without a profile"


def test_an_error_is_a_share_of_what_was_measured() -> None:
    measured = {"goodput (/s)": 4.0, "TTFT P99 (ms)": 100.0, "hit rate": 0.0, "TPOT P50 (ms)": None}
    told = {
        "goodput (/s)": (5.0, 3.0, 6.0),
        "TTFT P99 (ms)": (50.0, 40.0, 60.0),
        "hit rate": (0.0, 0.0, 0.0),
        "TPOT P50 (ms)": (1.0, 1.0, 1.0),
    }
    found = [*judged("a", measured, told)]
    assert [each.figure for each in found] == ["goodput (/s)", "TTFT P99 (ms)"], "0 in both, or not measured, is no case"
    of = errors_of(found)
    assert of["errors"]["goodput (/s)"] == of["errors"][BODY] == {"cases": 1, "median": 0.25, "p90": 0.25, "worst": 0.25}
    assert of["errors"]["TTFT P99 (ms)"]["worst"] == 0.5 and of["covered"] == 0.5 and of["outside"] == ["a: TTFT P99 (ms)"]
    assert errors_of([]) == {"errors": {}, "covered": None, "outside": []} and Judged("", "", 0.0, 1.0, 0.0, 2.0).error == 1.0


def test_a_part_that_fails_ends_no_other() -> None:
    kept: list[str] = []
    found: dict[str, Any] = {"parts": {}}
    for name in ("one", "two"):
        with part(found, name, lambda: kept.append(json.dumps(found))):
            if name == "one":
                raise RuntimeError("a worker is gone")
    assert "a worker is gone" in found["parts"]["one"]["failed"] and "failed" not in found["parts"]["two"]
    assert len(kept) == 2 and "a worker is gone" in kept[0], "written after each"


def test_each_request_is_told_with_its_times() -> None:
    one = Record(
        number=0, session="", scheduled=0.5, sent=0.5, token_times=(0.6, 0.7), ended=0.7, outcome="ok", reason="", prompt_tokens=30,
        output_tokens=2, asked_tokens=2, cached_tokens=16, stages_ms={}, prefill_worker="", decode_worker="d", retries=0, transport="",
        kv_bytes=0, kv_blocks=0, recomputed_tokens=0,
    )  # fmt: skip
    late = replace(one, token_times=(), outcome="timeout", output_tokens=0)
    assert lines([one, late]) == ["0.500 30 16 2 100.00 100.00", "0.500 30 16 0 timeout timeout"]


def test_the_tables_of_predictions_name_both_and_mark_what_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {"errors": {"TTFT P50 (ms)": {"cases": 1, "median": 0.1, "p90": 0.1, "worst": 0.1}}, "covered": 0.5}
    nothing = {"TTFT P99 (ms)": None, "hit rate": 0.0}
    case = {
        "rate": 4.0, "void": None, "measured": {"goodput (/s)": 4.0, "TTFT P50 (ms)": 50.0, "TPOT P50 (ms)": 7.0, **nothing},
        "predicted": {
            "sheet": {"goodput (/s)": [4.0, 3.0, 5.0], "TTFT P50 (ms)": [45.0, 40.0, 49.0], "TPOT P50 (ms)": [7.0, 6.0, 8.0]},
            "fit": {"goodput (/s)": [4.2, 3.0, 5.0], "TTFT P50 (ms)": [50.0, 40.0, 60.0], "hit rate": [0.0, 0.0, 0.0]},
        },
    }  # fmt: skip
    found = {"judged": {"sheet": of, "fit": of}, "cases": {"chat": case}}
    monkeypatch.setattr(benchmark_predictions, "load", lambda name: found)
    *_, row = benchmark_predictions.gpu_predicted("x").splitlines()
    assert row == "| chat | 4.00 | 4.00 / 4.00, +0 % / 4.20, +5 % | 50.0 / 45.0, -10 % ° / 50.0, +0 % |  | 7.00 / 7.00, +0 % |  |"
    *_, errors, covered = benchmark_predictions.gpu_predictions("x").splitlines()
    assert errors == "| TTFT P50 (ms) | 1 | 10.0 % / 10.0 % / 10.0 % | 10.0 % / 10.0 % / 10.0 % |" and covered.endswith("| 50 % | 50 % |")
