"""Steps of several tokens, without anybody who guesses well: guesses that are right, wrong, or right up to a place. Whatever else
happens to the sequences, the output is the one without guesses. Here with the toy, on both engines; `test_continuation` compares bits of
real logits."""

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from host_pool import carry, on_host
from late_toy import LateEngine, LateToy

from baton.engine.core.block_key import root_key
from baton.engine.core.drafting import Drafter, DraftRequest, Tree
from baton.engine.core.engine import Engine, Output
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Branch, Chunk, NonFiniteLogits, OutOfDeviceMemory, Tokens, accepted, path
from baton.engine.core.sampling import Sampled, SamplingParams
from baton.engine.core.sequence import Finish, Sequence, State
from baton.engine.core.step_costs import NO_UPKEEP, Line
from baton.engine.core.toy import ToyRunner, naive
from baton.engine.measure_steps import step_line, upkeep

BLOCK = 4
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
ROOT = root_key("toy")
HOW_RIGHT = (1.0, 0.0, 0.7)


class Guesser(Drafter):
    """Knows what the toy will say. Each guess is right with probability `right`, and there are up to `most` of them. Of those that
    begin with different tokens, any may be the one that is right."""

    def __init__(self, right: float, most: int = 5, seed: int = 0, ways: int = 1) -> None:
        self._right, self._most, self._rng, self._ways = right, most, random.Random(seed), ways

    def ready(self, seq: Sequence) -> bool:
        """Not always: then a sequence goes on before its last token is known, and nobody may guess for it."""
        return self._rng.random() < 0.7

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [self._tree(ask) if self._ways > 1 else self._guess(ask.seq, ask.most) for ask in asks]

    def _tree(self, ask: DraftRequest) -> Seq[int]:
        most = -(-ask.most // self._ways)
        ways = [[(token + shift) % 257 for token in self._guess(ask.seq, most)] for shift in range(self._ways)]
        first, *others = self._rng.sample([way for way in ways if way] or [[]], sum(map(bool, ways)) or 1)
        return Tree.of(first, others)

    def _guess(self, seq: Sequence, most: int) -> list[int]:
        assert most > 0 and seq.state is State.RUNNING and min(seq.tokens) >= 0
        whole = [*seq.tokens[: seq.prompt_len], *naive(seq.tokens[: seq.prompt_len], seq.params)]
        known = whole[len(seq.tokens) : len(seq.tokens) + self._rng.randint(0, self._most)]
        return [token if self._rng.random() < self._right else (token + 1) % 257 for token in known]


def make(kind: str, guesser: Drafter | None, blocks: int = 64, caching: bool = True, **limits: Any) -> Engine:
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


@pytest.mark.parametrize("branches", [1, 4])
@pytest.mark.parametrize("right", HOW_RIGHT)
@pytest.mark.parametrize("kind", ["engine", "overlap"])
def test_random_workloads_equal_the_oracle(kind: str, right: float, branches: int) -> None:
    """Pools that preempt, prompts in chunks, prefixes from the cache, sequences that join and are aborted at any time, stop tokens."""
    preempted = accepted_tokens = drafted = beside = 0
    for seed in range(12):
        rng = random.Random(seed)
        budget, blocks = rng.choice([8, 16, 64]), rng.choice([14, 20, 64])
        growth = rng.choice([0.0, 0.5, 1.0])
        bounds: dict[str, Any] = {"max_num_batched_tokens": budget, "reserve_growth": growth, "speculation_branches": branches}
        engine = make(kind, Guesser(right, seed=seed, ways=branches), blocks, **bounds)
        choose = engine.scheduler.choose

        def counted(chunk: Chunk, branch: Branch | None, choose: Any = choose) -> None:
            nonlocal beside
            beside += len(chunk.branches)
            choose(chunk, branch)

        engine.scheduler.choose = counted  # type: ignore[method-assign]
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
    assert accepted_tokens < drafted or right == 1.0
    assert bool(beside) == (branches > 1)


def check_cache(engine: Engine) -> None:
    """Every block that the cache offers, or a peer may read, is of tokens that are known."""
    for seq in engine.scheduler.running:
        known = len(seq.tokens) - (seq.tokens[-1] < 0)
        assert seq.sealed * BLOCK <= known and len(seq.keys) * BLOCK <= known


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("right", HOW_RIGHT)
def test_blocks_in_the_cache_hold_what_their_keys_say(right: float, branches: int) -> None:
    """A wrong guess writes into blocks that are not full yet. Another engine without guesses computes the same bytes."""
    prompts = [[7 * i % 251 for i in range(n)] for n in (5, 9, 13)]
    pools = []
    for guesser in (Guesser(right, ways=branches), None):
        engine = make("engine", guesser, speculation_branches=branches)
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


@pytest.mark.parametrize("branches", [1, 4])
def test_nobody_loses_a_block_or_a_token_of_the_budget_for_a_guess(branches: int) -> None:
    bounds: dict[str, Any] = {"max_num_batched_tokens": 8, "reserve_growth": 0.0, "speculation_branches": branches}
    engine = make("engine", Guesser(1.0, most=30, ways=branches), blocks=6, max_num_seqs=4, **bounds)
    run, computed = engine.runner.run, [0]

    def counted(batch: Seq[Chunk]) -> list[Tokens]:
        computed.append(sum(chunk.positions for chunk in batch))
        return run(batch)

    engine.runner.run = counted  # type: ignore[method-assign]
    for name in "abc":
        engine.add(sequence(name, [ord(name), 1, 2], max_tokens=5))
    while not engine.idle:
        engine.step()
    assert engine.counts.preemptions == 0 and 3 < max(computed) <= 8


class Second(Drafter):
    """Its first choice is wrong, and so is its third; its second is right for three tokens."""

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [self._tree(ask.seq) for ask in asks]

    def _tree(self, seq: Sequence) -> Tree:
        right = [*seq.tokens[: seq.prompt_len], *naive(seq.tokens[: seq.prompt_len], seq.params)][len(seq.tokens) :][:3]
        wrong = [(token + 1) % 257 for token in right]
        return Tree.of(wrong, [right, [*wrong[:1], 5], [(token + 2) % 257 for token in right]])


@pytest.mark.parametrize("length", range(3, 12))
def test_a_branch_that_is_right_goes_on_and_the_others_leave_nothing(length: int) -> None:
    """Wherever in a block the output is. One that begins as the first is no other."""
    prompt = list(range(30, 30 + length))
    engine = make("engine", Second(), speculation_branches=4)
    engine.add(seq := sequence("a", prompt, max_tokens=40))
    engine.step()
    for _ in range(5):
        outputs = engine.step()
        assert [output.guessed for output in outputs] == [True, True, True, False] and outputs[-1].rejected == 6
        assert engine.pool.num_owned == len(seq.blocks) and seq.computed <= len(seq.blocks) * BLOCK <= seq.computed + 2 * BLOCK
        engine.pool.check()
    assert seq.tokens[length:] == expected(seq)[:21]
    counts = engine.counts
    assert counts.drafted_tokens == 3 * counts.accepted_tokens == 45
    assert counts.guesses["other", 1].drafted == 3 * counts.guesses["other", 1].accepted == 15
    engine.abort("a")
    assert engine.pool.num_owned == 0


def test_what_a_request_allows_bounds_all_guesses_of_a_step() -> None:
    for most, branches in ((3, 0), (4, 1), (5, 1), (7, 2)):
        drafter = Second()
        drafter.bound = most
        engine, found = make("engine", drafter, speculation_branches=4), list[Chunk]()
        run = engine.runner.run

        def seen(batch: Seq[Chunk], found: list[Chunk] = found, run: Callable[..., list[Tokens]] = run) -> list[Tokens]:
            found += batch
            return run(batch)

        engine.runner.run = seen  # type: ignore[method-assign]
        engine.add(sequence("a", [1, 2, 3], max_tokens=30))
        engine.step()
        engine.step()
        assert found[1].guesses == min(most, 9) and len(found[1].branches) == branches


@pytest.mark.parametrize("error", [NonFiniteLogits(["a"]), OutOfDeviceMemory("full")])
def test_a_step_that_fails_leaves_nothing_of_its_branches(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make("engine", Second(), speculation_branches=4)
    for name in "ab":
        engine.add(sequence(name, [ord(name), 2, 3], max_tokens=12))
    engine.step()

    def fails(batch: Seq[Chunk]) -> list[Tokens]:
        assert all(chunk.branches for chunk in batch)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", fails)
        assert [output.failure is not None for output in engine.step()] == [True]
    (left,) = engine.sequences.values()
    assert engine.pool.num_owned == len(left.blocks)
    drain(engine)
    assert left.tokens[3:] == expected(left) and engine.pool.num_owned == 0


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


def test_the_branch_that_says_what_was_sampled_is_the_way() -> None:
    seq = sequence("a", [1, 2, 3])
    seq.computed = 2
    chunk = Chunk(seq, 1, (8, 9), (Branch((5, 6), (0,), 0), Branch((7,), (1,), 0)))
    assert chunk.guesses == 5 and chunk.positions == 6 and chunk.tokens == [3, 8, 9, 5, 6, 7]
    assert [row.tokens[3:] for row in chunk.rows] == [[], [8], [8, 9], [5], [5, 6], [7]]
    for said, branch, rows in (
        ([4, 0, 0, 6, 0, 0], None, [0]),
        ([8, 9, 4, 6, 0, 0], None, [0, 1, 2]),
        ([5, 9, 4, 6, 4, 0], chunk.branches[0], [0, 3, 4]),
        ([5, 9, 4, 4, 4, 0], chunk.branches[0], [0, 3]),
        ([7, 9, 4, 4, 4, 0], chunk.branches[1], [0, 5]),
    ):
        assert path(chunk, [Sampled(token) for token in said]) == (branch, rows)


def test_what_is_measured_is_no_longer_than_a_sequence_may_be() -> None:
    longest = 0

    class Device(ToyRunner):
        def run(self, batch: Any) -> Any:
            nonlocal longest
            longest = max([longest, *(chunk.seq.computed + chunk.positions for chunk in batch)])
            return super().run(batch)

    runner = Device(CONFIG, "toy", BLOCK)
    runner.attach(KvPool(runner.layout, 64))
    for most in (2, 5, 20):
        longest = 0
        step_line(runner, 4, 8, most)
        assert longest <= most


@pytest.mark.parametrize(
    ("blocks", "longest", "most", "together", "token"),
    [(600, 400, 20, 8, True), (600, 400, 3, 3, True), (64, 400, 20, 1, True), (64, 100, 20, 4, False), (600, 60, 20, 8, False)],
)
def test_what_a_step_takes_beside_its_rows_is_measured_for_sequences_and_their_tokens(
    blocks: int, longest: int, most: int, together: int, token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, step, seen = 0.0, Engine.step, 0

    def slow(engine: Engine, at: float = 0.0) -> list[Output]:
        nonlocal now, seen
        now, seen = now + sum(5.0 + 0.5 * seq.prompt_len for seq in engine.sequences.values()), max(seen, len(engine.sequences))
        return step(engine, at)

    class Running(ToyRunner):
        def run(self, batch: Any) -> Any:
            nonlocal now
            now += 100.0 + sum(chunk.guesses * (2.0 + 0.25 * chunk.seq.prompt_len) for chunk in batch)
            assert all(chunk.seq.computed + chunk.positions <= longest for chunk in batch)
            return super().run(batch)

    monkeypatch.setattr(Engine, "step", slow)
    monkeypatch.setattr("baton.engine.measure_steps.time.thread_time", lambda: now)
    monkeypatch.setattr("baton.engine.measure_steps.BUDGET_S", math.inf)
    runner, line = Running(CONFIG, "toy", BLOCK), Line(((1, 100.0), (2, 100.0)))
    runner.attach(KvPool(runner.layout, blocks))
    each = (5.0, 0.5, 2.0, 0.25) if token else (5.0 + 0.5 * 48, 0.0, 2.0 + 0.25 * 48, 0.0)
    assert upkeep(runner, line, most, longest) == pytest.approx(each) and seen == together
    assert upkeep(runner, Line(((1, 1e9), (2, 2e9))), most, longest)[:3] == (0.0, 0.0, 0.0), "nothing takes less than nothing"
    monkeypatch.setattr(runner, "on_device", True)
    assert upkeep(runner, line, most, longest) == NO_UPKEEP
    monkeypatch.setattr(runner, "on_device", False)
    assert upkeep(runner, line, most, 20) == NO_UPKEEP, "no sequence is so long"
    monkeypatch.setattr("baton.engine.measure_steps.BUDGET_S", 201.0)
    seen = 0
    assert upkeep(runner, line, most, longest) and seen == together, "prompts take half of it"
    monkeypatch.setattr("baton.engine.measure_steps.BUDGET_S", 199.0)
    seen = 0
    assert upkeep(runner, line, most, longest) and seen == 1, "prompts of several take longer"
