"""The traffic that a plan is made for, out of the load test's workloads and traces."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.plan.traffic import BLOCK, Length, Traffic, thinned, unevenness
from baton.predict.predict import Offer
from baton.predict.report import offer_of
from loadtest.plan import TRACE, Plan
from loadtest.slo import Slo
from loadtest.window import Window
from loadtest.workload import Item, hit_rate

SIMULATED, LEAST_S = 400, 15.0  # requests from the first on that are simulated, and for how long at least
WARM_UP = 0.25  # of that
CV2 = {"poisson": 1.0, "constant": 0.0}  # of arrivals that are drawn


@dataclass(frozen=True, slots=True)
class Offered:
    """`offer`: what of it is simulated."""

    traffic: Traffic
    offer: Offer
    slo: Slo
    notes: tuple[str, ...]


def offered(plan: Plan, rate: float) -> Offered:
    """Raises WorkloadError, and ValueError, which names the field."""
    for name in ("ttft", "tpot"):
        if name not in plan.slo.limits:
            raise ValueError(f"slo: {name} is missing; a plan needs both, as ttft=500ms,tpot=50ms")
    workload, length = plan.workload, plan.workload.duration_s
    offer, skipped = offer_of(plan.workload, rate, 1, plan.window, plan.timeout_s, plan.note)
    due = [each for each in _due(offer) if each[0] < length]
    if not due:
        raise ValueError("rate, duration: no request comes in this time")
    if workload.arrivals == TRACE and len(due) > 1:  # the trace may end before
        length = min(length, max(moment for moment, *_ in due) * len(due) / (len(due) - 1))
    notes = [f"left out: {count} requests, {reason}" for reason, count in skipped.items()]
    if "itl_p99" in plan.slo.limits:
        notes.append("itl_p99 is judged by the simulation alone")
    traffic = _traffic(due, length, CV2.get(workload.arrivals))
    window = min(length, max(LEAST_S, SIMULATED / traffic.rate))
    return Offered(traffic, replace(offer, window=Window(window, WARM_UP * window)), plan.slo, tuple(notes))


def _traffic(due: list[tuple[float, Length, Item]], length: float, cv2: float | None) -> Traffic:
    lengths, items = [each[1] for each in due], [each[2] for each in due]
    new, whole = sum(len(item.tokens) for item in items), sum(each.prompt for each in lengths)
    again = hit_rate(items, BLOCK) * new + (whole - new)  # a session's past comes on top
    moments = sorted(each[0] for each in due)
    uneven = unevenness(moments) if cv2 is None else cv2
    return Traffic(len(due) / length, thinned(lengths), uneven, min(0.99, again / whole), int(whole - again))


def _due(offer: Offer) -> Iterator[tuple[float, Length, Item]]:
    """When each request comes, and how long it is. Later turns of a session come when the earlier answer allows it; here, at once."""
    times, last, pasts = iter(offer.times), 0.0, dict[str, int]()
    for item in offer.items:
        past = pasts.get(item.session, 0) if item.session else 0
        if item.at is not None:
            last = item.at
        elif not past:
            if (moment := next(times, None)) is None:
                return
            last = moment
        prompt = past + len(item.tokens)
        if item.session:
            pasts[item.session] = prompt + item.output_tokens
        yield last, Length(prompt, item.output_tokens), item
