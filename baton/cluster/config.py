"""Configuration: one frozen tree, read once at the edge. `baton.cluster.config_layers` merges the layers that its values come from.

The tree does not hold what a process learns when it starts, such as the number of blocks that fit or the tokenizer's end token.
"""

import itertools
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from baton.cluster import redis_url

# The ports that a process of each role listens on.
PORTS = {
    "router": (
        *("router.port", "router.admin_port", "router.http_port", "router.page_port"),
        *("telemetry.metrics_port", "telemetry.health_port"),
    ),
    "prefill": ("prefill.port", "kv.port", "telemetry.worker_metrics_port", "telemetry.health_port"),
    "decode": ("decode.port", "kv.port", "telemetry.worker_metrics_port", "telemetry.health_port"),
}
EVERYWHERE = ("0.0.0.0", "::")  # a listener bound to one of these is reached at every address of its host


class ConfigError(ValueError):
    """The configuration cannot be used. The text names the key, the place where it was set, and what to do."""


class Section(BaseModel):
    """Strict: `true` is not an integer, and `"16"` in a file is not a number. Bounds exclude nan and inf."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class ClusterConfig(Section):
    name: str = Field(default="baton", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Name of this cluster; part of every Redis key.")
    key: str | None = Field(
        default=None,
        min_length=16,
        repr=False,
        json_schema_extra={"secret": True},
        description="Authenticates KV handles between workers. `baton up` generates one if none is set. There is no flag, because other"
        " users can read command lines.",
    )
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address that every listener binds to. 0.0.0.0: all IPv4 addresses of this host; ::: all addresses.",
    )
    advertise: str = Field(
        default="auto",
        min_length=1,
        description="Address, name or network interface of this host at which others reach its processes. auto: cluster.host, or if that"
        " means all addresses, the one that leads to Redis.",
    )

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.host == "*":
            raise ValueError("host cannot be *: use 0.0.0.0 for all IPv4 addresses, or :: for all addresses")
        if self.advertise in EVERYWHERE:
            raise ValueError(f"advertise must be an address that others can reach, not {self.advertise}: other processes connect to it")
        return self


class ModelConfig(Section):
    path: str = Field(default="", description="Folder of the checkpoint (config.json, tokenizer.json, *.safetensors).")
    served_name: str | None = Field(default=None, min_length=1, description="Name that clients request; by default the folder's name.")
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        default="float32", description="Type of weights and KV. auto: bfloat16 if the checkpoint is, and if it is not slower on this CPU."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Maximum length of prompt plus output, in tokens; by default the model's own limit."
    )


class EngineConfig(Section):
    kind: Literal["baton", "vllm"] = Field(default="baton", description="Baton's own engine, or vLLM 0.32 if it is installed.")
    vllm: dict[str, Any] = Field(default={}, description="Arguments of vLLM (AsyncEngineArgs) that no other key sets.")
    staging_mib: int | None = Field(default=None, ge=1, description="Memory between vLLM and peers, MiB; by default half of its KV cache.")
    batch_invariant: bool = Field(default=False, description="vLLM, on some GPUs: tokens do not depend on the size of the batch.")
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens in one KV block. All workers must use the same size.")
    kv_memory_mib: int | None = Field(default=None, ge=1, description="Size of the KV pool, MiB; by default a share of the free memory.")
    kv_memory_fraction: float = Field(
        default=0.25, gt=0, le=0.95, description="Share of the free memory that the KV pool takes if kv_memory_mib is not set."
    )
    max_num_seqs: int = Field(default=64, ge=1, le=4096, description="Maximum number of sequences in one step.")
    max_num_batched_tokens: int = Field(default=512, ge=1, le=1_048_576, description="Maximum number of tokens computed in one step.")
    prefix_caching: bool = Field(default=True, description="Keep the blocks of finished requests, and reuse them for equal prefixes.")
    reserve_growth: float = Field(
        default=0.5, ge=0, le=1, description="Share of a sequence's remaining output that admission reserves room for."
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="Compute threads of a worker; by default those of the CPU quota, or torch's choice."
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Device that runs the model and holds its KV.")
    attention_backend: Literal["auto", "flashinfer", "flash_attn", "triton", "torch"] = Field(
        default="auto",
        description="Attention kernels on a cuda device. auto: the best backend that is installed and supports the model's KV layout. A"
        " named backend must meet both conditions.",
    )
    weight_dtype: Literal["auto", "int8", "int4"] = Field(
        default="auto",
        description="Type of the matrices. auto: as model.dtype. int8, int4: they are quantised at load, activations to int8 at each step.",
    )
    compiled: bool = Field(
        default=True, description="Compiled kernels (but attention's on cuda: see attention_backend). false: plain torch for everything."
    )
    products: Literal["auto", "baton", "onednn", "torch"] = Field(
        default="auto", description="What multiplies matrices on a CPU if compiled. auto: what was fastest when first tried here."
    )
    max_queue: int = Field(default=256, ge=1, le=65536, description="Maximum number of sequences waiting in one worker; it refuses more.")
    batching: Literal["continuous", "dynamic", "static"] = Field(
        default="continuous",
        description="When a sequence may join a batch. continuous: at any step. dynamic: when the previous batch has ended, together with"
        " all others that are waiting. static: as dynamic, but the batch first fills to max_num_seqs. The last two are for comparison, in"
        " clusters without prefill workers.",
    )
    batch_wait_s: float = Field(default=0.5, ge=0, le=60, description="Longest wait for a static batch to fill, seconds.")


class KvConfig(Section):
    transport: Literal["auto", "nixl", "tcp"] = Field(
        default="auto", description="How KV moves between workers. auto: nixl if two workers share a host or RDMA, else tcp."
    )
    port: int = Field(
        default=0, ge=0, le=65535, description="Port on which a worker serves KV over TCP; 0: any free one. Two workers on one host need 0."
    )
    lease_ttl_s: float = Field(
        default=10.0, gt=0, le=3600, description="How long blocks stay pinned after a reader stops renewing the lease, seconds."
    )
    reap_interval_s: float = Field(default=0.25, gt=0, le=60, description="How often a worker looks for expired leases, seconds.")
    read_timeout_s: float = Field(
        default=5.0, gt=0, le=3600, description="Time limit for reading the KV of one handoff, seconds; must be less than lease_ttl_s."
    )
    live: bool = Field(
        default=True, description="A decode worker reads the KV of a long prompt while the rest of the prompt is still being computed."
    )
    on_failure: Literal["recompute", "fail"] = Field(
        default="recompute", description="What a decode worker does if it cannot fetch the KV: compute it again, or fail the call."
    )
    ucx_tls: str | None = Field(default=None, description="UCX_TLS of the nixl transport; by default UCX chooses.")
    ucx_net_devices: str | None = Field(
        default=None,
        description="UCX_NET_DEVICES of the nixl transport; by default the interface of cluster.advertise and RDMA devices.",
    )
    ucx_port_range: str | None = Field(
        default=None,
        pattern=r"^\d{1,5}-\d{1,5}$",
        description="Ports that the nixl transport may listen on, FIRST-LAST, so that a firewall can name them; by default any.",
    )

    @model_validator(mode="after")
    def _read_inside_lease(self) -> Self:
        if self.read_timeout_s >= self.lease_ttl_s:
            raise ValueError(f"read_timeout_s ({self.read_timeout_s:g}) must be less than lease_ttl_s ({self.lease_ttl_s:g})")
        if self.reap_interval_s >= self.lease_ttl_s:
            raise ValueError(f"reap_interval_s ({self.reap_interval_s:g}) must be less than lease_ttl_s ({self.lease_ttl_s:g})")
        return self


class RouterConfig(Section):
    replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Routers; each serves any request. The ports below are the first one's, others get free ones.",
    )
    port: int = Field(default=8470, ge=0, le=65535, description="Port of the public gRPC API; 0: any free one.")
    admin_port: int = Field(default=8471, ge=0, le=65535, description="Port of the admin API; 0: any free one.")
    http_port: int = Field(default=8000, ge=0, le=65535, description="Port of the OpenAI-compatible HTTP API; 0: any free one.")
    page_port: int = Field(default=8472, ge=0, le=65535, description="Port of the live page; 0: any free one.")
    http_max_connections: int = Field(
        default=2048, ge=1, le=1_000_000, description="Maximum number of HTTP connections at a time; more are refused."
    )
    http_read_timeout_s: float = Field(
        default=20.0, gt=0, le=3600, description="Time limit for receiving an HTTP request's headers, and again for its body, seconds."
    )
    http_idle_s: float = Field(default=75.0, gt=0, le=3600, description="How long an HTTP connection stays open between requests, seconds.")
    cors_origins: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Origins whose pages may use the HTTP API from a browser: https://app.example, or * for all. Empty: none.",
    )
    stall_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="How long a client, over gRPC or HTTP, may leave its answer unread before the router drops the request, seconds.",
    )
    stream_interval_s: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="Shortest time between two messages of one stream, seconds. Tokens that come sooner wait and travel together, which"
        " costs the router less; the first ones and the end never wait. 0: each token is sent as it comes.",
    )
    max_inflight: int = Field(default=256, ge=1, le=65536, description="Maximum number of requests served at a time.")
    max_queue: int = Field(default=512, ge=0, le=65536, description="Maximum number of requests waiting for admission; more are refused.")
    queue_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="Longest wait for admission, and again for a decode worker with room, seconds."
    )
    overload: Literal["queue", "codel", "lifo"] = Field(
        default="codel",
        description="What to do with requests that would wait so long that they miss their deadline or an objective of the slo section."
        " queue: let them wait. codel: refuse them immediately, and shorten a standing queue. lifo: as codel, and while the queue stands,"
        " serve the newest request first.",
    )
    tokenizer_threads: int = Field(default=2, ge=1, le=64, description="Threads that turn prompts into tokens.")
    default_timeout_s: float = Field(default=300.0, gt=0, le=86400, description="Deadline of a request if its client sets none, seconds.")
    max_timeout_s: float = Field(default=600.0, gt=0, le=86400, description="Longest deadline that a client can set, seconds.")
    max_retries: int = Field(default=3, ge=0, le=16, description="How many times a request is retried after a worker fails.")
    bypass_tokens: int = Field(
        default=32, ge=0, description="With this many uncached prompt tokens or fewer, the decode worker computes the prompt itself."
    )
    fetch_tokens: int = Field(
        default=128,
        ge=0,
        description="A prefill worker fetches a cached prefix from another worker if that saves more tokens than this. 0: never.",
    )
    predict_ttl_s: float = Field(
        default=2.0,
        ge=0,
        le=60,
        description="How long a prefix that was just sent to a worker counts as cached there before the worker confirms it, seconds.",
    )
    max_message_bytes: int = Field(
        default=4_194_304, ge=1024, le=1 << 30, description="Maximum size of a request (gRPC message or HTTP body), bytes."
    )
    recover_wait_s: float = Field(
        default=10.0, ge=0, le=600, description="How long a request whose worker died waits for another worker, seconds."
    )
    hang_s: float = Field(
        default=2.0,
        ge=0.2,
        le=600,
        description="How long a worker may not answer, or its engine may make no progress, before the router stops choosing it, seconds."
        " After twice that time, its requests continue on other workers.",
    )
    quarantine_s: float = Field(
        default=600.0,
        ge=0,
        le=86400,
        description="How long a prompt is refused after it has killed two workers, seconds. 0: it may be tried again immediately.",
    )
    connection_age_s: float | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="After this time a gRPC client is told to connect again, while its running calls finish: a load balancer then spreads"
        " connections over new routers, seconds. Not set: never.",
    )
    drain_s: float = Field(default=30.0, ge=0, le=3600, description="How long a stopping router waits for its requests to finish, seconds.")
    reflection: bool | None = Field(
        default=None, description="Offer gRPC server reflection. Not set: only if no API keys are needed (security.api_keys)."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.default_timeout_s > self.max_timeout_s:
            raise ValueError(f"default_timeout_s ({self.default_timeout_s:g}) must not exceed max_timeout_s ({self.max_timeout_s:g})")
        return self


Placement = Literal["spread", "pack", "strict-spread", "strict-pack"]


class PoolConfig(Section):
    """One pool of workers."""

    replicas: int = Field(default=1, ge=0, le=1024, description="Workers in this pool.")
    port: int = Field(default=0, ge=0, le=65535, description="gRPC port of a worker that is started by hand; 0: any free one.")
    cpus: float = Field(default=1.0, ge=0, le=1024, description="CPUs that Ray reserves for one worker.")
    gpus: float = Field(default=0.0, ge=0, le=64, description="GPUs that Ray reserves for one worker.")
    drain_s: float = Field(default=30.0, ge=0, le=3600, description="How long a stopping worker waits for its requests to finish, seconds.")
    placement: Placement = Field(
        default="spread",
        description="How Ray places workers that start together: over as many hosts, or on as few, as possible. strict: on one host each,"
        " or all on one host, or not at all.",
    )
    cores: tuple[int, ...] | None = Field(
        default=None, strict=False, description="Cores for the pool's local workers; each gets engine.threads of them. null: not pinned."
    )

    @model_validator(mode="after")
    def _some_cores(self) -> Self:
        if self.cores is not None and (not self.cores or min(self.cores) < 0 or len(set(self.cores)) < len(self.cores)):
            raise ValueError(f"cores must be one or more distinct core numbers (got {list(self.cores)})")
        return self


class DecodePoolConfig(PoolConfig):
    """The decode pool is never empty: a decode worker can do everything, a prefill worker cannot."""

    replicas: int = Field(default=1, ge=1, le=1024, description="Workers in this pool; at least one.")


class RedisConfig(Section):
    url: str = Field(
        default="embedded",
        repr=False,  # it may hold a password
        description="embedded: Baton starts a redis-server; else redis://, rediss://, unix://, redis+sentinel://HOST:PORT,.../MASTER or"
        " redis+cluster://HOST:PORT,...",
    )
    record_ttl_s: float = Field(
        default=6.0, gt=0, le=3600, description="How long a worker's record lives if the worker does not refresh it, seconds."
    )
    heartbeat_s: float = Field(default=1.0, gt=0, le=600, description="How often a worker refreshes its record, seconds.")
    command_timeout_s: float = Field(
        default=0.25, gt=0, le=10, description="Longest wait for a reply from Redis, seconds; after that, Redis counts as unavailable."
    )
    stream_maxlen: int = Field(
        default=20_000,
        ge=100,
        le=10_000_000,
        description="Approximate number of block events that Redis keeps; a router that falls further behind requests a snapshot.",
    )

    @field_validator("url")
    @classmethod
    def _an_address(cls, url: str) -> str:
        if url != "embedded":
            redis_url.parse(url)
        return url

    @model_validator(mode="after")
    def _one_lost_heartbeat_is_no_death(self) -> Self:
        if self.heartbeat_s >= self.record_ttl_s / 2:
            raise ValueError(f"heartbeat_s ({self.heartbeat_s:g}) must be less than half of record_ttl_s ({self.record_ttl_s:g})")
        return self


class LauncherConfig(Section):
    kind: Literal["local", "ray", "kubernetes"] = Field(
        default="local",
        description="local: child processes on this host; ray: a Ray cluster; kubernetes: set by the chart.",
    )
    restart_backoff_s: float = Field(
        default=0.5, gt=0, le=600, description="Wait before the first restart of a dead process, seconds; it doubles with each restart."
    )
    restart_backoff_max_s: float = Field(default=30.0, gt=0, le=3600, description="Longest wait before a restart, seconds.")
    hang_s: float = Field(
        default=10.0,
        ge=1,
        le=3600,
        description="How long a process's event loop may be blocked, or its engine may make no progress, before the process is killed and"
        " restarted, seconds. Must be more than router.hang_s.",
    )
    ray_address: str | None = Field(
        default=None, min_length=1, description="Address of a running Ray cluster; null: Baton starts one here."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.restart_backoff_s > self.restart_backoff_max_s:
            raise ValueError(
                f"restart_backoff_s ({self.restart_backoff_s:g}) must not exceed restart_backoff_max_s ({self.restart_backoff_max_s:g})"
            )
        return self


class SecurityConfig(Section):
    tls_cert: str | None = Field(default=None, min_length=1, description="PEM file of the certificate chain that every listener presents.")
    tls_key: str | None = Field(default=None, min_length=1, description="PEM file of the certificate's private key.")
    tls_ca: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file of the authority that must have issued every peer's certificate; if it is set, TLS is mutual.",
    )
    server_name: str | None = Field(
        default="baton.internal",
        min_length=1,
        description="DNS name that the certificate of every process must contain, wherever the process runs. null: each certificate must"
        " contain the address at which its process is reached.",
    )
    api_keys: str | None = Field(
        default=None, min_length=1, description="File of API keys, one NAME SHA256HEX [TENANT] ... per line. Not set: no key is required."
    )
    redis_ca: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file of the authority of a rediss:// server; by default tls_ca, and without it the system's. The server's"
        " certificate must contain the host of redis.url. Processes show it tls_cert, if that is set.",
    )
    requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Maximum number of requests per tenant and minute; a line of the key file may set another limit.",
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="Maximum number of prompt and output tokens per tenant and minute; a line of the key file may set another limit.",
    )
    open_admin: bool = Field(
        default=False,
        description="Let everybody who reaches cluster.host use the admin port and /metrics, and without api_keys the live page: for a"
        " trusted network. Otherwise a process that does not listen on loopback needs mutual TLS or api_keys to start.",
    )
    shared_prefixes: bool = Field(
        default=False, description="Let tenants share cached prefixes; a tenant could then guess another's prompts from the response times."
    )

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: set both or neither")
        return self

    @model_validator(mode="after")
    def _limits_are_of_tenants(self) -> Self:
        if not self.api_keys and (self.requests_per_minute or self.tokens_per_minute):
            raise ValueError("requests_per_minute and tokens_per_minute limit tenants, so they need api_keys")
        return self


class TelemetryConfig(Section):
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Minimum level of the log lines that are written."
    )
    log_format: Literal["auto", "text", "json"] = Field(
        default="auto",
        description="text: for people; json: one object for each record. auto: text on a terminal and from `baton up`, else json.",
    )
    metrics: bool = Field(default=True, description="Serve /metrics and /health from every process.")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Port of the router's /metrics and /targets; 0: any free one.")
    worker_metrics_port: int = Field(
        default=0, ge=0, le=65535, description="Port of a worker's /metrics; 0: any free one. Two workers on one host need 0."
    )
    health_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of a process's /livez, /startupz and /readyz, in plain HTTP without keys; 0: any free one. Not set: none.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^/]+$",
        description="Collector that receives the spans, OTLP over gRPC: http://host:4317. Not set: no traces.",
    )
    trace_sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of the requests that are traced; a client that sends a traceparent decides for itself."
    )
    recent_requests: int = Field(default=512, ge=0, le=65536, description="How many finished requests the router keeps for `baton trace`.")


class SloConfig(Section):
    """Objectives by which the router judges requests. An objective that is not set always holds."""

    ttft_s: float | None = Field(default=None, gt=0, le=3600, description="Longest time to the first token, seconds.")
    tpot_s: float | None = Field(default=None, gt=0, le=3600, description="Longest time per output token after the first, seconds.")
    e2e_s: float | None = Field(default=None, gt=0, le=86400, description="Longest time to the last token, seconds.")
    window: int = Field(default=1000, ge=1, le=1_000_000, description="Number of recent requests over which attainment is computed.")


class Config(Section):
    """The whole tree. The defaults fit a laptop with two cores, everything on loopback."""

    cluster: ClusterConfig = Field(default=ClusterConfig(), description="What all processes share.")
    model: ModelConfig = Field(default=ModelConfig(), description="The model that is served.")
    engine: EngineConfig = Field(default=EngineConfig(), description="The engine inside each worker.")
    kv: KvConfig = Field(default=KvConfig(), description="How KV moves between workers.")
    router: RouterConfig = Field(default=RouterConfig(), description="The router: its doors, admission and routing.")
    prefill: PoolConfig = Field(default=PoolConfig(), description="The prefill pool. With replicas 0 the cluster is colocated.")
    decode: DecodePoolConfig = Field(default=DecodePoolConfig(), description="The decode pool.")
    redis: RedisConfig = Field(default=RedisConfig(), description="The registry.")
    launcher: LauncherConfig = Field(default=LauncherConfig(), description="What starts and restarts the processes.")
    security: SecurityConfig = Field(default=SecurityConfig(), description="TLS of every channel, and API keys.")
    slo: SloConfig = Field(default=SloConfig(), description="Latency objectives of a request.")
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="Logs, metrics, traces.")

    @model_validator(mode="after")
    def _the_router_looks_first(self) -> Self:
        if self.launcher.hang_s <= self.router.hang_s:
            raise ValueError(f"launcher.hang_s ({self.launcher.hang_s:g}) must be more than router.hang_s ({self.router.hang_s:g})")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        """The ports of one process must differ. Pools may share ports, because their workers may run on different hosts."""
        for names in PORTS.values():
            ports = {name: port for name in names if (port := self.at(name))}
            for first, second in itertools.combinations(ports, 2):
                if ports[first] == ports[second]:
                    raise ValueError(f"{first} and {second} must differ (both {ports[first]})")
        return self

    def at(self, name: str) -> Any:
        """The value of a dotted key."""
        section, leaf = name.split(".")
        return getattr(getattr(self, section), leaf)

    @model_validator(mode="after")
    def _whole_batches_need_whole_requests(self) -> Self:
        if self.engine.batching != "continuous" and self.prefill.replicas:
            raise ValueError(f"engine.batching {self.engine.batching} needs workers that prefill and decode: set prefill.replicas to 0")
        return self
