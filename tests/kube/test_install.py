"""`helm install` on a real cluster of two nodes: the pods, a handoff between nodes, the doors, and what an upgrade replaces."""

import json
from collections.abc import Iterator
from functools import partial

import pytest
from kube import ON_A_CLUSTER, Kube, Release, forwarded, namespace
from openai import OpenAI

from baton.client import Client

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(2400)]
SMALL = ("--set", "decode.replicas=1", "--set", "router.replicas=1", "--set", "common.env.OMP_NUM_THREADS=1")
PROMPT = "Once upon a time there was a fox who lived near the river and wanted to see the sea. The fox was called Pim."


@pytest.fixture(scope="module")
def release(kube: Kube) -> Iterator[Release]:
    with namespace(kube, "baton-test") as name:
        made = Release(kube, "r", name)
        made.install(*SMALL)
        yield made
        made.helm("uninstall", "r", "--wait")
        kinds = "all,configmap,secret,networkpolicy,poddisruptionbudget,serviceaccount"
        of_the_release = partial(kube.get, kinds, name, "app.kubernetes.io/instance=r,app.kubernetes.io/component!=test")
        kube.wait(lambda: not of_the_release())


def test_helm_test_proves_a_handoff(release: Release) -> None:
    said = release.helm("test", "r", "--logs", timeout=300)
    assert "digests checked" in said and "KV by tcp" in said, said


def test_an_application_asks_through_the_service(release: Release) -> None:
    how = {"max_tokens": 12, "temperature": 0.0, "timeout_s": 60}
    with forwarded(release, 8470) as address, Client(address) as client, client.generate(PROMPT, **how) as stream:
        text = "".join(stream.texts())
    with forwarded(release, 8000) as address:
        openai = OpenAI(base_url=f"http://{address}/v1", api_key="none")
        answer = openai.completions.create(model="tale", prompt=PROMPT, max_tokens=12, temperature=0)
    assert text == answer.choices[0].text != ""


def test_a_changed_value_of_one_role_replaces_the_pods_of_that_role_only(release: Release) -> None:
    before = {role: release.pods(role)[0]["metadata"]["uid"] for role in ("router", "prefill", "decode", "redis")}
    release.install(*SMALL, "--set", "config.decode.drain_s=20", verb="upgrade")
    after = {role: release.pods(role)[0]["metadata"]["uid"] for role in before}
    assert [role for role in before if before[role] != after[role]] == ["decode"]
    release.helm("rollback", "r", "1", "--wait", timeout=300)


def test_no_pod_holds_a_token_or_a_secret_in_its_environment(release: Release) -> None:
    secret = json.loads(release.kube.kubectl("-n", release.namespace, "get", "secret", "r-baton", "-o", "json"))["data"]
    assert set(secret) == {"config.yaml", "redis.conf"}
    for role in ("router", "prefill", "decode", "redis"):
        pod = release.pods(role)[0]["metadata"]["name"]
        seen = release.kube.kubectl(
            "-n", release.namespace, "exec", pod, "--", "sh", "-c", "env; cat /proc/1/cmdline; ls /var/run/secrets || true"
        )
        assert "redis://" not in seen and "requirepass" not in seen and "kubernetes.io" not in seen


def test_a_key_that_has_its_place_in_kubernetes_is_refused_by_name(kube: Kube) -> None:
    places = {
        "config.router.replicas=3": "router.replicas",
        "config.launcher.kind=ray": "Kubernetes starts",
        "config.cluster.host=127.0.0.1": "set listen",
    }
    for given, place in places.items():
        said = Release(kube, "x", "default").install("--dry-run=client", "--set", given, check=False)
        assert given.partition("=")[0] in said and place in said
    said = Release(kube, "x", "default").install("--dry-run=client", "--set", "config.engine.blok_size=3", check=False)
    assert "blok_size" in said
