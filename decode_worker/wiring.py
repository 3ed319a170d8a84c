"""A decode worker, put together by hand."""

from collections.abc import Sequence

from baton.cluster.config import Config
from baton.cluster.lifecycle import Stop
from baton.v1 import worker_pb2_grpc
from baton.worker.host import Host
from decode_worker.clients import Peers
from decode_worker.door import DecodeDoor
from decode_worker.worker import DecodeWorker
from kvtransfer.importer import Importer


class DecodeProcess:
    """Implements `baton.cluster.lifecycle.Process`."""

    def __init__(self, config: Config, stop: Stop) -> None:
        self.config = config
        self.host = Host(config, "decode", stop)
        self.worker = DecodeWorker(self.host.name, config.engine.block_size, config.kv.on_failure, self.host.book, self.host.tracer)

    async def start(self) -> None:
        host, worker = self.host, self.worker
        await host.open(worker.on_step)
        worker.loop = host.loop
        peers = Peers(host.name, host.incarnation, self.config.security)
        worker.importer = importer = Importer(
            transport=host.transport,
            pool=host.built.engine.runner.pool,
            key=host.key,
            connect=peers.connect,
            free=self._free,
            read_timeout_s=self.config.kv.read_timeout_s,
        )
        host.on_close(peers.close)
        host.on_close(importer.close)
        host.quarantined = lambda: importer.quarantined_blocks
        host.book.read("baton_kv_quarantined_blocks", host.quarantined)
        worker_pb2_grpc.add_DecodeServicer_to_server(DecodeDoor(worker, host.identity), host.server.grpc)  # type: ignore[no-untyped-call]
        await host.serve()

    async def drain(self) -> None:
        self.worker.draining = True
        await self.host.drain(lambda: self.worker.idle)

    async def close(self) -> None:
        await self.host.close()

    async def _free(self, blocks: Sequence[int]) -> None:
        await self.host.loop.call(lambda engine: engine.release(blocks))
