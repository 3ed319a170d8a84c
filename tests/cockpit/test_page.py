"""The server of the cockpit: its files, who may ask it, what it refuses, and that one experiment runs at a time."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
from http_door import Call

from baton.access.options import ClientIdentity, ClusterOptions
from baton.cli.cockpit import PORT
from baton.cluster.errors import BatonError, Reason
from baton.cockpit import bench as benches
from baton.cockpit.bench import Bench
from baton.cockpit.cluster import ClusterFacts, CockpitCluster, finder
from baton.cockpit.knobs import Settings
from baton.cockpit.meter import Looked
from baton.cockpit.page import FILES, Cockpit
from loadtest.drive import Answer

HOST = "127.0.0.1:8475"
STATIC = Path(__file__).parents[2] / "baton" / "cockpit" / "static"
LIVE = Path(__file__).parents[2] / "router" / "http" / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))
# From the npm package uplot 1.6.32 (MIT), whose sha512 in the registry is
# KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==, byte for byte.
VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


class Opened:
    """A stand-in for `baton.cockpit.cluster.OpenedDoor`: every answer takes `answer_s`."""

    def __init__(self, answer_s: float = 0.0) -> None:
        self.answer_s, self.closed = answer_s, False
        self.door = self
        self.asked: list[int] = []

    async def ask(self, prompt: Any, output_tokens: int, timeout_s: float, on_tokens: Any) -> Answer:
        self.asked.append(len(prompt))
        await asyncio.sleep(self.answer_s)
        on_tokens(1)
        on_tokens(output_tokens - 1)
        return Answer("ok", prompt_tokens=len(prompt), cached_tokens=len(prompt) // 2)

    async def look(self) -> Looked:
        return Looked(1, 0.5, 0.25)

    async def close(self) -> None:
        self.closed = True


class Somewhere:
    """A stand-in for `baton.cockpit.cluster.CockpitCluster`."""

    def __init__(self, opened: Opened | None = None) -> None:
        self.opened = opened or Opened()
        self.gone = ""

    async def facts(self) -> ClusterFacts:
        if self.gone:
            raise BatonError(Reason.NO_WORKER, self.gone)
        return ClusterFacts("toy", 1, 1, 512, {"d0": 8}, "", "127.0.0.1:8472")

    async def open(self, settings: Settings, facts: ClusterFacts) -> Any:
        return self.opened


async def ask(page: Any, path: str, method: str = "GET", body: Any = b"", **headers: str) -> Any:
    return await Call(page, method, path, body, headers={"host": HOST, **headers}).run()


BENCHES: list[Bench] = []


@pytest.fixture(autouse=True)
async def nothing_is_left_running() -> AsyncIterator[None]:
    yield
    while BENCHES:
        await BENCHES.pop().close()


def cockpit(somewhere: Somewhere | None = None, key: str | None = None) -> tuple[Cockpit, Bench]:
    bench = Bench(somewhere or Somewhere())
    BENCHES.append(bench)
    return Cockpit(bench, key), bench


async def ended(bench: Bench, number: int) -> Any:
    async with asyncio.timeout(120):
        while bench.runs[number].state == "running":
            await asyncio.sleep(0.02)
    return bench.runs[number]


def start(where: str = "real", experiment: str = "continuous", **settings: Any) -> dict[str, Any]:
    return {"experiment": experiment, "where": where, "settings": settings}


@pytest.mark.parametrize("path", sorted(FILES))
async def test_the_files_name_no_external_resources(path: str) -> None:
    answer = await ask(cockpit()[0], path)
    assert answer.status == 200 and "default-src 'self'" in answer.headers["content-security-policy"]
    code = answer.body.replace(b"http://www.w3.org/2000/svg", b"")
    if path == "/uPlot.iife.min.js":
        code = code.replace(b"/*! https://github.com/leeoniya/uPlot (v1.6.32) */", b"", 1)
    assert b"//" not in code.replace(b"// ", b"")


def test_what_is_vendored_is_what_was_published_with_its_licence() -> None:
    assert {name: sha256((STATIC / name).read_bytes()).hexdigest() for name in VENDORED} == VENDORED
    assert "MIT License" in (STATIC / "uPlot.LICENSE").read_text()


def test_the_scripts_use_only_ids_that_exist_in_the_page() -> None:
    wanted = {id_ for script in SCRIPTS if "uPlot" not in script.name for id_ in re.findall(r'\$\("(\w+)"', script.read_text())}
    made = {"knob_by"}  # by the script itself
    assert len(wanted) > 20 and wanted - made <= {*re.findall(r'id="(\w+)"', (STATIC / "cockpit.html").read_text())}


def test_the_live_page_links_to_the_port_of_the_command() -> None:
    assert f'port: "{PORT}"' in (LIVE / "page.js").read_text()


@pytest.mark.parametrize("path", ["/", "/state", "/size", "/runs/1"])
@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"origin": "null"}, {"host": "evil.example:8475"}, {"host": ""}])
async def test_pages_of_other_origins_are_refused(path: str, headers: dict[str, Any]) -> None:
    answer = await ask(cockpit()[0], path, **headers)
    assert answer.status == 403 and answer.error["code"] in ("foreign_origin", "foreign_host")


async def test_another_page_starts_nothing() -> None:
    page, bench = cockpit()
    answer = await ask(page, "/start", "POST", json.dumps(start()).encode(), origin="http://evil.example")
    assert answer.status == 403 and not bench.runs


async def test_a_key_that_the_cockpit_lends_must_be_shown() -> None:
    page, bench = cockpit(key="secret")
    assert (await ask(page, "/")).status == 200
    for path, method in (("/state", "GET"), ("/size", "GET"), ("/start", "POST"), ("/stop", "POST")):
        for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            assert (await ask(page, path, method, json.dumps(start()).encode(), **wrong)).status == 401
    assert not bench.runs and (await ask(page, "/state", authorization="Bearer secret")).status == 200


async def test_a_run_on_the_cluster_is_measured_and_labelled() -> None:
    opened = Opened(0.05)
    page, bench = cockpit(Somewhere(opened))
    began = await ask(page, "/start", "POST", start(rate=20, duration_s=5, prompt=32, output=8))
    assert began.status == 202 and began.json["label"] == "real cluster" and began.json["state"] == "running"
    run = await ended(bench, began.json["id"])
    assert run.state == "done" and opened.closed and len(opened.asked) == run.figures["requests"] == run.figures["completed"] > 50
    told = (await ask(page, f"/runs/{run.id}?since=1")).json
    assert len(told["points"]) == told["made"] - 1 >= 4 and told["points"][0]["kv"] == 0.5 and told["points"][0]["tokens"] > 0
    assert told["points"][0]["ttft_p50"] >= 0.05 and told["figures"]["cached"] == pytest.approx(0.5, rel=0.05)
    assert (await ask(page, "/state")).json["running"] is None


async def test_one_experiment_runs_at_a_time_and_can_be_stopped() -> None:
    page, bench = cockpit(Somewhere(Opened(0.01)))
    first = (await ask(page, "/start", "POST", start(duration_s=60, rate=5))).json["id"]
    second = await ask(page, "/start", "POST", start(duration_s=5))
    assert second.status == 409 and second.error["code"] == "experiment_runs" and "Continuous batching runs" in second.error["message"]
    assert (await ask(page, "/forget", "POST", {"id": first})).error["param"] == "id", "it goes on"
    async with asyncio.timeout(60):
        while not bench.runs[first].points:
            await asyncio.sleep(0.02)
    assert (await ask(page, "/stop", "POST", {})).status == 200
    run = await ended(bench, first)
    assert run.state == "stopped" and run.points and run.figures["requests"] >= 1, "what was measured is kept"
    assert (await ask(page, "/start", "POST", start(duration_s=5))).status == 202
    await bench.close()


async def test_a_cluster_that_is_gone_is_told_and_nothing_starts() -> None:
    somewhere = Somewhere()
    somewhere.gone = "the cluster does not answer: connection refused"
    page, bench = cockpit(somewhere)
    answer = await ask(page, "/start", "POST", start())
    assert answer.status == 503 and "does not answer" in answer.error["message"] and not bench.runs
    assert "does not answer" in (await ask(page, "/state")).json["cluster"]["gone"]


async def test_a_cluster_that_is_lost_during_a_run_fails_it() -> None:
    class Lost(Opened):
        async def ask(self, *_: Any) -> Answer:
            return Answer("failed", "NO_SERVER")

    page, bench = cockpit(Somewhere(Lost()))
    run = await ended(bench, (await ask(page, "/start", "POST", start(rate=20, duration_s=30))).json["id"])
    assert run.state == "failed" and "the server is gone" in run.message and run.figures["completed"] == 0


async def test_without_a_cluster_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_STATE_DIR", str(tmp_path))
    with pytest.raises(BatonError, match="no cluster 'nowhere' is running"):
        await CockpitCluster(finder(ClusterOptions(name="nowhere"), ClientIdentity())).facts()


async def test_what_this_cluster_cannot_do_is_refused_by_name() -> None:
    facts = ClusterFacts("toy", 1, 1, 64, {"d0": 8}, "", "")
    for settings, field in ((Settings(prompt=64), "prompt"), (Settings(prompt=16, output=8, speculation="on"), "speculation")):
        with pytest.raises(BatonError) as caught:
            await CockpitCluster(finder(ClusterOptions(), ClientIdentity())).open(settings, facts)
        assert caught.value.violations[0].field == field


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        ({}, "experiment"),
        ({"experiment": "static", "where": "there"}, "where"),
        ({"experiment": "static", "where": "real"}, "where"),
        ({"experiment": "static", "where": ["own"]}, "where"),
        (start("own", "caching"), "where"),
        (start("own", "size", checkpoint="llama-3.1-8b"), "checkpoint"),
        (start("own", "workers", prefill=7, decode=8), "decode"),
        ({"experiment": "static", "where": "simulated", "settings": []}, "settings"),
        ({"experiment": "static", "where": "simulated", "more": 1}, "more"),
        (start(rate=1000), "rate"),
        (start(duration_s=61), "duration_s"),
        (start("simulated", "static", batch=0), "batch"),
        (start("simulated", "size", model="llama-3.1-70b", device="a10"), "model"),
        (start("simulated", "static", by="profile"), "by"),
        (start("simulated", "size", model="llama-3.1-70b", gpus=2, prompt=8192, output=1024), "prompt"),
    ],
)
async def test_bad_input_is_refused_by_the_name_of_its_field(body: Any, param: str) -> None:
    page, bench = cockpit()
    answer = await ask(page, "/start", "POST", body)
    assert answer.status == 400 and answer.error["param"] == param and not bench.runs


async def test_other_requests_that_cannot_be_are_refused() -> None:
    page, _ = cockpit()
    assert (await ask(page, "/start")).status == 405 and (await ask(page, "/runs/7")).status == 404
    assert (await ask(page, "/runs/x")).status == 404 and (await ask(page, "/../bench.py")).status == 404
    assert (await ask(page, "/size?prompt=0")).error["param"] == "prompt"
    assert (await ask(page, "/start", "POST", b" " * (17 << 10))).status == 413
    for wrong in ("x", True, 99):
        assert (await ask(page, "/forget", "POST", {"id": wrong})).error["param"] == "id"


async def test_a_simulated_run_is_labelled_and_static_batches_wait(tmp_path: Path) -> None:
    """In a process of its own, with the scheduler's own modes."""
    page, bench = cockpit()
    runs = {}
    for batching in ("static", "continuous"):
        asked = start("simulated", "static", batching=batching, duration_s=8, rate=10, output=64, batch=16)
        runs[batching] = await ended(bench, (await ask(page, "/start", "POST", asked)).json["id"])
    for run in runs.values():
        assert run.state == "done" and run.label == "simulated" and "nothing was measured" in run.doubts[0], run.message
        assert len(run.points) >= 8 and {"ttft_p50", "tpot_p50", "tokens", "queued", "kv", "batch"} <= {*run.points[0]}
    static, continuous = (runs[name].figures for name in ("static", "continuous"))
    assert static["requests"] == continuous["requests"] > 50, "the same requests"
    assert static["ttft_p50"] > 5 * continuous["ttft_p50"]
    assert (await ask(page, "/forget", "POST", {"id": 1})).status == 200 and [*bench.runs] == [2]


async def test_a_simulation_that_is_stopped_leaves_no_process() -> None:
    page, bench = cockpit()

    def processes() -> list[psutil.Process]:
        return [one for one in psutil.Process().children() if "baton.cockpit.simulated" in " ".join(one.cmdline())]

    number = (await ask(page, "/start", "POST", start("simulated", "static", duration_s=120, output=128))).json["id"]
    async with asyncio.timeout(60):
        while not processes():
            await asyncio.sleep(0.02)
    await ask(page, "/stop", "POST", {})
    assert (await ended(bench, number)).state == "stopped" and not processes()


async def test_a_simulation_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "SIMULATED_WITHIN_S", 0.05)
    page, bench = cockpit()
    run = await ended(bench, (await ask(page, "/start", "POST", start("simulated", "static"))).json["id"])
    assert run.state == "failed" and "took more than" in run.message
