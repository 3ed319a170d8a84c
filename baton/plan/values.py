"""A configuration as values of Baton's chart (`deploy/helm/baton`), and what of it Baton cannot install."""

from math import ceil
from typing import Any

from baton.plan.pools import CHUNK, MOST_SEQUENCES, Question, WorkerKind
from baton.plan.search import Configuration
from baton.plan.shape import Shape
from baton.plan.sheet import ROUTER
from baton.plan.traffic import Traffic

GIB = 1 << 30
STAGING_MIB = 16_384  # memory through which KV of vLLM's ranks goes, at least
KV_NAMES = {16.0: "auto", 8.25: "int8", 5.0: "int4"}  # engine.kv_dtype, by the bits of a number with its scales
KV_BITS = {16: 16.0, 8: 8.25, 4: 5.0}


def routers_of(traffic: Traffic) -> int:
    """Two at least, so that one may fail; each busy half of the time."""
    return max(2, ceil(2 * traffic.rate * (ROUTER["request"] + traffic.output * ROUTER["token"])))


def engine_of(made: Configuration) -> str:
    """Baton's own engine where it can: a GPU for each worker, weights as the checkpoint has them."""
    plain = all(pool.kind.gpus == 1 and pool.kind.weight_bits == 16 for pool in made.pools)
    return "baton" if plain else "vllm"


def lacking(made: Configuration, shape: Shape, per_node: int) -> tuple[str, ...]:
    """What Baton does not have today that this configuration needs."""
    if engine_of(made) == "baton":
        return ()
    found = []
    each = [pool.kind for pool in made.pools]
    if any(kind.gpus > per_node for kind in each):
        found.append(f"ranks of a worker on several nodes (a node has {per_node} GPUs)")
    if shape.latent is not None and any(kind.tensor > 1 for kind in each):
        found.append("tensor parallelism with latent attention: each rank would keep all KV, and a handoff carries parts")
    if len({kind.device.name for kind in each}) > 1:
        found.append("unlike GPUs in the two pools with several GPUs a worker or 8-bit weights (vLLM's workers must be alike)")
    elif len({(kind.tensor, kind.stages) for kind in each}) > 1:
        found.append("pools with unlike numbers of ranks (vLLM's workers must be alike)")
    if any(kind.kv_bits != 16 for kind in each):
        found.append("KV of fewer bits with several GPUs a worker or 8-bit weights (engine.kv_dtype is of Baton's own engine)")
    return tuple(found)


def values_of(made: Configuration, asked: Question, max_model_len: int) -> dict[str, Any]:
    """Values for `helm install -f`, of a configuration that lacks nothing (`lacking`)."""
    shape, kind = asked.shape, made.decode.kind
    engine: dict[str, Any] = {"device": "cuda", "max_num_seqs": MOST_SEQUENCES, "max_num_batched_tokens": CHUNK}
    own = engine_of(made) == "baton"
    if own:
        if kind.kv_bits != 16:
            engine["kv_dtype"] = KV_NAMES[kind.kv_bits]
        if len({pool.kind.device.name for pool in made.pools}) > 1:
            engine["equal_arithmetic"] = True
    else:
        engine |= {"staging_mib": _staging_mib(shape, max_model_len), "vllm": _vllm(kind, shape)}
    name = shape.name.lower()
    values: dict[str, Any] = {
        "model": {"claim": "".join(each if each.isalnum() else "-" for each in name).strip("-"), "path": f"/model/{shape.name}"},
        "config": {
            "model": {"served_name": shape.name, "dtype": "bfloat16", "max_model_len": max_model_len},
            "engine": engine,
            "slo": {"ttft_s": asked.ttft_s, "tpot_s": asked.tpot_s},
        },
        "profiles": {pool.kind.device.name: _profile(made, pool.kind, asked, max_model_len) for pool in made.pools},
        "router": {"replicas": routers_of(asked.traffic)},
        "prefill": {"replicas": 0},
        "decode": {"replicas": made.decode.workers, "profile": kind.device.name},
    }
    if made.prefill is not None:
        values["prefill"] = {"replicas": made.prefill.workers, "profile": made.prefill.kind.device.name}
    return values if own else {"engine": "vllm"} | values


def _vllm(kind: WorkerKind, shape: Shape) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if kind.tensor > 1:
        found["tensor_parallel_size"] = kind.tensor
    if kind.stages > 1:
        found["pipeline_parallel_size"] = kind.stages
    if expert_parallel(kind, shape):
        found["enable_expert_parallel"] = True
    if kind.weight_bits == 8:
        found["quantization"] = "fp8"
    return found


def expert_parallel(kind: WorkerKind, shape: Shape) -> bool:
    """Whole experts on each GPU of a worker, where there are many small ones: a slice of one would be a product too narrow for a GPU."""
    return kind.tensor > 1 and shape.experts is not None and shape.experts.number >= 8 * kind.tensor


def _staging_mib(shape: Shape, max_model_len: int) -> int:
    return max(STAGING_MIB, ceil(4 * max_model_len * shape.kv_bytes() / (1 << 20)))


def _profile(made: Configuration, kind: WorkerKind, asked: Question, max_model_len: int) -> dict[str, Any]:
    """Memory of the host: the pool beside that of the device, or the staging pool and 5 GiB a rank, and the checkpoint while it loads."""
    speed = next(pool.speed for pool in made.pools if pool.kind == kind)
    weights = asked.shape.parameters * kind.weight_bits / 8
    if engine_of(made) == "baton":
        least = ceil(speed.kv_room / GIB) + 8
    else:
        least = ceil(_staging_mib(asked.shape, max_model_len) / 1024) + 5 * kind.gpus + 8
    return {
        "resources": {"requests": {"cpu": "8", "memory": f"{least}Gi"}, "limits": {"memory": f"{least + ceil(weights / GIB)}Gi"}},
        "nodeSelector": {"nvidia.com/gpu.product": kind.device.product},
    }
