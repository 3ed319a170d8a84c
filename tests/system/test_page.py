"""The live page in a real browser: it shows the cluster, streams an answer and shows its stages, and a killed worker turns red.

`BATON_TEST_PICTURES=folder` saves screenshots at two widths, light and dark.
"""

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from live_cluster import Cluster, cluster, toy, toy_output
from playwright.sync_api import Browser, Page, expect, sync_playwright

from baton.cli.up import SHIPPED, TRY
from baton.client import Client

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
ALONE = [  # works as root, and does not look for updates
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
SLOW = 30_000  # ms
NOTE_PIECES = """() => {
    window.pieces = []  // times at which pieces of the answer came, ms
    new MutationObserver(() => window.pieces.push(performance.now())).observe(document.getElementById("answer"), {childList: true})
}"""
GREEN, RED = {"rgb(0, 121, 90)", "rgb(47, 198, 154)"}, {"rgb(200, 70, 10)", "rgb(255, 122, 69)"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ALONE)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def live() -> Iterator[Cluster]:
    with cluster(SHIPPED, "--slo.ttft-s", "5", "--router.bypass-tokens", "0", prefill=1, decode=2) as running:
        yield running


@pytest.fixture
def page(browser: Browser, live: Cluster) -> Iterator[Page]:
    with opened(browser, live) as page:
        yield page


class opened:
    """A visitor of the page. An error or warning in the console is a failure, and so is a request to another server."""

    def __init__(self, browser: Browser, live: Cluster, allowed: str = "", **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page, self.live, self.allowed = self.context.new_page(), live, allowed
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: None if self._is_ours(request.url) else self.complaints.append(request.url))

    def _is_ours(self, url: str) -> bool:
        return url.startswith((f"http://{self.live.page}/", "data:"))

    def __enter__(self) -> Page:
        self.page.goto(f"http://{self.live.page}/")
        return self.page

    def __exit__(self, kind: object, *_: object) -> None:
        self.context.close()
        if kind is None:
            complaints = [text for text in self.complaints if not (self.allowed and self.allowed in text)]
            assert not complaints


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

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in asking:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in asking:
            thread.join()


def card(page: Page, worker: str) -> Any:
    return page.locator(f'.card[data-worker="{worker}"]')


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("BATON_TEST_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_the_page_shows_the_pools(page: Page, live: Cluster) -> None:
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#model")).to_have_text("tale")
    for name in ("prefill-0", "decode-0", "decode-1"):
        expect(card(page, name).locator(".state")).to_have_text("ready")
    assert page.locator("#wires path").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"


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
    expect(page.locator("#recent tbody tr").first.locator(".bar i")).not_to_have_count(0)
    expect(page.locator("#moved span")).to_have_text(re.compile("KV moved/s, (1 handoff|[2-9] handoffs)$"))
    expect(page.locator("#goodput span")).to_have_text(re.compile("100 % meet the SLO"))


def test_stop_cancels_the_request(page: Page, live: Cluster) -> None:
    page.fill("#max_tokens", "500")
    page.click("#send")
    expect(page.locator("#answer")).not_to_be_empty(timeout=SLOW)
    page.click("#send")
    expect(page.locator("#send")).to_have_text("Send")
    live.wait(lambda: not live.residue())


def test_an_invalid_setting_is_reported(browser: Browser, live: Cluster) -> None:
    with opened(browser, live, allowed="400 (Bad Request)") as page:
        page.fill("#max_tokens", "9000")
        page.click("#send")
        expect(page.locator("#answer.bad")).to_have_text(re.compile("max_tokens"))


def test_an_answer_is_shown_as_text_and_never_as_html(page: Page) -> None:
    said = 'data: {"choices":[{"delta":{"content":"<b id=x>"}}]}\n\ndata: [DONE]\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=said))
    page.click("#send")
    expect(page.locator("#answer")).to_have_text("<b id=x>")
    assert page.locator("#answer b").count() == 0


def test_a_killed_worker_turns_red_and_its_replacement_green(page: Page, live: Cluster) -> None:
    one = card(page, "decode-1")
    expect(one.locator(".state")).to_have_text("ready")
    assert colour(one) in GREEN
    pid = live.kill("decode-1")
    expect(one.locator(".state")).to_have_text(re.compile("unreachable|gone"), timeout=SLOW)
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
    with cluster(toy(tmp_path / "toy", step_delay_ms=20), decode=2) as live, opened(browser, live) as page:
        page.fill("#prompt", text)
        page.fill("#max_tokens", "150")
        page.fill("#temperature", "0")
        page.click("#send")
        page.wait_for_selector(".chips i.decode")
        live.kill(str(page.locator(".card", has=page.locator(".chips i.decode")).get_attribute("data-worker")))
        expect(page.locator("#stages")).to_contain_text("1 retry", timeout=SLOW)
        expect(page.locator("#recent tbody tr").first).to_contain_text("→ 150")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
def test_the_page_fits_two_widths_in_light_and_dark(browser: Browser, live: Cluster, width: int, scheme: str) -> None:
    with opened(browser, live, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        expect(card(page, "decode-0").locator(".state")).to_have_text("ready", timeout=SLOW)
        page.fill("#max_tokens", "120")
        page.click("#send")
        expect(page.locator("#stages dt")).to_have_count(4, timeout=SLOW)
        with busy(live):
            page.wait_for_selector(".chips i.decode")
            page.wait_for_timeout(3000)
            picture(page, f"page-{width}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(20, 23, 28)") == (scheme == "dark")


def test_the_page_asks_for_an_api_key_if_one_is_required(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"me {sha256(b'secret').hexdigest()}\n")
    with (
        cluster(toy(tmp_path / "toy"), "--security.api-keys", str(keys), "--launcher.hang-s", "120", prefill=0) as live,
        opened(browser, live, allowed="401 (Unauthorized)") as page,
    ):
        expect(page.locator("#connection")).to_have_text("an API key is needed")
        assert page.locator(".card").count() == 1
        page.fill("#key", "secret")
        page.click("#login button")
        expect(page.locator("#connection")).to_have_text("live")
        page.click("#send")
        expect(page.locator("#stages dt")).to_have_count(4, timeout=SLOW)
        router = live.status()["router"]["pid"]
        os.kill(router, signal.SIGSTOP)
        try:
            expect(page.locator("#connection")).to_have_text("the router does not answer", timeout=SLOW)
        finally:
            os.kill(router, signal.SIGCONT)
        expect(page.locator("#connection")).to_have_text("live", timeout=SLOW)
