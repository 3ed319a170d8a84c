"""A real cluster that is set up to hand prompts over, and does not, says so, whatever is set up wrongly."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_cluster import Cluster, cluster, toy

from baton.client import AsyncClient
from router.split import LAST, LEAST, WORTH

pytestmark = pytest.mark.system
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield toy(tmp_path_factory.mktemp("models") / "toy")


def alarm(live: Cluster, prompts: int = LEAST) -> str:
    """What the router says after so many prompts, of which none shares a block with another."""

    async def ask(client: AsyncClient, number: int) -> None:
        prompt = [number % 250, *((number * 7 + place * 3) % 250 for place in range(WORTH + 32))]
        async with client.generate(token_ids=prompt, max_tokens=2, temperature=0.0, ignore_eos=True, timeout_s=60) as stream:
            async for _ in stream:
                pass

    async def ask_all() -> None:
        async with live.client() as client:
            await asyncio.gather(*(ask(client, next(NUMBERS)) for _ in range(prompts)))

    asyncio.run(ask_all())
    told: str = live.status()["router"]["alarm"]
    return told


@pytest.mark.parametrize(
    ("flags", "env", "told"),
    [
        (("--router.bypass-tokens", "4096"), {}, "not handed over: short (router.bypass_tokens is high)"),
        (("--kv.ucx-tls", "rc"), {}, "tcp carries the KV, and nixl was asked for"),  # no device here speaks RDMA
        # As between two hosts of which none has an adapter: no memory is shared.
        (("--kv.rdma", "true"), {"UCX_TLS": "^posix,sysv,cma"}, "tcp carries the KV, and RDMA was asked for (kv.rdma"),
        # Workers whose KV cannot be read are kept out, unless nobody asks them to prove themselves.
        (("--cluster.prove-workers", "false"), {"BATON_FAILPOINTS": "kv.before_read=raise"}, "decode workers cannot read the KV"),
    ],
    ids=("bypass", "carrier", "rdma", "unreadable"),
)
def test_a_wrong_setting_raises_the_alarm(model: Path, flags: tuple[str, ...], env: dict[str, str], told: str) -> None:
    with cluster(model, *flags, env=env) as live:
        assert told in alarm(live)
        shown = live.here("status", "--name", live.name).stdout
        assert told in " ".join(shown.split())


def test_a_pool_without_workers_raises_the_alarm_until_it_has_some(model: Path) -> None:
    """Its worker serves the other role, and later there is none."""
    with cluster(model, "--kv.rdma", "true") as live:
        assert alarm(live) == "", "as it is meant to be: between processes of one host nothing needs an adapter"
        assert live.last()["handoff"]["lane"] == "memory"
        assert [worker["transport"] for worker in live.workers("decode")] == ["auto, nixl (memory)"]
        live.here("roles", "prefill-0", "decode", "--name", live.name)
        assert "no prefill worker (none is usable: see prefill.replicas" in alarm(live, LEAST + 8)
        live.here("roles", "prefill-0", "prefill", "--name", live.name)
        assert alarm(live, LAST) == ""
        live.here("scale", "--prefill", "0", "--name", live.name)
        live.wait(lambda: all(worker.get("state") != "ready" for worker in live.workers("prefill")))
        assert "no prefill worker" in alarm(live, LAST)
