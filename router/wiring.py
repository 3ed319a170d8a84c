"""The router, put together by hand."""

import asyncio
import logging
import secrets
import time
from pathlib import Path

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from baton.v1 import generation_pb2, generation_pb2_grpc, worker_pb2_grpc
from cluster.config import Config, ConfigError
from cluster.connect import connect_registry
from cluster.lifecycle import Stage, Stop, move
from cluster.rpc import Server, Tasks
from router.admin import AdminDoor
from router.admission import Admission
from router.clients import Workers
from router.dispatch import Dispatcher
from router.door import GenerationDoor
from router.service import GenerateService
from router.tokenizer import Tokenizer
from router.view import ClusterView
from router.watch import Watch

log = logging.getLogger(__name__)
SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
HEALTH_EVERY_S = 0.1
IDLE_POLL_S = 0.02


class RouterProcess:
    """Implements `cluster.lifecycle.Process`. Healthy is a router that could serve a request now: one decode worker at least."""

    def __init__(self, config: Config, stop: Stop) -> None:
        if not config.model.path:
            raise ConfigError("model.path: no model is given (BATON_MODEL_PATH)")
        self.config = config
        self.stage = Stage.STARTING
        self._registry = connect_registry(config)
        self._tasks = Tasks(stop.fail)
        self._workers = Workers(config.security)
        self._servers: list[Server] = []

    async def start(self) -> None:
        config = self.config
        public, admin = self._servers = [Server(config, config.router.max_message_bytes) for _ in range(2)]
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(config.model.path))
        self._view = view = ClusterView(tokenizer.fingerprint)
        watch = Watch(view, self._registry, self._workers)
        admission = Admission(config.router.max_inflight, config.router.max_queue)
        model_name = config.model.served_name or Path(config.model.path).name
        self.service = GenerateService(
            tokenizer=tokenizer,
            model_name=model_name,
            view=view,
            dispatcher=Dispatcher(view, self._workers, config.router, max_queue=config.engine.max_queue),
            admission=admission,
            config=config.router,
            draw_seed=lambda: secrets.randbits(63),
            draw_id=lambda: f"req-{secrets.token_hex(8)}",
        )
        generation_pb2_grpc.add_GenerationServicer_to_server(GenerationDoor(self.service), public.grpc)  # type: ignore[no-untyped-call]
        if config.router.reflection:
            reflection.enable_server_reflection((SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), public.grpc)
        self.address = public.bind(config.router.port)
        admin_address = admin.bind(config.router.admin_port)
        endpoints = {"grpc": self.address, "admin": admin_address}
        door = AdminDoor(view, self._workers, watch, admission, model_name, lambda: endpoints)
        worker_pb2_grpc.add_AdminServicer_to_server(door, admin.grpc)  # type: ignore[no-untyped-call]
        await public.start()
        await admin.start()
        self._tasks.start(watch.run(), "watch")
        self._tasks.start(self._run_health(), "health")
        self.stage = move(self.stage, "ready")
        log.info("router ready on %s (admin %s), model %s", self.address, admin_address, model_name)

    async def drain(self) -> None:
        self.stage = move(self.stage, "drain")
        self.service.draining = True
        await self._set_health(False)
        deadline = time.monotonic() + self.config.decode.drain_s
        while not self.service.idle and time.monotonic() < deadline:
            await asyncio.sleep(IDLE_POLL_S)

    async def close(self) -> None:
        self.stage = move(self.stage, "close")
        await self._tasks.close()
        for server in self._servers:
            await server.stop(0.5)
        await self._workers.close()
        await self._registry.close()

    async def _run_health(self) -> None:
        while True:
            if self.stage is Stage.READY:
                await self._set_health(bool(self._view.decode_workers()))
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._servers[0].health.set(name, status)
