"""Every call to a worker says for whom it is. Another process may have taken the worker's port, and must neither answer nor do anything.

These calls go through real gRPC to a real worker. A session says it in each command that starts a call (`test_door.py`).
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from toy_worker import toy_worker

from baton.cluster import log_file
from baton.cluster.errors import Reason
from baton.cluster.lifecycle import Stop
from baton.cluster.rpc import NO_PROXY, to_error
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.worker.process import WorkerProcess

CALLS: dict[str, Any] = {
    "Worker.Probe": worker_pb2.ProbeRequest(),
    "Worker.Snapshot": worker_pb2.SnapshotRequest(),
    "Worker.Describe": worker_pb2.DescribeRequest(),
    "Worker.Logs": worker_pb2.LogsRequest(lines=1),
    "Worker.Record": worker_pb2.RecordRequest(secret=bytes(32)),
    "Worker.SetRoles": worker_pb2.SetRolesRequest(roles=["decode"]),
    "Worker.Hint": worker_pb2.HintRequest(keys=bytes(16), within_ms=100),
}
WRONG: dict[str, dict[str, Any]] = {
    "worker": {"worker": "another"},
    "incarnation": {"incarnation": 5},
    "model_fingerprint": {"model_fingerprint": "another"},
}


@asynccontextmanager
async def worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerProcess]:
    (folder / "log").write_text("a line\n")
    monkeypatch.setenv(log_file.VARIABLE, str(folder / "log"))
    process = toy_worker(folder, Stop())
    try:
        await process.start()
        yield process
    finally:
        await process.close()


def addressee(process: WorkerProcess, **change: Any) -> worker_pb2.Addressee:
    me = process.host.identity
    fields = {"worker": me.worker, "incarnation": me.incarnation, "model_fingerprint": me.model_fingerprint}
    return worker_pb2.Addressee(**{**fields, **change})


async def answers(process: WorkerProcess, name: str, to: worker_pb2.Addressee | None) -> list[Any]:
    """Raises grpc.RpcError."""
    service, _, method = name.partition(".")
    request = type(CALLS[name])()
    request.CopyFrom(CALLS[name])
    if to is not None:
        request.to.CopyFrom(to)
    async with grpc.aio.insecure_channel(process.host.address, options=[NO_PROXY]) as channel:
        call = getattr(getattr(worker_pb2_grpc, f"{service}Stub")(channel), method)(request, timeout=30)
        return [message async for message in call] if hasattr(call, "__aiter__") else [await call]


async def refusal(process: WorkerProcess, name: str, to: worker_pb2.Addressee | None) -> tuple[Reason, dict[str, str]]:
    with pytest.raises(grpc.RpcError) as caught:
        await answers(process, name, to)
    error = to_error(caught.value)
    return error.reason, error.metadata


def test_every_call_to_a_worker_is_tried_here() -> None:
    services = worker_pb2.DESCRIPTOR.services_by_name
    tried = {*CALLS, "Prefill.Session", "Decode.Session"}
    assert tried == {f"{service}.{method.name}" for service in ("Prefill", "Decode", "Worker") for method in services[service].methods}


@pytest.mark.parametrize("name", CALLS)
async def test_a_worker_refuses_a_call_meant_for_another_and_names_the_field(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(tmp_path, monkeypatch) as process:
        for field, change in WRONG.items():
            assert await refusal(process, name, addressee(process, **change)) == (Reason.WRONG_WORKER, {"field": field})
        assert await refusal(process, name, None) == (Reason.WRONG_WORKER, {"field": "worker"})
        computed = await process.host.engine.call(lambda engine: engine.counts.computed_tokens)  # type: ignore[attr-defined]
        assert computed == 0 and process.host.mounts.serving == ("prefill",)


@pytest.mark.parametrize("name", CALLS)
async def test_a_worker_answers_a_call_meant_for_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    async with worker(tmp_path, monkeypatch) as process:
        assert await answers(process, name, addressee(process))
