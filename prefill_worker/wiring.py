"""Assembles the prefill role for the worker that mounts it."""

from baton.v1 import worker_pb2_grpc
from baton.worker.host import Host
from prefill_worker.door import PrefillDoor
from prefill_worker.worker import PrefillWorker


def make(host: Host) -> PrefillWorker:
    """Called before the engine exists."""
    worker = PrefillWorker(host.tracer, live=host.config.kv.live)
    worker.admit = lambda: host.mounts.admit("prefill")
    return worker


def serve(worker: PrefillWorker, host: Host) -> None:
    """Called when the engine and the KV port are open and the server does not listen yet."""
    worker.engine, worker.port = host.engine, host.port
    worker_pb2_grpc.add_PrefillServicer_to_server(PrefillDoor(worker, host.identity, host.prompts), host.server.grpc)
