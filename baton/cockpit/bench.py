"""Runs experiments, one at a time, each within its deadline, and keeps what came of the last ones for comparison."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from baton.clock import loop_time
from baton.cluster.errors import BatonError, Reason, invalid
from baton.cluster.rpc import Tasks
from baton.cockpit.cluster import ClusterFacts, OpenedDoor
from baton.cockpit.experiments import Experiment, find
from baton.cockpit.knobs import LABELS, Settings, Where
from baton.cockpit.load import figures, load_of, rate_at
from baton.cockpit.meter import Meter, MeteredDoor
from baton.cockpit.own import OwnCluster, OwnClusters
from baton.cockpit.setup import simulation_of
from baton.profile.file import ProfileError
from loadtest.drive import Live, drive

KEPT = 40  # runs
AFTER_S = 60.0  # an answer may take so long after the last request
SIMULATED_WITHIN_S = 240.0  # real seconds
MAX_LINE = 1 << 20  # bytes of a line that the simulator's process writes
State = Literal["running", "done", "stopped", "failed"]


class Clusterlike(Protocol):
    """`baton.cockpit.cluster.CockpitCluster`."""

    async def facts(self) -> ClusterFacts: ...

    async def open(self, settings: Settings, facts: ClusterFacts) -> OpenedDoor: ...


@dataclass(slots=True)
class RunKept:
    """One run. `doing`: what is done before and after its requests. `doubts`: what is to be said before its figures. `message`: why it
    failed or ended early."""

    id: int
    experiment: str
    title: str
    where: Where
    settings: dict[str, Any]  # those that the experiment has
    duration_s: int
    state: State = "running"
    doing: str = ""
    points: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    message: str = ""

    @property
    def label(self) -> str:
        return LABELS[self.where]

    def told(self, since: int | None = None) -> dict[str, Any]:
        """`since`: its points from that number on; None: none of them."""
        told = {name: value for name, value in asdict(self).items() if name != "points"} | {"label": self.label, "made": len(self.points)}
        return told if since is None else told | {"points": self.points[since:]}


class Bench:
    def __init__(self, cluster: Clusterlike, profile: Path | None = None, own: OwnClusters | None = None) -> None:
        """`profile`: the file of one that was measured. `own`: starts the clusters that experiments have for themselves."""
        self.cluster, self.profile = cluster, profile
        self.own = own or OwnClusters()
        self.runs: dict[int, RunKept] = {}
        self._number = 0
        self._task: asyncio.Task[None] | None = None
        self._tasks = Tasks(lambda error: None)  # `_guarded` has told
        self._starting = asyncio.Lock()

    @property
    def current(self) -> RunKept | None:
        """The run that goes on."""
        last = self.runs.get(self._number)
        return last if last is not None and last.state == "running" else None

    async def start(self, asked: Mapping[str, Any]) -> RunKept:
        """`asked`: experiment, where, settings. Raises BatonError: INVALID_FIELD; SATURATED while another runs; NO_WORKER without a
        cluster, or where none can be started."""
        if unknown := sorted(set(asked) - {"experiment", "where", "settings"}):
            raise invalid(unknown[0][:64], "is unknown: an experiment has experiment, where and settings")
        experiment, where = find(asked.get("experiment")), asked.get("where")
        if where not in tuple(LABELS):
            raise invalid("where", f"must be one of {', '.join(LABELS)}")
        given = asked.get("settings", {})
        if not isinstance(given, dict):
            raise invalid("settings", "must be an object")
        settings = experiment.settings(where, given)
        async with self._starting:
            if self.current is not None:
                raise BatonError(Reason.SATURATED, f"{self.current.title} runs: stop it, or wait until it has ended")
            return await self._begin(experiment, where, settings)

    async def _begin(self, experiment: Experiment, where: Where, settings: Settings) -> RunKept:
        if where == "simulated":
            await asyncio.to_thread(self._check, experiment, settings)
        facts = await self.cluster.facts() if where == "real" else None
        opened = await self.cluster.open(settings, facts) if facts else None
        own = await asyncio.to_thread(self._take, experiment, settings) if where == "own" else None
        self._number += 1
        given = {name: getattr(settings, name) for name in experiment.knobs(where)}
        run = RunKept(self._number, experiment.name, experiment.title, where, given, settings.duration_s)
        self.runs[run.id] = run
        while len(self.runs) > KEPT:
            del self.runs[min(self.runs)]
        if opened is not None and facts is not None:
            work = self._real(run, experiment, settings, opened, facts)
        elif own is not None:
            work = self._own(run, experiment, settings, own)
        else:
            work = self._simulated(run, experiment, settings)
        self._task = self._tasks.start(self._guarded(run, work), "experiment")
        await asyncio.sleep(0)  # it begins: a task that is cancelled before cannot say so
        return run

    def _check(self, experiment: Experiment, settings: Settings) -> None:
        """Raises BatonError(INVALID_FIELD) for what the simulator would refuse."""
        try:
            simulation_of(settings, load_of(experiment, settings, shares=False), self.profile)
        except ProfileError as error:
            raise invalid("by", str(error)) from None

    def _take(self, experiment: Experiment, settings: Settings) -> OwnCluster:
        return self.own.take(settings, load_of(experiment, settings).longest)

    def stop(self) -> None:
        """Ends the run that goes on; what was measured of it is kept. What it has started is taken down first, which a second call does
        not hasten."""
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()

    def forget(self, number: int) -> None:
        """Raises BatonError(INVALID_FIELD)."""
        run = self.runs.get(number)
        if run is None or run.state == "running":
            raise invalid("id", "is no run that has ended")
        del self.runs[number]

    async def close(self) -> None:
        await self._tasks.close()

    async def _guarded(self, run: RunKept, work: Any) -> None:
        try:
            await work
            run.state = "done"
        except asyncio.CancelledError:
            run.state, run.message = "stopped", run.message or "stopped"
        except Exception as error:  # whatever goes wrong is told on the page
            run.state, run.message = "failed", str(error) or type(error).__name__

    async def _own(self, run: RunKept, experiment: Experiment, settings: Settings, own: OwnCluster) -> None:
        run.doubts = own.doubts

        def say(doing: str) -> None:
            run.doing = doing

        async with own.running(say) as (opened, facts):
            await self._real(run, experiment, settings, opened, facts)

    async def _real(self, run: RunKept, experiment: Experiment, settings: Settings, opened: OpenedDoor, facts: ClusterFacts) -> None:
        run.facts = {"model": facts.model, "prefill": facts.prefill, "decode": facts.decode, "speculation": facts.speculation}
        load, meter, live = load_of(experiment, settings), Meter(), Live()
        began = loop_time()

        async def watch() -> None:
            for number in range(1, int(settings.duration_s + AFTER_S) + 1):
                await asyncio.sleep(max(0.0, began + number * meter.step_s - loop_time()))
                seen = await opened.look()
                at = loop_time() - began
                run.points.append(
                    meter.point(at, rate_at(experiment, settings, number - 1) if number <= settings.duration_s else 0.0, seen)
                )

        watching = asyncio.create_task(watch())
        try:
            async with asyncio.timeout(settings.duration_s + AFTER_S):
                done = await drive(
                    load.items, load.times, MeteredDoor(opened.door, meter), duration_s=settings.duration_s, timeout_s=AFTER_S / 2,
                    live=live, collects=True,
                )  # fmt: skip
            if done.partial:
                raise RuntimeError(done.partial)
        finally:
            watching.cancel()
            until = min(settings.duration_s, loop_time() - began)
            run.figures = figures(experiment, settings, load, live.records, until)
            await opened.close()

    async def _simulated(self, run: RunKept, experiment: Experiment, settings: Settings) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.cockpit.simulated", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, limit=MAX_LINE, env=os.environ,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        asked = {"experiment": experiment.name, "settings": asdict(settings), "profile": str(self.profile) if self.profile else None}
        try:
            async with asyncio.timeout(SIMULATED_WITHIN_S), asyncio.TaskGroup() as group:
                said = group.create_task(process.stderr.read(MAX_LINE))
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                await process.stdin.drain()
                async for line in process.stdout:
                    _note(run, json.loads(line))
                await process.wait()
            if process.returncode:
                last = said.result().decode(errors="replace").strip().splitlines()
                raise RuntimeError(f"the simulator ended with {process.returncode}: {last[-1] if last else 'no word'}")
        except TimeoutError:
            raise RuntimeError(f"the simulation took more than {SIMULATED_WITHIN_S:g} s; ask for less") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _note(run: RunKept, told: Mapping[str, Any]) -> None:
    if "point" in told:
        run.points.append(told["point"])
    elif "figures" in told:
        run.figures, run.facts = told["figures"], told["facts"]
    elif "doubts" in told:
        run.doubts = list(told["doubts"])
