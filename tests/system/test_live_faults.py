"""Workers are killed, suspended and given wrong bytes while the KV of a long prompt is read and the rest of the prompt is still computed.

The prompt has seven chunks. A reader that asks for a second piece (`kv.before_read=exit@2`), or holds blocks before the client has a token,
reads live: without live transfer, KV arrives in one piece after the first token.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_cluster import SHARED, ask, disturbed, expected, faulty
from live_cluster import Cluster, cluster, toy

from baton.client import AsyncClient, GenerateError

pytestmark = pytest.mark.system
CHUNK, BLOCK = 64, 16
PROMPT = [i * 7 % 251 for i in range(6 * CHUNK + 20)]
BLOCKS = -(-len(PROMPT) // BLOCK)
LONG = PROMPT * 4  # 26 chunks
HELD = "engine.step", f"hold@{-(-len(LONG) // CHUNK)}"  # who computes it waits there before anybody hears of its last chunk


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=40)


@contextmanager
def chunked(model: Path, failpoints: str = "", *flags: str, prefill: int = 2, decode: int = 2) -> Iterator[Cluster]:
    limits = ("--engine.max-num-batched-tokens", str(CHUNK), "--engine.max-num-seqs", "16", "--router.max-retries", "2")
    with faulty(model, failpoints, *limits, *flags, prefill=prefill, decode=decode) as live:
        yield live


FOR_ALL = (*SHARED, "--launcher.hang-s", "120")  # no worker that a test suspends is replaced


@pytest.fixture(scope="module")
def four(model: Path) -> Iterator[Cluster]:
    with chunked(model, "", *FOR_ALL) as live:
        yield live


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Cluster]:
    with chunked(model, "", *FOR_ALL, prefill=1, decode=1) as live:
        yield live


@contextmanager
def held_back(live: Cluster) -> Iterator[None]:
    """Whoever computes LONG stops before its end, until the block is left: what is to happen during a live read does, however busy the
    machine is."""
    with live.faults("=".join(HELD)):
        yield


async def reached(live: Cluster, point: str) -> None:
    await asyncio.to_thread(live.wait, live.reached(point).exists)


async def caught_up(live: Cluster) -> None:
    """Waits until a reader has everything that the worker which computes has ready for it."""
    with live.faults("kv.caught_up=sleep:0"):
        await reached(live, "kv.caught_up")


def busy(live: Cluster, role: str) -> int:
    """Process id of the worker of that role that holds blocks. Raises StopIteration while no worker does."""
    return int(next(worker["pid"] for worker in live.workers(role) if worker.get("blocks_in_use")))


async def test_most_blocks_move_before_the_first_token(pair: Cluster) -> None:
    with disturbed(pair, prompt=LONG) as prompt:
        async with pair.client() as client:
            await ask(client, [7, *prompt])  # connects the workers
            with held_back(pair):
                request = asyncio.create_task(ask(client, prompt))
                await reached(pair, HELD[0])
                await caught_up(pair)
            result = await request
        assert list(result.token_ids) == expected(prompt)
        handoff, blocks = result.handoff, -(-len(LONG) // BLOCK)
        assert (handoff["blocks"], handoff["digests_checked"], handoff["recomputed_tokens"]) == (blocks, blocks, 0)
        assert handoff["blocks_early"] >= blocks // 2
        await pair.quiet()


async def test_nothing_moves_early_when_live_transfer_is_off(model: Path) -> None:
    """Negative control."""
    with chunked(model, "", "--kv.live", "false", prefill=1, decode=1) as live:
        async with live.client() as client:
            result = await ask(client, PROMPT)
        assert list(result.token_ids) == expected(PROMPT)
        assert (result.handoff["blocks"], result.handoff["blocks_early"]) == (BLOCKS, 0)
        await live.quiet()


PREFILL_DIES = ["prefill.chunk", "prefill.chunk@3", "prefill.computed", "prefill.reply"]


@pytest.mark.parametrize("point", PREFILL_DIES)
async def test_a_request_survives_a_prefill_worker_killed_during_a_live_read(four: Cluster, point: str) -> None:
    """`prefill.chunk` is reached only if an export is open while the prompt is computed."""
    name, _, nth = point.partition("@")
    with disturbed(four, f"{name}=exit{'@' + nth if nth else ''}", LONG) as prompt:
        async with four.client() as client:
            with held_back(four):
                request = asyncio.create_task(ask(client, prompt))
                await reached(four, HELD[0])
                if name != "prefill.chunk":  # it has computed everything before it dies: the other one is meant
                    four.set_fault(*HELD)
                    await reached(four, HELD[0])
                await caught_up(four)
            result = await request
        assert list(result.token_ids) == expected(prompt)
        assert result.workers["retries"] == 1 and result.handoff["recomputed_tokens"] == 0
        assert result.workers["prefill"] and result.handoff["blocks_early"] >= 2 * BLOCKS, "the second attempt was not live"
        await four.quiet()


DECODE_DIES = ["kv.reserved", "kv.before_read", "kv.before_read@2", "kv.before_check", "kv.adopted", "decode.step@1", "decode.step@5"]


@pytest.mark.parametrize("point", DECODE_DIES)
async def test_a_request_survives_a_decode_worker_killed_during_a_live_read(four: Cluster, point: str) -> None:
    """The lease lives until the read is complete, so another decode worker reads the same KV and nothing is recomputed."""
    name, _, nth = point.partition("@")
    with disturbed(four, f"{name}=exit{'@' + nth if nth else ''}", PROMPT) as prompt:
        async with four.client() as client:
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt)
        assert result.workers["retries"] == 1
        # Once read, the lease is released. If the worker dies before the router knows, the next one finds it gone and computes the prompt.
        gone = point in ("kv.adopted", "decode.step@1") and result.handoff["failure"].startswith("LEASE_")
        assert result.handoff["recomputed_tokens"] == (len(PROMPT) if gone else 0)
        if name in ("kv.reserved", "kv.before_read", "kv.before_check"):
            assert result.handoff["blocks"] == BLOCKS and result.usage.cached_tokens == 0
        await four.quiet()


@pytest.mark.parametrize("point", ["kv.copied=flip", "kv.exported=flip"])
async def test_a_flipped_byte_is_found_and_recomputed(pair: Cluster, point: str) -> None:
    """With a flip in the first piece, the fetch fails long before the first token, which only the prefill worker may sample."""
    with disturbed(pair, point, PROMPT) as prompt:
        async with pair.client() as client:
            result = await ask(client, prompt)
        assert list(result.token_ids) == expected(prompt)
        assert result.handoff["failure"] == "DIGEST_MISMATCH" and result.handoff["recomputed_tokens"] == len(PROMPT)
        assert result.workers["retries"] == 0
        await pair.quiet()


async def test_under_the_fail_policy_a_flipped_byte_moves_the_request_elsewhere(model: Path) -> None:
    with chunked(model, "kv.copied=flip", "--kv.on-failure", "fail", prefill=1) as live:
        async with live.client() as client:
            result = await ask(client, PROMPT)
        assert list(result.token_ids) == expected(PROMPT) and result.workers["retries"] == 1
        assert result.handoff["recomputed_tokens"] == 0
        await live.quiet()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_hangs_during_a_live_transfer_is_abandoned(four: Cluster, role: str) -> None:
    with disturbed(four, prompt=LONG) as prompt:
        async with four.client() as client:
            with held_back(four):
                request = asyncio.create_task(ask(client, prompt))
                await reached(four, HELD[0])
                reader = await asyncio.to_thread(four.wait, lambda: busy(four, "decode"))
                pid = reader if role == "decode" else await asyncio.to_thread(busy, four, "prefill")
                os.kill(pid, signal.SIGSTOP)
            assert not request.done()
            try:
                result = await request
            finally:
                os.kill(pid, signal.SIGCONT)
        assert list(result.token_ids) == expected(prompt) and 1 <= result.workers["retries"] <= 2
        await asyncio.to_thread(four.wait, lambda: all("error" not in worker for worker in four.workers()))
        await four.quiet()


async def held(live: Cluster, stage: str) -> None:
    """Waits until a request has reached the stage."""
    await asyncio.to_thread(live.wait, lambda: busy(live, "prefill" if stage == "computing" else "decode"))


@pytest.mark.parametrize("stage", ["computing", "reading", "first token", "decoding"])
async def test_a_client_that_disconnects_frees_everything(pair: Cluster, stage: str) -> None:
    with disturbed(pair, prompt=PROMPT) as prompt:
        async with pair.client() as client:
            await ask(client, [7, *prompt])
            tokens: list[int] = []

            async def listen() -> None:
                async with client.generate(token_ids=prompt * 4, max_tokens=200, temperature=0.0, ignore_eos=True) as stream:
                    async for token in stream:
                        tokens.append(token.id)
                        if (stage, len(tokens)) in (("first token", 1), ("decoding", 8)):
                            return

            request = asyncio.create_task(listen())
            if stage in ("computing", "reading"):
                await held(pair, stage)
                assert not tokens
                request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await pair.quiet()
            assert list((await ask(client, prompt)).token_ids) == expected(prompt)
        await pair.quiet()


@pytest.mark.parametrize("timeout_s", [0.2, 0.5, 0.9])
async def test_a_deadline_at_any_stage_frees_everything(pair: Cluster, timeout_s: float) -> None:
    """13 chunks of at least 40 ms, then 200 steps: the deadline falls within the chunks, near their end, or while decoding."""
    with disturbed(pair, prompt=PROMPT) as prompt:
        async with pair.client() as client:
            await ask(client, [7, *prompt])
            with pytest.raises(GenerateError) as caught:
                await ask(client, prompt * 2, max_tokens=200, timeout_s=timeout_s)
            assert caught.value.code == "DEADLINE_EXCEEDED"
            await pair.quiet()
            assert list((await ask(client, prompt)).token_ids) == expected(prompt)


async def test_decode_workers_that_always_die_in_live_reads_use_up_the_retries(model: Path) -> None:
    """Without a ONCE folder, every process dies at its first read."""
    limits = ("--engine.max-num-batched-tokens", str(CHUNK), "--engine.max-num-seqs", "16", "--router.max-retries", "1")
    unproven = ("--cluster.prove-workers", "false")  # they would die in their proof
    with cluster(model, *limits, *unproven, prefill=1, decode=2, env={"BATON_FAILPOINTS": "kv.before_read=exit"}) as live:
        async with AsyncClient(live.grpc, max_resumes=0) as client:
            with pytest.raises(GenerateError) as caught:
                await ask(client, PROMPT)
        assert caught.value.reason in ("RETRIES_SPENT", "POISONOUS")
