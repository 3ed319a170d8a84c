"""What a person sees of a run in progress. Pure."""

from loadtest.distribution import percentile
from loadtest.drive import Live
from loadtest.latency import itl, ttft
from loadtest.record import Record
from loadtest.slo import Slo, meets

RECENT_S = 10.0


def line(live: Live, slo: Slo, now: float) -> str:
    """`now`: seconds since the run began."""
    recent = recently_ended(live.records, now)
    said = f"{live.in_flight} in flight · {len(live.records)}/{live.due} ended · goodput {goodput(recent, slo, now):.3g}/s"
    firsts = percentile([value for record in recent if (value := ttft(record)) is not None], 50)
    gaps = percentile([gap for record in recent for gap in itl(record)], 50)
    if firsts is not None:
        said += f" · TTFT {1000 * firsts:.0f} ms"
    if gaps is not None:
        said += f" · ITL {1000 * gaps:.1f} ms"
    return said


def recently_ended(records: list[Record], now: float) -> list[Record]:
    """The records that ended in the last RECENT_S. `records` are in the order in which they ended."""
    recent = []
    for record in reversed(records):
        if record.ended < now - RECENT_S:
            break
        recent.append(record)
    return recent


def goodput(recent: list[Record], slo: Slo, now: float) -> float:
    """Requests/s that met the SLO, of those that ended within the last RECENT_S, or since the run began."""
    return sum(meets(record, slo) for record in recent) / min(max(now, 1e-9), RECENT_S)
