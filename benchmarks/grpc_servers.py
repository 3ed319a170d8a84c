"""What a gRPC server library costs, without anything of ours: the CPU time (user + system, from /proc) of a server process for a request
and for a streamed message, with grpc.aio, with grpc's thread pool and with grpclib, whose HTTP/2 is written in Python.

    pip install grpclib; python benchmarks/grpc_servers.py [--step-ms 5] [--json FILE]

The load is that of `doors.py`: 32 concurrent calls of one small request each, answered by 1 or 101 small messages. Each message waits for
the next step, which all calls share, as a router waits for its workers; with a step of 0, messages are there as soon as one is sent.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import BytesValue
from machine import describe
from serving import AT_ONCE, REQUESTS, TOKENS, cpu_s

METHOD = "/bench.Stream/Run"
ROUNDS = 5
PROMPT, TOKEN = bytes(160), bytes(24)


def count(request: BytesValue) -> int:
    return int.from_bytes(request.value[:4], "little")


class Steps:
    """Wakes every waiting call at each step."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._next = every_s, asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._every_s:
            await asyncio.sleep(self._every_s)
            done, self._next = self._next, asyncio.get_running_loop().create_future()
            done.set_result(None)

    async def wait(self) -> None:
        await (asyncio.shield(self._next) if self._every_s else asyncio.sleep(0))


async def serve_aio(step_s: float) -> None:
    steps, server = Steps(step_s), grpc.aio.server()

    async def run(request: BytesValue, context: Any) -> AsyncIterator[BytesValue]:
        for _ in range(count(request)):
            await steps.wait()
            yield BytesValue(value=TOKEN)

    server.add_generic_rpc_handlers((handlers(run),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def serve_threads(step_s: float) -> None:
    ready, server = threading.Condition(), grpc.server(ThreadPoolExecutor(2 * AT_ONCE))

    def run(request: BytesValue, context: Any) -> Iterator[BytesValue]:
        for _ in range(count(request)):
            if step_s:
                with ready:
                    ready.wait()
            yield BytesValue(value=TOKEN)

    server.add_generic_rpc_handlers((handlers(run),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    while server.wait_for_termination(step_s or None):  # timed out
        with ready:
            ready.notify_all()


def handlers(run: Any) -> grpc.GenericRpcHandler:
    service, method = METHOD[1:].split("/")
    handler = grpc.unary_stream_rpc_method_handler(run, BytesValue.FromString, BytesValue.SerializeToString)
    return grpc.method_handlers_generic_handler(service, {method: handler})


async def serve_grpclib(step_s: float) -> None:
    from grpclib.const import Cardinality, Handler
    from grpclib.server import Server

    steps = Steps(step_s)

    class Door:
        async def run(self, stream: Any) -> None:
            for _ in range(count(await stream.recv_message())):
                await steps.wait()
                await stream.send_message(BytesValue(value=TOKEN))

        def __mapping__(self) -> dict[str, Any]:
            return {METHOD: Handler(self.run, Cardinality.UNARY_STREAM, BytesValue, BytesValue)}

    server = Server([Door()])
    await server.start("127.0.0.1", 0)
    print(server._server.sockets[0].getsockname()[1], flush=True)
    await server.wait_closed()


async def load(call: Any, messages: int) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    request = BytesValue(value=messages.to_bytes(4, "little") + PROMPT)

    async def one() -> None:
        async with gate:
            got = 0
            async for _ in call(request, timeout=120):
                got += 1
            assert got == messages

    await asyncio.gather(*(one() for _ in range(REQUESTS)))


async def measure(servers: dict[str, tuple[int, int]]) -> dict[str, dict[str, list[float]]]:
    """`servers`: pid and port by name."""
    rows: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in servers}
    for round_ in range(ROUNDS + 1):  # the first is a warm-up
        for name in list(servers)[:: 1 if round_ % 2 else -1]:
            pid, port = servers[name]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", (("grpc.enable_http_proxy", 0),)) as channel:
                call = channel.unary_stream(METHOD, BytesValue.SerializeToString, BytesValue.FromString)
                await load(call, 1)
                spent = []
                for messages in (1, TOKENS):
                    before = cpu_s(pid)
                    await load(call, messages)
                    spent.append((cpu_s(pid) - before) / REQUESTS)
            if round_:
                rows[name]["request_ms"].append(spent[0] * 1e3)
                rows[name]["message_us"].append((spent[1] - spent[0]) / (TOKENS - 1) * 1e6)
    return rows


SERVERS = {"grpc.aio": serve_aio, "grpc, threads": serve_threads, "grpclib": serve_grpclib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--serve", choices=tuple(SERVERS), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.serve:
        with suppress(KeyboardInterrupt):
            running = SERVERS[options.serve](options.step_ms / 1000)
            if running is not None:
                asyncio.run(running)
        return
    results: dict[str, Any] = {"machine": describe(), "step_ms": options.step_ms}
    print(results["machine"])
    with ExitStack() as stack:
        servers = {}
        for name in SERVERS:
            if name == "grpclib" and not find_spec("grpclib"):
                print("grpclib is not installed: left out")
                continue
            command = [sys.executable, __file__, "--serve", name, "--step-ms", str(options.step_ms)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            assert process.stdout
            servers[name] = process.pid, int(process.stdout.readline())
        results["servers"] = rows = asyncio.run(measure(servers))
    print(f"\n{AT_ONCE} concurrent calls, a step of {options.step_ms:g} ms; median (range) of {ROUNDS} rounds of {REQUESTS} calls")
    for name, row in rows.items():
        cells = {key: f"{statistics.median(values):.2f} ({min(values):.2f} … {max(values):.2f})" for key, values in row.items()}
        print(f"  {name:<14} {cells['request_ms']} ms a request, {cells['message_us']} µs a message")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
