"""The live page in a real browser: it shows the cluster, its last minutes and its last requests, streams an answer and shows its stages,
and a killed worker turns red.

`BATON_TEST_PICTURES=folder` saves screenshots at two widths, light and dark.
"""

import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from chromium import SCHEMES, WIDTHS, chromium, needs_chromium, opened, picture
from live_cluster import Cluster, cluster, toy, toy_output
from playwright.sync_api import Browser, Page, Route, expect

from baton.cli.up import SHIPPED, TRY
from baton.client import Client

pytestmark = [pytest.mark.system, needs_chromium]
SLOW = 30_000  # ms
NOTE_PIECES = """() => {
    window.pieces = []  // times at which pieces of the answer came, ms
    new MutationObserver(() => window.pieces.push(performance.now())).observe(document.getElementById("answer"), {childList: true})
}"""
GREEN, RED = {"rgb(0, 121, 90)", "rgb(47, 198, 154)"}, {"rgb(200, 70, 10)", "rgb(255, 122, 69)"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def live() -> Iterator[Cluster]:
    with cluster(SHIPPED, "--slo.ttft-s", "5", "--router.bypass-tokens", "0", prefill=1, decode=2) as running:
        yield running


@pytest.fixture
def page(browser: Browser, live: Cluster) -> Iterator[Page]:
    with opened(browser, address(live)) as page:
        yield page


@contextmanager
def busy(live: Cluster) -> Iterator[None]:
    """Requests are sent and answered while the block runs."""
    over = threading.Event()

    def ask(number: int) -> None:
        with Client(live.grpc) as client:
            while not over.is_set():
                prompt = f"{number} {time.monotonic()} {TRY}"
                with client.generate(prompt, max_tokens=200, ignore_eos=True) as stream:
                    for _ in stream:
                        if over.is_set():
                            break

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in asking:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in asking:
            thread.join()


def address(live: Cluster) -> str:
    return f"http://{live.page}/"


def card(page: Page, worker: str) -> Any:
    return page.locator(f'.card[data-worker="{worker}"]')


def test_the_page_shows_the_pools(page: Page, live: Cluster) -> None:
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#model")).to_have_text("tale")
    for name in ("prefill-0", "decode-0", "decode-1"):
        expect(card(page, name).locator(".state")).to_have_text("ready")
    assert page.locator("#wires path").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"


def test_without_a_planner_a_sentence_says_so(page: Page) -> None:
    panel = page.get_by_role("region", name="Planner")
    expect(panel.get_by_role("status")).to_contain_text("No planner runs", timeout=SLOW)
    expect(panel.locator("details")).to_have_count(0)


def test_a_workers_gpus_are_shown_as_far_as_they_are_told(page: Page, live: Cluster) -> None:
    """No GPU is here: the router's answer is given some."""
    none = {"name": "", "memory_used": 0, "memory_total": 0, "busy": None, "watts": None, "ecc_corrected": None, "ecc_uncorrected": None}
    sick = {"memory_used": 61 << 30, "memory_total": 139 << 30, "busy": 0.874, "watts": 512.5, "ecc_corrected": 7, "ecc_uncorrected": 2}
    planted = {
        "prefill-0": [{**none, **sick, "gpu": "0", "name": "NVIDIA H200"}, {**none, "gpu": "1", "watts": 80.0, "ecc_corrected": 0}],
        "decode-0": [{**none, "gpu": "MIG-4f3e", "name": "NVIDIA H200 MIG 3g.71gb", "memory_used": 1 << 30, "memory_total": 4 << 30}],
    }

    def plant(route: Any) -> None:
        told = route.fetch().json()
        for worker in told["workers"]:
            assert worker["gpus"] == [], "there is none here"
            worker["gpus"] = planted.get(worker["name"], [])
        route.fulfill(json=told)

    page.route("**/live", plant)
    lines = card(page, "prefill-0").locator(".gpu")
    expect(lines).to_have_text(
        ["GPU 0 61.0 GiB of 139.0 GiB · 87 % busy · 513 W · memory errors: 7 corrected, 2 uncorrected", "GPU 1 80 W · memory errors: none"],
        timeout=SLOW,
    )
    expect(lines.locator(".bad")).to_have_text("memory errors: 7 corrected, 2 uncorrected")
    assert lines.first.get_attribute("title") == "NVIDIA H200"
    shares = "bars => bars.map(bar => bar.getBoundingClientRect().width / bar.parentElement.getBoundingClientRect().width)"
    assert lines.locator(".blocks i").evaluate_all(shares) == pytest.approx([61 / 139], abs=0.01)
    expect(card(page, "decode-0").locator(".gpu")).to_have_text("GPU slice 1.0 GiB of 4.0 GiB")
    expect(card(page, "decode-1").locator(".gpu")).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    picture(page, "gpus")
    page.set_viewport_size({"width": min(WIDTHS), "height": 900})
    picture(page, "gpus-narrow")


def test_the_playground_streams_an_answer_and_shows_its_stages(page: Page) -> None:
    page.fill("#max_tokens", "200")
    page.fill("#temperature", "0")
    page.evaluate(NOTE_PIECES)
    page.click("#send")
    expect(page.locator("#stages dt")).to_have_text(["queue", "prefill", "transfer", "decode"], timeout=SLOW)
    times = page.evaluate("window.pieces")
    assert len(times) > 5 and times[-1] - times[0] > 50, "the answer came all at once"
    assert re.search(r"\w+ \w+", page.locator("#answer").inner_text())
    assert re.search(r"\d+ blocks, [\d.]+ \w+iB", page.locator("#stages").inner_text())
    expect(page.locator("#ended tbody tr").first.locator(".bar i")).not_to_have_count(0)
    expect(page.locator("#moved span")).to_have_text("KV moved/s")
    expect(page.locator("#totals")).to_have_text(re.compile(r"Since the router started: .* (1 handoff|\d+ handoffs), [\d.]+ \w+ of KV$"))
    expect(page.locator("#goodput span")).to_have_text(re.compile("100 % meet the SLO"))


def test_stop_cancels_the_request(page: Page, live: Cluster) -> None:
    page.fill("#max_tokens", "500")
    page.fill("#temperature", "0")  # a drawn seed may end the answer at once
    page.click("#send")
    expect(page.locator("#answer")).not_to_be_empty(timeout=SLOW)
    page.click("#send")
    expect(page.locator("#send")).to_have_text("Send")
    live.wait(lambda: not live.residue())


def test_an_invalid_setting_is_reported(browser: Browser, live: Cluster) -> None:
    with opened(browser, address(live), allowed="400 (Bad Request)") as page:
        page.fill("#max_tokens", "9000")
        page.click("#send")
        expect(page.locator("#answer.bad")).to_have_text(re.compile("max_tokens"))


def test_an_answer_is_shown_as_text_and_never_as_html(page: Page) -> None:
    said = 'data: {"choices":[{"delta":{"content":"<b id=x>"}}]}\n\ndata: [DONE]\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=said))
    page.click("#send")
    expect(page.locator("#answer")).to_have_text("<b id=x>")
    assert page.locator("#answer b").count() == 0


def test_the_playground_shows_thinking_runs_calls_and_sends_their_results_back(page: Page) -> None:
    """The calls are run in the browser. Their pieces may come in any number of events."""
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "calculate", "arguments": ""}}
    pieces = ['{"expression": ', '"(2 + 3) * -4 / 8"}']
    first = [
        {"reasoning": "Let me ", "reasoning_content": "Let me "},
        {"reasoning_content": "compute."},
        {"tool_calls": [call]},
        *({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces),
        {"tool_calls": [call | {"index": 1, "id": "c2", "function": {"name": "calculate", "arguments": '{"expression": "alert(1)"}'}}]},
    ]
    bodies: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        deltas = first if len(bodies) == 1 else [{"content": "It is <b>-2.5</b>."}]
        events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
        route.fulfill(body="".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))

    page.route("**/v1/chat/completions", answer)
    page.check("#tools")
    page.click("#send")
    expect(page.locator("#answer")).to_contain_text("It is <b>-2.5</b>.")
    expect(page.locator("#answer .thoughts")).to_have_text("Let me compute.")
    computed = 'calculate {"expression": "(2 + 3) * -4 / 8"} → -2.5'
    refused = re.compile(r'"alert\(1\)"} → error: only numbers')
    expect(page.locator("#answer .call")).to_have_text([computed, refused])
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["calculate", "time"]
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "tool", "tool"]
    assert [message.get("tool_call_id") for message in bodies[1]["messages"][2:]] == ["c1", "c2"]


def test_the_model_that_ships_computes_a_sum_with_the_playgrounds_calculator(page: Page) -> None:
    page.fill("#prompt", "What is 238 plus 467?")
    page.fill("#temperature", "0")
    page.check("#tools")
    page.click("#send")
    expect(page.locator("#answer .call")).to_have_text('calculate {"expression": "238 + 467"} → 705', timeout=SLOW)
    expect(page.locator("#answer")).to_contain_text("238 plus 467 is 705.", timeout=SLOW)
    picture(page, "playground-tools")


def ask_at_once(live: Cluster, name: str, max_tokens: int, timeout_ms: int = 60_000) -> int:
    """Returns the HTTP status of the answer."""
    body = {"model": "tale", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"content-type": "application/json", "x-request-id": name, "x-request-timeout-ms": str(timeout_ms)}
    asked = urllib.request.Request(f"http://{live.http}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def rows(page: Page) -> list[str]:
    """The ids of the requests in the list."""
    return page.locator("#ended tbody tr th").all_inner_texts()


def test_every_request_that_is_kept_can_be_found(page: Page, live: Cluster) -> None:
    assert [ask_at_once(live, f"quick-{number}", 1) for number in range(24)] == [200] * 24
    assert ask_at_once(live, "long", 300) == 200 and ask_at_once(live, "too-much", 9000) == 400
    expect(page.locator("#ended tbody tr").first).to_contain_text("too-much", timeout=SLOW)
    expect(page.locator("#range")).to_have_text(re.compile(r"^1.20 of \d+$"))

    tokens = page.locator("[data-sort=tokens]")
    tokens.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#ended th", has=tokens)).to_have_attribute("aria-sort", "descending")
    told = page.evaluate("fetch('requests?sort=tokens&limit=20').then(answer => answer.json())")
    expect(page.locator("#ended tbody tr th")).to_have_text([one["request_id"] for one in told["requests"]])
    assert "long" in rows(page)
    page.keyboard.press("Enter")
    expect(page.locator("#ended th", has=tokens)).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("#ended tbody tr").first).to_contain_text("too-much")

    seen = {*rows(page)}
    while page.locator("#later").is_enabled():
        before = page.locator("#range").inner_text()
        page.click("#later")
        expect(page.locator("#range")).not_to_have_text(before)
        seen |= {*rows(page)}
    assert {f"quick-{number}" for number in range(24)} | {"long", "too-much"} <= seen
    page.check("#only_failed")
    expect(page.locator("#ended tbody tr.failed", has_text="too-much")).to_have_count(1)
    expect(page.locator("#ended tbody tr:not(.failed)")).to_have_count(0)


def test_requests_are_found_by_how_they_ended_and_where(page: Page, live: Cluster) -> None:
    assert ask_at_once(live, "found", 2) == 200 and ask_at_once(live, "over-the-top", 9000) == 400
    page.get_by_label("ended", exact=True).select_option("invalid")
    expect(page.locator("#ended tbody tr").first).to_contain_text("over-the-top", timeout=SLOW)
    expect(page.locator("#ended tbody tr:not(.failed)")).to_have_count(0)
    page.get_by_label("ended", exact=True).select_option("ok")
    expect(page.locator("#ended tbody tr").first).to_contain_text("found", timeout=SLOW)
    where = page.evaluate("fetch('live/found').then(answer => answer.json())")["laps"][-1]["worker"]
    for worker in ("decode-0", "decode-1"):
        page.get_by_label("at worker").select_option(worker)
        told = page.evaluate(f"fetch('requests?outcome=ok&worker={worker}&limit=20').then(answer => answer.json())")["requests"]
        expect(page.locator("#ended tbody tr th")).to_have_text([one["request_id"] for one in told], timeout=SLOW)
        assert ("found" in [one["request_id"] for one in told]) == (worker == where)


def test_slow_requests_are_found_among_quick_ones(page: Page, live: Cluster) -> None:
    assert ask_at_once(live, "hare", 1) == ask_at_once(live, "tortoise", 250) == 200
    quick, slow = (page.evaluate(f"fetch('live/{name}').then(answer => answer.json())")["e2e"] for name in ("hare", "tortoise"))
    border = f"{(quick + slow) / 2:.3f}"
    page.get_by_role("spinbutton", name="slower than").fill(border)
    page.keyboard.press("Enter")
    expect(page.locator("#ended tbody tr", has_text="hare")).to_have_count(0, timeout=SLOW)
    told = page.evaluate(f"fetch('requests?slower_than={border}&limit=20').then(answer => answer.json())")
    assert told["matched"] < page.evaluate("fetch('requests').then(answer => answer.json())")["matched"]
    assert all(one["e2e"] >= float(border) for one in told["requests"])
    expect(page.locator("#ended tbody tr th")).to_have_text([one["request_id"] for one in told["requests"]])
    assert rows(page)[0] == "tortoise"
    page.get_by_role("spinbutton", name="slower than").fill("")
    page.keyboard.press("Enter")
    expect(page.locator("#ended tbody tr", has_text="hare")).to_have_count(1)


def test_the_bars_of_the_list_have_one_scale(page: Page, live: Cluster) -> None:
    assert ask_at_once(live, "brief", 1) == ask_at_once(live, "lengthy", 200) == 200
    expect(page.locator("#ended tbody tr").first).to_contain_text("lengthy", timeout=SLOW)
    times = {one["request_id"]: one["e2e"] for one in page.evaluate("fetch('requests?limit=20').then(answer => answer.json())")["requests"]}
    width = """row => {
        const [bar, last] = [".bar", ".bar :last-child"].map(part => row.querySelector(part).getBoundingClientRect());
        return last.right - bar.left;
    }"""
    drawn = {name: page.locator("#ended tbody tr", has_text=name).first.evaluate(width) for name in ("brief", "lengthy")}
    whole = page.locator("#ended .bar").first.evaluate("bar => bar.getBoundingClientRect().width")
    for name, wide in drawn.items():
        share = times[name] / max(times.values())
        assert wide == pytest.approx(share * whole, abs=5), "each stage has at least one pixel"


def test_a_row_leads_to_the_trace_of_its_request(page: Page, live: Cluster) -> None:
    assert ask_at_once(live, "told/apart", 4) == 200
    link = page.locator("#ended a", has_text="told/apart").first
    link.click(timeout=SLOW)
    expect(page.locator("#trace")).to_be_visible()
    expect(page.locator("#trace_title")).to_have_text("told/apart")
    expect(page.locator("#trace .waterfall tr td:first-child")).to_have_text(["queue", "prefill", "transfer", "decode"])
    expect(page.locator("#trace dl")).to_contain_text(re.compile(r"connected [\d.]+ m?s, read [\d.]+ m?s, verified [\d.]+ m?s"))
    told = page.evaluate("fetch(document.querySelector('#trace_body > a').href).then(answer => answer.json())")
    assert told["request_id"] == "told/apart" and link.get_attribute("href") == "live/told%2Fapart"
    page.keyboard.press("Escape")
    expect(page.locator("#trace")).not_to_be_visible()
    page.goto(f"{address(live)}#request=told%2Fapart")
    expect(page.locator("#trace_title")).to_have_text("told/apart")


def test_a_request_that_failed_often_is_one_line(page: Page, live: Cluster) -> None:
    assert {ask_at_once(live, "stubborn", 400, timeout_ms=1) for _ in range(8)} == {504}
    line = page.locator("#errors tbody tr", has_text="DEADLINE")
    expect(line).to_have_count(1)
    expect(line).to_contain_text(re.compile(r"\d from 1 request"))
    expect(line.locator("a")).to_have_text("stubborn")


def test_the_last_minutes_are_drawn_and_readable_with_the_keyboard(page: Page, live: Cluster) -> None:
    assert ask_at_once(live, "drawn", 50) == 200
    times = [f"{name}_{quantile}" for name in ("ttft", "tpot", "itl") for quantile in ("p50", "p95")]
    for name in ("ok", "goodput", "errors", "tokens", "running", "queued", *times, "kv"):
        expect(page.locator(f'#curves [data-series="{name}"]')).to_have_attribute("d", re.compile("^M"), timeout=SLOW)
    chart = page.locator("#curves figure", has_text="Time to first token")
    expect(chart.locator("svg")).to_have_attribute("aria-label", re.compile("^Time to first token, last 15 minutes: now P50 .*; highest "))
    chart.locator("svg").focus()
    page.keyboard.press("ArrowLeft")
    for figure in page.locator("#curves figure").all():
        expect(figure.locator(".values span").first).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))


def test_the_number_beside_the_dots_is_the_number_of_dots(page: Page, live: Cluster) -> None:
    compare = """() => {
        const told = [...document.querySelectorAll(".here")].filter(each => each.children.length)
            .map(each => [each.querySelectorAll(".chips i").length, parseInt(each.querySelector(".note").textContent)]);
        return told.length ? told : false;
    }"""
    with busy(live):
        for _ in range(5):
            told = page.wait_for_function(compare).json_value()
            assert all(dots == number for dots, number in told), told
            page.wait_for_timeout(200)


def test_a_killed_worker_turns_red_and_its_replacement_green(page: Page, live: Cluster) -> None:
    one = card(page, "decode-1")
    expect(one.locator(".state")).to_have_text("ready")
    assert colour(one) in GREEN
    pid = live.kill("decode-1")
    expect(one.locator(".state")).to_have_text(re.compile(r"^(no answer for|lost) \d+ s( ago)?; restarting$"), timeout=SLOW)
    assert colour(one) in RED
    picture(page, "killed")
    expect(one.locator(".state")).to_have_text("ready", timeout=2 * SLOW)
    assert colour(one) in GREEN and next(worker["pid"] for worker in live.workers() if worker["name"] == "decode-1") != pid


def colour(one: Any) -> str:
    return str(one.evaluate("each => getComputedStyle(each).borderLeftColor"))


def test_a_request_that_lost_its_worker_completes_and_shows_the_retry(browser: Browser, tmp_path: Path) -> None:
    text = "hello 0"
    assert len(toy_output(list(f"user: {text}\nassistant: ".encode()), max_tokens=150, ignore_eos=False)) == 150, (
        "the toy ends this text too soon"
    )
    with cluster(toy(tmp_path / "toy", step_delay_ms=60), decode=2) as live, opened(browser, address(live)) as page:
        page.fill("#prompt", text)
        page.fill("#max_tokens", "150")
        page.fill("#temperature", "0")
        page.click("#send")
        page.wait_for_selector(".chips i.decode")
        live.kill(str(page.locator(".card", has=page.locator(".chips i.decode")).get_attribute("data-worker")))
        expect(page.locator("#stages")).to_contain_text("1 retry", timeout=SLOW)
        first = page.locator("#ended tbody tr").first
        expect(first).to_contain_text("→ 150")
        expect(first.locator("td").last).to_have_text("1")
        first.locator("a").click()
        expect(page.locator("#trace tr.failed")).to_contain_text("WORKER_LOST")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_two_widths_in_light_and_dark(browser: Browser, live: Cluster, width: int) -> None:
    with opened(browser, address(live), viewport={"width": width, "height": 900}) as page:
        expect(card(page, "decode-0").locator(".state")).to_have_text("ready", timeout=SLOW)
        page.fill("#max_tokens", "120")
        page.click("#send")
        expect(page.locator("#stages dt")).to_have_count(4, timeout=SLOW)
        with busy(live):
            page.wait_for_selector(".chips i.decode")
            page.wait_for_timeout(1500)
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                picture(page, f"page-{width}-{scheme}")
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
                back = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (back == "rgb(20, 23, 28)") == (scheme == "dark")


def test_the_page_asks_for_an_api_key_if_one_is_required(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"me {sha256(b'secret').hexdigest()}\n")
    with (
        cluster(toy(tmp_path / "toy"), "--security.api-keys", str(keys), "--launcher.hang-s", "120", prefill=0) as live,
        opened(browser, address(live), allowed="401 (Unauthorized)") as page,
    ):
        expect(page.locator("#connection")).to_have_text("an API key is needed")
        assert page.locator(".card").count() == 1
        page.fill("#key", "secret")
        page.click("#login button")
        expect(page.locator("#connection")).to_have_text("live")
        page.click("#send")
        expect(page.locator("#stages dt")).to_have_count(4, timeout=SLOW)
        expect(page.locator("#ended tbody tr").first.locator("i.bypass")).to_have_count(1)  # and in the colour that the legend shows
        same = "document.querySelector('#ended i.bypass'), document.querySelector('.legend i.bypass')"
        assert page.evaluate(f"new Set([{same}].map(each => getComputedStyle(each).backgroundColor)).size") == 1
        assert (
            page.locator("#ended th.tenant").is_visible()
            and page.locator("#ended tbody tr").first.locator("td").nth(1).inner_text() == "me"
        )
        router = live.status()["router"]["pid"]
        os.kill(router, signal.SIGSTOP)
        try:
            expect(page.locator("#connection")).to_have_text(re.compile(r"^no connection since \d\d:\d\d:\d\d$"), timeout=SLOW)
            assert "grayscale(1)" in page.evaluate("getComputedStyle(document.querySelector('main')).filter"), "nothing is green now"
            picture(page, "no-connection")
        finally:
            os.kill(router, signal.SIGCONT)
        expect(page.locator("#connection")).to_have_text("live", timeout=SLOW)
        assert page.evaluate("getComputedStyle(document.querySelector('main')).filter") == "none"
