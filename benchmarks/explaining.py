"""What it costs a router to say of each request why tokens were computed, whether its predictions came true, and which message changed.

    python benchmarks/explaining.py [--json FILE]

Two measurements, both with `tale` and prompts of about 1,900 tokens. First, in one process, without network and workers: the router's own
path of a request of one token, with `router.uncached`, `router.predictions` and `router.chat_map` and without them, in turns, for several
kinds of prompts. Processor time. Then a real cluster, where the same prompts are asked for, one at a time: the processor time of the
router's process, and how long a request takes. What explaining costs is the difference in the first measurement; it is told as a share of
the router's processor time in the second, and as a share of the request.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from machine import describe
from observability import Answering, make_service
from serving import cluster, cpu_s, router_pid

import baton.models
from baton.client import AsyncClient
from baton.cluster.lifecycle import settle
from baton.cluster.records import BlockEvent, WorkerRecord
from baton.cluster.telemetry import Tracer
from router.chat_map import ChatMap, Known
from router.conduct import Sent
from router.events import Finished
from router.journal import Journal
from router.policy import Choice, Identity
from router.request import Request, Token
from router.tokenizer import Tokenizer
from router.uncached import Prompt, Sought, Uncached
from router.validate import Ask, AskSampling
from router.workers import FirstToken, Source

MODEL = Path(baton.models.__file__).parent / "tale"
SEED = 17
REQUESTS, WARM = 400, 10  # of each kind, in one process
LIVE_ROUNDS, LIVE_REQUESTS, OUTPUT = 5, 12, 40
MESSAGES, WORDS, LONG, SHORT = 6, 240, 1900, 64  # of a chat, of a message; tokens of prompts that are token ids
BLOCK = 16
ONE = AskSampling(max_tokens=1, ignore_eos=True)
TENANT = "shop"  # prompts of tenants cost more to explain
KINDS = ("a new chat", "its next turn", "changed near the end", "new token ids", "the same again", "a short prompt")
LEXICON = ("once", "upon", "a", "time", "there", "was", "little", "girl", "who", "had", "big", "red", "ball", "and", "she", "liked", "park")
Chat = tuple[tuple[str, str], ...]


class Unexplained:
    """Stands in for an `Explainer`: asks nothing, remembers nothing, says nothing."""

    def seek(self, found: Choice, bypass: bool, keys: Sequence[bytes], failed: Collection[Identity]) -> Sought:
        return Sought((found.worker, 1))

    def explain(self, asked: Prompt, sought: Sought, delivered: int) -> Uncached:
        return Uncached(0, 0, ())


class Unmapped:
    """Stands in for a `ChatMap`."""

    def __init__(self, contents: Sequence[str], known: Known, decode: object) -> None:
        self.ids = known


class Caching(Answering):
    """Workers that deliver what the router counts on."""

    async def prefill(
        self, worker: WorkerRecord, request: Request, timeout_s: float, source: Source | None = None, uncached_tokens: int = 0
    ) -> AsyncGenerator[FirstToken, None]:
        yield FirstToken(Token(7), b"", "length", len(request.tokens) - uncached_tokens, 0, 1)


class RouterPath:
    """A router's path of a request, in this process."""

    def __init__(self, tokenizer: Tokenizer, explains: bool) -> None:
        self._map = ChatMap if explains else Unmapped
        self._service = make_service(tokenizer, Journal, Tracer(), Caching)
        self._events = itertools.count(1)
        if not explains:
            self._be_silent()

    def _be_silent(self) -> None:
        dispatcher, journal = self._service._dispatcher, self._service._journal
        whole: Any = dispatcher, dispatcher.conduct, journal._predictions, journal._counters
        whole[0]._explainer = Unexplained()
        whole[1].send = lambda worker, cost, uncached: Sent(cost, uncached, None)
        for thing, name in ((whole[1], "_note_first"), (whole[2], "note"), (whole[3], "count_predictions")):
            setattr(thing, name, lambda *_: None)

    async def spend(self, ask: Ask) -> float:
        """Processor seconds. Afterwards the worker tells what it caches."""
        with patch("router.service.ChatMap", self._map):
            began = time.process_time()
            *_, finished = [event async for event in self._service.generate(ask, 60)]
            spent = time.process_time() - began
        assert isinstance(finished, Finished)
        keys = tuple(finished.request.keys[: finished.request.prompt_len // BLOCK])
        self._service._model.index.apply(BlockEvent("prefill-0", 1, next(self._events), "stored", keys))
        return spent


def chat(rng: random.Random, messages: int = MESSAGES) -> Chat:
    return tuple((("user", "assistant")[place % 2], " ".join(rng.choices(LEXICON, k=WORDS))) for place in range(messages))


def pairs(rng: random.Random, count: int) -> dict[str, list[tuple[dict[str, Any] | None, dict[str, Any]]]]:
    """Kind → what is asked before, and what is measured: each the prompt as an `Ask` has it."""
    made: dict[str, list[tuple[dict[str, Any] | None, dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for _ in range(count):
        whole, other = chat(rng), chat(rng)
        changed = (*whole[:-2], other[-2], whole[-1])
        made["a new chat"].append((None, {"messages": chat(rng)}))
        made["its next turn"].append(({"messages": whole[:-2]}, {"messages": whole}))
        made["changed near the end"].append(({"messages": whole}, {"messages": changed}))
        ids = tuple(rng.choices(range(300, 2000), k=LONG))
        made["new token ids"].append((None, {"token_ids": ids}))
        made["the same again"].append(({"token_ids": ids}, {"token_ids": ids}))
        made["a short prompt"].append((None, {"token_ids": ids[:SHORT]}))
    return made


async def measure_alone(tokenizer: Tokenizer, count: int) -> dict[str, dict[str, Any]]:
    """Kind → µs of a request without explaining, and with; and the quartiles of the difference for one request, of which each arm has one,
    one after the other."""
    rng, told = random.Random(SEED), dict[str, dict[str, Any]]()
    paths = {explains: RouterPath(tokenizer, explains) for explains in (True, False)}
    spent: dict[str, dict[bool, list[float]]] = {kind: {True: [], False: []} for kind in KINDS}
    for _ in range(count + WARM):
        for kind, asked in rng.sample([(kind, one) for kind, [one] in pairs(rng, 1).items()], len(KINDS)):
            *before, measured = (Ask(**one, sampling=ONE, tenant=TENANT) for one in asked if one)
            for explains in rng.sample((True, False), 2):
                for each in before:
                    await paths[explains].spend(each)
                spent[kind][explains].append(await paths[explains].spend(measured) * 1e6)
    for kind, arms in spent.items():
        with_, without = arms[True][WARM:], arms[False][WARM:]
        more = statistics.quantiles([on - off for on, off in zip(with_, without, strict=True)], n=4)
        told[kind] = {"without_us": statistics.median(without), "with_us": statistics.median(with_), "more_us": more}
    return told


def asked_of(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt of an `Ask` as the client takes it."""
    if "messages" in prompt:
        return {"messages": [{"role": role, "content": content} for role, content in prompt["messages"]]}
    return {"token_ids": list(prompt["token_ids"])}


async def ask(client: AsyncClient, prompt: Mapping[str, Any], tokens: int) -> int:
    """Returns how many tokens the prompt has."""
    how: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "timeout_s": 120}
    async with client.generate(**asked_of(prompt), **how) as stream:
        async for _ in stream:
            pass
        return int(stream.result.usage.prompt_tokens)


async def live(endpoints: Mapping[str, str], rounds: int) -> dict[str, dict[str, Any]]:
    """Kind → tokens of the prompt; ms of the router's processor for a request of one token; ms that one of OUTPUT tokens takes."""
    rng, pid = random.Random(SEED), router_pid(endpoints["admin"])
    rows: dict[str, dict[str, list[float]]] = {kind: {"prompt": [], "router_ms": [], "request_ms": []} for kind in KINDS}
    async with AsyncClient(endpoints["grpc"]) as client:
        for (kind, row), _ in itertools.product(rows.items(), range(rounds)):
            for tokens, name in ((1, "router_ms"), (OUTPUT, "request_ms")):
                asked = pairs(rng, LIVE_REQUESTS)[kind]
                for before, _ in asked:
                    if before:
                        await ask(client, before, 1)
                began = cpu_s(pid), time.perf_counter()
                for _, prompt in asked:
                    row["prompt"].append(await ask(client, prompt, tokens))
                took = cpu_s(pid) - began[0] if name == "router_ms" else time.perf_counter() - began[1]
                row[name].append(took / LIVE_REQUESTS * 1e3)
    return {
        kind: {name: [statistics.median(values), min(values), max(values)] for name, values in row.items()} for kind, row in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each kind, in one process")
    parser.add_argument("--rounds", type=int, default=LIVE_ROUNDS, help="of each kind, in the cluster")
    parser.add_argument("--alone", action="store_true", help="run only the part that needs no cluster")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe(), "seed": SEED}
    print(results["machine"])
    settle()  # as each process does
    results["alone"] = asyncio.run(measure_alone(Tokenizer.load(MODEL), options.requests))
    for kind, one in results["alone"].items():
        low, more, high = one["more_us"]
        print(f"  {kind:22} {one['without_us']:7.0f} µs without, {one['with_us']:7.0f} with: {more:5.1f} more ({low:.1f} … {high:.1f})")
    if not options.alone:
        with cluster(MODEL, "--engine.kv-memory-mib", "256") as endpoints:
            results["live"] = asyncio.run(live(endpoints, options.rounds))
        for kind, found in results["live"].items():
            more_ms = results["alone"][kind]["more_us"][1] / 1e3
            router, request = found["router_ms"][0], found["request_ms"][0]
            print(f"  {kind:22} {found['prompt'][0]:5.0f} tokens: {more_ms / router:.2%} of the router's {router:.2f} ms, ", end="")
            print(f"{more_ms / request:.3%} of a request of {request:.1f} ms")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
