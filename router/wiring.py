"""Builds the router from its parts."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2

from baton.clock import clock_of_loop, loop_time
from baton.cluster import pulse
from baton.cluster.config import Config, ConfigError
from baton.cluster.connect import connect_registry
from baton.cluster.guard import Guard
from baton.cluster.health import HealthServer
from baton.cluster.joining import Joining
from baton.cluster.keys import ApiKeys, Quota
from baton.cluster.lifecycle import Stage, Stop, move
from baton.cluster.membership import Membership, draw_incarnation, process_name
from baton.cluster.metrics import Book
from baton.cluster.metrics_http import Exposition, MetricsServer
from baton.cluster.records import RouterRecord
from baton.cluster.redis_answers import RedisAnswers
from baton.cluster.redis_client import tls_options
from baton.cluster.rpc import CLIENT_ANSWER_S, Admit, Check, Server, Tasks
from baton.cluster.tracing import make_tracer
from baton.engine.facts.model_facts import Recommended, recommended
from baton.recorder.recorder import Recorder, digest_of
from baton.v1 import generation_pb2, generation_pb2_grpc, worker_pb2_grpc
from router import gauges, reflection, taped
from router.admin import AdminDoor, Own
from router.admission import Admission
from router.clients import GrpcWorkers, Streams
from router.degradation import Degradation, Rules
from router.dispatch import Dispatcher
from router.door import GenerationDoor
from router.http.app import HttpDoor, allow_origins
from router.http.page import Page
from router.http.server import HttpServer
from router.journal import Journal
from router.kept import Kept
from router.lateness import Lateness
from router.live import Live
from router.message_bound import check_fields
from router.peers import PeerRouters
from router.prover import Prover
from router.rates import Rates, Unlimited, redis_counters
from router.resume import receipt_key
from router.served import ServedModel
from router.service import Draws, GenerateService, ModelText, Tenancy
from router.split import Split, Wanted
from router.tokenizer import Tokenizer
from router.tools.forms import Forms
from router.turn_budget import TurnBudget
from router.view import ClusterView
from router.watch import Watch, outside_of

log = logging.getLogger(__name__)
SERVICE = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
HEALTH_EVERY_S = 0.1
KEYS_EVERY_S = 1.0
BEAT_S = 0.25  # other routers count what is served here
IDLE_POLL_S = 0.02
RECORDED = 512  # requests that ended last, in a recording


def draw_id() -> str:
    return f"req-{secrets.token_hex(8)}"


class RouterProcess:
    """Implements `baton.cluster.lifecycle.Process`. Healthy means able to serve a request now: there is at least one decode worker."""

    def __init__(self, config: Config, stop: Stop) -> None:
        if not config.model.path:
            raise ConfigError("model.path: no model is given (BATON_MODEL_PATH)")
        self.config = config
        self.stage = Stage.STARTING
        self._registry = connect_registry(config)
        self._tasks = Tasks(stop.fail)
        self._budget = TurnBudget()
        self._lateness = Lateness(config.router.stream_interval_s)
        streams = Streams(self._lateness.interval_s, config.router.backlog_bytes, self._budget)
        self._workers = GrpcWorkers(config.security, streams)
        self._https: list[HttpServer] = []
        self._keys = ApiKeys.load(config.security.api_keys, Quota(config.security.requests_per_minute, config.security.tokens_per_minute))
        self._guard = Guard(config, self._keys)
        self._model_name = config.model.served_name or Path(config.model.path).name
        self.name = process_name("router")
        self.incarnation = draw_incarnation()
        self._endpoints: dict[str, str] = {}
        self._membership = Membership(self._registry, self.describe, min(config.redis.heartbeat_s, BEAT_S), stop.fail)
        self._peers = PeerRouters(self._registry, self.name, config)
        self._tracer = make_tracer(config.telemetry, config.cluster.name, "router", self.name)
        self._book = Book("router", model=self._model_name)
        self._journal = self._new_journal()
        self._metrics = MetricsServer(config, Exposition(self._book), lambda: self.stage is Stage.READY, self._guard, self._targets)
        self._health_pages = HealthServer(config, lambda: self.stage, waits_for=self._waits_for)
        self._watch: Watch | None = None
        self._recorder = Recorder(config, self.name, "router", digest_of(taped.MODULES))
        self._recorder.requests = lambda: (record.to_json() for record in self._journal.last(RECORDED))
        stop.witness = self._recorder.dump
        self._closers = AsyncExitStack()  # all of them run, in reverse order, even if one fails
        self._closers.push_async_callback(asyncio.to_thread, self._tracer.close)
        closers = (self._health_pages.close, self._metrics.close, self._registry.close, self._workers.close, self._peers.close)
        for close in closers:
            self._closers.push_async_callback(close)

    async def start(self) -> None:
        config = self.config
        if config.telemetry.health_port is not None:  # first: it answers while the tokenizer is loaded
            await self._health_pages.start(config.telemetry.health_port)
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(config.model.path))
        self._view = ClusterView({self._model_name: tokenizer.fingerprint})
        self._watch = watch = Watch(self._view, self._registry, self._workers, config.router.hang_s, outside_of(config))
        self._admission = Admission(config.router.max_inflight, config.router.max_queue, config.router.overload)
        live = Live(self._view, watch, self._admission, self._journal, self._peers, self._record)
        self._public, admin = self._server(check_fields, config.router.connection_age_s), self._server(admit=self._guard.check)
        self._serve(tokenizer, watch)
        who, outcomes = f"{self.name} {self.incarnation}", self._book.counters("baton_router_proofs_total")
        prover = Prover(self._view, self._workers, self._registry, who, outcomes)
        self._closers.push_async_callback(prover.close)
        own = Own(self._record, Joining(config), self._recorder, prover.newcomers.why)
        door = AdminDoor(self._view, self._workers, watch, self._journal, live, self._peers, own)
        worker_pb2_grpc.add_AdminServicer_to_server(door, admin.grpc)
        await self._open_doors(tokenizer, admin, live)
        acting = {"watch": watch.run(), "peers": self._peers.run(self._admission), "live": live.run(), "pulse": pulse.beat()}
        for name, loop in (acting | {"proofs": prover.run()} | self._own_loops()).items():
            self._tasks.start(loop, name)
        self.stage = move(self.stage, "ready")
        log.info("router ready on %s, model %s", ", ".join(f"{k} {v}" for k, v in self._endpoints.items()), self._model_name)

    def _new_journal(self) -> Journal:
        config = self.config
        # Who names devices or transports of UCX asks for NIXL.
        ucx = "nixl" if config.kv.ucx_tls or config.kv.ucx_net_devices else ""
        carrier = ucx if config.kv.transport == "auto" else config.kv.transport
        wanted = Wanted(config.prefill.replicas > 0, carrier, config.kv.rdma)
        return Journal(
            self._book,
            self._tracer,
            self._model_name,
            config.slo,
            config.telemetry.recent_requests,
            degradation=Degradation(Rules.of(config.router)),
            split=Split(wanted),
        )

    def _serve(self, tokenizer: Tokenizer, watch: Watch) -> None:
        """What answers a request, from the service to the workers, and its metrics."""
        config, model = self.config, self._view.models[self._model_name]
        clock, engine = clock_of_loop(), config.engine
        dispatcher = Dispatcher(model, self._workers, config.router, clock, engine.max_queue, engine.prefix_caching)
        self.service = GenerateService(
            model=model,
            text=self._text(tokenizer),
            dispatcher=dispatcher,
            admission=self._admission,
            config=config.router,
            journal=self._journal,
            draws=Draws(lambda: secrets.randbits(63), draw_id, clock),
            tenancy=self._tenancy(),
        )
        self._closers.callback(self.service.close)
        self._follow(model, dispatcher, clock)
        stalled = {"grpc": lambda: self._public.stalled, "http": lambda: sum(http.stalled for http in self._https)}
        readers = gauges.Readers(lambda: self._workers.unread_bytes, stalled)
        gauges.tell(self._book, self._view, self._admission, watch, self._tracer, readers, dispatcher.conduct)
        gauges.tell_texts(self._book, self.service.texts)

    def _follow(self, model: ServedModel, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        """Records what is decided from now on."""
        recorder, conduct, journal = self._recorder, dispatcher.conduct, self._journal
        if recorder.on:
            objects = {
                "admission": self._admission,
                "view": self._view,
                "members": self._view.members,
                "models": self._view.models,
                "index": model.index,
                "policy": dispatcher.policy,
                "trust": model.trust,
                "outliers": conduct.outliers,
                "budget": conduct.budget,
                "degradation": journal.degradation,
                "split": journal.split,
            }
            recorder.sources.append(taped.RouterTape(recorder.span_s, recorder.most_bytes, clock, objects).source)

    async def _open_doors(self, tokenizer: Tokenizer, admin: Server, live: Live) -> None:
        """Binds and opens the public doors, the admin's, the page and the metrics."""
        config, public = self.config, self._public
        generation_pb2_grpc.add_GenerationServicer_to_server(GenerationDoor(self.service, self._keys, self._budget), public.grpc)
        offered = config.router.reflection
        if offered or (offered is None and not self._keys):
            reflection.offer((SERVICE, "grpc.health.v1.Health"), public.grpc)
        self.address, admin_address = public.bind(config.router.port), admin.bind(config.router.admin_port)
        metrics, serving = self._metrics.answer if config.telemetry.metrics else None, lambda: bool(self._view.decode_workers())
        door = HttpDoor(self.service, tokenizer, self._keys, config.router, serving, draw_id, metrics, self._budget)
        self._closers.push_async_callback(self._tasks.close)
        http, page = (
            self._http(allow_origins(door, config.router.cors_origins)),
            self._http(Page(live, door, self._keys, config.cluster.host)),
        )
        http_address, page_address = http.bind(config.router.http_port), page.bind(config.router.page_port)
        endpoints = self._endpoints
        endpoints |= {"grpc": self.address, "http": http_address, "admin": admin_address, "page": page_address}
        if config.telemetry.metrics:
            endpoints["metrics"] = await self._metrics.start(config.telemetry.metrics_port)
        if config.telemetry.health_port is not None:
            endpoints["health"] = self._health_pages.address
        await public.health.set("liveness", health_pb2.HealthCheckResponse.SERVING)  # as long as the process answers
        await public.start()
        await admin.start()
        http.start(self._tasks)
        page.start(self._tasks)

    def _text(self, tokenizer: Tokenizer) -> ModelText:
        model = self.config.model
        forms = Forms.of(tokenizer, model.tool_format, model.reasoning_format)
        return ModelText(tokenizer, self._recommended(), forms, Path(model.path))

    def _own_loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        loops = {"membership": self._membership.run(), "health": self._run_health(), "keys": self._run_keys()}
        return loops | {"lateness": self._lateness.run()}

    async def drain(self) -> None:
        self.stage = move(self.stage, "drain")
        await self._membership.leave()  # first: nobody is sent here any more
        self.service.draining = True
        await self._set_health(False)
        for http in self._https:
            http.drain()
        drain_s = self.config.router.drain_s
        self._farewell = asyncio.create_task(self._public.stop(drain_s))  # not cancelled: `close` makes it end
        deadline = loop_time() + drain_s
        while not self._idle and loop_time() < deadline:
            await asyncio.sleep(IDLE_POLL_S)

    async def close(self) -> None:
        self.stage = move(self.stage, "close")
        async with self._closers:
            await self._membership.leave()

    async def describe(self) -> RouterRecord:
        """This router as it is now, for the registry."""
        return self._record()

    def _record(self) -> RouterRecord:
        return RouterRecord(
            name=self.name,
            incarnation=self.incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            endpoints=self._endpoints,
            model_name=self._model_name,
            inflight=self._admission.requests,
            queued=self._admission.queued,
            places=self._admission.inflight,
        )

    def _recommended(self) -> Recommended:
        """What the model's folder recommends, if it is to count."""
        if self.config.model.generation_config != "auto":
            return Recommended()
        found = recommended(Path(self.config.model.path))
        if found.numbers or found.max_tokens:
            facts = {name: fact.value for name, fact in found.numbers.items()}
            most = {"max_new_tokens": found.max_tokens.value} if found.max_tokens else {}
            log.info("generation_config.json recommends %s (model.generation_config)", facts | most)
        if found.not_done:
            log.warning("generation_config.json asks for %s, which is not done here", ", ".join(found.not_done))
        return found

    def _server(self, check: Check | None = None, age_s: float | None = None, admit: Admit | None = None) -> Server:
        config = self.config.router
        server = Server(self.config, config.max_message_bytes, config.stall_s, check, age_s, admit, CLIENT_ANSWER_S)
        self._closers.push_async_callback(server.stop, 0.5)
        return server

    def _http(self, app: Any) -> HttpServer:
        self._https.append(http := HttpServer(self.config, app, self._budget))
        self._closers.push_async_callback(http.stop)
        return http

    @property
    def _idle(self) -> bool:
        """An answer over HTTP may still be on its way out when its request is done."""
        return self.service.idle and all(http.idle for http in self._https)

    def _tenancy(self) -> Tenancy:
        config, key = self.config, receipt_key(self.config.cluster.key, secrets.token_bytes)
        kept, router = None, config.router
        if router.responses_keep_s:
            answers = RedisAnswers(config.redis.url, config.cluster.name, config.redis, config.security, router.responses_bytes)
            kept = Kept(answers, key, router.responses_keep_s, router.response_bytes)
            self._closers.push_async_callback(kept.close)
        return Tenancy(self._rates(), config.security.shared_prefixes, key, kept)

    def _rates(self) -> Rates | Unlimited:
        redis = self.config.redis
        if not self._keys.limited:
            return Unlimited()
        counters = redis_counters(redis.url, self.config.cluster.name, tls_options(redis.url, self.config.security))
        return Rates(counters, self._keys.quota, redis.command_timeout_s)

    def _targets(self) -> list[str]:
        routers = [record.endpoints["metrics"] for record in self._peers.others if "metrics" in record.endpoints]
        return [self._metrics.address, *routers, *(record.metrics for record in self._view.members.records() if record.metrics)]

    async def _run_health(self) -> None:
        while True:
            if self.stage is Stage.READY:
                await self._set_health(bool(self._view.decode_workers()))
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _run_keys(self) -> None:
        while True:
            await asyncio.sleep(KEYS_EVERY_S)
            limited = self._keys.limited
            try:
                if not await asyncio.to_thread(self._keys.refresh):
                    continue
            except ConfigError as error:
                log.error("keeping the previous API keys: %s", error)
                continue
            log.info("reloaded the API keys")
            if self._keys.limited and not limited:
                log.warning("tenant limits take effect after a restart: the router started without any")

    def _waits_for(self) -> str:
        """A router that has not looked at the registry knows no worker, and would refuse what other routers serve. One look is enough."""
        return "" if self._watch and self._watch.reached else "the registry has not answered yet"

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE, "readiness"):
            await self._public.health.set(name, status)
