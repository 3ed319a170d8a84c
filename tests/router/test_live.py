"""The data for the live page and `baton top`: states of workers, requests in progress, totals."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
from fake_workers import MODEL, TOKENIZER, record
from turns import watched

from baton.cluster.config import Config
from baton.cluster.config_router import SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.messages import plain
from baton.cluster.metrics import Book
from baton.cluster.records import GpuRecord, Load, Pools, RouterRecord, TierRecord, WorkerRecord
from baton.cluster.telemetry import Tracer
from baton.engine.core.sampling import SamplingParams
from baton.simulate.memory_registry import MemoryRegistry
from baton.v1 import worker_pb2
from router.admission import Admission
from router.journal import Journal, JournalEntry
from router.listing import Query
from router.live import GONE_S, MAX_RECENT, MAX_REQUESTS, MAX_WORKERS, Live, merge_looks
from router.members import ABSENT_S
from router.peers import PeerRouters
from router.plans import Plans
from router.request import Request, Token
from router.view import ClusterView


@dataclass
class Watching:
    registry_reachable: bool = True
    sizes: Pools | None = None
    asked: int = 0

    async def wanted(self) -> Pools | None:
        self.asked += 1
        return self.sizes

    async def plans(self) -> Plans | None:
        return Plans.of("planner-0", []) if self.registry_reachable else None


@dataclass
class House:
    slo: SloConfig = field(default_factory=SloConfig)
    keep: int = 100

    def __post_init__(self) -> None:
        self.now = 100.0
        self.view = ClusterView({MODEL: TOKENIZER})
        self.watch = Watching()
        self.journal = Journal(Book("router", model="toy"), Tracer(), "toy", self.slo, self.keep, wall_clock=lambda: self.now)
        self.peers = PeerRouters(MemoryRegistry(), "router-0", Config())
        own = RouterRecord("router-0", 1, 1, "host", {"admin": "127.0.0.1:9"}, "toy")
        self.live = Live(
            self.view, self.watch, Admission(4, 4), self.journal, self.peers, lambda: own,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )  # fmt: skip

    def dies(self, name: str, incarnation: int = 1) -> None:
        self.view.members.mark_down(name, incarnation)

    def there(self, *names: str) -> None:
        self.view.update(map(record, names), self.now)

    def leaves(self, name: str, *others: str) -> None:
        """Both the registry and the worker's own connection report it."""
        self.there(*others)
        self.view.members.note_silence(name, 1)
        self.now += ABSENT_S
        self.there(*others)

    async def look(self, after: float = 0.0) -> dict[str, Any]:
        self.now += after
        told = await self.live.look()
        assert plain(worker_pb2.LiveResponse(**told)) == told, "the page and the terminal get the same data"
        return json.loads(json.dumps(told))  # type: ignore[no-any-return]

    async def states(self, after: float = 1.0) -> dict[str, str]:
        return {worker["name"]: worker["state"] for worker in (await self.look(after))["workers"]}

    def open(self, name: str = "r") -> JournalEntry:
        entry = self.journal.open("chat", name, clock=lambda: self.now)
        entry.request = Request(name, [1, 2, 3], 3, SamplingParams(max_tokens=9), "", 1e9, entry.trace)
        return entry


async def test_workers_are_sorted_and_have_the_loads_they_last_reported() -> None:
    house = House()
    busy = Load(running=2, free_blocks=400, cached_blocks=90)
    house.view.update([record("d0", load=busy), record("p1"), record("p0")], house.now)
    told = (await house.look())["workers"]
    assert [worker["name"] for worker in told] == ["p0", "p1", "d0"]
    assert told[2]["pool"] == "decode" and told[2]["blocks_in_use"] == 600 and told[2]["kv_blocks"] == 1000 and told[2]["running"] == 2


async def test_a_workers_tiers_are_those_of_its_record() -> None:
    house, tier = House(), TierRecord("host", "on", "", 10, 20, 8, 7, 1.5, 0.25)
    house.view.update([WorkerRecord.from_json(record("d0", tiers=(tier,)).to_json()), record("p0")], house.now)
    prefill, decode = (await house.look())["workers"]
    assert prefill["tiers"] == [] and decode["tiers"] == [asdict(tier)]


async def test_a_workers_gpus_are_those_of_its_record_and_what_is_not_told_stays_so() -> None:
    """The look itself is checked against the message: the page and the terminal see the same."""
    house, whole = House(), GpuRecord("0", "NVIDIA H200", 61 << 30, 139 << 30, 0.87, 512.5, 7, 2)
    written = WorkerRecord.from_json(record("d0", gpus=(whole, GpuRecord("MIG-1"))).to_json())
    house.view.update([written, record("p0")], house.now)
    prefill, decode = (await house.look())["workers"]
    assert prefill["gpus"] == []
    assert decode["gpus"] == [asdict(whole), asdict(GpuRecord("MIG-1"))]
    assert decode["gpus"][1]["watts"] is decode["gpus"][1]["busy"] is decode["gpus"][1]["ecc_corrected"] is None


async def test_a_worker_that_dies_is_unreachable_then_gone_then_forgotten() -> None:
    house = House()
    house.there("p0", "d0")
    assert await house.states() == {"p0": "ready", "d0": "ready"}
    house.dies("d0")
    assert await house.states() == {"p0": "ready", "d0": "unreachable"}
    house.leaves("d0", "p0")
    assert await house.states() == {"p0": "ready", "d0": "gone"}
    assert await house.states(GONE_S - 6) == {"p0": "ready", "d0": "gone"}
    assert await house.states(6) == {"p0": "ready"}


async def test_a_lost_worker_is_shown_as_restarting_while_a_supervisor_keeps_its_pool_larger() -> None:
    house = House()
    house.watch.sizes = Pools(1, 2)
    house.there("p0", "d0", "d1")
    assert [worker["restarting"] for worker in (await house.look())["workers"]] == [False] * 3
    assert house.watch.asked == 0, "the registry is asked only while a worker is lost"
    house.dies("d1")

    async def lost() -> tuple[str, float, bool]:
        told = next(worker for worker in (await house.look(1.0))["workers"] if worker["name"] == "d1")
        return told["state"], told["silent"], told["restarting"]

    assert await lost() == ("unreachable", 1.0, True)
    house.leaves("d1", "p0", "d0")
    assert await lost() == ("gone", 2.0 + ABSENT_S, True)
    house.watch.sizes = Pools(1, 1)
    assert await lost() == ("gone", 3.0 + ABSENT_S, False), "nobody keeps the pool larger"
    house.watch.sizes = None
    assert (await lost())[2] is False
    house.view.update([record("p0"), record("d0"), record("d1", incarnation=2)], house.now)
    assert await lost() == ("ready", 0.0, False)


async def test_a_worker_that_died_while_nobody_looked_is_shown() -> None:
    house = House()
    house.there("p0", "d0")
    await house.live.sample()
    house.now += 5
    house.dies("d0")
    house.leaves("d0", "p0")
    [_, lost] = (await house.look())["workers"]
    assert (lost["name"], lost["state"], lost["silent"]) == ("d0", "gone", 5 + ABSENT_S)


async def test_a_worker_that_comes_back_is_listed_once() -> None:
    house = House()
    house.there("d0")
    house.dies("d0")
    assert await house.states() == {"d0": "unreachable"}
    house.view.update([record("d0", incarnation=2)], house.now)
    assert await house.states() == {"d0": "ready"}


async def test_a_worker_that_drains_leaves_without_an_alarm() -> None:
    house = House()
    house.view.update([record("p0"), record("d0", state="draining")], house.now)
    assert await house.states() == {"p0": "ready", "d0": "draining"}
    house.dies("d0")
    assert await house.states() == {"p0": "ready", "d0": "draining"}
    house.leaves("d0", "p0")
    assert await house.states() == {"p0": "ready"}


async def test_a_worker_that_serves_another_model_is_unfit() -> None:
    house = House()
    house.view.update([record("d0"), record("d1", model_fingerprint="other")], house.now)
    assert await house.states() == {"d0": "ready", "d1": "unfit"}


async def test_a_worker_that_answers_without_progress_is_hung() -> None:
    house = House()
    house.there("d0", "d1")
    house.view.members.mark_hung("d1", 1, True)
    assert await house.states() == {"d0": "ready", "d1": "hung"}


async def test_a_worker_that_is_put_aside_is_shown() -> None:
    house = House()
    house.there("d0", "d1")
    house.view.members.mark_ejected("d1", 1, "slow")
    assert await house.states() == {"d0": "ready", "d1": "ejected"}


async def test_of_a_large_pool_some_are_listed_and_all_that_need_attention() -> None:
    house = House()
    house.there("p0", *(f"d{i:04}" for i in range(1000)))
    for name in ("d0500", "d0999"):
        house.dies(name)
    told = await house.look()
    names = [worker["name"] for worker in told["workers"]]
    assert len(names) == 1 + MAX_WORKERS and names == ["p0", *sorted(names[1:])] and {"d0500", "d0999", "d0000"} < {*names}
    assert told["unlisted"] == {"decode": 1000 - MAX_WORKERS}


async def test_the_requests_at_a_worker_are_counted_by_stage_beyond_those_that_are_listed() -> None:
    house = House()
    house.there("p0", "d0")
    for i in range(MAX_REQUESTS + 6):
        entry = house.open(f"r{i}").__enter__()
        if i % 2:
            entry.trace.watch.enter("decode", "d0")
    for i in range(3):
        entry = house.open(f"b{i}").__enter__()
        entry.trace.watch.enter("prefill", bypass=True)
        entry.trace.watch.at("d0")
    told = await house.look()
    half = MAX_REQUESTS // 2 + 3
    assert told["router"]["requests"] == {"queue": half} and told["workers"][1]["requests"] == {"decode": half, "bypass": 3}
    assert told["workers"][0]["requests"] == {} and len(told["requests"]) == MAX_REQUESTS


async def test_a_request_is_listed_while_it_runs_and_then_among_the_recent_ones() -> None:
    house = House()
    with house.open("r1") as entry:
        entry.trace.watch.enter("prefill", "p0")
        entry.trace.prefill_worker = "p0"
        entry.request.tokens.append(4)  # type: ignore[union-attr]
        told = await house.look(2.0)
        [request] = told["requests"]
        assert (request["request_id"], request["stage"], request["worker"], request["output_tokens"]) == ("r1", "prefill", "p0", 1)
        assert request["age"] == 2.0 and not told["recent"]
        assert told["totals"]["output_tokens"] == 1, "tokens count as they come"
        entry.trace.handoff = Handoff(transport="nixl", blocks=1, bytes=4096)
        entry.trace.guesses.note(Token(5, guessed=True))
        entry.trace.guesses.note(Token(6, rejected=1))
        entry.finish = "length"
    told = await house.look(1.0)
    assert not told["requests"] and [last["request_id"] for last in told["recent"]] == ["r1"]
    totals = told["totals"]
    assert totals["outcomes"] == {"ok": 1} and (totals["output_tokens"], totals["prompt_tokens"], totals["met"]) == (1, 3, 1)
    assert (totals["handoffs"], totals["handoff_bytes"]) == (1, 4096)
    assert (totals["drafted_at"], totals["accepted_at"]) == ({"1": 1, "2": 1}, {"1": 1})
    assert await house.live.find("r1") is not None and await house.live.find("r2") is None


async def test_errors_are_counted_separately_and_are_not_goodput() -> None:
    house = House()
    for reason in (Reason.SATURATED, Reason.RETRIES_SPENT, Reason.INVALID_FIELD):
        with pytest.raises(BatonError), house.open(reason.name):
            raise BatonError(reason, "")
    told = await house.look()
    assert [error["reason"] for error in told["errors"]] == ["RETRIES_SPENT", "SATURATED"]
    assert told["totals"]["outcomes"] == {"refused": 1, "failed": 1, "invalid": 1} and told["totals"]["met"] == 0


async def test_errors_of_one_kind_are_one_line() -> None:
    """A client that sends one request eight times leaves room for the others."""
    house = House()
    for name, reason in (("other", Reason.DEADLINE), *[("stubborn", Reason.SATURATED)] * 8, ("late", Reason.SATURATED)):
        house.now += 1
        with pytest.raises(BatonError), house.open(name):
            raise BatonError(reason, "")
    told = (await house.look())["errors"]
    assert [(error["reason"], error["count"], error["requests"], error["request_id"], error["at"]) for error in told] == [
        ("SATURATED", 9, 2, "late", 110.0), ("DEADLINE", 1, 1, "other", 101.0),
    ]  # fmt: skip


async def test_requests_that_are_refused_before_they_have_an_id_are_told_apart() -> None:
    """As all are over gRPC whose client gives none."""
    house = House()
    for _ in range(3):
        with pytest.raises(BatonError), house.journal.open("chat", clock=lambda: house.now):
            raise BatonError(Reason.SATURATED, "")
    [error] = (await house.look())["errors"]
    assert (error["reason"], error["count"], error["requests"]) == ("SATURATED", 3, 3)


async def test_a_request_that_misses_its_objective_is_not_goodput() -> None:
    house = House(SloConfig(e2e_s=1.0))
    for seconds in (0.5, 2.0):
        with house.open() as entry:
            house.now += seconds
            entry.trace.watch.stop()
            entry.finish = "stop"
    told = await house.look()
    assert told["totals"]["met"] == 1 and told["slo"] == {"objectives": {"e2e": 1.0}, "attainment": 0.5}


async def test_the_number_of_listed_requests_is_limited() -> None:
    house = House()
    entries: Iterable[JournalEntry] = [house.open(f"r{i}") for i in range(MAX_REQUESTS + 5)]
    for entry in entries:
        entry.__enter__()
    assert len((await house.look())["requests"]) == MAX_REQUESTS


async def test_an_unreachable_registry_is_reported() -> None:
    house = House()
    house.watch.registry_reachable = False
    assert (await house.look())["router"]["registry"] == "away"


async def test_kv_counts_as_moved_while_its_request_still_runs() -> None:
    house = House()
    with house.open() as entry:
        assert (await house.look())["totals"]["handoffs"] == 0
        entry.trace.handoff = Handoff(transport="tcp", blocks=2, bytes=640)
        running = (await house.look())["totals"]
        entry.finish = "stop"
    ended = (await house.look())["totals"]
    assert (running["handoffs"], running["handoff_bytes"]) == (ended["handoffs"], ended["handoff_bytes"]) == (1, 640)


def state(name: str, at: float, attainment: float | None = None, **outcomes: int) -> dict[str, Any]:
    """What one router shows: a request in flight and one that ended `at`."""
    error = {"outcome": "failed", "reason": "DEADLINE", "request_id": name, "at": at, "count": 2, "requests": 1}
    return {
        "clock": at, "model": "toy", "workers": [{"name": "d0", "requests": {"decode": 1}}],
        "routers": [{"name": "router-0"}, {"name": "router-1"}],
        "router": {"inflight": 2, "queued": 1, "degraded": len(name) % 2, "registry": "reachable", "requests": {"queue": 1},
                   "alarm": name * (name > "b")},
        "requests": [{"request_id": f"open {name}", "age": at}], "recent": [{"request_id": f"ended {name}", "at": at}], "errors": [error],
        "totals": {"outcomes": outcomes, "prompt_tokens": 10, "met": 1}, "slo": {"objectives": {}, "attainment": attainment},
    }  # fmt: skip


def test_the_states_of_all_routers_become_one() -> None:
    told = merge_looks(state("a", 5.0, 1.0, ok=3), [state("b", 9.0, 0.5, ok=1, failed=2), state("c", 7.0)])
    assert told["router"] == {"inflight": 6, "queued": 3, "degraded": 1, "registry": "reachable", "requests": {"queue": 3}, "alarm": "c"}
    assert told["workers"] == [{"name": "d0", "requests": {"decode": 3}}]
    assert [request["request_id"] for request in told["requests"]] == ["open b", "open c", "open a"]
    assert [record["request_id"] for record in told["recent"]] == ["ended b", "ended c", "ended a"]
    [error] = told["errors"]
    assert (error["request_id"], error["at"], error["count"], error["requests"]) == ("b", 9.0, 6, 3)
    assert told["totals"] == {"outcomes": {"ok": 4, "failed": 2}, "prompt_tokens": 30, "met": 3}
    assert told["slo"]["attainment"] == pytest.approx(0.75), "each router counts as much as the requests that it ended"
    assert told["clock"] == 5.0, "rates are computed from one clock"
    many = {**state("d", 1.0), "recent": [{"request_id": str(i), "at": float(i)} for i in range(99)]}
    assert len(merge_looks(many, [many])["recent"]) == MAX_RECENT


async def test_no_turn_of_the_event_loop_is_long_however_much_is_kept() -> None:
    """A thousand workers, two thousand requests in flight, and all that is kept: processor time between two turns of the loop."""
    house = House(keep=2048)
    house.there(*(f"p{i:03}" for i in range(500)), *(f"d{i:03}" for i in range(500)))
    for i in range(2048):
        with house.open(f"r{i}") as entry:
            entry.trace.watch.enter("decode", f"d{i % 500:03}")
            entry.trace.watch.stop()
            entry.finish = "stop"
    for i in range(2048):
        entry = house.open(f"o{i}").__enter__()
        entry.trace.watch.enter("decode", f"d{i % 500:03}")
    for _ in range(180):
        house.now += 5
        for bucket in range(94):
            house.journal.curves.first(house.now, 1e-4 * 2 ** (bucket / 4))

    listing = house.live.ended(Query(sort="total", limit=2048))
    for work in (house.live.sample(), house.live.look(), listing, house.live.draw(0)):
        with watched() as turns:
            await work
        turns.check(0.02)


async def test_what_a_planner_decides_is_unknown_while_the_registry_is_away() -> None:
    house = House()
    leads = {"registry": "reachable", "planner": {"leader": "planner-0", "dry_run": False}, "decisions": []}
    assert await house.live.plans() == leads
    house.watch.registry_reachable = False
    assert await house.live.plans() == {"registry": "away"}
