"""The chart's `engine: vllm` on a real cluster, with the image that BATON_TEST_KUBE_VLLM_IMAGE names (tests/kube/run can build one)."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kube import ON_A_CLUSTER, Kube, Release, namespace

from baton.client import Client

IMAGE = "BATON_TEST_KUBE_VLLM_IMAGE"
pytestmark = [
    *ON_A_CLUSTER,
    pytest.mark.skipif(not os.environ.get(IMAGE), reason=f"no image with vLLM: {IMAGE} is not set"),
    pytest.mark.timeout(2400),
]
SMALL = (
    "--set", "engine=vllm", "--set", "prefill.replicas=1", "--set", "decode.replicas=1", "--set", "router.replicas=1",
    "--set", "common.env.OMP_NUM_THREADS=1", "--set", "service.type=NodePort", "--set", "config.engine.vllm.enforce_eager=true",
    "--set", "config.model.max_model_len=1024", "--set", "config.router.bypass_tokens=0", "--set", "config.router.recover_wait_s=300",
)  # fmt: skip
PROMPT = [(i * 37) % 900 + 5 for i in range(150)]
KILL = """
import os, pathlib, signal
found = [int(p.name) for p in pathlib.Path("/proc").glob("[0-9]*") if b"EngineCore" in (p / "cmdline").read_bytes()]
cores = [pid for pid in found if pid != os.getpid()]  # these lines name it, too
[os.kill(pid, signal.SIGKILL) for pid in cores]
print(len(cores))
"""


@pytest.fixture(scope="module")
def release(kube: Kube) -> Iterator[Release]:
    with namespace(kube, "baton-vllm") as name:
        made = Release(replace(kube, image=os.environ[IMAGE]), "v", name)
        made.install(*SMALL)
        yield made
        made.helm("uninstall", "v", "--wait")


def stream(release: Release, on_token: Any = None) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    """Tokens, and what the answer says of its handoff and its workers."""
    how: dict[str, Any] = {"max_tokens": 300, "temperature": 0.9, "seed": 4, "ignore_eos": True, "timeout_s": 500}
    with Client(release.doors()[0]) as client, client.generate(token_ids=PROMPT, **how) as answer:
        tokens = []
        for token in answer:
            tokens.append(token.id)
            if on_token is not None:
                on_token(token.index)
        return tokens, answer.result.handoff, answer.result.workers


def test_kv_goes_from_pod_to_pod_and_nothing_is_written_outside_the_volumes(release: Release) -> None:
    said = release.helm("test", "v", "--logs", timeout=300)
    assert "digests checked" in said and "KV by tcp" in said, said
    tokens, handoff, workers = stream(release)
    assert len(tokens) == 300 and workers["prefill"] != workers["decode"]
    assert handoff["blocks"] == handoff["digests_checked"] == 5 and not handoff["failure"]
    for role in ("prefill", "decode"):
        [pod] = release.ready(role)
        assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in pod["spec"]["containers"])


def test_a_stream_goes_on_exactly_when_vllm_dies_in_its_pod(release: Release) -> None:
    whole, _, _ = stream(release)
    [pod] = release.ready("decode")

    def kill(index: int) -> None:
        if index == 40:
            name = pod["metadata"]["name"]
            said = release.kube.kubectl("-n", release.namespace, "exec", name, "-c", "decode", "--", "python", "-c", KILL)
            assert said.strip() == "1", "vLLM has no process of its own"

    tokens, _, workers = stream(release, kill)
    assert tokens == whole and workers["retries"] >= 1
    [after] = release.ready("decode")
    assert after["metadata"]["uid"] == pod["metadata"]["uid"]
    [state] = [each for each in after["status"]["containerStatuses"] if each["name"] == "decode"]
    assert state["restartCount"] == 1
