"""Assembles the decode role for the worker that mounts it."""

from baton.v1 import worker_pb2_grpc
from baton.worker.host import Host
from decode_worker.door import DecodeDoor
from decode_worker.worker import DecodeWorker


def make(host: Host) -> DecodeWorker:
    """Called before the engine exists."""
    worker = DecodeWorker(host.name, host.config.kv.on_failure, host.book, host.tracer)
    worker.admit = lambda: host.mounts.admit("decode")
    return worker


def serve(worker: DecodeWorker, host: Host) -> None:
    """Called when the engine and the KV port are open and the server does not listen yet."""
    worker.engine, worker.port = host.engine, host.port
    worker_pb2_grpc.add_DecodeServicer_to_server(DecodeDoor(worker, host.identity), host.server.grpc)
