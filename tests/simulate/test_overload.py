"""The policies of overload in virtual time, with the gate, the dispatcher, the levels and the workers' schedulers as they are: what the
policy alone loses when nothing takes the workers' time. The figures are those of `benchmarks/overload.py --simulated`, on shorter runs."""

from functools import cache
from statistics import median

import pytest
from overload import OUTPUT, PACE, SEQUENCES, TALE, Cell, simulated_arm

from baton.simulate.virtual_time import run

RATE = 0.9 * SEQUENCES / (OUTPUT * (PACE.step_s + SEQUENCES * PACE.sequence_s))


@cache
def cells(arm: str) -> dict[str, list[Cell]]:
    return run(simulated_arm(arm, TALE, RATE, 8.0))


def goodput(arm: str, times: str) -> float:
    return median(cell.row(TALE)["goodput"] for cell in cells(arm)[times])


@pytest.mark.parametrize("times", ["2", "5", "10"])
@pytest.mark.parametrize("arm", ["codel", "degrade"])
def test_nine_tenths_of_the_peak_are_served_well_under_overload(arm: str, times: str) -> None:
    peak = max(goodput("codel", each) for each in ("1", "2", "5", "10"))
    assert goodput(arm, times) >= 0.9 * peak


@pytest.mark.parametrize("times", ["5", "10"])
def test_nearly_nothing_is_served_well_where_everybody_waits(times: str) -> None:
    """Negative control."""
    assert goodput("queue", times) < 0.5 * max(goodput("codel", each) for each in ("1", "2", "5", "10"))


def test_with_less_for_each_more_are_served_and_all_of_it_comes_back() -> None:
    flooded = cells("degrade")["10"][0].row(TALE)
    assert flooded["goodput"] > 1.2 * goodput("codel", "10") and flooded["level"] == 3
    assert flooded["urgent"] == flooded["goodput"], "those of low priority are refused first"
    rows = [cell.row(TALE) for each in cells("degrade").values() for cell in each]
    assert sum(row["turns"] for row in rows) <= 4 and cells("degrade")["calm"][-1].levels[-1] == 0
    assert not any(cell.row(TALE)["degraded"] for each in cells("codel").values() for cell in each)


@pytest.mark.parametrize("arm", ["codel", "degrade"])
@pytest.mark.parametrize("times", ["5", "10"])
def test_refusals_come_at_once(arm: str, times: str) -> None:
    """But for those that had a place in the queue when the flood began. (`tests/router/test_admission.py` has the negative control.)"""
    refused = [one.e2e_s for one in cells(arm)[times][0].seen if one.status == "RESOURCE_EXHAUSTED"]
    assert len(refused) > 300 and sum(waited > 0.05 for waited in refused) < 0.05 * len(refused)
