"""The current state of the cluster: the pools and their load, the requests in flight, and the outcome of the last ones.

It contains nothing of a prompt or an output.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from time import monotonic
from typing import Any

from baton.cluster.errors import BatonError
from baton.cluster.messages import plain
from baton.cluster.records import RouterRecord, WorkerRecord
from baton.v1 import worker_pb2
from router.admission import Admission
from router.clients import Workers
from router.journal import Entry, Journal, Record
from router.peers import Peers
from router.view import ClusterView
from router.watch import Watch

FRESH_S = 0.4  # the workers are asked at most this often, however many visitors there are
GONE_S = 60.0  # how long a worker that left without draining is still shown
MAX_REQUESTS = 64
MAX_RECENT = 12
MAX_ERRORS = 8
ERRORS_AMONG = 200  # last records


class Live:
    def __init__(
        self,
        view: ClusterView,
        workers: Workers,
        watch: Watch,
        admission: Admission,
        journal: Journal,
        peers: Peers,
        describe: Callable[[], RouterRecord],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`describe`: this router, as it is now."""
        self._view = view
        self._workers = workers
        self._watch = watch
        self._admission = admission
        self._journal = journal
        self._peers = peers
        self._describe = describe
        self._clock = clock
        self._lock = asyncio.Lock()
        self._looked_at = 0.0
        self._looked: list[dict[str, Any]] = []
        self._last: dict[str, tuple[dict[str, Any], float]] = {}  # worker → its last state, and when that was

    async def look(self, alone: bool = False) -> dict[str, Any]:
        """Returns the state, ready for JSON. Times are in seconds; all values of `clock` come from one clock; `totals` only grow, unless a
        router leaves. `alone`: only what this router knows itself."""
        own = await self._look()
        if alone or not self._peers.others:
            return own
        answers = await self._peers.ask("Live", worker_pb2.LiveRequest(alone=True))
        return merge(own, [plain(answer) for answer in answers])

    async def _look(self) -> dict[str, Any]:
        now, journal, record = self._clock(), self._journal, self._describe()
        requests = [_on_its_way(entry, now) for entry in journal.open_entries]
        totals = asdict(journal.totals)
        totals["output_tokens"] += sum(request["output_tokens"] for request in requests)
        handoffs = [entry.trace.handoff for entry in journal.open_entries]
        totals["handoffs"] += sum(bool(handoff.transport) for handoff in handoffs)
        totals["handoff_bytes"] += sum(handoff.bytes for handoff in handoffs)
        recent = [record.to_json() for record in journal.last(MAX_RECENT)]
        return {
            "clock": now,
            "model": record.model_name,
            "router": {
                "inflight": self._admission.inflight,
                "queued": self._admission.queued,
                "registry": "reachable" if self._watch.registry_reachable else "away",
            },
            "workers": await self._look_at_workers(),
            "requests": requests[:MAX_REQUESTS],
            "recent": recent,
            "errors": [_error(record) for record in journal.last(ERRORS_AMONG) if record.outcome in ("failed", "refused")][:MAX_ERRORS],
            "totals": totals,
            "slo": {"objectives": journal.objectives, "attainment": journal.attainment},
            "routers": [asdict(router) for router in self._peers.together(record)],
        }

    async def find(self, request_id: str) -> dict[str, Any] | None:
        """Returns the record of a request that has ended, at whichever router."""
        if record := self._journal.find(request_id):
            return record.to_json()
        asked = worker_pb2.TraceRequest(request_id=request_id, alone=True)
        found = [plain(record) for answer in await self._peers.ask("Trace", asked) for record in answer.records]
        return found[0] if found else None

    async def _look_at_workers(self) -> list[dict[str, Any]]:
        async with self._lock:
            if not self._looked or self._clock() - self._looked_at >= FRESH_S:
                self._looked = await self._ask_workers()
                self._looked_at = self._clock()
            return self._looked

    async def _ask_workers(self) -> list[dict[str, Any]]:
        members = self._view.members()
        seen = await asyncio.gather(*(self._ask(record) for record in members))
        now = self._clock()
        for worker in seen:
            self._last[worker["name"]] = worker, now
        for name, (worker, at) in list(self._last.items()):
            if now - at > GONE_S or (at < now and worker["state"] == "draining"):
                del self._last[name]
        gone = [{**worker, "state": "gone"} for worker, at in self._last.values() if at < now]
        return sorted([*seen, *gone], key=lambda worker: (worker["role"] != "prefill", worker["name"]))

    async def _ask(self, record: WorkerRecord) -> dict[str, Any]:
        state: str = record.state
        try:
            record, residue = await self._workers.describe(record)
            state = record.state
            if state == "ready" and record.name in self._view.unfit:
                state = "unfit"
            elif state == "ready" and self._view.hung(record.name):
                state = "hung"  # its event loop answers, its engine does not
        except (BatonError, ValueError):
            residue, state = {}, "unreachable"
        return {
            "name": record.name, "role": record.role, "state": state, "incarnation": record.incarnation, "kv_blocks": record.kv_blocks,
            "transport": record.transport, **asdict(record.load), "blocks_in_use": residue.get("blocks_in_use", 0),
        }  # fmt: skip


def merge(own: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of the cluster from the states of its routers. The workers are the same for all."""
    states = [own, *others]
    totals: dict[str, Any] = {name: sum(state["totals"][name] for state in states) for name in own["totals"] if name != "outcomes"}
    totals["outcomes"] = dict(sum((Counter(state["totals"]["outcomes"]) for state in states), Counter()))
    counts = [sum(state["totals"]["outcomes"].values()) for state in states]
    shares = [state["slo"]["attainment"] for state in states]
    judged = [(share, count) for share, count in zip(shares, counts, strict=True) if share is not None]
    weight = sum(count for _, count in judged)
    return {
        **own,
        "router": {**own["router"], **{name: sum(state["router"][name] for state in states) for name in ("inflight", "queued")}},
        "requests": _newest(states, "requests", "age", MAX_REQUESTS),
        "recent": _newest(states, "recent", "at", MAX_RECENT),
        "errors": _newest(states, "errors", "at", MAX_ERRORS),
        "totals": totals,
        "slo": {**own["slo"], "attainment": sum(share * count for share, count in judged) / weight if weight else None},
    }


def _newest(states: list[dict[str, Any]], what: str, by: str, most: int) -> list[dict[str, Any]]:
    """Of `requests`, the oldest, as every router lists them; of what has ended, the newest."""
    return sorted((one for state in states for one in state[what]), key=lambda one: one[by], reverse=True)[:most]


def _on_its_way(entry: Entry, now: float) -> dict[str, Any]:
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
    }


def _error(record: Record) -> dict[str, Any]:
    failures = record.trace.failures
    return {
        "request_id": record.request_id,
        "at": record.at,
        "outcome": record.outcome,
        "reason": record.reason,
        "worker": failures[-1].worker if failures else "",
    }
