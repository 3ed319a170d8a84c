"""What benchmarks share that measure a cluster under the load test and compare its figures with those that were predicted."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.predict.predict import Offer
from baton.predict.report import offer_of
from baton.profile.file import Profile
from baton.profile.models import NUMBERS, Work, step_seconds, works_of_prompt
from loadtest.drive import Run, drive
from loadtest.grpc_door import GrpcDoor
from loadtest.plan import Workload
from loadtest.slo import Slo
from loadtest.window import Window

JUDGED = ("goodput (/s)", "TTFT P50 (ms)", "TTFT P99 (ms)", "TPOT P50 (ms)", "hit rate")
TAIL, BODY = "TTFT P99 (ms)", "all but TTFT P99"
SEED = 1


@dataclass(frozen=True, slots=True)
class Judged:
    """A figure of a case as it was measured, and as it was predicted with its 90 % interval."""

    case: str
    figure: str
    measured: float
    value: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def error(self) -> float:
        """As a share of what was measured; a whole one, if nothing was."""
        return self.value / self.measured - 1 if self.measured else 1.0


def judged(case: str, measured: Mapping[str, float | None], told: Mapping[str, tuple[float, float, float]]) -> Iterable[Judged]:
    """`told`: value, low, high by figure. A figure that is 0 in both, as the hit rate where nothing is shared, is none."""
    for name in JUDGED:
        value, of = measured.get(name), told.get(name)
        if value is not None and of is not None and (value or of[0]):
            yield Judged(case, name, value, *of)


def errors_of(found: Iterable[Judged]) -> dict[str, Any]:
    """Relative errors by figure, the share of figures that lie within their intervals (None: there are none), and those that do not."""
    every = list(found)
    groups = {name: [each for each in every if each.figure == name] for name in JUDGED}
    groups[BODY] = [each for each in every if each.figure != TAIL]
    table = {}
    for name, group in groups.items():
        if group:
            off = [abs(each.error) for each in group]
            table[name] = {"cases": len(off), "median": float(np.median(off)), "p90": float(np.percentile(off, 90)), "worst": max(off)}
    covered = float(np.mean([each.inside for each in every])) if every else None
    return {"errors": table, "covered": covered, "outside": [f"{each.case}: {each.figure}" for each in every if not each.inside]}


def middle(lengths: str) -> int:
    """Of a range of tokens, as "500-3000"."""
    least, _, most = lengths.partition("-")
    return (int(least) + int(most or least)) // 2


def idle(profile: Profile, prompt: int, output: int, chunk: int) -> tuple[float, float, float]:
    """TTFT, TPOT, and processor seconds of one request alone."""
    step = dict(profile.values("step"))
    prefill = sum(step_seconds(step, profile.form, work) for work in works_of_prompt(prompt, 0, chunk))
    decode = step_seconds(step, profile.form, Work(decodes=1, context=prompt + output // 2))
    cost = {name: profile.values(name) for name in ("router", "worker", "client")}
    request, token = (sum(cost[name][of] for name in cost) for of in NUMBERS["router"])
    first = profile.values("path")["request"] + prefill + request + token
    return first, max(decode, token), prefill + output * (decode + token) + 2 * request


def objectives(first_s: float, token_s: float, ttft_times: float, tpot_times: float) -> Slo:
    """In times of those of an idle cluster, with two digits."""
    return Slo(ttft_s=float(f"{first_s * ttft_times:.2g}"), tpot_s=float(f"{token_s * tpot_times:.2g}"))


def whole_offer(load: Workload, rate: float, window: Window) -> Offer:
    """Raises ValueError if requests were left out, as those are that are longer than `max_tokens`: the rest are another load."""
    offer, left_out = offer_of(load, rate, SEED, window)
    if left_out:
        raise ValueError(f"requests were left out: {left_out}")
    return offer


def fingerprint(offer: Offer) -> str:
    """Of every token and moment: what is predicted elsewhere is of the same requests."""
    digest = hashlib.sha256(repr([(list(item.tokens), item.output_tokens) for item in offer.items]).encode())
    digest.update(repr([round(at, 6) for at in offer.times]).encode())
    return digest.hexdigest()[:16]


async def drive_measured(address: str, offer: Offer, salt: str) -> Run:
    """`salt`: no other run's, so that nothing is found in a cache."""
    async with GrpcDoor(address, salt) as door:
        for tokens in (64, 200):
            await door.ask([11] * tokens, 8, 30.0, lambda count: None)
        return await drive(offer.items, offer.times, door, duration_s=offer.window.duration_s, timeout_s=offer.timeout_s)
