"""A recorded decode step has the bits of an ordinary one, in every family. What kernels alone do not compute is computed as ever."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from all_pairs import all_pairs
from families import FAMILIES, loaded
from torch import Tensor
from torch.profiler import record_function

from baton.engine.core.pages import LINE
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.cpu import kernel, pointwise
from baton.engine.cpu.decode_steps import MOST, DecodeSteps
from baton.engine.cpu.recording import Arena, Recording, Unrecordable
from baton.engine.model.attention import Span
from baton.engine.model.ops import Ops
from baton.engine.runner import ModelRunner

CPU = torch.device("cpu")
LENGTHS = (5, 17, 16, 1)  # of prompts; a block has 16

THREADS = (1, 3)
CASES = all_pairs(FAMILIES, ["float32", "bfloat16", "int8", "int4"], THREADS)


@pytest.fixture(params=THREADS, autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """More than one thread shares even the smallest call."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(kernel, "SHARED_FROM", 1)
    yield
    torch.set_num_threads(before)


def sequences() -> list[Sequence]:
    params = SamplingParams(max_tokens=64, temperature=0.0)
    return [
        Sequence(f"s{i}", [(31 * k + i) % 40 + 5 for k in range(n)], n, params, b"", blocks=list(range(4 * i, 4 * i + 4)))
        for i, n in enumerate(LENGTHS)
    ]


def step(runner: ModelRunner, seqs: list[Sequence]) -> Tensor:
    logits = runner.run_logits([Chunk(seq, seq.pending) for seq in seqs])
    for seq, row in zip(seqs, logits, strict=True):
        seq.computed = len(seq.tokens)
        seq.tokens.append(int(row.argmax()))
    return logits


def answers(runner: ModelRunner) -> list[Tensor]:
    """Sequences come and go, and change places; one prompt comes between decodes, and blocks begin and end."""
    one, two, three, four = sequences()
    done = [step(runner, [each]) for each in (one, two, three)]
    for batch in ([one], [one, two], [three, two, one], [two, one], [one, two, four], [one, two, three, four], [four, one, three]):
        done += [step(runner, batch) for _ in range(3)]
    return done


@pytest.mark.parametrize(("family", "precision", "threads"), CASES, indirect=["threads"])
def test_recorded_steps_have_the_bits_of_ordinary_ones(family: str, precision: str) -> None:
    recorded, ordinary = (loaded(family, precision, scale=8, products="baton") for _ in range(2))
    steps, ordinary._steps = recorded._steps, None
    assert isinstance(steps, DecodeSteps)
    for ours, theirs in zip(answers(recorded), answers(ordinary), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(recorded._paged.pool, ordinary._paged.pool)  # type: ignore[union-attr]
    assert set(steps._recordings) == {1, 2, 3, 4}


def spans(seqs: list[Sequence], counts: list[int]) -> list[Span]:
    return [Span(seq.computed, count, seq.blocks) for seq, count in zip(seqs, counts, strict=True)]


@pytest.mark.parametrize(("family", "precision", "threads"), CASES, indirect=["threads"])
def test_a_few_tokens_of_each_sequence_have_the_bits_of_a_step_for_each(family: str, precision: str) -> None:
    """So drafts can be verified: the tokens of the first sequence cross from one block to the next."""
    together, alone = (loaded(family, precision, scale=8, products="baton") for _ in range(2))
    assert together._steps is not None and alone._steps is not None
    seqs = sequences()
    for runner in (together, alone):
        for seq in seqs:
            runner.run_logits([Chunk(seq, seq.prompt_len)])
    for seq in seqs:
        seq.computed = seq.prompt_len
        seq.tokens += [(7 * k + seq.prompt_len) % 40 + 5 for k in range(40)]
    for counts in ([14, 1, 3, 2], [1, 5, 1, 1], [1, 5, 1, 1], [2, 2, 2, 2]):
        tokens = [token for seq, count in zip(seqs, counts, strict=True) for token in seq.tokens[seq.computed :][:count]]
        found = together._steps.logits(spans(seqs, counts), tokens)
        assert found is not None
        (logits, best, hidden), row = found, 0
        assert best == logits.argmax(dim=-1).tolist() and torch.equal(together.model.logits(hidden), logits)
        for seq, count in zip(seqs, counts, strict=True):
            for _ in range(count):
                one = alone._steps.logits(spans([seq], [1]), [seq.tokens[seq.computed]])
                assert one is not None and torch.equal(one[0][0], logits[row])
                seq.computed, row = seq.computed + 1, row + 1
    assert set(together._steps._recordings) == {20, 8}
    assert torch.equal(together._paged.pool, alone._paged.pool)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM"])
def test_steps_with_products_of_others_are_computed_in_the_usual_way(family: str) -> None:
    others, ours = (loaded(family, "float32", scale=8, products=products) for products in ("torch", "baton"))
    for theirs, mine in zip(answers(others), answers(ours), strict=True):
        torch.testing.assert_close(theirs, mine, atol=1e-4, rtol=1e-4)
    assert others._steps is not None and not others._steps._recordings


def test_plain_torch_is_not_recorded() -> None:
    assert loaded("LlamaForCausalLM", "float32", compiled=False, scale=8, products="baton")._steps is None


def test_a_larger_batch_is_computed_in_the_usual_way() -> None:
    runner = loaded("LlamaForCausalLM", "float32", scale=8, products="baton")
    assert runner._steps is not None
    params = SamplingParams(max_tokens=4)
    many = [Sequence(f"s{i}", [5], 1, params, b"", blocks=[i % 30]) for i in range(MOST + 1)]
    step(runner, many)
    assert len(step(runner, many)) == MOST + 1 and not runner._steps._recordings
    step(runner, many[:MOST])
    assert set(runner._steps._recordings) == {MOST}


def test_logits_that_somebody_keeps_stay_as_they_are() -> None:
    runner, seqs = loaded("LlamaForCausalLM", "float32", scale=8, products="baton"), sequences()[:1]
    step(runner, seqs)
    kept = [step(runner, seqs) for _ in range(4)]
    assert len({tuple(each[0, :8].tolist()) for each in kept}) == 4


def test_the_tokens_of_a_recorded_step_are_those_of_its_logits() -> None:
    runner, seqs = loaded("LlamaForCausalLM", "float32", scale=8, products="baton"), sequences()
    for seq in seqs:
        step(runner, [seq])
    for _ in range(4):
        answers = runner.run([Chunk(seq, 1) for seq in seqs])
        logits = step(runner, seqs)  # computes the same positions again
        assert [answer.token for (answer,) in answers] == logits.argmax(dim=-1).tolist()
    assert runner._steps is not None and set(runner._steps._recordings) == {4}


def test_an_id_that_is_not_in_the_table_becomes_nan() -> None:
    table, out = torch.ones(4, 8), torch.zeros(3, 8)
    pointwise.embed(table, torch.tensor([3, 4, -1]), out, 2.0)
    assert out[0].tolist() == [2.0] * 8 and out[1:].isnan().all()


# --- recordings ----------------------------------------------------------------------------------------------------------------------


IDS = torch.arange(8)


def doubled(x: Tensor, times: int) -> Tensor:
    """x · 2^times, each step in memory of its own."""
    for _ in range(times):
        out = x.new_empty(x.shape)
        pointwise.embed(x, IDS[: len(x)], out, 2.0)
        x = out
    return x


def test_a_recording_computes_with_what_its_inputs_hold_now() -> None:
    x = torch.ones(3, 4)
    recording = Recording(lambda: doubled(x, 5), Arena())
    assert recording.result.tolist() == [[32.0] * 4] * 3
    x.fill_(3.0)
    assert recording().tolist() == [[96.0] * 4] * 3
    assert kernel._recording is None


@pytest.mark.parametrize("compute", [lambda x: x + 1, lambda x: x[IDS[:2]], lambda x: x.t().contiguous(), lambda x: x.mul_(2)])
def test_what_torch_computes_is_refused(compute: object) -> None:
    x = torch.ones(3, 4)
    with pytest.raises(Unrecordable, match="aten"):
        Recording(lambda: compute(doubled(x, 1)), Arena())  # type: ignore[operator]
    assert kernel._recording is None and (x == 1).all()


def test_threads_wait_for_each_other_only_if_there_is_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine each wait may take a while."""
    x = torch.ones(3, 4)
    large = Recording(lambda: doubled(x, 2), Arena())
    monkeypatch.setattr(kernel, "SHARED_FROM", 1 << 16)
    small = Recording(lambda: doubled(x, 2), Arena())
    together: list[object] = []
    monkeypatch.setattr(kernel, "_together", lambda *given: together.append(given))
    x.fill_(2.0)
    assert small().tolist() == [[8.0] * 4] * 3 and not together
    large()
    assert len(together) == (torch.get_num_threads() > 1)


def test_calls_of_other_threads_are_not_recorded() -> None:
    x, other, go, over = torch.ones(3, 4), torch.ones(3, 4), threading.Event(), threading.Event()

    def compute() -> Tensor:
        y = doubled(x, 1)
        go.set()
        assert over.wait(30)
        return doubled(y, 1)

    def disturb() -> None:
        assert go.wait(30)
        kept.append(doubled(other, 3))
        over.set()

    kept: list[Tensor] = []
    thread = threading.Thread(target=disturb)
    thread.start()
    recording = Recording(compute, Arena())
    thread.join()
    other.fill_(5.0)
    assert recording().tolist() == [[4.0] * 4] * 3 and (kept[0] == 8.0).all(), "it repeated the other's calls, too"


def test_marks_are_no_computation() -> None:
    x = torch.ones(3, 4)

    def compute() -> Tensor:
        with record_function("part"):
            return doubled(x, 1)

    assert Recording(compute, Arena())().tolist() == [[2.0] * 4] * 3


def test_views_are_no_computation() -> None:
    x = torch.arange(24.0).view(6, 4)
    recording = Recording(lambda: doubled(x[2:4].view(2, 2, 2).flatten(1), 1)[:, 1:3], Arena())
    assert recording().tolist() == [[18.0, 20.0], [26.0, 28.0]]


def test_memory_is_given_again_when_nothing_refers_to_it() -> None:
    arena, x = Arena(), torch.ones(8, 4)
    Recording(lambda: doubled(x, 6)[:0], arena)
    assert len(arena._idle) == 2, "at any moment one is read and one is written"
    kept = arena.empty((8, 4), torch.float32)
    view = kept[2:].view(-1)
    del kept
    assert len(arena._idle) == 1, "a view refers to it"
    del view
    assert len(arena._idle) == 2


def test_results_that_are_lent_share_their_memory() -> None:
    arena, kept, x = Arena(), list[Recording[Tensor]](), torch.arange(512.0).view(8, 64)
    for rows in range(1, 9):
        recording = Recording(lambda: doubled(x[:rows], 2), arena)  # noqa: B023
        recording.result = arena.lent(recording.result)
        kept.append(recording)
    assert sum(len(each) for each in arena._all) <= 4 * x.nbytes, "no more than for the largest: one that is read and one that is written"
    assert all(torch.equal(each(), 4 * x[: i + 1]) for i, each in enumerate(kept))
    assert arena.lent(x) is x, "it is not from here"


def test_memory_is_aligned_and_fits() -> None:
    arena = Arena()
    for shape, dtype in (((3, 5), torch.bfloat16), ((7,), torch.uint8), ((0, 4), torch.float32), ((2, 1, 3), torch.complex64)):
        made = arena.empty(shape, dtype)
        assert made.shape == shape and made.dtype == dtype and made.data_ptr() % LINE == 0
    large, small = arena.empty((100,), torch.float32), arena.empty((10,), torch.float32)
    there = large.data_ptr()
    del large
    assert arena.empty((90,), torch.float32).data_ptr() == there
    assert small.numel() == 10


def test_other_threads_of_python_go_on_while_a_recording_is_repeated() -> None:
    """With one thread, too: an event loop must not wait for a step."""
    x = torch.ones(8, 1 << 16)
    recording, counted, over = Recording(lambda: doubled(x, 40), Arena()), [0], threading.Event()

    def count() -> None:
        while not over.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        moved = 0
        while not moved:
            before = counted[0]
            recording.replay()
            moved = counted[0] - before
            assert time.monotonic() < deadline
    finally:
        over.set()
        thread.join()


# --- what steps are made of ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> Ops:
    ops = loaded("LlamaForCausalLM", "float32", scale=8, products="baton").model.ops
    assert type(ops) is not Ops
    return ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_a_step_compute_what_plain_torch_does(compiled: Ops, dtype: torch.dtype) -> None:
    close: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 6, 16, generator=generator).to(dtype)
    table, ids = x.flatten(1), torch.tensor([8, 0, 3])
    for scale in (1.0, 2.5):
        torch.testing.assert_close(compiled.embed(ids, table, scale), Ops().embed(ids, table, scale), atol=0, rtol=0)
    for cap in (None, 3.0):
        torch.testing.assert_close(compiled.logits(table * 4, cap), Ops().logits(table * 4, cap), **close)
    heads, theirs, weight = x[:, 1:5].clone(), x.clone()[:, 1:5], torch.randn(4, 16, generator=generator).to(dtype)
    compiled.norm_heads_(heads, weight, 1e-6)
    Ops().norm_heads_(theirs, weight, 1e-6)
    torch.testing.assert_close(heads, theirs, **close)
    positions, frequencies = torch.tensor([0, 1, 77, 4095]), torch.logspace(0, -4, 8)
    for amplitude in (1.0, 1.3):
        ours, plain = (ops.rotation(positions, frequencies, amplitude) for ops in (compiled, Ops()))
        assert ours.shape == plain.shape and (ours - plain).abs().max() < 1e-3 * amplitude
