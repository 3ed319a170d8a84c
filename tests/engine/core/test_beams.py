"""The search: what it decides, against a search over whole vocabularies. And its beams in an engine, as sequences that share blocks."""

import random
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
from beam_reference import Row, search, toy_search
from late_toy import LateEngine, LateToy

from baton.engine.core.beam_search import BeamSearch
from baton.engine.core.beams import Beams, EarlyStopping, Hypothesis
from baton.engine.core.block_key import root_key
from baton.engine.core.drafting import Drafter
from baton.engine.core.engine import Engine, Output, TooLong
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import NonFiniteLogits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Finish, Sequence, State
from baton.engine.core.toy import ToyRunner

BLOCK = 4
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
ROOT = root_key("toy")


# --- the decision --------------------------------------------------------------------------------------------------------------------


def rows_of(seed: int, vocab: int, coarse: bool) -> Callable[[tuple[int, ...]], Row]:
    """A row for each output. `coarse`: few different numbers, so that many scores tie."""

    def row(tokens: tuple[int, ...]) -> Row:
        rng = np.random.default_rng([seed, *tokens])
        logits = rng.integers(0, 4, vocab) / 4 if coarse else rng.normal(size=vocab) * 3
        made: Row = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        return made

    return row


def run(row: Callable[[tuple[int, ...]], Row], found: BeamSearch) -> list[Hypothesis]:
    while not found.done:
        rows = []
        for beam in found.live:
            logprobs = row(beam.tokens)
            order = np.argsort(-logprobs, kind="stable")[: found.looks_at]
            rows.append([(int(token), float(logprobs[token])) for token in order])
        found.step(rows)
    return list(found.found)


def draw(rng: random.Random) -> dict[str, Any]:
    width = rng.randint(2, 6)
    asked = Beams(width, rng.randint(1, width), rng.choice([-1.0, 0.0, 0.6, 1.0, 2.0]), rng.choice(get_args(EarlyStopping)))
    stops = frozenset(rng.sample(range(12), rng.randint(0, 3)))
    return {"beams": asked, "stops": stops, "max_tokens": rng.randint(1, 9), "min_tokens": rng.choice([0, 0, 2])}


@pytest.mark.parametrize("coarse", [False, True])
def test_it_finds_what_a_search_over_everything_finds(coarse: bool) -> None:
    endings = set()
    for seed in range(400):
        asked = draw(random.Random(seed))
        row = rows_of(seed, 12, coarse)
        found = run(row, BeamSearch(**asked))
        assert found == search(row, **asked), (seed, asked)
        endings |= {(one.stopped, len(one.tokens) < asked["max_tokens"]) for one in found}
    assert endings == {(True, True), (True, False), (False, False)}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("looks_at", property(lambda self: self.beams.width)),
        ("_is_over", lambda self, length: len(self.ended) == self.beams.width),
        ("_end", lambda self, hypothesis: self.ended.append(hypothesis)),
    ],
)
def test_the_comparison_sees_a_wrong_rule(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(BeamSearch, name, wrong)
    cases = [(seed, draw(random.Random(seed))) for seed in range(100)]
    assert any(run(rows_of(seed, 12, False), BeamSearch(**asked)) != search(rows_of(seed, 12, False), **asked) for seed, asked in cases)


def test_scores_are_divided_by_the_length_with_the_stop_token() -> None:
    found = BeamSearch(Beams(2, 1, 2.0, "true"), frozenset([9]), max_tokens=5)
    found.step([[(1, -1.0), (2, -2.0), (9, -9.0)]])
    found.step([[(9, -1.0), (3, -5.0), (4, -6.0)], [(9, -1.0), (3, -7.0), (4, -8.0)]])
    assert found.done and found.ended == [Hypothesis((1, 9), -0.5, True), Hypothesis((2, 9), -0.75, True)]


# --- the engine ----------------------------------------------------------------------------------------------------------------------


def make(kind: str = "engine", blocks: int = 128, caching: bool = True, max_len: int = 200, **limits: Any) -> Engine:
    bounds = Limits(**{"max_num_seqs": 12, "max_num_batched_tokens": 32, **limits})
    if kind == "overlap":
        return LateEngine(LateToy(blocks, CONFIG, BLOCK), bounds, max_len, caching)
    runner = ToyRunner(CONFIG, "toy", BLOCK)
    runner.attach(KvPool(runner.layout, blocks))
    return Engine(runner, bounds, max_len, caching)


def asking(name: str, prompt: list[int], hold: bool = False, width: int = 4, **params: Any) -> Sequence:
    chosen: dict[str, Any] = {"max_tokens": 14, "beams": Beams(width, width), **params}
    return Sequence(name, list(prompt), len(prompt), SamplingParams(**chosen), ROOT, hold=hold)


def expected(prompt: list[int], params: SamplingParams) -> list[Hypothesis]:
    return toy_search(prompt, params, width=CONFIG["kv_width"])


def drain(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(3000):
        outputs += engine.step()
        if engine.idle:
            nothing_left(engine)
            return outputs
    raise AssertionError("the engine does not become idle")


def nothing_left(engine: Engine) -> None:
    engine.pool.check()
    assert (engine.pool.num_owned, engine.sequences, engine.groups._groups, engine.scheduler.running) == (0, {}, {}, [])


def answers(outputs: list[Output]) -> dict[str, list[Hypothesis]]:
    assert not any(output.failure or output.sampled for output in outputs if output.found)
    return {output.seq.id: list(output.found) for output in outputs if output.found}


def test_a_search_tells_how_far_it_has_come() -> None:
    engine, asked = make(), asking("s", [1, 2, 3])
    engine.add(asked)
    outputs = drain(engine)
    assert [output.searched for output in outputs] == list(range(1, 15)), "once for each token of the beams"
    assert [bool(output.found) for output in outputs] == [False] * 13 + [True]


KINDS = pytest.mark.parametrize("kind", ["engine", "overlap"])


@KINDS
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", range(1, 10))
def test_an_engine_finds_what_the_search_over_everything_finds(kind: str, caching: bool, length: int) -> None:
    """Every place in a block. Beside it runs a sequence without beams."""
    engine = make(kind, caching=caching)
    prompt = [length * 7 + i for i in range(length)]
    stop = (length * 5) % 257
    seqs = [
        asking("a", prompt, stop_token_ids=frozenset([stop])),
        asking("b", prompt, width=3, max_tokens=9, ignore_eos=True),
        asking("c", prompt[::-1], width=2, max_tokens=1),
    ]
    for seq in [*seqs, Sequence("plain", [1, 2], 2, SamplingParams(9, temperature=0.0), ROOT)]:
        engine.add(seq)
    outputs = drain(engine)
    for seq in seqs:
        found = answers(outputs)[seq.id]
        assert found == expected(seq.tokens[: seq.prompt_len], seq.params)
        assert next(o.finish for o in outputs if o.seq is seq and o.found) is (Finish.STOP if found[0].stopped else Finish.LENGTH)
    assert sum(output.seq.id == "plain" for output in outputs) == 9


def test_beams_share_blocks_and_one_that_its_parent_becomes_costs_nothing() -> None:
    engine = make(caching=False)
    prompt = list(range(40))
    engine.add(seq := asking("a", prompt))
    while seq.state is not State.SEARCHING:
        engine.step()
    engine.groups.make_room()
    assert len(engine.scheduler.running) == 4 and engine.pool.num_owned == 10 + 4, (
        "ten blocks of the prompt are owned by all beams, and one by each"
    )
    before = engine.counts.computed_tokens
    outputs = drain(engine)
    assert answers(outputs)["a"] == expected(prompt, seq.params)
    assert engine.counts.computed_tokens - before == 4 * 13, "a step computes one position of each beam"
    assert seq.prefilled == len(prompt) - 1


def test_without_the_copy_of_the_last_block_it_finds_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    engine = make()
    monkeypatch.setattr(engine.runner, "copy", lambda source, target: None)
    engine.add(seq := asking("a", [1, 2, 3, 4, 5]))
    assert answers(drain(engine))["a"] != expected([1, 2, 3, 4, 5], seq.params)


@KINDS
def test_nobody_guesses_for_a_beam(kind: str) -> None:
    class Eager(Drafter):
        def propose(self, asks: Any) -> Any:
            assert all(ask.seq.params.beams is None for ask in asks)
            return [[1] * min(2, ask.most) for ask in asks]

    runner = LateToy(64, CONFIG, BLOCK) if kind == "overlap" else ToyRunner(CONFIG, "toy", BLOCK)
    if kind != "overlap":
        runner.attach(KvPool(runner.layout, 64))
    made: Any = LateEngine if kind == "overlap" else Engine
    engine = made(runner, Limits(max_num_seqs=12, max_num_batched_tokens=32), 200, drafter=Eager())
    engine.add(seq := asking("a", [1, 2, 3]))
    engine.add(Sequence("plain", [1, 2], 2, SamplingParams(9, temperature=0.0), ROOT))
    assert answers(drain(engine))["a"] == expected([1, 2, 3], seq.params) and engine.counts.drafted_tokens > 0


def crowd(seed: int, rng: random.Random) -> Iterator[Sequence]:
    for i in range(7):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
        if i % 2:
            yield Sequence(f"{seed}-{i}", prompt, len(prompt), SamplingParams(rng.randrange(1, 40), ignore_eos=True, seed=i), ROOT)
        else:
            stops = frozenset(rng.sample(range(257), 3))
            asked: dict[str, Any] = {"width": rng.choice([2, 3, 5]), "stop_token_ids": stops, "max_tokens": rng.randrange(1, 25)}
            yield asking(f"{seed}-{i}", prompt, **asked)


@KINDS
def test_groups_in_pools_that_preempt_find_the_same_or_are_ended_without_trace(kind: str) -> None:
    """Small pools and chunks, prefixes that are cached, cancelled ones among them."""
    assert sum(preemptions_in(kind, seed) for seed in range(15)) > 5


def preemptions_in(kind: str, seed: int) -> int:
    """Of groups."""
    rng = random.Random(seed)
    engine = make(kind, 46, rng.random() < 0.7, 80, reserve_growth=0.0, max_num_batched_tokens=rng.choice([12, 16, 40]))
    make_way = engine.scheduler.make_way

    def patient(seq: Sequence, preempted: list[Sequence]) -> bool:
        assert not isinstance(engine, LateEngine) or engine.scheduler.flight is None, "preemption waits for the step in flight"
        return make_way(seq, preempted)

    engine.scheduler.make_way = patient  # type: ignore[method-assign]
    seqs = [*crowd(seed, rng)]
    seqs += [asking(f"{seed}-again", seqs[0].tokens, width=3)]
    prompts, ended = {seq.id: list(seq.tokens) for seq in seqs}, set()
    for seq in seqs:
        engine.add(seq)
    outputs: list[Output] = []
    for _ in range(5000):
        if engine.idle:
            break
        outputs += engine.step()
        if rng.random() < 0.02:
            ended.add(gone := rng.choice(seqs).id)
            engine.abort(gone)
        engine.pool.check()
    nothing_left(engine)
    groups, found = [seq for seq in seqs if seq.params.beams is not None], answers(outputs)
    for seq in groups:
        assert seq.id in ended or found[seq.id] == expected(prompts[seq.id], seq.params), (kind, seed)
    return sum(seq.preemptions for seq in groups)


@KINDS
def test_a_preempted_group_is_computed_again_from_what_its_beams_share(kind: str) -> None:
    engine = make(kind, caching=False)
    prompt = list(range(9))
    engine.add(seq := asking("a", prompt, max_tokens=30))
    while seq.state is not State.SEARCHING or engine.groups._groups[seq].search.length < 12:
        engine.step()
    group = engine.groups._groups[seq]
    if isinstance(engine, LateEngine):
        engine._land(None)  # preemption waits for the step in flight
    engine.groups.make_room()
    engine.groups.restart([engine.scheduler.preempt(engine.scheduler.running[2])])
    assert (engine.scheduler.waiting, engine.scheduler.running, engine.sequences, engine.pool.num_owned) == ([seq], [], {"a": seq}, 0)
    assert seq.tokens == prompt + list(group.search.trunk)
    assert answers(drain(engine))["a"] == expected(prompt, seq.params)
    assert seq.preemptions == 1


@KINDS
@pytest.mark.parametrize("after", range(14))
def test_an_end_at_any_step_leaves_nothing_behind(kind: str, after: int) -> None:
    engine = make(kind, max_num_batched_tokens=12)
    engine.add(asking("a", list(range(20))))
    engine.add(other := asking("b", [5, 6, 7], width=3))
    for _ in range(after):
        engine.step()
    assert engine.abort("a") == []
    assert answers(drain(engine)) == {"b": expected([5, 6, 7], other.params)}


@KINDS
def test_a_search_whose_kv_comes_from_elsewhere(kind: str) -> None:
    """A prefill engine holds it after one token, which is not the search's, even if it would end an output."""
    source, target = make(kind), make(kind)
    prompt = list(range(50, 61))
    held = asking("held", prompt, hold=True, stop_token_ids=frozenset(range(257)))
    source.add(held)
    for _ in range(4):
        source.step()
    assert held.state is State.HELD
    seq = asking("a", prompt)
    assert target.reserve(seq)
    theirs, ours = (memory(engine) for engine in (source, target))
    ours[seq.blocks] = theirs[held.blocks[: len(seq.blocks)]]
    before = target.counts.computed_tokens
    target.arrive(seq, len(prompt) - 1)
    target.adopt(seq)
    assert answers(drain(target))["a"] == expected(prompt, seq.params)
    assert target.counts.computed_tokens - before == 1 + 4 * 13 and seq.prefilled == 0
    source.abort("held")
    nothing_left(source)


def memory(engine: Engine) -> Any:
    assert isinstance(engine.runner, ToyRunner)
    return engine.runner.device.array if isinstance(engine.runner, LateToy) else engine.runner.pool.array


def test_one_that_asked_for_room_in_vain_leaves_nothing() -> None:
    engine = make(blocks=64, max_num_seqs=4)
    engine.add(asking("a", [1, 2, 3]))
    engine.step()
    late = asking("late", [4, 5, 6])
    assert not engine.reserve(late), "four beams of another run"
    assert not engine.reserve(late)
    engine.abort("late")
    drain(engine)
    again = asking("again", [4, 5, 6])
    assert engine.reserve(again)
    engine.release(engine.abort("again"))
    nothing_left(engine)


@pytest.mark.parametrize(
    ("limits", "blocks", "said"), [({"max_num_seqs": 3}, 64, "3 sequences"), ({}, 50, "55 blocks of KV; there are 50")]
)
def test_beams_that_can_never_fit_are_refused_at_once(limits: dict[str, Any], blocks: int, said: str) -> None:
    engine = make(blocks=blocks, **limits)
    seq = asking("a", list(range(20)), max_tokens=40, width=5)
    with pytest.raises(TooLong, match=said):
        engine.add(seq)
    nothing_left(engine)


def test_beams_that_just_fit_alone_are_found() -> None:
    engine = make(blocks=55)
    engine.add(seq := asking("a", list(range(20)), max_tokens=40, width=5, ignore_eos=True))
    assert answers(drain(engine))["a"] == expected(list(range(20)), seq.params)


@KINDS
def test_a_beam_whose_logits_are_not_finite_ends_its_group(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(kind)
    engine.add(asking("a", [1, 2, 3]))
    engine.add(other := asking("b", [4, 5, 6]))
    for _ in range(8):
        engine.step()
    bad = [seq.id for seq in engine.scheduler.running if seq.owner is not None and seq.owner.id == "a"][1:3]
    assert len(bad) == 2
    if isinstance(engine.runner, LateToy):
        engine.runner.poisoned |= set(bad)
    else:
        real, failed = engine.runner.run, iter([True])
        monkeypatch.setattr(engine.runner, "run", lambda batch: raise_(bad) if next(failed, False) else real(batch))
    outputs = drain(engine)
    assert [output.seq.id for output in outputs if output.failure] == ["a"]
    assert answers(outputs) == {"b": expected([4, 5, 6], other.params)}


def raise_(ids: list[str]) -> Any:
    raise NonFiniteLogits(ids)
