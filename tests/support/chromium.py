"""A real browser for tests of pages. `BATON_TEST_PICTURES=folder` saves screenshots."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(PATH is None, reason="no Chromium: apt-get install chromium")
ALONE = [  # works as root, and does not look for updates
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDTHS = (1280, 390)
TIMEOUT_MS = 60_000  # of what the browser does itself


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PATH, args=ALONE)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, allowed: str = "", **options: Any) -> Iterator[Page]:
    """A visitor. An error or warning in the console is a failure, and so is a request to another server."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page, complaints = context.new_page(), list[str]()
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else complaints.append(request.url))
    page.set_default_timeout(TIMEOUT_MS)
    try:
        page.goto(url)
        yield page
        assert not [text for text in complaints if not (allowed and allowed in text)]
    finally:
        context.close()


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("BATON_TEST_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def look_at(page: Page, name: str) -> None:
    """The page fits both widths, light and dark."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(300)
            picture(page, f"{name}-{width}-{scheme}")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
