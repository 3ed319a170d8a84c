"""All at once, with real kernels: rounded KV, a draft or a head with branches, tiers under a pool that preempts, forks, beams, and aborts
at any time. Each sequence says what it says without guesses and tiers, down to the bits of its log-probabilities, and nothing is left."""

import random
import time
from collections import deque
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.engine.choice import load_runner
from baton.engine.core.beams import Beams
from baton.engine.core.block_key import root_key
from baton.engine.core.colder import Colder, TierPolicy
from baton.engine.core.drafting import Drafter, DraftRequest
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import Sequence
from baton.engine.draft_model import DraftModel
from baton.engine.head_drafter import HeadDrafter
from baton.engine.runner import ModelRunner
from baton.tiers.memory_store import MemoryStore
from baton.tiers.tier import Bounds
from baton.tiers.tiers import Tiers

DRAFT, HEAD = (SHIPPED.with_name(name) for name in ("tale-draft", "tale-head"))
BLOCK, MOST, OTHERS, WITHIN_S = 8, 6, 2, 60.0
TEXTS = (
    "The cat sat on the mat. The dog sat on the mat. The cat",
    "The cat sat on the mat. The dog sat on the mat. The cat. Once upon a time there was a little girl.",
    "Tom had a red ball. He liked to play with the red ball in the park. One day Tom",
)
Said = dict[str, list[Any]]


pytestmark = pytest.mark.usefixtures("single_thread")


@cache
def loaded(folder: Path, dtype: str, kv_dtype: str) -> ModelRunner:
    return load_runner(ModelRunner, folder, products="baton", block_size=BLOCK, dtype=dtype, kv_dtype=kv_dtype)


def fresh(folder: Path, dtype: str, kv_dtype: str = "auto") -> ModelRunner:
    made = loaded(folder, dtype, kv_dtype)
    return ModelRunner(made.model, made.layout, made.device)


class Eager(Drafter):
    """Asks another drafter most of the time, whatever its guesses are worth, and leaves room for branches."""

    def __init__(self, inner: Drafter, rng: random.Random) -> None:
        self.inner, self.rng, self.bound = inner, rng, MOST + OTHERS
        self.study, self.observe, self.forget = inner.study, inner.observe, inner.forget  # type: ignore[method-assign]

    @property
    def remembered(self) -> int:
        return self.inner.remembered

    def most(self, seqs: Seq[Sequence], rows: int) -> Seq[int]:
        return [self.bound if self.rng.random() < 0.8 else 0 for _ in seqs]

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return self.inner.propose([DraftRequest(ask.seq, max(1, ask.most - OTHERS), True) for ask in asks])


class Reports:
    """Implements `baton.engine.core.colder.Report`, for an engine without a loop."""

    def __init__(self) -> None:
        self.told: deque[tuple[str, tuple[Any, ...]]] = deque()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.told.append((name, arguments))

    def tell(self, colder: Colder) -> None:
        while self.told:
            name, arguments = self.told.popleft()
            getattr(colder, name)(*arguments)


def engine_of(dtype: str, method: str, rng: random.Random, blocks: int, units: int) -> tuple[Engine, Reports]:
    runner, reports = fresh(SHIPPED, dtype, "int8"), Reports()
    inner: Any = None
    if method:
        draft = method == "draft"
        inner = DraftModel(fresh(DRAFT, dtype), MOST, OTHERS) if draft else HeadDrafter.load(runner, SHIPPED, HEAD, "auto", MOST, OTHERS)
        runner.pair(inner)
    runner.attach(KvPool(runner.layout, blocks))
    runner.pool.array[:] = 0x7F  # nothing may depend on it
    limits = Limits(max_num_seqs=6, max_num_batched_tokens=24, reserve_growth=0.0, speculation_branches=1 + OTHERS)
    engine = Engine(runner, limits, min(160, blocks * BLOCK), drafter=inner and Eager(inner, rng))
    if units:
        tiers = Tiers(lambda pool: [(MemoryStore(pool.unit_bytes, units), Bounds())], TierPolicy(rng.random() < 0.5, 2.0))
        tiers.open(runner.pool, reports)
        engine.colder = Colder(tiers, engine.pool, engine.scheduler)
    return engine, reports


def crowd(seed: int, count: int = 12) -> list[tuple[Sequence, list[Sequence]]]:
    """Of each kind, with its forks. Prompts end in and at the end of a block, and some are cached but for the last token."""
    rng, encode = random.Random(seed), Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode
    texts = [encode(text, add_special_tokens=False).ids for text in TEXTS]
    found = []
    for i in range(count):
        text = rng.choice(texts)
        prompt = text[: rng.choice([len(text), 2 * BLOCK, 2 * BLOCK + 1, rng.randrange(1, len(text))])]
        values: dict[str, Any] = {"max_tokens": rng.randrange(1, 32), "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
        kind, seeds = rng.choice(["greedy", "drawn", "forks", "beams"]), [rng.randrange(1 << 30)]
        if kind == "beams":
            values |= {"max_tokens": rng.randrange(1, 12), "beams": Beams(rng.choice([2, 3]), 1, 1.0)}
        elif kind != "greedy":
            values |= {"temperature": 0.9}
            seeds += range(3) if kind == "forks" else []
        first, *forks = (
            Sequence(f"s{i}.{k}", list(prompt), len(prompt), SamplingParams(**values, seed=one), root_key("tale"))
            for k, one in enumerate(seeds)
        )
        found.append((first, forks))
    return found


def serve(engine: Engine, reports: Reports, seed: int, rng: random.Random, aborts: float = 0.0) -> Said:
    waiting, said, colder, deadline = crowd(seed), Said(), engine.colder, time.monotonic() + WITHIN_S
    while waiting or engine.sequences or (colder is not None and engine.pool.num_owned):
        assert time.monotonic() < deadline, "it does not become idle"
        while waiting and len(engine.sequences) < 14 and rng.random() < 0.3:
            engine.add(*waiting.pop(0))
        if engine.sequences and rng.random() < aborts:
            seq = engine.sequences[rng.choice(sorted(engine.sequences))]
            engine.abort((seq.owner or seq).id)
        outputs = engine.step(time.monotonic())
        changes = engine.pool.drain_changes()
        if colder is not None:
            reports.tell(colder)
            colder.noted(changes)
            if not outputs:
                time.sleep(0.0005)
        for output in outputs:
            assert output.failure is None
            said.setdefault(output.seq.id, []).extend(output.found or [one for one in (output.sampled,) if one])
    engine.pool.check()
    left = engine.scheduler
    assert not (engine.pool.num_owned or left.running or left.waiting or left.loading or left.attached or engine.drafter.remembered)
    return said


def rounds(dtype: str, method: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, int]]:
    """Whose output differs, and how often the parts met."""
    met, wrong, choose = dict.fromkeys(("preempted", "loaded", "branches", "chosen", "forks", "aborted"), 0), list[str](), Scheduler.choose

    def counted(self: Scheduler, chunk: Any, branch: Any) -> None:
        met["branches"] += len(chunk.branches)
        met["chosen"] += branch is not None
        choose(self, chunk, branch)

    monkeypatch.setattr(Scheduler, "choose", counted)
    for seed in range(4):
        rng = random.Random(seed)
        wanted = serve(*engine_of(dtype, "", rng, 300, 0), seed, rng)
        engine, reports = engine_of(dtype, method, rng, rng.choice([20, 24]), 100)
        for aborts in (0.0, 0.03):  # the second time, much is in the tier
            said = serve(engine, reports, seed, rng, aborts)
            short = [name for name, tokens in wanted.items() if len(said.get(name, [])) < len(tokens)]
            met["aborted"] += len(short)
            assert not short or aborts
            wrong += [name for name, tokens in said.items() if tokens != wanted[name][: len(tokens)]]
        assert engine.colder is not None
        met["preempted"] += engine.counts.preemptions
        met["loaded"] += engine.colder.loaded_tokens
        met["forks"] += engine.counts.forks
        engine.colder._tiers.close()
    return wrong, met


@pytest.mark.parametrize(("dtype", "method"), [("bfloat16", "draft"), ("float32", "heads")])
def test_what_is_said_does_not_depend_on_how(dtype: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, met = rounds(dtype, method, monkeypatch)
    assert not wrong and all(met.values()), (wrong, met)
