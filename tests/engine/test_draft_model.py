"""A model that drafts: its keys and values are one unit with those of the model that it drafts for, and one that does not fit is refused.
That the output stays the same, `core/test_drafters` shows."""

import json
import logging
import random
import shutil
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_guesses import guess_always
from tokenizers import Tokenizer
from torch import Tensor

from baton.cli.up import SHIPPED
from baton.engine.build import BuildError, build, pool_bytes
from baton.engine.choice import load_runner
from baton.engine.core.block_key import root_key
from baton.engine.core.drafting import Drafter, DraftRequest, Tree
from baton.engine.core.engine import Engine, Output
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import Sequence, State
from baton.engine.draft_model import DraftModel
from baton.engine.measure_steps import BUDGET_S, measured
from baton.engine.model.kv_views import views
from baton.engine.options import Options
from baton.engine.runner import ForwardPart, ModelRunner
from baton.models.make_small import make_toy

DRAFT = SHIPPED.with_name("tale-draft")
BLOCK, MOST = 16, 4
STORY = "Once upon a time there was a little girl. One day the little girl went to the park with her dog."


pytestmark = pytest.mark.usefixtures("single_thread")


@cache
def loaded(folder: Path) -> ModelRunner:
    return load_runner(ModelRunner, folder, products="baton", block_size=BLOCK)


def fresh(folder: Path) -> ModelRunner:
    made = loaded(folder)
    return ModelRunner(made.model, made.layout, made.device)


class Sometimes(DraftModel):
    """Often asked for nothing, and for a long time: its KV falls behind. It counts the positions that it computes."""

    def __init__(self) -> None:
        super().__init__(fresh(DRAFT), MOST)
        self.rng, self.computed, run = random.Random(4), 0, self._runner.logits_of

        def logits_of(parts: Seq[ForwardPart]) -> Any:
            self.computed += sum(part.span.n for part in parts)
            return run(parts)

        self._runner.logits_of = logits_of  # type: ignore[method-assign]

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        asked = [ask for ask in asks if len(ask.seq.tokens) // 24 % 2 and self.rng.random() < 0.7]
        found = dict(zip((ask.seq for ask in asked), super().propose(asked) if asked else [], strict=True))
        return [found.get(ask.seq, ()) for ask in asks]


def make(drafter: DraftModel, blocks: int = 60) -> Engine:
    runner = fresh(SHIPPED)
    runner.pair(drafter)
    runner.attach(KvPool(runner.layout, blocks))
    return Engine(runner, Limits(max_num_seqs=4, max_num_batched_tokens=24, reserve_growth=0.0), 160, drafter=drafter)


def prompt(words: int = 14) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode(STORY, add_special_tokens=False).ids
    return ids[: 2 * words]


def sequence(name: str, tokens: list[int], hold: bool = False, prompt_len: int = 0, **params: Any) -> Sequence:
    values: dict[str, Any] = {"max_tokens": 90, "temperature": 0.0, "ignore_eos": True, **params}
    return Sequence(name, list(tokens), prompt_len or len(tokens), SamplingParams(**values), root_key("tale"), hold)


def finish(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def draft_kv(engine: Engine) -> Tensor:
    """`[N, L, P, Hkv, bs, D]`."""
    return views(engine.runner.layout, torch.from_numpy(engine.runner.pool.array))["draft"]  # type: ignore[attr-defined]


def reference(tokens: list[int]) -> Tensor:
    """The draft's KV of these tokens, computed at once and without a target: `[L, P, Hkv, tokens, D]`."""
    runner = fresh(DRAFT)
    runner.attach(KvPool(runner.layout, 12))
    seq = sequence("a", tokens)
    seq.blocks = list(range(12))
    runner.run_logits([Chunk(seq, len(tokens))])
    kv = views(runner.layout, torch.from_numpy(runner.pool.array))["kv"]
    return kv.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, : len(tokens)]


def wrong_blocks(engine: Engine, seq: Sequence) -> int:
    """How many blocks that anybody may find have another draft KV than their tokens have."""
    blocks, expected = engine.pool.match(seq.keys), reference(seq.tokens)
    assert len(blocks) > 2
    found, wrong = draft_kv(engine), 0
    for i, block in enumerate(blocks):
        wrong += not torch.allclose(found[block], expected[:, :, :, i * BLOCK : (i + 1) * BLOCK], atol=1e-3)
    engine.pool.release(blocks)
    return wrong


def crowded(engine: Engine) -> list[Sequence]:
    """Sequences that preempt each other, begin alike, and are drawn or not."""
    seqs = [sequence(f"s{i}", prompt(9 + i % 4), temperature=i % 2 * 0.9, seed=i, max_tokens=70 + i) for i in range(7)]
    for seq in seqs:
        engine.add(seq)
    finish(engine)
    return seqs


def test_a_block_that_can_be_found_has_the_kv_of_both() -> None:
    engine = make(Sometimes(), blocks=16)
    seqs = crowded(engine)
    assert engine.counts.preemptions > 0 and engine.counts.accepted_tokens > 20
    assert sum(wrong_blocks(engine, seq) for seq in seqs[-2:]) == 0


def test_blocks_that_count_without_their_draft_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    made = Scheduler.__init__

    def careless(self: Scheduler, *arguments: Any) -> None:
        made(self, *arguments[:-1])

    monkeypatch.setattr(Scheduler, "__init__", careless)
    monkeypatch.setattr(DraftModel, "follow", lambda *given: None)
    engine = make(Sometimes())
    engine.add(seq := sequence("a", prompt()))
    finish(engine)
    assert wrong_blocks(engine, seq) > 0


def test_a_prompt_that_is_handed_over_is_drafted_from_at_once() -> None:
    """All bytes of its blocks move, whoever moves them, and the draft computes no position of the prompt again."""
    ours, theirs = make(Sometimes()), make(DraftModel(fresh(DRAFT), MOST))
    ours.add(held := sequence("a", prompt(), hold=True))
    while held.state is not State.HELD:
        ours.step()
    taken = sequence("a", prompt())
    assert theirs.reserve(taken)
    theirs.runner.pool.array[taken.blocks[: len(held.blocks)]] = ours.runner.pool.array[held.blocks]  # type: ignore[attr-defined]
    theirs.arrive(taken, held.computed)
    theirs.adopt(taken, held.tokens[-1])
    drafter = theirs.drafter
    counted = Sometimes()
    assert isinstance(drafter, DraftModel)
    drafter._runner.logits_of, before = counting(drafter._runner.logits_of, counted), counted.computed  # type: ignore[method-assign]
    theirs.step()
    assert theirs.counts.drafted_tokens == MOST and counted.computed - before <= MOST
    finish(theirs)
    alone = make(Sometimes())
    alone.add(whole := sequence("a", prompt()))
    finish(alone)
    assert taken.tokens == whole.tokens and theirs.counts.accepted_tokens > 30


def counting(run: Any, into: Sometimes) -> Any:
    def logits_of(parts: Seq[ForwardPart]) -> Any:
        into.computed += sum(part.span.n for part in parts)
        return run(parts)

    return logits_of


@pytest.mark.parametrize(("dtype", "rounded"), [("bfloat16", "auto"), ("float32", "int8"), ("float32", "int4")])
def test_the_output_is_the_same_in_every_precision(dtype: str, rounded: str) -> None:
    """Also where model and draft are rounded, as chains and with branches; float32 is in `core/test_drafters`."""
    target, small = (
        load_runner(ModelRunner, folder, products="baton", block_size=BLOCK, dtype=dtype, weight_dtype=rounded)
        for folder in (SHIPPED, DRAFT)
    )
    said = []
    for drafter in (None, DraftModel(small, MOST), DraftModel(small, 2, 2)):
        runner = ModelRunner(target.model, target.layout, target.device)
        if drafter is not None:
            runner.pair(drafter)
        runner.attach(KvPool(runner.layout, 40))
        engine = Engine(runner, Limits(max_num_seqs=4, speculation_branches=3), 160, drafter=Sparing(drafter) if drafter else None)
        seqs = [sequence(f"s{i}", prompt(9 + i), temperature=i % 2 * 0.8, seed=i, max_tokens=60, logprobs=1) for i in range(4)]
        for seq in seqs:
            engine.add(seq)
        sampled = [output.sampled for output in drained(engine)]
        said.append(([seq.tokens for seq in seqs], sorted(map(repr, sampled))))
        if drafter is not None:
            assert said[0] == said[-1] and engine.counts.accepted_tokens > 60
    assert engine.counts.guesses["other", 1].drafted > engine.counts.guesses["other", 2].drafted, "branches have one token"


class Sparing(Drafter):
    """Asks for fewer guesses than there may be: there is room for branches."""

    def __init__(self, drafter: DraftModel) -> None:
        self._drafter = drafter
        self.observe = drafter.observe  # type: ignore[method-assign]

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return self._drafter.propose([replace(ask, most=min(ask.most, self._drafter.bound), others=True) for ask in asks])


def drained(engine: Engine) -> Iterator[Output]:
    while not engine.idle:
        yield from engine.step()


@pytest.mark.parametrize("way", [{}, {"temperature": 0.8, "top_k": 40, "seed": 3}])
def test_several_steps_in_one_call_guess_what_single_steps_guess(way: dict[str, Any]) -> None:
    """One sequence, whose last guess often waits to be computed, and several, which want unequal numbers."""
    counted = []
    for chained in (True, False):
        engine = make(drafter := DraftModel(fresh(DRAFT), MOST))
        assert drafter._steps is not None
        calls, guesses = [0], drafter._steps.guesses
        made = drafter._steps

        def counting(*arguments: Any, calls: list[int] = calls, guesses: Any = guesses) -> Any:
            calls[0] += (found := guesses(*arguments)) is not None
            return found

        made.guesses = counting  # type: ignore[assignment,method-assign]
        drafter._steps = made if chained else None
        said = []
        for crowd in (1, 3):
            seqs = [sequence(f"{crowd}{i}", prompt(8 + i), max_tokens=60 + 3 * i, **way) for i in range(crowd)]
            for seq in seqs:
                engine.add(seq)
            finish(engine)
            said += [seq.tokens for seq in seqs]
        assert (calls[0] > 20) == chained
        places = {(size, place) for size, place, *_ in made._recordings}
        waiting = {first for size, _, first, _ in made._recordings if size == 1}
        assert len(made._recordings) == len(places) + len(waiting) - 1 or not chained, "each step is recorded once"
        counted.append((said, engine.counts))
    assert counted[0] == counted[1] and counted[0][1].accepted_tokens > 100


def test_other_choices_are_the_next_likeliest_however_steps_are_computed() -> None:
    """Recorded with the first step, from the logits of one step, and as what is drawn if what was drawn is forbidden."""
    told = []
    for ways in ("recorded", "single", "drawn"):
        make(drafter := DraftModel(fresh(DRAFT), MOST, 3))
        drafter._steps = drafter._steps if ways == "recorded" else None
        seqs = [sequence(f"s{i}", prompt(5 + i), min_tokens=int(ways == "drawn")) for i in range(3)]
        for i, seq in enumerate(seqs):
            seq.blocks, seq.drafted = [2 * i, 2 * i + 1], 0
        for asked in (seqs, seqs[:1]):
            trees = drafter.propose([DraftRequest(seq, 2, True) for seq in asked])
            assert all(isinstance(tree, Tree) and len({tree[0], *(other[0] for other in tree.others)}) == 4 for tree in trees)
            told.append([(tuple(tree), tree.others) for tree in trees if isinstance(tree, Tree)])
    assert told[:2] == told[2:4] == told[4:]


def test_a_fork_goes_on_with_both() -> None:
    engine = make(DraftModel(fresh(DRAFT), MOST))
    engine.add(parent := sequence("parent", prompt()))
    while parent.output_len < 9:
        engine.step()
    child = sequence("child", parent.tokens, prompt_len=parent.prompt_len)
    assert engine.fork(parent, child) and child.drafted == parent.drafted > parent.prompt_len
    finish(engine)
    assert child.tokens == parent.tokens and wrong_blocks(engine, child) == 0


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A copy of the model, and of its draft beside it, without checksums."""
    for name, folder in (("m", SHIPPED), ("m-draft", DRAFT)):
        shutil.copytree(folder, tmp_path / name, ignore=shutil.ignore_patterns("*.md", "*.png", "SHA256SUMS", "results.json"))
    return tmp_path / "m"


def options(folder: Path, **keys: Any) -> Options:
    return Options.of(folder, **{"speculation": "draft", "kv_memory_mib": 8, "max_model_len": 256, "products": "baton", **keys})


def alter(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_what_is_measured_grows_with_the_count_and_takes_a_bounded_time() -> None:
    sizes: list[int] = []
    assert [count for count, _ in measured(sizes.append, 20).points] == [1, 2, 3, 4, 6, 8, 16]
    seconds = [seconds for _, seconds in measured(lambda count: time.sleep(0.01 if count == 1 else 0.0), 32, time.perf_counter).points]
    assert seconds == sorted(seconds) and seconds[0] >= 0.01
    slow: list[int] = []

    def wait(count: int) -> None:
        slow.append(count)
        time.sleep(BUDGET_S)

    assert [count for count, _ in measured(wait, 64, time.perf_counter).points] == [1, 8] and len(slow) == 4


def test_the_draft_beside_the_model_is_taken_and_has_its_part_of_the_pool(
    pair: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess_always(monkeypatch)
    caplog.set_level(logging.INFO)
    built = build(options(pair, draft_dtype="int8"))
    (table,) = (json.loads(line.partition(": ")[2]) for line in caplog.messages if line.startswith("how many guesses"))
    assert {"step", "draft", "drafts", "beside"} == table.keys() and all(seconds >= 0 for seconds in table.pop("beside"))
    assert all(seconds > 0 for line in table.values() for _, seconds in line)
    runner = built.engine.runner
    assert runner.layout.draft is not None and runner.layout.draft.fingerprint != loaded(DRAFT).layout.model_fingerprint
    assert runner.pool.nbytes == pool_bytes(options(pair)) and built.engine.runner.layout.views["draft"].shape == (2, 2, 1, BLOCK, 32)
    engine = built.engine
    engine.add(sequence("a", prompt()))
    finish(engine)
    assert engine.counts.accepted_tokens > 30


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"draft_model": "nowhere"}, "engine.draft_model: .*nowhere"),
        ({"speculation": "none", "draft_model": "m-draft"}, "engine.draft_model: needs engine.speculation draft"),
        ({"speculation": "lookahead", "draft_dtype": "int8"}, "engine.draft_dtype: needs engine.speculation draft"),
        ({"device": "cuda", "speculation": "heads"}, "engine.speculation: heads needs engine.device cpu"),
        ({"kind": "vllm", "speculation": "prompt_lookup", "speculation_branches": 2}, "engine.speculation_branches: .*engine.kind baton"),
        ({"speculation": "lookahead", "speculation_branches": 2}, "engine.speculation_branches: 2 needs .* not lookahead"),
        ({"speculation": "none", "speculation_branches": 4}, "engine.speculation_branches: 4 needs .* not none"),
        ({"compiled": False, "speculation_branches": 2}, "engine.speculation_branches: this arithmetic"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(pair: Path, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(BuildError, match=named):
        build(options(pair, **keys))


def test_a_draft_that_does_not_fit_the_model_is_refused_by_name(pair: Path, tmp_path: Path) -> None:
    draft = pair.with_name("m-draft")
    tokenizer, config = (draft / "tokenizer.json").read_bytes(), (draft / "config.json").read_text()

    def refused(named: str) -> None:
        with pytest.raises(BuildError, match=f"engine.draft_model: .*{named}"):
            build(options(pair))

    (draft / "tokenizer.json").write_bytes(tokenizer + b" ")
    refused("another tokenizer")
    (draft / "tokenizer.json").write_bytes(tokenizer)
    alter(draft / "config.json", vocab_size=2047)
    refused("vocabulary of 2047 .* 2048")
    (draft / "config.json").write_text(config)
    alter(draft / "config.json", max_position_embeddings=255)
    refused("context of 255 .* 256")
    (draft / "config.json").write_text(config)
    (draft / "model.safetensors").unlink()
    refused("safetensors")
    shutil.rmtree(draft)
    refused("there is no .*m-draft")
    make_toy(tmp_path / "toy")
    with pytest.raises(BuildError, match=r"engine\.speculation: draft"):
        build(Options.of(tmp_path / "toy", speculation="draft", kv_memory_mib=1, max_model_len=128))
