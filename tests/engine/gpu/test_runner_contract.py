"""What every runner promises (`baton.engine.core.protocol.Runner`), in one suite for all runners: the toy, torch with and without compiled
kernels, and the device runner, whose kernels run in Triton's interpreter where there is no device (hence the suite is in this folder)."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_pool import on_host

from baton.engine.choice import load_runner
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.protocol import Chunk, NonFiniteLogits, Tokens, accepted
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence, finish_reason
from baton.engine.core.toy import ToyRunner, naive
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.runner import GpuRunner
from baton.engine.model.naive import generate
from baton.engine.runner import ModelRunner
from baton.models.make_small import make, make_toy

BLOCK, BLOCKS, CONTEXT = 4, 150, 96
CAPACITY = Capacity(max_num_seqs=8, max_num_batched_tokens=96, max_len=CONTEXT)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
KINDS = ("toy", "plain", "compiled", "compiled-bfloat16", "device-torch", "device-triton")


class Case:
    """One kind of runner on its own pool, its oracle, and access to its KV."""

    def __init__(self, kind: str, folders: dict[str, Path]) -> None:
        self.kind, self.runner = kind, make_runner(kind, folders)

    def attach(self, layout: KvLayout) -> None:
        attach(self.runner, layout, self.kind)

    def oracle(self, tokens: list[int], params: SamplingParams) -> list[int]:
        if isinstance(self.runner, ToyRunner):
            return naive(tokens, params)
        return [answer.token for answer in generate(self.runner.model, tokens, params)]

    def read(self, blocks: list[int]) -> np.ndarray[Any, Any]:
        self.runner.pool.expose(blocks)
        found: np.ndarray[Any, Any] = on_host(self.runner.pool).array[blocks].copy()
        return found

    def write(self, blocks: list[int], found: np.ndarray[Any, Any] | int) -> None:
        on_host(self.runner.pool).array[blocks] = found
        self.runner.pool.take_in(blocks)

    def sequence(self, name: str, tokens: list[int], blocks: list[int], params: SamplingParams = GREEDY) -> Sequence:
        return Sequence(name, list(tokens), len(tokens), params, root=b"", blocks=list(blocks))

    def step(self, work: list[tuple[Sequence, int]]) -> list[Tokens]:
        """Runs one step and updates the sequences as an engine would."""
        answers: list[Tokens] = self.runner.run([Chunk(seq, n) for seq, n in work])
        for (seq, n), answer in zip(work, answers, strict=True):
            seq.computed += n
            seq.tokens += [sampled.token for sampled in answer]
        return answers

    def done(self, seq: Sequence) -> bool:
        return bool(seq.output_len and finish_reason(seq, self.runner.eos_token_ids, self.runner.max_positions))


def make_runner(kind: str, folders: dict[str, Path]) -> Any:
    runner: Any
    if kind == "toy":
        runner = ToyRunner.load(folders["toy"], "toy", BLOCK)
    elif kind.startswith("device"):
        runner = load_runner(
            GpuRunner, folders["small"], block_size=BLOCK, device="cuda" if torch.cuda.is_available() else "cpu", compiled=False
        )
    else:
        dtype = "bfloat16" if kind.endswith("bfloat16") else "float32"
        runner = load_runner(ModelRunner, folders["small"], dtype=dtype, block_size=BLOCK, compiled=kind != "plain")
    attach(runner, runner.layout, kind)
    return runner


def attach(runner: Any, layout: KvLayout, kind: str) -> None:
    pool = KvPool(layout, BLOCKS)
    if isinstance(runner, GpuRunner):
        runner.attach(pool, capacity=CAPACITY, backend=kind.removeprefix("device-"), graph_sizes=(1, 4))
    else:
        runner.attach(pool)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    small, toy = (tmp_path_factory.mktemp(name) for name in ("small", "toy"))
    make(small, hidden=64, layers=2, heads=4, kv_heads=2, vocab=300, context=CONTEXT)
    make_toy(toy, context=CONTEXT)
    return {"small": small, "toy": toy}


@pytest.fixture(params=KINDS)
def make_case(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Callable[[], Case]:
    """Makes any number of cases of one kind."""
    return lambda: Case(request.param, folders)


@pytest.fixture
def case(make_case: Callable[[], Case]) -> Case:
    return make_case()


def random_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, 250) for _ in range(length)]


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 6),
        min_tokens=rng.choice((0, 3)),
        temperature=rng.choice((0.0, 0.8)),
        seed=rng.getrandbits(63),
        ignore_eos=rng.random() < 0.5,
    )


def test_a_runner_describes_its_model(case: Case) -> None:
    runner = case.runner
    assert runner.layout.block_size == BLOCK and runner.pool.layout == runner.layout
    assert runner.max_positions == CONTEXT and runner.vocab_size > 250
    assert all(0 <= token < runner.vocab_size for token in runner.eos_token_ids)


def test_answers_align_with_chunks_and_are_empty_before_the_last_token(case: Case) -> None:
    rng = random.Random(1)
    prompts = [random_tokens(rng, length) for length in (9, 18, 1, 14)]
    seqs = [case.sequence(str(i), prompt, list(range(20 * i, 20 * i + 20))) for i, prompt in enumerate(prompts)]
    answers = case.step([(seqs[0], 5), (seqs[1], 18), (seqs[2], 1), (seqs[3], 13)])
    assert [bool(answer) for answer in answers] == [False, True, True, False]
    assert case.step([(seqs[3], 1), (seqs[0], 2)])[1] == ()
    case.step([(seqs[0], 2)])
    assert [len(seq.tokens) for seq in seqs] == [10, 19, 2, 15]
    if not case.kind.endswith("bfloat16"):  # its oracle rounds in a different order
        assert [seq.tokens[-1:] for seq in seqs] == [
            case.oracle(prompt, SamplingParams(max_tokens=1, temperature=0.0)) for prompt in prompts
        ]


def test_a_batch_may_sample_no_token(case: Case) -> None:
    assert case.step([(case.sequence("s", list(range(5, 25)), list(range(9))), 7)]) == [()]


def test_a_runner_does_not_change_the_sequence(case: Case) -> None:
    seq = case.sequence("s", list(range(10, 20)), [3, 9, 1])
    case.runner.run([Chunk(seq, 10)])
    assert (seq.tokens, seq.blocks, seq.computed) == (list(range(10, 20)), [3, 9, 1], 0)


def test_tokens_match_the_oracle_whatever_the_batches(case: Case) -> None:
    if case.kind.endswith("bfloat16"):
        pytest.skip("its oracle rounds in a different order, so near ties flip")
    rng = random.Random(0)
    free = rng.sample(range(BLOCKS), BLOCKS)
    seqs = [
        case.sequence(str(i), random_tokens(rng, rng.randint(1, 20)), [free.pop() for _ in range(20)], random_params(rng)) for i in range(4)
    ]
    running = list(seqs)
    while running:
        chosen = rng.sample(running, rng.randint(1, len(running)))
        case.step([(seq, min(seq.pending, rng.randint(1, 15))) for seq in chosen])
        running = [seq for seq in running if not case.done(seq)]
    for seq in seqs:
        assert seq.tokens[seq.prompt_len :] == case.oracle(seq.tokens[: seq.prompt_len], seq.params)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_guesses_change_no_token(case: Case, right: float) -> None:
    """Each guess is right with this probability. Batches mix sequences with and without guesses, prompts and decodes."""
    if case.kind.endswith("bfloat16"):
        pytest.skip("its oracle rounds in a different order, so near ties flip")
    rng = random.Random(3)
    free = rng.sample(range(BLOCKS), BLOCKS)
    seqs = [
        case.sequence(str(i), random_tokens(rng, rng.randint(1, 20)), [free.pop() for _ in range(20)], random_params(rng)) for i in range(5)
    ]
    whole = {seq: [*seq.tokens, *case.oracle(seq.tokens, seq.params)] for seq in seqs}
    running, guessed = list(seqs), 0

    def guesses(seq: Sequence) -> tuple[int, ...]:
        if seq.pending > 1:
            return ()
        known = whole[seq][len(seq.tokens) :][: rng.randint(0, 4)]
        return tuple(token if rng.random() < right else (token + 1) % 257 for token in known)

    while running:
        batch = [
            Chunk(seq, min(seq.pending, rng.randint(1, 15)), guesses(seq)) for seq in rng.sample(running, rng.randint(1, len(running)))
        ]
        answers: list[Tokens] = case.runner.run(batch)
        for chunk, answer in zip(batch, answers, strict=True):
            assert len(answer) == chunk.samples * (1 + len(chunk.drafts))
            chunk.seq.computed += chunk.n
            for count, sampled in enumerate(accepted(chunk.drafts, answer)):
                chunk.seq.computed += count > 0
                guessed += count > 0
                chunk.seq.tokens.append(sampled.token)
        running = [seq for seq in running if not case.done(seq)]
    assert bool(guessed) == (right > 0)
    for seq in seqs:
        assert seq.tokens[: len(whole[seq])] == whole[seq]


def test_a_continued_stream_equals_the_uninterrupted_one(case: Case) -> None:
    """A retry on another worker: the tokens already sent are known tokens, and the prompt's length is unchanged."""
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=99, ignore_eos=True)
    prompt = random_tokens(random.Random(2), 11)

    def finish(seq: Sequence) -> list[int]:
        while not case.done(seq):
            case.step([(seq, seq.pending)])
        return seq.tokens[seq.prompt_len :]

    whole = finish(case.sequence("a", prompt, list(range(10)), params))
    retried = case.sequence("b", prompt, list(range(40, 50)), params)
    retried.tokens += whole[:4]
    if not case.kind.endswith("bfloat16"):
        assert finish(retried) == whole


def test_moved_kv_continues_without_recomputation(make_case: Callable[[], Case]) -> None:
    here, there = make_case(), make_case()
    prompt = random_tokens(random.Random(3), 18)
    first = here.sequence("a", prompt, [3, 1, 4, 15, 9, 2, 6])
    here.step([(first, 18)])
    moved = there.sequence("b", prompt, [7, 8, 11, 0, 5, 30, 31])
    moved.tokens, moved.computed = list(first.tokens), 18
    there.write(moved.blocks[:5], here.read(first.blocks[:5]))
    for _ in range(3):
        assert here.step([(first, 1)]) == there.step([(moved, 1)])


def test_a_copied_block_continues_as_the_one_it_was_copied_from(case: Case) -> None:
    prompt, params = random_tokens(random.Random(8), 10), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    one = case.sequence("one", prompt, list(range(10)), params)
    case.step([(one, 10)])
    other = case.sequence("other", prompt, [0, 1, *range(20, 28)], params)  # two full blocks are shared, and a half one is copied
    other.tokens, other.computed = list(one.tokens), one.computed
    case.runner.copy(2, 20)
    for _ in range(5):
        case.step([(one, 1)])
        case.step([(other, 1)])
    assert one.tokens == other.tokens


def test_a_block_that_was_not_copied_makes_a_difference(make_case: Callable[[], Case]) -> None:
    """Negative control: the KV decides. The KV written next is compared, too: in a model with several layers it depends on every block."""
    here, there = make_case(), make_case()
    prompt = random_tokens(random.Random(3), 18)
    first = here.sequence("a", prompt, [3, 1, 4, 15, 9, 2, 6])
    here.step([(first, 18)])
    moved = there.sequence("b", prompt, [7, 8, 11, 0, 5, 30, 31])
    moved.tokens, moved.computed = list(first.tokens), 18
    there.write([1, 2, 3], 0)
    there.write(moved.blocks[:2] + moved.blocks[3:5], here.read(first.blocks[:2] + first.blocks[3:5]))
    mine, other = [], []
    for _ in range(3):
        mine.append(here.step([(first, 1)])[0])
        other.append(there.step([(moved, 1)])[0])
        moved.tokens[-1] = first.tokens[-1]
    assert mine != other or not np.array_equal(here.read(first.blocks[4:6]), there.read(moved.blocks[4:6]))


def test_the_bytes_of_a_partial_block_depend_only_on_its_tokens(case: Case) -> None:
    """What an earlier owner left after the last token is cleared, so that digests of equal prefixes are equal."""
    if case.kind == "toy":
        pytest.skip("the toy leaves the slots after the last token as they are: it never reads them")
    prompt = random_tokens(random.Random(4), 10)
    case.write([1, 2, 3, 7, 8, 9], 0xFF)
    case.step([(case.sequence("a", prompt, [7, 8, 9]), 10)])
    case.step([(case.sequence("b", prompt, [1, 2, 3]), 10)])
    assert np.array_equal(case.read([7, 8, 9]), case.read([1, 2, 3]))


def test_blocks_outside_the_batch_are_not_written(case: Case) -> None:
    rng = random.Random(5)
    case.write(list(range(30)), 0x11)
    before = case.read(list(range(30)))
    seqs = [case.sequence(name, random_tokens(rng, 9), blocks) for name, blocks in (("a", [2, 20, 11]), ("b", [5, 6, 7]))]
    case.step([(seqs[0], 9), (seqs[1], 6)])
    case.step([(seqs[0], 1), (seqs[1], 3)])
    others = [block for block in range(30) if block not in {2, 20, 11, 5, 6, 7}]
    assert np.array_equal(case.read(list(range(30)))[others], before[others])


def test_broken_kv_raises_an_error_that_names_its_sequence(case: Case) -> None:
    if case.kind == "toy":
        pytest.skip("the toy computes in integers, which are always finite")
    good, bad = case.sequence("good", list(range(10, 22)), [0, 1, 2, 3]), case.sequence("bad", list(range(30, 42)), [4, 5, 6, 7])
    case.step([(good, 12), (bad, 12)])
    case.write([5], 0xFF)
    with pytest.raises(NonFiniteLogits) as caught:
        case.step([(good, 1), (bad, 1)])
    assert caught.value.sequence_ids == ["bad"]


def test_a_pool_with_a_different_layout_is_refused(case: Case) -> None:
    if case.kind == "toy":
        pytest.skip("the toy's pool is made from its own layout")
    layout = case.runner.layout
    other = KvLayout(layout.model_fingerprint, layout.dtype, 2 * BLOCK, layout.num_layers, layout.num_kv_heads, layout.head_dim)
    with pytest.raises(ValueError, match="block_size"):
        case.attach(other)


def test_the_tokens_of_a_request_do_not_depend_on_its_neighbours(case: Case) -> None:
    """The same request alone and in a batch: the noise is a function of seed and position."""
    if case.kind.endswith("bfloat16"):
        pytest.skip("a different batch rounds in a different order")
    rng, params = random.Random(6), SamplingParams(max_tokens=9, temperature=1.3, seed=7, ignore_eos=True)
    prompt = random_tokens(rng, 12)
    alone = case.sequence("alone", prompt, list(range(10)), params)
    case.step([(alone, 12)])
    beside = case.sequence("beside", prompt, list(range(20, 30)), params)
    others = [case.sequence(str(i), random_tokens(rng, 5), list(range(40 + 5 * i, 45 + 5 * i)), random_params(rng)) for i in range(3)]
    case.step([(others[0], 5), (beside, 12), (others[1], 5), (others[2], 3)])
    for _ in range(3):
        case.step([(alone, 1)])
        case.step([(beside, 1), (others[0], 1)])
    assert alone.tokens == beside.tokens
