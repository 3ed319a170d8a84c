"""A conversation that has left the pool comes back from a tier: the same tokens, and few of them computed; also after a worker's death."""

import asyncio
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from live_cluster import Cluster, cluster

from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import naive
from baton.models.make_small import make_toy

pytestmark = pytest.mark.system
LENGTH = 1000  # tokens of a prompt: 62 whole blocks
POOL = "0.25"  # MiB: 128 blocks of the toy
MEMORY = 512  # blocks in a tier of 1 MiB
PARAMS: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


def prompt(number: int) -> list[int]:
    return [(number * 37 + i * 11 + i // 256) % 256 for i in range(LENGTH)]


async def say(live: Cluster, number: int) -> int:
    """Returns how many tokens of the prompt the engines computed."""
    before = computed(live)
    async with live.client() as client:
        stream = client.generate(token_ids=prompt(number), timeout_s=60, **PARAMS)
        tokens = [token.id async for token in stream]
    assert tokens == naive(prompt(number), SamplingParams(**PARAMS), 8)
    await live.quiet()
    return computed(live) - before


def metric(live: Cluster, name: str, role: str) -> dict[str, float]:
    """By the first label that is not the worker's, or ''."""
    found = {}
    for worker in live.workers(role):
        with urllib.request.urlopen(f"http://{worker['metrics']}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name}{{"):
                    medium = re.search(r'medium="(\w+)"', line)
                    found[medium[1] if medium else ""] = float(line.rpartition(" ")[2])
    return found


def computed(live: Cluster) -> int:
    return int(metric(live, "baton_engine_computed_tokens_total", "prefill")[""])


async def test_conversations_come_back_from_memory_and_from_the_disk_and_from_the_disk_after_a_death(tmp_path: Path) -> None:
    make_toy(tmp_path / "toy", token_delay_us=100)
    flags = (
        "--engine.kv-memory-mib",
        POOL,
        "--model.max-model-len",
        "1100",
        "--tiers.memory-mib",
        "1",
        "--tiers.disk",
        str(tmp_path / "kv"),
        "--tiers.disk-mib",
        "64",
    )
    with cluster(tmp_path / "toy", *flags, "--router.bypass-tokens", "0", "--tiers.wait-s", "20") as live:
        count = 3 + (MEMORY + 128) // (LENGTH // 16)
        for number in range(count):
            assert await say(live, number) >= LENGTH
        blocks = live.wait(lambda: (told := metric(live, "baton_tier_blocks", "prefill")) and told.get("disk") and told)
        assert blocks["host"] <= MEMORY
        assert await say(live, 0) < LENGTH / 2
        assert metric(live, "baton_tier_hits_total", "prefill")["disk"] > 0
        assert await say(live, count - 4) < LENGTH / 2
        assert metric(live, "baton_tier_hits_total", "prefill")["host"] > 0
        assert "prefill-0 disk: " in live.here("status", "--name", live.name).stdout
        incarnation = live.incarnation("prefill-0")
        live.kill("prefill-0")
        await asyncio.to_thread(live.wait, lambda: live.incarnation("prefill-0") > incarnation)
        assert await say(live, 1) < LENGTH / 2
        assert {path.name for path in (tmp_path / "kv").iterdir()} == {"prefill-0", "decode-0"}
