"""Latency objectives, whether a request meets them, and which stage is to blame if it does not. Pure."""

import math
import re
from dataclasses import dataclass, replace
from typing import Self

from baton.stages import largest, slow_tokens_because
from loadtest.distribution import percentile
from loadtest.latency import itl, tpot, ttft, ttft_parts
from loadtest.record import Record

FLOAT_NOISE_S = 1e-9  # rounding error of a time difference: 1.1 - 0.9 > 0.2 is not a miss
LEAST_LAG_S = 0.010  # always allowed
LAG_SHARE = 0.1  # of the tightest objective: so little of it may be the generator's own delay


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives, s. A request must meet all that are given. Raises ValueError if none is, or one is not positive and finite."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_p99_s: float | None = None  # of the request's own gaps

    def __post_init__(self) -> None:
        if not self.limits:
            raise ValueError(f"an SLO limits at least one of {', '.join(_OBJECTIVES)}")
        for name, limit in self.limits.items():
            if not 0 < limit < math.inf:
                raise ValueError(f"{name}={limit}s: must be positive and finite")

    @property
    def limits(self) -> dict[str, float]:
        """Name -> limit, s, for the objectives that are given, in the order of a request's life."""
        given = {"ttft": self.ttft_s, "tpot": self.tpot_s, "itl_p99": self.itl_p99_s}
        return {name: limit for name, limit in given.items() if limit is not None}

    def max_lag_s(self, tokens: int) -> float:
        """How late the generator may be, at P99, before a run says more about it than about the server. `tokens`: of the shortest answer.

        A delay lengthens a TTFT or a gap by itself, and a TPOT by its share of the gaps.
        """
        return max(LEAST_LAG_S, LAG_SHARE * min(limit * _gaps(name, tokens) for name, limit in self.limits.items()))

    def allowing(self, lag_s: float, tokens: int) -> "Slo":
        """The same objectives, as loose as such a lag requires."""
        least = {name: rounded_up(lag_s / LAG_SHARE / _gaps(name, tokens)) for name in self.limits}
        return Slo(**{f"{name}_s": max(limit, least[name]) for name, limit in self.limits.items()})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads "ttft=500ms,tpot=50ms,itl_p99=0.2s". Raises a ValueError that names the wrong part."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in _OBJECTIVES:
                raise ValueError(f"SLO {text!r}: {name!r} is not one of {', '.join(_OBJECTIVES)}")
            if name in limits:
                raise ValueError(f"SLO {text!r}: {name} is given twice")
            time = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)", value)
            if not time:
                raise ValueError(f"SLO {text!r}: {name}={value} is not a time with its unit, such as 500ms or 0.5s")
            limits[name] = float(time[1]) / (1000 if time[2] == "ms" else 1)
            if not 0 < limits[name] < math.inf:
                raise ValueError(f"SLO {text!r}: {name}={value} must be positive and finite")
        return cls(**{f"{name}_s": limit for name, limit in limits.items()})

    def __str__(self) -> str:
        return ",".join(f"{name}={limit * 1000:.10g}ms" for name, limit in self.limits.items())


_OBJECTIVES = ("ttft", "tpot", "itl_p99")


def _gaps(name: str, tokens: int) -> int:
    """The number of intervals over which an objective averages, and so spreads one delay."""
    return max(tokens - 1, 1) if name == "tpot" else 1


def rounded_up(seconds: float) -> float:
    """Rounds up to two digits, so that a proposed objective is easy to read and to type. Raises ValueError for 0."""
    step: float = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.ceil(seconds / step - 1e-9) * step:.2g}")


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a request does not count. One per request, so misses add up.

    what       where
    ttft       largest of `ttft_parts`, "unknown" without stages
    tpot, itl_p99   "transfer" when the gap that holds the handoff explains it alone, else "decode"
    short      "output": it ended ok, with fewer tokens than requested
    refused, failed, timeout, cancelled   the reason in Baton's error table, "unknown" without one
    """

    what: str
    where: str


def broken(record: Record, slo: Slo) -> str | None:
    """What keeps the request from counting (`Miss.what`): the first in the order outcome, tokens, TTFT, TPOT, ITL. None: it counts.

    An objective on something undefined holds: one token has no TPOT and no gap. vLLM's goodput does the same.
    """
    if record.outcome != "ok":
        return record.outcome
    if record.output_tokens < record.asked_tokens or not record.token_times:
        return "short"
    for name, limit in slo.limits.items():
        if not _holds(record, name, limit):
            return name
    return None


def meets(record: Record, slo: Slo) -> bool:
    """Whether it ended ok with every token it asked for and holds each objective (DistServe's goodput: all of them together)."""
    return broken(record, slo) is None


def miss_reason(record: Record, slo: Slo) -> Miss | None:
    """None: it meets the SLO."""
    what = broken(record, slo)
    if what is None:
        return None
    if record.outcome != "ok":
        return Miss(what, record.reason or "unknown")
    if what == "short":
        return Miss(what, "output")
    if what == "ttft":
        parts = ttft_parts(record)
        return Miss(what, largest(parts) if parts else "unknown")
    later = replace(record, token_times=record.token_times[1:], output_tokens=record.output_tokens - 1)
    return Miss(what, slow_tokens_because(record.stages_ms.get("transfer", 0.0), _holds(later, what, slo.limits[what])))


def _holds(record: Record, name: str, limit: float) -> bool:
    match name:
        case "ttft":
            value = ttft(record)
        case "tpot":
            value = tpot(record)
        case _:
            value = percentile(itl(record), 99)
    return value is None or value <= limit + FLOAT_NOISE_S
