"""The admin port over a real connection: the command line receives what the router knows under the same names, with the same values."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_workers import MODEL, TOKENIZER, record

from baton.cli.admin import read_live, read_records, read_status
from baton.cluster import log_file
from baton.cluster.config import Config
from baton.cluster.config_router import SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.joining import Joining
from baton.cluster.messages import plain
from baton.cluster.metrics import Book
from baton.cluster.records import GpuRecord, Load, Pools, RouterRecord, StartRecord, TierRecord, WorkerRecord
from baton.cluster.rpc import Server, channel, to_error
from baton.cluster.telemetry import Tracer
from baton.engine.core.sampling import SamplingParams
from baton.recorder.recorder import SECRET_BYTES, Recorder
from baton.recorder.recording import read
from baton.simulate.memory_registry import MemoryRegistry
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.door import PAGE_KEYS, Probed, Residue, WorkerDoor
from baton.worker.identity import WorkerIdentity
from baton.worker.role import Mounts
from router.admin import AdminDoor, Own
from router.admission import Admission
from router.clients import GrpcWorkers
from router.journal import Journal
from router.live import Live
from router.peers import PeerRouters
from router.request import Failure, Request
from router.view import ClusterView
from router.watch import Watch, outside_of

BUSY = Load(running=3, waiting=2, free_blocks=500, credit_tokens=-40, cached_blocks=7, leases=1, waiting_tokens=90)


class House:
    """A router's admin door with one live worker behind it."""

    def __init__(self) -> None:
        self.view = ClusterView({MODEL: TOKENIZER})
        self.workers = GrpcWorkers(Config().security)
        self.ahead = 0.0  # seconds, of the router's wall clock
        slo = SloConfig(e2e_s=100.0)
        self.journal = Journal(Book("router", model="toy"), Tracer(), "toy", slo, 10, wall_clock=lambda: time.time() + self.ahead)
        self.registry = MemoryRegistry()
        self.says: WorkerRecord | None = None
        self.cached = 0  # blocks

    async def describe(self) -> WorkerRecord:
        assert self.says is not None
        return self.says

    async def probe(self, asker: str) -> Probed:
        return Probed("ready", BUSY, ("decode",), 0.0, 0)

    async def set_roles(self, wanted: Sequence[str], prove: bool = False, why: str = "") -> Mounts:
        mounts = Mounts("d0", "decode")
        mounts.wish(wanted)
        return mounts

    async def bring(self, keys: Sequence[bytes], wait_s: float) -> int:
        return len(keys)

    async def snapshot(self) -> tuple[int, dict[str, list[bytes]]]:
        colder = [b"colder".ljust(16)] if self.cached else []
        return 3, {"device": [number.to_bytes(16, "big") for number in range(self.cached)], "host": colder}

    def end(self, name: str, error: BatonError | None = None, after_s: float = 0.0) -> None:
        """Records a request that ends now, and took at least `after_s`."""
        entry = self.journal.open("chat", name)
        entry.trace.watch.laps[0].start -= after_s
        with entry:
            entry.request = Request(name, [1, 2, 3, 4], 3, SamplingParams(max_tokens=9), "", 1e9, entry.trace)
            trace = entry.trace
            trace.watch.enter("prefill", "p0")
            trace.failures.append(Failure(trace.watch.clock(), "p0", "WORKER_LOST"))
            trace.bypasses.append("short")
            trace.handoff = Handoff(transport="nixl", blocks=3, bytes=1 << 33, blocks_reused=1, digests_checked=3, read_ms=2.5)
            if error:
                raise error
            trace.watch.stop()
            entry.finish = "length"


@asynccontextmanager
async def administered(house: House, registry: MemoryRegistry, name: str, config: Config | None = None) -> AsyncIterator[Any]:
    """The router `name` over `house` and one worker that answers, as a member of the registry."""
    admission = Admission(4, 4)
    worker_server, admin_server = Server(Config(), 1 << 20), Server(Config(), 1 << 20)
    says = house.probe, house.describe, house.snapshot, lambda: Residue(1, 2, 3, 4), house.set_roles, house.bring
    door = WorkerDoor(WorkerIdentity("d0", 1, "model"), *says, Recorder(Config(), "d0", "decode"))
    worker_pb2_grpc.add_WorkerServicer_to_server(door, worker_server.grpc)
    address = worker_server.bind(0)
    house.says = record("d0", address=address, load=BUSY)
    house.view.update([house.says, record("p0", address="127.0.0.1:1")], 0.0)
    watch = Watch(house.view, house.registry, house.workers, 2.0, outside_of(config or Config()))
    watch.registry_reachable = True
    admin_address = admin_server.bind(0)
    own = RouterRecord(name, 1, os.getpid(), "host", {"grpc": "127.0.0.1:9", "admin": admin_address}, "toy")
    peers = PeerRouters(registry, name, Config())
    live = Live(house.view, watch, admission, house.journal, peers, lambda: own)
    its = Own(lambda: own, Joining(Config()), Recorder(Config(), name, "router"))
    admin = AdminDoor(house.view, house.workers, watch, house.journal, live, peers, its)
    worker_pb2_grpc.add_AdminServicer_to_server(admin, admin_server.grpc)
    await asyncio.gather(worker_server.start(), admin_server.start(), registry.join(own))
    looking = asyncio.create_task(peers.run(admission))
    try:
        async with channel(admin_address, Config().security) as wire:
            yield worker_pb2_grpc.AdminStub(wire)
    finally:
        looking.cancel()
        await asyncio.gather(house.workers.close(), peers.close(), worker_server.stop(0), admin_server.stop(0))


@pytest.fixture
async def house() -> AsyncIterator[tuple[House, Any]]:
    house = House()
    async with administered(house, MemoryRegistry(), "router-0") as stub:
        yield house, stub


async def test_the_router_that_passed_on_new_roles_sends_work_by_them_at_once(house: tuple[House, Any]) -> None:
    told, stub = house
    assert [worker.name for worker in told.view.prefill_workers()] == ["p0"]
    await stub.SetRoles(pb.AdminSetRolesRequest(worker="d0", roles=["prefill"], force=True), timeout=20)
    assert [worker.name for worker in told.view.prefill_workers()] == ["d0", "p0"] and told.view.decode_workers() == []


async def test_the_last_worker_that_decodes_keeps_decoding_unless_forced(house: tuple[House, Any]) -> None:
    told, stub = house
    with pytest.raises(grpc.RpcError, match="roles: d0 is the only worker that decodes") as refused:
        await stub.SetRoles(pb.AdminSetRolesRequest(worker="d0", roles=["prefill"]), timeout=20)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and [w.name for w in told.view.decode_workers()] == ["d0"]
    await stub.SetRoles(pb.AdminSetRolesRequest(worker="d0", roles=["prefill", "decode"]), timeout=20)
    assert told.says is not None
    told.view.update([told.says, record("p0"), record("d1")], 0.0)
    await stub.SetRoles(pb.AdminSetRolesRequest(worker="d0", roles=["prefill"]), timeout=20)
    assert [w.name for w in told.view.decode_workers()] == ["d1"]


async def test_any_router_shows_the_log_of_any_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, all processes are one and write to one file; the records of what each was asked tell them apart."""
    monkeypatch.setenv(log_file.VARIABLE, str(tmp_path / "x.log"))
    (tmp_path / "x.log").write_text("one\ntwo\n")
    registry, houses = MemoryRegistry(), (House(), House())

    async def log(stub: Any, name: str, **how: Any) -> bytes:
        return b"".join([page.text async for page in stub.Logs(pb.AdminLogsRequest(name=name, **how), timeout=20)])

    async with administered(houses[0], registry, "router-0") as stub, administered(houses[1], registry, "router-1") as second:
        await until_routers(stub, ["router-0", "router-1"])
        for name in ("router-0", "router-1", "d0"):
            assert await log(stub, name, lines=1) == b"two\n"
        following = stub.Logs(pb.AdminLogsRequest(name="d0", lines=1, follow=True), timeout=20)
        assert (await following.read()).text == b"two\n"
        with (tmp_path / "x.log").open("a") as file:
            file.write("three\n")
        assert (await following.read()).text == b"three\n"
        following.cancel()
        for name, said in (("d9", "there is no process 'd9'; known processes: router-0, router-1, d0, p0"), ("p0", "p0 does not answer: ")):
            with pytest.raises(grpc.RpcError) as refused:
                await log(stub, name, lines=1)
            assert said in str(refused.value.details())
        with pytest.raises(grpc.RpcError, match="lines: must be from 0"):
            await log(second, "router-0", lines=1 << 30)


async def test_any_router_gives_the_recording_of_any_process(tmp_path: Path) -> None:
    registry, houses = MemoryRegistry(), (House(), House())

    async def recorded(stub: Any, name: str, secret: bytes = bytes(SECRET_BYTES)) -> str:
        path = tmp_path / "section.jsonl"
        answers = stub.Record(pb.AdminRecordRequest(name=name, secret=secret), timeout=20)
        path.write_bytes(b"".join([answer.lines async for answer in answers]))
        [section] = read(path)
        return str(section.head["process"])

    async with administered(houses[0], registry, "router-0") as stub, administered(houses[1], registry, "router-1"):
        await until_routers(stub, ["router-0", "router-1"])
        for name in ("router-0", "router-1", "d0"):
            assert await recorded(stub, name) == name
        for name, said in (("d9", "there is no process 'd9'; known processes: router-0, router-1, d0, p0"), ("p0", "p0 does not answer: ")):
            with pytest.raises(grpc.RpcError) as refused:
                await recorded(stub, name)
            assert said in str(refused.value.details())
        with pytest.raises(grpc.RpcError, match="secret: must be 32 bytes"):
            await recorded(stub, "d0", b"short")


async def test_one_reader_of_a_recording_at_a_time() -> None:
    recorder = Recorder(Config(), "router-0", "router")
    first = recorder.stream(bytes(SECRET_BYTES))
    await anext(first)
    with pytest.raises(BatonError, match="router-0 is being recorded already"):
        await anext(recorder.stream(bytes(SECRET_BYTES)))
    await first.aclose()
    assert [piece async for piece in recorder.stream(bytes(SECRET_BYTES))]


async def test_a_cluster_ends_only_if_someone_runs_it(house: tuple[House, Any]) -> None:
    told, stub = house
    with pytest.raises(grpc.RpcError, match="no `baton up` runs this cluster"):
        await stub.Down(pb.DownRequest(), timeout=20)
    await told.registry.desire(Pools(1, 2))
    await stub.Down(pb.DownRequest(), timeout=20)
    await stub.Scale(pb.ScaleRequest(decode=3), timeout=20)
    assert await told.registry.desired() == Pools(1, 3, stop=True), "a later change of the sizes does not take it back"


async def test_any_router_shows_what_all_of_them_know() -> None:
    registry, houses = MemoryRegistry(), (House(), House())
    async with administered(houses[0], registry, "router-0") as first, administered(houses[1], registry, "router-1") as second:
        houses[0].end("early")
        houses[1].end("late")
        for stub in (first, second):
            await until_routers(stub, ["router-0", "router-1"])
            assert [record["request_id"] for record in read_records(await stub.Trace(pb.TraceRequest(last=5), timeout=20))] == [
                "late",
                "early",
            ]
            assert [record["request_id"] for record in read_records(await stub.Trace(pb.TraceRequest(last=1), timeout=20))] == ["late"]
            for name in ("early", "late"):
                assert len(read_records(await stub.Trace(pb.TraceRequest(request_id=name), timeout=20))) == 1
            told = read_live(await stub.Live(pb.LiveRequest(), timeout=20))
            assert [record["request_id"] for record in told["recent"]] == ["late", "early"] and told["totals"]["outcomes"] == {"ok": 2}
            assert [worker["name"] for worker in told["workers"]] == ["p0", "d0"]
        alone = read_live(await first.Live(pb.LiveRequest(alone=True), timeout=20))
        assert [record["request_id"] for record in alone["recent"]] == ["early"]
        assert read_records(await first.Trace(pb.TraceRequest(request_id="late", alone=True), timeout=20)) == []


async def test_lists_of_all_routers_are_one_list() -> None:
    registry, houses = MemoryRegistry(), (House(), House())
    async with administered(houses[0], registry, "router-0") as first, administered(houses[1], registry, "router-1") as second:
        await until_routers(first, ["router-0", "router-1"])
        await until_routers(second, ["router-0", "router-1"])
        for number in range(6):
            with pytest.raises(BatonError) if number % 3 == 0 else nullcontext():
                houses[number % 2].end(f"r{number}", BatonError(Reason.RETRIES_SPENT, "") if number % 3 == 0 else None, 1 + 10 * number)

        async def listed(stub: Any, **asked: Any) -> tuple[list[str], int]:
            answer = await stub.Trace(pb.TraceRequest(**asked), timeout=20)
            return [record["request_id"] for record in read_records(answer)], answer.matched

        for stub in (first, second):
            assert await listed(stub, last=9, sort="total") == (["r5", "r4", "r3", "r2", "r1", "r0"], 6)
            assert await listed(stub, last=2, skip=1, sort="total", ascending=True) == (["r1", "r2"], 6)
            assert await listed(stub, last=9, failed=True, sort="total") == (["r3", "r0"], 2)
            assert await listed(stub, last=9, slower_than=25.0, sort="age") == (["r5", "r4", "r3"], 3)
            assert await listed(stub, last=9, outcome="failed", sort="total") == (["r3", "r0"], 2)
            assert await listed(stub, last=9, worker="nobody") == await listed(stub, last=9, tenant="nobody") == ([], 0)
        assert await listed(first, last=9, alone=True) == (["r4", "r2", "r0"], 3)
        with pytest.raises(grpc.RpcError) as caught:
            await listed(first, last=9, sort="colour")
        assert to_error(caught.value).violations[0].field == "sort"


async def test_curves_show_what_all_routers_did_together() -> None:
    registry, houses = MemoryRegistry(), (House(), House())
    async with administered(houses[0], registry, "router-0") as first, administered(houses[1], registry, "router-1") as second:
        await until_routers(first, ["router-0", "router-1"])
        await until_routers(second, ["router-0", "router-1"])
        for number in range(3):
            houses[number % 2].end(f"r{number}")
        for house in houses:
            house.ahead = 10.0

        async def points(stub: Any, **asked: Any) -> list[dict[str, Any]]:
            return [plain(point) for point in (await stub.Curves(pb.CurvesRequest(**asked), timeout=20)).points]

        for stub in (first, second):
            together = await points(stub)
            assert sum(point["outcomes"].get("ok", 0) for point in together) == 3 and sum(point["output_tokens"] for point in together) == 3
            assert await points(stub, since=together[-1]["number"] + 1) == []
        assert sum(point["outcomes"].get("ok", 0) for point in await points(second, alone=True)) == 1


async def test_a_router_that_does_not_answer_is_left_out() -> None:
    registry, house = MemoryRegistry(), House()
    await registry.join(RouterRecord("router-9", 1, 1, "gone", {"admin": "127.0.0.1:1"}, "toy", inflight=3))
    async with administered(house, registry, "router-0") as stub:
        house.end("mine")
        await until_routers(stub, ["router-0", "router-9"])
        assert await last(stub, 5) == ["mine"]
        assert read_live(await stub.Live(pb.LiveRequest(), timeout=20))["totals"]["outcomes"] == {"ok": 1}


async def test_status_says_who_plans_and_what_was_decided_last(house: tuple[House, Any]) -> None:
    registry = house[0].registry

    async def told() -> dict[str, Any] | None:
        planner: dict[str, Any] | None = read_status(await house[1].Status(pb.StatusRequest(), timeout=20))["planner"]
        return planner

    def note(at: float, action: str, dry: bool) -> bytes:
        return json.dumps({"kind": "decision", "at": at, "action": action, "why": f"why {at:g}", "dry": dry, "forecast": {}}).encode()

    none = {"leader": "", "dry_run": False, "at": 0.0, "action": "", "why": ""}
    assert await told() is None
    term = await registry.lead("planner-0 7", 60.0)
    assert await told() == none | {"leader": "planner-0"}
    for one in (note(1, "decode pool 1 → 2", False), b'{"kind": "outcome", "change": 1}', b"{", note(2, "prefill pool 1 → 2", True)):
        await registry.note_plan(one, 10)
    decided = {"at": 1.0, "action": "decode pool 1 → 2", "why": "why 1"}
    assert await told() == none | {"leader": "planner-0"} | decided, "not what came of it, and not what a dry run beside it would do"
    await registry.resign("planner-0 7", term)
    assert await told() == none | {"dry_run": True, "at": 2.0, "action": "prefill pool 1 → 2", "why": "why 2"}
    await registry.note_plan(note(3, "", False), 1)
    assert await told() is None, "the planner that decided has gone"
    await registry.lead("planner-1 8", 60.0)
    registry.available = False
    assert await told() is None


async def last(stub: Any, count: int) -> list[str]:
    """The ids of the requests that ended last."""
    return [record["request_id"] for record in read_records(await stub.Trace(pb.TraceRequest(last=count), timeout=20))]


async def until_routers(stub: Any, names: list[str]) -> None:
    async with asyncio.timeout(20):
        while [router["name"] for router in read_status(await stub.Status(pb.StatusRequest(), timeout=20))["routers"]] != names:
            await asyncio.sleep(0.05)


async def test_status_reports_workers_that_answer_and_workers_that_do_not(house: tuple[House, Any]) -> None:
    told = read_status(await house[1].Status(pb.StatusRequest(), timeout=20))
    assert told["endpoints"]["grpc"] == "127.0.0.1:9" and told["model"] == "toy" and told["router"]["registry"] == "reachable"
    workers = {worker["name"]: worker for worker in told["workers"]}
    assert house[0].says is not None
    held = {"idle": False, "leases": 2, "quarantined_blocks": 3, "blocks_in_use": 4}
    lists = {"roles": [], "gpus": [], "tiers": [], "speculation": [], "proving": [], "eos_token_ids": [256]}
    assert workers["d0"] == {**asdict(house[0].says), **lists, **held}
    lost = workers["p0"]
    assert lost["state"] == "unreachable" and "WORKER_LOST" in lost["error"] and lost["kv_blocks"] == 1000 and "idle" not in lost


async def test_status_lists_workers_that_are_starting(house: tuple[House, Any]) -> None:
    await house[0].registry.join(StartRecord("d1", "decode", 7, 42, "host", "compiling kernels", 5, 24, "", 1.5))
    told = read_status(await house[1].Status(pb.StatusRequest(), timeout=20))
    assert told["starts"] == [
        {"name": "d1", "pool": "decode", "incarnation": 7, "pid": 42, "host": "host", "step": "compiling kernels", "done": 5, "total": 24}
        | {"unit": "", "cpu_s": 1.5}
    ]
    house[0].registry.available = False
    assert read_status(await house[1].Status(pb.StatusRequest(), timeout=20))["starts"] == []


async def test_status_says_why_a_ready_worker_gets_no_requests(house: tuple[House, Any]) -> None:
    """It was shown as ready, while the cluster went on without it."""
    assert house[0].says is not None
    house[0].view.update([replace(house[0].says, block_size=8), record("p0"), record("d1")], 1.0)
    told = read_status(await house[1].Status(pb.StatusRequest(), timeout=20))
    (worker,) = [each for each in told["workers"] if each["name"] == "d0"]
    assert worker["state"] == "unfit" and worker["error"].startswith("block_size") and worker["leases"] == 2


async def test_status_says_why_a_worker_is_put_aside(house: tuple[House, Any]) -> None:
    house[0].view.members.mark_ejected("d0", 1, "put aside for 30 s: it takes 200 ms a token, its peers 20 ms")
    told = read_status(await house[1].Status(pb.StatusRequest(), timeout=20))
    (worker,) = [each for each in told["workers"] if each["name"] == "d0"]
    assert worker["state"] == "ejected" and worker["error"].startswith("put aside for 30 s")


async def test_a_trace_arrives_as_the_journal_keeps_it(house: tuple[House, Any]) -> None:
    house[0].end("good")
    with pytest.raises(BatonError):
        house[0].end("bad", BatonError(Reason.RETRIES_SPENT, ""))
    for name in ("good", "bad"):
        [found] = read_records(await house[1].Trace(pb.TraceRequest(request_id=name), timeout=20))
        kept = house[0].journal.find(name)
        assert kept is not None and found == kept.to_json()
    assert read_records(await house[1].Trace(pb.TraceRequest(request_id="nobody"), timeout=20)) == []
    last = read_records(await house[1].Trace(pb.TraceRequest(last=5), timeout=20))
    assert [one["request_id"] for one in last] == ["bad", "good"]
    assert last[0]["slo_missed"] == "error" and last[1]["slo_missed"] is None and last[1]["tpot"] is None


async def test_live_data_arrives_as_the_page_receives_it(house: tuple[House, Any]) -> None:
    house[0].end("good")
    await house[1].Live(pb.LiveRequest(), timeout=20)
    house[0].view.members.mark_down("p0", 1)
    told = read_live(await house[1].Live(pb.LiveRequest(), timeout=20))
    workers = {worker["name"]: worker for worker in told["workers"]}
    assert workers["d0"]["blocks_in_use"] == 500 and workers["p0"]["silent"] > 0
    assert workers["d0"]["credit_tokens"] == -40 and workers["d0"]["state"] == "ready" and workers["p0"]["state"] == "unreachable"
    assert told["totals"]["outcomes"] == {"ok": 1} and told["totals"]["handoff_bytes"] == 1 << 33
    assert [one["request_id"] for one in told["recent"]] == ["good"] and told["slo"] == {"objectives": {"e2e": 100.0}, "attainment": 1.0}


@pytest.mark.parametrize("cached", [0, PAGE_KEYS, 3 * PAGE_KEYS + 1])
async def test_a_cache_of_any_size_arrives_page_by_page(house: tuple[House, Any], cached: int) -> None:
    known = house[0].says
    house[0].cached = cached
    assert known is not None
    pages = [page async for page in house[0].workers.snapshot(known)]
    assert {(page.incarnation, page.sequence) for page in pages} == {(1, 3)}
    held = {medium: [key for page in pages if page.medium == medium for key in page.keys] for medium in ("device", "host")}
    assert held["device"] == [number.to_bytes(16, "big") for number in range(cached)]
    assert held["host"] == ([b"colder".ljust(16)] if cached else [])
    assert all(len(page.keys) <= PAGE_KEYS for page in pages)


@pytest.mark.parametrize("change", [{"pool": "king"}, {"state": "gone"}])
async def test_an_answer_that_is_not_a_record_is_refused(house: tuple[House, Any], change: dict[str, str]) -> None:
    known = house[0].says
    assert known is not None
    house[0].says = replace(known, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"record.{next(iter(change))}"):
        await house[0].workers.describe(known)


def test_a_record_and_its_message_have_the_same_fields() -> None:
    """A field that only one of them has would be lost in transit, or refused."""
    gpus = (GpuRecord("0", "H200", 1, 2, 0.5, 400.0, 0, 3), GpuRecord("1"))
    tiers = (TierRecord("disk", "failed", "it is full", 1, 2, 3, 4, 0.5, 0.25),)
    facts = record("d0", load=BUSY, gpus=gpus, tiers=tiers)
    message = pb.WorkerRecord(**asdict(facts))
    told = {"gpus": [asdict(gpu) for gpu in gpus], "tiers": [asdict(tier) for tier in tiers]}
    lists = {"roles": list(facts.roles), "eos_token_ids": [256], "speculation": [], "proving": []}
    assert plain(message) == {**asdict(facts), **told, **lists} and WorkerRecord.from_mapping(plain(message)) == facts


def test_a_message_refuses_an_unknown_field_name() -> None:
    """Negative control: what the router sends cannot drift from the contract unnoticed."""
    with pytest.raises(ValueError, match="colour"):
        pb.LiveResponse(requests=[{"request_id": "r", "colour": "red"}])


def test_an_unset_field_is_none_and_a_zero_field_is_zero() -> None:
    told = plain(pb.LiveResponse(slo={"objectives": {}, "attainment": None}))
    assert told["slo"] == {"objectives": {}, "attainment": None} and told["totals"] is None
    assert told["clock"] == 0.0 and told["workers"] == []


async def test_scale_changes_only_the_pools_that_it_names(house: tuple[House, Any]) -> None:
    for asked, wanted in (
        (pb.ScaleRequest(prefill=3, decode=2), (3, 2)),
        (pb.ScaleRequest(prefill=0), (0, 2)),
        (pb.ScaleRequest(), (0, 2)),
    ):
        told = await house[1].Scale(asked, timeout=20)
        assert (told.prefill, told.decode) == wanted and await house[0].registry.desired() == Pools(*wanted)


@pytest.mark.parametrize("asked", [{"decode": 0}, {"prefill": 1025}, {"decode": 1025}])
async def test_sizes_that_no_cluster_has_are_refused(house: tuple[House, Any], asked: dict[str, int]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await house[1].Scale(pb.ScaleRequest(**asked), timeout=20)
    assert to_error(caught.value).reason is Reason.INVALID_FIELD and await house[0].registry.desired() is None


@pytest.mark.parametrize(
    ("name", "place", "uninstall"),
    [
        ("models.r", "models/r", "helm -n models uninstall r"),
        ("x" * 55 + "-12345678", "NAMESPACE/RELEASE", "helm -n NAMESPACE uninstall RELEASE"),  # the chart has cut it
    ],
)
async def test_where_kubernetes_runs_the_cluster_a_wish_is_refused_and_the_way_is_named(name: str, place: str, uninstall: str) -> None:
    """No pod may change its own Deployment, so a wish in the registry would be followed by nobody."""
    house = House()
    config = Config.model_validate({"launcher": {"kind": "kubernetes"}, "cluster": {"name": name}})
    async with administered(house, MemoryRegistry(), "router-0", config) as stub:
        for ask, way in (
            (stub.Scale(pb.ScaleRequest(decode=3), timeout=20), f"baton scale --kubernetes {place}"),
            (stub.Down(pb.DownRequest(), timeout=20), uninstall),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await ask
            assert to_error(caught.value).reason is Reason.INVALID_FIELD and way in str(caught.value.details())
    assert await house.registry.desired() is None


async def test_without_the_registry_no_size_is_noted(house: tuple[House, Any]) -> None:
    house[0].registry.available = False
    with pytest.raises(grpc.RpcError) as caught:
        await house[1].Scale(pb.ScaleRequest(prefill=1), timeout=20)
    assert "the registry cannot note the sizes" in caught.value.details()
