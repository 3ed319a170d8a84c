"""Guesses on a CUDA device, with the models that ship: what one says is what it says without. Run with `pytest -m gpu tests/engine/gpu`."""

import random
import time
from typing import Any

import pytest
from eager_guesses import guess_always
from tokenizers import Tokenizer

from baton.cli.up import SHIPPED
from baton.engine.build import Built, build
from baton.engine.core.block_key import root_key
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options

pytestmark = pytest.mark.gpu
STORY = "Once upon a time there was a little girl. One day the little girl went to the park with her dog. Once upon a time there was"
METHODS = ("prompt_lookup", "draft")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    guess_always(monkeypatch)


def built(**keys: Any) -> Built:
    keys = {"device": "cuda", "dtype": "float32", "kv_memory_mib": 128, "max_num_seqs": 6, "max_num_batched_tokens": 64, **keys}
    return build(Options.of(SHIPPED, **keys))


def crowd(output: int = 60, temperature: float = 0.0, **params: Any) -> list[Sequence]:
    ids = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode(STORY, add_special_tokens=False).ids
    seqs = []
    for i in range(8):
        how = SamplingParams(max_tokens=output + i, temperature=temperature, seed=i, ignore_eos=True, **params)
        prompt = ids[: 4 + 3 * i]
        seqs.append(Sequence(str(i), [*prompt], len(prompt), how, root_key("tale")))
    return seqs


def said(made: Built, seqs: list[Sequence], pace: float = 0.5) -> list[list[int]]:
    """`pace`: the chance that another one arrives before a step."""
    rng, waiting, engine = random.Random(1), [*seqs], made.engine
    while waiting or not engine.idle:
        while waiting and rng.random() < pace:
            engine.add(waiting.pop(0))
        engine.step(time.perf_counter())
    engine.pool.check()
    return [seq.tokens[seq.prompt_len :] for seq in seqs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return said(built(), crowd())


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("eager")
def test_with_guesses_it_says_what_it_says_without(method: str, branches: int, expected: list[list[int]]) -> None:
    made = built(speculation=method, speculation_branches=branches)
    assert said(made, crowd()) == expected
    assert made.engine.counts.drafted_tokens > 10
    assert said(made, crowd()) == expected, "with what the cache has of both"
    assert made.engine.counts.hit_tokens > 0


@pytest.mark.usefixtures("eager")
def test_a_model_that_drafts_for_itself_is_right(expected: list[list[int]]) -> None:
    made = built(speculation="draft", draft_model=str(SHIPPED))
    assert said(made, crowd()) == expected
    counts = made.engine.counts
    assert counts.drafted_tokens > 200 and counts.accepted_tokens > 0.7 * counts.drafted_tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("eager")
def test_drawn_tokens_are_those_without_guesses(method: str) -> None:
    plain, guessed = said(built(), crowd(temperature=0.8)), said(built(speculation=method), crowd(temperature=0.8))
    same = sum(a == b for a, b in zip(plain, guessed, strict=True))
    assert same >= 7, f"{same} of 8 texts are the same: last bits may decide a near tie differently"


@pytest.mark.usefixtures("eager")
def test_who_is_preempted_goes_on_with_a_draft() -> None:
    """The pool holds 26 blocks or fewer; at their ends six sequences have 42."""
    made = built(speculation="draft", max_model_len=160, kv_memory_mib=2, reserve_growth=0.0)
    assert said(made, crowd(output=110), pace=0.99) == said(built(), crowd(output=110))
    assert made.engine.counts.preemptions > 0 and made.engine.counts.drafted_tokens > 100


@pytest.mark.usefixtures("eager")
def test_a_prompt_is_handed_over_with_the_kv_of_its_draft(expected: list[list[int]]) -> None:
    """Through the device's memory: the other engine computes nothing of the prompt, for neither model."""
    here, there = built(speculation="draft"), built(speculation="draft")
    seq = crowd()[7]
    first = Sequence("first", [*seq.tokens], seq.prompt_len, seq.params, seq.root, hold=True)
    here.engine.add(first)
    while first.output_len == 0:
        here.engine.step()
    moved = Sequence("moved", [*first.tokens], seq.prompt_len, seq.params, seq.root)
    moved.arrived_with = len(moved.tokens)
    assert there.engine.reserve(moved)
    mine, theirs = here.engine.runner.pool, there.engine.runner.pool
    count = -(-seq.prompt_len // here.engine.block_size)
    ended = theirs.begin_copy(mine._words, first.blocks[:count], moved.blocks[:count])  # type: ignore[attr-defined]
    while not ended():
        time.sleep(0.001)
    assert mine.digests(first.blocks[:count]) == theirs.digests(moved.blocks[:count])
    there.engine.arrive(moved, seq.prompt_len)
    there.engine.adopt(moved)
    while not there.engine.idle:
        there.engine.step()
    assert moved.tokens[moved.prompt_len :] == expected[7] and moved.prefilled == 0
    assert there.engine.counts.accepted_tokens > 10


@pytest.mark.parametrize("method", ["none", "draft"])
@pytest.mark.usefixtures("eager")
def test_tale_speaks_with_kv_of_8_bits(method: str, expected: list[list[int]]) -> None:
    """KV is rounded, so near ties may differ: most of the texts begin alike."""
    texts = said(built(kv_dtype="int8", speculation=method), crowd())
    alike = sum(a[:10] == b[:10] for a, b in zip(texts, expected, strict=True))
    assert alike >= 6, f"{alike} of 8 texts begin alike"
