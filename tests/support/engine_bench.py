"""An engine as a worker sees it, with what it has said so far."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from host_pool import carry

from baton.engine.core.block_key import root_key
from baton.engine.core.colder import ColderTiers
from baton.engine.core.contract import CacheEvent, EngineLoad, EngineStopped, Listener, ServingEngine
from baton.engine.core.counts import Counts
from baton.engine.core.engine import Output
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options
from baton.engine.start import start_engine

BLOCK = 32
MAX_LEN, MAX_QUEUE, CHUNK = 512, 12, 64  # PROMPT is computed in three chunks
VLLM_DEVICE = os.environ.get("BATON_VLLM_DEVICE", "cpu")  # benchmarks/vllm_gpu.py sets both
VLLM_INVARIANT = bool(os.environ.get("BATON_VLLM_INVARIANT"))
WITHIN_S = 120.0
PROMPT = [(i * 37) % 200 + 5 for i in range(150)]  # five blocks, the last one in part

Capability = Literal["grammars", "kv", "logits"]


@dataclass
class Bench:
    engine: ServingEngine = field(init=False)
    outputs: list[Output] = field(default_factory=list)
    events: list[CacheEvent] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    batches: list[tuple[float, int, int]] = field(default_factory=list)
    made: int = 0
    tokenizer: Any = None  # of the model
    separates_output: bool = False  # see `baton.engine.core.protocol.Runner`
    lacks: Mapping[Capability, str] = field(default_factory=dict)  # what the engine has not, and why

    @property
    def listener(self) -> Listener:
        return Listener(self.outputs.extend, self.events.extend, self.failures.append, lambda *batch: self.batches.append(batch))

    def needs(self, what: Capability) -> None:
        if what in self.lacks:
            pytest.skip(f"{what}: {self.lacks[what]}")

    def seq(self, tokens: list[int], prompt_len: int | None = None, hold: bool = False, salt: str = "", **params: Any) -> Sequence:
        self.made += 1
        chosen = replace(SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True), **params)
        root = root_key(self.engine.traits.model_fingerprint, salt)
        return Sequence(f"s{self.made}", list(tokens), prompt_len or len(tokens), chosen, root, hold=hold)

    def of(self, seq: Sequence) -> list[Output]:
        return [output for output in self.outputs if output.seq is seq]

    def tokens(self, seq: Sequence) -> list[int]:
        return [output.sampled.token for output in self.of(seq) if output.sampled is not None]

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def token(self, text: str) -> int:
        """The token that is exactly this text."""
        [token] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return int(token)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def ended(self, seq: Sequence) -> list[int]:
        """Waits for the last output of the sequence; of one that is held, for its first token."""
        await self.until(lambda: any(o.finish or o.failure or o.expired or (o.sampled and seq.hold) for o in self.of(seq)))
        assert self.of(seq)[-1].failure is None
        return self.tokens(seq)

    async def run(self, seq: Sequence) -> list[int]:
        await self.engine.add(seq)
        return await self.ended(seq)

    async def reserve(self, seq: Sequence) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not await self.engine.reserve(seq):
                await asyncio.sleep(0.01)

    def copy(self, holder: Sequence, reader: Sequence, into: "Bench | None" = None) -> None:
        """As a transport would: into the reserved blocks that are not there yet, of this engine or another."""
        first = reader.computed // BLOCK
        pairs = list(zip(holder.blocks[first:], reader.blocks[first:], strict=False))
        carry(self.engine.pool, [theirs for theirs, _ in pairs], (into or self).engine.pool, [ours for _, ours in pairs])

    async def quiet(self) -> EngineLoad:
        """Waits until nothing of any sequence is left."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                now = await self.engine.look()
                if not (now.sequences or now.owned_blocks or now.running or now.waiting):
                    return now
                await asyncio.sleep(0.01)

    async def close(self) -> Counts:
        """Nothing is left, nothing has failed, and who comes later is refused."""
        counts = (await self.quiet()).counts
        assert not self.failures
        await self.engine.close()
        with pytest.raises(EngineStopped):
            await self.engine.add(self.seq([1]))
        return counts


async def started(options: Options, tiers: ColderTiers | None = None) -> Bench:
    made = Bench()
    made.engine = await start_engine(options, made.listener, tiers=tiers)
    return made
