"""What the chart makes of `model`, rendered by helm: the Job and those that wait for it, and what is refused."""

from pathlib import Path

import pytest
from kube import CHART, HELMS
from rendering import Objects, config, pod, refusal, rendered, volume

SOURCE = "hf://own/tale"
FETCH = ("model.fetch.source=" + SOURCE,)
IN_NODES = ("model.hostPath=/srv/llama", "profiles.gpu.nodeSelector.kind=gpu", "prefill.profile=gpu", "decode.profile=gpu")

pytestmark = pytest.mark.skipif(not HELMS, reason="no helm on PATH")


def path(objects: Objects, role: str) -> str:
    told: str = config(objects, role)["model"]["path"]
    return told


def test_the_model_that_ships_needs_nothing() -> None:
    objects = rendered()
    assert path(objects, "decode") == "/models/tale" and volume(pod(objects, "decode")) is None
    assert not {"Job", "PersistentVolumeClaim"} & {kind for kind, _ in objects}
    assert "initContainers" not in pod(objects, "router") and ("NetworkPolicy", "fetch") not in objects


def test_a_fetch_makes_a_claim_and_a_job_and_everybody_waits_for_the_same() -> None:
    objects = rendered(*FETCH, "model.fetch.endpoint=https://hub.example", "model.fetch.include={*.json,*.safetensors}")
    claim = objects["PersistentVolumeClaim", "model"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    job = pod(objects, "fetch")["containers"][0]["args"]
    assert job[:3] == ["baton", "fetch", SOURCE] and Path(job[3]).name == "tale"
    for role in ("router", "prefill", "decode"):
        spec = pod(objects, role)
        waits = spec["initContainers"][0]["args"]
        assert waits[-1] == "--wait" and waits[:-1] == job[: len(waits) - 1], "what they wait for is what is fetched"
        assert path(objects, role) == job[3]
        assert volume(spec) == {"name": "model", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"], "readOnly": True}}
        assert objects["Deployment", role]["spec"]["progressDeadlineSeconds"] > 3600
    assert "readOnly" not in (volume(pod(objects, "fetch")) or {})["persistentVolumeClaim"]
    assert "initContainers" not in pod(objects, "redis")


def test_a_changed_job_has_another_name_and_the_same_one_keeps_it() -> None:
    def name(*values: str) -> str:
        told: str = rendered(*FETCH, *values)["Job", "fetch"]["metadata"]["name"]
        return told

    assert name() == name("decode.replicas=5")
    assert len({name(), name("model.fetch.stallSeconds=61"), name("image.tag=other")}) == 3
    folders = {path(rendered(f"model.fetch.source={source}"), "decode") for source in (SOURCE, f"{SOURCE}@v2", "s3://bucket/own/tale")}
    assert len(folders) == 3 and {Path(folder).name for folder in folders} == {"tale"}


def test_the_job_is_confined_and_holds_its_secrets_in_files() -> None:
    objects = rendered(*FETCH, "model.fetch.existingSecret=hub", "model.fetch.caSecret=ca", "model.fetch.env.HTTPS_PROXY=http://proxy:3128")
    spec = pod(objects, "fetch")
    [container] = spec["containers"]
    assert spec["automountServiceAccountToken"] is False and spec["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == pod(objects, "decode")["containers"][0]["securityContext"]
    assert (volume(spec, "secret") or {})["secret"] == {"secretName": "hub"} and volume(spec, "ca")
    assert not any("valueFrom" in each for each in container["env"])
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
    args = " ".join(container["args"])
    assert "--secrets /etc/baton/fetch" in args and "--ca /etc/baton/ca/ca.crt" in args
    assert volume(pod(objects, "decode"), "secret") != volume(spec, "secret"), "workers do not get the store's credentials"


def test_only_the_job_reaches_outside() -> None:
    policy = rendered(*FETCH)["NetworkPolicy", "fetch"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and "ingress" not in policy
    assert policy["egress"][1:] == [{"ports": [{"port": 443}]}]
    own = rendered(*FETCH, "networkPolicy.fetch[0].ports[0].port=3128")["NetworkPolicy", "fetch"]["spec"]["egress"]
    assert own[1:] == [{"ports": [{"port": 3128}]}] and own[0]["ports"][0]["port"] == 53


def test_a_claim_of_ones_own_may_be_filled_by_the_job() -> None:
    objects = rendered(*FETCH, "model.claim=shared")
    assert ("PersistentVolumeClaim", "model") not in objects
    assert {(volume(pod(objects, role)) or {})["persistentVolumeClaim"]["claimName"] for role in ("fetch", "router")} == {"shared"}
    alone = rendered("model.claim=shared")
    assert path(alone, "decode") == "/model" and path(rendered("model.claim=shared", "model.path=/model/l"), "decode") == "/model/l"
    assert not any(kind == "Job" for kind, _ in alone)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (("model.claim=c", "model.image=i"), ("model.claim", "model.image")),
        (("model.hostPath=/h", "model.image=i"), ("model.hostPath", "model.image")),
        (("model.hostPath=/h", *FETCH), ("model.fetch.source", "model.hostPath")),
        (("model.claim=c", "model.hostPath=/h", *FETCH), ("model.claim", "model.fetch.source")),
        ((*FETCH, "model.fetch.caSecret=a", "model.fetch.caConfigMap=b"), ("caSecret", "caConfigMap")),
    ],
)
def test_two_places_are_refused_and_both_are_named(values: tuple[str, ...], names: tuple[str, str]) -> None:
    said = refusal(*values)
    assert all(name in said for name in names), said


def test_a_claim_for_one_node_is_refused_with_the_way_out() -> None:
    said = refusal(*FETCH, "model.fetch.storage.accessModes={ReadWriteOnce}")
    assert "r-baton-model is ReadWriteOnce" in said and "ReadWriteMany" in said and "StorageClass" in said
    rendered(*FETCH, "model.fetch.storage.accessModes={ReadWriteOnce,ReadWriteMany}")


def test_a_folder_of_the_node_needs_to_be_known_where_pods_land() -> None:
    assert "prefill.profile" in refusal("model.hostPath=/srv/llama")
    assert "decode.profile" in refusal(*(value for value in IN_NODES if not value.startswith("decode")))
    assert "router.nodeSelector" in refusal(*IN_NODES)
    objects = rendered(*IN_NODES, "router.nodeSelector.kind=gpu")
    for role in ("router", "prefill", "decode"):
        assert (volume(pod(objects, role)) or {})["hostPath"] == {"path": "/srv/llama", "type": "Directory"}
    rendered(
        "model.hostPath=/h", "prefill.replicas=0", "profiles.gpu.nodeSelector.kind=gpu", "decode.profile=gpu", "router.nodeSelector.k=v"
    )


def test_an_image_needs_a_cluster_that_knows_such_volumes() -> None:
    said = refusal("model.image=registry.example/llama:1")
    assert "1.35" in said and "v1.34.0" in said and "imageForce" in said
    for values, version in ((("model.imageForce=true",), "1.34.0"), ((), "1.35.0"), ((), "1.36.2")):
        objects = rendered("model.image=registry.example/llama:1", *values, version=version)
        assert (volume(pod(objects, "decode")) or {})["image"] == {"reference": "registry.example/llama:1", "pullPolicy": "IfNotPresent"}


def test_a_fetched_model_must_lie_on_the_claim() -> None:
    assert "not below model.mountPath" in refusal(*FETCH, "model.path=/models/tale")
    assert path(rendered(*FETCH, "model.path=/model/mine"), "decode") == "/model/mine"


def test_the_example_for_gpus_renders() -> None:
    objects = rendered(files=(CHART / "examples" / "values-gpu.yaml",))
    assert (volume(pod(objects, "decode")) or {})["persistentVolumeClaim"]["claimName"] == "llama"


def test_an_unknown_key_is_refused() -> None:
    assert "revison" in refusal(*FETCH, "model.fetch.revison=main")
