"""An engine and its place in the cluster: what a worker is before it has a role.

open      load the model, start the engine's thread, open the transport
serve     listen, answer health and `Worker`, join the registry
drain     announce it, refuse new work, wait until the roles are idle
close     in reverse
"""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2

from baton.clock import loop_time
from baton.cluster import pulse
from baton.cluster.address import advertised
from baton.cluster.config import Config, ConfigError, PoolConfig
from baton.cluster.connect import connect_registry
from baton.cluster.device import choose
from baton.cluster.errors import BatonError, Reason
from baton.cluster.failpoint import failpoint
from baton.cluster.gpu_watch import GpuWatch
from baton.cluster.guard import Guard
from baton.cluster.health import HealthServer
from baton.cluster.lifecycle import Stage, Stop, move
from baton.cluster.membership import Membership, draw_incarnation, lasting_name, process_name
from baton.cluster.metrics import Book
from baton.cluster.metrics_http import Exposition, MetricsServer
from baton.cluster.records import BlockEvent, Load, RoleName, WorkerRecord, WorkerState
from baton.cluster.rpc import Server, Tasks
from baton.cluster.tracing import make_tracer
from baton.engine.core.contract import CacheEvent, EngineLoad, Listener, ServingEngine
from baton.engine.core.engine import Engine, Output
from baton.engine.machine import quota_cores, usable_cores
from baton.engine.options import Options
from baton.engine.start import start_engine
from baton.recorder.recorder import Recorder, digest_of
from baton.v1 import worker_pb2_grpc
from baton.worker import taped
from baton.worker.agreement import Agreement
from baton.worker.colder import make_tiers, records
from baton.worker.door import Probed, Residue, WorkerDoor
from baton.worker.identity import WorkerIdentity
from baton.worker.kv_door import KvExchangeDoor
from baton.worker.kv_peers import KvPeers
from baton.worker.kv_port import KvPlace, KvPort
from baton.worker.kv_tls import kv_tls
from baton.worker.meter import Meter
from baton.worker.prompts import Prompts
from baton.worker.role import Mounts, Role
from baton.worker.stall import Activity, Stall
from baton.worker.starting import Starting
from kvtransfer.handle import mac_key
from kvtransfer.importer import peer_name
from kvtransfer.select import Tcp, make_transport
from kvtransfer.transport import Transport
from kvtransfer.ucx import Ucx

if TYPE_CHECKING:
    from baton.worker.kv_events import KvEventPublisher

log = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 64 << 20
IDLE_POLL_S = 0.02
# Between two operations, OpenMP threads spin, because the next one begins immediately. If there are more threads than cores, spinning
# threads keep working threads off the cores: two workers that shared two cores kept only 7 % of their throughput.
SLEEP_SOON = ("GOMP_SPINCOUNT", "1000")
LOOK_S = 0.3  # a step of a large model may take seconds; a reader of the worker's state does not wait for it
HUNG_S = 60.0  # no step takes this long


class Host:
    engine: ServingEngine
    transport: Transport
    port: KvPort
    server: Server
    address: str

    def __init__(self, config: Config, pool: RoleName, stop: Stop) -> None:
        """`pool`: the one that the worker belongs to, and the role that it serves at its start. `WorkerProcess` sets `roles`."""
        if not config.cluster.key:
            raise ConfigError("cluster.key: every worker needs the cluster's key (BATON_CLUSTER_KEY); `baton up` generates one")
        if not config.model.path:
            raise ConfigError("model.path: no model is given (BATON_MODEL_PATH)")
        self.config = config
        self.pool = pool
        self.pool_config: PoolConfig = getattr(config, pool)
        self.name = process_name(pool)
        # Microseconds since the epoch: grows with every restart, on any host whose clock is not set back.
        self.incarnation = draw_incarnation()
        self.key = mac_key(config.cluster.key)
        self.stage = Stage.STARTING
        self.mounts = Mounts(self.name, pool, proven=not config.cluster.prove_workers)
        self._unproved = ""  # why the last proof failed
        self.prompts = Prompts()
        self.roles: Mapping[RoleName, Role] = {}
        self._stop = stop
        self._registry = connect_registry(config)
        self._membership = Membership(self._registry, self.describe, config.redis.heartbeat_s, stop.fail)
        self.model_name = config.model.served_name or Path(config.model.path).name
        self.tracer = make_tracer(config.telemetry, config.cluster.name, pool, self.name)
        self.book = Book(pool, self.name, self.model_name)
        self._meter = Meter(self.book, self._membership, self.tracer)
        self._metrics = MetricsServer(config, Exposition(self.book, self.look), lambda: self.stage is Stage.READY, Guard(config))
        self._publisher: KvEventPublisher | None = None
        self._closers = AsyncExitStack()  # all of them run, in reverse order, even if one fails
        self._closers.push_async_callback(self._registry.close)
        self._closers.push_async_callback(asyncio.to_thread, self.tracer.close)
        self._gpus = GpuWatch()
        self._stall = Stall(HUNG_S)
        self._held = 0  # leases, as of the last look: without a new look the load stays equal, so readers see that it is not news
        self.tasks = Tasks(stop.fail)
        self.recorder = Recorder(config, self.name, pool, digest_of(taped.MODULES))
        stop.witness = self.recorder.dump

    async def open(self) -> None:
        """Raises the error that keeps the engine or the transport from starting."""
        began = loop_time()
        if (port := self.config.telemetry.health_port) is not None:  # first: it answers while the model is loaded
            health = HealthServer(self.config, lambda: self.stage, stalled_s=self.stalled_s, waits_for=self._waits_for)
            self._closers.push_async_callback(health.close)
            await health.start(port)
        if self.config.telemetry.metrics and self.config.engine.device != "cpu":
            self._meter.watch(self._gpus)
            self._closers.callback(self._gpus.stop)
            self._gpus.start()
        self._starting = starting = Starting(self.name, self.pool, self.incarnation, self._registry, self.config.redis.heartbeat_s)
        self.tasks.start(starting.run(), "starting")
        self._closers.push_async_callback(starting.leave)
        if not fits(self.config, self.pool, usable_cores()):
            os.environ.setdefault(*SLEEP_SOON)  # read when torch is loaded, which is now
        listener = Listener(self._on_step, self._on_cache, self._stop.fail, self._on_batch)
        given = await asyncio.to_thread(options, self.config, self.pool_config.gpus)  # it asks a driver
        self._tiers = tiers = make_tiers(self.config.tiers, lasting_name(self.pool))
        self.recorder.refused = f"its engine is {given.engine.kind}"  # unless it is ours
        agreement = Agreement(self._registry, self.config.redis.heartbeat_s)
        self.engine = engine = await start_engine(given, listener, starting.tell, tiers, self._follow, agreement.ask)
        self.tasks.start(agreement.uphold(), "agreement")
        self._closers.push_async_callback(engine.close)
        if tiers is not None:
            self._closers.push_async_callback(asyncio.to_thread, tiers.close)
            self._meter.tell_tiers(tiers)
        self._facts = await engine.look()
        self._meter.tell(lambda: self._facts, engine.traits.num_blocks, engine.pool.layout.block_size)
        config, pool = self.config, engine.pool
        self.transport = await asyncio.to_thread(
            make_transport,
            config.kv.transport,
            peer=peer_name(self.name, self.incarnation),
            pool=pool,
            host=config.cluster.host,
            key=self.key,
            advertise=advertised(config),
            tcp=Tcp(config.kv.port, kv_tls(config.security)),
            ucx=Ucx(config.kv.ucx_tls, config.kv.ucx_net_devices, config.kv.ucx_port_range),
        )
        self._closers.push_async_callback(asyncio.to_thread, self.transport.close)
        self.server = Server(config, MAX_MESSAGE_BYTES)
        self.address = self.server.bind(self.pool_config.port)
        self._open_port()
        self._open_events()
        took, mib = loop_time() - began, pool.nbytes / 2**20
        longest = engine.traits.max_model_len
        log.info("%s in %.1f s: %d blocks (%.0f MiB), longest sequence %d", config.model.path, took, pool.num_blocks, mib, longest)
        if not self.engine.traits.eos_token_ids:
            log.warning("no file of %s names an end token: outputs end at max_tokens, a stop token or a stop string", config.model.path)

    def _follow(self, engine: Engine) -> None:
        """Records what the engine decides from now on."""
        recorder = self.recorder
        recorder.refused = taped.unrecorded(engine)
        if recorder.on and not recorder.refused:
            recorder.sources.append(taped.EngineTape(recorder.span_s, recorder.most_bytes, engine).source)

    def _open_port(self) -> None:
        peers = KvPeers(self.name, self.incarnation, self.config.security)
        place = KvPlace(self.name, self.incarnation, self.address)
        self.port = port = KvPort(place, self.engine, self.transport, self.key, self.config.kv, peers.connect)
        self._closers.push_async_callback(peers.close)
        self._closers.push_async_callback(port.close)
        worker_pb2_grpc.add_KvExchangeServicer_to_server(KvExchangeDoor(port), self.server.grpc)
        self.tasks.start(port.exporter.run_reaper(self.config.kv.reap_interval_s), "lease reaper")
        self.book.read("baton_leases_held", lambda: port.exporter.num_leases)
        self.book.read("baton_leases_total", lambda: dict(port.exporter.events))
        self.book.read("baton_kv_quarantined_blocks", lambda: port.importer.quarantined_blocks)
        self.book.read("baton_kv_link_rate_bytes", port.importer.probed)

    async def serve(self) -> None:
        """Called when the roles have added their services to `server.grpc`."""
        says = self.probe, self.describe, self.engine.snapshot, self.residue, self.set_roles, self._bring
        door = WorkerDoor(self.identity, *says, self.recorder)
        worker_pb2_grpc.add_WorkerServicer_to_server(door, self.server.grpc)
        await self.server.start()
        self._closers.push_async_callback(self.server.stop, 0.5)
        if self.config.telemetry.metrics:
            self._closers.push_async_callback(self._metrics.close)
            await self._metrics.start(self.config.telemetry.worker_metrics_port)
        await self.server.health.set("", health_pb2.HealthCheckResponse.SERVING)
        self.stage = move(self.stage, "ready")
        self.tasks.start(self._membership.run(), "membership")
        self.tasks.start(pulse.beat(self.stalled_s), "pulse")
        await self._starting.leave()
        log.info("%s (incarnation %d) ready on %s, transport %s", self.name, self.incarnation, self.address, self.transport.name)

    async def set_roles(self, wanted: Sequence[str], prove: bool = False, why: str = "") -> Mounts:
        """Serves these roles from now on. The others drain and are unmounted when all their work has ended. `prove`: accepts work of these
        roles without serving them; nothing drains. `why`: the last proof failed. Raises BatonError(INVALID_FIELD, DRAINING)."""
        self.mounts.wish(wanted, prove)
        self._unproved = why if prove else ""
        self._membership.beat()
        if why:
            log.warning("not admitted to %s: %s", ", ".join(self.mounts.proving), why)
        else:
            log.info("now serving %s", ", ".join(self.mounts.serving) or "nobody: it has to prove itself")
        for name in self.mounts.draining:
            self.tasks.start(self._unmount(name), f"unmount {name}")
        return self.mounts

    def _waits_for(self) -> str:
        """What keeps it from taking requests; empty: nothing."""
        if self.mounts.serving or not self.mounts.proving:
            return ""
        return f"it has not proved itself{': ' if self._unproved else ' yet'}{self._unproved}"

    async def _unmount(self, name: RoleName) -> None:
        while name in self.mounts.draining and not self.roles[name].idle:
            await asyncio.sleep(IDLE_POLL_S)
        if name in self.mounts.draining:  # not mounted again in the meantime
            self.mounts.ended(name)

    async def drain(self) -> None:
        """Announces it, then waits until the roles are idle, `drain_s` at most."""
        self.stage, self.mounts.stopping = move(self.stage, "drain"), True
        await self.server.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        self._membership.beat()
        deadline = loop_time() + self.pool_config.drain_s
        while not all(role.idle for role in self.roles.values()) and loop_time() < deadline:
            await asyncio.sleep(IDLE_POLL_S)

    async def close(self) -> None:
        self.stage = move(self.stage, "close")
        self._closers.push_async_callback(self._membership.leave)
        self._closers.push_async_callback(self.tasks.close)
        await self._closers.aclose()

    async def look(self) -> EngineLoad:
        """Returns the engine's load, or the last known one during a long step. Raises BatonError(INTERNAL) if the engine hangs."""
        try:
            async with asyncio.timeout(LOOK_S):
                self._facts, self._held = await self.engine.look(), self.port.exporter.num_leases
        except TimeoutError:
            if self.stalled_s() > HUNG_S:
                raise BatonError(Reason.INTERNAL, f"the engine has made no progress for {HUNG_S:g} s") from None
        return self._facts

    def stalled_s(self) -> float:
        """Returns for how long the engine has made no progress although it has work."""
        if self.stage is Stage.STARTING:
            return 0.0
        return self._stall.look(loop_time(), Activity(*self.engine.activity()))

    async def _bring(self, keys: Sequence[bytes], wait_s: float) -> int:
        """Brings KV for a hint. A worker that drains gets no new requests."""
        return 0 if self.stage is not Stage.READY else await self.engine.bring(keys, wait_s, hint=True)

    async def probe(self, asker: str) -> Probed:
        now = await self.look()
        return Probed(self._state, self._load(now), self.mounts.serving, self.stalled_s(), self.prompts.besides(asker))

    async def describe(self) -> WorkerRecord:
        now = await self.look()
        traits = self.engine.traits
        return WorkerRecord(
            name=self.name,
            pool=self.pool,
            address=self.address,
            incarnation=self.incarnation,
            state=self._state,
            pid=os.getpid(),
            host=socket.gethostname(),
            model_name=self.model_name,
            model_fingerprint=traits.model_fingerprint,
            tokenizer_fingerprint=traits.tokenizer_fingerprint,
            block_size=self.engine.pool.layout.block_size,
            max_model_len=traits.max_model_len,
            kv_blocks=traits.num_blocks,
            transport=self._transport,
            load=self._load(now),
            metrics=self._metrics.address,
            roles=self.mounts.serving,
            max_num_seqs=traits.max_num_seqs,
            eos_token_ids=tuple(sorted(traits.eos_token_ids)),
            gpus=self._gpus.records(),
            lends=traits.lends,
            brings=traits.brings,
            tiers=records(self._tiers),
            speculation=traits.offer.methods,
            speculation_tokens=traits.offer.max_tokens,
            forks=True,
            matrices=traits.matrices,
            proving=self.mounts.proving,
            unproved=self._unproved,
        )

    @property
    def _transport(self) -> str:
        """Its name, what carries KV here, and between GPUs how quickly."""
        probed, routes = self.port.importer.probed(), self.port.importer.routes()
        rates = {carrier: f" {rate / 1e9:.3g} GB/s" for carrier, rate in probed.items()}
        told = {route.label + rates.get(route.carrier, "") for route in routes}
        return ", ".join(dict.fromkeys([self.transport.name, *sorted(told)]))

    @property
    def _state(self) -> WorkerState:
        return "ready" if self.stage in (Stage.STARTING, Stage.READY) else "draining"

    def _load(self, now: EngineLoad) -> Load:
        return Load(
            running=now.running,
            waiting=now.waiting,
            free_blocks=now.free_blocks,
            credit_tokens=now.credit_tokens,
            cached_blocks=now.cached_blocks,
            leases=self._held,
            waiting_tokens=now.waiting_tokens,
        )

    @property
    def identity(self) -> WorkerIdentity:
        """Known once the model is loaded."""
        return WorkerIdentity(self.name, self.incarnation, self.engine.traits.model_fingerprint)

    def residue(self) -> Residue:
        """What the last look saw."""
        now = self._facts
        return Residue(now.sequences, self.port.exporter.num_leases, self.port.importer.quarantined_blocks, now.owned_blocks)

    def _on_step(self, outputs: list[Output]) -> None:
        for role in self.roles.values():
            role.on_step(outputs)

    def _on_batch(self, seconds: float, tokens: int, sequences: int) -> None:
        """Called in the engine's thread."""
        failpoint("engine.step")
        self._meter.batch(seconds, tokens, sequences)

    def _open_events(self) -> None:
        """Raises ConfigError for an address that cannot be bound, or without the packages."""
        kv = self.config.kv
        if kv.events is None:
            return
        try:
            from baton.worker.kv_events import KvEventPublisher  # with the extra `events`
        except ModuleNotFoundError as error:
            raise ConfigError(f"kv.events: {error.name} is not installed: pip install 'baton-llm[events]'") from None
        topic, size = f"kv@{self.name}@{self.model_name}", self.engine.pool.layout.block_size
        self._publisher = publisher = KvEventPublisher(kv.events, kv.events_replay, topic, size)
        self._closers.push_async_callback(asyncio.to_thread, publisher.close)

    def _on_cache(self, events: list[CacheEvent]) -> None:
        if self._publisher is not None:
            self._publisher.publish(events)
        self._membership.announce(
            [BlockEvent(self.name, self.incarnation, event.sequence, event.kind, event.keys, event.medium) for event in events]
        )


def fits(config: Config, role: RoleName, cores: int) -> bool:
    """Whether there is a core for each thread of all workers that may compute here. Workers on other hosts count as if they were here."""
    if getattr(config, role).cores is not None:
        return True
    workers = sum(pool.replicas for pool in (config.prefill, config.decode) if pool.cores is None)
    return max(1, workers) * (config.engine.threads or cores) <= cores


def options(config: Config, gpus: float | str = 1.0) -> Options:
    """The engine's slice of the configuration, and the threads and the device that this machine gives. `gpus`: of the worker's pool; less
    than 1 is a share. Raises ValueError without the device that is asked for."""
    engine, choice = config.engine, choose(config.engine.device)
    if choice.note:
        log.warning("%s", choice.note)
    engine = engine.model_copy(update={"threads": engine.threads or quota_cores(), "device": choice.device})
    share = gpus if isinstance(gpus, float) and 0 < gpus < 1 else 1.0
    return Options(config.model, engine, config.kv.transport == "cuda_ipc", share, config.kv.events is not None, config.tiers.long_contexts)
