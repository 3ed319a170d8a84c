"""What drafts on a device: the output is the one without it, and what it guesses is what it guesses step by step."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.choice import load_runner
from baton.engine.core.block_key import root_key
from baton.engine.core.drafting import Drafter
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.device_draft import DeviceDraft
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.overlap import UNKNOWN, OverlapEngine
from baton.engine.gpu.runner import GpuRunner
from baton.engine.runner import ModelRunner
from baton.models.make_small import make

BLOCK, CONTEXT, BOUND = 4, 96, 5
CAPACITY = Capacity(5, 40, CONTEXT, guesses=BOUND)
LIMITS = Limits(max_num_seqs=5, max_num_batched_tokens=40, reserve_growth=0.0)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 5},
    "filters": {"temperature": 1.0, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and another one that knows nothing of it, and is small: as a draft that is rarely right it is asked most often."""
    made = {}
    for seed, (name, hidden, parts) in enumerate((("model", 64, 2), ("other", 32, 1))):
        torch.manual_seed(seed)
        made[name] = tmp_path_factory.mktemp(name)
        make(made[name], hidden=hidden, layers=parts, heads=4, kv_heads=parts, vocab=300, context=CONTEXT)
    return made


@cache
def loaded(kind: type[ModelRunner], folder: Path, device: str) -> ModelRunner:
    return load_runner(kind, folder, block_size=BLOCK, device=device, compiled=False)


def fresh(kind: type[ModelRunner], folder: Path, device: torch.device) -> Any:
    made = loaded(kind, folder, str(device))  # type: ignore[arg-type]  # a class can be hashed
    return kind(made.model, made.layout, made.device)


def engine(
    folders: dict[str, Path], device: torch.device, backend: str, draft: str | None, blocks: int = 60, others: int = 0
) -> tuple[Engine, GpuRunner]:
    if backend == "triton":
        pytest.importorskip("triton")
    runner: GpuRunner = fresh(GpuRunner, folders["model"], device)
    drafter: Drafter | None = None
    if draft is not None:
        drafter = DeviceDraft(fresh(ModelRunner, folders[draft], device), BOUND, others)
        runner.pair(drafter)
    sizes = (1, 4, 16) if device.type == "cuda" else (1, 4)  # each is computed once, padded, before anything is asked
    runner.attach(KvPool(runner.layout, blocks), capacity=CAPACITY, backend=backend, graph_sizes=sizes)
    return OverlapEngine(runner, LIMITS, 80, drafter=drafter), runner


def crowd(count: int = 8) -> list[Sequence]:
    rng, seqs = random.Random(3), []
    for i, way in enumerate(([*WAYS.values()] * 2)[:count]):
        tokens = [rng.randrange(5, 300) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **way})
        seqs.append(Sequence(str(i), tokens, len(tokens), params, root_key("small")))
    return seqs


def said(engine: Engine, seqs: list[Sequence]) -> dict[str, list[int]]:
    most = 2000
    for seq in seqs:
        engine.add(seq)
    while not engine.idle:
        engine.step()
        most -= 1
        assert most, "the engine does not become idle"
    engine.pool.check()
    return {seq.id: seq.tokens[seq.prompt_len :] for seq in seqs}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], device: torch.device) -> dict[str, list[int]]:
    return said(engine(folders, device, "torch", None)[0], crowd())


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("draft", "blocks"), [("model", 60), ("other", 60), ("model", 22)])
def test_the_output_is_the_one_without_a_draft(
    folders: dict[str, Path], device: torch.device, backend: str, draft: str, blocks: int, expected: dict[str, list[int]]
) -> None:
    """The smaller pool preempts: five sequences begin in it, and do not end in it. A draft that is the model itself is nearly always right,
    and one that knows nothing rarely."""
    ours, _ = engine(folders, device, backend, draft, blocks)
    count = 8 if device.type == "cuda" else 4  # the interpreter is slow: guesses are drawn and stored by kernels in any case
    assert said(ours, crowd(count)) == {str(i): expected[str(i)] for i in range(count)}
    counts = ours.counts
    assert counts.drafted_tokens > 50 * count / 8
    assert counts.preemptions if blocks < 60 else not counts.preemptions
    if draft == "model":
        assert counts.accepted_tokens > 0.7 * counts.drafted_tokens


def test_who_has_no_guesses_goes_on_with_its_own_token_beside_who_has(folders: dict[str, Path], device: torch.device) -> None:
    """What it has drawn in such a step is in its seat when the next step reads it there."""
    _, runner = engine(folders, device, "torch", None)
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=4)
    guessed, plain = (
        Sequence(name, [at, at + 1, at + 2], 3, params, b"", blocks=blocks)
        for name, at, blocks in (("a", 7, [0, 1, 2]), ("b", 20, [3, 4, 5]))
    )
    for seq in (guessed, plain):
        seq.tokens.append(runner.run([Chunk(seq, 3)])[0][0].token)
        seq.computed = 3
    first = runner.submit([Chunk(guessed, 1, (1, 2)), Chunk(plain, 1)])
    plain.tokens.append(UNKNOWN)
    plain.computed += 1
    second = runner.submit([Chunk(plain, 1)])
    drawn, found = first.result().tokens[1][0].token, second.result().tokens[0][0].token

    def after(token: int) -> int:
        alone = Sequence("c", [*plain.tokens[:4], token], 3, params, b"", blocks=[6, 7, 8])
        return runner.run([Chunk(alone, 5)])[0][0].token

    assert found == after(drawn) != after(plain.tokens[3]), "not with the token before it"
