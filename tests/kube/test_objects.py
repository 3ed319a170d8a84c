"""Every object that the chart can make, put before the API server; and what values it refuses."""

import random
import shutil
from pathlib import Path

import pytest
import yaml
from kube import CHART, ON_A_CLUSTER, Kube, Release
from kube_load import VALUES, loaded, toy_release
from plans import CASES, made_of

from baton.plan.values import values_of

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(900)]
FILES = sorted([*CHART.glob("examples/*.yaml"), *CHART.glob("ci/*-values.yaml")])
SMALL = ("--set", "router.replicas=1,prefill.replicas=1,decode.replicas=1")


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_the_api_server_accepts_every_object(kube: Kube, file: Path) -> None:
    """With each version of Helm, whose renderings are equal but for what is drawn at random."""
    rendered = []
    for helm in kube.helms:
        kube.run(helm, "lint", "--strict", str(CHART), "-f", str(file))
        text = kube.run(helm, "template", "r", str(CHART), "-f", str(file), "--kube-version", "1.34.0", "--no-hooks")
        kube.kubectl("apply", "--dry-run=server", "-f", "-", given=text)
        rendered.append([each for each in yaml.safe_load_all(text) if each])
    again = yaml.safe_load_all(
        kube.run(kube.helms[0], "template", "r", str(CHART), "-f", str(file), "--kube-version", "1.34.0", "--no-hooks")
    )
    rendered.append([each for each in again if each])
    kept = [sorted(map(str, (each for each in objects if each["kind"] != "Secret"))) for objects in rendered]
    assert all(objects == kept[0] for objects in kept)


@pytest.mark.parametrize("case", CASES)
def test_the_api_server_accepts_what_baton_plan_writes(kube: Kube, case: str, tmp_path: Path) -> None:
    asked, stocks, how = CASES[case]
    (path := tmp_path / "values.yaml").write_text(yaml.safe_dump(values_of(made_of(asked, *stocks, **how), asked, 4096)))
    for helm in kube.helms:
        text = kube.run(helm, "template", "r", str(CHART), "-f", str(path), "--kube-version", "1.34.0", "--no-hooks")
        said = kube.kubectl("apply", "--dry-run=server", "-f", "-", given=text)
        assert "deployment.apps/r-baton-decode created (server dry run)" in said
    wrong = text.replace("nvidia.com/gpu: ", "nvidia.com/gpu: -")
    assert wrong != text
    refused = kube.kubectl("apply", "--dry-run=server", "-f", "-", given=wrong, check=False)
    assert "must be greater than or equal to 0" in refused, "negative control: it looks at what it is given"


def test_without_generated_secrets_two_renderings_are_equal(kube: Kube) -> None:
    command = (kube.helm, "template", "r", str(CHART), "-f", str(CHART / "examples" / "values-gitops.yaml"), "--kube-version", "1.34.0")
    first, second = kube.run(*command), kube.run(*command)
    assert first == second and "kind: Secret" not in first


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool: apt-get install prometheus")
def test_promtool_accepts_the_rules_with_the_one_for_rdma(kube: Kube, tmp_path: Path) -> None:
    given = ("--set", "monitoring.enabled=true,config.kv.transport=nixl", "--kube-version", "1.34.0")
    objects = yaml.safe_load_all(kube.run(kube.helm, "template", "r", str(CHART), *given))
    [rules] = [each["spec"] for each in objects if each and each["kind"] == "PrometheusRule"]
    assert "BatonKvNotByRdma" in [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    kube.run("promtool", "check", "rules", str(tmp_path / "rules.yaml"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("decode.replicas=0", "/decode/replicas"),
        ("decode.replica=2", "replica"),
        ("prefill.scaling=sometimes", "scaling"),
        ("decode.profile=h100", "decode.profile h100"),
        ("redis.enabled=false", "secrets.existingSecret"),
        ("config.router.policy=best", "policy"),
        ("config.decode.gpus=1", "decode.resources"),
        ("prefill.scaling=hpa,prefill.autoscale.min=0", "prefill.autoscale.min"),
        ("decode.scaling=keda", "decode.autoscale.prometheus"),
        ("decode.scaling=hpa,decode.autoscale.min=5", "must not exceed max"),
        ("decode.workload=lws", "decode.workload lws"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("ingress.enabled=true,ingress.tlsSecret=x", "ingress.host"),
        ("ingress.enabled=true,security.tlsSecret=x", "security.tlsSecret"),
        ("config.kv.transport=nixl,security.tlsSecret=x", "NIXL encrypts nothing"),
        ("prefill.scaling=keda,prefill.autoscale.min=0,prefill.autoscale.prometheus=http://x", "config.slo.ttft_s"),
        ("decode.scaling=keda,decode.autoscale.min=0", "/decode/autoscale/min"),
        ("profiles.gpu.rolout.maxSurge=0", "rolout"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(kube: Kube, given: str, said: str) -> None:
    for helm in kube.helms:
        answer = kube.run(helm, "template", "r", str(CHART), "--kube-version", "1.34.0", "--set", given, check=False)
        assert said in answer and "kind: Deployment" not in answer, answer[-2000:]


def test_a_release_of_helm_3_goes_on_with_helm_4_and_another_model_is_refused(kube: Kube) -> None:
    with toy_release(kube, "baton-upgrade", *SMALL) as release:
        before = {role: release.pods(role)[0]["metadata"]["uid"] for role in ("router", "prefill", "decode", "redis")}
        for helm in kube.helms:
            again = Release(Kube(kube.env, kube.image, helm), release.name, release.namespace)
            again.install("-f", str(VALUES), *SMALL, verb="upgrade")
        after = {role: release.pods(role)[0]["metadata"]["uid"] for role in before}
        assert before == after  # nothing was changed, so nothing was replaced
        how = ("-f", str(VALUES), *SMALL, "--set", "config.engine.block_size=32")
        said = release.install(*how, verb="upgrade", check=False)
        assert "engine.block_size changes from 16 to 32" in said and "second release" in said
        said = release.install("-f", str(VALUES), *SMALL, "--set", "engine=vllm", verb="upgrade", check=False)
        assert "engine.kind changes from baton to vllm" in said
        with loaded(release, 30):
            pass


def test_pods_run_as_any_user_without_a_group_of_their_own(kube: Kube) -> None:
    """As on OpenShift, which chooses the user: here a patch of the Deployments does."""
    user = random.randrange(1_000_000, 2_000_000)
    with toy_release(kube, "baton-any-user", *SMALL, "--set", "common.adaptSecurityContext=true") as release:
        patch = yaml.safe_dump({"spec": {"template": {"spec": {"securityContext": {"runAsUser": user}}}}})
        for role in ("redis", "router", "prefill", "decode"):
            kube.kubectl("-n", release.namespace, "patch", "deployment", f"{release.full}-{role}", "--patch", patch)
            kube.kubectl("-n", release.namespace, "rollout", "status", f"deployment/{release.full}-{role}", "--timeout=180s", timeout=190)
        release.whole(router=1, prefill=1, decode=1, redis=1)
        assert all(pod["spec"]["securityContext"]["runAsUser"] == user for pod in release.pods("decode"))
        with loaded(release, 30):
            pass
