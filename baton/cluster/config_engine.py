"""The sections of the configuration that say how KV moves and where it is kept. Those of the model and of the engine are in
`baton.engine.options`."""

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from baton.section import Section

_SOCKET = r"^tcp://(\*|[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):\d{1,5}$"


class KvConfig(Section):
    transport: Literal["auto", "nixl", "tcp", "cuda_ipc"] = Field(
        default="auto",
        description="How KV moves between workers. auto: nixl if two workers share a host or RDMA, else tcp; between GPUs whatever a probe"
        " finds, cuda_ipc first. cuda_ipc: from GPU to GPU of one machine alone; needs engine.device cuda and engine.kind baton.",
    )
    port: int = Field(
        default=0, ge=0, le=65535, description="Port on which a worker serves KV over TCP; 0: any free one. Two workers on one host need 0."
    )
    lease_ttl_s: float = Field(
        default=10.0, gt=0, le=3600, description="How long blocks stay pinned after a reader stops renewing the lease, seconds."
    )
    reap_interval_s: float = Field(default=0.25, gt=0, le=60, description="How often a worker looks for expired leases, seconds.")
    read_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="Time limit for one copy of KV from another worker, at most 8 MiB, seconds; must be less than lease_ttl_s.",
    )
    live: bool = Field(
        default=True, description="A decode worker reads the KV of a long prompt while the rest of the prompt is still being computed."
    )
    on_failure: Literal["recompute", "fail"] = Field(
        default="recompute", description="What a decode worker does if it cannot fetch the KV: compute it again, or fail the call."
    )
    rdma: bool = Field(
        default=False,
        description="KV between hosts is to go by RDMA. Nothing is refused for it, but an alarm stands while TCP carries KV"
        " (docs/observability.md, BatonSplitDoesNotHappen).",
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

    events: str | None = Field(
        default=None,
        pattern=_SOCKET,
        description="Address on which a worker publishes the blocks of its prefix cache in vLLM's format over ZeroMQ, such as"
        " tcp://127.0.0.1:5557, with the token ids of prompts, to whoever connects; further workers of a host take the next free ports."
        " Needs the extra events and engine.kind baton. Not set: none.",
    )
    events_replay: str | None = Field(
        default=None, pattern=_SOCKET, description="Address on which a worker sends the latest block events again. Not set: none."
    )

    @model_validator(mode="after")
    def _rdma_is_of_nixl(self) -> Self:
        if self.rdma and self.transport not in ("auto", "nixl"):
            raise ValueError(f"rdma needs transport auto or nixl: {self.transport} uses no adapter")
        return self

    @model_validator(mode="after")
    def _events_to_replay(self) -> Self:
        if self.events_replay is not None and self.events is None:
            raise ValueError("events_replay needs events")
        return self

    @model_validator(mode="after")
    def _read_inside_lease(self) -> Self:
        if self.read_timeout_s >= self.lease_ttl_s:
            raise ValueError(f"read_timeout_s ({self.read_timeout_s:g}) must be less than lease_ttl_s ({self.lease_ttl_s:g})")
        if self.reap_interval_s >= self.lease_ttl_s:
            raise ValueError(f"reap_interval_s ({self.reap_interval_s:g}) must be less than lease_ttl_s ({self.lease_ttl_s:g})")
        return self


class TiersConfig(Section):
    memory_mib: int | None = Field(
        default=None, ge=1, description="Host memory of each worker for KV that has left its pool, MiB. Not set: none is kept there."
    )
    disk: str | None = Field(
        default=None,
        min_length=1,
        description="Folder on a local disk for KV that has left the pool, or the memory above it; each worker uses a folder of its name in"
        " it. Not set: none is kept there.",
    )
    disk_mib: int | None = Field(default=None, ge=1, description="Room that each worker may take on the disk, MiB; needed with disk.")
    object: str | None = Field(
        default=None,
        min_length=1,
        description="Where in an object store KV is kept for all workers, s3://BUCKET/PREFIX or another URL that fsspec knows. Not set:"
        " none is kept there.",
    )
    object_mib: int | None = Field(
        default=None, ge=1, description="Room that each worker may take in the object store, MiB; needed with object."
    )
    object_endpoint: str | None = Field(
        default=None, pattern=r"^https?://[^/]+$", description="Address of the S3 server; by default that of AWS, or AWS_ENDPOINT_URL."
    )
    save: Literal["evicted", "at_once"] = Field(
        default="evicted",
        description="When a block is copied to a tier. evicted: shortly before its room in the pool is needed; at_once: when it is full, so"
        " that a restart loses none.",
    )
    keep: Literal["returning", "all"] = Field(
        default="returning",
        description="returning: while no block that left the pool comes back, nothing more is kept, until one does; all: everything is kept"
        " nevertheless.",
    )
    save_mib_per_s: float | None = Field(
        default=None, gt=0, le=1_000_000, description="The most that a worker writes to one tier, MiB/s. Not set: as fast as it goes."
    )
    wait_s: float = Field(
        default=1.0,
        gt=0,
        le=60,
        description="The longest that a prompt waits for its KV to be loaded, seconds; it hardly waits longer than computing would take.",
    )
    key_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with 64 hexadecimal digits: what is kept on the disk and in the object store is encrypted with this key. Not"
        " set: it is not encrypted.",
    )

    long_contexts: int = Field(
        default=0,
        ge=0,
        le=64,
        description="How many sequences that are longer than the pool may run at once on a worker; their old blocks live in a tier (memory"
        " or disk) and are read from there at each step, which is slow. 0: a sequence has to fit the pool.",
    )

    @field_validator("object")
    @classmethod
    def _no_password(cls, url: str | None) -> str | None:
        if url is not None and "@" in urlsplit(url).netloc:
            raise ValueError("object must not contain a password: credentials come from the environment, as for other tools")
        return url

    @model_validator(mode="after")
    def _rooms(self) -> Self:
        if (self.disk is None) != (self.disk_mib is None):
            raise ValueError("disk and disk_mib go together: set both or neither")
        if (self.object is None) != (self.object_mib is None):
            raise ValueError("object and object_mib go together: set both or neither")
        if self.key_file is not None and self.disk is None and self.object is None:
            raise ValueError("key_file needs disk or object")
        if self.long_contexts and self.memory_mib is None and self.disk is None:
            raise ValueError("long_contexts needs memory_mib or disk: others write to an object store, too, and what is there may go")
        if self.object_endpoint is not None and not (self.object or "").startswith("s3://"):
            raise ValueError("object_endpoint needs an object that begins with s3://")
        return self

    @property
    def any(self) -> bool:
        return self.memory_mib is not None or self.disk is not None or self.object is not None
