"""Without `baton up` and without our client: a gRPC client generated from the one .proto file, and processes managed by hand."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from by_hand import Hand, healthy, workers
from live_cluster import ROOT, toy, toy_output

from baton.client import Client, GenerateError, Result
from baton.launch.ports import Ports
from baton.launch.redis_server import find_binary

pytestmark = pytest.mark.system

KEY = "a key that all workers share"
CLIENT = """
import json, sys
folder, address = sys.argv[1:]
sys.path.insert(0, folder)
import grpc
from words import generation_pb2 as pb, generation_pb2_grpc

request = pb.GenerateRequest(text="Once upon a time there was a river near the old mill", request_id="by-hand")
request.sampling.temperature, request.sampling.max_tokens, request.sampling.ignore_eos = 0, 12, True
events = []
with grpc.insecure_channel(address) as channel:
    for response in generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=30):
        kind = response.WhichOneof("event")
        told = getattr(response, kind)
        events.append([kind, [[t.index, t.id] for t in told.tokens] if kind == "tokens" else told.request_id])
modules = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps({"events": events, "reason": pb.FinishReason.Name(told.reason), "modules": modules}))
"""


@dataclass
class Processes:
    """Redis, a prefill worker, a decode worker and a router, each configured in a different way."""

    hand: Hand
    model: Path
    address: str
    admin: str
    prefill: subprocess.Popen[bytes]
    decode: subprocess.Popen[bytes]
    router: subprocess.Popen[bytes]

    def ask(self, prompt: list[int], on_token: Callable[[int], None] = lambda index: None, **sampling: Any) -> Result:
        params = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60, **sampling}
        with Client(self.address, max_resumes=0) as client, client.generate(token_ids=prompt, **params) as stream:
            for i, token in enumerate(stream):
                assert token.index == i
                on_token(i)
            return stream.result


def processes(folder: Path, **model: int) -> Iterator[Processes]:
    with Ports("127.0.0.1") as held:
        yield from on_ports({name: held.hold() for name in ("redis", "prefill", "router", "admin")}, folder, **model)


def on_ports(ports: dict[str, int], folder: Path, **model: int) -> Iterator[Processes]:
    hand, path = Hand(folder), toy(folder / "toy", **model)
    url = f"redis://127.0.0.1:{ports['redis']}/0"
    common = {"BATON_REDIS_URL": url, "BATON_MODEL_PATH": str(path)}
    tree = {
        "cluster": {"key": KEY},
        "model": {"path": str(path)},
        "redis": {"url": url},
        "engine": {"kv_memory_mib": 64, "max_num_batched_tokens": 64},
        "prefill": {"port": ports["prefill"]},
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(tree))
    try:
        hand.start("redis", str(find_binary()), "--port", str(ports["redis"]), "--bind", "127.0.0.1", "--save", "")
        prefill = hand.python("prefill_worker", "--config", "cluster.yaml")
        decode = hand.python("decode_worker", env={**common, "BATON_CLUSTER_KEY": KEY, "BATON_ENGINE_KV_MEMORY_MIB": "64"})
        flags = (
            "--router.port",
            str(ports["router"]),
            f"--router.admin-port={ports['admin']}",
            "--router.http-port=0",
            "--router.page-port=0",
        )
        router = hand.python("router", *flags, env=common)
        address = f"127.0.0.1:{ports['router']}"
        made = Processes(hand, path, address, f"127.0.0.1:{ports['admin']}", prefill, decode, router)
        hand.wait(lambda: healthy(address) and [worker["state"] for worker in workers(made.admin)] == ["ready", "ready"])
        yield made
    finally:
        hand.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    yield from processes(tmp_path_factory.mktemp("by-hand"))


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Processes]:
    """20 ms per step and 4 ms per token: a prompt of 1,000 tokens takes four seconds, an output of 240 tokens six."""
    yield from processes(tmp_path, step_delay_ms=20, token_delay_us=4000)


def test_processes_started_by_hand_serve_a_request(served: Processes) -> None:
    prompt = list(range(1, 101))
    result = served.ask(prompt)
    assert list(result.token_ids) == toy_output(prompt)
    assert f"-{served.prefill.pid}-" in result.workers["prefill"] and f"-{served.decode.pid}-" in result.workers["decode"]
    assert result.handoff["digests_checked"] > 0 and result.handoff["recomputed_tokens"] == 0 and not result.handoff["failure"]


def test_a_client_generated_from_the_proto_alone_works(served: Processes, tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    shutil.copy(ROOT / "proto" / "baton" / "v1" / "generation.proto", words)
    protoc = [sys.executable, "-I", "-m", "grpc_tools.protoc", f"-I{tmp_path}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    subprocess.run([*protoc, "words/generation.proto"], cwd=tmp_path, check=True, timeout=60)
    (tmp_path / "client.py").write_text(CLIENT)
    command = [sys.executable, "-I", "client.py", str(tmp_path), served.address]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert "baton" in ours and not ours & set(told["modules"]), "the client loaded code of ours"
    kinds = [kind for kind, _ in told["events"]]
    assert kinds[0] == "accepted" and kinds[-1] == "finished" and set(kinds[1:-1]) == {"tokens"}
    assert told["events"][0][1] == told["events"][-1][1] == "by-hand" and told["reason"] == "FINISH_REASON_LENGTH"
    tokens = [token for kind, tokens in told["events"] if kind == "tokens" for token in tokens]
    prompt = list(b"Once upon a time there was a river near the old mill")
    assert tokens == [[i, token] for i, token in enumerate(toy_output(prompt, max_tokens=12))]


def test_sigterm_drains_each_process_while_its_requests_finish(slow: Processes) -> None:
    prompt = [[1] * 1000, [2] * 100, [3] * 100]
    during_prefill = Asking(slow, prompt[0], max_tokens=4)
    slow.hand.wait(lambda: any(worker["pool"] == "prefill" and worker["load"]["running"] for worker in workers(slow.admin)))
    slow.prefill.terminate()
    slow.hand.wait(lambda: "draining" in slow.hand.log("prefill_worker"))
    assert not during_prefill.tokens, "the prefill finished before the signal, so the test proves nothing"
    result = during_prefill.result()
    assert list(result.token_ids) == toy_output(prompt[0], max_tokens=4)
    assert f"-{slow.prefill.pid}-" in result.workers["prefill"] and result.workers["retries"] == 0
    assert result.handoff["recomputed_tokens"] == 0
    assert slow.prefill.wait(15) == 0
    slow.hand.wait(lambda: len(workers(slow.admin)) == 1)

    during_decode = Asking(slow, prompt[1], max_tokens=240)
    slow.hand.wait(lambda: during_decode.tokens)
    slow.router.terminate()
    slow.hand.wait(lambda: "draining" in slow.hand.log("router"))
    slow.decode.terminate()
    slow.hand.wait(lambda: "draining" in slow.hand.log("decode_worker"))
    with pytest.raises(GenerateError) as refused:
        slow.ask(prompt[2])
    assert refused.value.code == "UNAVAILABLE"  # it accepts no connection any more
    assert len(during_decode.tokens) < 240, "the stream finished before the signal, so the test proves nothing"
    result = during_decode.result()
    assert list(result.token_ids) == toy_output(prompt[1], max_tokens=240) and result.workers["retries"] == 0
    assert slow.router.wait(15) == 0 and slow.decode.wait(15) == 0
    assert "Traceback" not in slow.hand.logs()


def test_a_second_sigterm_stops_the_worker_immediately(slow: Processes) -> None:
    stream = Asking(slow, [7] * 40, max_tokens=900)
    slow.hand.wait(lambda: len(stream.tokens) > 1)  # the first one is the prefill worker's
    slow.decode.terminate()
    slow.hand.wait(lambda: "draining" in slow.hand.log("decode_worker"))
    seen = len(stream.tokens)
    slow.hand.wait(lambda: len(stream.tokens) > seen + 10)
    assert slow.decode.poll() is None, "after one signal the worker drains and the stream continues"
    slow.decode.terminate()
    assert slow.decode.wait(8) == 0
    slow.router.kill()
    assert isinstance(stream.error(), GenerateError)


def test_a_router_that_never_read_the_registry_is_not_ready(tmp_path: Path) -> None:
    """It would refuse what other routers serve. Once it knows the cluster, it stays ready without a registry."""
    hand = Hand(tmp_path)
    with Ports("127.0.0.1") as held:
        redis, health = held.hold(), held.hold()

        def status(of: str) -> int:
            with suppress(httpx2.TransportError):
                return httpx2.get(f"http://127.0.0.1:{health}/{of}").status_code
            return 0

        ports = [f"--router.{door}=0" for door in ("port", "admin-port", "http-port", "page-port")]
        tree = {"BATON_REDIS_URL": f"redis://127.0.0.1:{redis}/0", "BATON_MODEL_PATH": str(toy(tmp_path / "toy"))}
        try:
            hand.python("router", *ports, f"--telemetry.health-port={health}", env=tree)
            hand.wait(lambda: status("startupz") == 200 and "registry is unreachable" in hand.log("router"))
            assert (status("livez"), status("readyz")) == (200, 503)
            server = hand.start("redis", str(find_binary()), "--port", str(redis), "--bind", "127.0.0.1", "--save", "")
            hand.wait(lambda: status("readyz") == 200)
            outages = hand.log("router").count("registry is unreachable")
            server.kill()
            hand.wait(lambda: hand.log("router").count("registry is unreachable") > outages)
            assert (status("livez"), status("readyz")) == (200, 200)
        finally:
            hand.stop()


@pytest.mark.parametrize(
    ("module", "missing", "named"),
    [
        ("prefill_worker", "BATON_CLUSTER_KEY", "cluster.key"),
        ("decode_worker", "BATON_CLUSTER_KEY", "cluster.key"),
        ("prefill_worker", "BATON_MODEL_PATH", "model.path"),
        ("decode_worker", "BATON_MODEL_PATH", "model.path"),
        ("router", "BATON_MODEL_PATH", "model.path"),
        ("prefill_worker", "BATON_REDIS_URL", "redis.url"),
        ("decode_worker", "BATON_REDIS_URL", "redis.url"),
        ("router", "BATON_REDIS_URL", "redis.url"),
    ],
)
def test_a_missing_setting_is_named(tmp_path: Path, module: str, missing: str, named: str) -> None:
    given = {"BATON_CLUSTER_KEY": KEY, "BATON_MODEL_PATH": "/nowhere", "BATON_REDIS_URL": "redis://127.0.0.1:1/0"}
    hand = Hand(tmp_path)
    try:
        process = hand.python(module, env={key: value for key, value in given.items() if key != missing})
        assert process.wait(60) == 2
    finally:
        hand.stop()
    text = hand.log(module)
    assert named in text and missing in text and "Traceback" not in text and len(text.splitlines()) == 1


class Asking:
    """One request in its own thread."""

    def __init__(self, processes: Processes, prompt: list[int], **sampling: Any) -> None:
        self.tokens: list[int] = []
        self._outcome: list[Result | Exception] = []
        self._thread = threading.Thread(target=self._run, args=(processes, prompt, sampling), daemon=True)
        self._thread.start()

    def _run(self, processes: Processes, prompt: list[int], sampling: dict[str, Any]) -> None:
        try:
            self._outcome.append(processes.ask(prompt, self.tokens.append, **sampling))
        except Exception as error:
            self._outcome.append(error)

    def result(self) -> Result:
        outcome = self._outcome_within(30)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def error(self) -> Exception:
        outcome = self._outcome_within(30)
        assert isinstance(outcome, Exception), outcome
        return outcome

    def _outcome_within(self, seconds: float) -> Result | Exception:
        self._thread.join(seconds)
        assert self._outcome, f"no answer after {seconds} s"
        return self._outcome[0]
