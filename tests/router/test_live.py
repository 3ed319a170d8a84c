"""The data for the live page and `baton top`: states of workers, requests in progress, totals."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_workers import TOKENIZER, record
from memory_registry import MemoryRegistry

from baton.cluster.config import Config
from baton.cluster.config_router import SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.messages import plain
from baton.cluster.metrics import Book
from baton.cluster.records import RouterRecord, WorkerRecord
from baton.cluster.telemetry import Tracer
from baton.engine.sampling import SamplingParams
from baton.v1 import worker_pb2
from router.admission import Admission
from router.journal import Entry, Journal
from router.live import FRESH_S, GONE_S, MAX_RECENT, MAX_REQUESTS, Live, merge
from router.peers import Peers
from router.request import Request
from router.view import ABSENT_S, ClusterView


@dataclass
class Asked:
    """A stand-in for `router.clients.Workers`."""

    silent: set[str] = field(default_factory=set)
    says: dict[str, Any] = field(default_factory=dict)  # fields of a record
    asked: int = 0

    async def describe(self, worker: WorkerRecord) -> tuple[WorkerRecord, dict[str, int]]:
        self.asked += 1
        await asyncio.sleep(0)
        if worker.name in self.silent:
            raise BatonError(Reason.WORKER_LOST, "")
        return replace(worker, **self.says), {"blocks_in_use": 7}


@dataclass
class Watching:
    registry_reachable: bool = True


@dataclass
class House:
    slo: SloConfig = field(default_factory=SloConfig)

    def __post_init__(self) -> None:
        self.now = 100.0
        self.view = ClusterView(TOKENIZER)
        self.workers = Asked()
        self.watch = Watching()
        self.journal = Journal(Book("router", model="toy"), Tracer(), "toy", self.slo, keep=100)
        self.peers = Peers(MemoryRegistry(), "router-0", Config())
        own = RouterRecord("router-0", 1, 1, "host", {"admin": "127.0.0.1:9"}, "toy")
        self.live = Live(
            self.view, self.workers, self.watch, Admission(4, 4), self.journal, self.peers, lambda: own,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )  # fmt: skip

    def there(self, *names: str) -> None:
        self.view.update(map(record, names), self.now)

    def leaves(self, name: str, *others: str) -> None:
        """Both the registry and the worker's own connection report it."""
        self.there(*others)
        self.view.note_silence(name, 1)
        self.now += ABSENT_S
        self.there(*others)

    async def look(self, after: float = 0.0) -> dict[str, Any]:
        self.now += after
        told = await self.live.look()
        assert plain(worker_pb2.LiveResponse(**told)) == told, "the page and the terminal get the same data"
        return json.loads(json.dumps(told))  # type: ignore[no-any-return]

    async def states(self, after: float = 1.0) -> dict[str, str]:
        return {worker["name"]: worker["state"] for worker in (await self.look(after))["workers"]}

    def open(self, name: str = "r") -> Entry:
        entry = self.journal.open("chat", name, clock=lambda: self.now)
        entry.request = Request(name, [1, 2, 3], 3, SamplingParams(max_tokens=9), "", 1e9, entry.trace)
        return entry


async def test_workers_are_sorted_and_have_the_values_they_report_now() -> None:
    house = House()
    house.there("d0", "p1", "p0")
    told = (await house.look())["workers"]
    assert [worker["name"] for worker in told] == ["p0", "p1", "d0"]
    assert told[2]["role"] == "decode" and told[2]["blocks_in_use"] == 7 and told[2]["kv_blocks"] == 1000


async def test_a_worker_that_dies_is_unreachable_then_gone_then_forgotten() -> None:
    house = House()
    house.there("p0", "d0")
    assert await house.states() == {"p0": "ready", "d0": "ready"}
    house.workers.silent = {"d0"}
    assert await house.states() == {"p0": "ready", "d0": "unreachable"}
    house.leaves("d0", "p0")
    assert await house.states() == {"p0": "ready", "d0": "gone"}
    assert await house.states(GONE_S - 6) == {"p0": "ready", "d0": "gone"}
    assert await house.states(6) == {"p0": "ready"}


async def test_a_worker_that_comes_back_is_listed_once() -> None:
    house = House()
    house.there("d0")
    house.workers.silent = {"d0"}
    assert await house.states() == {"d0": "unreachable"}
    house.workers.silent = set()
    house.view.update([record("d0", incarnation=2)], house.now)
    assert await house.states() == {"d0": "ready"}


async def test_a_worker_that_drains_leaves_without_an_alarm() -> None:
    house = House()
    house.there("p0", "d0")
    house.workers.says = {"state": "draining"}
    assert await house.states() == {"p0": "draining", "d0": "draining"}
    house.leaves("d0", "p0")
    assert await house.states() == {"p0": "draining"}


async def test_a_worker_that_serves_another_model_is_unfit() -> None:
    house = House()
    house.view.update([record("d0"), record("d1", model_fingerprint="other")], house.now)
    assert await house.states() == {"d0": "ready", "d1": "unfit"}


async def test_a_worker_that_answers_without_progress_is_hung() -> None:
    house = House()
    house.there("d0", "d1")
    house.view.mark_hung("d1", 1, True)
    assert await house.states() == {"d0": "ready", "d1": "hung"}


async def test_many_viewers_cost_each_worker_one_request() -> None:
    house = House()
    house.there("p0", "d0")
    await asyncio.gather(*(house.look() for _ in range(50)))
    assert house.workers.asked == 2
    await house.look(FRESH_S)
    assert house.workers.asked == 4


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
        entry.finish = "length"
    told = await house.look(1.0)
    assert not told["requests"] and [last["request_id"] for last in told["recent"]] == ["r1"]
    totals = told["totals"]
    assert totals["outcomes"] == {"ok": 1} and (totals["output_tokens"], totals["prompt_tokens"], totals["met"]) == (1, 3, 1)
    assert (totals["handoffs"], totals["handoff_bytes"]) == (1, 4096)
    assert await house.live.find("r1") is not None and await house.live.find("r2") is None


async def test_errors_are_counted_separately_and_are_not_goodput() -> None:
    house = House()
    for reason in (Reason.SATURATED, Reason.RETRIES_SPENT, Reason.INVALID_FIELD):
        with pytest.raises(BatonError), house.open(reason.name):
            raise BatonError(reason, "")
    told = await house.look()
    assert {error["reason"] for error in told["errors"]} == {"SATURATED", "RETRIES_SPENT"}
    assert told["totals"]["outcomes"] == {"refused": 1, "failed": 1, "invalid": 1} and told["totals"]["met"] == 0


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
    entries: Iterable[Entry] = [house.open(f"r{i}") for i in range(MAX_REQUESTS + 5)]
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
    return {
        "clock": at, "model": "toy", "workers": [{"name": "d0"}], "routers": [{"name": "router-0"}, {"name": "router-1"}],
        "router": {"inflight": 2, "queued": 1, "registry": "reachable"},
        "requests": [{"request_id": f"open {name}", "age": at}], "recent": [{"request_id": f"ended {name}", "at": at}], "errors": [],
        "totals": {"outcomes": outcomes, "prompt_tokens": 10, "met": 1}, "slo": {"objectives": {}, "attainment": attainment},
    }  # fmt: skip


def test_the_states_of_all_routers_become_one() -> None:
    told = merge(state("a", 5.0, 1.0, ok=3), [state("b", 9.0, 0.5, ok=1, failed=2), state("c", 7.0)])
    assert told["router"] == {"inflight": 6, "queued": 3, "registry": "reachable"} and told["workers"] == [{"name": "d0"}]
    assert [request["request_id"] for request in told["requests"]] == ["open b", "open c", "open a"]
    assert [record["request_id"] for record in told["recent"]] == ["ended b", "ended c", "ended a"]
    assert told["totals"] == {"outcomes": {"ok": 4, "failed": 2}, "prompt_tokens": 30, "met": 3}
    assert told["slo"]["attainment"] == pytest.approx(0.75), "each router counts as much as the requests that it ended"
    assert told["clock"] == 5.0, "rates are computed from one clock"
    many = {**state("d", 1.0), "recent": [{"request_id": str(i), "at": float(i)} for i in range(99)]}
    assert len(merge(many, [many])["recent"]) == MAX_RECENT
