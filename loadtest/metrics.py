"""Every formula of the load test, each once. Pure functions of records; seconds inside, milliseconds in a Summary.

    one request      ttft, itl, tpot, e2e, lag; server_time, stage_sum_gap and ttft_parts for where the time went
    a promise        Slo; broken, meets, miss_reason
    many requests    Window; goodput, attainment, void_reason, concurrency, max_output_tokens_per_s
    a run            summarise -> Summary
    several seeds    mean_and_interval

A number that does not exist (the TPOT of one token, the P99 of nothing) is None, and null in JSON: never NaN, and never a 0 that looks
like a very good result.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from loadtest.record import Record

MAX_LAG_S = 0.010  # P99 above which a run says more of the generator than of the server
FLOAT_NOISE_S = 1e-9  # of differences of times: 1.1 - 0.9 > 0.2 is no missed promise
SERVER_STAGES = ("queue", "prefill", "transfer", "decode")  # add up to the request's time at the router
STAGES = ("queue", "prefill", "prefill_wait", "prefill_compute", "transfer", "read", "verify", "decode")


# One request


def ttft(record: Record) -> float | None:
    """Time to first token, s, from the moment the request was DUE. None without a token.

    From `sent` it would leave out the generator's own lateness, and with it the worst queues, since a generator is late exactly when
    the system is overloaded: coordinated omission (Gil Tene, "How NOT to Measure Latency"; wrk2). vLLM's `bench serve` counts from `sent`.
    """
    return record.token_times[0] - record.scheduled if record.token_times else None


def itl(record: Record) -> tuple[float, ...]:
    """Inter-token latencies, s: every gap between successive tokens, so one fewer than tokens. Source: vLLM `bench serve`."""
    return tuple(later - earlier for earlier, later in itertools.pairwise(record.token_times))


def tpot(record: Record) -> float | None:
    """Time per output token after the first, s: (E2E - TTFT) / (output tokens - 1). None for fewer than two.

    Source: vLLM `bench serve`. TTFT 200 ms, 50 tokens, E2E 2200 ms: 2000 / 49 = 40.8 ms.
    """
    first, whole = ttft(record), e2e(record)
    if first is None or whole is None or record.output_tokens < 2:
        return None
    return (whole - first) / (record.output_tokens - 1)


def e2e(record: Record) -> float | None:
    """End-to-end latency, s, from due to the last token ("e2el" in vLLM's keys). None without a token."""
    return record.token_times[-1] - record.scheduled if record.token_times else None


def lag(record: Record) -> float:
    """How late the generator sent it, s. Part of the TTFT."""
    return record.sent - record.scheduled


def server_time(record: Record) -> float | None:
    """The request's time at the router, s: the sum of its consecutive stages. None where the server did not tell."""
    if not record.stages_ms:
        return None
    return sum(record.stages_ms.get(stage, 0.0) for stage in SERVER_STAGES) / 1000


def stage_sum_gap(record: Record) -> float | None:
    """|sum of the server's stages - E2E from `sent`| as a share of the latter. None where either is missing.

    What the stages do not explain: network, the client, or a stage that lies.
    """
    told = server_time(record)
    seen = record.token_times[-1] - record.sent if record.token_times else 0.0
    return abs(told - seen) / seen if told is not None and seen > 0 else None


def ttft_parts(record: Record) -> dict[str, float] | None:
    """Where the TTFT went, s. None without a token or without stages.

    queue, prefill_wait, prefill_compute   as the server told
    prefill    the rest of the prefill stage. With a bypass that is all of it: the decode worker waits and computes and does not tell them
               apart. With a handoff it is the call to the prefill worker.
    client     the rest of the TTFT: the generator's lag, the network, the client itself
    """
    first, told = ttft(record), record.stages_ms
    if first is None or not told:
        return None
    parts = {stage: told.get(stage, 0.0) / 1000 for stage in ("queue", "prefill_wait", "prefill_compute")}
    parts["prefill"] = max(0.0, told.get("prefill", 0.0) / 1000 - parts["prefill_wait"] - parts["prefill_compute"])
    # After a retry the stages hold more than what came before the first token.
    parts["client"] = max(0.0, first - sum(parts.values()))
    return parts


# A promise


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives, s; a request must meet all that are given. Raises ValueError: none given, or one not positive and finite."""

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
        """Name -> s, of those that are given, in the order of a request's life."""
        given = {"ttft": self.ttft_s, "tpot": self.tpot_s, "itl_p99": self.itl_p99_s}
        return {name: limit for name, limit in given.items() if limit is not None}

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "ttft=500ms,tpot=50ms,itl_p99=0.2s". Raises ValueError that names the part which is wrong."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in _OBJECTIVES:
                raise ValueError(f"SLO {text!r}: {name!r} is none of {', '.join(_OBJECTIVES)}")
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


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a request does not count. One per request, so misses add up.

    what       where
    ttft       largest of `ttft_parts`, "unknown" without stages
    tpot, itl_p99   "transfer" when the gap that holds the handoff explains it alone, else "decode"
    short      "output": it ended ok, with fewer tokens than were asked for
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
    """It ended ok with every token it asked for, and each objective holds (DistServe's goodput: all of them at once)."""
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
        return Miss(what, max(parts, key=lambda part: parts[part]) if parts else "unknown")
    return Miss(what, "transfer" if _handoff_explains(record, what, slo.limits[what]) else "decode")


def _holds(record: Record, name: str, limit: float) -> bool:
    match name:
        case "ttft":
            value = ttft(record)
        case "tpot":
            value = tpot(record)
        case _:
            value = percentile(itl(record), 99)
    return value is None or value <= limit + FLOAT_NOISE_S


def _handoff_explains(record: Record, name: str, limit: float) -> bool:
    """The KV moves between tokens 0 and 1. Had the stream begun with token 1, would the objective hold?"""
    if not record.stages_ms.get("transfer"):
        return False
    return _holds(replace(record, token_times=record.token_times[1:], output_tokens=record.output_tokens - 1), name, limit)


# Many requests


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that is measured: [warm_up_s, duration_s - cool_down_s). Raises ValueError when that is empty."""

    duration_s: float
    warm_up_s: float = 0.0
    cool_down_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("duration_s", "warm_up_s", "cool_down_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: must be finite and not negative")
        if self.end <= self.start:
            raise ValueError(f"nothing is left of {self.duration_s} s after {self.warm_up_s} s warm-up and {self.cool_down_s} s cool-down")

    @property
    def start(self) -> float:
        return self.warm_up_s

    @property
    def end(self) -> float:
        return self.duration_s - self.cool_down_s

    @property
    def length(self) -> float:
        return self.end - self.start

    def select(self, records: Iterable[Record]) -> list[Record]:
        """Those that were due in it. By the due time, so that a slow server cannot push its worst requests out of the window."""
        return [record for record in records if self.start <= record.scheduled < self.end]


def goodput(records: Iterable[Record], window: Window, slo: Slo) -> float:
    """Requests per second that were due in the window and meet the whole SLO. Source: DistServe (OSDI '24); vLLM `request_goodput`."""
    return sum(meets(record, slo) for record in window.select(records)) / window.length


def attainment(records: Iterable[Record], window: Window, slo: Slo) -> float | None:
    """Share of the requests due in the window that meet the SLO; refused, failed and timed out ones missed it. None: none was due.

    Over all, not over the completed: else a server does best that refuses most.
    """
    due = window.select(records)
    return sum(meets(record, slo) for record in due) / len(due) if due else None


def void_reason(records: Iterable[Record], window: Window, max_lag_s: float = MAX_LAG_S) -> str | None:
    """Why the run proves nothing about the server. None: it counts."""
    late = percentile([lag(record) for record in window.select(records)], 99)
    if late is None:
        return "no request was due in the window"
    if late > max_lag_s + FLOAT_NOISE_S:
        return f"the generator was late: P99 of sent - due is {late * 1000:.1f} ms, allowed are {max_lag_s * 1000:g} ms"
    return None


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Requests in flight during the window: `in_flight[i]` from `times[i]` (s) on. The first time is the window's start."""

    times: tuple[float, ...]
    in_flight: tuple[int, ...]
    max: int
    mean: float  # over time


def concurrency(records: Iterable[Record], window: Window) -> Concurrency:
    """A sweep over [sent, ended) of all records, whatever became of them and whenever they were due: what the server carried.

    At equal times an end comes before a start, as in vLLM's `max_concurrent_requests` (which counts successful requests only).
    """
    change: Counter[float] = Counter({window.start: 0})
    busy = 0.0  # request-seconds
    for record in records:
        began, ended = max(record.sent, window.start), min(record.ended, window.end)
        if began < ended:
            change[began] += 1
            change[ended] -= 1
            busy += ended - began
    times = sorted(at for at in change if at < window.end)
    levels = np.cumsum([change[at] for at in times]).tolist()
    return Concurrency(tuple(times), tuple(levels), max(levels), busy / window.length)


def max_output_tokens_per_s(records: Iterable[Record], window: Window) -> int:
    """Most tokens that arrived in one of the seconds counted from the window's start. Source: vLLM `bench serve`."""
    seconds = Counter(int(at - window.start) for record in records for at in record.token_times if window.start <= at < window.end)
    return max(seconds.values(), default=0)


# A run


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the two nearest ranks (numpy's default, as in vLLM). None of nothing."""
    return float(np.percentile(values, percent)) if values else None


@dataclass(frozen=True, slots=True)
class Distribution:
    """`std` is that of the values themselves (divided by n), as numpy and vLLM have it. All None of nothing."""

    count: int
    mean: float | None
    std: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        if not values:
            return cls(0, None, None, None, None, None, None)
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(len(values), float(np.mean(values)), float(np.std(values)), p50, p90, p99, max(values))


@dataclass(frozen=True, slots=True)
class Summary:
    """What one run came to, over its window. Latencies, lag and stages are ms; latencies and tokens are of completed requests."""

    window: Window
    slo: Slo | None
    void: str | None  # why the run proves nothing

    requests: int  # due in the window
    completed: int  # of these, ended ok
    outcomes: Mapping[str, int]
    reasons: Mapping[str, int]  # of those that did not end ok
    met: int | None  # None without an SLO, as the next three
    goodput: float | None  # requests/s
    attainment: float | None
    misses: Mapping[Miss, int]

    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution  # of all gaps of all requests
    e2e_ms: Distribution
    stages_ms: Mapping[str, Distribution]  # of the requests that went through the stage
    stage_sum_gap: Distribution  # share of the E2E from `sent`; `max` is to stay within 0.02
    lag_ms: Distribution

    input_tokens: int
    output_tokens: int
    cached_share: float | None  # of the prompt tokens
    retries: int
    recomputed_tokens: int
    handoffs: int  # requests whose KV moved
    kv_bytes: int
    kv_blocks: int
    max_output_tokens_per_s: int
    max_concurrent_requests: int
    mean_concurrent_requests: float

    def as_json(self) -> dict[str, Any]:
        """The keys of `vllm bench serve`'s result (without those that tell how it was called), and ours. Numbers that do not exist: null.

        `duration` is the window's length; `failed` is every request that did not end ok; what vLLM counts from `sent`, we count from due.
        """
        length = self.window.length
        latencies = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "itl": self.itl_ms, "e2el": self.e2e_ms}
        misses: dict[str, dict[str, int]] = {}
        for miss, count in self.misses.items():
            misses.setdefault(miss.what, {})[miss.where] = count
        return {
            "duration": length,
            "completed": self.completed,
            "failed": self.requests - self.completed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.completed / length,
            "request_goodput": self.goodput,
            "output_throughput": self.output_tokens / length,
            "total_token_throughput": (self.input_tokens + self.output_tokens) / length,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent_requests,
            "rtfx": 0.0,  # of speech recognition; vLLM writes 0 for text
            **{key: value for name, values in latencies.items() for key, value in _vllm_keys(name, values).items()},
            "window": asdict(self.window),
            "slo": None if self.slo is None else {f"{name}_ms": limit * 1000 for name, limit in self.slo.limits.items()},
            "void": self.void,
            "requests": self.requests,
            "offered_throughput": self.requests / length,
            "input_throughput": self.input_tokens / length,
            "outcomes": dict(self.outcomes),
            "reasons": dict(self.reasons),
            "met": self.met,
            "attainment": self.attainment,
            "misses": misses,
            "stages_ms": {stage: asdict(values) for stage, values in self.stages_ms.items()},
            "stage_sum_gap": asdict(self.stage_sum_gap),
            "lag_ms": asdict(self.lag_ms),
            "cached_share": self.cached_share,
            "retries": self.retries,
            "recomputed_tokens": self.recomputed_tokens,
            "handoffs": self.handoffs,
            "kv_bytes": self.kv_bytes,
            "kv_blocks": self.kv_blocks,
            "mean_concurrent_requests": self.mean_concurrent_requests,
        }


def summarise(records: Iterable[Record], window: Window, slo: Slo | None = None, max_lag_s: float = MAX_LAG_S) -> Summary:
    """`records`: the whole run. Those due outside the window count only towards what was in flight and arrived during it."""
    records = list(records)
    due = window.select(records)
    completed = [record for record in due if record.outcome == "ok"]
    failures = [record for record in due if record.outcome != "ok"]
    misses = Counter(miss for record in due if slo and (miss := miss_reason(record, slo)))
    prompt_tokens = sum(record.prompt_tokens for record in completed)
    in_flight = concurrency(records, window)
    return Summary(
        window=window,
        slo=slo,
        void=void_reason(due, window, max_lag_s),
        requests=len(due),
        completed=len(completed),
        outcomes=Counter(record.outcome for record in due),
        reasons=Counter(record.reason or "unknown" for record in failures),
        met=len(due) - misses.total() if slo else None,
        goodput=goodput(due, window, slo) if slo else None,
        attainment=attainment(due, window, slo) if slo else None,
        misses=misses,
        ttft_ms=_in_ms(ttft(record) for record in completed),
        tpot_ms=_in_ms(tpot(record) for record in completed),
        itl_ms=_in_ms(gap for record in completed for gap in itl(record)),
        e2e_ms=_in_ms(e2e(record) for record in completed),
        stages_ms={
            stage: Distribution.of([record.stages_ms[stage] for record in completed if _went_through(record, stage)]) for stage in STAGES
        },
        stage_sum_gap=Distribution.of([gap for record in completed if (gap := stage_sum_gap(record)) is not None]),
        lag_ms=_in_ms(lag(record) for record in due),
        input_tokens=prompt_tokens,
        output_tokens=sum(record.output_tokens for record in completed),
        cached_share=sum(record.cached_tokens for record in completed) / prompt_tokens if prompt_tokens else None,
        retries=sum(record.retries for record in due),
        recomputed_tokens=sum(record.recomputed_tokens for record in due),
        handoffs=sum(record.transport != "" for record in due),
        kv_bytes=sum(record.kv_bytes for record in due),
        kv_blocks=sum(record.kv_blocks for record in due),
        max_output_tokens_per_s=max_output_tokens_per_s(records, window),
        max_concurrent_requests=in_flight.max,
        mean_concurrent_requests=in_flight.mean,
    )


def _went_through(record: Record, stage: str) -> bool:
    """The server tells 0 for a stage that there was not; many such zeros would hide how long the others waited."""
    match stage:
        case "prefill_wait" | "prefill_compute":
            taken = record.prefill_worker != ""
        case "transfer" | "read" | "verify":
            taken = record.prefill_worker != "" and record.decode_worker != ""
        case "decode":
            taken = record.decode_worker != ""
        case _:
            taken = True
    return taken and stage in record.stages_ms


def _in_ms(seconds: Iterable[float | None]) -> Distribution:
    return Distribution.of([value * 1000 for value in seconds if value is not None])


def _vllm_keys(name: str, values: Distribution) -> dict[str, float | None]:
    return {
        f"mean_{name}_ms": values.mean,
        f"median_{name}_ms": values.p50,
        f"std_{name}_ms": values.std,
        f"p50_{name}_ms": values.p50,
        f"p90_{name}_ms": values.p90,
        f"p99_{name}_ms": values.p99,
    }


# Several seeds


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of `count` runs; `half_width` of its confidence interval, None for fewer than two."""

    count: int
    mean: float | None
    half_width: float | None

    @property
    def low(self) -> float | None:
        return None if self.mean is None or self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.mean is None or self.half_width is None else self.mean + self.half_width


def mean_and_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """mean +- t * s / sqrt(n), s with n - 1: Student's interval for independent runs ("The Probable Error of a Mean", 1908).

    Raises ValueError for a value that is not finite, or a confidence outside (0, 1).
    """
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"not all finite: {list(values)}")
    n = len(values)
    if not n:
        return Estimate(0, None, None)
    mean = float(np.mean(values))
    if n == 1:
        return Estimate(1, mean, None)
    return Estimate(n, mean, t_quantile(n - 1, confidence) * float(np.std(values, ddof=1)) / math.sqrt(n))


def t_quantile(freedom: int, confidence: float) -> float:
    """t with P(|T| <= t) = confidence, for Student's T with so many degrees of freedom. Raises ValueError outside freedom >= 1, (0, 1)."""
    if freedom < 1 or not 0 < confidence < 1:
        raise ValueError(f"no t for {freedom} degrees of freedom and a confidence of {confidence}")
    low, high = 0.0, math.pi / 2  # of the angle, in which the probability grows steadily
    while low < (middle := (low + high) / 2) < high:
        if _t_probability(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _t_probability(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) * tan(angle)): Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even), a finite sum."""
    odd = freedom % 2
    power = math.cos(angle) if odd else 1.0
    terms = 0.0
    for k in range(2 + odd, freedom + 1, 2):
        terms += power
        power *= math.cos(angle) ** 2 * (k - 1) / k
    series = math.sin(angle) * terms
    return 2 / math.pi * (angle + series) if odd else series
