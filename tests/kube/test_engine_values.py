"""What the chart makes of `engine`, rendered by helm: image, configuration, probes, memory and folders of workers; and what is refused."""

from typing import Any

import pytest
from kube import CHART, HELMS
from rendering import Objects, config, pod, refusal, rendered, volume

GPUS = ("engine=vllm", "config.engine.device=cuda", "config.engine.vllm.tensor_parallel_size=2")
TWO = r"nvidia\.com/gpu=2"
ASKED = (f"prefill.resources.limits.{TWO}", f"decode.resources.limits.{TWO}")
WORKERS = ("prefill", "decode")

pytestmark = pytest.mark.skipif(not HELMS, reason="no helm on PATH")


def container(objects: Objects, role: str) -> dict[str, Any]:
    [only] = pod(objects, role)["containers"]
    return dict(only)


def environment(objects: Objects, role: str) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(objects, role)["env"] if "value" in each}


def mounts(objects: Objects, role: str) -> dict[str, str]:
    return {each["mountPath"]: each["name"] for each in container(objects, role)["volumeMounts"]}


def memory(objects: Objects, role: str = "decode") -> tuple[str, str]:
    asked = container(objects, role)["resources"]
    return asked["requests"]["memory"], asked["limits"]["memory"]


def test_batons_own_engine_is_the_default_and_nothing_of_vllm_is_there() -> None:
    objects = rendered()
    rendered("engine=baton", "config.engine.kind=baton")
    assert "engine" not in config(objects, "decode") and container(objects, "decode")["image"] == "baton:0.1.0"
    assert not environment(objects, "decode") and not {"/dev/shm", "/var/cache/vllm"} & set(mounts(objects, "decode"))
    assert memory(objects) == ("1Gi", "2Gi") and container(objects, "decode")["startupProbe"]["failureThreshold"] == 300


@pytest.mark.parametrize("program", HELMS)
def test_one_value_chooses_the_engine_of_all_roles_and_the_image(program: str) -> None:
    objects = rendered("engine=vllm", program=program)
    for role in ("router", *WORKERS):
        assert config(objects, role)["engine"] == {"kind": "vllm", "block_size": 32}
        assert container(objects, role)["image"] == "baton:0.1.0-vllm"
    assert container(rendered(*GPUS, *ASKED, program=program), "redis")["image"] == "baton:0.1.0-cuda-vllm"
    assert config(rendered(*GPUS, *ASKED, program=program), "decode")["engine"].get("block_size") is None


def test_a_tag_or_a_digest_of_ones_own_wins() -> None:
    assert container(rendered("engine=vllm", "image.tag=mine"), "decode")["image"] == "baton:mine"
    assert container(rendered("engine=vllm", "image.digest=sha256:0", "image.tag=mine"), "decode")["image"] == "baton@sha256:0"


def test_a_worker_has_longer_to_start() -> None:
    objects = rendered("engine=vllm", "prefill.startSeconds=90")
    probes = {role: container(objects, role)["startupProbe"]["failureThreshold"] for role in ("router", *WORKERS)}
    assert probes == {"router": 60, "prefill": 45, "decode": 900}
    assert objects["Deployment", "decode"]["spec"]["progressDeadlineSeconds"] == 1920


def test_what_vllm_writes_is_on_volumes() -> None:
    objects = rendered("engine=vllm", "prefill.env.TRITON_CACHE_DIR=/tmp/triton")
    for role in WORKERS:
        assert container(objects, role)["securityContext"]["readOnlyRootFilesystem"]
        assert mounts(objects, role)["/var/cache/vllm"] == "vllm-cache" and mounts(objects, role)["/var/cache/baton"] == "home"
        assert (volume(pod(objects, role), "vllm-cache") or {})["emptyDir"]
    told = environment(objects, "decode")
    assert {told[name] for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")} == {
        "/var/cache/vllm/vllm", "/var/cache/vllm/inductor", "/var/cache/vllm/triton",
    }  # fmt: skip
    assert environment(objects, "prefill")["TRITON_CACHE_DIR"] == "/tmp/triton", "what is said for a role wins"
    assert not any(each["name"] in ("vllm-shm", "vllm-cache") for role in ("router", "redis") for each in pod(objects, role)["volumes"])


def test_a_volume_of_ones_own_takes_the_place_of_the_charts() -> None:
    claim = "vllm-cache.persistentVolumeClaim.claimName=compiled"
    objects = rendered("engine=vllm", f"decode.volumes.{claim}", "common.volumes.dshm.emptyDir.medium=Memory",
                       "common.volumeMounts.dshm.mountPath=/dev/shm")  # fmt: skip
    assert volume(pod(objects, "decode"), "vllm-cache") == {"name": "vllm-cache", "persistentVolumeClaim": {"claimName": "compiled"}}
    assert mounts(objects, "decode")["/dev/shm"] == "dshm" and volume(pod(objects, "decode"), "vllm-shm") is None


def test_shared_memory_grows_with_the_ranks() -> None:
    one, two = rendered("engine=vllm"), rendered(*GPUS, *ASKED)
    sizes = [(volume(pod(objects, "decode"), "vllm-shm") or {})["emptyDir"] for objects in (one, two)]
    assert sizes == [{"medium": "Memory", "sizeLimit": "1024Mi"}, {"medium": "Memory", "sizeLimit": "2048Mi"}]


def test_memory_has_room_for_the_staging_pool_and_what_is_more_stays() -> None:
    assert memory(rendered("engine=vllm")) == ("2048Mi", "3072Mi")
    assert memory(rendered("engine=vllm", "config.engine.staging_mib=512", "config.engine.kv_memory_mib=1024")) == ("3584Mi", "4608Mi")
    assert memory(rendered(*GPUS, *ASKED, "config.engine.staging_mib=4096")) == ("12288Mi", "14336Mi")
    large = ("decode.resources.requests.memory=64Gi", "decode.resources.limits.memory=100G")
    assert memory(rendered("engine=vllm", *large)) == ("64Gi", "100G")
    only = rendered("engine=vllm", "decode.resources.limits.memory=null")
    assert "memory" not in container(only, "decode")["resources"].get("limits", {}), "none was asked for"


def test_each_rank_has_a_gpu() -> None:
    objects = rendered(*GPUS, *ASKED)
    assert container(objects, "decode")["resources"]["limits"]["nvidia.com/gpu"] == 2
    rendered(*GPUS, f"profiles.two.resources.limits.{TWO}", "decode.profile=two", "prefill.replicas=0")
    rendered(*GPUS, "common.resourceClaims.gpus.resourceClaimTemplateName=two")  # what a claim brings is not known here
    sliced = r"resources.limits.nvidia\.com/mig-3g\.40gb=1"
    rendered("engine=vllm", "config.engine.device=cuda", f"prefill.{sliced}", f"decode.{sliced}")
    memory_of_a_gpu = r"decode.resources.limits.nvidia\.com/gpumem=3000"
    rendered(*GPUS, *ASKED, memory_of_a_gpu)


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("engine=sglang",), "engine"),
        (("config.engine.kind=vllm",), "config.engine.kind is vllm, and engine is baton"),
        (("engine=vllm", "config.engine.kind=baton"), "config.engine.kind is baton, and engine is vllm"),
        (("engine=vllm", "config.engine.block_size=48"), "config.engine.block_size is 48"),
        ((*GPUS, *ASKED, "config.engine.vllm.pipeline_parallel_size=2"), "ask for: 2; ranks of config.engine.vllm"),
        ((*GPUS, ASKED[0], r"decode.resources.limits.nvidia\.com/gpu=1"), "decode.resources or its profile ask for: 1"),
        (("engine=vllm", *ASKED), "config.engine.device is cpu"),
    ],
)
def test_what_does_not_agree_is_refused_by_name(program: str, values: tuple[str, ...], said: str) -> None:
    assert said in refusal(*values, program=program)


@pytest.mark.parametrize("program", HELMS)
def test_the_examples_render(program: str) -> None:
    objects = rendered(files=(CHART / "examples" / "values-vllm.yaml",), program=program)
    assert container(objects, "prefill")["image"] == "team/baton:0.1.0-cuda-vllm" and memory(objects) == ("96Gi", "128Gi")
    objects = rendered(files=(CHART / "ci" / "vllm-values.yaml",), program=program)
    assert memory(objects) == ("2816Mi", "3840Mi") and config(objects, "decode")["engine"]["vllm"] == {"enforce_eager": True}
