"""The engine on a real (torch) model: its tokens are the naive oracle's, moved KV gives the same bits as where it was computed, and logits
that are not finite fail only the sequence they belong to."""

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_pool import on_host
from near_tie import TOLERANCE, assert_same, parting, score
from torch import Tensor

from baton.engine.choice import load_runner
from baton.engine.core.block_key import extend_keys, root_key
from baton.engine.core.blocks import BlockPool
from baton.engine.core.engine import Engine, Output
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence, State
from baton.engine.model.naive import generate, next_logits
from baton.engine.runner import Computed, ModelRunner
from baton.models.make_small import make

BLOCK = 4
VOCAB = 300
CONTEXT = 96
ROOT = root_key("real")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make(path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=VOCAB, context=CONTEXT)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> ModelRunner:
    """The weights, without a pool. Tests only read them."""
    return load_runner(ModelRunner, folder, block_size=BLOCK)


class Recorder(ModelRunner):
    """Keeps the logits of every batch, with the number of tokens that each of its chunks computed."""

    seen: list[tuple[list[int], Tensor]]

    def _logits(self, batch: Seq[Chunk]) -> Computed:
        computed = super()._logits(batch)
        self.seen.append(([chunk.n for chunk in batch], computed.logits.clone()))
        return computed

    def decodes(self) -> list[Tensor]:
        return [logits for ns, logits in self.seen if set(ns) == {1}]


def make_engine(loaded: ModelRunner, num_blocks: int = 96, *, seqs: int = 8, budget: int = 64, growth: float = 0.5) -> Engine:
    runner = Recorder(loaded.model, loaded.layout, loaded.device)
    runner.seen = []
    runner.attach(KvPool(runner.layout, num_blocks))
    return Engine(runner, Limits(seqs, budget, growth), min(CONTEXT, num_blocks * BLOCK))


def recorder(engine: Engine) -> Recorder:
    assert isinstance(engine.runner, Recorder)
    return engine.runner


def make_seq(name: str, tokens: list[int], hold: bool = False, **params: object) -> Sequence:
    values: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params}
    return Sequence(name, list(tokens), len(tokens), SamplingParams(**values), ROOT, hold)


def keys_of(tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, ROOT, tokens, BLOCK)
    return keys


def random_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, VOCAB) for _ in range(length)]


def workload(rng: random.Random, count: int) -> list[Sequence]:
    """Prompts that share prefixes, greedy and sampled."""
    shared = [random_tokens(rng, rng.randrange(1, 22)) for _ in range(3)]
    return [
        make_seq(
            f"s{i}",
            rng.choice(shared) + random_tokens(rng, rng.randrange(1, 12)),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            seed=rng.randrange(1 << 40),
            max_tokens=rng.randrange(1, 16),
            ignore_eos=rng.random() < 0.5,
        )
        for i in range(count)
    ]


def start(engine: Engine, seqs: Seq[Sequence], steps: int) -> None:
    for seq in seqs:
        engine.add(seq)
    for _ in range(steps):
        engine.step()


def drain(engine: Engine, limit: int = 2000) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(limit):
        if engine.idle:
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine does not become idle")


def assert_empty(engine: Engine) -> None:
    engine.pool.check()
    assert engine.pool.num_owned == 0 and not engine.sequences and engine.idle


def oracle(loaded: ModelRunner, seq: Sequence) -> list[int]:
    return [answer.token for answer in generate(loaded.model, seq.tokens[: seq.prompt_len], seq.params)]


def assert_oracle(loaded: ModelRunner, seqs: Seq[Sequence]) -> None:
    """Every output is the oracle's. A flip at a near-tie may happen, but not twice in one workload."""
    same = [
        assert_same(loaded.model, seq.tokens[: seq.prompt_len], seq.params, seq.tokens[seq.prompt_len :], oracle(loaded, seq))
        for seq in seqs
    ]
    assert same.count(False) <= 1


# --- the same tokens as the oracle ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_random_workloads_equal_the_oracle(loaded: ModelRunner, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        loaded, rng.choice([12, 16, 64]), seqs=rng.choice([1, 3, 8]), budget=rng.choice([8, 16, 64]), growth=rng.choice([0.0, 0.5, 1.0])
    )
    seqs = workload(rng, 12)
    waiting = list(seqs)
    while waiting or not engine.idle:
        while waiting and rng.random() < 0.5:
            engine.add(waiting.pop())
        engine.step()
    assert_oracle(loaded, seqs)
    assert_empty(engine)


def test_a_small_pool_preempts_and_recomputes_the_same_tokens(loaded: ModelRunner) -> None:
    """Without preemption and chunked prompts the workloads above would prove little."""
    rng = random.Random(1)
    engine = make_engine(loaded, 12, budget=8, growth=0.0)
    seqs = [make_seq(f"s{i}", random_tokens(rng, 13), max_tokens=16, temperature=i % 2, seed=i) for i in range(4)]
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert sum(seq.preemptions for seq in seqs) > 0 and sum(seq.recomputed for seq in seqs) > 0
    assert max(max(ns) for ns, _ in recorder(engine).seen) == 8, "no prompt was cut into chunks"
    assert_oracle(loaded, seqs)
    assert_empty(engine)


def test_a_cached_prefix_gives_the_same_tokens(loaded: ModelRunner) -> None:
    rng = random.Random(2)
    engine, prefix = make_engine(loaded), random_tokens(rng, 30)
    seqs = [make_seq(f"s{i}", prefix + random_tokens(rng, 3 + i)) for i in range(4)]
    for seq in seqs:
        engine.add(seq)
        drain(engine)
    assert [seq.cached for seq in seqs] == [0, 28, 28, 28]
    assert_oracle(loaded, seqs)


@pytest.mark.parametrize("steps", range(1, 5))
def test_a_prompt_aborted_between_its_chunks_leaves_only_valid_blocks_cached(loaded: ModelRunner, steps: int) -> None:
    engine, prompt = make_engine(loaded, budget=8), random_tokens(random.Random(12), 33)
    on_host(engine.runner.pool).array[:] = 0x3F  # finite, but not the keys and values of any sequence
    start(engine, [make_seq("aborted", prompt)], steps)
    engine.abort("aborted")
    again = make_seq("again", prompt)
    engine.add(again)
    drain(engine)
    assert again.cached == 8 * steps
    assert_oracle(loaded, [again])
    assert_empty(engine)


def test_the_tolerance_does_not_hide_a_wrong_token(loaded: ModelRunner) -> None:
    """Negative control of `assert_same`: at any position, greedy or sampled, the second-best token exceeds the tolerance by far."""
    for params in (SamplingParams(max_tokens=12, temperature=0.0), SamplingParams(max_tokens=12, temperature=1.0, seed=7)):
        prompt = random_tokens(random.Random(3), 20)
        right = [answer.token for answer in generate(loaded.model, prompt, params)]
        for at in range(len(right)):
            known = prompt + right[:at]
            logits = next_logits(loaded.model, known)[0]
            scores = [score(logits, token, len(known), params) for token in range(VOCAB)]
            best, second = sorted(range(VOCAB), key=lambda token: -scores[token])[:2]
            assert best == right[at], "the sampler did not choose the token with the best score"
            gap = parting(loaded.model, prompt, params, right, [*right[:at], second, *right[at + 1 :]])
            assert gap is not None and gap > 10 * TOLERANCE
        with pytest.raises(AssertionError, match="the outputs differ"):
            assert_same(loaded.model, prompt, params, right, right[:-1])


# --- the handoff ---------------------------------------------------------------------------------------------------------------------


def hand_over(
    prefill: Engine, decode: Engine, seqs: Seq[Sequence], copied: Callable[[Sequence, int], bool] = lambda seq, i: True
) -> list[Sequence]:
    """A whole handoff in memory: prefills and holds all, copies what `decode` lacks, adopts. `copied(seq, i)`: whether to copy block i."""
    held = [Sequence(seq.id, list(seq.tokens), seq.prompt_len, seq.params, ROOT, hold=True) for seq in seqs]
    for seq in held:
        prefill.add(seq)
    drain(prefill)
    adopted = []
    for seq in held:
        twin = Sequence(seq.id, list(seq.tokens), seq.prompt_len, seq.params, ROOT)
        adopted.append(twin)
        if seq.state is State.DONE:
            continue
        while not decode.reserve(twin):
            decode.step()
        for i in range(twin.computed // BLOCK, -(-(len(twin.tokens) - 1) // BLOCK)):
            if copied(twin, i):
                on_host(decode.runner.pool).array[twin.blocks[i]] = on_host(prefill.runner.pool).array[seq.blocks[i]]
        decode.arrive(twin, len(twin.tokens) - 1)
        decode.adopt(twin)
    return adopted


@pytest.mark.parametrize("seed", range(16))
def test_handoff_equals_the_oracle_and_recomputes_nothing(loaded: ModelRunner, seed: int) -> None:
    rng = random.Random(100 + seed)
    prefill = make_engine(loaded, rng.choice([32, 96]), seqs=4, budget=rng.choice([8, 64]))
    decode = make_engine(loaded, rng.choice([16, 64]), growth=rng.choice([0.0, 1.0]))
    seqs = workload(rng, 12)
    adopted = []
    for i in range(0, len(seqs), 3):
        adopted += hand_over(prefill, decode, seqs[i : i + 3])
        for seq in seqs[i : i + 3]:
            prefill.abort(seq.id)
    drain(decode)
    assert [seq.prefilled for seq in adopted] == [0] * len(adopted)
    assert_oracle(loaded, adopted)
    assert_empty(prefill)
    assert_empty(decode)


def test_copied_kv_is_identical_and_decodes_bit_for_bit(loaded: ModelRunner) -> None:
    """KV that is moved rather than recomputed does not diverge at all: every logit of every later step is equal, bit for bit."""
    rng = random.Random(4)
    prompts = [random_tokens(rng, length) for length in (30, 7, 16, 23, 41)]
    seqs = [make_seq(f"s{i}", prompt, max_tokens=20, temperature=i % 2, seed=i) for i, prompt in enumerate(prompts)]
    whole, prefill, decode = (make_engine(loaded, budget=256) for _ in range(3))
    decode.pool.allocate(7)  # so that the copies are in different blocks
    at_home = [make_seq(seq.id, seq.tokens, max_tokens=20, temperature=seq.params.temperature, seed=seq.params.seed) for seq in seqs]
    for seq in at_home:
        whole.add(seq)
    drain(whole)
    adopted = hand_over(prefill, decode, seqs)
    for seq in adopted:
        held = prefill.sequences[seq.id]
        count = -(-(len(seq.tokens) - 1) // BLOCK)
        assert seq.blocks[:count] != held.blocks[:count]
        assert np.array_equal(
            on_host(decode.runner.pool).array[seq.blocks[:count]], on_host(prefill.runner.pool).array[held.blocks[:count]]
        )
    drain(decode)
    here, there = recorder(whole).decodes(), recorder(decode).decodes()
    assert len(here) == len(there) == 19 and here[0].shape == (5, VOCAB)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert [seq.tokens for seq in adopted] == [seq.tokens for seq in at_home]
    assert sum(seq.prefilled + seq.recomputed for seq in adopted) == 0


@pytest.mark.parametrize("missing", range(8))
def test_one_block_that_was_not_copied_changes_the_tokens(loaded: ModelRunner, missing: int) -> None:
    """Negative control of the two tests above: whichever block is not copied, the tokens differ."""
    prefill, decode = make_engine(loaded), make_engine(loaded)
    seq = make_seq("s", random_tokens(random.Random(5), 30), max_tokens=30)
    on_host(decode.runner.pool).array[:] = on_host(prefill.runner.pool).array[:1]
    (adopted,) = hand_over(prefill, decode, [seq], lambda seq, i: i != missing)
    drain(decode)
    assert adopted.prefilled == 0
    gap = parting(loaded.model, seq.tokens, seq.params, adopted.tokens[30:], oracle(loaded, seq))
    assert gap is not None and gap > 10 * TOLERANCE


# --- logits that are not finite ------------------------------------------------------------------------------------------------------


def failures(outputs: Seq[Output]) -> dict[str, str]:
    return {output.seq.id: output.failure for output in outputs if output.failure is not None}


def test_broken_kv_fails_only_its_sequence(loaded: ModelRunner) -> None:
    rng = random.Random(6)
    engine = make_engine(loaded)
    seqs = [make_seq(f"s{i}", random_tokens(rng, 14), max_tokens=12, temperature=i % 2, seed=i) for i in range(4)]
    start(engine, seqs, steps=5)
    on_host(engine.runner.pool).array[seqs[2].blocks[1]] = 0xFF  # NaN
    outputs = drain(engine)
    assert list(failures(outputs)) == ["s2"] and "s2" in failures(outputs)["s2"]
    (failed,) = [output for output in outputs if output.failure is not None]
    assert failed.sampled is None and failed.finish is None and failed.seq.state is State.DONE
    assert_oracle(loaded, [seq for seq in seqs if seq is not seqs[2]])
    assert_empty(engine)


def test_broken_blocks_are_dropped_from_the_cache(loaded: ModelRunner) -> None:
    engine, prompt = make_engine(loaded), random_tokens(random.Random(7), 18)
    broken = make_seq("broken", prompt)
    start(engine, [broken], steps=2)
    on_host(engine.runner.pool).array[broken.blocks[0]] = 0xFF
    drain(engine)
    assert engine.pool.matched(keys_of(prompt)) == (0, 0)
    again = make_seq("again", prompt)
    engine.add(again)
    assert not failures(drain(engine))
    assert again.cached == 0
    assert_oracle(loaded, [again])
    assert_empty(engine)


def test_without_forgetting_broken_blocks_the_next_request_fails_too(loaded: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(BlockPool, "forget", lambda self, blocks: None)
    engine, prompt = make_engine(loaded), random_tokens(random.Random(7), 18)
    broken = make_seq("broken", prompt)
    start(engine, [broken], steps=2)
    on_host(engine.runner.pool).array[broken.blocks[0]] = 0xFF
    drain(engine)
    engine.add(make_seq("again", prompt))
    assert list(failures(drain(engine))) == ["again"]


def test_a_broken_shared_prefix_fails_all_its_users_but_no_later_request(loaded: ModelRunner) -> None:
    rng = random.Random(8)
    engine, prefix = make_engine(loaded), random_tokens(rng, 16)
    engine.add(make_seq("first", prefix))
    drain(engine)
    sharers = [make_seq(f"sharer{i}", prefix + random_tokens(rng, 5), max_tokens=20) for i in range(3)]
    other = make_seq("other", random_tokens(rng, 20), max_tokens=20)
    start(engine, [*sharers, other], steps=2)
    assert [seq.cached for seq in sharers] == [16] * 3
    on_host(engine.runner.pool).array[sharers[0].blocks[2]] = 0xFF
    assert set(failures(drain(engine))) == {"sharer0", "sharer1", "sharer2"}
    again = make_seq("again", sharers[1].tokens[:21])
    engine.add(again)
    assert not failures(drain(engine))
    assert_oracle(loaded, [other, again])
    assert_empty(engine)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("budget", [8, 64])
def test_broken_weights_fail_only_the_sequences_that_use_them(folder: Path, loaded: ModelRunner, hold: bool, budget: int) -> None:
    """One row of the embedding is NaN: only the prompts that contain that token, early or late, get no answer."""
    broken = load_runner(ModelRunner, folder, block_size=BLOCK)
    assert isinstance(broken.model.embedding, torch.Tensor)
    broken.model.embedding[77] = torch.nan
    engine, rng = make_engine(broken, budget=budget), random.Random(9)
    plain = [[token for token in random_tokens(rng, 25) if token != 77][:20] for _ in range(4)]
    prompts = {"good0": plain[0], "early": [77, *plain[1]], "late": [*plain[2], 77], "good1": plain[3]}
    seqs = {name: make_seq(name, prompt, hold, max_tokens=1) for name, prompt in prompts.items()}
    for seq in seqs.values():
        engine.add(seq)
    assert set(failures(drain(engine))) == {"early", "late"}
    assert_oracle(loaded, [seqs["good0"], seqs["good1"]])
    keys = keys_of(prompts["early"])
    assert engine.pool.matched(keys) == (0, 0)
    assert_empty(engine)
