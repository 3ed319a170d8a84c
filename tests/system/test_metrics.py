"""Metrics of a live cluster: complete, correct, accepted by promtool, and scraped by a real Prometheus.

Tests that need Prometheus's own programs are skipped without them. `apt-get install prometheus` installs both.
"""

import asyncio
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from live_cluster import ROOT, Cluster, cluster, toy
from prometheus_client.parser import text_string_to_metric_families

from baton.client import AsyncClient, GenerateError
from baton.cluster.metric_table import TABLE, Role
from baton.launch.ports import Ports
from baton.uncached import UNCACHED
from router.proof import PROMPT as PROOF

pytestmark = pytest.mark.system

DEPLOY = ROOT / "deploy" / "prometheus"
REQUESTS, PROMPT, OUTPUT = 6, 200, 16
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool: apt-get install prometheus")
needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus: apt-get install prometheus")


def fetch(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return str(answer.read().decode())


@dataclass
class Scrape:
    """Samples by name and labels."""

    text: str

    def __post_init__(self) -> None:
        self.samples = [sample for family in text_string_to_metric_families(self.text) for sample in family.samples]

    @property
    def names(self) -> set[str]:
        return {line.split(" ")[2] for line in self.text.splitlines() if line.startswith("# TYPE ")}

    def sum(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels. Raises KeyError if no sample has the name."""
        found = [sample for sample in self.samples if sample.name == name]
        if not found:
            raise KeyError(name)
        return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


def scrape(live: Cluster) -> dict[Role, Scrape]:
    """Scrapes a cluster with one worker of each role."""
    workers = {worker["pool"]: worker["metrics"] for worker in live.workers()}
    addresses = {"router": live.status()["endpoints"]["metrics"], **workers}
    return {role: Scrape(fetch(address, "/metrics")) for role, address in addresses.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose only worker is lost and killed."""
    with cluster(toy(tmp_path_factory.mktemp("alone") / "toy"), prefill=0) as running:
        yield running


async def serve(client: AsyncClient, prompt: list[int], **more: Any) -> None:
    params = {"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60, **more}
    async with client.generate(token_ids=prompt, **params) as stream:
        async for _ in stream:
            pass


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=5)  # so that what is cancelled has not ended
    with cluster(model, "--slo.ttft-s", "100", "--slo.tpot-s", "1e-9", "--slo.window", "50") as running:
        yield running


@pytest.fixture(scope="module")
def used(live: Cluster) -> dict[Role, Scrape]:
    asyncio.run(use(live))
    return scrape(live)


async def use(live: Cluster) -> None:
    """Six handoffs of six prompts, one short prompt, one refusal and one cancel."""
    async with live.client() as client:
        for i in range(REQUESTS):
            await serve(client, [(i * 37 + k * (i + 2)) % 250 for k in range(PROMPT)])
        await serve(client, [1, 2, 3])
        with pytest.raises(GenerateError):
            await serve(client, [1, 2, 3], max_tokens=0)
        async with client.generate(token_ids=[9] * 50, max_tokens=3000, ignore_eos=True, timeout_s=60) as stream:
            async for _ in stream:
                break
    await live.quiet()


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_process_exposes_exactly_the_metrics_of_its_role(used: dict[Role, Scrape], role: Role) -> None:
    """A metric that the wiring forgot would be missing here."""
    of_devices, by_method = ("baton_gpu_", "baton_kv_link_rate_"), ("baton_engine_drafted_", "baton_engine_accepted_")
    # There is no device, nobody has guessed, nothing is kept outside the pool, and of predictions too little is known.
    absent = (*of_devices, *by_method, "baton_tier_", "baton_router_prediction_bias_ratio")
    expected = {metric.name for metric in TABLE if role in metric.roles and not metric.name.startswith(absent)}
    told = {name for name in used[role].names if name.startswith("baton_")}
    assert told == expected
    aliases = {alias.name for metric in TABLE if role in metric.roles for alias in metric.aliases}
    assert {name for name in used[role].names if name.startswith("vllm:")} == aliases


def test_the_router_counts_requests_tokens_and_times(used: dict[Role, Scrape]) -> None:
    router = used["router"]
    assert router.sum("baton_router_requests_total", outcome="ok", reason="length") == REQUESTS + 1
    assert router.sum("baton_router_requests_total", outcome="invalid", reason="INVALID_FIELD") == 1
    assert router.sum("baton_router_requests_total", outcome="cancelled", reason="CANCELLED") == 1
    assert router.sum("baton_router_prompt_tokens_total") == REQUESTS * PROMPT + 3 + 50
    tokens = {cause: router.sum("baton_router_uncached_tokens_total", cause=cause) for cause in UNCACHED}
    computed = router.sum("baton_router_prompt_tokens_total") - router.sum("baton_router_cached_tokens_total")
    assert sum(tokens.values()) == computed and {cause for cause, count in tokens.items() if count} == {"new", "partial"}
    assert router.sum("baton_router_promised_tokens_total") == router.sum("baton_router_cached_tokens_total") == 0
    assert router.sum("baton_router_time_to_first_token_seconds_count") == REQUESTS + 2
    assert router.sum("baton_router_request_duration_seconds_count") == REQUESTS + 1
    assert router.sum("baton_router_stage_duration_seconds_count", stage="transfer") == REQUESTS
    stages, whole = router.sum("baton_router_stage_duration_seconds_sum"), router.sum("baton_router_request_duration_seconds_sum")
    assert stages == pytest.approx(whole, abs=1e-6)
    assert router.sum("baton_router_choices_total", role="prefill") == REQUESTS + 1
    assert router.sum("baton_router_bypasses_total", reason="short") == 1
    assert router.sum("baton_router_requests_in_flight") == 0 == router.sum("baton_router_requests_queued")
    assert router.sum("baton_router_slo_missed_total") == REQUESTS + 1 and router.sum("baton_router_slo_met_total") == 0
    assert router.sum("baton_router_slo_attainment_ratio") == 0
    assert router.sum("baton_router_proofs_total", outcome="admitted") == 2 and router.sum("baton_router_worker_unproven") == 0
    assert router.sum("baton_router_worker_usable") == 2 and router.sum("baton_router_worker_usable", worker="decode-0") == 1
    assert router.sum("baton_router_worker_credit_tokens", worker="decode-0") > 0
    assert router.sum("baton_registry_reachable") == 1


def test_the_workers_count_handoffs_leases_and_steps(used: dict[Role, Scrape]) -> None:
    prefill, decode = used["prefill"], used["decode"]
    me = {"worker": "decode-0", "role": "decode"}
    assert decode.sum("baton_handoffs_total", transport="nixl", outcome="ok", **me) >= REQUESTS
    good, tried = decode.sum("baton_handoffs_total", outcome="ok"), decode.sum("baton_handoffs_total", transport="nixl")
    read = decode.sum("baton_handoff_read_duration_seconds_count", transport="nixl")
    assert good <= read <= tried <= good + 1, "the cancelled request may end before its KV is read, or before it is used"
    checked = decode.sum("baton_digests_checked_total")
    assert checked >= 13 * REQUESTS and decode.sum("baton_digests_failed_total") == 0
    assert decode.sum("baton_handoff_read_bytes_sum", transport="nixl") == checked * 2 * 16 * 8 * 8
    assert decode.sum("baton_handoff_recomputed_tokens_total") == 0
    granted, ended = (prefill.sum("baton_leases_total", event=event) for event in ("granted", "released"))
    assert granted == ended == 1 + REQUESTS + 1 and prefill.sum("baton_leases_held") == 0, "the first when it proved itself"
    assert prefill.sum("baton_engine_computed_tokens_total") == len(PROOF) + REQUESTS * PROMPT + 50
    for worker in (prefill, decode):
        assert worker.sum("baton_engine_step_tokens_sum") == worker.sum("baton_engine_computed_tokens_total")
        assert worker.sum("baton_engine_step_duration_seconds_count") == worker.sum("baton_engine_step_sequences_count") > 0
        assert worker.sum("baton_kv_blocks", state="used") == 0 == worker.sum("baton_kv_usage_ratio")
        assert worker.sum("baton_kv_blocks", state="cached") > 0
    blocks = next(sample.labels["num_blocks"] for sample in decode.samples if sample.name == "baton_kv_cache_info")
    assert decode.sum("baton_kv_blocks") == int(blocks)


def test_an_alias_has_the_same_value(used: dict[Role, Scrape]) -> None:
    for role, told in used.items():
        for metric in (metric for metric in TABLE if role in metric.roles):
            suffixes = ("_sum", "_count") if metric.kind == "histogram" else ("",)
            for alias in metric.aliases:
                for suffix in suffixes:
                    assert told.sum(alias.name + suffix, model_name="toy", engine="0") == told.sum(metric.name + suffix, **alias.only)


def test_labels_contain_nothing_from_requests(used: dict[Role, Scrape]) -> None:
    known = {"worker", "role", "le", "model_name", "engine", "version", "finished_reason", "num_gpu_blocks"}
    known |= {label for metric in TABLE for label in metric.labels}
    for told in used.values():
        assert {label for sample in told.samples for label in sample.labels} <= known


@needs_promtool
def test_promtool_objects_only_to_the_colon_in_aliases(used: dict[Role, Scrape]) -> None:
    for told in used.values():
        own = "".join(line for line in told.text.splitlines(keepends=True) if "vllm:" not in line)
        assert promtool("check", "metrics", input=own) == (0, "")
        status, complaints = promtool("check", "metrics", input=told.text)
        assert status != 0 and all(line.startswith("vllm:") and line.endswith("':'") for line in complaints.splitlines())
        assert promtool("check", "metrics", input=own.replace("baton_kv_usage_ratio", "baton_kv_usage_ms"))[0] != 0, "negative control"


def promtool(*arguments: str, **options: Any) -> tuple[int, str]:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, cwd=DEPLOY, **options)
    return done.returncode, done.stdout + done.stderr


@needs_promtool
def test_the_alert_rules_are_valid_and_fire_when_they_should() -> None:
    assert promtool("check", "rules", "alerts.yml")[0] == 0
    status, told = promtool("test", "rules", "alerts_test.yml")
    assert status == 0, told


@needs_promtool
def test_an_alert_that_does_not_fire_fails_the_rule_tests(tmp_path: Path) -> None:
    """Negative control."""
    rules, tests = ((DEPLOY / name).read_text() for name in ("alerts.yml", "alerts_test.yml"))
    (tmp_path / "alerts.yml").write_text(rules.replace("baton_digests_failed_total[10m]) > 0", "baton_digests_failed_total[10m]) > 99"))
    (tmp_path / "alerts_test.yml").write_text(tests)
    done = subprocess.run(["promtool", "test", "rules", "alerts_test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "BatonDigestFailed" in done.stdout + done.stderr


# A real Prometheus


@contextmanager
def prometheus(folder: Path, router: str) -> Iterator[str]:
    """A Prometheus with the shipped configuration that scrapes four times a second. Yields its address."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    config["rule_files"] = [str(DEPLOY / "alerts.yml")]
    config["scrape_configs"][0]["http_sd_configs"] = [{"url": f"http://{router}/targets", "refresh_interval": "250ms"}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    ports = Ports("127.0.0.1")
    address = f"127.0.0.1:{ports.hold()}"
    places = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}")
    command = ["prometheus", *places, f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    with ports:
        try:
            yield address
        finally:
            process.terminate()
            process.wait(20)


def ask(address: str, expression: str) -> dict[str, float]:
    """The value of each series, by its only label."""
    told = json.loads(fetch(address, f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
    return {"".join(one["metric"].values()): float(one["value"][1]) for one in told["data"]["result"]}


def wait_for(address: str, expression: str, expected: dict[str, float]) -> None:
    deadline, found = time.monotonic() + 60, {}
    while time.monotonic() < deadline:
        try:
            found = ask(address, expression)
        except (urllib.error.URLError, ConnectionError):
            found = {}
        if found == expected:
            return
        time.sleep(0.1)
    raise AssertionError(f"{expression} is {found}, not {expected}")


@needs_prometheus
def test_a_real_prometheus_finds_and_scrapes_every_process(live: Cluster, used: dict[Role, Scrape], tmp_path: Path) -> None:
    before = scrape(live)
    with prometheus(tmp_path, live.status()["endpoints"]["metrics"]) as address:
        wait_for(address, 'count(up{job="baton"} == 1)', {"": 3.0})
        wait_for(address, 'sum(baton_router_requests_total{outcome="ok"})', {"": before["router"].sum("vllm:request_success_total")})
        wait_for(address, "sum by (role) (baton_kv_usage_ratio)", {"": 0.0, "prefill": 0.0, "decode": 0.0})
        wait_for(
            address,
            "histogram_quantile(1, sum by (le) (baton_router_request_prompt_tokens_bucket)) >= bool 200",
            {"": 1.0},
        )
        dashboard = json.loads((ROOT / "deploy" / "grafana" / "baton.json").read_text())
        expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
        for expression in expressions:
            ask(address, expression.replace("$__rate_interval", "1m"))
        loaded = json.loads(fetch(address, "/api/v1/rules"))["data"]["groups"][0]["rules"]
        assert len(loaded) == 24 and not [rule for rule in loaded if rule["health"] == "err"]


@needs_prometheus
def test_a_lost_worker_raises_an_alert(alone: Cluster, tmp_path: Path) -> None:
    """The only decode worker of a live cluster hangs. No part of the path from the fact to the alert is stubbed."""
    with prometheus(tmp_path, alone.status()["endpoints"]["metrics"]) as address:
        wait_for(address, "sum(baton_router_worker_usable)", {"": 1.0})
        pending = 'count(ALERTS{alertname="BatonNoDecodeWorker"})'
        wait_for(address, pending, {})
        pid = alone.kill("decode-0", 19)  # SIGSTOP
        try:
            wait_for(address, pending, {"": 1.0})
        finally:
            os.kill(pid, 18)
    alone.wait(lambda: [worker.get("state") for worker in alone.workers()] == ["ready"])


# Switched off, and restarted


def listening(pid: int) -> int:
    return len({c.laddr.port for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN})


def test_disabled_metrics_open_no_port(live: Cluster, tmp_path: Path) -> None:
    with cluster(toy(tmp_path / "toy"), "--telemetry.metrics", "false") as silent:
        assert "metrics" in live.status()["endpoints"] and "metrics" not in silent.status()["endpoints"]
        assert all(worker["metrics"] for worker in live.workers()) and not any(worker["metrics"] for worker in silent.workers())
        for told, quiet in ((router_pid(live), router_pid(silent)), *zip(pids(live), pids(silent), strict=True)):
            assert listening(told) - listening(quiet) == 1


def router_pid(live: Cluster) -> int:
    return int(live.status()["router"]["pid"])


def pids(live: Cluster) -> list[int]:
    return [worker["pid"] for worker in live.workers()]


def test_a_port_in_use_is_an_error_that_names_the_port(live: Cluster, tmp_path: Path) -> None:
    port = live.status()["endpoints"]["metrics"].rpartition(":")[2]
    flags = ("--model", str(toy(tmp_path / "toy")), "--cluster.name", "second", "--telemetry.metrics-port", port)
    ports = [part for name in ("port", "admin-port", "http-port", "page-port") for part in (f"--router.{name}", "0")]
    done = live.baton("up", *flags, *ports, timeout=120)
    assert done.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in done.stderr


async def test_health_and_targets_follow_a_restarted_worker(alone: Cluster) -> None:
    """After a worker is killed and restarted, the targets name its new address."""
    router = alone.status()["endpoints"]["metrics"]
    assert fetch(router, "/health") == "ok\n" and fetch(alone.workers()[0]["metrics"], "/health") == "ok\n"
    before = json.loads(fetch(router, "/targets"))[0]["targets"]
    assert before == [router, alone.workers()[0]["metrics"]]
    incarnation = alone.workers()[0]["incarnation"]
    alone.kill("decode-0")
    alone.wait(lambda: alone.incarnation("decode-0") != incarnation)
    assert json.loads(fetch(router, "/targets"))[0]["targets"] == [router, alone.workers()[0]["metrics"]]
    async with alone.client() as client:
        await serve(client, list(range(100)))
    assert scrape_one(alone).sum("baton_engine_computed_tokens_total") > 0
    with pytest.raises(grpc.RpcError), grpc.insecure_channel(router) as channel:  # this port does not speak gRPC
        channel.unary_unary("/x/y")(b"", timeout=5)


def scrape_one(live: Cluster) -> Scrape:
    return Scrape(fetch(live.workers()[0]["metrics"], "/metrics"))
