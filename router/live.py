"""The current state of the cluster: the pools and their load, the requests in flight, the last ones that ended, and the last quarter of an
hour as curves.

It contains nothing of a prompt or an output. What is sent is bounded, however large the cluster, and no turn of the event loop is long.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any, TypeVar

from baton.clock import loop_time
from baton.cluster.messages import plain
from baton.cluster.records import Pools, RouterRecord, WorkerRecord
from baton.v1 import worker_pb2
from router.admission import Admission
from router.curves import Point, draw, merge
from router.gauges import kv_usage
from router.journal import Journal, JournalEntry, Record
from router.listing import Query, choose
from router.peers import PeerRouters
from router.view import ClusterView
from router.watch import Watch

SAMPLE_EVERY_S = 1.0
FRESH_S = 0.4  # how long the wanted sizes of the pools are believed
GONE_S = 60.0  # how long a worker that left without draining is still shown
MAX_WORKERS = 64  # of one pool
MAX_REQUESTS = 64
MAX_RECENT = 6
MAX_ERRORS = 8
ERRORS_AMONG = 512  # last records
AT_ONCE = 64  # of anything that is made into messages between two turns of the event loop
T = TypeVar("T")
R = TypeVar("R")


class Live:
    def __init__(
        self,
        view: ClusterView,
        watch: Watch,
        admission: Admission,
        journal: Journal,
        peers: PeerRouters,
        describe: Callable[[], RouterRecord],
        clock: Callable[[], float] = loop_time,
    ) -> None:
        """`describe`: this router, as it is now."""
        self._view = view
        self._watch = watch
        self._admission = admission
        self._journal = journal
        self._peers = peers
        self._describe = describe
        self._clock = clock
        self._answered: dict[str, tuple[WorkerRecord, float]] = {}  # worker → its record when it was last seen to answer, and when
        self._wanted: Pools | None = None
        self._asked_at = -FRESH_S

    async def run(self) -> None:
        """Notes what the curves show, and which workers there are, whether or not somebody looks."""
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def sample(self) -> None:
        await in_slices(self._journal.follow, [*self._journal.open_entries])
        self._journal.sample(self._admission.requests, self._admission.queued, kv_usage(self._view))
        self._note_workers(self._clock())

    async def look(self, alone: bool = False) -> dict[str, Any]:
        """Returns the state, ready for JSON. Times are in seconds; all values of `clock` come from one clock; `totals` only grow, unless a
        router leaves. `alone`: only what this router knows itself."""
        own = await self._look()
        if alone or not self._peers.others:
            return own
        answers = await self._peers.ask("Live", worker_pb2.LiveRequest(alone=True))
        return merge_looks(own, await in_slices(plain, answers, 1))

    async def find(self, request_id: str) -> dict[str, Any] | None:
        """Returns the record of a request that has ended, at whichever router."""
        if record := self._journal.find(request_id):
            return record.to_json()
        asked = worker_pb2.TraceRequest(request_id=request_id, alone=True)
        found = [plain(record) for answer in await self._peers.ask("Trace", asked) for record in answer.records]
        return found[0] if found else None

    async def ended(self, query: Query, alone: bool = False) -> tuple[list[tuple[float, dict[str, Any]]], int]:
        """Returns the records of requests that have ended, each with its place in the list, and how many match.

        `alone`: those of this router, from the list's beginning on. Otherwise those of all routers, without the ones to skip.
        """
        records = self._journal.last(self._journal.kept)
        chosen, matched = await asyncio.to_thread(choose, records, query)
        if alone:
            return await in_slices(lambda one: (one.place, one.record.to_json()), chosen), matched
        everything: list[tuple[float, Any]] = [(one.place, one.record) for one in chosen]
        if self._peers.others:
            asked = worker_pb2.TraceRequest(
                last=query.skip + query.limit, alone=True, sort=query.sort, ascending=query.ascending, failed=query.failed,
                slower_than=query.slower_than, outcome=query.outcome, worker=query.worker, tenant=query.tenant,
            )  # fmt: skip
            for answer in await self._peers.ask("Trace", asked):
                everything += zip(answer.places, answer.records, strict=False)
                matched += answer.matched
            everything.sort(key=lambda one: one[0])
        page = everything[query.skip : query.skip + query.limit]
        return await in_slices(lambda one: (one[0], one[1].to_json() if isinstance(one[1], Record) else plain(one[1])), page), matched

    async def points(self, since: int, alone: bool = False) -> list[Point]:
        """Returns the complete points of the curves from that number on. `alone`: only what happened at this router."""
        points = self._journal.drawn_since(since)
        if alone or not self._peers.others:
            return points
        for answer in await self._peers.ask("Curves", worker_pb2.CurvesRequest(since=since, alone=True)):
            points = [*points, *await in_slices(_to_point, answer.points)]
        return merge(points)

    async def draw(self, since: int) -> list[dict[str, Any]]:
        return await in_slices(draw, await self.points(since))

    async def plans(self) -> dict[str, Any]:
        """What planners have decided lately, whichever router is asked."""
        plans = await self._watch.plans()
        return {"registry": "away"} if plans is None else {"registry": "reachable", **plans.to_json()}

    async def _look(self) -> dict[str, Any]:
        now, journal, record = self._clock(), self._journal, self._describe()
        entries = [*journal.open_entries]
        at_workers: dict[str, Counter[str]] = {}
        totals = asdict(journal.totals)
        for entry in entries:
            lap, handoff = entry.trace.watch.laps[-1], entry.trace.handoff
            at_workers.setdefault(lap.worker, Counter())["bypass" if lap.bypass else lap.stage] += 1
            totals["output_tokens"] += entry.request.made if entry.request else 0
            totals["handoffs"] += bool(handoff.transport)
            totals["handoff_bytes"] += handoff.bytes
            totals["drafted_tokens"] += entry.trace.guesses.drafted
            totals["accepted_tokens"] += entry.trace.guesses.accepted
        workers, unlisted = await self._look_at_workers(now, at_workers)
        return {
            "clock": now,
            "model": record.model_name,
            "router": {
                "inflight": self._admission.requests,
                "queued": self._admission.queued,
                "degraded": journal.degradation.level,
                "alarm": journal.alarm,
                "registry": "reachable" if self._watch.registry_reachable else "away",
                "requests": dict(at_workers.get("", {})),
            },
            "workers": workers,
            "unlisted": unlisted,
            "requests": [_on_its_way(entry, now) for entry in entries[:MAX_REQUESTS]],
            "recent": [record.to_json() for record in journal.last(MAX_RECENT)],
            "errors": group(journal.last(ERRORS_AMONG))[:MAX_ERRORS],
            "totals": totals,
            "slo": {"objectives": journal.objectives, "attainment": journal.attainment},
            "routers": [asdict(router) for router in self._peers.together(record)],
        }

    async def _look_at_workers(self, now: float, at_workers: dict[str, Counter[str]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """The workers to list, and how many more there are of each pool. Those that need attention are always listed."""
        states = self._note_workers(now)
        lost = [name for name, (state, _) in states.items() if state in ("unreachable", "gone")]
        wanted = await self._ask_wanted(now) if lost else None
        members = Counter(record.pool for state, record in states.values() if state not in ("unreachable", "gone"))
        restarting = {pool for pool in ("prefill", "decode") if wanted is not None and members[pool] < getattr(wanted, pool)}
        shown: list[dict[str, Any]] = []
        listed, unlisted = Counter[str](), Counter[str]()
        for name in sorted(states, key=lambda name: (states[name][0] == "ready", states[name][1].pool != "prefill", name)):
            state, record = states[name]
            if listed[record.pool] >= MAX_WORKERS:
                unlisted[record.pool] += 1
                continue
            listed[record.pool] += 1
            silent = now - self._answered[name][1] if name in lost else 0.0
            comes_back = name in lost and record.pool in restarting
            shown.append(_worker(record, state, at_workers.get(name, Counter()), silent, comes_back))
        return sorted(shown, key=lambda worker: (worker["pool"] != "prefill", worker["name"])), dict(unlisted)

    def _note_workers(self, now: float) -> dict[str, tuple[str, WorkerRecord]]:
        """The state and the last record of each worker: of the members, and of those that have left lately without draining."""
        states: dict[str, tuple[str, WorkerRecord]] = {}
        for record in self._view.members.records():
            state = self._view.state(record.name)
            states[record.name] = state, record
            if state != "unreachable" or record.name not in self._answered:
                self._answered[record.name] = record, now
        for name in self._answered.keys() - states.keys():
            record, at = self._answered[name]
            if record.state == "draining" or now - at > GONE_S:
                del self._answered[name]
            else:
                states[name] = "gone", record
        return states

    async def _ask_wanted(self, now: float) -> Pools | None:
        if now - self._asked_at >= FRESH_S:
            self._asked_at = now
            self._wanted = await self._watch.wanted()
        return self._wanted


async def in_slices(make: Callable[[T], R], items: Iterable[T], at_once: int = AT_ONCE) -> list[R]:
    """`make` of each item. Others get a turn of the event loop after every `at_once` of them."""
    made: list[R] = []
    for number, item in enumerate(items, 1):
        made.append(make(item))
        if number % at_once == 0:
            await asyncio.sleep(0)
    return made


def merge_looks(own: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of the cluster from the states of its routers. They see the same workers, and each has its own requests there."""
    states = [own, *others]
    totals: dict[str, Any] = {}
    for name, total in own["totals"].items():
        add_up = _sum if isinstance(total, dict) else sum
        totals[name] = add_up(state["totals"][name] for state in states)
    counts = [sum(state["totals"]["outcomes"].values()) for state in states]
    shares = [state["slo"]["attainment"] for state in states]
    judged = [(share, count) for share, count in zip(shares, counts, strict=True) if share is not None]
    weight = sum(count for _, count in judged)
    there = [{worker["name"]: worker["requests"] for worker in state["workers"]} for state in states]
    return {
        **own,
        "router": {
            **own["router"],
            **{name: sum(state["router"][name] for state in states) for name in ("inflight", "queued")},
            "degraded": max(state["router"]["degraded"] for state in states),
            "alarm": next((state["router"]["alarm"] for state in states if state["router"]["alarm"]), ""),
            "requests": _sum(state["router"]["requests"] for state in states),
        },
        "workers": [{**one, "requests": _sum(requests.get(one["name"], {}) for requests in there)} for one in own["workers"]],
        "requests": _newest(states, "requests", "age", MAX_REQUESTS),
        "recent": _newest(states, "recent", "at", MAX_RECENT),
        "errors": _merge_errors([error for state in states for error in state["errors"]])[:MAX_ERRORS],
        "totals": totals,
        "slo": {**own["slo"], "attainment": sum(share * count for share, count in judged) / weight if weight else None},
    }


def group(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One line for each reason for which requests failed or were refused, the latest first. `records`: newest first."""
    found: dict[tuple[str, str], tuple[dict[str, Any], set[object]]] = {}
    for record in records:
        if record.outcome not in ("failed", "refused"):
            continue
        error, ids = found.setdefault((record.outcome, record.reason), (_error(record), set()))
        ids.add(record.request_id or id(record))  # one that was refused may have none; a record itself has no hash
        error["count"] += 1
        error["requests"] = len(ids)
    return [error for error, _ in found.values()]


def _merge_errors(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for error in sorted(errors, key=lambda error: error["at"], reverse=True):
        key = error["outcome"], error["reason"]
        known = found.get(key)
        found[key] = {**known, **{name: known[name] + error[name] for name in ("count", "requests")}} if known else error
    return list(found.values())


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(one) for one in counts), Counter()))


def _newest(states: list[dict[str, Any]], what: str, by: str, most: int) -> list[dict[str, Any]]:
    """The oldest of `requests`, as every router lists them; of what has ended, the newest."""
    return sorted((one for state in states for one in state[what]), key=lambda one: one[by], reverse=True)[:most]


def _worker(record: WorkerRecord, state: str, requests: Counter[str], silent: float, restarting: bool) -> dict[str, Any]:
    return {
        "name": record.name, "pool": record.pool, "state": state, "incarnation": record.incarnation, "kv_blocks": record.kv_blocks,
        "transport": record.transport, **asdict(record.load), "blocks_in_use": max(0, record.kv_blocks - record.load.free_blocks),
        "requests": dict(requests), "silent": silent, "restarting": restarting, "gpus": [asdict(gpu) for gpu in record.gpus],
        "tiers": [asdict(tier) for tier in record.tiers],
        "speculation": record.speculation[0] if record.speculation else "",
    }  # fmt: skip


def to_message(point: Point) -> worker_pb2.CurvePoint:
    return worker_pb2.CurvePoint(**{one.name: getattr(point, one.name) for one in fields(point)})


def _to_point(message: worker_pb2.CurvePoint) -> Point:
    values = plain(message)
    return Point(**{**values, **{name: Counter(values[name]) for name in ("outcomes", "ttft", "itl", "tpot", "missed")}})


def _on_its_way(entry: JournalEntry, now: float) -> dict[str, Any]:
    trace, request = entry.trace, entry.request
    lap = trace.watch.laps[-1]
    return {
        "request_id": request.id if request else entry.request_id,
        "stage": lap.stage,
        "worker": lap.worker,
        "prefill_worker": trace.prefill_worker,
        "decode_worker": trace.decode_worker,
        "prompt_tokens": request.prompt_len if request else 0,
        "output_tokens": request.output_len if request else 0,
        "cached_tokens": trace.cached_tokens,
        "retries": trace.retries,
        "age": now - trace.watch.start,
        "bypass": lap.bypass,
    }


def _error(record: Record) -> dict[str, Any]:
    failures = record.trace.failures
    return {
        "request_id": record.request_id,
        "at": record.at,
        "outcome": record.outcome,
        "reason": record.reason,
        "worker": failures[-1].worker if failures else "",
        "count": 0,
        "requests": 0,
    }
