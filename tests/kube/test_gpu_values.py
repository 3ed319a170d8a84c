"""What the chart makes of `config.engine.device: cuda`, rendered by helm: GPUs, image, memory and rollout of workers; and refusals."""

from pathlib import Path
from typing import Any

import pytest
from kube import CHART, HELMS
from rendering import Objects, config, pod, refusal, rendered

GPU = "nvidia.com/gpu"
CUDA = "config.engine.device=cuda"
TOLERATED = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}
WORKERS = ("prefill", "decode")
VLLM = ("engine=vllm", CUDA, "config.engine.vllm.tensor_parallel_size=2")

pytestmark = pytest.mark.skipif(not HELMS, reason="no helm on PATH")


def resources(objects: Objects, role: str = "decode") -> dict[str, Any]:
    told: dict[str, Any] = pod(objects, role)["containers"][0]["resources"]
    return told


def rollout(objects: Objects, role: str = "decode") -> dict[str, int]:
    told: dict[str, int] = objects["Deployment", role]["spec"]["strategy"]["rollingUpdate"]
    return told


@pytest.mark.parametrize("program", HELMS)
def test_one_value_gives_each_worker_a_gpu_and_the_image_for_it(program: str) -> None:
    objects = rendered(CUDA, program=program)
    for role in ("router", "redis", *WORKERS):
        spec = pod(objects, role)
        on_gpus = role in WORKERS
        assert spec["containers"][0]["image"] == "baton:0.1.0-cuda"
        assert (resources(objects, role)["limits"].get(GPU) == 1) == on_gpus and (TOLERATED in spec["tolerations"]) == on_gpus
        assert "runtimeClassName" not in spec
    assert "gpus" not in config(objects, "decode").get("decode", {}), "a whole one"


def test_without_it_nothing_asks_for_gpus() -> None:
    objects = rendered()
    for role in WORKERS:
        assert GPU not in str(pod(objects, role)) and pod(objects, role)["containers"][0]["image"] == "baton:0.1.0"
        assert rollout(objects, role) == {"maxSurge": 1, "maxUnavailable": 0}


def test_with_vllm_each_rank_has_one() -> None:
    objects = rendered(*VLLM)
    assert [resources(objects, role)["limits"][GPU] for role in WORKERS] == [2, 2]
    assert pod(objects, "decode")["containers"][0]["image"] == "baton:0.1.0-cuda-vllm"
    both = rendered(*VLLM, "config.engine.vllm.pipeline_parallel_size=2")
    assert resources(both)["limits"][GPU] == 4


def test_kinds_of_gpus_and_their_runtime_are_values() -> None:
    objects = rendered(CUDA, "gpu.resource=nvidia.com/mig-3g.40gb", "gpu.runtimeClassName=nvidia", "gpu.tolerations=null")
    for role in WORKERS:
        assert resources(objects, role)["limits"]["nvidia.com/mig-3g.40gb"] == 1 and GPU not in resources(objects, role)["limits"]
        assert pod(objects, role)["runtimeClassName"] == "nvidia" and TOLERATED not in pod(objects, role)["tolerations"]
    assert "runtimeClassName" not in pod(objects, "router")
    assert pod(rendered(CUDA, "gpu.runtimeClassName=nvidia", "decode.runtimeClassName=own"), "decode")["runtimeClassName"] == "own"


def test_what_a_role_or_its_profile_asks_for_stays() -> None:
    objects = rendered(CUDA, r"profiles.small.resources.limits.nvidia\.com/mig-1g\.10gb=1", "prefill.profile=small")
    assert [name for name in resources(objects, "prefill")["limits"] if "nvidia" in name] == ["nvidia.com/mig-1g.10gb"]
    assert resources(objects)["limits"][GPU] == 1
    made = "resourceClaimTemplateName"
    claims = rendered(CUDA, f"decode.resourceClaims.gpu.{made}=one", f"prefill.resourceClaims.rdma.{made}=hca")
    assert GPU not in resources(claims)["limits"] and resources(claims)["claims"] == [{"name": "gpu"}]
    assert resources(claims, "prefill")["limits"][GPU] == 1, "an adapter is no GPU"
    assert GPU not in str(rendered(CUDA, "gpu.resource=", "gpu.tolerations=null")["Deployment", "decode"])


def test_a_toleration_is_there_once() -> None:
    objects = rendered(files=(CHART / "examples" / "values-rdma.yaml",))
    assert pod(objects, "decode")["tolerations"].count(TOLERATED) == 1


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ((), True),
        (("config.kv.rdma=false",), False),
        (("config.kv.transport=tcp",), False),
        (("config.kv.transport=nixl",), True),
    ],
)
def test_who_gives_workers_adapters_asks_for_rdma_unless_the_configuration_says_otherwise(given: tuple[str, ...], asked: bool) -> None:
    """The routers know it, too: they raise the alarm."""
    objects = rendered(*given, files=(CHART / "examples" / "values-rdma.yaml",))
    assert [config(objects, role).get("kv", {}).get("rdma", False) for role in ("router", *WORKERS)] == [asked] * 3
    assert "rdma" not in str([config(rendered(CUDA), role) for role in ("router", *WORKERS)])


def test_workers_share_a_gpu_only_if_asked_and_then_its_memory() -> None:
    objects = rendered(CUDA, "gpu.workersPerGpu=2", "gpu.resource=nvidia.com/gpu.shared")
    for role in WORKERS:
        assert config(objects, role)[role]["gpus"] == 0.5 and resources(objects, role)["limits"]["nvidia.com/gpu.shared"] == 1
    assert config(rendered("engine=vllm", CUDA, "gpu.workersPerGpu=4"), "decode")["decode"]["gpus"] == 0.25


def test_an_update_on_gpus_needs_no_spare_one() -> None:
    """A single worker stays until its successor has come, or nobody would serve."""
    objects = rendered(CUDA, "prefill.replicas=1", "decode.replicas=2")
    assert rollout(objects, "prefill") == {"maxSurge": 1, "maxUnavailable": 0}
    assert rollout(objects, "decode") == {"maxSurge": 0, "maxUnavailable": 1}
    assert rollout(rendered(CUDA, "prefill.scaling=baton"), "prefill") == {"maxSurge": 0, "maxUnavailable": 1}
    assert rollout(rendered(CUDA, "decode.rollout.maxUnavailable=3")) == {"maxSurge": 0, "maxUnavailable": 3}


def test_memory_has_room_for_the_hosts_pool_or_no_limit() -> None:
    unknown = resources(rendered(CUDA))
    assert unknown["requests"]["memory"] == "4096Mi" and "memory" not in unknown["limits"]
    known = resources(rendered(CUDA, "config.engine.kv_memory_mib=8192"))
    assert (known["requests"]["memory"], known["limits"]["memory"]) == ("12288Mi", "12288Mi")
    given = resources(rendered(CUDA, "decode.resources.limits.memory=160Gi", "decode.resources.requests.memory=128Gi"))
    assert (given["requests"]["memory"], given["limits"]["memory"]) == ("128Gi", "160Gi")


def test_a_worker_has_longer_to_start() -> None:
    probes = [pod(rendered(*values), "decode")["containers"][0]["startupProbe"]["failureThreshold"] for values in ((), (CUDA,))]
    assert probes == [300, 900]


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("gpu.workersPerGpu=2",), "gpu.workersPerGpu is 2, and config.engine.device is cpu"),
        ((CUDA, "gpu.workersPerGpu=0"), "workersPerGpu"),
        ((*VLLM, "gpu.workersPerGpu=2"), "gpu.workersPerGpu is 2, and each worker has 2 ranks"),
        (("gpu.runtimeClassName=nvidia",), "gpu.runtimeClassName is nvidia, and config.engine.device is cpu"),
        ((CUDA, "gpu.resource=nvidia.com/gpu.shared"), "gpu.resource is nvidia.com/gpu.shared"),
        ((CUDA, "gpu.resource=rdma/hca"), "gpu.resource is rdma/hca"),
        ((CUDA, "gpu.count=2"), "count"),
        ((CUDA, r"decode.resources.limits.nvidia\.com/gpu=2"), "ask for: 2; a worker of Baton's own engine uses one"),
        ((r"decode.resources.limits.nvidia\.com/gpu=1",), "ask for GPUs (1), and config.engine.device is cpu"),
        (("config.engine.device=cpu", r"prefill.resources.limits.nvidia\.com/gpu=1"), "prefill.resources or its profile ask for GPUs (1)"),
        ((CUDA, "config.decode.gpus=1"), "config.decode.gpus has its place in Kubernetes: set decode.resources or gpu, beside config"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(program: str, values: tuple[str, ...], said: str) -> None:
    assert said in refusal(*values, program=program)


@pytest.mark.parametrize("name", ["values-gpu", "values-rdma", "values-vllm"])
def test_the_examples_ask_for_what_they_use(name: str) -> None:
    objects = rendered(files=(Path(CHART) / "examples" / f"{name}.yaml",))
    for role in WORKERS:
        assert resources(objects, role)["limits"][GPU] == (2 if name == "values-vllm" else 1)
        assert rollout(objects, role) == {"maxSurge": 0, "maxUnavailable": 1}
        assert pod(objects, role)["containers"][0]["image"].endswith("-cuda-vllm" if name == "values-vllm" else "-cuda")
