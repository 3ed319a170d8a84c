"""Continuous, dynamic and static batching: when sequences join, and that every kind gives the tokens of the oracle."""

import random
from typing import get_args

import pytest

from baton.engine.core.block_key import root_key
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Batching, Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import ToyRunner, naive

BLOCK = 4
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
ROOT = root_key("toy")
WAIT_S = 2.0


def make_engine(batching: Batching, seqs: int = 3, budget: int = 16, num_blocks: int = 64) -> Engine:
    runner = ToyRunner(CONFIG, "toy", BLOCK)
    runner.attach(KvPool(runner.layout, num_blocks))
    return Engine(runner, Limits(seqs, budget, batching=batching, batch_wait_s=WAIT_S), 128, prefix_caching=False)


def add(engine: Engine, name: str, output: int, prompt: int = 5) -> Sequence:
    tokens = [(len(name) + 31 * i + sum(name.encode())) % 256 for i in range(prompt)]
    seq = Sequence(name, tokens, prompt, SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True), ROOT)
    engine.add(seq)
    return seq


def running(engine: Engine) -> set[str]:
    return {seq.id for seq in engine.scheduler.running}


def test_a_sequence_joins_a_continuous_batch_at_any_step() -> None:
    engine = make_engine("continuous")
    add(engine, "a", 9)
    engine.step()
    add(engine, "b", 9)
    engine.step()
    assert running(engine) == {"a", "b"}


def test_no_sequence_joins_a_dynamic_batch_until_all_of_it_is_done() -> None:
    engine = make_engine("dynamic")
    add(engine, "short", 2), add(engine, "long", 6)
    engine.step()
    assert running(engine) == {"short", "long"}, "a dynamic batch must not wait until it is full"
    add(engine, "late", 2)
    for _ in range(4):
        engine.step()
        assert running(engine) <= {"short", "long"} and "long" in running(engine)
    engine.step()
    assert not running(engine)
    engine.step()
    assert running(engine) == {"late"}


def test_a_static_batch_waits_until_it_is_full() -> None:
    engine = make_engine("static")
    add(engine, "a", 4), add(engine, "b", 4)
    assert engine.step(10.0) == [] and engine.step(10.0 + WAIT_S * 0.9) == []
    add(engine, "c", 4)
    engine.step(10.0 + WAIT_S * 0.95)
    assert running(engine) == {"a", "b", "c"}


def test_a_static_batch_that_stays_short_starts_after_the_wait() -> None:
    engine = make_engine("static")
    add(engine, "a", 4)
    assert engine.step(10.0) == []
    engine.step(10.0 + WAIT_S)
    assert running(engine) == {"a"}


def test_the_wait_of_a_static_batch_begins_with_its_first_member() -> None:
    engine = make_engine("static")
    add(engine, "gone", 4)
    engine.step(10.0)
    engine.abort("gone")
    engine.step(10.5)
    add(engine, "a", 4)
    assert engine.step(10.0 + WAIT_S) == []
    engine.step(10.0 + 2 * WAIT_S)
    assert running(engine) == {"a"}


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_batch_larger_than_a_step_joins_over_several_steps(batching: Batching) -> None:
    engine = make_engine(batching, seqs=3, budget=8)
    for name in "abc":
        add(engine, name, 8, prompt=7)
    engine.step()
    add(engine, "late", 8)
    engine.step()
    engine.step()
    assert running(engine) == set("abc")


@pytest.mark.parametrize("batching", get_args(Batching))
@pytest.mark.parametrize("seed", range(12))
def test_every_kind_of_batching_equals_the_oracle(batching: Batching, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(batching, seqs=rng.choice([1, 3, 6]), budget=rng.choice([8, 32]), num_blocks=rng.choice([32, 40, 64]))
    seqs = [add(engine, f"s{i}", rng.randrange(1, 30), rng.randrange(1, 60)) for i in range(12)]
    now = 0.0
    while not engine.idle:
        engine.step(now)
        now += 0.1
        assert now < 1000
    for seq in seqs:
        assert seq.tokens[seq.prompt_len :] == naive(seq.tokens[: seq.prompt_len], seq.params)
    engine.pool.check()
