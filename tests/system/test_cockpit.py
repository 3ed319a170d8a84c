"""The cockpit in a real browser: experiments on a real cluster, on one of their own and in the simulator, with the mouse and with the
keyboard alone.

`BATON_TEST_PICTURES=folder` saves screenshots at two widths, light and dark.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from chromium import chromium, look_at, needs_chromium, opened
from live_cluster import Cluster, cluster
from playwright.sync_api import Browser, Page, expect

from baton.cli.up import SHIPPED

pytestmark = [pytest.mark.system, needs_chromium]
SLOW, RUN = 60_000, 180_000  # ms
CHARTS = ["Time to first token", "Time per output token", "Output tokens/s", "Queue", "KV in use", "Batch use"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def live() -> Iterator[Cluster]:
    with cluster(SHIPPED, "--engine.speculation", "prompt_lookup", prefill=1, decode=1) as running:
        yield running


@contextmanager
def cockpit(live: Cluster, *flags: str) -> Iterator[str]:
    """The address at which `baton cockpit` serves its page, until the end."""
    with cockpit_process(live, *flags) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, "Ctrl-C ends it in good order"


def cockpit_process(live: Cluster, *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "baton", "cockpit", "--name", live.name, "--port", "0", "--no-browser", *flags]
    return subprocess.Popen(command, env=live.env, stdout=subprocess.PIPE, text=True)


def knob(page: Page, name: str) -> Any:
    return page.get_by_role("slider", name=name, exact=True)


def finish(page: Page) -> str:
    """What is said of the run once it is done."""
    said = page.get_by_role("status").filter(has_text="requests ended ok")
    expect(said).to_be_visible(timeout=RUN)
    return said.inner_text()


def test_an_experiment_runs_on_the_cluster_and_its_numbers_can_be_read(browser: Browser, live: Cluster) -> None:
    with cockpit(live) as url, opened(browser, url) as page:
        page.get_by_role("button", name="Continuous batching").click()
        expect(page.get_by_role("radio", name="real cluster", exact=True)).to_be_checked(timeout=SLOW)
        knob(page, "Seconds").fill("6")
        knob(page, "Requests per second").fill("3")
        expect(knob(page, "Requests per second")).to_have_attribute("aria-valuetext", "3 /s")
        page.get_by_role("button", name="Start on the real cluster").click()
        expect(page.get_by_role("button", name="Stop")).to_be_enabled(timeout=SLOW)
        assert re.search(r"^done: (\d+) of \1 requests ended ok, TTFT P50 [\d.]+ m?s, per token P50 [\d.]+ ms", finish(page))
        expect(page.locator("#label")).to_have_text("real cluster")
        for title in CHARTS:
            chart = page.get_by_role("img", name=f"{title}, real cluster: ")
            expect(chart).to_be_visible()
        chart = page.get_by_role("img", name="Output tokens/s, real cluster: ")
        chart.focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("figure", has=chart).locator(".values")).to_contain_text(re.compile(r"^\d+ s"))
        row = page.locator("#runs tbody tr").first
        expect(row).to_contain_text("real cluster")
        expect(row).to_contain_text(re.compile(r"tale, 1 prefill, 1 decode · requests per second 3 /s"))
        live.wait(lambda: not live.residue())


def test_the_simulator_is_used_with_the_keyboard_alone_and_runs_are_compared(browser: Browser, live: Cluster) -> None:
    with cockpit(live) as url, opened(browser, url) as page:
        first = page.get_by_role("button", name="Static batching")
        first.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("radio", name="simulated")).to_be_checked()
        expect(page.get_by_role("radio", name="real cluster", exact=True)).to_be_disabled()
        expect(page.locator("#instead")).to_contain_text("--engine.batching static")
        seconds = knob(page, "Seconds")
        before = int(seconds.input_value())
        seconds.focus()
        for _ in range(before - 6):
            page.keyboard.press("ArrowLeft")
        expect(seconds).to_have_attribute("aria-valuetext", "6 s")
        page.get_by_role("button", name="Start in the simulator").focus()
        page.keyboard.press("Enter")
        slow = finish(page)
        expect(page.locator("#doubts")).to_contain_text("Outside of what was validated: nothing was measured")
        expect(page.locator("#label")).to_have_text("simulated")
        page.get_by_role("combobox", name="Batching").select_option("continuous")
        page.get_by_role("button", name="Start in the simulator").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#shown")).to_have_text("Run 2: Static batching", timeout=SLOW)
        quick = finish(page)
        assert ttft(slow) > 3 * ttft(quick), "who joins a static batch waits for it to end"
        compare = page.get_by_role("button", name="Compare run 1")
        compare.focus()
        page.keyboard.press("Enter")
        expect(page.locator("#shown")).to_have_text("Run 2: Static batching, with 1 (simulated)", timeout=SLOW)
        expect(page.get_by_role("button", name="Compare run 1")).to_be_focused()
        expect(page.get_by_role("img", name=re.compile("^Queue, simulated: run 2 .*, run 1 "))).to_be_visible()
        look_at(page, "cockpit")


def ttft(said: str) -> float:
    """Milliseconds."""
    found = re.search(r"TTFT P50 ([\d.]+) (m?s)", said)
    assert found is not None
    return float(found[1]) * (1 if found[2] == "ms" else 1000)


def ask(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, {"content-type": "application/json"}), timeout=60) as answer:
        return json.loads(answer.read())


def start(url: str, experiment: str, where: str, **settings: Any) -> int:
    """The number of the run."""
    asked = {"experiment": experiment, "where": where, "settings": {"duration_s": 5, "output": 8} | settings}
    return int(ask(url, "start", asked)["id"])


def told_once(url: str, number: int, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """What is told of a run as soon as the condition is true."""
    deadline = time.monotonic() + RUN / 1000
    while not condition(told := ask(url, f"runs/{number}?since=0")):
        assert time.monotonic() < deadline and (told["state"] == "running" or condition(told)), told
        time.sleep(0.2)
    return dict(told)


def ended(told: dict[str, Any]) -> bool:
    return bool(told["state"] != "running")


def run(url: str, experiment: str, **settings: Any) -> dict[str, Any]:
    """What is kept of a run of five seconds on the real cluster."""
    told = told_once(url, start(url, experiment, "real", **settings), ended)
    assert told["state"] == "done" and told["label"] == "real cluster" and not told["doubts"], told["message"]
    assert told["figures"]["requests"] == told["figures"]["completed"] > 0 and len(told["points"]) >= 4
    return dict(told["figures"])


def test_what_requests_share_is_computed_once_by_real_workers(live: Cluster) -> None:
    def computed() -> float:
        return sum(live.counted("baton_engine_computed_tokens_total").values())

    with cockpit(live) as url:
        before = computed()
        on = run(url, "caching", prompt=128, shared=0.8)
        between = computed()
        off = run(url, "caching", prompt=128, shared=0.8, caching="off")
        less = (computed() - between) - (between - before)
    assert on["requests"] == off["requests"] and on["cached"] > 0.5 and off["cached"] == 0
    assert less == pytest.approx(128 * on["requests"] * on["cached"]), "what was cached was not computed"


def test_real_workers_guess_if_they_are_asked_to(live: Cluster) -> None:
    def right() -> float:
        return live.counted("baton_engine_accepted_tokens_total")["decode"]

    with cockpit(live) as url:
        before = right()
        run(url, "speculation", speculation="off", output=64)
        assert right() == before
        run(url, "speculation", speculation="on", output=64)
        assert right() > before, "a step yielded several tokens"


def test_the_breaking_point_of_a_real_cluster_is_that_of_its_objectives(live: Cluster) -> None:
    with cockpit(live) as url:
        assert run(url, "breaking", rate=10.0, ttft_ms=10_000, tpot_ms=1000)["breaks"] == {"held": 10.0, "broke": None}
        strict = run(url, "breaking", rate=5.0, prompt=1024, ttft_ms=10, tpot_ms=1)
        assert strict["breaks"]["held"] is None and strict["breaks"]["broke"] and strict["attainment"] < 0.9


def test_what_is_refused_is_shown_at_its_slider(browser: Browser, live: Cluster) -> None:
    with cockpit(live) as url, opened(browser, url, allowed="400 (Bad Request)") as page:
        page.get_by_role("button", name="Continuous batching").click()
        knob(page, "Prompt").fill("2048")
        knob(page, "Output").fill("512")
        page.get_by_role("button", name="Start on the real cluster").click()
        expect(page.get_by_role("alert")).to_contain_text("prompt: with the output it is longer than the", timeout=SLOW)
        expect(knob(page, "Prompt")).to_have_attribute("aria-invalid", "true")
        knob(page, "Prompt").fill("128")
        expect(page.get_by_role("alert")).to_have_count(0)
        page.get_by_role("spinbutton", name="Prompt, tokens").fill("0")
        expect(page.locator("#size_refused")).to_contain_text("prompt: must be from 1", timeout=SLOW)
        page.get_by_role("spinbutton", name="Prompt, tokens").fill("1000")
        expect(page.get_by_role("row", name=re.compile("^KV of a prompt 131 MB KV of a token x 1000"))).to_be_visible(timeout=SLOW)


def test_a_cluster_that_is_gone_leaves_the_simulator(browser: Browser, live: Cluster) -> None:
    with cockpit(live) as url, opened(browser, url, allowed="503 (Service Unavailable)") as page:
        page.get_by_role("button", name="Continuous batching").click()
        expect(page.get_by_role("radio", name="real cluster", exact=True)).to_be_checked(timeout=SLOW)
        router = live.status()["router"]["pid"]
        os.kill(router, signal.SIGSTOP)
        try:
            page.get_by_role("button", name="Start").click()
            expect(page.locator("#refused, #instead").filter(has_text="the cluster does not answer").first).to_be_visible(timeout=SLOW)
            expect(page.get_by_role("radio", name="real cluster", exact=True)).to_be_disabled(timeout=SLOW)
            expect(page.locator("#connection")).to_have_text("simulator alone", timeout=SLOW)
        finally:
            os.kill(router, signal.SIGCONT)
        expect(page.get_by_role("radio", name="real cluster", exact=True)).to_be_enabled(timeout=SLOW)


def test_the_live_page_has_a_tab_for_it_and_the_cockpit_leads_back(browser: Browser, live: Cluster) -> None:
    with opened(browser, f"http://{live.page}/") as page:
        page.get_by_role("link", name="Cockpit").click()
        dialog = page.get_by_role("dialog", name="Cockpit")
        expect(dialog).to_contain_text("baton cockpit")
        expect(dialog.get_by_role("link")).to_have_attribute("href", "http://127.0.0.1:8475/")
        page.keyboard.press("Escape")
        expect(dialog).not_to_be_visible()
    with cockpit(live) as url, opened(browser, url) as page:
        expect(page.get_by_role("link", name="Live")).to_have_attribute("href", f"http://{live.page}/", timeout=SLOW)


def of_its_own(live: Cluster) -> list[psutil.Process]:
    """The supervisor of the cluster that a cockpit has started beside this one, and all that it has started."""
    found = []
    for one in psutil.process_iter(["cmdline", "environ"]):
        ours = (one.info["environ"] or {}).get("BATON_STATE_DIR") == live.env["BATON_STATE_DIR"]
        if ours and "--cluster.name cockpit" in " ".join(one.info["cmdline"] or []):
            found += [one, *one.children(recursive=True)]
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=SLOW / 1000)[1]


def test_a_static_batch_runs_on_a_cluster_of_its_own_beside_the_other(browser: Browser, live: Cluster) -> None:
    """Each batch waits half a second before it begins if it does not fill."""
    before = live.status()
    with cockpit(live) as url, opened(browser, url) as page:
        page.get_by_role("button", name="Static batching").click()
        page.get_by_role("radio", name="real cluster of its own").check()
        expect(page.get_by_role("radio", name="real cluster of its own")).to_have_accessible_description(re.compile("real processes"))
        expect(page.get_by_role("combobox", name="Batching")).to_have_value("static")
        for name, value in (("Seconds", 5), ("Requests per second", 1), ("Output", 16), ("Prompt", 64)):
            knob(page, name).fill(str(value))
        page.get_by_role("button", name="Start on a cluster of its own").click()
        expect(page.locator("#said")).to_contain_text("its cluster starts", timeout=SLOW)
        said = finish(page)
        assert ttft(said) >= 500, said
        expect(page.locator("#label")).to_have_text("real cluster of its own")
        expect(page.locator("#doubts")).to_contain_text(f"the cluster {live.name} runs on the same cores: the two disturb each other")
        expect(page.locator("#runs tbody tr").first).to_contain_text("tale, 0 prefill, 1 decode")
        for title in CHARTS:
            expect(page.get_by_role("img", name=f"{title}, real cluster of its own: ")).to_be_visible()
        look_at(page, "cockpit-own")
    after = live.status()
    assert not of_its_own(live) and [one["pid"] for one in after["workers"]] == [one["pid"] for one in before["workers"]]


def test_a_cluster_of_its_own_dies_with_the_cockpit(live: Cluster) -> None:
    """Killed, so that it can do nothing for it. Until then, continuous batches wait for nobody: the experiment before this one."""
    with cockpit_process(live) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        number = start(url, "static", "own", batching="continuous", duration_s=60, rate=1.0, output=16, prompt=64, batch=8)
        told_once(url, number, lambda told: any(0 < (point["ttft_p50"] or 0) < 0.5 for point in told["points"]))
        processes = of_its_own(live)
        try:
            assert len(processes) >= 4, "the supervisor, Redis, a router and a worker"
            process.kill()
            assert gone(processes)
        finally:
            for one in processes:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
    assert all(worker["state"] == "ready" for worker in live.workers()), "the other cluster goes on"


def test_workers_of_a_cluster_of_its_own_serve_until_it_is_stopped(live: Cluster) -> None:
    with cockpit(live) as url:
        with pytest.raises(urllib.error.HTTPError) as caught:
            start(url, "workers", "own", prefill=7, decode=8)
        assert caught.value.code == 400 and json.loads(caught.value.read())["error"]["param"] == "decode"
        number = start(url, "workers", "own", checkpoint="tale", prefill=1, decode=2, duration_s=60, rate=4.0, prompt=256, output=16)
        told_once(url, number, lambda told: sum(point["tokens"] > 0 for point in told["points"]) > 2)
        processes = of_its_own(live)
        assert len(processes) >= 6, "the supervisor, Redis, a router and three workers"
        ask(url, "stop", {})
        told = told_once(url, number, ended)
        assert told["state"] == "stopped" and told["figures"]["completed"] > 0 and told["label"] == "real cluster of its own"
        assert (told["facts"]["prefill"], told["facts"]["decode"]) == (1, 2) and gone(processes) and not of_its_own(live)


def test_a_model_of_another_size_is_made_and_rounded_for_a_cluster_of_its_own(live: Cluster) -> None:
    with cockpit(live) as url:
        settings = {"checkpoint": "untrained-27m", "weight_dtype": "int4", "kv_dtype": "int5"}
        told = told_once(url, start(url, "size", "own", rate=2.0, prompt=64, **settings), ended)
        assert told["state"] == "done", told["message"]
        assert told["figures"]["requests"] == told["figures"]["completed"] > 0 and told["facts"]["model"] == "untrained-27m"
        assert not [*Path(live.env["BATON_STATE_DIR"]).glob("cockpit-model*")] and not of_its_own(live)
