"""Workers that have started prove themselves before they get requests. Those of the simulator do so here, some of them bad."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from proving_workers import ProvingWorkers

from baton.clock import loop_time
from baton.cluster.config_router import RouterConfig
from baton.cluster.metrics import Book
from baton.cluster.records import RoleName, WorkerRecord
from baton.simulate import virtual_time
from baton.simulate.cluster import TOKENIZER, SimulatedCluster, Sizes
from baton.simulate.memory_registry import MemoryRegistry
from baton.simulate.workers import Times
from router import prover as acting
from router.newcomers import RETRY_MOST_S, Newcomers
from router.prover import LEASE_S, Prover
from router.view import ClusterView

ROUTERS = ("router-0 1", "router-1 1")
BAD = ("liar", "mute", "stuck", "stubborn", "deaf")


class House:
    """Routers, each with its view, and workers that have started at the same moment."""

    def __init__(self, sizes: tuple[int, int], routers: int = 1, **bad: str) -> None:
        self.cluster = SimulatedCluster(Sizes(*sizes), Times(), RouterConfig())
        self.fresh = [unproven(record) for record in self.cluster.records]
        self.registry = MemoryRegistry(now=loop_time)
        self.views = [ClusterView({"model": TOKENIZER}) for _ in range(routers)]
        self.workers = [ProvingWorkers(self.cluster.fleet, **bad) for _ in range(routers)]
        self.books = [Book("router") for _ in range(routers)]
        self.provers = [
            Prover(view, workers, self.registry, who, book.counters("baton_router_proofs_total"))
            for view, workers, who, book in zip(self.views, self.workers, ROUTERS[:routers], self.books, strict=True)
        ]

    def join(self, *records: WorkerRecord) -> None:
        for view in self.views:
            view.update(records or self.fresh, loop_time())

    def serving(self, router: int = 0) -> set[str]:
        view = self.views[router]
        return {record.name for record in (*view.prefill_workers(), *view.decode_workers())}

    def counted(self, outcome: str) -> int:
        [family] = [family for family in self.books[0].families() if family.name == "baton_router_proofs_total"]
        return int(next(series.value for series in family.series if series.labels["outcome"] == outcome))


def unproven(record: WorkerRecord, incarnation: int = 1) -> WorkerRecord:
    return replace(record, roles=(), proving=(record.pool,), incarnation=incarnation)


def prove(act: Callable[[House], Awaitable[None]], sizes: tuple[int, int] = (1, 1), **how: Any) -> House:
    async def main() -> House:
        house = House(sizes, **how)
        tasks = [asyncio.create_task(prover.run()) for prover in house.provers]
        await act(house)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await house.cluster.fleet.close()
        assert not house.cluster.fleet.leases, "a lease was left"
        return house

    return virtual_time.run(main())


async def start(house: House) -> None:
    house.join()
    assert not house.serving(), "nobody has proved anything yet"
    await asyncio.sleep(1.0)


def test_the_first_pair_comes_up_and_the_prefill_worker_hands_over_to_the_other() -> None:
    house = prove(start)
    assert house.serving() == {"prefill-0", "decode-0"} and house.counted("admitted") == 2
    asked = house.workers[0].asked
    assert asked[:2] == [("decode-0", "decode")] * 2, "it is the first that decodes: alone, twice"
    assert asked[2:] == [("prefill-0", "prefill"), ("decode-0", "decode")]


@pytest.mark.parametrize("sizes", [(0, 1), (0, 3), (3, 2), (12, 12)])
def test_clusters_of_any_shape_come_up(sizes: tuple[int, int]) -> None:
    async def act(house: House) -> None:
        await start(house)
        await asyncio.sleep(2.0)

    house = prove(act, sizes)
    assert len(house.serving()) == sum(sizes) and not house.workers[0].told


def test_prefill_workers_wait_for_one_that_decodes() -> None:
    async def act(house: House) -> None:
        house.join(*(record for record in house.fresh if record.pool == "prefill"))
        await asyncio.sleep(5.0)
        assert not house.serving() and not house.workers[0].asked
        house.join()
        await asyncio.sleep(1.0)
        assert house.serving() == {"prefill-0", "decode-0"}

    prove(act)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
def test_a_bad_worker_is_kept_out_named_and_tried_at_growing_intervals(kind: str, name: str) -> None:
    """The others serve meanwhile."""

    async def act(house: House) -> None:
        house.join()
        await asyncio.sleep(400.0)
        assert house.serving() == {"prefill-0", "prefill-1", "decode-0", "decode-1"} - {name}
        why = house.provers[0].newcomers.why(name)
        words = {"liar": "where others say", "mute": "answer", "stuck": "does not serve", "stubborn": "serves nothing", "deaf": "KV"}
        assert words[kind] in why and name in why
        assert house.views[0].state(name) == "unproven"
        assert 6 <= house.counted("refused") <= 12 and house.counted("admitted") == 3, "at 1, 2, 4, … 60 s"
        assert {told for told, _ in house.workers[0].told} == {name}, "its record tells the other routers"

    prove(act, (2, 2), **{kind: name})


@pytest.mark.parametrize("kind", ["mute", "stuck"])
def test_a_first_decode_worker_that_is_bad_does_not_keep_the_others_from_coming_up(kind: str) -> None:
    async def act(house: House) -> None:
        house.join()
        await asyncio.sleep(30.0)
        assert house.serving() == {"prefill-0", "decode-1"}

    prove(act, (1, 2), **{kind: "decode-0"})


def test_one_that_has_recovered_is_admitted() -> None:
    async def act(house: House) -> None:
        house.join()
        await asyncio.sleep(20.0)
        assert "decode-1" not in house.serving()
        house.workers[0].bad["liar"] = ""
        await asyncio.sleep(RETRY_MOST_S)
        assert "decode-1" in house.serving() and not house.provers[0].newcomers.why("decode-1")

    prove(act, (1, 2), liar="decode-1")


def test_without_the_proof_the_liar_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    async def admit(workers: ProvingWorkers, others: Any, worker: WorkerRecord, *rest: Any) -> Any:
        return worker.proving

    monkeypatch.setattr(acting, "admit", admit)
    assert "decode-1" in prove(start, (1, 2), liar="decode-1").serving()


def test_a_worker_that_was_started_again_proves_itself_again() -> None:
    async def act(house: House) -> None:
        await start(house)
        house.workers[0].bad["liar"] = "decode-1"  # it comes back with a broken device
        house.join(*(unproven(record, 1 + (record.name == "decode-1")) for record in house.cluster.records))
        assert "decode-1" not in house.serving()
        await asyncio.sleep(5.0)
        assert house.serving() == {"prefill-0", "decode-0"}, "those that were admitted are still"
        assert "decode-1 is not admitted" in house.provers[0].newcomers.why("decode-1")

    prove(act, (1, 2))


def test_an_older_record_takes_nothing_back() -> None:
    """The registry's next answer may have been read before the worker wrote that it serves."""

    async def act(house: House) -> None:
        await start(house)
        house.join()
        assert house.serving() == {"prefill-0", "decode-0"}

    prove(act)


@pytest.mark.parametrize("busy", ["prefill-0", "decode-0"])
def test_workers_that_are_busy_keep_no_new_one_out(busy: str) -> None:
    """Those that serve answer late, which is when new ones are needed most."""

    async def act(house: House) -> None:
        old = [record for record in house.fresh if record.name != "decode-1"]
        house.join(*old)
        await asyncio.sleep(1.0)
        house.workers[0].bad["mute"] = busy
        house.join(*house.fresh)
        await asyncio.sleep(40.0)
        assert house.serving() == {"prefill-0", "decode-0", "decode-1"}

    prove(act, (1, 2))


def test_the_partner_changes_so_that_a_bad_one_keeps_nobody_out() -> None:
    """decode-0 cannot read KV any more, and prefill-1 is new."""

    async def act(house: House) -> None:
        old = [record for record in house.fresh if record.name != "prefill-1"]
        house.join(*old)
        await asyncio.sleep(1.0)
        assert len(house.serving()) == 3
        house.workers[0].bad["deaf"] = "decode-0"
        house.join(*old, next(record for record in house.fresh if record.name == "prefill-1"))
        await asyncio.sleep(10.0)
        assert "prefill-1" in house.serving()

    prove(act, (2, 2))


def test_one_router_proves_and_another_takes_over_when_it_is_gone() -> None:
    async def act(house: House) -> None:
        await start(house)
        busy = [bool(workers.asked) for workers in house.workers]
        assert sorted(busy) == [False, True], "two could each admit a first worker on its own word"
        first = busy.index(True)
        await house.provers[first].close()  # it resigns
        house.provers[first]._members.newcomers = list  # type: ignore[method-assign]  # and sees nobody any more
        house.join(*(unproven(record, 2) for record in house.cluster.records))
        await asyncio.sleep(1.0)
        assert house.serving(1 - first) == {"prefill-0", "decode-0"}

    prove(act, routers=2)


def test_a_router_that_died_with_the_lease_delays_the_next_one_by_no_more_than_that() -> None:
    async def act(house: House) -> None:
        await house.registry.lead("router-9 1", LEASE_S, 0, "prover")
        house.join()
        await asyncio.sleep(LEASE_S / 2)
        assert not house.serving()
        await asyncio.sleep(LEASE_S / 2 + 1.5)
        assert house.serving() == {"prefill-0", "decode-0"}

    prove(act)


def test_while_the_registry_is_away_nobody_new_is_admitted() -> None:
    async def act(house: House) -> None:
        house.registry.available = False
        house.join()
        await asyncio.sleep(3.0)
        assert not house.serving()
        house.registry.available = True
        await asyncio.sleep(1.0)
        assert len(house.serving()) == 2

    prove(act)


def test_who_does_not_answer_probes_is_not_tried() -> None:
    async def act(house: House) -> None:
        house.join()
        house.views[0].members.mark_down("decode-0", 1)
        await asyncio.sleep(3.0)
        assert not house.workers[0].asked
        house.views[0].members.note_answer("decode-0", 1, "ready", house.fresh[1].load, 1)
        await asyncio.sleep(1.0)
        assert len(house.serving()) == 2

    prove(act)


def test_newcomers_of_two_models_do_not_wait_for_each_other() -> None:
    house_a = [unproven(record) for record in records(2)]
    other = [replace(record, name=f"{record.name}-b", model_fingerprint="b") for record in house_a]
    newcomers = Newcomers()
    newcomers.keep([*house_a, *other])
    names = {record.name for record in (*house_a, *other)}
    nobody: dict[RoleName, set[str]] = {"prefill": set(), "decode": set()}
    assert [record.name for record in newcomers.next(names, nobody, 0.0)] == ["decode-0", "decode-0-b"]
    for record in newcomers.next(names, nobody, 0.0):
        newcomers.begin(record)
    assert not newcomers.next(names, nobody, 0.0), "each model has its first one"
    newcomers.refuse(house_a[0], "it lies", 0.0, True)
    assert [record.name for record in newcomers.next(names, nobody, 0.0)] == ["decode-1"], "then the next one"


def records(count: int) -> list[WorkerRecord]:
    async def main() -> list[WorkerRecord]:
        cluster = SimulatedCluster(Sizes(0, count), Times(), RouterConfig())
        await cluster.fleet.close()
        return cluster.records

    return virtual_time.run(main())
