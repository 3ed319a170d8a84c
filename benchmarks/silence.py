"""How long the router is silent while it handles input from a stranger: the longest gap between two answers of `/livez`.

    python benchmarks/silence.py [--json FILE]

A colocated toy cluster through `baton up`. One client requests `/livez` without a pause; another sends each input in turn, over HTTP or
gRPC. The base is the longest gap in a second without any other request.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import grpc
from machine import describe
from serving import cluster

from baton.models.make_small import make_toy
from baton.v1 import generation_pb2 as pb

ROUNDS = 3
SENTENCE = "Once upon a time there was a little fox who lived by the river. "
MIB = (SENTENCE * (1 << 15))[: 1 << 20]
OVER_HTTP: dict[str, tuple[str, Any]] = {
    "a prompt of 1 MiB": ("/v1/completions", {"prompt": MIB}),
    "/tokenize of 1 MiB": ("/tokenize", {"prompt": MIB}),
    "a message of 1 MiB": ("/v1/chat/completions", {"messages": [{"role": "user", "content": MIB}]}),
    "128 prompts of 32 kB": ("/v1/completions", {"prompt": [SENTENCE * 500] * 128}),
    "logit_bias of 300,000": ("/v1/completions", {"prompt": "x", "logit_bias": {str(n): 1 for n in range(300_000)}}),
    "100,000 messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 100_000}),
    "1.3 million token ids": ("/v1/completions", {"prompt": [7] * 1_300_000}),
}
OVER_GRPC = {
    "gRPC, 1 MiB": pb.GenerateRequest(text=MIB),
    "gRPC, 300,000 biases": pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(300_000), 1.0))),
    "gRPC, 100,000 messages": pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * 100_000)),
    "gRPC, 1.3 million ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 1_300_000)),
}


class Connection:
    """HTTP/1.1, one exchange after another. A request that the router refuses to read ends the connection."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def exchange(self, path: str, body: bytes | None = None) -> int:
        """Returns the status."""
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: x\r\n"
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._writer.write(head.encode() + b"\r\n" + (body or b""))
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(line.split(":")[1]) for line in answer.split("\r\n") if line.startswith("content-length:")), 0)
        await self._reader.readexactly(length)
        return int(answer.split()[1])


class Listener:
    """Requests `/livez` repeatedly."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            await self._connection.exchange("/livez")
            self.longest_s = max(self.longest_s, time.perf_counter() - began)


async def measure(endpoints: dict[str, str]) -> dict[str, list[float]]:
    """The longest gap of each round, ms, by input."""
    rows: dict[str, list[float]] = {}
    options = [("grpc.max_send_message_length", 64 << 20), ("grpc.enable_http_proxy", 0)]
    async with Connection(endpoints["http"]) as quiet, grpc.aio.insecure_channel(endpoints["grpc"], options=options) as channel:
        call = channel.unary_stream("/baton.v1.Generation/Generate")
        listener = Listener(quiet)
        listening = asyncio.create_task(listener.run())

        async def send(path: str, body: bytes) -> None:
            async with Connection(endpoints["http"]) as stranger:
                await stranger.exchange(path, body)

        async def ask(request: bytes) -> None:
            try:
                async for _ in call(request, timeout=60):
                    pass
            except grpc.aio.AioRpcError:
                pass  # a refusal is an answer

        sent = {name: (send, (path, json.dumps(body).encode())) for name, (path, body) in OVER_HTTP.items()}
        sent |= {name: (ask, (message.SerializeToString(),)) for name, message in OVER_GRPC.items()}  # type: ignore[misc]
        for _ in range(ROUNDS):
            listener.longest_s = 0.0
            await asyncio.sleep(1.0)
            rows.setdefault("nothing (base)", []).append(listener.longest_s * 1000)
            for name, (function, arguments) in sent.items():
                listener.longest_s = 0.0
                await function(*arguments)
                await asyncio.sleep(0.2)
                rows.setdefault(name, []).append(listener.longest_s * 1000)
        listening.cancel()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = f"{describe()}, load average {os.getloadavg()[0]:.1f} at the start"
    print(machine)
    with tempfile.TemporaryDirectory() as folder:
        make_toy(Path(folder) / "toy")
        flags = ("--prefill", "0", "--engine.kv-memory-mib", "64")
        with cluster(Path(folder) / "toy", *flags) as endpoints:
            rows = asyncio.run(measure(endpoints))
    print(f"longest gap of /livez, ms, {ROUNDS} rounds")
    for name, gaps in rows.items():
        print(f"{name:>24} {' '.join(f'{gap:8.1f}' for gap in gaps)}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "gaps_ms": rows}, indent=1))


if __name__ == "__main__":
    main()
