"""A step for which a device has no memory costs one request: the one with the largest part in it, of equal ones the newest."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from late_toy import LateEngine, LateToy

from baton.engine.choice import load_runner
from baton.engine.core.engine import Engine, Output
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk, OutOfDeviceMemory, Tokens
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence, State
from baton.engine.core.toy import ToyRunner, naive
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.overlap import OverlapEngine, Pending
from baton.engine.gpu.runner import GpuRunner
from baton.models.make_small import make

BLOCK = 4
TOY = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 512, "kv_width": 2}
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64)
PROMPTS = {"a": [1, 2, 3], "b": [4, 5], "large": [7] * 30, "c": [9, 8, 7, 6]}


def fits(batch: Seq[Chunk]) -> bool:
    return all(chunk.positions <= 20 for chunk in batch)


class Small(ToyRunner):
    """A device that has memory for some batches."""

    def __init__(self, fits: Callable[[Seq[Chunk]], bool]) -> None:
        super().__init__(TOY, "toy", BLOCK)
        self.attach(KvPool(self.layout, 64))
        self.fits = fits

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        if not self.fits(batch):
            raise OutOfDeviceMemory("64 GiB asked, 1 left")
        return super().run(batch)


class SmallLate(LateToy):
    def __init__(self, fits: Callable[[Seq[Chunk]], bool]) -> None:
        super().__init__(64, TOY, BLOCK)
        self.fits = fits

    def submit(self, batch: Seq[Chunk]) -> Pending:
        if not self.fits(batch):
            raise OutOfDeviceMemory("64 GiB asked, 1 left")
        return super().submit(batch)


def make_engine(kind: str, fits: Callable[[Seq[Chunk]], bool]) -> Engine:
    return Engine(Small(fits), LIMITS, 200) if kind == "plain" else LateEngine(SmallLate(fits), LIMITS, 200)


def sequence(name: str, **params: Any) -> Sequence:
    tokens = PROMPTS[name]
    return Sequence(name, list(tokens), len(tokens), SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **params}), root=b"")


def drain(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(200):
        if engine.idle:
            break
        outputs += engine.step()
        engine.pool.check()
    assert engine.idle and not engine.sequences and engine.pool.num_owned == 0
    return outputs


def failed(outputs: list[Output]) -> list[str]:
    return [output.seq.id for output in outputs if output.failure]


@pytest.mark.parametrize("kind", ["plain", "one step in flight"])
def test_the_largest_request_fails_and_the_others_have_their_tokens(kind: str) -> None:
    engine = make_engine(kind, fits)
    seqs = {name: sequence(name) for name in PROMPTS}
    outputs: list[Output] = []
    for seq in seqs.values():  # the large one comes while others decode
        engine.add(seq)
        outputs += engine.step()
    outputs += drain(engine)
    assert failed(outputs) == ["large"] and seqs["large"].state is State.DONE
    [reason] = [output.failure for output in outputs if output.failure]
    assert reason is not None and "64 GiB asked" in reason
    for name in ("a", "b", "c"):
        assert seqs[name].tokens[len(PROMPTS[name]) :] == naive(PROMPTS[name], seqs[name].params, width=2)
        assert sum(output.seq.id == name and output.sampled is not None for output in outputs) == 9


@pytest.mark.parametrize("kind", ["plain", "one step in flight"])
def test_of_equal_parts_the_newest_fails(kind: str) -> None:
    """Whether its last token is known or in flight."""
    engine = make_engine(kind, lambda batch: not (len(batch) == 3 and all(chunk.samples and chunk.n == 1 for chunk in batch)))
    seqs = {name: sequence(name) for name in ("a", "b", "c")}
    for seq in seqs.values():
        engine.add(seq)
    outputs = drain(engine)
    assert failed(outputs) == ["c"] and -1 not in seqs["c"].tokens
    for name in ("a", "b"):
        assert seqs[name].tokens[len(PROMPTS[name]) :] == naive(PROMPTS[name], seqs[name].params, width=2)


def test_an_allocation_of_torch_that_fails_is_such_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, hidden=64, layers=1, heads=4, kv_heads=2, vocab=300, context=96)
    runner = load_runner(GpuRunner, tmp_path, block_size=BLOCK, compiled=False)
    runner.attach(KvPool(runner.layout, 40), capacity=Capacity(5, 64, 96), backend="torch")
    alone, engine = sequence("a"), OverlapEngine(runner, Limits(5, 64), 90)
    engine.add(alone)
    drain(engine)
    forward = runner._forward

    def some(step: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if len(step.positions) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(step, rows)

    monkeypatch.setattr(runner, "_forward", some)
    seqs = [sequence("large"), sequence("a")]
    for seq in seqs:
        engine.add(seq)
    outputs = drain(engine)
    assert failed(outputs) == ["large"] and seqs[1].tokens == alone.tokens
