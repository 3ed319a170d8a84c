"""The server of the live page: its files, its access rules, and the API that it serves too."""

import asyncio
import json
import re
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from http_door import CHAT, HELLO, Call, House, toy_tokenizer

from baton.cluster.keys import ApiKeys, KeyEntry
from router.http import page
from router.http.page import PAGE_ROWS, Page
from router.listing import Query
from router.tokenizer import Tokenizer

HOST = "127.0.0.1:8472"
KEYS_OF_TWO = (KeyEntry("a", sha256(b"secret").digest(), "shop"), KeyEntry("o", sha256(b"root").digest(), "ops", admin=True))
KEYS = ApiKeys([KeyEntry("a", sha256(b"secret").digest(), "shop")])


class Told:
    """A stand-in for `router.live.Live`."""

    async def look(self) -> dict[str, Any]:
        return {"model": "toy"}

    async def find(self, request_id: str) -> dict[str, Any] | None:
        return {"request_id": request_id, "tenant": "shop"} if request_id in ("r1", "a/b") else None

    async def ended(self, query: Query) -> tuple[list[tuple[float, dict[str, Any]]], int]:
        told = [{"request_id": asdict(query), "tenant": tenant} for tenant in ("shop", "bank")]
        return [(0.0, one) for one in told], 512

    async def draw(self, since: int) -> list[dict[str, Any]]:
        return [{"number": since}]

    async def plans(self) -> dict[str, Any]:
        return {"planner": None}


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


async def test_visitors_of_the_same_moment_share_a_look(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Told):
        looks = 0

        async def look(self) -> dict[str, Any]:
            self.looks += 1
            await asyncio.sleep(0)
            return {"looks": self.looks}

    now, told, house = 0.0, Counted(), House(tokenizer)
    monkeypatch.setattr(page, "loop_time", lambda: now)
    app = Page(told, house.door, house.keys, "127.0.0.1")  # type: ignore[arg-type]

    async def visit() -> Any:
        return (await Call(app, "GET", "/live", b"", headers={"host": HOST}).run()).json["looks"]

    assert set(await asyncio.gather(*(visit() for _ in range(20)))) == {1}
    now += page.SHARED_S
    assert set(await asyncio.gather(*(visit() for _ in range(20)))) == {2}


STATIC = Path(__file__).parents[3] / "router" / "http" / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), ("/page.css", "text/css"), *((f"/{script.name}", "javascript") for script in SCRIPTS)]
)
async def test_the_files_of_the_page_name_no_external_resources(tokenizer: Tokenizer, path: str, kind: str) -> None:
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
    assert (await ask(tokenizer, "/live/r1")).json == {"request_id": "r1", "tenant": "shop"}
    assert (await ask(tokenizer, "/live/a/b")).json["request_id"] == "a/b"
    assert (await ask(tokenizer, "/live", "POST")).status == 405
    assert (await ask(tokenizer, "/curves?since=7")).json == {"step": 5.0, "kept": 180, "points": [{"number": 7}]}
    assert (await ask(tokenizer, "/plans")).json == {"planner": None}


async def test_a_list_of_requests_is_served_page_by_page(tokenizer: Tokenizer) -> None:
    told = (
        await ask(
            tokenizer, "/requests?sort=total&ascending=true&failed=true&slower_than=0.5&outcome=ok&worker=d0&tenant=x&skip=50&limit=25"
        )
    ).json
    narrowed = {"slower_than": 0.5, "outcome": "ok", "worker": "d0", "tenant": "x"}
    asked = {"sort": "total", "ascending": True, "failed": True, **narrowed, "skip": 50, "limit": 25}
    assert told["requests"][0]["request_id"] == asked and told["matched"] == 512 and told["skip"] == 50
    asked = asdict(Query(limit=PAGE_ROWS))
    assert (await ask(tokenizer, "/requests")).json["requests"][0]["request_id"] == asked


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("sort=colour", "sort"),
        ("failed=1", "failed"),
        ("ascending=", "ascending"),
        ("slower_than=fast", "slower_than"),
        ("slower_than=nan", "slower_than"),
        ("slower_than=-1", "slower_than"),
        ("outcome=lost", "outcome"),
        ("skip=-1", "skip"),
        ("skip=999999", "skip"),
        ("limit=0", "limit"),
        (f"limit={PAGE_ROWS + 1}", "limit"),
        ("limit=9%C2%B2", "limit"),
    ],
)
async def test_a_list_that_cannot_be_is_refused_by_the_name_of_its_field(tokenizer: Tokenizer, query: str, param: str) -> None:
    answer = await ask(tokenizer, f"/requests?{query}")
    assert answer.status == 400 and answer.error["param"] == param
    assert (await ask(tokenizer, "/curves?since=x")).error["param"] == "since"


async def test_a_tenant_is_not_told_the_names_of_others(tokenizer: Tokenizer) -> None:
    keys = ApiKeys([*KEYS_OF_TWO])

    async def tenants(key: str) -> list[str]:
        told = (await ask(tokenizer, "/requests", keys=keys, authorization=f"Bearer {key}")).json
        return [one["tenant"] for one in told["requests"]]

    assert await tenants("secret") == ["shop", ""] and await tenants("root") == ["shop", "bank"]
    assert (await ask(tokenizer, "/live/r1", keys=keys, authorization="Bearer root")).json["tenant"] == "shop"


async def test_a_tenant_may_ask_for_its_own_requests_alone(tokenizer: Tokenizer) -> None:
    """How many requests another tenant has is not told either."""
    keys = ApiKeys([*KEYS_OF_TWO])

    async def asked(key: str, tenant: str) -> Any:
        return await ask(tokenizer, f"/requests?tenant={tenant}", keys=keys, authorization=f"Bearer {key}")

    assert (await asked("secret", "bank")).error["param"] == "tenant"
    assert (await asked("secret", "shop")).status == (await asked("root", "bank")).status == 200


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


@pytest.mark.parametrize("path", ["/live", "/live/r1", "/requests", "/curves", "/plans"])
async def test_with_keys_configured_live_data_requires_a_key(tokenizer: Tokenizer, path: str) -> None:
    assert (await ask(tokenizer, "/", keys=KEYS)).status == 200
    assert (await ask(tokenizer, path, keys=KEYS)).error["code"] == "invalid_api_key"
    assert (await ask(tokenizer, path, keys=KEYS, authorization="Bearer secret")).status == 200


def test_the_script_uses_only_ids_that_exist_in_the_page() -> None:
    """Every id that the script looks up is in the page."""
    wanted = {id_ for script in SCRIPTS for id_ in re.findall(r'(?:\$|put)\("(\w+)"', script.read_text())}
    assert wanted and wanted <= {*re.findall(r'id="(\w+)"', (STATIC / "page.html").read_text())}
