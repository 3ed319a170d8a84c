"""Who measures a cluster from outside: asks it for answers, and reads what its processes and its router tell."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from baton.client import AsyncClient, Result, Token
from baton.v1 import worker_pb2, worker_pb2_grpc

FIRST_ID, VOCAB = 10, 256
TIMEOUT_S = 60.0
PAUSE_S = 0.1
LOG_LINES = 1000


@dataclass(slots=True)
class Heard:
    """One answer: seconds from its request to each token."""

    times: list[float]
    tokens: list[Token]
    result: Result


@dataclass(slots=True)
class Asker:
    """Sends prompts that no other has sent, unless told so."""

    client: AsyncClient
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(FIRST_ID, VOCAB) for _ in range(tokens)]

    async def ask(self, prompt: Sequence[int], tokens: int, on_first: Callable[[], None] = lambda: None, **how: Any) -> Heard:
        """`how`: further arguments of the client."""
        clock, times, told = asyncio.get_running_loop().time, list[float](), list[Token]()
        began = clock()
        options: dict[str, Any] = {"token_ids": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **how}
        async with self.client.generate(timeout_s=TIMEOUT_S, **options) as stream:
            async for token in stream:
                times.append(clock() - began)
                told.append(token)
                if len(times) == 1:
                    on_first()
            return Heard(times, told, stream.result)

    async def ask_alone(self, prompt: Sequence[int], tokens: int) -> Heard:
        """Asks after a pause."""
        await asyncio.sleep(PAUSE_S)
        return await self.ask(prompt, tokens)


@dataclass(slots=True)
class Processes:
    """The processes of a cluster, and what its workers told."""

    router: int
    workers: list[tuple[str, int]]  # pool and process
    facts: dict[str, int]
    gpus: bool
    admin: str  # address of the router

    @classmethod
    def of(cls, admin: str) -> "Processes":
        told = status(admin)
        records = [worker.record for worker in told.workers]
        names = ("block_size", "max_model_len", "kv_blocks", "max_num_seqs")
        facts = {name: int(getattr(records[0], name)) for name in names}
        return cls(told.router.pid, [(record.pool, record.pid) for record in records], facts, bool(records[0].gpus), admin)

    def engine(self) -> float:
        """Processor seconds of the first worker's engine so far."""
        return _engine(self.workers[0][1])[0]

    def log(self) -> str:
        """The last lines of the first worker's log."""
        with _admin(self.admin) as stub:
            name = stub.Status(worker_pb2.StatusRequest(), timeout=10).workers[0].record.name
            asked = worker_pb2.AdminLogsRequest(name=name, lines=LOG_LINES)
            return b"".join(page.text for page in stub.Logs(asked, timeout=10)).decode(errors="replace")

    def used(self) -> dict[str, float]:
        """Processor seconds so far. A worker's engine does not count."""
        used = {"router": sum(_threads(self.router).values()), "client": time.process_time()}
        for pool, pid in self.workers:
            engine, every = _engine(pid)
            used[pool] = used.get(pool, 0.0) + every - engine
        return used


@contextmanager
def _admin(address: str) -> Iterator[worker_pb2_grpc.AdminStub]:
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        yield worker_pb2_grpc.AdminStub(channel)


def status(admin: str) -> worker_pb2.StatusResponse:
    with _admin(admin) as stub:
        told: worker_pb2.StatusResponse = stub.Status(worker_pb2.StatusRequest(), timeout=10)
        return told


def _engine(pid: int) -> tuple[float, float]:
    """Processor seconds of a worker's engine, and of the worker. The engine is the thread that has used the most, beside the main one,
    which has the event loop."""
    threads = _threads(pid)
    return max(seconds for thread, seconds in threads.items() if thread != pid), sum(threads.values())


def _threads(pid: int) -> dict[int, float]:
    """Processor seconds of each thread."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue
    return found
