"""Steps of several tokens, without anybody who guesses well: guesses that are right, wrong, or right up to a place. Whatever else
happens to the sequences, the output is the one without guesses. Here with the toy, on both engines; `test_continuation` compares bits of
real logits."""

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from host_pool import carry, on_host
from late_toy import LateEngine, LateToy

from baton.engine.core.block_key import root_key
from baton.engine.core.drafting import Ask, Drafter
from baton.engine.core.engine import Engine, Output
from baton.engine.core.kvcache import KvPool
from baton.engine.core.protocol import Chunk, accepted
from baton.engine.core.sampling import Sampled, SamplingParams
from baton.engine.core.scheduler import Limits
from baton.engine.core.sequence import Finish, Sequence, State
from baton.engine.core.toy import ToyRunner, naive

BLOCK = 4
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
ROOT = root_key("toy")
HOW_RIGHT = (1.0, 0.0, 0.7)


class Guesser(Drafter):
    """Knows what the toy will say. Each guess is right with probability `right`, and there are up to `most` of them."""

    def __init__(self, right: float, most: int = 5, seed: int = 0) -> None:
        self._right, self._most, self._rng = right, most, random.Random(seed)

    def ready(self, seq: Sequence) -> bool:
        """Not always: then a sequence goes on before its last token is known, and nobody may guess for it."""
        return self._rng.random() < 0.7

    def propose(self, asks: Seq[Ask]) -> list[Seq[int]]:
        return [self._guess(ask.seq, ask.most) for ask in asks]

    def _guess(self, seq: Sequence, most: int) -> list[int]:
        assert most > 0 and seq.state is State.RUNNING and min(seq.tokens) >= 0
        whole = [*seq.tokens[: seq.prompt_len], *naive(seq.tokens[: seq.prompt_len], seq.params)]
        known = whole[len(seq.tokens) : len(seq.tokens) + self._rng.randint(0, self._most)]
        return [token if self._rng.random() < self._right else (token + 1) % 257 for token in known]


def make(kind: str, guesser: Guesser | None, blocks: int = 64, caching: bool = True, **limits: Any) -> Engine:
    bounds = Limits(**{"max_num_seqs": 8, "max_num_batched_tokens": 16, **limits})
    if kind == "overlap":
        return LateEngine(LateToy(blocks, CONFIG, BLOCK), bounds, min(128, blocks * BLOCK), caching, guesser)
    runner = ToyRunner(CONFIG, "toy", BLOCK)
    runner.attach(KvPool(runner.layout, blocks))
    return Engine(runner, bounds, min(128, blocks * BLOCK), caching, drafter=guesser)


def sequence(name: str, tokens: list[int], hold: bool = False, prompt_len: int | None = None, **params: Any) -> Sequence:
    values: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params}
    return Sequence(name, list(tokens), prompt_len or len(tokens), SamplingParams(**values), ROOT, hold)


def drain(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(5000):
        if engine.idle:
            engine.pool.check()
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine does not become idle")


def expected(seq: Sequence) -> list[int]:
    return naive(seq.tokens[: seq.prompt_len], seq.params)


def workload(rng: random.Random, count: int) -> list[Sequence]:
    shared = [[rng.randrange(256) for _ in range(rng.randrange(1, 24))] for _ in range(3)]
    seqs = []
    for i in range(count):
        params: dict[str, Any] = {
            "temperature": rng.choice([0.0, 1.0]),
            "seed": rng.randrange(1 << 40),
            "max_tokens": rng.randrange(1, 20),
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": frozenset(rng.sample(range(257), 8)),
        }
        seqs.append(sequence(f"s{i}", rng.choice(shared) + [rng.randrange(256) for _ in range(rng.randrange(1, 12))], **params))
    return seqs


def ended(seq: Sequence) -> list[int]:
    """What the sequence must say: the oracle knows no stop tokens."""
    whole = naive(seq.tokens[: seq.prompt_len], seq.params)
    at = next((i for i, token in enumerate(whole) if token in seq.params.stop_token_ids), len(whole))
    return whole[: at + 1]


@pytest.mark.parametrize("right", HOW_RIGHT)
@pytest.mark.parametrize("kind", ["engine", "overlap"])
def test_random_workloads_equal_the_oracle(kind: str, right: float) -> None:
    """Pools that preempt, prompts in chunks, prefixes from the cache, sequences that join and are aborted at any time, stop tokens."""
    preempted = accepted_tokens = drafted = 0
    for seed in range(12):
        rng = random.Random(seed)
        budget, blocks = rng.choice([8, 16, 64]), rng.choice([14, 20, 64])
        growth = rng.choice([0.0, 0.5, 1.0])
        engine = make(kind, Guesser(right, seed=seed), blocks, max_num_batched_tokens=budget, reserve_growth=growth)
        seqs, gone, reported = workload(rng, 20), set[str](), dict[str, list[int]]()
        waiting = list(seqs)
        while waiting or not engine.idle:
            while waiting and rng.random() < 0.5:
                engine.add(waiting.pop())
            if engine.sequences and rng.random() < 0.05:
                gone.add(name := rng.choice(list(engine.sequences)))
                engine.abort(name)
            for output in engine.step():
                if output.sampled:
                    reported.setdefault(output.seq.id, []).append(output.sampled.token)
            check_cache(engine)
        for seq in seqs:
            whole, said = ended(seq), reported.get(seq.id, [])
            assert said == (whole[: len(said)] if seq.id in gone else whole)
        engine.pool.check()
        assert engine.pool.num_owned == 0 and not engine.sequences
        preempted, drafted = preempted + engine.counts.preemptions, drafted + engine.counts.drafted_tokens
        accepted_tokens += engine.counts.accepted_tokens
    assert preempted and drafted and bool(accepted_tokens) == (right > 0)
    assert (accepted_tokens == drafted) == False or right == 1.0  # noqa: E712


def check_cache(engine: Engine) -> None:
    """Every block that the cache offers, or a peer may read, is of tokens that are known."""
    for seq in engine.scheduler.running:
        known = len(seq.tokens) - (seq.tokens[-1] < 0)
        assert seq.sealed * BLOCK <= known and len(seq.keys) * BLOCK <= known


@pytest.mark.parametrize("right", HOW_RIGHT)
def test_blocks_in_the_cache_hold_what_their_keys_say(right: float) -> None:
    """A wrong guess writes into blocks that are not full yet. Another engine without guesses computes the same bytes."""
    prompts = [[7 * i % 251 for i in range(n)] for n in (5, 9, 13)]
    pools = []
    for guesser in (Guesser(right), None):
        engine = make("engine", guesser)
        for i, prompt in enumerate(prompts):
            engine.add(sequence(f"s{i}", prompt, max_tokens=21))
        drain(engine)
        pools.append({key: on_host(engine.runner.pool).array[engine.pool.match([key])].tobytes() for key in engine.pool.sealed_keys()})
    assert pools[0] == pools[1] and len(pools[0]) > 10


@pytest.mark.parametrize("right", HOW_RIGHT)
@pytest.mark.parametrize("known", [0, 3])
def test_handed_over_and_resumed_streams_equal_the_oracle(right: float, known: int) -> None:
    """A prefill worker holds after one token and guesses nothing; the decode worker goes on with guesses."""
    prompt = list(range(20, 31))
    whole = naive(prompt, SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True))
    prefill, decode = make("engine", Guesser(right)), make("engine", Guesser(right))
    held = sequence("a", prompt + whole[:known], hold=True, prompt_len=len(prompt), max_tokens=25)
    prefill.add(held)
    drain_until_held(prefill, held)
    assert held.output_len == known + 1 and prefill.counts.drafted_tokens == 0
    seq = sequence("a", list(held.tokens), prompt_len=len(prompt), max_tokens=25)
    assert decode.reserve(seq)
    carry(prefill.runner.pool, held.blocks[: len(seq.blocks)], decode.runner.pool, seq.blocks[: len(held.blocks)])
    decode.arrive(seq, len(seq.tokens) - 1)
    decode.adopt(seq)
    outputs = drain(decode)
    assert seq.tokens[len(prompt) :] == whole and outputs[-1].finish is Finish.LENGTH


def drain_until_held(engine: Engine, seq: Sequence) -> None:
    for _ in range(100):
        if seq.state is State.HELD:
            return
        engine.step()
    raise AssertionError("it is not held")


def test_right_guesses_need_fewer_steps_and_wrong_ones_no_more() -> None:
    steps = {}
    for right in (None, *HOW_RIGHT):
        engine, steps[right] = make("engine", None if right is None else Guesser(right, most=4)), 0
        engine.add(sequence("a", [1, 2, 3], max_tokens=60))
        while not engine.idle:
            engine.step()
            steps[right] += 1
    assert steps[1.0] < steps[0.7] < steps[0.0] == steps[None] == 60


def test_tokens_after_the_one_that_ends_a_sequence_do_not_exist() -> None:
    prompt = [5, 6, 7]
    whole = naive(prompt, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    engine = make("engine", Guesser(1.0, most=11))
    seq = sequence("a", prompt, max_tokens=12, stop_token_ids=frozenset([whole[4]]))
    engine.add(seq)
    outputs = drain(engine)
    at = whole.index(whole[4])
    assert [output.sampled.token for output in outputs if output.sampled] == whole[: at + 1] and outputs[-1].finish is Finish.STOP
    assert engine.counts.computed_tokens == len(prompt) + at, "positions of tokens that do not exist are not counted"


def test_nobody_loses_a_block_or_a_token_of_the_budget_for_a_guess() -> None:
    engine = make("engine", Guesser(1.0, most=30), blocks=6, max_num_seqs=4, max_num_batched_tokens=8, reserve_growth=0.0)
    for name in "abc":
        engine.add(sequence(name, [ord(name), 1, 2], max_tokens=5))
    while not engine.idle:
        outputs = engine.step()
        assert len(outputs) <= 8
    assert engine.counts.preemptions == 0


@pytest.mark.parametrize(
    ("drafts", "sampled", "kept"),
    [((), [4], 1), ((4,), [4, 5], 2), ((3,), [4, 5], 1), ((4, 9, 6), [4, 5, 6, 7], 2), ((4, 5, 6), [4, 5, 6, 7], 4)],
)
def test_what_is_kept_ends_with_the_first_token_that_was_not_guessed(drafts: tuple[int, ...], sampled: list[int], kept: int) -> None:
    assert [each.token for each in accepted(drafts, [Sampled(token) for token in sampled])] == sampled[:kept]


def test_a_row_knows_the_guesses_before_it() -> None:
    seq = sequence("a", [1, 2, 3])
    seq.computed = 2
    chunk = Chunk(seq, 1, (8, 9))
    assert chunk.positions == 3 and chunk.tokens == [3, 8, 9]
    assert [(row.tokens, row.output_len) for row in chunk.rows] == [([1, 2, 3], 0), ([1, 2, 3, 8], 1), ([1, 2, 3, 8, 9], 2)]
    assert Chunk(sequence("a", [1, 2, 3]), 2).rows == []
