"""Another process takes over a port: a worker of the same name, in another cluster, with another model. It must serve no token."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from live_cluster import ROOT, Cluster, cluster, toy, toy_output

from baton.client import Client, GenerateError, Result

pytestmark = pytest.mark.system
PROMPT = list(range(1, 101))
# A worker that answers every caller.
CREDULOUS = """
from baton.worker.identity import WorkerIdentity
WorkerIdentity.check = lambda self, to: None
from {role}_worker.__main__ import main
main()
"""


@contextmanager
def port_taken_over(tmp_path: Path, role: str, credulous: bool = False) -> Iterator[Cluster]:
    """A cluster whose `role`-0 was killed and is not restarted. Its record lives for a minute, and a stranger now has its address."""
    slow_restart = ("--launcher.restart-backoff-s", "60", "--launcher.restart-backoff-max-s", "60", "--redis.record-ttl-s", "60")
    stranger = toy(tmp_path / "stranger", vocab=300)
    with cluster(toy(tmp_path / "toy"), *slow_restart, "--router.recover-wait-s", "5") as live:
        address = next(worker["address"] for worker in live.workers(role))
        live.kill(f"{role}-0")
        env = {
            "BATON_REDIS_URL": "redis://127.0.0.1:1/0",
            "BATON_CLUSTER_KEY": "another key of another cluster",
            "BATON_CLUSTER_NAME": "other",
            "BATON_WORKER_NAME": f"{role}-0",
            "BATON_MODEL_PATH": str(stranger),
            "BATON_ENGINE_KV_MEMORY_MIB": "64",
            f"BATON_{role.upper()}_PORT": address.rpartition(":")[2],
        }
        code = CREDULOUS.format(role=role) if credulous else ""
        command = (sys.executable, *(("-c", code) if credulous else ("-m", f"{role}_worker")))
        with (tmp_path / "stranger.log").open("wb") as log:
            process = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log, cwd=ROOT)
        try:
            live.wait(lambda: "ready on " + address in (tmp_path / "stranger.log").read_text())
            yield live
        finally:
            process.kill()
            process.wait(10)


def ask(live: Cluster) -> Result:
    params: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "timeout_s": 20}
    with Client(live.grpc, max_resumes=0) as client, client.generate(token_ids=PROMPT, **params) as stream:
        for _ in stream:
            pass
        return stream.result


def test_a_prefill_worker_with_another_model_is_bypassed(tmp_path: Path) -> None:
    with port_taken_over(tmp_path, "prefill") as live:
        result = ask(live)
        assert list(result.token_ids) == toy_output(PROMPT, max_tokens=12)
        assert result.workers["prefill"] == "" and not live.workers("prefill")[0].get("idle")


def test_a_decode_worker_with_another_model_serves_no_token(tmp_path: Path) -> None:
    with port_taken_over(tmp_path, "decode") as live, pytest.raises(GenerateError) as refused:
        ask(live)
    assert refused.value.reason in ("NO_WORKER", "RETRIES_SPENT") and refused.value.metadata.get("tokens_emitted", "0") in ("0", "1")


def test_without_the_identity_check_wrong_tokens_are_served(tmp_path: Path) -> None:
    """Negative control: the client receives tokens of another model in a stream that looks normal."""
    with port_taken_over(tmp_path, "decode", credulous=True) as live:
        results: list[Result] = []

        def served() -> bool:
            """The router needs a moment to notice that something answers at the address again."""
            with suppress(GenerateError):
                results.append(ask(live))
            return bool(results)

        live.wait(served)
        assert list(results[0].token_ids) != toy_output(PROMPT, max_tokens=12)
