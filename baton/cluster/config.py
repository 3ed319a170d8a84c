"""Configuration: one frozen tree, read once at the edge. `baton.cluster.config_layers` merges the layers that its values come from.

The tree does not hold what a process learns when it starts, such as the number of blocks that fit or the tokenizer's end token.
"""

import itertools
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.cluster import redis_url
from baton.cluster.config_engine import KvConfig, TiersConfig
from baton.cluster.config_planner import PlannerConfig
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.placement import Placement
from baton.engine.options import EngineOptions, ModelOptions
from baton.section import Section

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
    prove_workers: bool = Field(
        default=True,
        description="A worker that has started gets no requests until a handoff through it has said the tokens that other workers say.",
    )

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.host == "*":
            raise ValueError("host cannot be *: use 0.0.0.0 for all IPv4 addresses, or :: for all addresses")
        if self.advertise in EVERYWHERE:
            raise ValueError(f"advertise must be an address that others can reach, not {self.advertise}: other processes connect to it")
        return self


class PoolConfig(Section):
    """One pool of workers."""

    replicas: int = Field(default=1, ge=0, le=1024, description="Workers in this pool.")
    port: int = Field(default=0, ge=0, le=65535, description="gRPC port of a worker that is started by hand; 0: any free one.")
    cpus: float = Field(default=1.0, ge=0, le=1024, description="CPUs that Ray reserves for one worker.")
    gpus: Annotated[float, Field(ge=0, le=64)] | Literal["auto"] = Field(
        default="auto",
        description="GPUs of one worker, its own. Less than 1: it shares one, and uses that share of its memory. auto: 1 if engine.device"
        " is cuda (with vLLM one for each rank), else 0.",
    )
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

    @model_validator(mode="after")
    def _whole_gpus(self) -> Self:
        if self.gpus != "auto" and self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus must be a whole number, or less than 1 to share one (got {self.gpus:g})")
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
    start_s: float = Field(
        default=120.0,
        ge=1,
        le=86400,
        description="How long `baton up` waits while no process that starts makes progress, seconds. Progress is a kernel compiled, a"
        " tensor loaded, or processor time used; the whole start may take any time.",
    )
    hang_s: float = Field(
        default=10.0,
        ge=1,
        le=3600,
        description="How long a process's event loop may be blocked, or its engine may make no progress, before the process is killed and"
        " restarted, seconds. Must be more than router.hang_s.",
    )
    worker_niceness: int = Field(
        default=0,
        ge=0,
        le=19,
        description="By how much workers give way to all other programs of their host, as with nice(1). A router that shares their cores"
        " answers sooner under overload, and they do less. 0: they compete as equals.",
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
        default=0, ge=0, le=65535, description="Port of a worker's or planner's /metrics; 0: any free one. Two on one host need 0."
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


class RecorderConfig(Section):
    minutes: float = Field(
        default=5.0, ge=0, le=120, description="How far back the recording of each process' decisions reaches, about; 0: none is made."
    )
    mib: float = Field(default=32.0, ge=1, le=4096, description="Memory for it in each process, MiB, about.")
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="Where a process writes it when it fails and on SIGUSR2. null: beside its log; if it has none, in the system's folder"
        " for temporary files.",
    )


class Config(Section):
    """The whole tree. The defaults fit a laptop with two cores, everything on loopback."""

    cluster: ClusterConfig = Field(default=ClusterConfig(), description="What all processes share.")
    model: ModelOptions = Field(default=ModelOptions(), description="The model that is served.")
    engine: EngineOptions = Field(default=EngineOptions(), description="The engine inside each worker.")
    kv: KvConfig = Field(default=KvConfig(), description="How KV moves between workers.")
    tiers: TiersConfig = Field(default=TiersConfig(), description="Where KV is kept that has left the pools.")
    router: RouterConfig = Field(default=RouterConfig(), description="The router: its doors, admission and routing.")
    prefill: PoolConfig = Field(default=PoolConfig(), description="The prefill pool. With replicas 0 the cluster is colocated.")
    decode: DecodePoolConfig = Field(default=DecodePoolConfig(), description="The decode pool.")
    redis: RedisConfig = Field(default=RedisConfig(), description="The registry.")
    launcher: LauncherConfig = Field(default=LauncherConfig(), description="What starts and restarts the processes.")
    security: SecurityConfig = Field(default=SecurityConfig(), description="TLS of every channel, and API keys.")
    slo: SloConfig = Field(default=SloConfig(), description="Latency objectives of a request.")
    planner: PlannerConfig = Field(default=PlannerConfig(), description="What sizes the pools and flips roles.")
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="Logs, metrics, traces.")
    recorder: RecorderConfig = Field(default=RecorderConfig(), description="The flight recorder.")

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
