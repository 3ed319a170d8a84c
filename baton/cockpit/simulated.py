"""A simulated run, in a process of its own: `python -m baton.cockpit.simulated` reads what is asked as one line of JSON, and writes lines
of JSON: what is to be said first, a point for each second of virtual time, and the figures. So a long simulation stops nobody, and can be
ended at any moment.

    {"experiment": "static", "settings": {…}, "profile": null}
    → {"doubts": […]}, {"point": {…}}, …, {"figures": {…}}

What is asked has been checked before (`baton.cockpit.bench`): whatever is wrong here is a fault, and ends the process.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.clock import loop_time
from baton.cockpit.experiments import Experiment, find
from baton.cockpit.knobs import Settings
from baton.cockpit.load import figures, load_of, rate_at
from baton.cockpit.meter import Looked, Meter, MeteredDoor, WorkerUsage, looked
from baton.cockpit.setup import TIMEOUT_S, Simulation, simulation_of
from baton.predict.predict import standing
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster
from loadtest.drive import Run, drive

Tell = Callable[[Mapping[str, Any]], None]


def simulate(experiment: Experiment, settings: Settings, profile: Path | None, tell: Tell) -> None:
    """Raises BatonError(INVALID_FIELD) and ProfileError."""
    load = load_of(experiment, settings, shares=settings.caching == "on")
    made = simulation_of(settings, load, profile)
    tell({"doubts": made.doubts})

    def point(at: float, meter: Meter, cluster: SimulatedCluster) -> None:
        tell({"point": meter.point(at, rate_at(experiment, settings, at - meter.step_s), _look(cluster))})

    async def main() -> Run:
        meter = Meter()
        async with standing(made.setting, made.profile, made.times) as (cluster, door), asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(meter, lambda at: point(at, meter, cluster)))
            done = await drive(
                load.items, load.times, MeteredDoor(door, meter), duration_s=settings.duration_s, timeout_s=TIMEOUT_S, collects=True
            )
            watching.cancel()
        return done

    done = virtual_time.run(main())
    tell({"figures": figures(experiment, settings, load, done.records, settings.duration_s), "facts": _facts(made)})


async def _watch(meter: Meter, then: Callable[[float], None]) -> None:
    began = loop_time()
    while True:
        await asyncio.sleep(meter.step_s)
        then(loop_time() - began)


def _look(cluster: SimulatedCluster) -> Looked:
    workers = []
    for one in cluster.fleet.workers.values():
        load, record = one.load_now(), one.record
        workers.append(
            WorkerUsage(record.pool == "decode", load.running, load.waiting, load.free_blocks, record.kv_blocks, record.max_num_seqs)
        )
    return looked(sum(router.admission.queued for router in cluster.routers), workers)


def _facts(made: Simulation) -> dict[str, Any]:
    return {"model": made.profile.model, "processor": made.profile.processor, **asdict(made.setting.sizes)}


def main() -> None:
    asked = json.loads(sys.stdin.readline())

    def tell(what: Mapping[str, Any]) -> None:
        print(json.dumps(what), flush=True)

    profile = Path(asked["profile"]) if asked["profile"] else None
    simulate(find(asked["experiment"]), Settings(**asked["settings"]), profile, tell)


if __name__ == "__main__":
    main()
