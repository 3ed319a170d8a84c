"""Answers of the router's admin port as plain values, which commands draw or print as JSON."""

from typing import Any

from baton.cluster.messages import plain
from baton.v1 import worker_pb2


def read_status(answer: worker_pb2.StatusResponse) -> dict[str, Any]:
    """A worker is one flat object: its record and what it holds, or `error` if it does not answer, or both if it does not fit."""
    told = plain(answer)
    return {**told, "endpoints": dict(sorted(told["endpoints"].items())), "workers": [_worker(worker) for worker in answer.workers]}


def read_live(answer: worker_pb2.LiveResponse) -> dict[str, Any]:
    return plain(answer)


def read_records(answer: worker_pb2.TraceResponse) -> list[dict[str, Any]]:
    """Newest first."""
    return [plain(record) for record in answer.records]


def _worker(worker: worker_pb2.WorkerStatus) -> dict[str, Any]:
    holds = plain(worker.residue) if worker.HasField("residue") else {}
    return {**plain(worker.record), **holds, **({"error": worker.error} if worker.error else {})}
