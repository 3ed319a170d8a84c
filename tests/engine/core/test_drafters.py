"""What holds for every drafter: with it, each sequence says what it says without, down to the bits of its log-probabilities, whatever
happens to it; and nothing is remembered of one that has left. On the toy, on both engines, and with real kernels on the shipped model."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from continuation import Watched
from hypothesis import given
from hypothesis import strategies as st
from late_toy import LateEngine, LateToy
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.engine.build import build
from baton.engine.choice import load_runner
from baton.engine.core import engine as engine_module
from baton.engine.core import toy
from baton.engine.core.block_key import root_key
from baton.engine.core.drafting import FIRST_ACCEPTANCE, Chosen, Drafter, DraftRequest, Paced, Tree
from baton.engine.core.engine import Engine
from baton.engine.core.grammar import Grammar
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.lookahead import PHRASE, POOLED, Lookahead, Sight
from baton.engine.core.prediction import Prediction
from baton.engine.core.prompt_lookup import CANDIDATES, LONGEST, NOWHERE, SHORTEST, TAKEN_IN, PromptLookup, SequenceHistory
from baton.engine.core.protocol import Branch, Chunk, Tokens, accepted
from baton.engine.core.sampling import Sampled, SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import Offer, Speculation
from baton.engine.core.step_costs import Beside, Drafting, Line, OtherGuess, allot, allot_others, least_chance
from baton.engine.core.toy import ToyRunner
from baton.engine.draft_model import DraftModel
from baton.engine.gpu.overlap import UNKNOWN
from baton.engine.grammars.library import Vocabulary, compile_grammar
from baton.engine.head_drafter import HeadDrafter
from baton.engine.options import Options
from baton.engine.runner import ModelRunner
from baton.models.make_small import make_toy

TOY = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
DRAFT, HEAD = (SHIPPED.with_name(name) for name in ("tale-draft", "tale-head"))
KINDS = ("engine", "overlap", "tale")
CHEAP = Line(((1, 1.0), (2, 1.04)))  # rows: second choices are worth theirs
METHODS: dict[str, Callable[[], Drafter]] = {
    "prompt_lookup": PromptLookup,
    "lookahead": Lookahead,
    "paced": lambda: Paced(PromptLookup(), 8),
    "chosen": lambda: Chosen({"prediction": Paced(Prediction(), 8), "prompt_lookup": PromptLookup()}, "prompt_lookup", 8),
    "lookahead by choice": lambda: Chosen({"lookahead": Lookahead()}, "lookahead", 8),
    "draft": lambda: Paced(draft_model(), 8),
    "heads": lambda: Paced(head_drafter(), 8),
    "prompt_lookup, branches": lambda: Paced(PromptLookup(2), 24, CHEAP, 2),
    "draft, branches": lambda: Paced(draft_model(2), 8, CHEAP, 2),
    "heads, branches": lambda: Paced(head_drafter(2), 8, CHEAP, 2),
}
FORM = Grammar("regex", "(abba[a-c]){3,9}")
WORDS = "The cat sat on the mat. The dog sat on the mat. The cat"
STORY = "Once upon a time there was a little girl. One day the little girl"
Said = dict[str, list[Sampled]]


pytestmark = pytest.mark.usefixtures("single_thread")


@cache
def tale() -> ModelRunner:
    return load_runner(ModelRunner, SHIPPED, products="baton")


@cache
def tale_draft() -> ModelRunner:
    return load_runner(ModelRunner, DRAFT, products="baton")


def draft_model(others: int = 0) -> DraftModel:
    made = tale_draft()
    return DraftModel(ModelRunner(made.model, made.layout, made.device), 8, others)


def head_drafter(others: int = 0) -> HeadDrafter:
    return HeadDrafter.load(tale(), SHIPPED, HEAD, "auto", 8, others)


def of_a_model(method: str) -> bool:
    """The toy has no draft."""
    return method.startswith(("draft", "heads"))


@cache
def vocabulary(kind: str, toy_folder: Path) -> Vocabulary:
    if kind == "tale":
        return Vocabulary.load(SHIPPED, tale().vocab_size, sorted(tale().eos_token_ids))
    make_toy(toy_folder)
    return Vocabulary.load(toy_folder, 257, [256])


def ask(drafter: Drafter, seq: Sequence, most: int) -> Seq[int]:
    (drafts,) = drafter.propose([DraftRequest(seq, most)])
    return drafts


def make(kind: str, drafter: Drafter | None, blocks: int = 200, caching: bool = True, **limits: Any) -> Engine:
    bounds = Limits(**{"max_num_seqs": 6, "max_num_batched_tokens": 24, "reserve_growth": 0.0, **limits})
    if kind == "overlap":
        return LateEngine(LateToy(blocks, TOY, 16), bounds, 160, caching, drafter)
    made: Any = ToyRunner(TOY, "toy", 16) if kind == "engine" else Watched(tale().model, tale().layout, tale().device)
    if isinstance(drafter, Paced) and isinstance(drafter.drafter, DraftModel | HeadDrafter):
        made.pair(drafter.drafter)
    made.attach(KvPool(made.layout, blocks))
    return Engine(made, bounds, 160, caching, drafter=drafter)


def crowd(kind: str, folder: Path) -> list[Sequence]:
    """Prompts that repeat themselves, two of which begin alike, and every kind of sampling."""
    if kind == "tale":
        encode = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode
        prompts = [encode(text, add_special_tokens=False).ids for text in (WORDS * 3, WORDS * 3 + ". " + STORY, STORY)]
    else:
        prompts = [list(text.encode()) for text in (WORDS[:25] * 2, WORDS[:25] * 2 + STORY[:15], STORY[:40])]
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 0.8, "seed": 5},
        "penalties": {"temperature": 0.7, "seed": 6, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        "bias": {"temperature": 0.0, "logit_bias": {7: 100.0}, "min_tokens": 9},
        "stop": {"temperature": 1.0, "seed": 7, "stop_token_ids": frozenset(range(0, 256, 9)), "ignore_eos": False},
        "form": {"temperature": 1.0, "seed": 8, "structured": FORM, "ignore_eos": False},
    }
    seqs = []
    for name, way in ways.items():
        for i, prompt in enumerate(prompts):
            params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "logprobs": 2, **way})
            matcher = compile_grammar(vocabulary(kind, folder), FORM).matcher((), None) if params.structured else None
            seqs.append(Sequence(f"{name}{i}", list(prompt), len(prompt), params, root_key(kind), matcher=matcher))
    return seqs


def serve(engine: Engine, seqs: list[Sequence], seed: int | None = None) -> Said:
    """All at once, or with a seed: they join at any time, and a few are aborted."""
    rng, waiting, said = random.Random(seed), list(seqs), dict[str, list[Sampled]]()
    while waiting or not engine.idle:
        while waiting and (seed is None or rng.random() < 0.3):
            engine.add(waiting.pop(0))
        if seed is not None and engine.sequences and rng.random() < 0.02:
            engine.abort(rng.choice(sorted(engine.sequences)))
        for output in engine.step():
            assert output.failure is None
            if output.sampled:
                said.setdefault(output.seq.id, []).append(output.sampled)
    engine.pool.check()
    assert engine.pool.num_owned == 0
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


@pytest.fixture(scope="module", params=KINDS)
def undrafted(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Said, dict[tuple[str, int], bytes]]:
    engine = make(request.param, None)
    said = serve(engine, crowd(request.param, folder))
    return request.param, said, dict(engine.runner.seen) if isinstance(engine.runner, Watched) else {}


class Wrong(Drafter):
    """Knows what will be said, and says something else."""

    def __init__(self, said: Said) -> None:
        self._said = said

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        coming = (self._said[ask.seq.id][ask.seq.output_len :][: min(ask.most, 4)] for ask in asks)
        return [[token.token + 1 if token.token < 200 else 3 for token in tokens] for tokens in coming]


@pytest.mark.parametrize("method", METHODS)
def test_every_sequence_says_what_it_says_without(method: str, undrafted: Any, folder: Path) -> None:
    """Few blocks, small steps: preemptions, prompts in chunks, prefixes from the cache, and some are aborted. `Sampled` has the
    log-probabilities, and on the shipped model every bit of the logits is compared, too."""
    kind, wanted, logits = undrafted
    if of_a_model(method) and kind != "tale":
        pytest.skip("the toy has no draft")
    branched = "branches" in method
    preempted = hits = aborted = right = beside = taken = 0
    for seed in (1, 2):
        engine = make(kind, METHODS[method](), blocks=11 if kind == "tale" else 13, speculation_branches=3 if branched else 1)
        choose = engine.scheduler.choose

        def counted(chunk: Chunk, branch: Branch | None, choose: Any = choose) -> None:
            nonlocal beside, taken
            beside, taken = beside + len(chunk.branches), taken + (branch is not None)
            choose(chunk, branch)

        engine.scheduler.choose = counted  # type: ignore[method-assign]
        said = serve(engine, crowd(kind, folder), seed)
        for name, tokens in wanted.items():
            assert said.get(name, []) == tokens[: len(said.get(name, []))], name
            aborted += len(said.get(name, [])) < len(tokens)
        if isinstance(engine.runner, Watched):
            same = [engine.runner.seen[key] == digest for key, digest in logits.items() if key in engine.runner.seen]
            assert all(same) and len(same) > 300
        counts = engine.counts
        preempted, hits = preempted + counts.preemptions, hits + counts.hit_tokens
        right += counts.accepted_tokens
        assert counts.accepted_tokens <= counts.drafted_tokens and engine.drafter.remembered == 0
    assert preempted and hits and right and 0 < aborted < len(wanted)
    assert bool(taken) == (branched and of_a_model(method)) and (beside == 0 or (branched and kind != "overlap"))


def edited(said: list[Sampled], rng: random.Random) -> tuple[int, ...]:
    """What a client might have thought: half of it right, with a wrong token, one too many, and one missing."""
    tokens = [each.token for each in said]
    for place in sorted((rng.randrange(len(tokens)) for _ in range(3)), reverse=True):
        tokens[place : place + rng.randrange(2)] = [tokens[0]] * rng.randrange(2)
    return tuple(tokens) if rng.random() < 0.5 else tuple(reversed(tokens))


@pytest.mark.parametrize("method", ["", "none", "prompt_lookup"])
def test_a_prediction_right_or_wrong_changes_nothing_but_steps(undrafted: Any, folder: Path, method: str) -> None:
    kind, wanted, _ = undrafted
    rng, drafter = random.Random(len(method)), METHODS["chosen"]()
    seqs = crowd(kind, folder)
    for seq in seqs:
        seq.params = replace(seq.params, speculation=Speculation(method, 5, edited(wanted[seq.id], rng)))
    engine = make(kind, drafter)
    assert serve(engine, seqs, seed=None) == wanted and drafter.remembered == 0
    counts = {name: sum(one.drafted for (each, _), one in engine.counts.guesses.items() if each == name) for name in drafter.offer.methods}
    assert counts["prediction"] > 100
    assert counts["prompt_lookup"] == 0 if method == "none" else counts["prompt_lookup"] > 0 or kind == "overlap"
    assert max(place for _, place in engine.counts.guesses) <= 5


def test_each_token_says_whether_it_was_guessed_and_a_step_how_many_were_not(undrafted: Any, folder: Path) -> None:
    kind, *_ = undrafted
    engine, outputs, sizes = make(kind, PromptLookup()), [], dict[Sequence, int]()
    for seq in crowd(kind, folder):
        engine.add(seq)
    while not engine.idle:
        step = engine.step()
        outputs += [output for output in step if output.sampled]
        for seq in {output.seq for output in step}:
            mine = [output for output in step if output.seq is seq]
            assert [output.guessed for output in mine] == sorted((output.guessed for output in mine), reverse=True)
            assert not any(output.rejected for output in mine[:-1])
            sizes[seq] = max(sizes.get(seq, 0), len(mine))
    counts = engine.counts
    assert sum(output.guessed for output in outputs) == counts.accepted_tokens > 5
    assert sum(output.rejected for output in outputs) == counts.drafted_tokens - counts.accepted_tokens > 50
    assert max(sizes.values()) > 2


def test_wrong_guesses_change_nothing_but_counts(undrafted: Any, folder: Path) -> None:
    kind, wanted, _ = undrafted
    engine = make(kind, Wrong(wanted))
    assert serve(engine, crowd(kind, folder)) == wanted
    assert engine.counts.drafted_tokens > 100 and engine.counts.accepted_tokens == 0


def test_a_verifier_that_believes_is_found_out(undrafted: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the two tests above."""

    def believed(drafts: Seq[int], sampled: Seq[Sampled]) -> Tokens:
        return (*map(Sampled, drafts), sampled[-1]) if sampled else ()

    kind, wanted, _ = undrafted
    monkeypatch.setattr(engine_module, "accepted", believed)
    unformed = [seq for seq in crowd(kind, folder) if seq.matcher is None]
    said = serve(make(kind, Wrong(wanted)), unformed)
    assert sum(said[seq.id] != wanted[seq.id] for seq in unformed) > len(unformed) // 2


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    """The toy soon says one token for ever."""
    steps = {}
    for name, drafter in (("none", None), ("prompt_lookup", Paced(PromptLookup(), 8))):
        engine, steps[name] = make("engine", drafter), 0
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        engine.add(Sequence("a", [1, 2, 3], 3, params, root_key("toy")))
        while not engine.idle:
            engine.step()
            steps[name] += 1
    assert steps["none"] == 60 and steps["prompt_lookup"] < 30


@pytest.mark.parametrize("method", [method for method in METHODS if not of_a_model(method)])
@pytest.mark.parametrize("kind", ["engine", "overlap"])
def test_nothing_is_remembered_of_a_sequence_that_has_left(kind: str, method: str) -> None:
    """Hundreds finish, are aborted, or expire in the queue after a preemption."""
    drafter, rng, now = METHODS[method](), random.Random(3), 0.0
    engine = make(kind, drafter, blocks=10, max_queue=64)
    preempted = expired = most = 0
    for i in range(800):
        prompt = [rng.randrange(4) for _ in range(rng.randint(3, 30))]
        seq = Sequence(f"s{i}", prompt, len(prompt), SamplingParams(max_tokens=rng.randint(1, 12), seed=i), root_key("toy"))
        seq.expires_at = now + rng.choice([3.0, 1e9])
        engine.add(seq)
        while len(engine.sequences) > 8:
            now += 1
            outputs = engine.step(now)
            expired += sum(output.expired and output.seq.preemptions > 0 for output in outputs)
            if rng.random() < 0.1 and engine.sequences:
                engine.abort(rng.choice(sorted(engine.sequences)))
            most = max(most, drafter.remembered)
            assert drafter.remembered <= len(engine.sequences)
    serve(engine, [])
    preempted = engine.counts.preemptions
    assert drafter.remembered == 0 and most > 3 and preempted and expired


class Counted(list[int]):
    """Counts the tokens that are read."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.reads += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("symbols", [1, 2, 50, 5000])
def test_a_token_costs_as_much_at_8000_as_at_800(symbols: int) -> None:
    """From a text of one token, where everything matches everything, to one where nothing does."""
    rng, drafter = random.Random(symbols), PromptLookup()
    tokens = Counted(rng.randrange(symbols) for _ in range(8))
    seq = Sequence("a", tokens, 8, SamplingParams(max_tokens=9000), b"")
    reads = []
    for _ in range(8200):
        tokens.reads = 0
        assert len(ask(drafter, seq, 8)) in (0, 8)
        reads.append(tokens.reads)
        tokens.append(rng.randrange(symbols))
    assert max(reads[1:]) <= 2 * SHORTEST + 2 * LONGEST * CANDIDATES + 8
    early, late = sum(reads[600:1000]) / 400, sum(reads[7800:8200]) / 400
    assert late <= 1.5 * early + 2 * CANDIDATES, "more candidates at most, and of them there are no more than so many"


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    tokens = Counted(random.Random(0).randrange(5000) for _ in range(8000))
    seq, drafter = Sequence("a", tokens + tokens[10:20], 8010, SamplingParams(max_tokens=9), b""), PromptLookup()
    seq.tokens = Counted(seq.tokens)
    proposed: Seq[int] = ()
    for _ in range(8010 // TAKEN_IN + 1):
        seq.tokens.reads = 0
        proposed = ask(drafter, seq, 5)
        assert seq.tokens.reads <= SHORTEST * (TAKEN_IN + 1) + 2 * LONGEST * CANDIDATES + 5
    assert proposed == tokens[20:25]


def test_the_longest_match_counts_and_of_equal_ones_the_latest() -> None:
    rng = random.Random(9)
    for _ in range(300):
        tokens = [rng.randrange(6) for _ in range(rng.randint(2, 60))]
        history = SequenceHistory()
        history.take_in(tokens, TAKEN_IN)
        lengths = {}
        for place in range(SHORTEST, len(tokens)):
            same = next((k for k in range(place) if tokens[place - 1 - k] != tokens[-1 - k]), place)
            if same >= SHORTEST:
                lengths[place] = min(same, LONGEST)
        best = max(lengths, key=lambda place: (lengths[place], place), default=NOWHERE)
        assert history.match(tokens) == best
    assert ask(PromptLookup(), Sequence("a", [9, 1, 2, 3, 1, 2], 6, SamplingParams(max_tokens=9), b""), 7) == [3, 1, 2, 3, 1, 2, 3]


STEPS = Line(((1, 100.0), (2, 110.0), (4, 130.0), (8, 230.0), (16, 460.0), (32, 920.0)))  # from 4 rows on, a row takes its full share


def test_a_line_is_interpolated_and_goes_on() -> None:
    assert [STEPS.at(count) for count in (1, 2, 3, 6, 32, 64)] == [100, 110, 120, 180, 920, 1840]
    assert Line(((1, 3.0), (8, 3.0))).at(100) == 3.0


@pytest.mark.parametrize(("chance", "worth"), [(1.0, 8), (0.9, 3), (0.8, 3), (0.5, 2), (0.2, 1), (0.09, 0), (0.0, 0)])
def test_less_acceptance_is_worth_fewer_tokens(chance: float, worth: int) -> None:
    assert allot([(chance, chance)], [8], 1, STEPS, Drafting()) == [worth]


def test_what_steps_take_decides_how_many_guesses_there_are() -> None:
    for rows in (8, 20, 200):
        assert allot([(0.95, 0.95)] * 8, [8] * 8, rows, STEPS, Drafting()) == [0] * 8, "bound by computing"
        assert least_chance(rows, 8 * 8, STEPS, Drafting()) >= 1.0
    assert sum(allot([(0.95, 0.95)] * 8, [8] * 8, 8, STEPS, Drafting(), Beside(200.0))) == 40, (
        "a step takes much that guesses do not change"
    )
    assert sum(allot([(0.95, 0.95)] * 8, [8] * 8, 8, STEPS, Drafting(), Beside(200.0, 50.0))) == 0, "but each guess takes as much more"
    assert least_chance(8, 64, STEPS, Drafting(), Beside(230.0)) == pytest.approx(least_chance(8, 64, STEPS, Drafting()) / 2)
    assert allot([(0.9, 0.9)] * 2, [3, 1], 2, Line(((1, 100.0), (2, 100.0))), Drafting()) == [3, 1]
    flat = Line(((1, 100.0), (32, 131.0)))
    dear = [allot([(0.9, 0.9)], [8], 1, flat, Drafting(0.0, guess))[0] for guess in (0.0, 30.0, 95.0)]
    assert dear == [8, 5, 0], "a dear draft is shorter"
    assert [least_chance(1, 8, flat, Drafting(9.0, guess)) for guess in (0.0, 30.0)] == [pytest.approx(0.01), pytest.approx(0.31)]
    assert [allot([(0.6, further)], [8], 1, flat, Drafting(60.0, 20.0)) for further in (0.1, 0.9)] == [[0], [8]], (
        "one alone is not worth it"
    )


def test_rows_that_a_kernel_computes_together_are_worth_it_together() -> None:
    tiles = Line(((1, 100.0), (2, 160.0), (8, 172.0), (9, 260.0), (16, 274.0)))
    assert [tiles.further(1, most) for most in (1, 7, 15)] == [60.0, pytest.approx(72 / 7), pytest.approx(72 / 7)]
    assert tiles.further(8, 1) == 88.0 and tiles.further(8, 8) == pytest.approx(102 / 8)
    assert allot([(0.5, 0.9)], [7], 1, tiles, Drafting()) == [7], "one alone would not be"
    assert allot([(0.5, 0.9)], [1], 1, tiles, Drafting()) == [0]
    assert allot([(0.95, 0.95)], [9], 1, tiles, Drafting()) == [7], "two of the next tile are not"
    assert allot([(0.95, 0.95)], [15], 1, tiles, Drafting()) == [15], "all of it are"
    assert allot([(0.4, 0.1)], [7], 1, tiles, Drafting()) == [0], "those that follow are too unlikely"
    likely = [(0.9, 0.9)], [7], 1, tiles, Drafting()
    assert allot_others([OtherGuess(0, (0.9, 0.95), 8)], *likely, 0.0) == [8] and allot_others(
        [OtherGuess(0, (0.9, 0.95), 1)], *likely, 0.0
    ) == [0]
    assert least_chance(1, 1, tiles, Drafting()) == 0.6 and least_chance(1, 7, tiles, Drafting()) < 0.11


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 5)), min_size=1, max_size=3), st.data())
def test_no_other_number_of_the_likeliest_guesses_yields_more_tokens_a_second(
    asked: list[tuple[float, float, int]], data: st.DataObject
) -> None:
    counts = sorted({1} | data.draw(st.sets(st.integers(2, 24), min_size=1)))
    more = data.draw(st.lists(st.floats(0, 20), min_size=len(counts), max_size=len(counts)))
    line = Line(tuple((count, 10.0 + sum(more[: k + 1])) for k, count in enumerate(counts)))
    drafting, rows = Drafting(0.0, data.draw(st.floats(0, 3))), len(asked)
    beside = Beside(data.draw(st.floats(0, 30)), data.draw(st.floats(0, 3)))
    likeliest = sorted((first * further**k for first, further, most in asked for k in range(most)), reverse=True)
    rates = [
        (rows + sum(likeliest[:n])) / (line.at(rows + n) + beside.step + n * (drafting.guess + beside.guess))
        for n in range(len(likeliest) + 1)
    ]
    found = sum(allot([(first, further) for first, further, _ in asked], [most for *_, most in asked], rows, line, drafting, beside))
    assert rates[found] == pytest.approx(max(rates))


def test_other_choices_are_verified_where_they_bring_more_tokens_a_second() -> None:
    flat, steep = Line(((1, 100.0), (32, 131.0))), Line(((1, 100.0), (2, 125.0)))
    chances, dear, second = [(0.7, 0.7)], Drafting(0.0, 20.0), [OtherGuess(0, (0.12, 0.7), 1)]
    assert allot_others(second, chances, [1], 1, steep, dear, 5.0) == [0], "a row is a quarter of a step"
    assert allot_others(second, chances, [2], 1, flat, dear, 5.0) == [1]
    assert allot_others(second, chances, [2], 1, flat, dear, 50.0) == [0], "dear to begin"
    assert allot_others(second, chances, [1], 1, steep, dear, 5.0, Beside(300.0)) == [1], "but a step takes much that it does not change"
    assert allot_others(second, chances, [0], 1, flat, dear, 0.0) == [0], "there is no other without a first"
    others = [OtherGuess(0, (0.2, 0.7), 3), OtherGuess(1, (0.5, 0.1), 4), OtherGuess(0, (0.01, 0.7), 3)]
    assert allot_others(others, [(0.7, 0.7), (0.5, 0.1)], [2, 2], 2, flat, Drafting(), 0.0) == [3, 2, 0]


@pytest.mark.parametrize("chances", [(0.2,), (0.5,), (0.7,), (0.85,), (0.95,), (0.3, 0.9, 0.6), (0.8, 0.8, 0.1)])
def test_no_other_choice_gives_more_tokens_a_second(chances: tuple[float, ...]) -> None:
    step, most = Line(((1, 100.0), (2, 104.0), (4, 114.0), (8, 150.0), (16, 300.0))), 8

    def rate(counts: Seq[int], drafting: Drafting) -> float:
        tokens = sum(chance**i for chance, count in zip(chances, counts, strict=True) for i in range(count + 1))
        drafts = sum(counts) * drafting.guess + sum(count > 0 for count in counts) * drafting.begin
        return tokens / (step.at(len(chances) + sum(counts)) + drafts)

    for drafting in (Drafting(), Drafting(0.0, 5.0), Drafting(0.0, 25.0), Drafting(30.0, 5.0)):
        best = max(rate(counts, drafting) for counts in product(range(most + 1), repeat=len(chances)))
        found = allot([(chance, chance) for chance in chances], [most] * len(chances), len(chances), step, drafting)
        assert rate(found, drafting) >= best * (0.97 if drafting.begin else 1 - 1e-9)


class Always(Drafter):
    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [[1] * ask.most for ask in asks]


def paced_ask(paced: Drafter, seq: Sequence, rows: int = 1) -> Seq[int]:
    (most,) = paced.most([seq], rows) or (0,)
    return ask(paced, seq, most) if most else ()


class Ways(Always):
    """Knows a second choice."""

    other_tokens = 1

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [Tree.of([1] * ask.most, [[2]]) if ask.others else [1] * ask.most for ask in asks]


def test_whether_second_choices_are_verified_follows_from_how_often_they_were_right() -> None:
    """Counted whether or not they were verified, but more rarely where none is worth it; a new sequence begins with what is usual."""
    asked, rng = 0, random.Random(4)
    paced = Paced(Ways(), 8, Line(((1, 100.0), (2, 105.0))), 1, 5.0)

    def verified(name: str, truth: int, steps: int) -> list[int]:
        nonlocal asked
        seq, found, asked = Sequence(name, [1, 2, 3], 3, SamplingParams(max_tokens=9), b""), [], 0
        for _ in range(steps):
            drafts = paced_ask(paced, seq)
            asked += isinstance(drafts, Tree)
            found.append(len(drafts.others) if isinstance(drafts, Tree) else 0)
            seq.tokens.append(1)
            wrong = rng.random() < 0.4
            paced.study(seq, drafts, [Sampled(truth if wrong else 1)])
            paced.observe(seq, 1, int(not wrong))
        paced.forget(seq)
        return found

    right = verified("right", 2, 900)
    assert right[0] == 0 and sum(right[-20:]) == 20 and asked > 200
    wrong = verified("wrong", 3, 600)
    assert wrong[0] == 1 and sum(wrong[-20:]) == 0 and asked < 300
    assert verified("new", 3, 1) == [0] and paced.remembered == 0


def test_the_second_match_goes_on_with_another_token() -> None:
    tokens = [9, 1, 2, 5, 6, 8, 1, 2, 7, 3, 9, 1, 2, 4, 4, 9, 1, 2]
    seq = Sequence("a", tokens, len(tokens), SamplingParams(max_tokens=9), b"")
    for most in (1, 3):
        (tree,) = PromptLookup(most).propose([DraftRequest(seq, 3, True)])
        assert isinstance(tree, Tree) and tuple(tree) == (4, 4, 9)
        assert tree.others == ((5, 6, 8), (7, 3, 9))[:most], "the longest match first"


def test_bad_drafts_end_and_are_tried_ever_more_rarely_and_good_ones_grow() -> None:
    seq, paced = Sequence("a", [1, 2, 3], 3, SamplingParams(max_tokens=9), b""), Paced(Always(), 8)
    asked = []
    for _ in range(1000):
        asked.append(len(drafts := paced_ask(paced, seq)))
        if drafts:
            paced.observe(seq, len(drafts), 0)
        seq.tokens.append(1)
    tries = [at for at, count in enumerate(asked) if count and at > 20]
    assert asked[0] == 2 and max(asked[20:]) == 1 and 5 <= len(tries) <= 1000 * 0.01 / 0.15
    assert tries[-1] - tries[-2] >= 4 * (tries[0] - 20)
    while not paced_ask(paced, seq):
        seq.tokens.append(1)
    for _ in range(60):
        seq.tokens.append(1)
        paced.observe(seq, 4, 4)
        assert paced_ask(paced, seq), "a trial that was right is followed by another one at once"
    assert len(paced_ask(paced, seq)) == 8


def test_a_new_sequence_is_expected_to_be_like_the_others() -> None:
    paced, least = Paced(Always(), 8), 20
    for i in range(40):
        seq, drafted = Sequence(f"s{i}", [1, 2, 3], 3, SamplingParams(max_tokens=9), b""), 0
        for _ in range(40):
            if drafts := paced_ask(paced, seq):
                drafted += 1
                paced.observe(seq, len(drafts), 0)
            seq.tokens.append(1)
        paced.forget(seq)
        least = min(least, drafted)
    assert least <= 2 and drafted <= 2


class Silent(Drafter):
    """Has a guess for few, and counts its questions."""

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        self.asked += len(asks)
        return [[1] if len(ask.seq.tokens) > 400 else () for ask in asks]


def test_who_has_no_answer_is_asked_more_rarely_and_soon_again_if_he_has_one() -> None:
    drafter = Silent()
    seq, paced, before = Sequence("a", [1, 2, 3], 3, SamplingParams(max_tokens=9), b""), Paced(drafter, 8), 0
    for _ in range(397):
        paced_ask(paced, seq)
        seq.tokens.append(1)
    assert 397 / 8 <= drafter.asked <= 397 / 8 + 5
    for _ in range(16):
        seq.tokens.append(1)
        if paced_ask(paced, seq):
            paced.observe(seq, 1, 1)
            before += 1
    assert before >= 8


def test_where_no_guess_is_worth_its_row_nobody_is_asked_nor_known() -> None:
    paced = Paced(drafter := Silent(), 8, STEPS)
    seqs = [Sequence(f"s{i}", [1, 2, 3], 3, SamplingParams(max_tokens=9), b"") for i in range(20)]
    dear = Paced(drafter, 8, Line(((1, 100.0), (2, 230.0))))
    assert dear.most(seqs, 20) == () and dear.remembered == 0
    assert not any(paced.most(seqs, 20)), "a row takes its full share: only a guess that is surely right is worth it"
    assert drafter.asked == 0


def test_what_comes_after_the_first_wrong_guess_says_nothing() -> None:
    for drafted in (1, 8):
        seq, paced = Sequence("a", [1, 2, 3], 3, SamplingParams(max_tokens=9), b""), Paced(Always(), 8)
        for _ in range(4):
            paced.observe(seq, drafted, 0)
        assert paced._pace(seq).further == FIRST_ACCEPTANCE > paced._pace(seq).first
        paced.observe(seq, 8, 3)
        assert paced._pace(seq).further == pytest.approx((FIRST_ACCEPTANCE * 49 / 64 + 15 / 64) * 7 / 8)


def in_flight(drafter: Drafter | None, count: int = 1, ways: Seq[Any] = ({"temperature": 0.0},), **limits: Any) -> int:
    """How often a sequence of 60 tokens goes on before its last token is known."""
    engine, found = make("overlap", drafter, **limits), 0
    for i in range(count):
        params = SamplingParams(max_tokens=60, seed=i, ignore_eos=True, **ways[i % len(ways)])
        engine.add(Sequence(f"s{i}", [i, 2, 3], 3, params, root_key("toy")))
    while not engine.idle:
        engine.step()
        found += sum(seq.tokens[-1] == UNKNOWN for seq in engine.scheduler.running)
    return found


def test_with_a_step_in_flight_only_those_wait_for_whom_there_is_a_guess() -> None:
    assert in_flight(None) == 59 and in_flight(Always()) == 0
    assert in_flight(Paced(Always(), 8)) > 40, "all but those in which guesses are tried"
    assert in_flight(Always(), 4, speculation_batch_tokens=5) == 0
    assert in_flight(Always(), 4, speculation_batch_tokens=4) == 4 * 59, "too many run"
    drawn = {"temperature": 1.0}
    assert in_flight(PromptLookup(), ways=[drawn]) > 50, "the toy draws of 257 tokens: next to nothing stands there before"
    assert in_flight(PromptLookup()) < 30, "greedy, it goes round"
    both = in_flight(PromptLookup(), 2, [drawn, {"temperature": 0.0}])
    assert 50 < both < 59 + 30, "and neither waits for the other"


def test_a_large_step_gets_no_guesses_and_none_grows_beyond_the_bound() -> None:
    for bound, drafted in ((4, False), (7, True)):
        engine = make("engine", Always(), speculation_batch_tokens=bound)
        for i in range(4):
            engine.add(Sequence(f"s{i}", [i, 2, 3], 3, SamplingParams(max_tokens=20, ignore_eos=True), root_key("toy")))
        while not engine.idle:
            plain = sum(seq.decoding for seq in engine.scheduler.running) == len(engine.scheduler.running) == 4
            before = engine.counts.drafted_tokens
            engine.step()
            assert not plain or engine.counts.drafted_tokens - before <= max(0, bound - 4)
            drafted_together = engine.counts.drafted_tokens if plain else 0
            assert drafted or drafted_together == 0
        assert engine.counts.drafted_tokens > 0 or not drafted


def test_an_engine_drafts_if_the_options_say_so(tmp_path: Path) -> None:
    make_toy(tmp_path)
    options = Options.of(tmp_path, kv_memory_mib=1, max_model_len=128)
    assert type(build(options.but(predictions=False)).engine.drafter) is Drafter
    assert build(options).engine.drafter.offer.methods == ("none", "prediction")
    engine = build(options.but(speculation="prompt_lookup", speculation_tokens=3)).engine
    assert engine.drafter.offer == Offer(("prompt_lookup", "prediction"), 3) and engine.scheduler.limits.speculation_batch_tokens == 256
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    engine.add(Sequence("a", [1, 2, 3], 3, params, root_key("toy")))
    while not engine.idle:
        assert len(engine.step()) <= 4
    assert engine.counts.accepted_tokens > 20


class Studied(Drafter):
    """Guesses one wrong token after another, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Seq[int], Seq[Sampled]]] = []

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [[3, 5, 7][: ask.most] for ask in asks]

    def study(self, seq: Sequence, drafts: Seq[int], sampled: Seq[Sampled]) -> None:
        self.told.append((len(seq.tokens), drafts, sampled))


@pytest.mark.parametrize("kind", ["engine", "overlap"])
def test_what_is_said_after_a_wrong_guess_is_studied(kind: str) -> None:
    """As if the guesses had been known."""
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=12, temperature=1.0, seed=4, ignore_eos=True)
    drafter = Studied()
    engine, seq = make(kind, Paced(drafter, 3)), Sequence("a", prompt, 3, params, root_key("toy"))
    engine.add(seq)
    while not engine.idle:
        engine.step()
    for known, drafts, sampled in drafter.told:
        texts = [[*seq.tokens[:known], *drafts[:count]] for count in range(len(drafts) + 1)]
        after = [toy.sample(16 * sum((t + 1) * (p + 1) for p, t in enumerate(text)), params, len(text), 257) for text in texts]
        assert list(sampled) == after
    assert len(drafter.told) > 1 and any(len(drafts) > 1 for _, drafts, _ in drafter.told)


def test_a_phrase_that_was_said_after_wrong_guesses_becomes_a_draft() -> None:
    """A target that counts. What follows 20 is known, from a guess that was wrong at its place, before the text is there."""
    tokens, drafter = [20, 30, 10], Lookahead()
    seq, right = Sequence("a", tokens, 3, SamplingParams(max_tokens=99), b""), dict[int, int]()
    while tokens[-1] < 24:
        drafts = ask(drafter, seq, 6)
        said = [Sampled(token + 1) for token in (tokens[-1], *drafts)]
        drafter.study(seq, drafts, said)
        kept = accepted(drafts, said)
        right[tokens[-1]] = len(kept) - 1
        tokens += [token.token for token in kept]
    assert tokens[3:] == list(range(11, 11 + len(tokens) - 3))
    assert right[11] == 0 and right[20] == PHRASE - 1


def test_the_pool_is_bounded_and_forgets_the_oldest() -> None:
    rng, sight, tokens = random.Random(1), Sight(), [1, 2, 3]
    for _ in range(3 * POOLED):
        drafts = sight.guess(tokens, 3)
        sight.learn(tokens, drafts, [Sampled(rng.randrange(1 << 30)) for _ in range(4)])
        tokens.append(rng.randrange(1 << 30))
        assert len(sight.pool) <= POOLED and len(sight.window) <= 4
        assert all(len(phrase) == PHRASE - 1 for phrase in sight.pool.values())
    assert len(sight.pool) == POOLED and tokens[-PHRASE - 1] in sight.pool
