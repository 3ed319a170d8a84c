"""A whole cluster over vLLM, where it is installed (`make test-vllm`): handoffs, what spoils them, and workers and vLLM processes that die.
Every answer is that of an undisturbed run, and nothing is left behind."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from engine_bench import VLLM_DEVICE
from faulty_cluster import ask, faulty
from live_cluster import Cluster

from baton.cli.up import SHIPPED
from baton.client import Result

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here (make test-vllm)"),
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
VLLM = (
    *("--engine.kind", "vllm", "--engine.vllm", "{enforce_eager: true}", "--engine.block-size", "32", "--engine.threads", "1"),
    *("--engine.device", VLLM_DEVICE, "--launcher.hang-s", "60"),
)
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 4, "presence_penalty": 0.5, "ignore_eos": True, "timeout_s": 120}
STOPPED_S = 10.0
# The second handoff is altered on its way, the third begins when its lease is over.
FAULTS = "kv.copied=flip@2,kv.reserved=sleep:2.6@3"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live() -> AsyncIterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="t") as folder:
        patch.setenv("TMPDIR", folder)  # the cluster's own
        with faulty(
            SHIPPED, FAULTS, *VLLM, "--model.max-model-len", "1024", "--router.recover-wait-s", "120", prefill=1, decode=1
        ) as running:
            yield running
        left = [path.name for path in Path(folder).iterdir() if not path.name.startswith("torchinductor")]
        assert not left, "vLLM's files outlive their cluster"


def scraped(address: str) -> dict[str, float]:
    """The last value of each metric that a process has."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        lines = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
    return {line.split("{")[0].split(" ")[0]: float(line.split()[-1]) for line in lines}


def indexed(live: Cluster) -> float:
    """How many cached blocks of workers the router knows of: it learns of them a moment after the answer."""
    return scraped(live.status()["endpoints"]["metrics"])["baton_router_prefix_index_entries"]


async def knows(live: Cluster, blocks: float) -> None:
    """Returns when the router knows of so many."""
    await asyncio.to_thread(live.wait, lambda: indexed(live) >= blocks)


def prompt(number: int) -> list[int]:
    return [number + 10, *((i * 37) % 900 + 5 for i in range(150))]


BLOCKS = len(prompt(0)) // 32  # full ones


async def answer(live: Cluster, number: int, **how: Any) -> Result:
    async with live.client() as client:
        return await ask(client, prompt(number), **{"max_tokens": 40, **SEEDED, **how})


def children(live: Cluster, name: str) -> list[psutil.Process]:
    pid = next(worker["pid"] for worker in live.workers() if worker["name"] == name)
    found = [child for child in psutil.Process(pid).children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
    assert found, "vLLM has no process of its own"
    return found


async def gone(processes: list[psutil.Process], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
        assert time.monotonic() < deadline, "a process of vLLM outlived its worker"
        await asyncio.sleep(0.05)


async def test_kv_is_handed_over_and_what_spoils_a_handoff_is_found(live: Cluster) -> None:
    for number, failure in enumerate(("", "DIGEST_MISMATCH", "LEASE_EXPIRED", "")):
        before = await asyncio.to_thread(indexed, live)
        result = await answer(live, number)
        assert (result.handoff["failure"], bool(result.handoff["blocks"])) == (failure, not failure)
        assert bool(result.handoff["recomputed_tokens"]) == bool(failure)
        await knows(live, before + 2 * BLOCKS)
        again = await answer(live, number)  # the decode worker has the prompt in its cache now, and nothing is handed over
        assert again.handoff["blocks"] == 0 and again.token_ids == result.token_ids
        await live.quiet()


async def test_routers_know_that_vllm_lends_nothing(live: Cluster) -> None:
    assert [worker["lends"] for worker in live.workers()] == [False, False]


async def test_what_vllm_tells_appears_under_the_names_of_every_engine(live: Cluster) -> None:
    for worker in live.workers():
        told = await asyncio.to_thread(scraped, worker["metrics"])
        for name in ("step_tokens_count", "computed_tokens_total", "prefix_queried_tokens_total"):
            assert told[f"baton_engine_{name}"] > 0
        assert told["vllm:prefix_cache_queries_total"] == told["baton_engine_prefix_queried_tokens_total"]


async def test_several_at_once_get_the_tokens_that_each_gets_alone(live: Cluster) -> None:
    numbers = range(20, 28)
    together = await asyncio.gather(*(answer(live, number) for number in numbers))
    assert sum(result.handoff["blocks"] > 0 for result in together) >= len(numbers) // 2
    assert [(await answer(live, number)).token_ids for number in numbers] == [result.token_ids for result in together]
    await live.quiet()


async def test_clients_that_leave_at_any_moment_of_a_handoff_leave_nothing(live: Cluster) -> None:
    """From before the prompt is sent to a worker until tokens flow: staged blocks, reads and sequences of vLLM are all given back."""

    async def leave(number: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.02 * (number - 60)):
                await answer(live, number, max_tokens=200)

    await asyncio.gather(*(leave(number) for number in range(60, 84)))
    await live.quiet()
    assert (await answer(live, 84)).handoff["blocks"] > 0


async def test_requests_survive_a_prefill_worker_that_is_stopped_for_a_while(live: Cluster) -> None:
    """Longer than the lease and than a router waits: its requests go elsewhere, and what it says afterwards is not believed."""
    pid = live.kill("prefill-0", signal.SIGSTOP)
    stopped = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for each in stopped:
        each.suspend()
    running = asyncio.gather(*(answer(live, number) for number in range(90, 96)))
    await asyncio.sleep(STOPPED_S)
    for each in stopped:
        each.resume()
    results = await running
    await asyncio.to_thread(live.wait, lambda: all("error" not in worker for worker in live.workers()) and len(live.workers()) == 2, 150.0)
    assert [(await answer(live, number)).token_ids for number in range(90, 96)] == [each.token_ids for each in results]
    await live.quiet()


async def cut(live: Cluster, number: int, kill: Callable[[], object]) -> None:
    """A stream during which something is killed has the tokens of one that nothing disturbed."""
    whole = await answer(live, number, max_tokens=300)
    async with live.client() as client, client.generate(token_ids=prompt(number), **{**SEEDED, "max_tokens": 300}) as stream:
        tokens = []
        async for token in stream:
            tokens.append(token.id)
            if len(tokens) == 40:
                await asyncio.to_thread(kill)
        assert tuple(tokens) == tuple(whole.token_ids) and stream.result.workers["retries"] >= 1
    await asyncio.to_thread(live.wait, lambda: [("error" in worker) for worker in live.workers()] == [False, False], 150.0)
    await live.quiet()


async def test_a_stream_goes_on_exactly_after_its_worker_is_killed_and_vllm_dies_with_it(live: Cluster) -> None:
    orphans = await asyncio.to_thread(children, live, "decode-0")
    await cut(live, 40, lambda: live.kill("decode-0"))
    await gone(orphans)


async def test_a_stream_goes_on_exactly_after_vllm_itself_is_killed(live: Cluster) -> None:
    """A dead EngineCore is a dead worker, and is seen at once."""
    [core] = await asyncio.to_thread(children, live, "decode-0")
    before = live.incarnation("decode-0")
    await cut(live, 41, lambda: core.send_signal(signal.SIGKILL))
    assert live.incarnation("decode-0") > before


async def test_a_prompt_survives_the_death_of_the_vllm_that_computes_it(live: Cluster) -> None:
    [core] = await asyncio.to_thread(children, live, "prefill-0")
    running = asyncio.gather(*(answer(live, number, max_tokens=8) for number in range(50, 58)))
    await asyncio.sleep(0.05)
    core.send_signal(signal.SIGKILL)
    results = await running
    await asyncio.to_thread(live.wait, lambda: [("error" in worker) for worker in live.workers()] == [False, False], 150.0)
    assert [(await answer(live, number, max_tokens=8)).token_ids for number in range(50, 58)] == [each.token_ids for each in results]
    await live.quiet()


BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.parametrize("backend, path", [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
async def test_the_benchmark_of_vllm_reads_our_streams(live: Cluster, tmp_path: Path, backend: str, path: str) -> None:
    dataset, requests = tmp_path / "prompts.jsonl", 4
    dataset.write_text("\n".join(json.dumps({"prompt": f"Once upon a time there were {i} mice"}) for i in range(requests)) + "\n")
    command = [
        sys.executable, "-c", BENCH, "--backend", backend, "--base-url", f"http://{live.http}", "--endpoint", path,
        "--model", SHIPPED.name, "--tokenizer", str(SHIPPED), "--dataset-name", "custom", "--dataset-path", str(dataset),
        "--custom-output-len", "8", "--skip-chat-template", "--num-prompts", str(requests), "--ignore-eos", "--disable-shuffle",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "seen.json",
    ]  # fmt: skip
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300, env=offline)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["completed"] == requests and seen["total_output_tokens"] > 0, seen
