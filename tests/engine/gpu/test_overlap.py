"""One step in flight: the tokens are the oracle's whatever is aborted, preempted, held or handed over, and no block is
written after it left.

The toy computes each step as late as it can, see `late_toy`.
"""

import random
from typing import Any

import numpy as np
import pytest
from host_pool import carry
from late_toy import LateEngine, LateToy

from baton.engine.core.engine import Output
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Finish, Sequence, State
from baton.engine.core.toy import naive
from baton.engine.gpu.overlap import UNKNOWN, OverlapEngine

BLOCK = 4
TOY = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 512, "kv_width": 2}


def engine(blocks: int = 64, max_len: int = 200, **limits: int) -> LateEngine:
    values: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 24, **limits}
    return LateEngine(LateToy(blocks, TOY, BLOCK), Limits(**values), max_len)


def sequence(name: str, tokens: list[int], hold: bool = False, **params: object) -> Sequence:
    values: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, **params}
    return Sequence(name, list(tokens), len(tokens), SamplingParams(**values), root=b"", hold=hold)


def drain(engine: OverlapEngine, most: int = 2000) -> list[Output]:
    outputs: list[Output] = []
    while not engine.idle:
        outputs += engine.step()
        most -= 1
        assert most, "the engine does not become idle"
    engine.pool.check()
    return outputs


def reported(outputs: list[Output], name: str) -> list[int]:
    return [output.sampled.token for output in outputs if output.seq.id == name and output.sampled]


def test_a_step_is_submitted_before_the_previous_one_is_read() -> None:
    e = engine()
    e.add(sequence("a", [1, 2, 3]))
    assert e.step() == [] and len(e.runner.queue) == 1
    assert [output.seq.id for output in e.step()] == ["a"] and len(e.runner.queue) == 1


def test_tokens_match_the_oracle() -> None:
    e, rng = engine(), random.Random(1)
    prompts = {str(i): [rng.randrange(256) for _ in range(rng.randint(1, 60))] for i in range(12)}
    for name, prompt in prompts.items():
        e.add(sequence(name, prompt, max_tokens=rng.randint(1, 30), temperature=rng.choice((0.0, 1.0)), seed=rng.getrandbits(60)))
    seqs = list(e.sequences.values())
    outputs = drain(e)
    for seq in seqs:
        assert reported(outputs, seq.id) == naive(prompts[seq.id], seq.params, width=2) == seq.tokens[seq.prompt_len :]
    assert e.pool.num_owned == 0


def test_a_stop_is_reported_once_and_the_surplus_is_dropped() -> None:
    """A stop token is seen one step late: by then one more position is in flight, in blocks that stay parked until it has been read."""
    e = engine()
    prompt = [7, 9]
    first = naive(prompt, SamplingParams(max_tokens=8, temperature=0.0), width=2)
    seq = sequence("a", prompt, stop_token_ids=frozenset([first[3]]))
    e.add(seq)
    outputs: list[Output] = []
    while not (outputs and outputs[-1].finish):
        outputs += e.step()
    assert reported(outputs, "a") == first[:4] and outputs[-1].finish is Finish.STOP
    assert seq.tokens == prompt + first[:4] and not e.idle and e.pool.num_owned > 0
    assert e.step() == [] and e.idle and e.pool.num_owned == 0
    e.pool.check()


def test_a_sequence_waiting_for_parked_blocks_gets_them_in_the_step_that_frees_them() -> None:
    """An engine loop sleeps after a step that returned nothing and left nothing running."""
    e = engine(blocks=5, max_len=20)
    first = naive([7, 9], SamplingParams(max_tokens=8, temperature=0.0), width=2)
    e.add(sequence("a", [7, 9], max_tokens=9, stop_token_ids=frozenset([first[2]])))
    e.add(sequence("b", list(range(16)), max_tokens=2))
    while "a" in e.sequences:
        e.step()
    assert e.scheduler.waiting and e.pool.num_owned > 0
    assert e.step() == [] and not e.scheduler.waiting and len(e.scheduler.running) == 1
    drain(e)


@pytest.mark.parametrize("hold", [False, True])
def test_a_foreseeable_end_causes_no_surplus(hold: bool) -> None:
    e = engine()
    seq = sequence("a", [1, 2, 3, 4, 5], hold=hold, max_tokens=9 if hold else 1)
    e.add(seq)
    assert e.step() == [] and seq.pending == 0
    assert len(e.step()) == 1 and not e.runner.queue
    assert seq.state is (State.HELD if hold else State.DONE) and seq.computed == 5 * hold
    assert UNKNOWN not in seq.tokens


def test_the_longest_sequence_ends_at_the_length_limit() -> None:
    e = engine(max_len=10)
    e.add(sequence("a", [1, 2, 3], max_tokens=7))
    outputs = drain(e)
    assert len(outputs) == 7 and outputs[-1].finish is Finish.LENGTH


def test_blocks_are_sealed_with_the_tokens_they_hold() -> None:
    """A second request that continues the first one's text finds all its full blocks, so their keys cover the right tokens."""
    e = engine()
    first = sequence("a", [3, 1, 4, 1, 5], max_tokens=14)
    e.add(first)
    drain(e)
    again = sequence("b", list(first.tokens), max_tokens=5)
    e.add(again)
    outputs = drain(e)
    assert again.cached == (len(first.tokens) - 1) // BLOCK * BLOCK
    assert reported(outputs, "b") == naive(first.tokens, again.params, width=2)


def test_an_aborted_sequence_keeps_its_blocks_until_the_step_in_flight_is_read() -> None:
    """The step in flight writes into them: bytes that arrive there from elsewhere would be lost."""
    e = engine(blocks=5, max_len=20)
    seq = sequence("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=9)
    e.add(seq)
    e.step()
    mine = list(seq.blocks)
    e.abort("a")
    fetched = sequence("f", list(range(15)), max_tokens=3)
    assert not e.reserve(fetched), "it needs four of the five blocks, and the aborted sequence still has two"
    assert e.step() == []
    e.pool.check()
    assert e.reserve(fetched) and set(fetched.blocks) & set(mine)
    filled = e.runner.device.array[fetched.blocks].copy()
    assert e.step() == [] and np.array_equal(e.runner.device.array[fetched.blocks], filled)


def test_preemption_reads_the_step_in_flight_first() -> None:
    e, rng = engine(blocks=14, max_len=40, reserve_growth=0), random.Random(3)
    prompts = {str(i): [rng.randrange(256) for _ in range(6)] for i in range(5)}
    seqs = [sequence(name, prompt, max_tokens=24, ignore_eos=True) for name, prompt in prompts.items()]
    for seq in seqs:
        e.add(seq)
    outputs = drain(e)
    assert sum(seq.preemptions for seq in seqs) > 0
    for seq in seqs:
        assert reported(outputs, seq.id) == naive(prompts[seq.id], seq.params, width=2)


def test_a_failure_ends_only_its_own_sequence() -> None:
    e = engine()
    good, bad = sequence("good", [1, 2, 3]), sequence("bad", [4, 5, 6])
    e.add(good)
    e.add(bad)
    outputs = e.step() + e.step()
    e.runner.poisoned.add("bad")
    outputs += drain(e)
    failures = [output for output in outputs if output.failure]
    assert [output.seq.id for output in failures] == ["bad"] and "bad" in (failures[0].failure or "")
    assert UNKNOWN not in bad.tokens and reported(outputs, "good") == naive([1, 2, 3], good.params, width=2)
    assert e.pool.num_owned == 0


def test_an_adopted_sequence_continues_where_prefill_stopped() -> None:
    source = engine()
    seq = sequence("a", [9, 8, 7, 6, 5], hold=True)
    source.add(seq)
    first = reported(drain(source), "a")
    target = engine()
    arrived = sequence("a", seq.tokens, max_tokens=20)
    arrived.prompt_len, arrived.arrived_with = 5, 6
    assert target.reserve(arrived)
    carry(source.runner.pool, seq.blocks, target.runner.pool, arrived.blocks)
    target.arrive(arrived, 5)
    target.adopt(arrived)
    assert first + reported(drain(target), "a") == naive([9, 8, 7, 6, 5], arrived.params, width=2)
    assert arrived.prefilled == 0 and not source.runner.pool.array[[b for b in range(64) if b not in seq.blocks]].any()


@pytest.mark.parametrize("seed", range(40))
def test_random_arrivals_aborts_and_fetches_match_the_oracle(seed: int) -> None:
    """Arrivals, aborts and fetches at random moments in pools that are too small: every surviving text is the oracle's, and every block is
    returned."""
    rng = random.Random(seed)
    e = engine(
        blocks=rng.choice((12, 20, 60)), max_len=48, max_num_seqs=rng.choice((2, 5)), max_num_batched_tokens=rng.choice((5, 16)),
        reserve_growth=rng.choice((0, 1)),
    )  # fmt: skip
    prefixes = [[rng.randrange(256) for _ in range(9)] for _ in range(2)]
    reported_so_far: dict[str, list[int]] = {}
    seqs: dict[str, Sequence] = {}
    aborted: set[str] = set()
    fetching: dict[str, tuple[Sequence, np.ndarray]] = {}
    for i in range(60):
        name = str(i)
        tokens = [*rng.choice((*prefixes, [])), *(rng.randrange(256) for _ in range(rng.randint(1, 9)))]
        seq = sequence(name, tokens, max_tokens=rng.randint(1, 20), temperature=rng.choice((0.0, 1.0)), seed=rng.getrandbits(60))
        action = rng.random()
        if action < 0.4:
            seqs[name] = seq
            e.add(seq)
        elif action < 0.5 and seqs:
            victim = rng.choice(list(seqs))
            aborted.add(victim)
            e.abort(victim)
        elif action < 0.6 and not e.reserve(seq):
            e.abort(name)
        elif action < 0.6:
            # As if another worker's bytes landed in the blocks on the device: they must be unchanged when the fetch is over.
            fresh = seq.blocks[seq.computed // BLOCK :]
            e.runner.device.array[fresh] = rng.randrange(1, 256)
            fetching[name] = (seq, e.runner.device.array[fresh].copy())
        elif fetching and action < 0.8:
            name, (seq, landed) = fetching.popitem()
            fresh = seq.blocks[seq.computed // BLOCK :]
            assert np.array_equal(e.runner.device.array[fresh], landed), "a step wrote into blocks that it does not own"
            e.release(e.abort(name))
        for output in e.step():
            assert output.sampled is not None
            reported_so_far.setdefault(output.seq.id, []).append(output.sampled.token)
        e.pool.check()
    for seq, _ in fetching.values():
        e.release(e.abort(seq.id))
    for output in drain(e):
        assert output.sampled is not None
        reported_so_far.setdefault(output.seq.id, []).append(output.sampled.token)
    for name, seq in seqs.items():
        expected = naive(seq.tokens[: seq.prompt_len], seq.params, width=2)
        found = reported_so_far.get(name, [])
        assert found == (expected[: len(found)] if name in aborted else expected)
        assert UNKNOWN not in seq.tokens
    assert e.pool.num_owned == 0


def test_the_counts_of_the_engine_match_its_sequences() -> None:
    ours = engine()
    seqs = [sequence(f"s{i}", list(range(i, i + 10 + i))) for i in range(4)]
    for seq in seqs:
        ours.add(seq)
    outputs = drain(ours)
    counts = ours.counts
    assert counts.queried_tokens == sum(seq.arrived_with for seq in seqs) and counts.hit_tokens == sum(seq.cached for seq in seqs)
    assert len(outputs) <= counts.chunks <= counts.computed_tokens
