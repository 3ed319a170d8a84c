"""The gRPC door of a house over a real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from http_door import House, settled

from baton.cluster.config import Config
from baton.cluster.rpc import Server
from baton.v1 import generation_pb2_grpc
from router.door import GenerationDoor

SMALL_WINDOW = [("grpc.http2.bdp_probe", 0)]  # 64 KiB; otherwise it grows to megabytes, which take long to fill


@asynccontextmanager
async def serving(house: House, stall_s: float | None) -> AsyncIterator[generation_pb2_grpc.GenerationStub]:
    server = Server(Config(), 1 << 20, stall_s)
    generation_pb2_grpc.add_GenerationServicer_to_server(GenerationDoor(house.service, house.keys), server.grpc)
    address = server.bind(0)
    await server.start()
    async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as opened:
        yield generation_pb2_grpc.GenerationStub(opened)
    await server.stop(None)
    await settled(lambda: house.service.idle)
    house.check()
