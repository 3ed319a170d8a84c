"""Every metric of every process: one table, and the numbers behind it.

Code that counts gets its counters from the process's `Book` once, at wiring. After that it adds to plain numbers, once per request or per
step, without a lock and without a lookup by name. Numbers that the process knows without counting (the length of a queue, the blocks of a
pool) are read: `Book.read` registers a function that is called at each scrape. `baton.cluster.metrics_http` writes a book in Prometheus's
format.

The counters are our own because those of prometheus_client lock: `inc` takes 0.28 us there and 0.04 us here, `observe` 0.65 us and 0.2 us,
a lookup by labels 0.8 us and 0.06 us, and every token is observed. A number has one writer, so it needs no lock; a scrape may see the sum
of a histogram one value ahead of its buckets.

These rules hold for the whole table, and a test checks them: base units, counters end in _total, no label names a request, and each label
has a known set of values. A value outside that set counts as "other".

Aliases are other projects' names for our numbers: those that the Gateway API Inference Extension scrapes, and those that dashboards for
vLLM show. They have no storage of their own. Each has the labels `model_name` and `engine`, as in vLLM.
"""

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from baton.cluster import gpu_watch
from baton.cluster.errors import Reason
from baton.cluster.handoff import COUNTED
from baton.stages import PREFILL_PARTS, STAGES

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["router", "prefill", "decode"]
Labels = Mapping[str, tuple[str, ...]]
Number = int | float

OTHER = "other"
OPEN: tuple[str, ...] = ()  # values that are not known in advance: workers, sizes. After MAX_OPEN series the rest count as "other"
MAX_OPEN = 256
ROUTER: tuple[Role, ...] = ("router",)
WORKERS: tuple[Role, ...] = ("prefill", "decode")
ALL: tuple[Role, ...] = ("router", "prefill", "decode")

REASONS = tuple(Reason.__members__)
OUTCOMES = ("ok", "invalid", "refused", "failed", "cancelled")
FINISHES = ("stop", "length")
TRANSPORTS = ("nixl", "nixl_vram", "tcp", "cuda_ipc", "none")
OBJECTIVES = ("ttft", "tpot", "e2e")
DOORS = ("grpc", "http")
EJECTIONS = ("errors", "digests", "pace")
CAUSES = ("queue", *PREFILL_PARTS, "prefill", "transfer", "decode", "error")

# Bounds of OpenTelemetry's GenAI conventions, extended downwards for small models.
TTFT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 300.0)
STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
READ_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
SIZE_BYTES = tuple(float(4**power) for power in range(5, 17))  # 1 KiB … 4 GiB
LENGTH_TOKENS = tuple(float(2**power) for power in range(0, 18))
BATCH_TOKENS = tuple(float(2**power) for power in range(0, 15))
BATCH_SEQUENCES = tuple(float(2**power) for power in range(0, 11))


@dataclass(frozen=True, slots=True)
class Alias:
    """`labels`: our label → theirs. Only series whose other labels have the values in `only` are shown."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` does not list `worker` and `role`, which every metric of a worker has."""

    name: str
    kind: Kind
    unit: str
    roles: tuple[Role, ...]
    help: str
    labels: Labels = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    aliases: tuple[Alias, ...] = ()


TABLE: tuple[Metric, ...] = (
    # Requests, as the router sees them
    Metric(
        "baton_router_requests_total", "counter", "requests", ROUTER,
        "Requests that ended, by outcome and reason. The reason is a finish reason or a reason from the error table.",
        {"outcome": OUTCOMES, "reason": (*FINISHES, *REASONS)},
        aliases=(Alias("vllm:request_success_total", {"reason": "finished_reason"}, {"outcome": "ok"}),),
    ),
    Metric(
        "baton_router_requests_in_flight", "gauge", "requests", ROUTER, "Requests that are being served now.",
        aliases=(Alias("vllm:num_requests_running"),),
    ),
    Metric(
        "baton_router_requests_queued", "gauge", "requests", ROUTER, "Requests that wait for admission now.",
        aliases=(Alias("vllm:num_requests_waiting"),),
    ),
    Metric(
        "baton_router_unread_bytes", "gauge", "bytes", ROUTER,
        "What waits in the router for clients to read. router.backlog_bytes bounds it for each request.",
    ),
    Metric(
        "baton_router_stalled_total", "counter", "requests", ROUTER,
        "Requests whose answer was cut off because the client read nothing for router.stall_s; they count as cancelled. "
        "Those that exceed router.backlog_bytes are not among them: they fail with STALLED.",
        {"door": DOORS},
    ),
    Metric(
        "baton_router_time_to_first_token_seconds", "histogram", "seconds", ROUTER,
        "Time from a request's arrival to its first token.", buckets=TTFT_S, aliases=(Alias("vllm:time_to_first_token_seconds"),),
    ),
    Metric(
        "baton_router_inter_token_latency_seconds", "histogram", "seconds", ROUTER,
        "Time between two successive tokens of a request.", buckets=TOKEN_S, aliases=(Alias("vllm:inter_token_latency_seconds"),),
    ),
    Metric(
        "baton_router_time_per_output_token_seconds", "histogram", "seconds", ROUTER,
        "Time from a request's first token to its last, divided by the tokens after the first.", buckets=TOKEN_S,
        aliases=(Alias("vllm:request_time_per_output_token_seconds"),),
    ),
    Metric(
        "baton_router_request_duration_seconds", "histogram", "seconds", ROUTER,
        "Time from a request's arrival to its end, for requests that succeeded.", buckets=DURATION_S,
        aliases=(Alias("vllm:e2e_request_latency_seconds"),),
    ),
    Metric(
        "baton_router_stage_duration_seconds", "histogram", "seconds", ROUTER,
        "Time in each stage of a request that succeeded. The stages are consecutive and add up to the request's duration.",
        {"stage": STAGES}, STAGE_S,
        aliases=(
            Alias("vllm:request_queue_time_seconds", only={"stage": "queue"}),
            Alias("vllm:request_prefill_time_seconds", only={"stage": "prefill"}),
            Alias("vllm:request_decode_time_seconds", only={"stage": "decode"}),
        ),
    ),
    Metric(
        "baton_router_prompt_tokens_total", "counter", "tokens", ROUTER, "Prompt tokens of requests that were not refused.",
        aliases=(Alias("vllm:prompt_tokens_total"),),
    ),
    Metric(
        "baton_router_output_tokens_total", "counter", "tokens", ROUTER, "Tokens that were streamed to clients.",
        aliases=(Alias("vllm:generation_tokens_total"),),
    ),
    Metric("baton_router_cached_tokens_total", "counter", "tokens", ROUTER, "Prompt tokens whose KV was cached instead of computed."),
    Metric(
        "baton_router_request_prompt_tokens", "histogram", "tokens", ROUTER, "Tokens in a prompt.", buckets=LENGTH_TOKENS,
        aliases=(Alias("vllm:request_prompt_tokens"),),
    ),
    Metric(
        "baton_router_request_output_tokens", "histogram", "tokens", ROUTER, "Output tokens of a successful request.",
        buckets=LENGTH_TOKENS, aliases=(Alias("vllm:request_generation_tokens"),),
    ),
    # Decisions
    Metric(
        "baton_router_choices_total", "counter", "choices", ROUTER, "Choices of a worker, by the reason for the choice.",
        {"role": WORKERS, "reason": ("cached prefix", "fetched prefix", "least work", "fits", "queues")},
    ),
    Metric(
        "baton_router_bypasses_total", "counter", "requests", ROUTER,
        "Prompts that the router sent straight to a decode worker to compute, without a handoff.",
        {"reason": ("short", "cached", "no prefill worker", "same worker", "prompt_logprobs")},
    ),
    Metric(
        "baton_router_retries_total", "counter", "attempts", ROUTER,
        "Attempts at a request after the first, by the reason that made them necessary.", {"reason": REASONS},
    ),
    Metric(
        "baton_router_retries_refused_total", "counter", "requests", ROUTER,
        "Requests that were not tried again because the budget of all retries (router.retry_budget) was spent.",
    ),
    Metric("baton_router_retry_budget_ratio", "gauge", "ratio", ROUTER, "What is left of router.retry_budget."),
    Metric(
        "baton_router_resumed_total", "counter", "requests", ROUTER,
        "Requests that continued a stream of which the client had the beginning, usually because a router died.",
    ),
    # Service levels
    Metric("baton_router_slo_met_total", "counter", "requests", ROUTER, "Requests that met every objective of the slo section."),
    Metric(
        "baton_router_slo_missed_total", "counter", "requests", ROUTER,
        "Requests that missed an objective, by the stage that took most of the time. error: the request was refused or failed.",
        {"cause": CAUSES},
    ),
    Metric(
        "baton_router_slo_attainment_ratio", "gauge", "ratio", ROUTER, "Share of the last slo.window requests that met every objective.",
    ),
    Metric("baton_router_slo_objective_seconds", "gauge", "seconds", ROUTER, "Objectives of the slo section.", {"objective": OBJECTIVES}),
    # The cluster, as the router sees it
    Metric("baton_router_known_text_tokens_total", "counter", "tokens", ROUTER, "Prompt tokens that were known from an earlier turn."),
    Metric("baton_router_prefix_index_entries", "gauge", "entries", ROUTER, "Entries in the prefix index, each a worker and a block key."),
    Metric("baton_router_prefix_index_refused_total", "counter", "entries", ROUTER, "Entries that a full prefix index did not keep."),
    Metric(
        "baton_router_worker_usable", "gauge", "1", ROUTER,
        "1: the router sends requests to this worker. 0: it is down, draining, put aside, or serves something else.",
        {"worker": OPEN, "role": WORKERS},
    ),
    Metric(
        "baton_router_worker_ejected", "gauge", "1", ROUTER,
        "1: the router has put this worker aside because it fails, damages KV or is slow, unlike its peers.",
        {"worker": OPEN, "role": WORKERS},
    ),
    Metric(
        "baton_router_ejections_total", "counter", "times", ROUTER, "How often a worker was put aside, by the reason.",
        {"cause": EJECTIONS},
    ),
    Metric(
        "baton_router_worker_credit_tokens", "gauge", "tokens", ROUTER,
        "Tokens that a worker can still promise to hold: its last report, minus what the router has sent since.",
        {"worker": OPEN, "role": WORKERS},
    ),
    Metric(
        "baton_router_worker_waiting_tokens", "gauge", "tokens", ROUTER,
        "Uncached prompt tokens waiting on this worker, as far as the router knows.",
        {"worker": OPEN, "role": WORKERS},
    ),
    # Engine
    Metric("baton_engine_step_duration_seconds", "histogram", "seconds", WORKERS, "Duration of one engine step.", buckets=STAGE_S),
    Metric("baton_engine_step_tokens", "histogram", "tokens", WORKERS, "Positions that one step computed.", buckets=BATCH_TOKENS),
    Metric("baton_engine_step_sequences", "histogram", "sequences", WORKERS, "Sequences in one step.", buckets=BATCH_SEQUENCES),
    Metric(
        "baton_engine_sequences_running", "gauge", "sequences", WORKERS, "Sequences that are running, or whose KV is being fetched.",
        aliases=(Alias("vllm:num_requests_running"),),
    ),
    Metric(
        "baton_engine_sequences_waiting", "gauge", "sequences", WORKERS, "Sequences that wait in the engine's queue.",
        aliases=(Alias("vllm:num_requests_waiting"),),
    ),
    Metric(
        "baton_engine_preemptions_total", "counter", "sequences", WORKERS, "Sequences that were preempted: they gave back their blocks.",
        aliases=(Alias("vllm:num_preemptions_total"),),
    ),
    Metric("baton_engine_computed_tokens_total", "counter", "tokens", WORKERS, "Positions whose KV this worker computed."),
    Metric(
        "baton_engine_recomputed_tokens_total", "counter", "tokens", WORKERS,
        "Positions that this worker computed again after a preemption.",
    ),
    Metric(
        "baton_engine_prefix_queried_tokens_total", "counter", "tokens", WORKERS, "Tokens that the engine looked up in the prefix cache.",
        aliases=(Alias("vllm:prefix_cache_queries_total"),),
    ),
    Metric(
        "baton_engine_prefix_hit_tokens_total", "counter", "tokens", WORKERS, "Tokens that the engine found in the prefix cache.",
        aliases=(Alias("vllm:prefix_cache_hits_total"),),
    ),
    Metric("baton_engine_drafted_tokens_total", "counter", "tokens", WORKERS, "Guesses of next tokens that the engine verified."),
    Metric("baton_engine_accepted_tokens_total", "counter", "tokens", WORKERS, "Guesses of next tokens that became output."),
    # KV
    Metric(
        "baton_kv_blocks", "gauge", "blocks", WORKERS, "Blocks of the KV pool: used by sequences or leases, cached as prefixes, or free.",
        {"state": ("used", "cached", "free")},
    ),
    Metric(
        "baton_kv_usage_ratio", "gauge", "ratio", ALL, "Used share of the KV pool; at the router, of all decode workers' pools.",
        aliases=(Alias("vllm:kv_cache_usage_perc"),),
    ),
    Metric(
        "baton_kv_cache_info", "gauge", "1", ALL, "Always 1. The labels give the tokens in a block and the blocks in the pool.",
        {"block_size": OPEN, "num_blocks": OPEN},
        aliases=(Alias("vllm:cache_config_info", {"block_size": "block_size", "num_blocks": "num_gpu_blocks"}),),
    ),
    Metric("baton_kv_quarantined_blocks", "gauge", "blocks", WORKERS, "Blocks held back: an abandoned read may still write into them."),
    Metric("baton_kv_link_rate_bytes", "gauge", "bytes", WORKERS, "Bytes/s of the slowest link, as probed.", {"transport": TRANSPORTS}),
    # Leases, where the KV is
    Metric("baton_leases_held", "gauge", "leases", WORKERS, "Leases that are alive now."),
    Metric(
        "baton_leases_total", "counter", "leases", WORKERS,
        "Events of leases. late: a reader came after the lease had ended. fenced: a handle was forged, or belonged to another request or"
        " process.",
        {"event": ("granted", "renewed", "released", "revoked", "expired", "late", "fenced")},
        aliases=(Alias("vllm:nixl_num_kv_expired_reqs_total", only={"event": "expired"}),),
    ),
    # Handoffs, where the KV goes
    Metric(
        "baton_handoffs_total", "counter", "handoffs", WORKERS,
        "Requests that came with a handle. outcome: ok, or why the KV was not used.",
        {"transport": TRANSPORTS, "outcome": ("ok", *REASONS)},
    ),
    Metric(
        "baton_handoff_read_duration_seconds", "histogram", "seconds", WORKERS,
        "Time that one handoff spent reading KV.", {"transport": TRANSPORTS}, READ_S,
        aliases=(Alias("vllm:nixl_xfer_time_seconds", only={"transport": "nixl"}),),
    ),
    Metric(
        "baton_handoff_read_bytes", "histogram", "bytes", WORKERS,
        "Bytes of KV that one handoff read.", {"transport": TRANSPORTS}, SIZE_BYTES,
        aliases=(Alias("vllm:nixl_bytes_transferred", only={"transport": "nixl"}),),
    ),
    Metric(
        "baton_handoff_verify_duration_seconds", "histogram", "seconds", WORKERS,
        "Time for the digests and the lease check of one handoff.", buckets=READ_S,
    ),
    *(Metric(fact.counter, "counter", fact.unit, WORKERS, fact.help) for fact in COUNTED.values()),
    *(Metric(fact.name, fact.kind, fact.unit, WORKERS, fact.help, fact.labels) for fact in gpu_watch.FACTS),
    Metric(gpu_watch.AGE, "gauge", "seconds", WORKERS, "Time since the GPUs' driver last answered; what it said stands until then."),
    # The process
    Metric("baton_registry_reachable", "gauge", "1", ALL, "1: the registry answered the last call. 0: it did not."),
    Metric("baton_registry_reconnects_total", "counter", "times", ALL, "Times that the registry answered again after an outage."),
    Metric("baton_spans_exported_total", "counter", "spans", ALL, "Spans that the collector accepted."),
    Metric(
        "baton_spans_dropped_total", "counter", "spans", ALL,
        "Spans that were lost because the queue was full or the collector did not answer.",
    ),
)  # fmt: skip
BY_NAME: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in TABLE})


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Number = 0

    def inc(self, by: Number = 1) -> None:
        self.value += by


class Histogram:
    """`counts[i]` counts the values above `bounds[i - 1]` and up to `bounds[i]`; the last count has no upper bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Observes many values without a step of Python for each."""
        for place, count in Counts(map(partial(bisect_left, self.bounds), values)).items():
            self.counts[place] += count
        self.sum += sum(values)


Child = TypeVar("Child", Counter, Histogram)
Key = str | tuple[str, ...]  # the label values in the order of the labels; for a single label, the value alone
Reading = Number | Mapping[Any, Number]  # the keys are Keys: a mapping's key type is invariant, so it cannot be written here


class Children(dict[Key, Child]):
    """The series of one metric by label values, each made on its first use. A value that is not in the table counts as "other"."""

    def __init__(self, metric: Metric, make: Callable[[], Child]) -> None:
        super().__init__()
        self._metric = metric
        self._make: Callable[[], Child] = make
        if len(metric.labels) == 1:  # present from the start, so that the first event is a step up from 0
            for value in next(iter(metric.labels.values())):
                self[value] = make()

    def __missing__(self, key: Key) -> Child:
        known = bounded(self._metric, key, self)
        if known in self:
            return self[known]
        child: Child = self._make()
        self[known] = child
        return child


@dataclass(frozen=True, slots=True)
class Series:
    """For a histogram, `value` is the sum and `buckets` the cumulative counts, one for each bound and one for all values."""

    labels: Mapping[str, str]
    value: Number
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    kind: Kind
    help: str
    bounds: tuple[float, ...]
    series: tuple[Series, ...]


class Book:
    """The numbers of one process. A name that is not in the table, or does not belong to this role, is a bug and raises KeyError."""

    def __init__(self, role: Role, worker: str = "", model: str = "") -> None:
        """`worker`: the worker's name; empty in a process that is not a worker."""
        self.role = role
        self.model = model
        self._own = {"worker": worker, "role": role} if worker else {}
        self._children: dict[str, Children[Counter] | Children[Histogram]] = {}
        self._readers: dict[str, Callable[[], Reading]] = {}

    def counter(self, name: str) -> Counter:
        """The counter of a metric without labels."""
        return self.counters(name)[()]

    def counters(self, name: str) -> Children[Counter]:
        metric = self._find(name, "counter")
        children = Children(metric, Counter)
        self._children[name] = children
        return children

    def histogram(self, name: str) -> Histogram:
        """The histogram of a metric without labels."""
        return self.histograms(name)[()]

    def histograms(self, name: str) -> Children[Histogram]:
        metric = self._find(name, "histogram")
        children = Children(metric, lambda: Histogram(metric.buckets))
        self._children[name] = children
        return children

    def read(self, name: str, function: Callable[[], Reading]) -> None:
        """A gauge, or a counter that is kept elsewhere. At each scrape, `function` returns its number, or its numbers by label values."""
        self._find(name, "gauge", "counter")
        self._readers[name] = function

    def families(self) -> Iterator[Family]:
        """All numbers as each is when it is reached, in the order of the table; aliases follow their metric."""
        for metric in TABLE:
            series = self._series(metric)
            if not series:
                continue
            own = tuple(Series({**self._own, **one.labels}, one.value, one.buckets) for one in series)
            yield Family(metric.name, metric.kind, metric.help, metric.buckets, own)
            for alias in metric.aliases:
                renamed = self._renamed(alias, series)
                if renamed:
                    text = f"{metric.help} The same as {metric.name}."
                    yield Family(alias.name, metric.kind, text, metric.buckets, renamed)

    def _find(self, name: str, *kinds: Kind) -> Metric:
        metric = BY_NAME[name]
        if self.role not in metric.roles or metric.kind not in kinds or name in self._children or name in self._readers:
            wanted = " or ".join(kinds)
            raise KeyError(f"{name}: a {metric.kind} of {', '.join(metric.roles)}; requested as {wanted} by {self.role}, or twice")
        return metric

    def _series(self, metric: Metric) -> list[Series]:
        names = tuple(metric.labels)
        if metric.name in self._readers:
            return [Series(dict(zip(names, _values(key), strict=True)), value) for key, value in self._reading(metric).items()]
        found = []
        for key, child in self._children.get(metric.name, {}).items():
            labels = dict(zip(names, _values(key), strict=True))
            if isinstance(child, Counter):
                found.append(Series(labels, child.value))
            else:
                found.append(Series(labels, child.sum, _cumulative(child.counts)))
        return found

    def _reading(self, metric: Metric) -> dict[Key, Number]:
        told = self._readers[metric.name]()
        if not isinstance(told, Mapping):
            return {(): told}
        numbers: dict[Key, Number] = {}
        for key, value in told.items():
            known = bounded(metric, key, numbers)
            numbers[known] = numbers.get(known, 0) + value
        return numbers

    def _renamed(self, alias: Alias, series: Iterable[Series]) -> tuple[Series, ...]:
        same = {"model_name": self.model, "engine": "0"}
        return tuple(
            Series({**same, **{theirs: one.labels[ours] for ours, theirs in alias.labels.items()}}, one.value, one.buckets)
            for one in series
            if all(one.labels[label] == value for label, value in alias.only.items())
        )


def bounded(metric: Metric, key: Key, known: Mapping[Key, Hashable]) -> Key:
    """`key` with "other" in place of values that the table does not allow; `known` are the series that exist already."""
    values = _values(key)
    if len(values) != len(metric.labels):
        raise ValueError(f"{metric.name} has the labels {list(metric.labels)}, not {len(values)}")
    full = len(known) >= MAX_OPEN and key not in known
    kept = tuple(
        OTHER if (full if allowed is OPEN else value not in allowed) else value
        for value, allowed in zip(values, metric.labels.values(), strict=True)
    )
    return kept[0] if isinstance(key, str) else kept


def _values(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _cumulative(counts: list[int]) -> tuple[int, ...]:
    total, found = 0, []
    for count in counts:
        total += count
        found.append(total)
    return tuple(found)
