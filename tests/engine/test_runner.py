"""The runner keeps the contract of `baton.engine.core.protocol`, and its tokens are the naive oracle's."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.choice import load_runner
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.protocol import Chunk, NonFiniteLogits, Runner, Tokens
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence, finish_reason
from baton.engine.cpu import compiled_ops
from baton.engine.model.naive import generate
from baton.engine.runner import ModelRunner
from baton.models.make_small import make

BLOCK = 4
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make(path, hidden=64, layers=3, heads=4, kv_heads=2, vocab=300, context=96)
    return path


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return loaded(folder)


def loaded(folder: Path) -> ModelRunner:
    runner = load_runner(ModelRunner, folder, block_size=BLOCK)
    runner.attach(KvPool(runner.layout, 150))
    return runner


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, 300) for _ in range(length)]


def sequence(tokens: list[int], params: SamplingParams, blocks: list[int]) -> Sequence:
    seq = Sequence("s", list(tokens), len(tokens), params, root=b"")
    seq.blocks = blocks
    return seq


def advance(runner: Runner, work: list[tuple[Sequence, int]]) -> list[Tokens]:
    """Runs one step and updates the sequences as an engine would."""
    answers = runner.run([Chunk(seq, n) for seq, n in work])
    for (seq, n), answer in zip(work, answers, strict=True):
        seq.computed += n
        seq.tokens += [sampled.token for sampled in answer]
    return answers


def finish(runner: Runner, seq: Sequence) -> list[int]:
    while not (seq.output_len and finish_reason(seq, runner.eos_token_ids, runner.max_positions)):
        advance(runner, [(seq, seq.pending)])
    return seq.tokens[seq.prompt_len :]


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 25),
        min_tokens=rng.choice((0, 5)),
        temperature=rng.choice((0.0, 0.8, 1.5)),
        top_k=rng.choice((0, 20)),
        top_p=rng.choice((1.0, 0.9)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        frequency_penalty=rng.choice((0.0, 0.5)),
        seed=rng.getrandbits(63),
        ignore_eos=rng.random() < 0.5,
    )


def test_a_runner_describes_its_model(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    runner = load_runner(ModelRunner, folder, block_size=BLOCK, progress=lambda done, total: seen.append((done, total)))
    assert (runner.vocab_size, runner.eos_token_ids, runner.max_positions) == (300, frozenset({1}), 96)
    layout = runner.layout
    assert (layout.dtype, layout.block_size, layout.num_layers, layout.num_kv_heads, layout.head_dim) == ("float32", BLOCK, 3, 2, 16)
    assert seen == [(i + 1, len(seen)) for i in range(3 * 9 + 3)]


def test_the_fingerprint_tells_models_and_precisions_apart(folder: Path, tmp_path: Path) -> None:
    make(tmp_path, seed=1, hidden=64, layers=3, heads=4, kv_heads=2, vocab=300, context=96)
    runners = [load_runner(ModelRunner, folder), load_runner(ModelRunner, folder, dtype="bfloat16"), load_runner(ModelRunner, tmp_path)]
    assert len({runner.layout.model_fingerprint for runner in runners}) == 3
    assert load_runner(ModelRunner, folder).layout == runners[0].layout


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype\n.*float32.*bfloat16"):
        load_runner(ModelRunner, folder, dtype="float8")


def test_a_pool_with_a_different_layout_is_refused(runner: ModelRunner) -> None:
    layout = runner.layout
    other = KvLayout(layout.model_fingerprint, "float32", 2 * BLOCK, layout.num_layers, layout.num_kv_heads, layout.head_dim)
    with pytest.raises(ValueError, match="block_size"):
        runner.attach(KvPool(other, 4))


def test_answers_align_with_chunks_and_are_empty_before_the_last_token(runner: ModelRunner) -> None:
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (9, 30, 1, 14)]
    seqs = [sequence(prompt, GREEDY, list(range(20 * i, 20 * i + 20))) for i, prompt in enumerate(prompts)]
    answers = advance(runner, [(seqs[0], 5), (seqs[1], 30), (seqs[2], 1), (seqs[3], 13)])
    assert [bool(answer) for answer in answers] == [False, True, True, False]
    assert advance(runner, [(seqs[3], 1), (seqs[0], 2)])[1] == ()
    advance(runner, [(seqs[0], 2)])
    expected = [generate(runner.model, prompt, SamplingParams(max_tokens=1, temperature=0.0))[0].token for prompt in prompts]
    assert [seq.tokens[-1] for seq in seqs] == expected
    assert [len(seq.tokens) for seq in seqs] == [10, 31, 2, 15]


def test_a_batch_may_sample_no_token(runner: ModelRunner) -> None:
    assert advance(runner, [(sequence(list(range(20)), GREEDY, list(range(9))), 7)]) == [()]


def test_a_runner_does_not_change_the_sequence(runner: ModelRunner) -> None:
    seq = sequence(list(range(10, 20)), GREEDY, [3, 9, 1])
    runner.run([Chunk(seq, 10)])
    assert (seq.tokens, seq.blocks, seq.computed) == (list(range(10, 20)), [3, 9, 1], 0)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_match_the_oracle_whatever_the_batches(runner: ModelRunner, seed: int) -> None:
    rng = random.Random(seed)
    free = rng.sample(range(150), 150)
    seqs = []
    for _ in range(7):
        seqs.append(sequence(random_prompt(rng, rng.randint(1, 50)), random_params(rng), [free.pop() for _ in range(20)]))
    running = list(seqs)
    while running:
        chosen = rng.sample(running, rng.randint(1, len(running)))
        advance(runner, [(seq, min(seq.pending, rng.randint(1, 20))) for seq in chosen])
        running = [s for s in running if not (s.output_len and finish_reason(s, runner.eos_token_ids, runner.max_positions))]
    for seq in seqs:
        oracle = [answer.token for answer in generate(runner.model, seq.tokens[: seq.prompt_len], seq.params)]
        assert seq.tokens[seq.prompt_len :] == oracle


def test_a_continued_stream_equals_the_uninterrupted_one(runner: ModelRunner) -> None:
    """A retry on another worker: the tokens already sent become known tokens, and the prompt's length is unchanged."""
    params = SamplingParams(max_tokens=20, temperature=1.0, frequency_penalty=1.0, min_tokens=15, seed=99)
    prompt = random_prompt(random.Random(2), 11)
    whole = finish(runner, sequence(prompt, params, list(range(30))))
    retried = sequence(prompt, params, list(range(40, 70)))
    retried.tokens += whole[:8]
    assert finish(runner, retried) == whole


def test_kv_moved_to_another_pool_continues_bit_for_bit(runner: ModelRunner, folder: Path) -> None:
    other = loaded(folder)
    prompt = random_prompt(random.Random(3), 30)
    here = sequence(prompt, GREEDY, [5, 17, 2, 80, 44, 3, 91, 60, *range(100, 120)])
    advance(runner, [(here, 30)])

    def moved(blocks: list[int]) -> Sequence:
        seq = sequence(prompt, GREEDY, [*range(20, 28), *range(50, 70)])
        seq.tokens, seq.computed = list(here.tokens), here.computed
        for block in blocks:
            other.pool.array[seq.blocks[block]] = runner.pool.array[here.blocks[block]]
        return seq

    def logits(runner: ModelRunner, seq: Sequence) -> torch.Tensor:
        return runner.run_logits([Chunk(seq, 1)])

    whole, incomplete = logits(other, moved(list(range(8)))), None
    other.pool.array[:] = 0
    incomplete = logits(other, moved([0, 1, 2, 3, 4, 6, 7]))
    expected = logits(runner, here)
    assert torch.equal(whole, expected)
    assert not torch.equal(incomplete, expected), "a block that was not copied must change the logits"


def test_the_bytes_of_a_partial_block_depend_only_on_its_tokens(runner: ModelRunner) -> None:
    """What an earlier owner left after the last token is cleared, so that digests of equal prefixes are equal."""
    prompt = random_prompt(random.Random(4), 10)
    runner.pool.array[:] = 0xFF  # NaN in every slot
    first, second = sequence(prompt, GREEDY, [7, 8, 9]), sequence(prompt, GREEDY, [1, 2, 3])
    advance(runner, [(first, 10)])
    advance(runner, [(second, 10)])
    assert np.array_equal(runner.pool.array[[7, 8, 9]], runner.pool.array[[1, 2, 3]])


def test_broken_kv_raises_an_error_instead_of_giving_a_token(runner: ModelRunner) -> None:
    good, bad = sequence(list(range(10, 22)), GREEDY, [0, 1, 2, 3]), sequence(list(range(30, 42)), GREEDY, [4, 5, 6, 7])
    bad.id = "bad"
    advance(runner, [(good, 12), (bad, 12)])
    runner.pool.array[5] = 0xFF
    with pytest.raises(NonFiniteLogits) as caught:
        advance(runner, [(good, 1), (bad, 1)])
    assert caught.value.sequence_ids == ["bad"]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=12, temperature=1.0, seed=1)])
def test_kv_that_breaks_later_raises_the_same_error(runner: ModelRunner, params: SamplingParams) -> None:
    """The steps before it were computed in the way that only decodes are."""
    good, bad = sequence(list(range(10, 22)), params, [0, 1, 2, 3, 8]), sequence(list(range(30, 42)), params, [4, 5, 6, 7, 9])
    bad.id = "bad"
    advance(runner, [(good, 12), (bad, 12)])
    for _ in range(3):
        advance(runner, [(good, 1), (bad, 1)])
    runner.pool.array[5] = 0xFF
    with pytest.raises(NonFiniteLogits) as caught:
        advance(runner, [(good, 1), (bad, 1)])
    assert caught.value.sequence_ids == ["bad"]


def test_the_fingerprint_tells_unlike_arithmetics_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream must not go on with other last bits: not where another library multiplies, nor on another processor."""
    prints = [load_runner(ModelRunner, folder, products=by).layout.model_fingerprint for by in ("baton", "torch", "baton")]
    assert prints[0] == prints[2] != prints[1]
    monkeypatch.setattr(compiled_ops, "target", lambda: "another processor")
    assert load_runner(ModelRunner, folder, products="baton").layout.model_fingerprint not in prints


def test_the_head_is_finer_than_int4(folder: Path) -> None:
    runners = {kind: load_runner(ModelRunner, folder, weight_dtype=kind, products="baton") for kind in ("int8", "int4")}
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(runners["int4"].model.head(x), runners["int8"].model.head(x))
    assert runners["int4"].layout.model_fingerprint.split("-")[2] == "int4+int8"
