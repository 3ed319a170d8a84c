"""Requests to a release of the toy model while something happens to it. Every token of every stream is checked."""

import asyncio
import itertools
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kube import Kube, Release, namespace
from nemesis import Plan, Tally, ToyOracle, load

from baton.client import AsyncClient, Client, GenerateError, Result

VALUES = Path(__file__).parents[1] / "kube" / "toy.yaml"
STREAMS = 20
PLAN = Plan(
    minutes=math.inf, requests=math.inf, faults=0, seed=0, model="toy", type="float32", tokens=0, hosts=False, kinds=(), streams=STREAMS,
    cancelled=0.1, structured=0.0, stops_s=(0, 0), quiet_s=0,
)  # fmt: skip
GOOD = {"exact", "cancelled"}


@contextmanager
def toy_release(kube: Kube, space: str, *arguments: str, name: str = "baton") -> Iterator[Release]:
    """In a namespace of its own, with which it ends."""
    with namespace(kube, space):
        with TemporaryDirectory() as folder:
            kube.kubectl("-n", space, "create", "configmap", "toy", f"--from-file={ToyOracle(Path(folder), PLAN).path}")
        release = Release(kube, name, space)
        release.install("-f", str(VALUES), *arguments)
        yield release


def ask(release: Release, first: int, door: str | None = None) -> Result:
    """One request whose prompt begins with `first`, through any door or through this one."""
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60}
    with Client(door or release.doors()) as client, client.generate(token_ids=[first] * 40, **asked) as stream:
        for _ in stream:
            pass
        return stream.result


def workers_of(release: Release, first: int) -> tuple[str, str]:
    """The prefill worker of a request, empty if there was none, and its decode worker."""
    workers = ask(release, first).workers
    return workers["prefill"] or "", workers["decode"]


def wait_for_doors(release: Release) -> None:
    """Until each door answers. A node that was cut off learns from the API server where its pods are now only when its watch is renewed."""
    for door in release.doors():

        def answers(door: str = door) -> bool:
            with suppress(GenerateError):
                ask(release, 1, door)
                return True
            return False

        release.kube.wait(answers)


def wait_for_handoff(release: Release, nodes: int) -> None:
    """Until a request was handed over between workers on as many nodes: by TCP, every block verified."""
    prompts = itertools.count(1)

    def handed() -> bool:
        # Several at a time: one alone always goes to the same two workers, which may be on one node.
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _: ask(release, next(prompts) % 256), range(8)))
        where = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for role in ("prefill", "decode") for pod in release.pods(role)}
        return any(is_between(result, where, nodes) for result in results)

    release.kube.wait(handed)


def is_between(result: Result, where: dict[str, str], nodes: int) -> bool:
    moved, between = result.handoff, {where.get(result.workers[role]) for role in ("prefill", "decode")}
    return bool(moved["transport"] == "tcp" and 0 < moved["blocks"] == moved["digests_checked"] and len(between) == nodes)


class Load:
    """`STREAMS` clients, each with one request after another."""

    def __init__(self, addresses: list[str], seed: int) -> None:
        self._addresses = addresses
        self._seed = seed
        self._tally: Tally | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def done(self) -> Counter[str]:
        return Counter(self._tally.outcomes) if self._tally else Counter()

    @property
    def moved(self) -> tuple[int, int]:
        """Attempts that went to another worker, and streams that went on at another router."""
        assert self._tally
        return self._tally.retried, self._tally.resumed

    def reach(self, requests: int, within_s: float = 300) -> None:
        """Waits until so many requests have ended."""
        deadline = time.monotonic() + within_s
        while self.done.total() < requests:
            assert time.monotonic() < deadline and self._thread.is_alive(), f"{self.done} of {requests} requests in {within_s} s"
            time.sleep(0.2)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        if self._loop and self._tally:
            self._loop.call_soon_threadsafe(self._tally.over.set)
        self._thread.join(180)
        assert not self._thread.is_alive(), "a stream does not end"

    async def _run(self) -> None:
        with TemporaryDirectory() as folder:
            oracle = ToyOracle(Path(folder), PLAN)
        self._loop, self._tally = asyncio.get_running_loop(), Tally()
        plan = replace(PLAN, seed=self._seed)
        async with AsyncClient(self._addresses) as client, asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(load(client, oracle, random.Random(f"{self._seed} {number}"), plan, self._tally))


@contextmanager
def loaded(release: Release, requests: int, seed: int = 1) -> Iterator[Load]:
    """Load while the block runs, and until `requests` have ended. Raises AssertionError if one was lost, refused or wrong."""
    made = Load(release.doors(), seed)
    made.start()
    try:
        made.reach(STREAMS)
        yield made
        made.reach(requests)
    finally:
        made.end()
    print(
        f"{sum(made.done.values())} requests: {dict(made.done)}; {made.moved[0]} moved to another worker, {made.moved[1]} to another router"
    )
    assert set(made.done) <= GOOD, made.done
