"""The proxy that vLLM's documents describe for its NixlConnector: the prefill server computes the prompt and one token, then the decode
server gets the same request with what the first one returned.

    python benchmarks/vllm_proxy.py PORT PREFILL_PORT DECODE_PORT

With the header x-late-s, that much time passes between the two calls.
"""

import asyncio
import sys
import uuid
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

port, prefill_port, decode_port = map(int, sys.argv[1:4])
REMOTE = {"do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


def url(server: int) -> str:
    return f"http://127.0.0.1:{server}/v1/completions"


async def completions(request: web.Request) -> web.StreamResponse:
    asked: dict[str, Any] = await request.json()
    session: ClientSession = request.app[SESSION]
    headers = {"X-Request-Id": str(uuid.uuid4())}
    first = {**asked, "stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, **REMOTE}}
    first.pop("stream_options", None)  # refused without a stream
    async with session.post(url(prefill_port), json=first, headers=headers) as answer:
        if answer.status != 200:
            return web.Response(status=answer.status, body=await answer.read())
        handed = (await answer.json())["kv_transfer_params"]
    await asyncio.sleep(float(request.headers.get("x-late-s", "0")))
    async with session.post(url(decode_port), json={**asked, "kv_transfer_params": handed}, headers=headers) as answer:
        response = web.StreamResponse(status=answer.status, headers={"content-type": answer.headers.get("content-type", "")})
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


async def health(request: web.Request) -> web.Response:
    return web.Response()


SESSION = web.AppKey("session", ClientSession)


async def open_session(app: web.Application) -> None:
    # A connection for each call: one that a stopped server has closed meanwhile would fail a request that nothing else is wrong with.
    app[SESSION] = ClientSession(timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0, force_close=True))


app = web.Application()
app.on_startup.append(open_session)
app.router.add_post("/v1/completions", completions)
app.router.add_get("/health", health)
web.run_app(app, host="127.0.0.1", port=port, print=lambda line: None)
