"""The Job that compares topologies of a release: what the chart makes of `loadtest`, and what runs in its pod."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube import CHART, HELMS
from rendering import helm, refusal

ON = "loadtest.enabled=true"
with_helm = pytest.mark.skipif(not HELMS, reason="no helm on PATH")


def made(*values: str, program: str = "") -> dict[str, dict[str, Any]]:
    """The Job's objects by kind, in the namespace `models`."""
    done = helm("common.env.A=b", *values, program=program, more=("--namespace", "models"))
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    return {each["kind"]: each for each in objects if each["metadata"]["labels"]["app.kubernetes.io/component"] == "loadtest"}


def spec(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    told: dict[str, Any] = objects["Job"]["spec"]["template"]["spec"]
    return told


@with_helm
def test_nothing_of_it_is_there_unless_asked_for() -> None:
    assert not made() and "Role" not in helm().stdout


@with_helm
@pytest.mark.parametrize("program", HELMS)
def test_its_account_has_the_rights_that_the_command_needs_and_no_other(program: str) -> None:
    """docs/kubernetes.md names them; of Deployments it may resize the two pools alone."""
    objects = made(ON, program=program)
    rights = {
        f"{verb} {resource}": rule.get("resourceNames", [])
        for rule in objects["Role"]["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }  # fmt: skip
    sized = rights.pop("patch deployments/scale")
    assert sized == ["r-baton-prefill", "r-baton-decode"] and not any(rights.values())
    assert set(rights) == {"list deployments", "list pods", "patch pods", "get pods/portforward", "create pods/portforward"}
    account = objects["ServiceAccount"]["metadata"]["name"]
    assert objects["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "models"}]
    assert objects["RoleBinding"]["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    assert spec(objects)["serviceAccountName"] == account and spec(objects)["automountServiceAccountToken"] is True


@with_helm
def test_it_asks_the_release_through_its_service_and_is_let_in() -> None:
    objects = made(
        ON, "loadtest.args={--rates,1,--input,100-300}", "networkPolicy.clients[0].podSelector.matchLabels.app=x", "service.grpcPort=99"
    )
    [container] = spec(objects)["containers"]
    assert container["args"][3:6] == ["900", "baton", "loadtest"] and container["args"][-4:] == ["--rates", "1", "--input", "100-300"]
    told = " ".join(container["args"][4:])
    assert "--kubernetes models/r --address r-baton.models.svc.cluster.local:99 --door grpc --out /report" in told
    assert container["securityContext"]["readOnlyRootFilesystem"] and spec(objects)["securityContext"]["runAsNonRoot"]
    assert "emptyDir" in next(each for each in spec(objects)["volumes"] if each["name"] == "report")
    everything = [each for each in yaml.safe_load_all(helm(ON, "networkPolicy.clients[0].podSelector.matchLabels.app=x").stdout) if each]
    [router] = [each for each in everything if each["kind"] == "NetworkPolicy" and each["metadata"]["name"].endswith("router")]
    assert "'app.kubernetes.io/component': 'loadtest'" in str(router["spec"]["ingress"][0])
    [to_router] = [rule for rule in objects["NetworkPolicy"]["spec"]["egress"] if "to" in rule]
    assert {port["port"] for port in to_router["ports"]} == {8470, 8000}
    assert "admin" not in str(objects["NetworkPolicy"]) and objects["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress", "Egress"]


@with_helm
def test_certificates_keys_and_a_claim_are_mounted() -> None:
    objects = made(ON, "security.tlsSecret=t", "security.apiKeysSecret=k", "loadtest.claim=reports", "loadtest.door=http")
    [container] = spec(objects)["containers"]
    told = " ".join(container["args"][4:])
    assert ":8000 --door http" in told and "--ca /etc/baton/tls/ca.crt" in told and "--server-name baton.internal" in told
    assert {"tls", "keys", "report"} <= {each["name"] for each in container["volumeMounts"]}
    assert "secretKeyRef" not in str(objects["Job"]), "a key is in no environment and in no argument of the pod"
    volumes = {each["name"]: each for each in spec(objects)["volumes"]}
    assert volumes["report"]["persistentVolumeClaim"]["claimName"] == "reports" and container["args"][3] == "0", "nobody has to copy it"


@with_helm
def test_another_comparison_is_another_job() -> None:
    names = {made(ON, *values)["Job"]["metadata"]["name"] for values in ((), ("decode.replicas=3",), ("loadtest.args={--rates,1}",))}
    assert len(names) == 2, "how many workers there are changes nothing of it"


@with_helm
@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((ON, "prefill.scaling=hpa"), "loadtest.enabled: prefill.scaling is hpa"),
        ((ON, "decode.scaling=keda", "decode.autoscale.prometheus=http://p"), "loadtest.enabled: decode.scaling is keda"),
        ((ON, "loadtest.args={--out,/tmp}"), "loadtest.args: the chart sets --out"),
        ((ON, "loadtest.args={--door=http}"), "loadtest.args: the chart sets --door=http"),
        ((ON, "loadtest.door=smtp"), "/loadtest/door"),
        ((ON, "loadtest.arms=x"), "arms"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(program: str, values: tuple[str, ...], said: str) -> None:
    assert said in refusal(*values, program=program)


def run(pause: str, code: str) -> subprocess.Popen[str]:
    """What the pod runs, with this program in place of the comparison."""
    script = (CHART / "files" / "loadtest.py").read_text()
    env = {**os.environ, "POD": "p", "NAMESPACE": "n"}
    return subprocess.Popen([sys.executable, "-c", script, pause, sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


def test_the_job_ends_as_the_comparison_did(tmp_path: Path) -> None:
    with run("0", "import sys; sys.exit(3)") as done:
        assert done.communicate(timeout=60)[0] == "" and done.returncode == 3
    with run("0.1", "") as done:
        assert "kubectl -n n cp p:/report report" in done.communicate(timeout=60)[0] and done.returncode == 0


def test_an_order_to_stop_reaches_the_comparison_which_may_take_its_time() -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('here', flush=True); signal.pause()"
    with run("3600", code) as told:
        assert told.stdout and told.stdout.readline() == "here\n"
        told.send_signal(signal.SIGTERM)
        assert told.wait(60) == 7, "and nobody waits for a copy"


def test_an_order_to_stop_ends_the_pause() -> None:
    with run("3600", "") as told:
        assert told.stdout and "cp p:/report" in told.stdout.readline()
        told.send_signal(signal.SIGTERM)
        assert told.wait(60) == 0
