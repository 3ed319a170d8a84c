"""The server of the live page: its files, its access rules, and the API that it serves too."""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from http_door import CHAT, HELLO, Call, House, toy_tokenizer

from baton.cluster.keys import ApiKeys, Entry
from router.http.page import Page
from router.tokenizer import Tokenizer

HOST = "127.0.0.1:8472"
KEYS = ApiKeys([Entry("a", sha256(b"secret").digest(), "shop")])


class Told:
    """A stand-in for `router.live.Live`."""

    async def look(self) -> dict[str, Any]:
        return {"model": "toy"}

    async def find(self, request_id: str) -> dict[str, Any] | None:
        return {"request_id": request_id} if request_id in ("r1", "a/b") else None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


async def ask(
    tokenizer: Tokenizer,
    path: str,
    method: str = "GET",
    body: Any = b"",
    keys: ApiKeys | None = None,
    at: str = "127.0.0.1",
    **headers: str,
) -> Any:
    house = House(tokenizer, keys=keys or ApiKeys())
    page = Page(Told(), house.door, house.keys, at)  # type: ignore[arg-type]
    return await Call(page, method, path, body, headers={"host": HOST, **headers}).run()


@pytest.mark.parametrize(("path", "kind"), [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "javascript")])
async def test_the_page_consists_of_three_files_without_external_resources(tokenizer: Tokenizer, path: str, kind: str) -> None:
    answer = await ask(tokenizer, path)
    assert answer.status == 200 and kind in answer.headers["content-type"]
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert b"//" not in answer.body.replace(b"http://www.w3.org/2000/svg", b"").replace(b"// ", b"")


@pytest.mark.parametrize("path", ["/page", "/../page.py", "/static/page.js", "/live/r2", "/%2e%2e/page.py"])
async def test_no_other_file_is_served(tokenizer: Tokenizer, path: str) -> None:
    answer = await ask(tokenizer, path)
    assert answer.status == 404 and answer.error["code"] == "not_found"


async def test_live_data_and_single_requests_are_served(tokenizer: Tokenizer) -> None:
    assert (await ask(tokenizer, "/live")).json == {"model": "toy"}
    assert (await ask(tokenizer, "/live/r1")).json == {"request_id": "r1"}
    assert (await ask(tokenizer, "/live/a/b")).json == {"request_id": "a/b"}
    assert (await ask(tokenizer, "/live", "POST")).status == 405


async def test_the_playground_uses_the_same_door(tokenizer: Tokenizer) -> None:
    answer = await ask(tokenizer, CHAT, "POST", HELLO, origin=f"http://{HOST}")
    assert answer.status == 200 and answer.json["choices"][0]["message"]["content"] == "abc" and answer.headers["x-request-id"]
    assert (await ask(tokenizer, CHAT, "POST", {})).status == 400


@pytest.mark.parametrize("path", ["/", "/live", "/live/r1", CHAT])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8000"},
        {"host": "evil.example:8472"},
        {"host": ""},
    ],
)
async def test_pages_of_other_origins_are_refused(tokenizer: Tokenizer, path: str, headers: dict[str, Any]) -> None:
    answer = await ask(tokenizer, path, "POST" if path == CHAT else "GET", json.dumps(HELLO).encode(), **headers)
    assert answer.status == 403 and answer.error["code"] in ("foreign_origin", "foreign_host")


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8472", "127.9.9.9:1"])
async def test_every_name_of_the_loopback_address_is_accepted(tokenizer: Tokenizer, host: str) -> None:
    assert (await ask(tokenizer, "/live", host=host)).status == 200


async def test_a_page_that_listens_on_the_network_accepts_any_host_name(tokenizer: Tokenizer) -> None:
    assert (await ask(tokenizer, "/live", at="0.0.0.0", host="baton.example")).status == 200
    assert (await ask(tokenizer, "/live", at="0.0.0.0", host="baton.example", origin="https://evil.example")).status == 403


@pytest.mark.parametrize("path", ["/live", "/live/r1"])
async def test_with_keys_configured_live_data_requires_a_key(tokenizer: Tokenizer, path: str) -> None:
    assert (await ask(tokenizer, "/", keys=KEYS)).status == 200
    assert (await ask(tokenizer, path, keys=KEYS)).error["code"] == "invalid_api_key"
    assert (await ask(tokenizer, path, keys=KEYS, authorization="Bearer secret")).status == 200


def test_the_script_uses_only_ids_that_exist_in_the_page() -> None:
    """Every id that the script looks up is in the page."""
    static = Path(__file__).parents[3] / "router" / "http" / "static"
    script = (static / "page.js").read_text()
    wanted = {*re.findall(r'(?:\$|put)\("(\w+)"', script)}
    assert wanted and wanted <= {*re.findall(r'id="(\w+)"', (static / "page.html").read_text())}
