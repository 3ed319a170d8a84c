"""Thousands of engine steps leak neither memory nor objects."""

import ctypes
import gc
import random
from pathlib import Path

import psutil
import pytest

from baton.engine.build import build
from baton.engine.core.block_key import root_key
from baton.engine.core.engine import Engine, Output
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options
from baton.models.make_small import make

STEPS, WARM_UP = 2_500, 1_000
MOST_BYTES, MOST_OBJECTS = 2 << 20, 250  # a tenth of an object in each step; without a leak nothing grows after 500 steps


class Load:
    """Sequences of every kind arrive, finish, and are aborted."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.made = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            while len(self.engine.sequences) < 8:
                self.engine.add(self.sequence())
            if self.rng.random() < 0.02:
                self.engine.abort(self.rng.choice(list(self.engine.sequences)))
            self.engine.step()
            self.engine.pool.drain_changes()  # as the loop does

    def sequence(self) -> Sequence:
        rng, self.made = self.rng, self.made + 1
        params = SamplingParams(
            max_tokens=rng.randrange(1, 30), temperature=rng.choice([0.0, 1.0]), seed=self.made, logprobs=rng.choice([None, 2]),
            repetition_penalty=rng.choice([1.0, 1.2]), top_p=rng.choice([1.0, 0.9]), ignore_eos=True,
        )  # fmt: skip
        prompt = [rng.randrange(10, 300) for _ in range(rng.randrange(1, 60))]
        return Sequence(f"s{self.made}", prompt, len(prompt), params, root_key("leaks"))


def used() -> tuple[int, int]:
    """Bytes of memory, without those that the allocator keeps for later, and objects."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss, len(gc.get_objects())


def grown(load: Load, steps: int) -> tuple[int, int]:
    """(bytes, objects) added by `steps` steps."""
    load.run(WARM_UP)
    before = used()
    load.run(steps)
    after = used()
    return after[0] - before[0], after[1] - before[1]


@pytest.fixture(params=["auto", "int8"])
def load(tmp_path: Path, request: pytest.FixtureRequest) -> Load:
    make(tmp_path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=300, context=96)
    keys = {"weight_dtype": request.param, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return Load(build(Options.of(tmp_path, kv_memory_mib=1, threads=1, **keys)).engine, seed=1)


def test_thousands_of_steps_leak_nothing(load: Load) -> None:
    more = grown(load, STEPS)
    assert more[0] < MOST_BYTES and more[1] < MOST_OBJECTS, more
    for name in list(load.engine.sequences):
        load.engine.abort(name)
    load.engine.pool.check()
    assert load.engine.pool.num_owned == 0 and load.engine.idle


@pytest.mark.parametrize("load", ["auto"], indirect=True)
def test_a_leak_would_be_detected(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every step leaks 100 bytes and one object."""
    kept: list[list[int]] = []
    step = load.engine.step

    def leaking(now: float = 0.0) -> list[Output]:
        kept.append([len(kept)] * 12)
        return step(now)

    monkeypatch.setattr(load.engine, "step", leaking)
    assert grown(load, 2 * MOST_OBJECTS)[1] >= MOST_OBJECTS
