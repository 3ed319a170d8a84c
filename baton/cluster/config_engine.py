"""The sections of the configuration that say what a worker serves: the model, the engine, and how KV moves."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from baton.cluster.config_section import Section


class ModelConfig(Section):
    path: str = Field(default="", description="Folder of the checkpoint (config.json, tokenizer.json, *.safetensors).")
    served_name: str | None = Field(default=None, min_length=1, description="Name that clients request; by default the folder's name.")
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        default="float32", description="Type of weights and KV. auto: bfloat16 if the checkpoint is, and if this CPU can multiply it."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Maximum length of prompt plus output, in tokens; by default the model's own limit."
    )
    generation_config: Literal["auto", "baton"] = Field(
        default="auto",
        description="Sampling of requests that do not set it. auto: as the model's generation_config.json recommends. baton: Baton's own"
        " defaults (temperature 1, nothing cut off).",
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
    reuse_output: bool = Field(
        default=False,
        description="KV of generated tokens also serves later prompts that contain them. Faster, but it has other last bits than that of a"
        " prompt: what follows such a prompt may depend on what was cached, and differ after a retry.",
    )
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
        description="Type of the matrices. auto: as model.dtype. int8, int4: they are quantised at load, activations to int8 at each step."
        " With int4, the matrix that makes logits is int8.",
    )
    compiled: bool = Field(
        default=True, description="Compiled kernels (but attention's on cuda: see attention_backend). false: plain torch for everything."
    )
    products: Literal["auto", "baton", "onednn", "torch"] = Field(
        default="auto",
        description="What multiplies matrices on a CPU if compiled. auto: what was fastest when first tried here. Only with baton is a"
        " continued stream sure to have the same bits.",
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
    transport: Literal["auto", "nixl", "tcp", "cuda_ipc"] = Field(
        default="auto",
        description="How KV moves between workers. auto: nixl if two workers share a host or RDMA, else tcp. cuda_ipc: from GPU to GPU"
        " of one machine, without the host's memory; needs engine.device cuda and engine.kind baton.",
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
