"""A worker with the prefill role, put together by hand."""

from baton.cluster.config import Config
from baton.cluster.lifecycle import Stop
from baton.v1 import worker_pb2_grpc
from baton.worker.host import Host
from prefill_worker.door import PrefillDoor
from prefill_worker.worker import PrefillWorker


class PrefillProcess:
    """Implements `baton.cluster.lifecycle.Process`."""

    def __init__(self, config: Config, stop: Stop) -> None:
        self.config = config
        self.host = Host(config, "prefill", stop)
        self.worker = PrefillWorker(config.engine.block_size, self.host.tracer, live=config.kv.live)

    async def start(self) -> None:
        host, worker = self.host, self.worker
        await host.open(worker.on_step)
        worker.loop, worker.port = host.loop, host.port
        door = PrefillDoor(worker, host.identity)
        worker_pb2_grpc.add_PrefillServicer_to_server(door, host.server.grpc)  # type: ignore[no-untyped-call]
        await host.serve()

    async def drain(self) -> None:
        self.worker.draining = True
        await self.host.drain(lambda: self.worker.idle)

    async def close(self) -> None:
        await self.host.close()
