"""The runner that does not wait, on whatever device there is: it gives the tokens of the plain runner, eagerly and through graphs."""

import gc
import random
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from host_pool import carry

from baton.engine.choice import load_runner
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk, NonFiniteLogits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.graphs import Compute, Graphs, ladder
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.overlap import OverlapEngine
from baton.engine.gpu.runner import GpuRunner
from baton.engine.runner import ModelRunner
from baton.models.make_small import make

BLOCK = 4
LIMITS = Limits(max_num_seqs=5, max_num_batched_tokens=24)
CAPACITY = Capacity(5, 24, 96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make(path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=300, context=96)
    return path


def loaded(folder: Path, device: torch.device, blocks: int = 60, backend: str = "torch", kv_dtype: str = "auto") -> GpuRunner:
    runner = load_runner(GpuRunner, folder, block_size=BLOCK, device=str(device), kv_dtype=kv_dtype)
    assert isinstance(runner, GpuRunner)
    runner.attach(KvPool(runner.layout, blocks), capacity=CAPACITY, backend=backend)
    return runner


def plain(folder: Path, blocks: int = 60, kv_dtype: str = "auto") -> ModelRunner:
    runner = load_runner(ModelRunner, folder, block_size=BLOCK, compiled=False, kv_dtype=kv_dtype)
    runner.attach(KvPool(runner.layout, blocks))
    return runner


def workload(rng: random.Random, count: int) -> list[Sequence]:
    seqs = []
    for i in range(count):
        tokens = [rng.randrange(5, 300) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 12),
            min_tokens=rng.choice((0, 3)),
            temperature=rng.choice((0.0, 0.8)),
            top_k=rng.choice((0, 20)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.3)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            seed=rng.getrandbits(63),
            logprobs=rng.choice((None, 2)),
            ignore_eos=rng.random() < 0.5,
        )
        seqs.append(Sequence(str(i), tokens, len(tokens), params, root=b""))
    return seqs


def answers(engine: Engine, seqs: list[Sequence], rng: random.Random) -> dict[str, list[int]]:
    waiting = list(seqs)
    while waiting or not engine.idle:
        if waiting and rng.random() < 0.6:
            engine.add(waiting.pop(0))
        engine.step()
    engine.pool.check()
    return {seq.id: seq.tokens[seq.prompt_len :] for seq in seqs}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("blocks", [60, 26])
def test_tokens_match_the_plain_engine(folder: Path, device: torch.device, backend: str, blocks: int) -> None:
    """With one step in flight, mixed batches, chunks and every kind of request. The smaller pool preempts."""
    if backend == "triton":
        pytest.importorskip("triton")
    count = 20 if backend == "torch" else 6
    expected = answers(Engine(plain(folder, blocks), LIMITS, 80), workload(random.Random(1), count), random.Random(2))
    ours = OverlapEngine(loaded(folder, device, blocks, backend), LIMITS, 80)
    assert answers(ours, workload(random.Random(1), count), random.Random(3)) == expected


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int5"])
def test_logits_of_mixed_batches_and_padded_decodes_match_the_plain_runner(
    folder: Path, device: torch.device, backend: str, kv_dtype: str
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    rng, ours, theirs = random.Random(4), loaded(folder, device, backend=backend, kv_dtype=kv_dtype), plain(folder, kv_dtype=kv_dtype)
    prompts = [[rng.randrange(5, 300) for _ in range(n)] for n in (9, 3, 11)]
    for runner in (ours, theirs):
        seqs = [
            Sequence(str(i), list(p), len(p), SamplingParams(max_tokens=9), b"", blocks=list(range(9 * i, 9 * i + 9)))
            for i, p in enumerate(prompts)
        ]
        steps = [[(0, 9), (1, 3)], [(2, 7), (0, 1), (1, 1)], [(2, 4)], [(1, 1), (0, 1), (2, 1)]]
        found = []
        for step in steps:
            found.append(runner.run_logits([Chunk(seqs[i], n) for i, n in step]).cpu())
            for i, n in step:
                seqs[i].computed += n
                if seqs[i].pending == 0:
                    seqs[i].tokens.append(7)
        if runner is ours:
            mine = found
    for a, b in zip(mine, found, strict=True):
        assert a.shape == b.shape
        off = 2e-5 if kv_dtype == "auto" else 1e-2 * float(b.abs().max())  # a last bit may round a number up or down
        torch.testing.assert_close(a, b, rtol=2e-4, atol=off)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_slots_after_the_last_token_are_zero(folder: Path, device: torch.device, backend: str) -> None:
    """The bytes of a partial block depend only on its tokens, whichever sequence had the block before."""
    if backend == "triton":
        pytest.importorskip("triton")
    runner = loaded(folder, device, backend=backend)
    runner.blocks[:60] = torch.nan
    seq = Sequence("a", list(range(5, 15)), 10, SamplingParams(max_tokens=9), b"", blocks=[7, 3, 11, 20])
    for n in (6, 4, 1, 1, 1):
        runner.run([Chunk(seq, n)])
        seq.computed += n
        if seq.pending == 0:
            seq.tokens.append(9)
        full, rest = divmod(seq.computed, BLOCK)
        if rest:
            last = runner.blocks[seq.blocks[full]]
            assert not last[..., rest:, :].any() and last[..., :rest, :].isfinite().all()
    assert runner.blocks[[0, 20]].isnan().all() == torch.tensor(False) and runner.blocks[0].isnan().all()


def test_a_row_of_nan_fails_only_its_own_sequence(folder: Path, device: torch.device) -> None:
    """`run` refuses the batch, as every runner does; `submit` reports which row failed, and answers for the others."""
    runner = loaded(folder, device)
    seqs = [
        Sequence(name, [7, 8, 9], 3, SamplingParams(max_tokens=9, temperature=0.0), b"", blocks=[i]) for i, name in enumerate(("a", "b"))
    ]
    runner.run([Chunk(seq, 3) for seq in seqs])
    for seq in seqs:
        seq.computed = 3
        seq.tokens.append(4)
    runner.blocks[1] = torch.nan
    with pytest.raises(NonFiniteLogits) as error:
        runner.run([Chunk(seq, 1) for seq in seqs])
    assert error.value.sequence_ids == ["b"]
    result = runner.submit([Chunk(seq, 1) for seq in seqs]).result()
    assert result.failed == {1} and result.tokens[0] and not result.tokens[1]


@pytest.mark.parametrize(("backend", "kv_dtype"), [("torch", "auto"), ("triton", "int8"), ("triton", "int5")])
def test_a_sequence_moves_from_one_device_to_another_through_the_host(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, backend: str, kv_dtype: str
) -> None:
    """Prefilled on one, copied out, moved as bytes, copied in, decoded on the other: the same tokens, and nothing is computed twice. Scales
    move with the numbers, and are copied with them."""
    pytest.importorskip("triton")
    monkeypatch.setattr("baton.engine.gpu.staged_pool.STAGED_BLOCKS", 2)  # more than one round
    prompt, params = list(range(5, 23)), SamplingParams(max_tokens=9, temperature=0.0)
    source, target = (loaded(folder, device, backend=backend, kv_dtype=kv_dtype) for _ in range(2))
    a = Sequence("a", list(prompt), 18, params, b"", blocks=[3, 1, 4, 15, 9, 2])
    ((first,),) = source.run([Chunk(a, 18)])
    b = Sequence("b", [*prompt, first.token], 18, params, b"", computed=18, blocks=[7, 8, 6, 0, 5, 30])
    carry(source.pool, a.blocks[:5], target.pool, b.blocks[:5])
    assert source.pool.digests(a.blocks[:5]) == target.pool.digests(b.blocks[:5])
    for runner, seq in ((source, a), (target, b)):
        runner.copy(seq.blocks[0], 50)
        seq.blocks[0] = 50
    a.tokens.append(first.token)
    a.computed = 18
    for _ in range(5):
        ((here,),), ((there,),) = source.run([Chunk(a, 1)]), target.run([Chunk(b, 1)])
        assert here == there
        for seq in (a, b):
            seq.computed += 1
            seq.tokens.append(here.token)


def test_a_pool_capacity_or_backend_that_does_not_fit_is_refused(folder: Path, device: torch.device) -> None:
    runner = load_runner(GpuRunner, folder, block_size=BLOCK, device=str(device))
    assert isinstance(runner, GpuRunner)
    layout = runner.layout
    other = KvLayout(layout.model_fingerprint, "float32", 2 * BLOCK, layout.num_layers, layout.num_kv_heads, layout.head_dim)
    with pytest.raises(ValueError, match="block_size"):
        runner.attach(KvPool(other, 4), capacity=CAPACITY)
    with pytest.raises(ValueError, match="capacity"):
        runner.attach(KvPool(layout, 4))
    with pytest.raises(ValueError, match=r"engine\.attention_backend: flash_attn is not possible here"):
        runner.attach(KvPool(layout, 4), capacity=CAPACITY, backend="flash_attn")


def test_the_ladder_of_graph_sizes_bounds_the_padding() -> None:
    assert ladder(1) == (1,) and ladder(5) == (1, 2, 4, 5) and ladder(256)[-1] == 256 and ladder(4096)[-1] == 512
    for most in (7, 64, 100, 256):
        sizes = ladder(most)
        assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
        assert all(b - a <= max(8, a // 4) for a, b in pairwise(sizes) if a >= 8)  # the most padding


def test_graphs_are_captured_once_and_replayed_by_size() -> None:
    captured: list[str] = []

    def capture(compute: Compute) -> Compute:
        captured.append("captured")
        answer = compute()
        return lambda: answer + 1

    def filled(size: int) -> Compute:
        return lambda: torch.full((size,), float(size))

    graphs = Graphs(capture)
    for size in (4, 1):
        graphs.add(size, filled(size))
    assert graphs.sizes == (1, 4) and captured == ["captured"] * 2
    assert graphs.run(4).tolist() == [5.0] * 4 and graphs.run(1).tolist() == [2.0]


def test_what_a_captured_step_reads_lives_as_long_as_its_graph() -> None:
    """On a device, a graph knows its tensors by address. Freed, they would be read all the same."""
    rows = torch.arange(4)
    kept = weakref.ref(rows)

    def capture(compute: Compute) -> Compute:
        answer = compute()  # as a graph does, it keeps its answer and nothing else
        return lambda: answer

    graphs = Graphs(capture)
    graphs.add(4, lambda rows=rows: rows + 1)  # type: ignore[misc]
    del rows
    gc.collect()
    assert kept() is not None
    del graphs
    gc.collect()
    assert kept() is None
