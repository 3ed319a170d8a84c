"""A worker that has started proves itself before it gets requests: real processes, one of which lies."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_cluster import ROOT, Cluster, cluster, toy, toy_output

from baton.client import Client, Result

pytestmark = pytest.mark.system
# Its engine is off by one, and says so to nobody.
LIAR = """
from baton.engine.core.toy import ToyRunner
true = ToyRunner._sample
def lie(*args):
    said = true(*args)
    return type(said)((said.token + 1) % 200, said.logprob, said.top)
ToyRunner._sample = lie
from {role}_worker.__main__ import main
main()
"""
HONEST = "from {role}_worker.__main__ import main\nmain()\n"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(toy(tmp_path_factory.mktemp("proofs") / "toy"), "--router.bypass-tokens", "0") as running:
        yield running


@contextmanager
def another(live: Cluster, role: str, code: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """One more worker of the cluster, started by hand."""
    [known] = live.workers(role)[:1]
    its = Path(f"/proc/{known['pid']}/environ").read_bytes().decode().split("\0")
    env = dict(line.split("=", 1) for line in its if line.startswith("BATON_")) | {"BATON_WORKER_NAME": name}
    with (live.logs / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            (sys.executable, "-c", code.format(role=role)), env={**os.environ, **env}, stdout=log, stderr=log, cwd=ROOT
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def ask(live: Cluster, number: int) -> Result:
    prompt = [number, *range(1, 80)]
    params: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60}
    with Client(live.grpc) as client, client.generate(token_ids=prompt, **params) as stream:
        for _ in stream:
            pass
        assert list(stream.result.token_ids) == toy_output(prompt, max_tokens=12), "a wrong token"
        return stream.result


def places(result: Result) -> set[str]:
    return {str(result.workers["prefill"]), str(result.workers["decode"])}


def worker(live: Cluster, name: str) -> dict[str, Any]:
    """Raises StopIteration while there is none."""
    return next(each for each in live.workers() if each["name"] == name)


def test_the_cluster_answers_once_its_first_pair_has_proved_itself(live: Cluster) -> None:
    result = ask(live, 1)
    assert places(result) == {"prefill-0", "decode-0"} and result.handoff["blocks"], "the first request is handed over"
    log = live.log("router-0")
    assert log.index("decode-0 has proved itself") < log.index("prefill-0 has proved itself")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_lies_gets_no_request_and_is_named(live: Cluster, role: str) -> None:
    name, first = f"{role}-liar", {"prefill": 10, "decode": 30}[role]
    with another(live, role, LIAR, name):
        live.wait(lambda: worker(live, name)["state"] == "unproven" and "where others say" in worker(live, name).get("error", ""))
        served = {at for number in range(12) for at in places(ask(live, first + number))}
        assert served == {"prefill-0", "decode-0"}
        shown = live.here("status", "--name", live.name)
        assert "unproven" in shown.stdout and f"{name} is not admitted to {role}" in " ".join(shown.stdout.split())
        assert "where others say" in live.log(name), "its own log says it, too"
    with another(live, role, HONEST, name):
        live.wait(lambda: worker(live, name)["state"] == "ready")
        deadline = time.monotonic() + 60
        number = first + 100
        while name not in places(ask(live, number)):
            number += 1
            assert time.monotonic() < deadline, "it is ready and serves nothing"


def test_a_worker_that_was_killed_proves_itself_again(live: Cluster) -> None:
    before = live.incarnation("decode-0")
    live.kill("decode-0")
    live.wait(lambda: live.incarnation("decode-0") > before)
    live.wait(lambda: live.log("router-0").count("decode-0 has proved itself") == 2)
    ask(live, 200)
