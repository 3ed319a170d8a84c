"""The progress line shown during a run."""

from dataclasses import replace

import pytest

from loadtest.drive import Live
from loadtest.progress import RECENT_S, goodput, line, recently_ended
from loadtest.record import Record
from loadtest.slo import Slo

GOOD = Record(0, "", 0.0, 0.0, (0.1, 0.2), 0.2, "ok", "", 8, 2, 2, 0, {}, "p", "d", 0, "", 0, 0, 0)


def ended(at: float, ok: bool = True) -> Record:
    return replace(GOOD, scheduled=at - 0.2, sent=at - 0.2, token_times=(at - 0.1, at), ended=at, outcome="ok" if ok else "failed")


def test_the_line_shows_the_goodput_of_the_last_seconds() -> None:
    """An arm that now answers everything too late has no goodput, however many requests met the SLO before."""
    records = [ended(float(i), ok=i % 4 != 0) for i in range(1, 31)]
    recent = recently_ended(records, 30.5)
    assert [record.ended for record in recent] == [float(i) for i in range(30, 20, -1)]
    assert goodput(recent, Slo(ttft_s=1.0), 30.5) == pytest.approx(8 / RECENT_S)
    assert goodput(recent, Slo(ttft_s=0.01), 30.5) == 0.0
    assert goodput(recently_ended(records[:4], 4.0), Slo(ttft_s=1.0), 4.0) == pytest.approx(3 / 4), "a young run is shorter than the period"
    said = line(Live(planned=40, due=35, in_flight=5, records=records), Slo(ttft_s=1.0), 30.5)
    assert said == "5 in flight · 30/35 ended · goodput 0.8/s · TTFT 100 ms · ITL 100.0 ms"
    assert line(Live(), Slo(ttft_s=1.0), 0.0) == "0 in flight · 0/0 ended · goodput 0/s"
