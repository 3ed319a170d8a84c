"""A sequence that goes on from what another has computed: it shares full blocks and copies the one that is not full."""

import random
from dataclasses import replace
from typing import Any

import pytest
from late_toy import LateEngine, LateToy

from baton.engine.core.block_key import root_key
from baton.engine.core.blocks import BlockPool
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import ToyRunner, naive

BLOCK = 4
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
ROOT = root_key("toy")
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


def make(kind: str, blocks: int = 64, caching: bool = True, **limits: Any) -> Engine:
    bounds = Limits(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **limits})
    if kind == "overlap":
        return LateEngine(LateToy(blocks, CONFIG, BLOCK), bounds, 128, caching)
    runner = ToyRunner(CONFIG, "toy", BLOCK)
    runner.attach(KvPool(runner.layout, blocks))
    return Engine(runner, bounds, 128, caching)


def running(engine: Engine, steps: int, prompt: int = 6) -> Sequence:
    seq = Sequence("parent", list(range(10, 10 + prompt)), prompt, GREEDY, ROOT)
    engine.add(seq)
    for _ in range(steps):
        engine.step()
    return seq


def twin(parent: Sequence, name: str, params: SamplingParams = GREEDY) -> Sequence:
    known = parent.tokens[: parent.computed] + [token for token in parent.tokens[parent.computed :] if token >= 0]
    if len(known) == parent.computed:  # its next token is not known yet: this one goes another way
        known.append(1)
    return Sequence(name, known, parent.prompt_len, params, ROOT)


def expected(tokens: list[int], prompt_len: int, params: SamplingParams) -> list[int]:
    return tokens + naive(tokens, replace(params, max_tokens=params.max_tokens - len(tokens) + prompt_len))


def drain(engine: Engine) -> None:
    for _ in range(1000):
        if engine.idle:
            engine.pool.check()
            assert engine.pool.num_owned == 0
            return
        engine.step()
    raise AssertionError("the engine does not become idle")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", ["engine", "overlap"])
@pytest.mark.parametrize("steps", range(1, 10))
def test_each_goes_its_own_way_from_any_place(kind: str, steps: int, caching: bool) -> None:
    """Every place in a block. The children draw with seeds of their own; parent and children write into different blocks."""
    engine = make(kind, caching=caching)
    parent = running(engine, steps)
    before, computed = engine.counts.computed_tokens, parent.computed
    children = [twin(parent, f"c{seed}", replace(GREEDY, temperature=1.0, seed=seed)) for seed in range(3)]
    given = [list(child.tokens) for child in children]
    assert all(engine.fork(parent, child) for child in children)
    assert all(child.computed == computed and child.blocks[: computed // BLOCK] == parent.blocks[: computed // BLOCK] for child in children)
    own = [block for child in [parent, *children] for block in child.blocks[computed // BLOCK :]]
    assert len(set(own)) == len(own), "a block that is written to has one owner"
    drain(engine)
    assert parent.tokens == expected(list(range(10, 16)), 6, GREEDY)
    for child, tokens in zip(children, given, strict=True):
        assert child.tokens == expected(tokens, 6, child.params)
    # Nothing of the parent's is computed again. (A step in flight is counted when it lands.)
    assert kind == "overlap" or engine.counts.computed_tokens - before <= sum(len(seq.tokens) - computed for seq in [parent, *children])


def test_without_the_copy_the_child_says_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    engine = make("engine")
    monkeypatch.setattr(engine.runner, "copy", lambda source, target: None)
    parent = running(engine, 4)
    assert parent.computed % BLOCK
    child = twin(parent, "child")
    assert engine.fork(parent, child)
    drain(engine)
    assert child.tokens != expected(list(range(10, 16)), 6, GREEDY)


@pytest.mark.parametrize("seed", range(20))
def test_forks_at_random_in_pools_that_preempt(seed: int) -> None:
    rng = random.Random(seed)
    engine = make("engine", rng.choice([32, 40]), reserve_growth=rng.choice([0.0, 0.5]))
    seqs = [Sequence(f"s{i}", [rng.randrange(256) for _ in range(rng.randrange(1, 14))], 1, GREEDY, ROOT) for i in range(6)]
    seqs = [replace_prompt(seq) for seq in seqs]
    for seq in seqs:
        engine.add(seq)
    forked: list[tuple[Sequence, list[int]]] = []
    while not engine.idle:
        engine.step()
        if engine.scheduler.running and rng.random() < 0.3 and len(forked) < 12:
            parent = rng.choice(engine.scheduler.running)
            child = twin(parent, f"f{len(forked)}", replace(GREEDY, temperature=1.0, seed=seed))
            given = list(child.tokens)
            if engine.fork(parent, child):
                forked.append((child, given))
        if engine.sequences and rng.random() < 0.05:
            engine.abort(rng.choice(list(engine.sequences)))
    engine.pool.check()
    assert engine.pool.num_owned == 0 and forked
    for child, given in forked:
        whole = expected(given, child.prompt_len, child.params)
        assert child.tokens == whole[: len(child.tokens)]


def replace_prompt(seq: Sequence) -> Sequence:
    return Sequence(seq.id, list(seq.tokens), len(seq.tokens), seq.params, ROOT)


def test_where_there_is_no_room_nothing_is_kept() -> None:
    full = make("engine", max_num_seqs=1)
    parent = running(full, 3)
    owned, sequences = full.pool.num_owned, dict(full.sequences)
    assert not full.fork(parent, twin(parent, "child"))
    small = make("engine", blocks=32, reserve_growth=1.0)
    other = running(small, 3, prompt=90)
    assert not small.fork(other, twin(other, "child"))
    assert (full.pool.num_owned, full.sequences) == (owned, sequences)
    drain(small)


def test_who_waits_for_room_is_not_overtaken() -> None:
    engine = make("engine", blocks=32)
    parent = running(engine, 2, prompt=60)
    waiting = Sequence("waits", list(range(90)), 90, GREEDY, ROOT)
    engine.add(waiting)
    engine.step()
    assert waiting in engine.scheduler.waiting and not engine.fork(parent, twin(parent, "child"))


def test_a_child_of_other_tokens_or_of_a_sequence_that_does_not_run_is_refused() -> None:
    engine = make("engine")
    parent = running(engine, 4)
    other = twin(parent, "child")
    other.tokens[2] += 1
    with pytest.raises(ValueError, match="does not go on from"):
        engine.fork(parent, other)
    with pytest.raises(ValueError, match="does not go on from"):
        engine.fork(parent, Sequence("short", parent.tokens[: parent.computed], 6, GREEDY, ROOT))
    drain(engine)
    with pytest.raises(ValueError, match="is done"):
        engine.fork(parent, twin(parent, "late"))


def test_only_owned_blocks_are_shared_and_each_owner_releases_them() -> None:
    pool = BlockPool(4)
    one, two = pool.allocate(2) or []
    pool.share([one])
    pool.release([one, two])
    assert pool.num_owned == 1
    with pytest.raises(ValueError, match="has no owner"):
        pool.share([one, two])
    pool.release([one])
    assert pool.available == 4
    pool.check()
