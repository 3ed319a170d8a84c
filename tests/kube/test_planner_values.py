"""What the chart makes of `planner`, rendered by helm: who may change what, and what is refused."""

import pytest
import yaml
from kube import CHART, HELMS
from rendering import config, pod, refusal, rendered

pytestmark = pytest.mark.skipif(not HELMS, reason="no helm on PATH")
VALUES = CHART / "ci" / "planner-values.yaml"
OURS = ("planner.enabled=true", "prefill.scaling=baton", "decode.scaling=baton", "planner.times=x", "config.slo.ttft_s=1")


def test_without_it_there_is_no_planner_and_nobody_holds_a_token() -> None:
    objects = rendered()
    assert not [kind for kind, component in objects if component == "planner"] and ("Role", "planner") not in objects
    assert not any(pod(objects, role)["automountServiceAccountToken"] for role in ("router", "prefill", "decode", "redis"))


def test_the_planner_alone_may_size_the_two_pools_and_nothing_else() -> None:
    objects = rendered(files=(VALUES,))
    rules = {tuple(rule["resources"]): rule for rule in objects["Role", "planner"]["rules"]}
    assert rules.pop(("deployments/scale",)) == {
        "apiGroups": ["apps"], "resources": ["deployments/scale"],
        "resourceNames": ["r-baton-prefill", "r-baton-decode"], "verbs": ["patch"],
    }  # fmt: skip
    assert {what: rule["verbs"] for what, rule in rules.items()} == {("deployments",): ["list"], ("pods",): ["list", "patch"]}
    spec = pod(objects, "planner")
    assert spec["automountServiceAccountToken"] and spec["serviceAccountName"] == "r-baton-planner"
    assert objects["RoleBinding", "planner"]["subjects"] == [{"kind": "ServiceAccount", "name": "r-baton-planner", "namespace": "default"}]
    assert not any(pod(objects, role)["automountServiceAccountToken"] for role in ("router", "prefill", "decode", "redis"))


def test_it_reads_its_profile_its_bounds_and_its_release() -> None:
    objects = rendered(files=(VALUES,))
    told = config(objects, "planner")
    assert told["planner"] == {
        "enabled": True, "profile": "/etc/baton/config/profile.yaml", "release": "default/r",
        "budget": 6, "most_prefill": 4, "most_decode": 4,
    }  # fmt: skip
    assert told["slo"] == {"ttft_s": 1, "tpot_s": 0.05} and "kv" not in told
    assert yaml.safe_load(objects["ConfigMap", "planner"]["data"]["profile.yaml"]) == {"format": 1}
    assert not [mount for mount in pod(objects, "planner")["containers"][0]["volumeMounts"] if mount["name"] == "model"]
    assert "planner" not in config(objects, "router") and "planner" not in config(objects, "decode")


def test_another_profile_replaces_the_pod() -> None:
    def told(times: str) -> str:
        made = rendered(*OURS[:3], f"planner.times={times}", OURS[4])
        return str(made["Deployment", "planner"]["spec"]["template"]["metadata"]["annotations"]["baton/config"])

    assert told("x") == told("x") != told("y")


def test_the_chart_leaves_the_sizes_to_it() -> None:
    objects = rendered(files=(VALUES,))
    for role in ("prefill", "decode"):
        deployment = objects["Deployment", role]
        assert "replicas" not in deployment["spec"] and deployment["metadata"]["annotations"]["baton/scaling"] == "baton"
    assert not [kind for kind, _ in objects if kind in ("HorizontalPodAutoscaler", "ScaledObject")]


def test_it_reaches_routers_redis_and_the_api_server() -> None:
    objects = rendered(files=(VALUES,))
    ports = {port["port"] for rule in objects["NetworkPolicy", "planner"]["spec"]["egress"] for port in rule["ports"]}
    assert ports == {8471, 6379, 53, 443, 6443}
    for role, port in (("router", 8471), ("redis", 6379)):
        rules = [rule for rule in objects["NetworkPolicy", role]["spec"]["ingress"] if {"port": port} in rule["ports"]]
        assert any("planner" in str(rule["from"]) for rule in rules)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("planner.enabled=true",), "prefill.scaling is values"),
        ((*OURS, "decode.scaling=hpa"), "decode.scaling is hpa, and a pool has one owner: set it to baton"),
        ((*OURS, "prefill.scaling=keda", "prefill.autoscale.prometheus=http://x"), "prefill.scaling is keda"),
        ((*OURS, "loadtest.enabled=true"), "planner.enabled and loadtest.enabled"),
        ((*OURS[:3], OURS[4]), "planner.times: the planner needs the profile"),
        (OURS[:4], "config.slo.ttft_s"),
        (("config.planner.enabled=true",), "set planner.enabled, beside config"),
        (("config.planner.profile=x",), "set planner.times, beside config"),
        ((*OURS, "planner.replicas=0"), "planner"),
        ((*OURS, "config.planner.buget=3"), "buget"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way(given: tuple[str, ...], said: str) -> None:
    assert said in refusal(*given)
