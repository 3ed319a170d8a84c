"""A planner on a real cluster. The toy's workers are as fast as they are; the profile says that they are slow, so that a few requests
need them all, in one role and then in the other."""

import asyncio
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium, look_at, needs_chromium, opened
from live_cluster import Cluster, cluster, toy, toy_output
from playwright.sync_api import expect

from baton.planner.records import decode
from baton.profile.file import Profile
from baton.profile.models import Fitted

pytestmark = pytest.mark.system
# A worker computes 1,000 tokens of prompts per second; with 8 sequences, a token takes 100 ms.
STEP = {"step": 0.02, "tokens": 1e-3, "decodes": 1e-2}
PLANNER = {
    "enabled": "true", "interval-s": "5", "budget": "4", "cooldown-s": "0", "hold-s": "600", "cold-s": "1", "stale-s": "30", "lease-s": "5",
    "period-s": "0", "flip-timeout-s": "30",
}  # fmt: skip
WITHIN_S = 120.0
SLOW = 30_000  # ms


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("planner")
    profile = folder / "profile.yaml"
    Profile("test", "", "toy", {}, 100.0, "sum", {"step": Fitted(STEP), "start": Fitted({"base": 1.0})}).save(profile)
    flags = [part for key, value in (PLANNER | {"profile": str(profile)}).items() for part in (f"--planner.{key}", value)]
    objectives = ("--slo.ttft-s", "3", "--slo.tpot-s", "0.1")
    with cluster(toy(folder / "toy", step_delay_ms=2), "--router.bypass-tokens", "0", *objectives, *flags, prefill=2, decode=2) as running:
        yield running


@dataclass
class Offered:
    """Requests at equal distances until it is stopped, each checked token by token."""

    live: Cluster
    every_s: float
    prompt: int
    output: int
    served: int = 0
    firsts: list[tuple[float, str, str]] = field(default_factory=list)  # when the first token came, and from whom
    _stop: bool = False

    async def run(self) -> None:
        async with self.live.client() as client, asyncio.TaskGroup() as group:
            number = 0
            while not self._stop:
                number += 1
                group.create_task(self._ask(client, [number % 97 + 1, *(1 + i % 97 for i in range(number, number + self.prompt))]))
                await asyncio.sleep(self.every_s)

    def stop(self) -> None:
        self._stop = True

    async def _ask(self, client: Any, prompt: list[int]) -> None:
        first = 0.0
        async with client.generate(token_ids=prompt, max_tokens=self.output, temperature=0.0, ignore_eos=True, timeout_s=60) as stream:
            async for _ in stream:
                first = first or time.time()
            result = stream.result
        assert list(result.token_ids) == toy_output(prompt, max_tokens=self.output), "a wrong token"
        self.served += 1
        self.firsts.append((first, result.workers.get("prefill", ""), result.workers.get("decode", "")))


def serving(live: Cluster, role: str) -> set[str]:
    return {worker["name"] for worker in live.status()["workers"] if role in (worker.get("roles") or [worker["pool"]])}


async def until(live: Cluster, role: str, count: int, load: "asyncio.Task[None]") -> set[str]:
    deadline = time.monotonic() + WITHIN_S
    while len(found := await asyncio.to_thread(serving, live, role)) < count:
        if load.done():
            load.result()
        assert time.monotonic() < deadline, f"{found} serve {role}; {live.here('planner', '--why', '--name', live.name).stdout}"
        await asyncio.sleep(0.2)
    return found


async def test_a_shift_of_phase_flips_workers_under_load(live: Cluster) -> None:
    """Nothing is lost and no token is wrong. How long a flipped worker takes to its first token is printed."""
    prompts, answers = Offered(live, 0.3, 600, 2), Offered(live, 0.3, 40, 80)
    load = asyncio.create_task(prompts.run())
    before = await asyncio.to_thread(serving, live, "prefill")
    flipped = await until(live, "prefill", 3, load) - before
    deadline = time.monotonic() + WITHIN_S
    while not flipped & {worker for _, worker, _ in prompts.firsts}:
        assert time.monotonic() < deadline and not load.done(), "the flipped worker serves nothing"
        await asyncio.sleep(0.1)
    prompts.stop()
    await load
    load = asyncio.create_task(answers.run())
    await until(live, "decode", 3, load)
    answers.stop()
    await load
    assert prompts.served and answers.served
    told = decode_json(await asyncio.to_thread(live.here, "planner", "--why", "--json", "--last", "100", "--name", live.name))
    flips = [note for note in told if "instead of" in note.get("action", "")]
    assert flips and all(note["demand"]["rate"] > 0 and note["alternatives"] for note in flips)
    assert any(note["kind"] == "outcome" and note["state"] == "settled" for note in told)
    for flip in flips[:1]:
        name = flip["action"].split()[0]
        first = min(at for at, worker, _ in prompts.firsts if worker == name)
        print(f"{flip['action']}: first token after {first - flip['at']:.2f} s")
    await live.quiet()


def decode_json(done: Any) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return decode([json.dumps(note).encode() for note in json.loads(done.stdout)])


async def test_why_is_told_to_people(live: Cluster) -> None:
    done = await asyncio.to_thread(live.here, "planner", "--why", "--name", live.name)
    assert done.returncode == 0 and "why: the load needs" in done.stdout and "settled after" in done.stdout
    planner = live.status()["planner"]
    assert planner["leader"] == "planner-0" and planner["at"] and planner["why"] and not planner["dry_run"]


@needs_chromium
def test_the_page_shows_what_was_decided_and_what_came_of_it(live: Cluster) -> None:
    with chromium() as browser, opened(browser, f"http://{live.page}/") as page:
        page.get_by_role("link", name="Planner").click()
        panel = page.get_by_role("region", name="Planner")
        expect(panel.get_by_role("status")).to_have_text("planner-0 leads.", timeout=SLOW)
        expect(panel.locator("details")).not_to_have_count(0, timeout=SLOW)
        times = [float(at) for at in panel.locator("details").evaluate_all("all => all.map(one => one.dataset.at)")]
        assert times == sorted(times, reverse=True) and len(times) <= 20, "the newest is the first"
        flip = panel.locator("details", has_text="instead of").filter(has_text="settled").last
        flip.locator("summary").focus()
        page.keyboard.press("Enter")
        expect(flip.locator("dt")).to_have_text(["workers", "load", "forecast", "expected", "what came"])
        told = flip.locator("dl")
        expect(told).to_contain_text(re.compile(r"requests/s of [\d.]+ tokens, of which [\d.]+ are computed, and [\d.]+ of output"))
        expect(told).to_contain_text(re.compile(r"\d+ % meet the objectives, prefill \d+ % busy, decode \d+ %; as it is \d+ % meet"))
        expect(told).to_contain_text(re.compile(r"settled after [\d.]+ m?s; "))
        expect(flip.locator("tbody tr", has_text="chosen")).to_have_count(1)
        with page.expect_response(re.compile("/plans$")):
            pass
        expect(flip).to_have_attribute("open", "")
        expect(flip.locator("summary")).to_be_focused()
        look_at(page, "planner")


def test_what_it_does_can_be_scraped(live: Cluster) -> None:
    found = re.findall(r"metrics on (\S+)", live.log("planner-0"))
    with urllib.request.urlopen(f"http://{found[-1]}/metrics", timeout=10) as answer:
        told = answer.read().decode()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in told.splitlines() if line.startswith("baton_planner_")}
    assert values["baton_planner_leads"] == 1 and values['baton_planner_workers{count="serving",role="decode"}'] >= 1
    assert values['baton_planner_changes_total{action="flip",outcome="settled"}'] >= 1


async def test_a_planner_that_is_killed_changes_nothing(live: Cluster) -> None:
    """Requests go on; the launcher starts another one, which leads when the lease of the first is over."""
    roles = {worker["name"]: worker.get("roles") for worker in await asyncio.to_thread(live.workers)}
    [pid] = planners(live)
    os.kill(pid, signal.SIGKILL)
    load = Offered(live, 0.2, 40, 4)
    running = asyncio.create_task(load.run())
    await asyncio.to_thread(live.wait, lambda: planners(live) not in ([], [pid]))
    load.stop()
    await running
    assert load.served and {worker["name"]: worker.get("roles") for worker in await asyncio.to_thread(live.workers)} == roles
    await asyncio.to_thread(live.wait, lambda: live.log("planner-0").count("this planner leads") >= 2)


def planners(live: Cluster) -> list[int]:
    """Processes of this cluster's planner."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            if b"\0baton.planner" in argv and f"BATON_CLUSTER_NAME={live.name}".encode() in environ:
                found.append(int(entry.name))
    return found


def test_a_planner_without_a_profile_says_what_is_missing(live: Cluster) -> None:
    done = live.baton("planner", "--name", live.name)
    assert done.returncode == 2 and "planner.profile" in done.stderr
