"""Why tokens of prompts were computed, on a real cluster: what the router says is compared with what was done, and with what the workers
say they hold."""

import asyncio
import os
import random
import signal
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cache_truth import BLOCK, CacheTruth, Moment, Prompt, named
from live_cluster import Cluster, cluster, toy
from redis_servers import until

from baton.client import Result

pytestmark = pytest.mark.system
KEYS = {"shop": "shop-key", "bank": "bank-key"}
POOL_BLOCKS = 512  # of a worker: 1 MiB
AT_LEAST = 0.95
LOAD, AGAIN = 100, 10


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill workers with small pools. They lend nothing: else the decode worker's copies would be fetched."""
    folder = tmp_path_factory.mktemp("uncached")
    (folder / "keys").write_text("".join(f"{name} {sha256(key.encode()).hexdigest()}\n" for name, key in KEYS.items()))
    small = ("--engine.kv-memory-mib", "1", "--engine.max-num-batched-tokens", "256")
    apart = ("--router.bypass-tokens", "0", "--router.fetch-tokens", "0", "--kv.live", "false")
    patient = ("--router.hang-s", "8", "--launcher.hang-s", "30")
    flags = (*small, *apart, *patient, "--security.api-keys", str(folder / "keys"))
    with cluster(toy(folder / "toy", context=1024, step_delay_ms=15), *flags, prefill=2) as running:
        yield running


class Asker:
    """Asks, and judges what is told of each prompt."""

    def __init__(self, live: Cluster, seed: int) -> None:
        self.live, self.truth, self.rng = live, CacheTruth(live), random.Random(seed)
        self.clients = {name: live.client(api_key=key) for name, key in KEYS.items()}
        self.right = Counter[str]()  # tokens by cause
        self.wrong = Counter[tuple[str, str]]()  # what was told and what is true
        self.whole, self.asked = 0, 0  # requests of which all is right

    def new(self, length: int, **more: str) -> Prompt:
        return Prompt(tuple(self.rng.choices(range(250), k=length)), **{"tenant": "shop", **more})

    async def send(self, prompt: Prompt, tokens: int = 1, **more: Any) -> Result:
        """One token of output: the decode worker gets no copy."""
        how: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60, "cache_salt": prompt.salt}
        async with self.clients[prompt.tenant].generate(token_ids=list(prompt.tokens), **how, **more) as stream:
            async for _ in stream:
                pass
            return stream.result

    async def ask(self, prompt: Prompt, tokens: int = 1) -> Result:
        before = await asyncio.to_thread(self.truth.now)
        result = await self.send(prompt, tokens)
        self.judge(prompt, result, before)
        return result

    async def ask_twice(self, prompt: Prompt) -> None:
        """At once: the one that is chosen for later finds the other under way."""
        before = await asyncio.to_thread(self.truth.now)
        results = await asyncio.gather(self.send(prompt), self.send(prompt))
        first, second = sorted(results, key=lambda one: one.usage.cache.reachable_tokens if one.usage.cache else 0)
        self.judge(prompt, first, before)
        self.judge(prompt, second, before, twin=first)

    def judge(self, prompt: Prompt, result: Result, before: Moment, twin: Result | None = None) -> None:
        told, true = named(result), self.truth.causes(prompt, result, before, twin)
        add_up(prompt, result)
        wrong = Counter((cause, "/".join(sorted(may))) for cause, may in zip(told, true, strict=True) if cause not in may)
        self.right.update(cause for cause, may in zip(told, true, strict=True) if cause in may)
        self.wrong += wrong
        self.asked, self.whole = self.asked + 1, self.whole + (not wrong)
        self.truth.note(prompt, result, before, too=twin is not None)

    async def fill(self) -> None:
        """So many other prompts that neither prefill worker keeps what it held."""
        await asyncio.gather(*(self.send(self.new(900)) for _ in range(2 * POOL_BLOCKS // (900 // BLOCK) + 8)))


def add_up(prompt: Prompt, result: Result) -> None:
    report, cached = result.usage.cache, result.usage.cached_tokens
    assert report is not None
    assert sum(tokens for _, tokens in report.uncached) == len(prompt.tokens) - cached
    assert all(tokens > 0 for _, tokens in report.uncached)
    assert report.promised_tokens <= report.reachable_tokens <= (len(prompt.tokens) - 1) // BLOCK * BLOCK
    assert bool(report.holder) == (report.reachable_tokens > report.promised_tokens)


@asynccontextmanager
async def asking(live: Cluster, seed: int) -> AsyncIterator[Asker]:
    asker = Asker(live, seed)
    try:
        yield asker
    finally:
        await asyncio.gather(*(client.close() for client in asker.clients.values()))


def causes(result: Result) -> dict[str, int]:
    assert result.usage.cache is not None
    return dict(result.usage.cache.uncached)


def extended(prompt: Prompt, *more: int) -> Prompt:
    return Prompt((*prompt.tokens, *more), prompt.tenant, prompt.salt)


async def test_what_becomes_of_a_prompt(live: Cluster) -> None:
    """New, below a block, changed at a token, gone on, of another salt and of another tenant, and copied to a decode worker alone."""
    async with asking(live, 1) as asker:
        first = asker.new(200)
        assert causes(await asker.ask(first)) == {"new": 192, "partial": 8}
        assert causes(await asker.ask(first)) == {"partial": 8}
        assert causes(await asker.ask(asker.new(BLOCK - 1))) == {"partial": BLOCK - 1}
        changed = list(first.tokens)
        changed[100] = (changed[100] + 1) % 250
        result = await asker.ask(Prompt(tuple(changed), first.tenant))
        assert result.usage.cache is not None and result.usage.cache.changed_at == 96
        assert causes(result) == {"changed": 96, "partial": 8}
        assert causes(await asker.ask(extended(first, *asker.new(60).tokens))) == {"grown": 64, "partial": 4}
        assert causes(await asker.ask(Prompt(first.tokens, "shop", "other"))) == {"salt": 192, "partial": 8}
        stranger = await asker.ask(Prompt(first.tokens, "bank"))
        report = stranger.usage.cache
        assert report is not None and causes(stranger) == {"new": 192, "partial": 8}, "nothing of another tenant shows"
        assert (report.promised_tokens, report.reachable_tokens, report.holder) == (0, 0, "")
        scored = await asker.send(first, prompt_logprobs=0)
        assert causes(scored) == {"scored": 200}
        assert not asker.wrong and asker.whole == asker.asked == 7


async def test_the_message_that_changed(live: Cluster) -> None:
    messages = [{"role": ("user", "assistant")[at % 2], "content": f"message {at} " + "and so on " * 6} for at in range(6)]
    async with live.client(api_key="shop-key") as client:
        told = []
        for changed in (None, 5, 3, 1):
            asked = [message | ({"content": "other words " * 6} if at == changed else {}) for at, message in enumerate(messages)]
            async with client.generate(messages=asked, max_tokens=1, timeout_s=60) as stream:
                async for _ in stream:
                    pass
                assert stream.result.usage.cache is not None
                told.append(stream.result.usage.cache.changed_message)
    assert told == [None, 5, 3, 1]


async def test_evicted_and_restarted(live: Cluster) -> None:
    async with asking(live, 2) as asker:
        first = asker.new(200)
        await asker.ask(first)
        await asker.fill()
        assert causes(await asker.ask(first)) == {"evicted": 192, "partial": 8}
        worker = (await asker.ask(first)).workers["prefill"]
        copied = asker.new(200)
        await asker.ask(copied, tokens=2)
        await asyncio.to_thread(restart, live, worker)
        assert causes(await asker.ask(first)) == {"restarted": 192, "partial": 8}
        await asker.fill()
        result = await asker.ask(copied)
        assert causes(result) == {"dearer": 192, "partial": 8} and result.usage.cache is not None
        assert result.usage.cache.holder == "decode-0", "a copy is left where it was decoded"
        assert not asker.wrong


def restart(live: Cluster, worker: str) -> None:
    """Kills it, and returns when it serves again."""
    before = live.incarnation(worker)
    live.kill(worker)

    def new() -> bool:
        found = [one for one in live.workers() if one["name"] == worker and one.get("state") == "ready" and "error" not in one]
        return bool(found) and int(found[0]["incarnation"]) != before

    live.wait(new)


async def test_a_worker_that_is_busy_and_one_that_still_computes(live: Cluster) -> None:
    """The worker that holds the beginning of both is stopped, until the router has chosen for all of them."""
    async with asking(live, 3) as asker:
        short = asker.new(160)
        worker = (await asker.ask(short)).workers["prefill"]
        long = extended(short, *asker.new(800).tokens)
        before = await asyncio.to_thread(asker.truth.now)
        at, pid = live.status()["endpoints"]["metrics"], live.kill(worker, signal.SIGSTOP)
        try:
            tasks = [asyncio.create_task(asker.send(prompt)) for prompt in (long, extended(long, *asker.new(20).tokens))]
            await asyncio.to_thread(until, lambda: in_flight(at) == 2)  # `baton status` would ask the worker
            busy = await asker.send(extended(short, 1, 2))
        finally:
            os.kill(pid, signal.SIGCONT)
        blocker, twin = await asyncio.gather(*tasks)
        assert busy.workers["prefill"] != worker == blocker.workers["prefill"] == twin.workers["prefill"]
        report = busy.usage.cache
        assert report is not None and report.holder == worker and causes(busy) == {"busy": 160, "partial": 2}
        report = twin.usage.cache
        assert report is not None and report.promised_tokens == 960 > twin.usage.cached_tokens
        assert causes(twin) == {"computing": 960 - twin.usage.cached_tokens, "grown": 16, "partial": 4}
        asker.judge(long, blocker, before)
        assert not asker.wrong


def in_flight(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as answer:
        [line] = [line for line in answer.read().decode().splitlines() if line.startswith("baton_router_requests_in_flight")]
    return float(line.split()[-1])


async def test_without_a_cache(tmp_path: Path) -> None:
    with cluster(toy(tmp_path / "toy"), "--engine.prefix-caching", "false", "--router.bypass-tokens", "0") as running:
        async with running.client() as client:
            for _ in range(2):
                async with client.generate(token_ids=[7] * 100, max_tokens=1, timeout_s=60) as stream:
                    async for _ in stream:
                        pass
                assert causes(stream.result) == {"off": 100}


async def test_of_a_mixed_load_nearly_all_is_named_right(live: Cluster) -> None:
    """Random prompts that begin like earlier ones, some twice at once, in pools that are too small for them, while other prompts keep the
    workers busy and a worker dies. Right is what the prompts sent and the blocks held allow to be said of a token."""
    async with asking(live, 4) as asker:
        prompts, others = [asker.new(300)], list[asyncio.Task[Result]]()
        for number in range(LOAD):
            if number == LOAD // 2:
                await asyncio.gather(*others)
                await asyncio.to_thread(restart, live, "prefill-1")
            if asker.rng.random() < 0.5:  # nobody waits for it
                others.append(asyncio.create_task(asker.send(asker.new(asker.rng.randrange(500, 900), tenant="bank"))))
            prompt = next_prompt(asker, number, prompts)
            prompts.append(prompt)
            if asker.rng.random() < 0.2:
                await asker.ask_twice(prompt)
            else:
                await asker.ask(prompt, tokens=1 + (asker.rng.random() < 0.3))
        await asyncio.gather(*others)
    right, total = asker.right.total(), asker.right.total() + asker.wrong.total()
    print(f"named right: {right / total:.2%} of {total} tokens, all of {asker.whole / asker.asked:.2%} of {asker.asked} requests")
    print(f"by cause: {dict(asker.right)}; wrongly (told, true): {dict(asker.wrong)}")
    assert min(right / total, asker.whole / asker.asked) >= AT_LEAST, asker.wrong
    assert {"new", "changed", "grown", "salt", "partial"} <= set(asker.right) and asker.right["evicted"] + asker.right["restarted"] > 0
    assert max(asker.right.values()) < 0.5 * total, "negative control: no answer is always right"


def next_prompt(asker: Asker, number: int, prompts: list[Prompt]) -> Prompt:
    if LOAD // 2 <= number < LOAD // 2 + AGAIN:  # after a worker has died, those before its death
        return prompts[-AGAIN - 1]
    if number >= LOAD - AGAIN:
        return prompts[LOAD - number]
    return following(asker, asker.rng.choice(prompts))


def following(asker: Asker, earlier: Prompt) -> Prompt:
    """A prompt that has something to do with an earlier one, or nothing."""
    rng, tokens = asker.rng, list(earlier.tokens)
    match rng.randrange(6):
        case 0:
            return asker.new(rng.randrange(4, 700))
        case 1:
            at = rng.randrange(len(tokens))
            return Prompt((*tokens[:at], (tokens[at] + 1) % 250, *tokens[at + 1 :]), earlier.tenant, earlier.salt)
        case 2 if len(tokens) < 700:
            return extended(earlier, *asker.new(rng.randrange(1, 200)).tokens)
        case 3:
            return Prompt(earlier.tokens, earlier.tenant, "other" if not earlier.salt else "")
    return earlier
