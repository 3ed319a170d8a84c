"""The controller with a simulated cluster: the router's own code, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton.clock import loop_time
from baton.cluster.config_planner import PlannerConfig
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.metric_table import REFUSALS
from baton.cluster.metrics import Book
from baton.cluster.plan_notes import read_notes
from baton.cluster.records import Pools
from baton.cluster.registry import RegistryUnavailable
from baton.planner.capacity import Model
from baton.planner.controller import Controller
from baton.planner.demand import Interval, LoadForecast
from baton.planner.meter import Meter
from baton.planner.records import decode
from baton.planner.rehearsal import SimulatedDoors
from baton.profile.file import Profile
from baton.profile.models import Fitted
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.pools import SimulatedPools
from baton.simulate.workers import Times
from router.plans import Plans

SIZES = Sizes(2, 2, max_num_seqs=64, kv_blocks=6000)
# A slow worker, so that few requests are a load: 2,000 tokens of prompts per second; 32 sequences decode with 100 ms a token.
STEP = {"step": 0.02, "tokens": 5e-4, "decodes": 2.5e-3}
PROFILE = Profile("test", "", "", {}, 1000.0, "sum", {"step": Fitted(STEP), "start": Fitted({"base": 10.0})})
SLO = SloConfig(ttft_s=2.5, tpot_s=0.1)
QUICK = {
    "interval_s": 5, "budget": 4, "cooldown_s": 5.0, "hold_s": 40.0, "cold_s": 3.0, "stale_s": 20.0, "lease_s": 6.0, "period_s": 0.0,
    "start_timeout_s": 60.0, "flip_timeout_s": 20.0,
}  # fmt: skip


class Rehearsal:
    """A cluster, its pools, and planners."""

    def __init__(self, **config: Any) -> None:
        self.config = PlannerConfig(**(QUICK | config))
        self.cluster = SimulatedCluster(SIZES, Times.of(PROFILE), RouterConfig(), SLO, large=True)
        self.pools = SimulatedPools(self.cluster, SIZES, start_s=10.0)
        self.doors = SimulatedDoors(self.cluster, self.pools)
        self.lost: list[BatonError] = []
        self.served = 0

    def controller(self, who: str = "planner-0 1", book: Book | None = None) -> Controller:
        model, meter = Model(PROFILE, SLO.ttft_s, SLO.tpot_s), Meter(book) if book else None
        return Controller(self.config, model, self.cluster.registry, self.doors, who, loop_time, meter=meter)

    async def offer(self, seconds: float, every_s: float, prompt: int, output: int) -> None:
        """Requests at equal distances."""
        async with asyncio.TaskGroup() as group:
            end = loop_time() + seconds
            number = 0
            while loop_time() < end:
                number += 1
                group.create_task(self._ask(number, prompt, output))
                await asyncio.sleep(every_s)

    async def _ask(self, number: int, prompt: int, output: int) -> None:
        try:
            request = await self.cluster.ask([number, *range(1, prompt)], output)
            assert [int(token) for token in request.tokens[prompt:]] == [*range(prompt, prompt + output)], "a wrong token"
            self.served += 1
        except BatonError as error:
            self.lost.append(error)


def rehearse(act: Callable[[Rehearsal], Awaitable[None]], **config: Any) -> Rehearsal:
    async def main() -> Rehearsal:
        rehearsal = Rehearsal(**config)
        async with rehearsal.cluster.watched():
            tasks = [asyncio.create_task(rehearsal.pools.run())]
            await asyncio.sleep(2.0)
            await act(rehearsal)
            for task in tasks:
                assert not task.done(), task.exception()
                task.cancel()
            await rehearsal.pools.close()
        return rehearsal

    return virtual_time.run(main())


async def notes(rehearsal: Rehearsal) -> list[dict[str, Any]]:
    return decode(await rehearsal.cluster.registry.noted_plans(100))


def test_a_shift_of_phase_flips_a_worker_under_load_and_nothing_is_lost() -> None:
    told: list[dict[str, Any]] = []
    roles: list[tuple[int, int]] = []
    raw: list[bytes] = []

    async def act(rehearsal: Rehearsal) -> None:
        planning = asyncio.create_task(rehearsal.controller().run())
        await rehearsal.offer(60, 0.5, prompt=1500, output=4)
        roles.append((rehearsal.pools.serving("prefill"), rehearsal.pools.serving("decode")))
        await rehearsal.offer(90, 0.5, prompt=64, output=260)
        roles.append((rehearsal.pools.serving("prefill"), rehearsal.pools.serving("decode")))
        told.extend(await notes(rehearsal))
        raw.extend(await rehearsal.cluster.registry.noted_plans(100))
        planning.cancel()

    rehearsal = rehearse(act)
    assert not rehearsal.lost and rehearsal.served > 250
    assert roles[0][0] > 1 and roles[1][1] >= 2 and roles[0] != roles[1]
    changes = {note["change"] for note in told if note["kind"] == "decision" and note["action"]}
    outcomes = {note["change"]: note for note in told if note["kind"] == "outcome"}
    assert changes and changes <= set(outcomes) | {max(changes)}
    flips = [note for note in told if "serves decode instead" in note.get("action", "")]
    assert flips and flips[-1]["expected"]["attainment"] >= flips[-1]["now"]["attainment"] and flips[-1]["alternatives"]
    assert len(read_notes(raw)) == len(raw), "a router can read what a planner writes"
    shown = Plans.of("planner-0", raw).decisions
    assert all(plan.alternatives and plan.expected and plan.demand.rate and plan.forecast.by for plan, _ in shown if plan.action)
    assert {plan.change for plan, came in shown if came} == set(outcomes)


def test_a_burst_of_long_prompts_is_seen_before_its_first_token() -> None:
    """Each takes ten seconds to compute. What the second of the two like prompts will find cached is promised, and not counted."""
    seen: list[Interval] = []

    async def act(rehearsal: Rehearsal) -> None:
        await rehearsal.offer(10, 5.0, prompt=64, output=4)
        answered = rehearsal.served
        burst = [asyncio.create_task(rehearsal._ask(number, 20_000, 4)) for number in (101, 102, 101)]
        await asyncio.sleep(1.0)
        await rehearsal.doors.counts()  # a router draws its curves each second
        await asyncio.sleep(5.0)
        seen.extend(await rehearsal.doors.counts())
        assert rehearsal.served == answered
        await asyncio.gather(*burst)

    rehearsal = rehearse(act)
    assert not rehearsal.lost
    assert sum(each.prompt_tokens for each in seen) == 3 * 20_000 + 2 * 64 and sum(each.prompts for each in seen) == 5
    assert sum(each.completed for each in seen) == 2
    assert 2 * 20_000 <= sum(each.uncached_tokens for each in seen) - 2 * 64 < 2 * 20_000 + 64
    load = LoadForecast(1)
    load.add(seen)
    assert load.demand.prompt > 10_000, "the mean of a request, from now on"


def scraped(book: Book) -> dict[str, dict[tuple[str, ...], float]]:
    return {family.name: {tuple(one.labels.values()): one.value for one in family.series} for family in book.families()}


def test_what_a_planner_sees_wants_and_does_can_be_scraped(monkeypatch: pytest.MonkeyPatch) -> None:
    book, other = Book("planner"), Book("planner")

    async def act(rehearsal: Rehearsal) -> None:
        planning = asyncio.create_task(rehearsal.controller(book=book).run())
        await asyncio.sleep(1.0)
        second = rehearsal.controller("planner-1 1", other)
        await second.renew()
        assert await second.look() is None
        await rehearsal.offer(60, 0.5, prompt=1500, output=4)
        now = scraped(book)
        assert now["baton_planner_leads"] == {(): 1} and scraped(other)["baton_planner_leads"] == {(): 0}
        assert not {"baton_planner_workers", "baton_planner_load_requests_per_second"} & set(scraped(other))
        load = now["baton_planner_load_requests_per_second"]
        assert load[("came",)] == pytest.approx(2.0, rel=0.3) and load[("forecast",)] > 1
        workers = now["baton_planner_workers"]
        assert workers["prefill", "serving"] + workers["decode", "serving"] >= 3
        assert workers["prefill", "needed"] >= 2 and workers["decode", "wanted"] >= 1 and workers["prefill", "starting"] >= 0
        assert 0 <= now["baton_planner_attainment_ratio"][("now",)] <= 1 and now["baton_planner_pressure_ratio"][("prefill",)] >= 1
        await rehearsal.offer(60, 0.5, prompt=64, output=260)
        changes = scraped(book)["baton_planner_changes_total"]
        assert sum(count for (_, outcome), count in changes.items() if outcome == "settled") >= 1
        refusals = scraped(book)["baton_planner_refusals_total"]
        assert set(refusals) == {(reason,) for reason in REFUSALS} and not refusals[("cannot see",)]

        async def silent() -> Any:
            raise BatonError(Reason.WORKER_LOST, "away")

        monkeypatch.setattr(rehearsal.doors, "counts", silent)
        await asyncio.sleep(12.0)
        assert scraped(book)["baton_planner_refusals_total"][("cannot see",)] >= 2
        planning.cancel()

    rehearse(act)


def test_without_a_planner_nothing_changes() -> None:
    """Negative control."""

    async def act(rehearsal: Rehearsal) -> None:
        await rehearsal.offer(30, 0.5, prompt=1500, output=4)

    assert rehearse(act).pools.history == [(0.0, 2, 2)]


def test_a_dry_run_explains_and_changes_nothing() -> None:
    told: list[dict[str, Any]] = []

    async def act(rehearsal: Rehearsal) -> None:
        planning = asyncio.create_task(rehearsal.controller().run())
        await rehearsal.offer(60, 0.5, prompt=1500, output=4)
        told.extend(await notes(rehearsal))
        planning.cancel()

    rehearsal = rehearse(act, dry_run=True)
    assert len(rehearsal.pools.history) == 1 and any(note["dry"] and note["action"] for note in told)


async def idle(rehearsal: Rehearsal, controller: Controller, looks: int = 30) -> None:
    for _ in range(looks):
        await controller.look()
        await asyncio.sleep(5.0)


def test_who_does_not_lead_changes_nothing_and_takes_over() -> None:
    async def act(rehearsal: Rehearsal) -> None:
        first, second = rehearsal.controller("a 1"), rehearsal.controller("b 1")
        await first.renew()
        await second.renew()
        assert first.leads and not second.leads
        await idle(rehearsal, second)
        assert await rehearsal.cluster.registry.desired() == Pools(2, 2), "the load needs less, but it does not lead"
        assert not first.leads, "it has not renewed"
        await second.renew()
        assert second.leads
        for _ in range(30):
            await second.renew()
            await second.look()
            await asyncio.sleep(5.0)
        assert await rehearsal.cluster.registry.desired() == Pools(1, 1)

    rehearse(act)


def test_a_planner_that_lost_its_lease_cannot_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped between its decision and the act, thinks that it leads, and another one leads: the registry refuses."""

    async def act(rehearsal: Rehearsal) -> None:
        first, second = rehearsal.controller("a 1"), rehearsal.controller("b 1")
        await first.renew()
        await asyncio.sleep(rehearsal.config.lease_s + 1)
        await second.renew()
        monkeypatch.setattr(Controller, "leads", True)
        for _ in range(30):
            await first.look()
            await asyncio.sleep(5.0)
        assert await rehearsal.cluster.registry.desired() == Pools(2, 2)
        change = first.planner.memory.change
        assert change is not None and "does not lead" in change.why

    rehearse(act)


def test_a_role_is_not_changed_when_the_lease_is_nearly_over() -> None:
    async def act(rehearsal: Rehearsal) -> None:
        controller = rehearsal.controller()
        await controller.renew()
        assert await controller._flip("decode-0", "prefill") == ""
        await asyncio.sleep(rehearsal.config.lease_s - 0.2)
        assert "too soon" in await controller._flip("decode-1", "prefill")
        await asyncio.sleep(1.0)
        assert rehearsal.pools.serving("prefill") == 3

    rehearse(act)


def test_the_next_planner_takes_up_what_a_dead_one_asked_for() -> None:
    """Workers that were asked for do not come. Who leads next takes that back; a worker of its own counts on."""

    async def act(rehearsal: Rehearsal) -> None:
        rehearsal.pools._start_s = 1e9
        first, second = rehearsal.controller("a 1"), rehearsal.controller("b 1")
        await first.renew()
        load = asyncio.create_task(rehearsal.offer(150, 0.25, prompt=64, output=260))
        for _ in range(60):
            await first.renew()
            await first.look()
            if (await rehearsal.cluster.registry.desired()) != Pools(2, 2):
                break
            await asyncio.sleep(1.0)
        asked = await rehearsal.cluster.registry.desired()
        assert asked is not None and asked.decode > 2
        await asyncio.sleep(rehearsal.config.lease_s + 1)  # it is dead
        await second.renew()
        for _ in range(90):
            await second.renew()
            await second.look()
            await asyncio.sleep(1.0)
            if (await rehearsal.cluster.registry.desired()) == Pools(2, 2):
                break
        assert await rehearsal.cluster.registry.desired() == Pools(2, 2)
        told = await notes(rehearsal)
        assert [note["change"] for note in told if note["kind"] == "outcome"] == [1] and second.planner.memory.changes == 1
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)

    rehearse(act, flips=False, budget=8, least_prefill=2)


@pytest.mark.parametrize("fault", ["registry", "routers", "frozen", "none"])
def test_who_cannot_see_changes_nothing(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load is gone, so the pools would shrink, but nobody can be asked, or the routers' counts do not go on. (none: the control.)"""

    async def act(rehearsal: Rehearsal) -> None:
        controller = rehearsal.controller()
        await controller.renew()
        await idle(rehearsal, controller, 2)
        frozen = await rehearsal.doors.counts()

        async def counts() -> Any:
            if fault == "routers":
                raise BatonError(Reason.WORKER_LOST, "away")
            return frozen

        async def away() -> Any:
            raise RegistryUnavailable("down", "away")

        if fault == "registry":
            monkeypatch.setattr(rehearsal.cluster.registry, "members", away)
        elif fault != "none":
            monkeypatch.setattr(rehearsal.doors, "counts", counts)
        for _ in range(30):
            await controller.renew()
            await idle(rehearsal, controller, 1)
        assert (await rehearsal.cluster.registry.desired() == Pools(2, 2)) is (fault != "none")

    rehearse(act)
