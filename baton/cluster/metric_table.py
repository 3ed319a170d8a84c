"""Every metric of every process.

These rules hold for the whole table, and a test checks them: base units, counters end in _total, no label names a request, and each label
has a known set of values. A value outside that set counts as "other".

Aliases are other projects' names for our numbers: those that the Gateway API Inference Extension scrapes, and those that dashboards for
vLLM show. They have no storage of their own. Each has the labels `model_name` and `engine`, as in vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from baton.cluster import gpu_watch
from baton.cluster.errors import Reason
from baton.cluster.handoff import COUNTED
from baton.engine.core.block_key import MEDIA
from baton.engine.options import EngineOptions
from baton.stages import PREFILL_PARTS, STAGES
from baton.uncached import UNCACHED

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["router", "prefill", "decode", "planner"]
Labels = Mapping[str, tuple[str, ...]]
Number = int | float

OTHER = "other"
OPEN: tuple[str, ...] = ()  # values that are not known in advance: workers, sizes. After MAX_OPEN series the rest count as "other"
MAX_OPEN = 256
ROUTER: tuple[Role, ...] = ("router",)
WORKERS: tuple[Role, ...] = ("prefill", "decode")
ALL: tuple[Role, ...] = ("router", "prefill", "decode")
PLANNER: tuple[Role, ...] = ("planner",)

REASONS = tuple(Reason.__members__)
OUTCOMES = ("ok", "invalid", "refused", "failed", "cancelled")
FINISHES = ("stop", "length")
TRANSPORTS = ("nixl", "nixl_vram", "tcp", "cuda_ipc", "none")
OBJECTIVES = ("ttft", "tpot", "e2e")
DOORS = ("grpc", "http")
BYPASSES = ("short", "cached", "longer than the pool", "no prefill worker", "same worker", "prompt_logprobs")
METHODS = (*(name for name in get_args(EngineOptions.model_fields["speculation"].annotation) if name != "none"), "prediction")
POSITIONS = tuple(str(place) for place in range(1, 17))
TIERS = MEDIA[1:]
EJECTIONS = ("errors", "digests", "pace")
PREDICTIONS = ("cached", "wait", "first token")
PROOFS = ("admitted", "refused", "undecided")
# Why a planner changes nothing, or not what it would change first.
REFUSALS = (
    *("no supervisor", "stopping", "stale", "no worker", "late", "cannot see"),
    *("cooldown", "hold", "budget", "bounds", "pair", "not done"),
)
ACTIONS = ("grow", "shrink", "flip")
CAUSES = ("queue", *PREFILL_PARTS, "prefill", "transfer", "decode", "error")

# Bounds of OpenTelemetry's GenAI conventions, extended downwards for small models.
TTFT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 300.0)
STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RATIOS = (0.125, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 8.0)
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
        "baton_router_promised_tokens_total", "counter", "tokens", ROUTER,
        "Prompt tokens that the chosen worker was thought to cache, or to fetch; the cached ones came.",
    ),
    Metric(
        "baton_router_uncached_tokens_total", "counter", "tokens", ROUTER,
        "Prompt tokens that were computed, by why they were not cached.", {"cause": tuple(UNCACHED)},
    ),
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
        {"role": WORKERS, "reason": ("cached prefix", "loaded prefix", "fetched prefix", "least work", "fits", "queues")},
    ),
    Metric(
        "baton_router_bypasses_total", "counter", "requests", ROUTER,
        "Prompts that the router sent straight to a decode worker to compute, without a handoff.",
        {"reason": BYPASSES},
    ),
    Metric(
        "baton_router_paths_total", "counter", "requests", ROUTER,
        "Successful requests by how the KV of their prompt came to the decode worker, and why if it was not handed over.",
        {"way": ("handoff", "bypass", "recomputed"), "why": ("", *BYPASSES, *REASONS)},
    ),
    Metric(
        "baton_router_split_alarm", "gauge", "1", ROUTER,
        "1 while the cluster is set up to hand prompts over, and most that are worth it are not, or by another transport.",
    ),
    Metric(
        "baton_router_prediction_ratio", "histogram", "ratio", ROUTER,
        "What came over what the router had predicted of a request: cached tokens, its wait for a place, and the time from the sending "
        "of its prompt to its first token.",
        {"of": PREDICTIONS}, buckets=RATIOS,
    ),
    Metric(
        "baton_router_prediction_bias_ratio", "gauge", "ratio", ROUTER,
        "What came over what was predicted, in the median of the last intervals of 10 s: far from 1, the prediction is always wrong.",
        {"of": PREDICTIONS},
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
    Metric("baton_router_degradation_level", "gauge", "1", ROUTER, "Measures of router.degrade in force."),
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
        "baton_router_worker_unproven", "gauge", "1", ROUTER,
        "1: the worker has started and gets no requests, because no handoff through it has said yet what other workers say.",
        {"worker": OPEN, "role": WORKERS},
    ),
    Metric(
        "baton_router_proofs_total", "counter", "times", ROUTER,
        "Proofs of workers that have started. admitted: it serves now; refused: it said other tokens, did not answer or did not switch; "
        "undecided: those that serve already did not answer. One router at a time proves.",
        {"outcome": PROOFS},
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
    Metric(
        "baton_router_worker_trust_ratio", "gauge", "ratio", ROUTER,
        "Share of what this worker is thought to cache that counts when workers are chosen: what it kept of such promises lately.",
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
    Metric(
        "baton_engine_drafted_tokens_total", "counter", "tokens", WORKERS,
        "Guesses of next tokens that the engine verified. position: in the guess of one step.",
        {"method": METHODS, "position": POSITIONS},
    ),
    Metric(
        "baton_engine_accepted_tokens_total", "counter", "tokens", WORKERS, "Guesses of next tokens that became output.",
        {"method": METHODS, "position": POSITIONS},
    ),
    Metric("baton_engine_forks_total", "counter", "sequences", WORKERS, "Sequences that went on from the KV of another one."),
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
    # KV that has left the pool, in each tier
    Metric("baton_tier_blocks", "gauge", "blocks", WORKERS, "Blocks that a tier holds.", {"medium": TIERS}),
    Metric("baton_tier_on", "gauge", "1", WORKERS, "0: the tier has failed, or rests because it did not pay.", {"medium": TIERS}),
    Metric(
        "baton_tier_watching", "gauge", "1", WORKERS, "1: the tier keeps nothing new, because what leaves the pool does not come back.",
        {"medium": TIERS},
    ),
    Metric(
        "baton_tier_left_total", "counter", "blocks", WORKERS, "Blocks that left the pool of a worker with tiers, kept or not.",
    ),
    Metric(
        "baton_tier_returned_total", "counter", "blocks", WORKERS,
        "Blocks that a prompt needed after they had left the pool, or that a tier brought: those that are worth keeping.",
    ),
    Metric(
        "baton_tier_gain_seconds", "gauge", "seconds", WORKERS,
        "Computing that a tier saved in the last ten minutes, less the time that it cost; below 0 it does not pay.", {"medium": TIERS},
    ),
    Metric("baton_tier_reads_total", "counter", "blocks", WORKERS, "Blocks that a tier was asked for.", {"medium": TIERS}),
    Metric("baton_tier_hits_total", "counter", "blocks", WORKERS, "Blocks that a tier brought, verified.", {"medium": TIERS}),
    Metric("baton_tier_read_bytes_total", "counter", "bytes", WORKERS, "Bytes of KV that a tier brought.", {"medium": TIERS}),
    Metric("baton_tier_written_bytes_total", "counter", "bytes", WORKERS, "Bytes of KV that a tier was given.", {"medium": TIERS}),
    Metric(
        "baton_tier_unwritten_total", "counter", "blocks", WORKERS, "Blocks that a tier did not take: too many waited to be written.",
        {"medium": TIERS},
    ),
    Metric(
        "baton_tier_saved_seconds_total", "counter", "seconds", WORKERS, "Computing that the blocks of a tier saved.", {"medium": TIERS}
    ),
    Metric(
        "baton_tier_spent_seconds_total", "counter", "seconds", WORKERS,
        "What a tier cost: processor time of writing, and the time of reading.", {"medium": TIERS},
    ),
    Metric(
        "baton_tier_hints_total", "counter", "hints", WORKERS,
        "Hints of a router: a request came for what was loaded, none came within a minute, or nothing was to be loaded.",
        {"result": ("used", "unused", "nothing")},
    ),
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
    # The planner
    Metric("baton_planner_leads", "gauge", "1", PLANNER, "1: this planner leads. Of several, one does; in a dry run each."),
    Metric(
        "baton_planner_load_requests_per_second", "gauge", "requests per second", PLANNER,
        "Rate of requests. came: in the last interval; forecast: for the time at which a worker that is started now serves; the pools are "
        "sized for that.",
        {"of": ("came", "forecast")},
    ),
    Metric(
        "baton_planner_workers", "gauge", "workers", PLANNER,
        "Workers by role. serving; needed: the load that is forecast needs them; wanted: size of the pool of that name that was asked for; "
        "starting: they were started in that pool and serve nothing yet.",
        {"role": WORKERS, "count": ("serving", "needed", "wanted", "starting")},
    ),
    Metric(
        "baton_planner_attainment_ratio", "gauge", "1", PLANNER,
        "Share of requests that meet the objectives. now: by the profile, with the load that is forecast and the workers that serve; "
        "came: in the last interval.",
        {"of": ("now", "came")},
    ),
    Metric(
        "baton_planner_pressure_ratio", "gauge", "1", PLANNER,
        "How much more of a role the planner asks for than the profile says, because of misses that the profile did not foresee.",
        {"role": WORKERS},
    ),
    Metric(
        "baton_planner_changes_total", "counter", "changes", PLANNER, "Changes that are over, by what they were and what came of them.",
        {"action": ACTIONS, "outcome": ("settled", "undone")},
    ),
    Metric(
        "baton_planner_change_age_seconds", "gauge", "seconds", PLANNER, "How long the change under way has taken so far; 0: none.",
    ),
    Metric(
        "baton_planner_refusals_total", "counter", "times", PLANNER,
        "How often something would have changed and did not, by the reason. cannot see: registry or routers are silent; "
        "not done: it was decided, and the registry, Kubernetes or the worker refused.",
        {"reason": REFUSALS},
    ),
)  # fmt: skip
BY_NAME: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in TABLE})
