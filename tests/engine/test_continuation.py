"""A stream that is cut anywhere and goes on elsewhere has the bits of an undisturbed one, in every family and type.

A model that is sure of a token samples it from slightly other logits, too. So logits are compared, bit for bit.
"""

import random

import continuation
import pytest
import torch
from continuation import CONTROLS, Bench, Stream, finished, measure, seen
from families import FAMILIES, loaded
from torch import Tensor

from baton.cli.up import SHIPPED
from baton.engine.choice import load_runner
from baton.engine.core.engine import Engine
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.runner import ModelRunner

SPREAD = 0.2  # of the weights: with smaller ones attention is such a small part of the sum that its last bits are rounded away
TYPES = ("float32", "bfloat16", "int8", "int4", "bfloat16/int8", "bfloat16/int5")  # the last: with KV as int8 and as int5
PROMPT, OUTPUT = 270, 20  # more keys than a kernel meets at a time; windows end within the prompt
IN_EVERY_TYPE = ("LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM")
CASES = [(family, kind) for family in FAMILIES for kind in (TYPES if family in IN_EVERY_TYPE else ("bfloat16",))]
CUTS = ((1, 400), (7, 5), (OUTPUT, 60))  # tokens of output when the stream is cut, and the largest chunk that follows


pytestmark = pytest.mark.usefixtures("single_thread")


def tokens_of(salt: int, length: int) -> list[int]:
    rng = random.Random(salt)
    return [rng.randrange(5, 200) for _ in range(length)]


def sequence(tokens: list[int], prompt_len: int, first_block: int = 0) -> Sequence:
    blocks = list(range(first_block, 32))
    return Sequence(f"s{first_block}", list(tokens), prompt_len, SamplingParams(max_tokens=64), b"", blocks=blocks)


def compute(runner: ModelRunner, seq: Sequence, sizes: list[int], beside: list[Sequence]) -> list[Tensor]:
    """In chunks of these sizes, each in a batch with a part of the sequences beside it. The logits of those that sample."""
    found = []
    for number, size in enumerate(sizes):
        chunks = [Chunk(seq, size), *(Chunk(other, other.pending) for other in beside[: number % (len(beside) + 1)])]
        logits = runner.run_logits(chunks)
        if chunks[0].samples:
            found.append(logits[0].clone())
        seq.computed += size
    return found


def stream(runner: ModelRunner, seq: Sequence, sizes: list[int], rest: list[int], beside: list[Sequence]) -> list[Tensor]:
    """The logits from the last of the known tokens on, each of the others being known after a step."""
    found = compute(runner, seq, sizes, beside)
    for token in rest:
        seq.tokens.append(token)
        found += compute(runner, seq, [1], beside)
    return found


def cuts(total: int, rng: random.Random, largest: int) -> list[int]:
    sizes: list[int] = []
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(left, rng.randint(1, largest)))
    return sizes


def differ(runner: ModelRunner, knows: bool = True) -> int:
    """How many logits of a stream that was cut differ from an undisturbed one's. Without `knows`, the engine is not told where the output
    starts."""
    whole, different = tokens_of(1, PROMPT + OUTPUT), 0
    prompt, decode = sequence(tokens_of(2, 9), 9, 30), sequence(tokens_of(3, 9), 8, 31)
    undisturbed = stream(runner, sequence(whole[:PROMPT], PROMPT), [PROMPT], whole[PROMPT:], [])
    for at, largest in CUTS:
        runner.pool.array[:] = 0
        known, sizes = whole[: PROMPT + at], cuts(PROMPT + at, random.Random(at), largest)
        again = sequence(known, PROMPT if knows else len(known))
        logits = stream(runner, again, sizes, whole[PROMPT + at :], [decode, prompt])
        different += sum(not torch.equal(ours, theirs) for ours, theirs in zip(logits, undisturbed[at:], strict=True))
    return different


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_stream_that_is_cut_has_the_bits_that_it_would_have_had(family: str, kind: str) -> None:
    assert differ(loaded(family, kind, scale=8, products="baton", spread=SPREAD)) == 0


@pytest.mark.parametrize("kind", TYPES)
def test_output_that_is_taken_for_a_prompt_has_other_bits(kind: str) -> None:
    """Negative control: were these equal, the tests above would show nothing."""
    assert differ(loaded("LlamaForCausalLM", kind, scale=8, products="baton", spread=SPREAD), knows=False) > 0


@pytest.mark.parametrize("kind", ["bfloat16", "int4", "float32/int8", "float32/int5"])
def test_disturbed_streams_of_the_shipped_model_have_the_bits_of_undisturbed_ones(kind: str) -> None:
    runner = load_runner(ModelRunner, SHIPPED, products="baton", **continuation.TYPES[kind])
    check(runner, continuation.asked(SHIPPED, 2))


@pytest.mark.parametrize("kind", TYPES)
def test_disturbed_streams_of_a_random_model_have_the_bits_of_undisturbed_ones(kind: str) -> None:
    """The shipped model is sure of its tokens. This one is of none."""
    check(loaded("LlamaForCausalLM", kind, scale=8, products="baton", spread=SPREAD), [tokens_of(i, 20 * i + 9) for i in range(3)])


@pytest.mark.parametrize("kind", TYPES)
def test_guesses_right_and_wrong_change_no_bit_of_disturbed_streams(kind: str) -> None:
    check(loaded("LlamaForCausalLM", kind, scale=8, products="baton", spread=SPREAD), [tokens_of(i, 20 * i + 9) for i in range(3)], True)


def check(runner: ModelRunner, prompts: list[list[int]], guess: bool = False) -> None:
    controls = {kind.__name__ for kind in CONTROLS}
    guessed = 0
    for way, kind, row in measure(runner, prompts, tokens=10, guess=guess):
        assert row["logits"] > 0
        guessed += row["guessed"]
        if kind not in controls:
            assert (row["streams_differ"], row["logits_differ"]) == (0, 0), (way, kind)
        elif runner.layout.dtype == "bfloat16":  # int8 and int4 round most of it away
            assert row["logits_differ"], (way, kind)
    assert bool(guessed) == guess


@pytest.mark.parametrize("kind", TYPES)
def test_the_same_prompt_has_the_same_bits_whatever_part_of_it_is_cached(kind: str) -> None:
    """Of every length: one token more than whole blocks was computed as if it were output."""
    bench = Bench(loaded("LlamaForCausalLM", kind, scale=8, products="baton", spread=SPREAD), 80, 4)
    prompts = [tokens_of(9, length) for length in range(14, 35)]

    def first_logits(engine: Engine, name: str, prompt: list[int]) -> bytes:
        engine.add(Stream(name, prompt, SamplingParams(max_tokens=2, temperature=0.0)).sequence())
        finished(engine)
        return seen(engine)[name, len(prompt)]

    fresh = [first_logits(bench.engine(), "fresh", prompt) for prompt in prompts]
    engine = bench.engine()
    for again in range(2):
        assert [first_logits(engine, f"{again}.{len(prompt)}", prompt) for prompt in prompts] == fresh
    assert engine.counts.hit_tokens > 10 * 16
