"""A prefill worker, put together by hand."""

from baton.cluster.config import Config
from baton.cluster.lifecycle import Stop
from baton.v1 import worker_pb2_grpc
from baton.worker.host import Host
from kvtransfer.exporter import Exporter
from prefill_worker.door import KvExchangeDoor, PrefillDoor
from prefill_worker.worker import PrefillWorker


class PrefillProcess:
    """Implements `baton.cluster.lifecycle.Process`."""

    def __init__(self, config: Config, stop: Stop) -> None:
        self.config = config
        self.host = Host(config, "prefill", stop)
        self.worker = PrefillWorker(config.engine.block_size, self.host.tracer)

    async def start(self) -> None:
        host, worker = self.host, self.worker
        await host.open(worker.on_step)
        worker.loop = host.loop
        pool = host.built.engine.runner.pool
        worker.exporter = exporter = Exporter(
            worker=host.name,
            incarnation=host.incarnation,
            address=host.address,
            pool=pool,
            key=host.key,
            ttl_s=self.config.kv.lease_ttl_s,
            free=worker.free,
        )
        host.leases = lambda: exporter.num_leases
        host.book.read("baton_leases_held", host.leases)
        host.book.read("baton_leases_total", lambda: dict(exporter.events))
        server = host.server.grpc
        worker_pb2_grpc.add_PrefillServicer_to_server(PrefillDoor(worker, host.identity), server)  # type: ignore[no-untyped-call]
        worker_pb2_grpc.add_KvExchangeServicer_to_server(KvExchangeDoor(exporter, host.transport, pool.layout), server)  # type: ignore[no-untyped-call]
        host.tasks.start(exporter.run_reaper(self.config.kv.reap_interval_s), "lease reaper")
        await host.serve()

    async def drain(self) -> None:
        self.worker.draining = True
        await self.host.drain(lambda: self.worker.idle)

    async def close(self) -> None:
        await self.host.close()
