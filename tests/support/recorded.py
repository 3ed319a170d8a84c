"""A simulated cluster whose deciding code is recorded, and the file of that."""

import asyncio
import random
from pathlib import Path
from typing import Any

from baton.clock import loop_time
from baton.cluster.config import Config
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError
from baton.recorder.recorder import SECRET_BYTES, Recorder
from baton.recorder.recording import read
from baton.simulate.cluster import SimulatedCluster, SimulatedRouter, Sizes
from baton.simulate.replay import ReplayOutcome, replay
from baton.simulate.replay_engine import ReplayedEngine
from baton.simulate.replay_router import ReplayedRouter
from baton.simulate.virtual_time import run
from baton.simulate.workers import Times
from baton.worker.taped import EngineTape
from router.taped import RouterTape

SIZES = Sizes(prefill=2, decode=2, max_num_seqs=4, kv_blocks=120)
MIB = 1 << 20


def objects(router: SimulatedRouter) -> dict[str, Any]:
    """By the names of `router.taped`."""
    dispatcher, view, journal = router._dispatcher, router.view, router.journal
    model, conduct = view.models["model"], dispatcher.conduct
    return {
        "admission": router.admission, "view": view, "members": view.members, "models": view.models, "index": model.index,
        "policy": dispatcher.policy, "trust": model.trust, "outliers": conduct.outliers, "budget": conduct.budget,
        "degradation": journal.degradation, "split": journal.split,
    }  # fmt: skip


def record(path: Path, rate: float, seconds: float, seed: int = 7, span_s: float = 60.0, most_bytes: int = 16 * MIB) -> dict[str, int]:
    """Poisson traffic, more than the cluster serves if the rate is high. Returns what became of the requests, by outcome."""

    async def main() -> dict[str, int]:
        config = RouterConfig(max_inflight=32, max_queue=16, queue_timeout_s=5.0)
        cluster = SimulatedCluster(SIZES, Times(), config, SloConfig(ttft_s=2.0))
        router = RouterTape(span_s, most_bytes, loop_time, objects(cluster.routers[0]))
        recorders = [_recorder("router-0", router.source)]
        for name, worker in cluster.fleet.workers.items():
            recorders.append(_recorder(name, EngineTape(span_s, most_bytes, worker.engine._engine).source))
        ends = await _traffic(cluster, rate, seconds, random.Random(seed))
        secret = bytes(SECRET_BYTES)
        path.write_bytes(b"".join(line for recorder in recorders for line in recorder.section("asked", secret)))
        return ends

    return run(main())


def _recorder(name: str, source: Any) -> Recorder:
    recorder = Recorder(Config(), name, "simulated")
    recorder.sources.append(source)
    return recorder


async def _traffic(cluster: SimulatedCluster, rate: float, seconds: float, rng: random.Random) -> dict[str, int]:
    begun = [[rng.randrange(1000) for _ in range(300)] for _ in range(6)]
    ends: dict[str, int] = {}

    async def one(number: int) -> None:
        prompt = rng.choice(begun)[: rng.randrange(20, 300)] + [rng.randrange(1000) for _ in range(rng.randrange(100))]
        try:
            async with asyncio.timeout(0.5 if number % 9 == 0 else None):  # some clients leave
                await cluster.ask(prompt, rng.randrange(1, 40), priority=number % 3)
            end = "ok"
        except BatonError as error:
            end = error.reason.name
        except TimeoutError:
            end = "left"
        ends[end] = ends.get(end, 0) + 1

    number = 0
    async with cluster.watched(), asyncio.TaskGroup() as group:
        while asyncio.get_running_loop().time() < seconds:
            await asyncio.sleep(rng.expovariate(rate))
            group.create_task(one(number))
            number += 1
            cluster.routers[0].journal.sample(0, 0, None)
    return ends


def replayed(path: Path) -> list[ReplayOutcome]:
    return [replay(section, {"router": ReplayedRouter, "engine": ReplayedEngine}) for section in read(path)]
