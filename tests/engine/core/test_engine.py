"""The engine matches the oracle whatever the batch, pool and chunks. Prefill, handoff and decode match one engine and recompute nothing."""

import math
import random
from typing import Any

import pytest
from host_pool import carry, on_host

from baton.engine.core.block_key import root_key
from baton.engine.core.engine import Engine, Malformed, QueueFull, TooLong
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Finish, Sequence, State
from baton.engine.core.toy import ToyRunner, naive
from baton.moves import IllegalMove

BLOCK = 4
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
ROOT = root_key("toy")


def make_engine(
    num_blocks: int = 64, *, seqs: int = 8, budget: int = 16, growth: float = 0.5, max_len: int = 128, caching: bool = True
) -> Engine:
    runner = ToyRunner(CONFIG, "toy", BLOCK)
    runner.attach(KvPool(runner.layout, num_blocks))
    return Engine(runner, Limits(seqs, budget, growth), min(max_len, num_blocks * BLOCK), caching)


def make_seq(name: str, tokens: list[int], hold: bool = False, prompt_len: int | None = None, **params: object) -> Sequence:
    values: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params}
    return Sequence(name, list(tokens), prompt_len or len(tokens), SamplingParams(**values), ROOT, hold)


def drain(engine: Engine, limit: int = 5000) -> None:
    for _ in range(limit):
        if engine.idle:
            engine.pool.check()
            return
        engine.step()
    raise AssertionError("the engine does not become idle")


def workload(rng: random.Random, count: int) -> list[Sequence]:
    shared = [[rng.randrange(256) for _ in range(rng.randrange(1, 24))] for _ in range(3)]
    seqs = []
    for i in range(count):
        tokens = rng.choice(shared) + [rng.randrange(256) for _ in range(rng.randrange(1, 12))]
        params: dict[str, Any] = {
            "temperature": rng.choice([0.0, 1.0]),
            "seed": rng.randrange(1 << 40),
            "max_tokens": rng.randrange(1, 20),
            "ignore_eos": rng.random() < 0.5,
        }
        seqs.append(make_seq(f"s{i}", tokens, **params))
    return seqs


def expect(seq: Sequence) -> list[int]:
    return naive(seq.tokens[: seq.prompt_len], seq.params)


@pytest.mark.parametrize("seed", range(60))
def test_random_workloads_equal_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        rng.choice([14, 20, 64]), seqs=rng.choice([1, 3, 8]), budget=rng.choice([8, 16, 64]), growth=rng.choice([0.0, 0.5, 1.0])
    )
    seqs = workload(rng, 20)
    waiting = list(seqs)
    while waiting or not engine.idle:
        while waiting and rng.random() < 0.5:
            engine.add(waiting.pop())
        engine.step()
    for seq in seqs:
        assert seq.tokens[seq.prompt_len :] == expect(seq)
    engine.pool.check()
    assert engine.pool.num_owned == 0 and not engine.sequences
    check_counts(engine, seqs)


def check_counts(engine: Engine, seqs: list[Sequence]) -> None:
    """The engine's counts agree with those of its sequences, all of which have finished."""
    counts = engine.counts
    assert counts.queried_tokens == sum(seq.arrived_with for seq in seqs)
    assert counts.hit_tokens == sum(seq.cached for seq in seqs)
    assert counts.preemptions == sum(seq.preemptions for seq in seqs)
    assert counts.recomputed_tokens == sum(seq.recomputed for seq in seqs)
    once = sum(len(seq.tokens) - 1 - seq.cached for seq in seqs)
    assert counts.computed_tokens - counts.recomputed_tokens == once
    assert len(seqs) <= counts.chunks <= counts.computed_tokens


def test_small_pools_preempt_and_recompute() -> None:
    """Without preemption the workloads above would prove little."""
    engine = make_engine(12, seqs=8, growth=0.0)
    seqs = [make_seq(f"s{i}", [i] * 6, max_tokens=20) for i in range(4)]
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert sum(seq.preemptions for seq in seqs) > 0 and sum(seq.recomputed for seq in seqs) > 0
    check_counts(engine, seqs)
    assert [seq.tokens[6:] for seq in seqs] == [expect(seq) for seq in seqs]


def test_full_reservation_never_preempts() -> None:
    engine = make_engine(12, seqs=8, growth=1.0)
    seqs = [make_seq(f"s{i}", [i] * 6, max_tokens=20) for i in range(6)]
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert sum(seq.preemptions for seq in seqs) == 0


def copy_blocks(source: Engine, target: Engine, src: list[int], dst: list[int]) -> None:
    assert len(src) == len(dst)
    carry(source.runner.pool, src, target.runner.pool, dst)


def hand_over(prefill: Engine, decode: Engine, seq: Sequence, *, copy: bool = True) -> Sequence:
    """A whole handoff in memory: prefills, holds, copies what `decode` lacks, adopts."""
    held = make_seq(
        seq.id, seq.tokens, hold=True, **{name: getattr(seq.params, name) for name in ("max_tokens", "temperature", "seed", "ignore_eos")}
    )
    prefill.add(held)
    while held.state not in (State.HELD, State.DONE):
        prefill.step()
    adopted = Sequence(seq.id, list(held.tokens), seq.prompt_len, seq.params, ROOT)
    if held.state is State.DONE:
        return adopted
    while not decode.reserve(adopted):
        decode.step()
    first = adopted.computed // BLOCK
    last = -(-(len(adopted.tokens) - 1) // BLOCK)
    if copy:
        copy_blocks(prefill, decode, held.blocks[first:last], adopted.blocks[first:last])
    decode.arrive(adopted, len(adopted.tokens) - 1)
    decode.adopt(adopted)
    prefill.abort(held.id)
    return adopted


@pytest.mark.parametrize("seed", range(60))
def test_handoff_equals_one_engine_and_recomputes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    prefill = make_engine(rng.choice([16, 64]), budget=rng.choice([8, 64]))
    decode = make_engine(rng.choice([16, 64]), growth=rng.choice([0.0, 1.0]))
    adopted = [hand_over(prefill, decode, seq) for seq in workload(rng, 20)]
    drain(decode)
    for seq in adopted:
        assert seq.tokens[seq.prompt_len :] == expect(seq)
        assert seq.prefilled == 0
    for engine in (prefill, decode):
        engine.pool.check()
        assert engine.pool.num_owned == 0 and not engine.sequences


def test_handoff_without_the_copy_gives_other_tokens() -> None:
    """Negative control: the test above would notice a missing copy."""
    prefill, decode = make_engine(), make_engine()
    seq = hand_over(prefill, decode, make_seq("s", list(range(1, 11))), copy=False)
    drain(decode)
    assert seq.tokens[10:] != expect(seq)


@pytest.mark.parametrize("seed", range(40))
def test_received_kv_may_end_anywhere_and_the_rest_is_computed(seed: int) -> None:
    """`computed += n`, in one or several arrivals. The tokens that are still pending are prefilled like any others."""
    rng = random.Random(seed)
    source, target = make_engine(), make_engine(budget=rng.choice([8, 64]))
    tokens = [rng.randrange(256) for _ in range(rng.randrange(6, 40))]
    held = make_seq("s", tokens, hold=True)
    source.add(held)
    drain(source)
    seq = make_seq("s", tokens, max_tokens=9, seed=seed)
    assert target.reserve(seq)
    ends = sorted(rng.sample(range(1, len(tokens)), rng.randrange(1, 4)))
    copy_blocks(source, target, held.blocks[: -(-ends[-1] // BLOCK)], seq.blocks[: -(-ends[-1] // BLOCK)])
    for end in ends:
        target.arrive(seq, end)
    target.adopt(seq)
    drain(target)
    assert seq.tokens[len(tokens) :] == expect(seq) and seq.prefilled == len(tokens) - 1 - ends[-1]
    target.pool.check()


def test_a_token_that_became_known_during_the_fetch_is_not_sampled_again() -> None:
    source, target = make_engine(), make_engine()
    tokens = list(range(1, 11))
    held = make_seq("s", tokens, hold=True)
    source.add(held)
    drain(source)
    for fails in (False, True):
        seq = make_seq(f"s{fails}", tokens, max_tokens=9)
        assert target.reserve(seq)
        copy_blocks(source, target, held.blocks[:3], seq.blocks[:3])
        if fails:
            target.release(target.give_up(seq, held.tokens[-1]))
        else:
            target.arrive(seq, len(tokens))
            target.adopt(seq, held.tokens[-1])
        outputs = []
        while not target.idle:
            outputs += target.step()
        assert seq.tokens[len(tokens) :] == expect(seq) and len(outputs) == 8
        target.pool.forget(range(target.pool.num_blocks))


def test_a_sequence_with_nothing_left_to_compute_cannot_be_adopted() -> None:
    """Without logits there is no token."""
    engine = make_engine()
    seq = make_seq("s", [1, 2, 3, 4, 5])
    assert engine.reserve(seq)
    engine.arrive(seq, 5)
    with pytest.raises(ValueError, match="left to compute"):
        engine.adopt(seq)
    assert seq.state is State.FETCHING
    with pytest.raises(ValueError, match="cannot have 6"):
        engine.arrive(seq, 6)


def test_a_prompt_to_be_held_reports_its_full_blocks_and_keeps_them() -> None:
    """Its blocks may already have readers, so another sequence is preempted instead, or the one that needs room."""
    engine = make_engine(16, budget=8, max_len=64)
    decoding = [make_seq(f"d{i}", [i] * 7, max_tokens=40) for i in range(2)]
    for seq in decoding:
        engine.add(seq)
    engine.step()
    held = make_seq("h", list(range(30)), hold=True)
    engine.add(held)
    reported: list[tuple[int, ...]] = []
    while held.state is not State.HELD:
        reported += [output.full for output in engine.step() if output.seq is held and output.sampled is None]
    assert reported and all(full == tuple(held.blocks[: len(full)]) for full in reported)
    assert [len(full) for full in reported] == sorted(len(full) for full in reported)
    blocks = list(held.blocks)
    drain(engine)
    assert held.preemptions == 0 and held.blocks == blocks and sum(seq.preemptions for seq in decoding) > 0
    engine.abort(held.id)
    engine.pool.check()
    assert all(seq.tokens[7:] == expect(seq) for seq in decoding)


def test_pinned_blocks_are_not_evicted() -> None:
    engine = make_engine(16, max_len=64)
    seq = make_seq("s", list(range(16)), max_tokens=1)
    engine.add(seq)
    drain(engine)
    pinned = engine.pin(seq.keys)
    content = [bytes(on_host(engine.runner.pool).block(block)) for block in pinned]
    assert len(pinned) == 4
    other = make_seq("other", list(range(100, 140)), max_tokens=8)
    engine.add(other)
    drain(engine)
    assert [bytes(on_host(engine.runner.pool).block(block)) for block in pinned] == content
    engine.release(pinned)
    engine.pool.check()


def test_give_up_recomputes_and_returns_the_blocks_that_may_still_be_filled() -> None:
    decode = make_engine()
    tokens = list(range(1, 11))
    first = naive(tokens, make_seq("x", tokens).params)[0]
    seq = make_seq("s", [*tokens, first], prompt_len=10)
    assert decode.reserve(seq)
    filling = decode.give_up(seq)
    assert len(filling) == 3
    drain(decode)
    assert seq.tokens[10:] == naive(tokens, seq.params) and seq.prefilled == 10
    assert decode.pool.num_owned == 3  # the quarantine
    decode.release(filling)
    assert decode.pool.num_owned == 0
    decode.pool.check()


def test_a_cached_prefix_is_found_and_counted() -> None:
    engine = make_engine()
    engine.add(make_seq("a", list(range(20))))
    drain(engine)
    seq = make_seq("b", [*range(20), 99, 98])
    engine.add(seq)
    drain(engine)
    assert seq.cached == 20 and seq.prefilled == 1
    assert seq.tokens[22:] == expect(seq)


def test_salt_separates_prefixes() -> None:
    engine = make_engine()
    engine.add(make_seq("a", list(range(20))))
    drain(engine)
    other = make_seq("b", list(range(20)))
    other.root = root_key("toy", salt="another tenant")
    engine.add(other)
    drain(engine)
    assert other.cached == 0


@pytest.mark.parametrize("steps", range(6))
def test_abort_in_every_state_frees_everything(steps: int) -> None:
    engine = make_engine(budget=8)
    for i in range(4):
        engine.add(make_seq(f"s{i}", [i] * 18, hold=i == 0))
    for _ in range(steps):
        engine.step()
    for i in range(4):
        engine.abort(f"s{i}")
    engine.abort("unknown")
    assert engine.idle and engine.pool.num_owned == 0 and not engine.sequences
    engine.pool.check()


def test_each_stop_rule_ends_the_sequence() -> None:
    prompt = [5, 6, 7]
    plain = naive(prompt, make_seq("x", prompt, max_tokens=12).params)
    cases = [
        (make_seq("length", prompt, max_tokens=12), plain, Finish.LENGTH),
        (make_seq("stop", prompt, max_tokens=12, stop_token_ids=frozenset([plain[4]])), plain[: plain.index(plain[4]) + 1], Finish.STOP),
        (make_seq("min", prompt, max_tokens=12, min_tokens=6, stop_token_ids=frozenset(plain[:6])), plain[:6], Finish.STOP),
    ]
    for seq, tokens, reason in cases:
        engine = make_engine()
        engine.add(seq)
        outputs = []
        while not engine.idle:
            outputs += engine.step()
        assert seq.tokens[3:] == tokens, seq.id
        assert outputs[-1].finish is reason


def test_requests_beyond_the_bounds_are_refused_and_leave_nothing_behind() -> None:
    engine = make_engine(16, max_len=32)
    with pytest.raises(TooLong):
        engine.add(make_seq("long", [1] * 30, max_tokens=8))
    engine.scheduler.limits = Limits(max_queue=1)
    engine.add(make_seq("a", [1]))
    with pytest.raises(QueueFull):
        engine.add(make_seq("b", [1]))
    assert list(engine.sequences) == ["a"]


def test_a_continued_stream_equals_the_uninterrupted_one() -> None:
    """A retry folds the tokens that were sent into the prompt; noise depends only on seed and position."""
    prompt = [9, 8, 7]
    whole = naive(prompt, make_seq("x", prompt, max_tokens=12, temperature=1.0, seed=5).params)
    for cut in range(1, 12):
        engine = make_engine()
        seq = make_seq("s", prompt + whole[:cut], prompt_len=3, max_tokens=12, temperature=1.0, seed=5)
        engine.add(seq)
        drain(engine)
        assert seq.tokens[3:] == whole


def test_an_illegal_move_names_state_and_event_and_changes_nothing() -> None:
    seq = make_seq("s", [1])
    with pytest.raises(IllegalMove, match=r"waiting.*'adopt'"):
        seq.move("adopt")
    assert seq.state is State.WAITING


@pytest.mark.parametrize("first", ["queue", "fetch"])
def test_a_long_sequence_is_not_overtaken_by_later_ones(first: str) -> None:
    """A long sequence needs most of the pool, and small ones keep coming by the other way in. It is served before those that came later."""
    engine = make_engine(16, max_len=64)
    engine.add(make_seq("running", list(range(9))))
    engine.step()
    big = make_seq("big", list(range(100, 150)), max_tokens=4)
    admitted = False
    if first == "fetch":
        admitted = engine.reserve(big)
    else:
        engine.add(big)
    assert not admitted
    late = 0
    for i in range(40):
        small = make_seq(f"s{i}", [i, *range(8)])
        if first == "fetch":
            engine.add(small)
            admitted = admitted or engine.reserve(big)
        elif engine.reserve(small):
            engine.arrive(small, len(small.tokens) - 1)
            engine.adopt(small)
            late += big.state is State.WAITING
        else:
            engine.abort(small.id)
        for _ in range(4):
            engine.step()
    assert not late and (admitted if first == "fetch" else big.state is not State.WAITING)


def test_a_prefill_worker_reserves_no_room_for_output_it_never_makes() -> None:
    engine = make_engine(64, budget=64)
    seqs = [make_seq(f"p{i}", [i] * 16, hold=True, max_tokens=100) for i in range(4)]
    for seq in seqs:
        engine.add(seq)
    engine.step()
    assert [seq.state for seq in seqs] == [State.HELD] * 4


@pytest.mark.parametrize(("tokens", "prompt_len"), [([1, 257], 2), ([-1], 1), ([1], 0), ([1], 2), ([], 0)])
def test_a_malformed_sequence_is_refused_before_it_reaches_the_model(tokens: list[int], prompt_len: int) -> None:
    engine = make_engine()
    with pytest.raises(Malformed):
        engine.add(Sequence("s", tokens, prompt_len, SamplingParams(max_tokens=2), ROOT))
    assert not engine.sequences


# Sequences that wait too long


@pytest.mark.parametrize("late", [True, False])
def test_a_sequence_that_expires_in_the_queue_is_dropped_before_anything_is_computed(late: bool) -> None:
    """Negative control: one that does not expire is computed."""
    engine = make_engine(seqs=1)
    first, second, third = (make_seq(name, list(range(12)), max_tokens=4) for name in "abc")
    second.expires_at = 10.0
    for seq in (first, second, third):
        engine.add(seq)
    outputs = []
    now = 0.0
    while not engine.idle:
        now += 5.0 if late else 0.1
        outputs += engine.step(now)
    dropped = [output.seq.id for output in outputs if output.expired]
    assert dropped == (["b"] if late else []) and second.output_len == (0 if late else 4)
    assert second.prefilled == 0 if late else second.output_len == 4
    assert expect(first) == first.tokens[12:] and expect(third) == third.tokens[12:], "the other sequences must not be affected"
    assert not engine.sequences and (second.state is State.DONE)
    engine.pool.check()


def test_a_running_sequence_does_not_expire() -> None:
    """Its client enforces the deadline from then on; only in the queue can work still be saved."""
    engine = make_engine()
    seq = make_seq("a", [1, 2, 3])
    seq.expires_at = 1.0
    engine.add(seq)
    while not engine.idle:
        assert not any(output.expired for output in engine.step(0.5 if seq.started_at is None else 5.0))
    assert seq.output_len == 8


@pytest.mark.parametrize("end", range(1, 2 * BLOCK + 1))
def test_a_first_token_beyond_the_reserved_blocks_gets_room(end: int) -> None:
    """The prompt fills its last block, and some of its KV is still to be computed when the token becomes known."""
    source, target, tokens = make_engine(), make_engine(), list(range(1, 2 * BLOCK + 1))
    held = make_seq("s", tokens, hold=True)
    source.add(held)
    drain(source)
    seq = make_seq("s", tokens, max_tokens=9)
    assert target.reserve(seq)
    copy_blocks(source, target, held.blocks[:2], seq.blocks[:2])
    target.arrive(seq, end)
    target.adopt(seq, held.tokens[-1])
    drain(target)
    assert seq.tokens[len(tokens) :] == expect(seq)
    target.pool.check()


@pytest.mark.parametrize("bias", [math.nan, math.inf])
def test_a_bias_that_is_no_number_is_refused(bias: float) -> None:
    """Drawn with it, every token would be as good as none: the compiled draw answered -1."""
    engine = make_engine()
    with pytest.raises(Malformed, match="logit_bias"):
        engine.add(make_seq("s", [1, 2, 3], logit_bias={7: bias}))
    assert not engine.sequences
    engine.add(make_seq("s", [1, 2, 3], logit_bias={7: -math.inf}))
