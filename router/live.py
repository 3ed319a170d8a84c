"""The current state of the cluster: the pools and their load, the requests in flight, and the outcome of the last ones.

It contains nothing of a prompt or an output.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from time import monotonic
from typing import Any

from baton.cluster.errors import BatonError
from baton.cluster.records import WorkerRecord
from router.admission import Admission
from router.clients import Workers
from router.journal import Entry, Journal, Record
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
        model_name: str,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._view = view
        self._workers = workers
        self._watch = watch
        self._admission = admission
        self._journal = journal
        self._model_name = model_name
        self._clock = clock
        self._lock = asyncio.Lock()
        self._looked_at = 0.0
        self._looked: list[dict[str, Any]] = []
        self._last: dict[str, tuple[dict[str, Any], float]] = {}  # worker → its last state, and when that was

    async def look(self) -> dict[str, Any]:
        """Returns the state, ready for JSON. Times are in seconds; all values of `clock` come from one clock; `totals` only grow."""
        now, journal = self._clock(), self._journal
        requests = [_on_its_way(entry, now) for entry in journal.open_entries]
        totals = asdict(journal.totals)
        totals["output_tokens"] += sum(request["output_tokens"] for request in requests)
        handoffs = [entry.trace.handoff for entry in journal.open_entries]
        totals["handoffs"] += sum(bool(handoff.transport) for handoff in handoffs)
        totals["handoff_bytes"] += sum(handoff.bytes for handoff in handoffs)
        recent = [record.to_json() for record in journal.last(MAX_RECENT)]
        return {
            "clock": now,
            "model": self._model_name,
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
        }

    def find(self, request_id: str) -> dict[str, Any] | None:
        """Returns the record of a request that has ended."""
        record = self._journal.find(request_id)
        return record.to_json() if record else None

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
