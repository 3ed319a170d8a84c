"""The summary of one run. Computed in seconds, kept in milliseconds; a number that does not exist is None, and null in JSON. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from baton.stages import TOLD
from loadtest.distribution import Distribution, percentile
from loadtest.latency import e2e, itl, lag, stage_sum_gap, tpot, ttft
from loadtest.record import Record
from loadtest.slo import FLOAT_NOISE_S, LEAST_LAG_S, Miss, Slo, miss_reason
from loadtest.window import Window, attainment, concurrency, goodput, max_output_tokens_per_s


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of one run, over its window. Latencies, lag and stages are in ms; latencies and tokens are of completed requests."""

    window: Window
    slo: Slo | None
    void: str | None  # why the run proves nothing
    late: bool  # whether the generator was later than `max_lag_ms` at P99
    max_lag_ms: float  # allowed under the SLO

    requests: int  # due in the window
    completed: int  # of these, ended ok
    outcomes: Mapping[str, int]
    reasons: Mapping[str, int]  # of those that did not end ok
    failures: Mapping[str, int]  # the same with their outcome: "refused: SATURATED"
    met: int | None  # None without an SLO, like the next two
    goodput: float | None  # requests/s
    attainment: float | None
    misses: Mapping[Miss, int]

    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution  # of all gaps of all requests
    e2e_ms: Distribution
    stages_ms: Mapping[str, Distribution]  # of the requests that went through the stage
    stage_sum_gap: Distribution  # share of the E2E from `sent`; within MAX_STAGE_GAP the stages explain the request
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
        """The keys of `vllm bench serve`'s result (except those that say how it was called), and Baton's own. Missing numbers are null.

        `duration` is the window's length, and `failed` counts every request that did not end ok. Times that vLLM counts from `sent` are
        counted from due.
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
            "max_lag_ms": self.max_lag_ms,
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


def summarise(
    records: Iterable[Record], window: Window, slo: Slo | None = None, *, due: int | None = None, max_lag_s: float | None = None
) -> Summary:
    """`records`: all of the run. Those due outside the window count only towards the requests in flight and the tokens arriving during it.

    due         requests that became due in the whole run. Without it, nothing checks that each of them has a record.
    max_lag_s   by default, what the SLO allows
    """
    records = list(records)
    in_window = window.select(records)
    completed = [record for record in in_window if record.outcome == "ok"]
    failures = [record for record in in_window if record.outcome != "ok"]
    misses = Counter(miss for record in in_window if slo and (miss := miss_reason(record, slo)))
    prompt_tokens = sum(record.prompt_tokens for record in completed)
    in_flight = concurrency(records, window)
    if max_lag_s is None:
        max_lag_s = slo.max_lag_s(min((record.asked_tokens for record in in_window), default=1)) if slo else LEAST_LAG_S
    late = late_reason(in_window, max_lag_s)
    return Summary(
        window=window,
        slo=slo,
        void=(None if due is None else lost_reason(records, due)) or (late if in_window else "no request was due in the window"),
        late=late is not None,
        max_lag_ms=max_lag_s * 1000,
        requests=len(in_window),
        completed=len(completed),
        outcomes=Counter(record.outcome for record in in_window),
        reasons=Counter(record.reason or "unknown" for record in failures),
        failures=Counter(f"{record.outcome}: {record.reason or 'unknown'}" for record in failures),
        met=len(in_window) - misses.total() if slo else None,
        goodput=goodput(in_window, window, slo) if slo else None,
        attainment=attainment(in_window, window, slo) if slo else None,
        misses=misses,
        ttft_ms=_in_ms(ttft(record) for record in completed),
        tpot_ms=_in_ms(tpot(record) for record in completed),
        itl_ms=_in_ms(gap for record in completed for gap in itl(record)),
        e2e_ms=_in_ms(e2e(record) for record in completed),
        stages_ms={
            stage: Distribution.of([record.stages_ms[stage] for record in completed if _went_through(record, stage)]) for stage in TOLD
        },
        stage_sum_gap=Distribution.of([gap for record in completed if (gap := stage_sum_gap(record)) is not None]),
        lag_ms=_in_ms(lag(record) for record in in_window),
        input_tokens=prompt_tokens,
        output_tokens=sum(record.output_tokens for record in completed),
        cached_share=sum(record.cached_tokens for record in completed) / prompt_tokens if prompt_tokens else None,
        retries=sum(record.retries for record in in_window),
        recomputed_tokens=sum(record.recomputed_tokens for record in in_window),
        handoffs=sum(record.transport != "" for record in in_window),
        kv_bytes=sum(record.kv_bytes for record in in_window),
        kv_blocks=sum(record.kv_blocks for record in in_window),
        max_output_tokens_per_s=max_output_tokens_per_s(records, window),
        max_concurrent_requests=in_flight.max,
        mean_concurrent_requests=in_flight.mean,
    )


def lost_reason(records: Iterable[Record], due: int) -> str | None:
    """Why the records do not match the requests that became due: each must have exactly one. None: they match."""
    numbers = Counter(record.number for record in records)
    if twice := sum(count > 1 for count in numbers.values()):
        return f"{twice} of {due} requests have more than one record"
    if len(numbers) != due:
        return f"{due} requests became due and {len(numbers)} have a record"
    return None


def late_reason(records: Iterable[Record], max_lag_s: float) -> str | None:
    """Why the run says more about the generator than about the server. None: it was not late."""
    late = percentile([lag(record) for record in records], 99)
    if late is not None and late > max_lag_s + FLOAT_NOISE_S:
        return f"the generator was late: P99 of sent - due is {late * 1000:.1f} ms, the limit is {max_lag_s * 1000:g} ms"
    return None


def _went_through(record: Record, stage: str) -> bool:
    """The server reports 0 for a stage that the request skipped; many such zeros would hide how long the others waited."""
    match stage:
        case "prefill_wait" | "prefill_compute":
            taken = record.prefill_worker != ""
        case "transfer" | "connect" | "read" | "verify":
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
