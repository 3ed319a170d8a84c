"""The formulas that the router and the load test share, and the names of the stages."""

import pytest

from baton.stages import STAGES, TOLD, TTFT_PARTS, largest, slow_tokens_because, tpot, ttft_parts
from baton.v1 import generation_pb2 as pb


def test_an_answer_reports_every_stage() -> None:
    fields = {field.name.removesuffix("_ms") for field in pb.StageTimes.DESCRIPTOR.fields}
    assert fields == set(TOLD) and len(TOLD) == len(fields)
    assert [name for name in TOLD if name in STAGES] == list(STAGES) and set(TTFT_PARTS) < fields


def test_tpot_matches_a_calculation_by_hand() -> None:
    assert tpot(200, 2200, 50) == pytest.approx(40.8, abs=0.05)
    assert tpot(1.0, 1.0, 1) is None and tpot(0.0, 0.0, 0) is None


def test_the_prefill_stage_is_split_if_the_worker_reported_its_parts() -> None:
    assert ttft_parts({"queue": 1.0, "prefill": 9.0, "prefill_wait": 2.0, "prefill_compute": 6.0, "decode": 99.0}) == {
        "queue": 1.0,
        "prefill_wait": 2.0,
        "prefill_compute": 6.0,
        "prefill": 1.0,
    }
    assert largest(ttft_parts({"prefill": 9.0, "queue": 1.0})) == "prefill", "a bypass"
    assert ttft_parts({"prefill": 3.0, "prefill_compute": 4.0})["prefill"] == 0.0, "after a retry, the parts may exceed the stage"


def test_slow_tokens_are_blamed_on_the_transfer_only_if_it_alone_explains_them() -> None:
    assert slow_tokens_because(0.03, True) == "transfer"
    assert slow_tokens_because(0.03, False) == slow_tokens_because(0.0, True) == "decode"
