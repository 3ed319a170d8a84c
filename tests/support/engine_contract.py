"""What every engine owes a worker (`baton.engine.core.contract`). tests/engine runs it over engines that compute, tests/simulate over
the one that is modelled.

The KV of a held sequence is copied block by block into the reserved blocks of another, as a transport would do between two workers.
"""

import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest
from engine_bench import BLOCK, MAX_LEN, MAX_QUEUE, PROMPT, Bench
from host_pool import on_host

from baton.engine.core.block_key import DEVICE, extend_keys, root_key
from baton.engine.core.engine import Malformed, QueueFull, SequenceRefused, TooLong
from baton.engine.core.grammar import Grammar
from baton.engine.core.sequence import Finish, State
from baton.engine.core.thinking import Marks, ThinkingBudget

FORM = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["colour", "n"],
            "additionalProperties": False,
        }
    ),
)


async def test_a_sequence_runs_to_its_length_and_leaves_nothing(bench: Bench) -> None:
    seq = bench.seq(PROMPT)
    tokens = await bench.run(seq)
    assert len(tokens) == 24 and seq.tokens == PROMPT + tokens and seq.state is State.DONE
    assert [output.finish for output in bench.of(seq)] == [None] * 23 + [Finish.LENGTH]
    assert seq.started_at is not None
    await bench.quiet()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": 11},
        {"temperature": 0.7, "seed": 12, "top_k": 7, "top_p": 0.8, "min_p": 0.05, "top_a": 0.1},
        {"temperature": 0.9, "seed": 13, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 14, "logit_bias": {7: 4.0, 9: 3.5}, "logprobs": 3},
    ],
    ids=["greedy", "seeded", "filters", "penalties", "bias"],
)
async def test_a_stream_cut_anywhere_goes_on_with_the_same_tokens(bench: Bench, params: dict[str, Any]) -> None:
    """Penalties count from the end of the original prompt, and noise depends on the seed and the position alone."""
    whole = await bench.run(bench.seq(PROMPT, **params))
    for cut in (1, 9, 23):
        again = bench.seq(PROMPT + whole[:cut], len(PROMPT), **params)
        assert await bench.run(again) == whole[cut:], cut


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.5, "seed": 4}, {"temperature": 1.0, "min_tokens": 30}])
async def test_a_form_holds_the_output_wherever_the_stream_is_cut(bench: Bench, params: dict[str, Any]) -> None:
    """Beside a sequence without one. A holder's first token has it, too."""
    bench.needs("grammars")
    eos, how = next(iter(bench.engine.traits.eos_token_ids)), {**params, "structured": FORM, "max_tokens": 60, "ignore_eos": False}
    free = bench.seq(PROMPT, temperature=1.0, seed=9, max_tokens=60)
    await bench.engine.add(free)
    seq = bench.seq(PROMPT, **how)
    whole = await bench.run(seq)
    assert bench.of(seq)[-1].finish is Finish.STOP and whole[-1] == eos and len(await bench.ended(free)) == 60
    document = json.loads(bench.text(whole[:-1]))
    assert document["colour"] in ("red", "green") and 0 <= document["n"] <= 99
    for cut in (1, len(whole) // 2, len(whole) - 1):
        assert await bench.run(bench.seq(PROMPT + whole[:cut], len(PROMPT), **how)) == whole[cut:], cut
    holder = bench.seq(PROMPT, hold=True, salt="form", **how)
    assert await bench.run(holder) == whole[:1]
    bench.engine.forget(holder.id)
    await bench.quiet()


async def test_thinking_is_closed_at_its_budget_wherever_the_stream_is_cut(bench: Bench) -> None:
    bench.needs("grammars")
    closing = tuple(bench.tokenizer.encode("</t>", add_special_tokens=False).ids)
    budget = ThinkingBudget(4, (Marks("<t>", ("</t>",), closing),), opened=True)
    how: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 5,
        "thinking": budget,
        "logit_bias": {closing[0]: -80.0},
    }  # only the budget brings it
    whole = await bench.run(bench.seq(PROMPT, **how))
    at = whole.index(closing[0])
    assert 4 <= at <= 8 and tuple(whole[at : at + len(closing)]) == closing and len(whole) == 24
    for cut in (2, at, at + 1, 20):
        assert await bench.run(bench.seq(PROMPT + whole[:cut], len(PROMPT), **how)) == whole[cut:], cut
    await bench.quiet()


async def test_a_form_that_cannot_be_held_is_refused(bench: Bench) -> None:
    for form, output in ((Grammar("json_schema", '{"not": {}}'), []), (Grammar("regex", "("), []), (FORM, [7])):
        with pytest.raises(Malformed, match="structured"):
            await bench.engine.add(bench.seq(PROMPT + output, len(PROMPT), structured=form))
    await bench.quiet()


async def test_a_form_with_which_nothing_can_go_on_ends_its_sequence_alone(bench: Bench) -> None:
    """None of the tokens that it allows can be."""
    bench.needs("grammars")
    if bench.engine.traits.eos_token_ids == {256}:
        pytest.skip("the toy knows no logit_bias")
    beside = bench.seq(PROMPT, temperature=1.0, seed=9)
    await bench.engine.add(beside)
    tokens = [bench.token(digit) for digit in "0123456789"]
    seq = bench.seq(PROMPT, structured=Grammar("regex", "[0-9]{3}"), logit_bias=dict.fromkeys(tokens, -math.inf), ignore_eos=False)
    await bench.engine.add(seq)
    await bench.until(lambda: any(output.failure or output.finish for output in bench.of(seq)))
    assert "the grammar allows no token" in (bench.of(seq)[-1].failure or "")
    assert len(await bench.ended(beside)) == 24
    await bench.quiet()


async def test_sequences_beside_each_other_get_their_own_tokens(bench: Bench) -> None:
    prompts = [[n + 5, *PROMPT[: 20 + 13 * n]] for n in range(8)]
    params: list[dict[str, Any]] = [{"temperature": 0.0} if n % 2 else {"temperature": 1.0, "seed": n} for n in range(8)]
    alone = [await bench.run(bench.seq(prompt, **how)) for prompt, how in zip(prompts, params, strict=True)]
    together = [bench.seq(prompt, **how) for prompt, how in zip(prompts, params, strict=True)]
    for seq in together:
        await bench.engine.add(seq)
    assert [await bench.ended(seq) for seq in together] == alone


async def test_held_kv_that_is_copied_gives_the_same_tokens(bench: Bench) -> None:
    whole = await bench.run(bench.seq(PROMPT, temperature=1.0, seed=3))
    holder = bench.seq(PROMPT, hold=True, salt="a", temperature=1.0, seed=3)
    [first] = await bench.run(holder)
    assert holder.state is State.HELD and first == whole[0]
    assert len(holder.blocks) >= -(-len(PROMPT) // BLOCK)
    reader = bench.seq([*PROMPT, first], len(PROMPT), salt="b", temperature=1.0, seed=3)
    await bench.reserve(reader)
    assert reader.computed == 0, "nothing of another tenant's cache is used"
    bench.copy(holder, reader)
    bench.engine.forget(holder.id)
    await bench.engine.adopt(reader, len(PROMPT))
    assert await bench.ended(reader) == whole[1:] and reader.prefilled == 0
    await bench.quiet()


async def test_sequences_that_are_held_do_not_keep_others_from_running(bench: Bench) -> None:
    """More than run at once, and none is let go."""
    crowd = [bench.seq(PROMPT, hold=True, salt=f"crowd {n}") for n in range(10)]
    for seq in crowd:
        await bench.engine.add(seq)
    assert len({tuple(await bench.ended(seq)) for seq in crowd}) == 1
    for seq in crowd:
        bench.engine.forget(seq.id)
    await bench.quiet()


async def test_a_first_token_that_comes_last_is_learned(bench: Bench) -> None:
    whole = await bench.run(bench.seq(PROMPT))
    holder = bench.seq(PROMPT, hold=True)
    [first] = await bench.run(holder)
    reader = bench.seq(PROMPT, salt="other")
    await bench.reserve(reader)
    bench.copy(holder, reader)
    await bench.engine.adopt(reader, len(PROMPT), first)
    assert await bench.ended(reader) == whole[1:]
    bench.engine.forget(holder.id)


async def test_wrong_bytes_would_show(bench: Bench) -> None:
    """The negative control of the copies above: the tokens do come from the copied bytes."""
    bench.needs("kv")
    whole = await bench.run(bench.seq(PROMPT))
    reader = bench.seq([*PROMPT, whole[0]], len(PROMPT), salt="wrong")
    await bench.reserve(reader)
    for block in reader.blocks:
        np.frombuffer(on_host(bench.engine.pool).block(block), np.uint8)[:] = 0
    await bench.engine.adopt(reader, len(PROMPT))
    assert await bench.ended(reader) != whole[1:]


async def test_kv_that_does_not_come_is_computed(bench: Bench) -> None:
    whole = await bench.run(bench.seq(PROMPT))
    reader, filling = bench.seq([*PROMPT, whole[0]], len(PROMPT), salt="late"), list[int]()
    await bench.reserve(reader)
    reserved = list(reader.blocks)
    await bench.engine.give_up(reader, filling)
    assert filling == reserved
    await bench.engine.release(filling)
    assert await bench.ended(reader) == whole[1:]
    never, first = bench.seq(PROMPT, salt="never"), whole[0]
    await bench.engine.give_up(never, filling, first)  # nothing was reserved
    assert await bench.ended(never) == whole[1:]
    await bench.quiet()


async def test_full_blocks_of_a_prompt_can_be_read_before_the_rest_is_computed(bench: Bench) -> None:
    seq = bench.seq(PROMPT, hold=True, salt="live")
    await bench.run(seq)
    counts = [len(output.full) for output in bench.of(seq) if output.sampled is None]
    assert counts and counts == sorted(counts) and counts[-1] <= len(PROMPT) // BLOCK
    assert all(tuple(seq.blocks[: len(o.full)]) == o.full for o in bench.of(seq) if o.full)
    bench.engine.forget(seq.id)


async def test_a_prompt_whose_kv_came_in_part_is_held_like_any_other(bench: Bench) -> None:
    whole = await bench.run(bench.seq(PROMPT))
    one = bench.seq(PROMPT, hold=True, salt="one")
    await bench.run(one)
    two = bench.seq(PROMPT, hold=True, salt="two")
    await bench.reserve(two)
    bench.copy(one, two)
    await bench.engine.adopt(two, 2 * BLOCK)
    assert await bench.ended(two) == whole[:1]
    three = bench.seq([*PROMPT, whole[0]], len(PROMPT), salt="three")
    await bench.reserve(three)
    bench.copy(two, three)
    await bench.engine.adopt(three, len(PROMPT))
    assert await bench.ended(three) == whole[1:]
    for seq in (one, two):
        bench.engine.forget(seq.id)


async def test_what_cannot_run_is_refused_and_nothing_is_kept(bench: Bench) -> None:
    for seq, error in (
        (bench.seq([]), Malformed),
        (bench.seq([10**7]), Malformed),
        (bench.seq([1, 2], 3), Malformed),
        (bench.seq([1] * MAX_LEN), TooLong),
    ):
        for command in (bench.engine.add, bench.engine.reserve):
            with pytest.raises(error):
                await command(seq)
    await bench.quiet()


async def test_more_than_the_queue_holds_is_refused_and_the_others_run(bench: Bench) -> None:
    crowd = [bench.seq(PROMPT, max_tokens=40) for _ in range(4 + MAX_QUEUE + 20)]
    answers = await asyncio.gather(*(bench.engine.add(seq) for seq in crowd), return_exceptions=True)
    accepted = [seq for seq, answer in zip(crowd, answers, strict=True) if answer is None]
    assert len(accepted) >= MAX_QUEUE and any(isinstance(answer, QueueFull) for answer in answers)
    assert len({tuple(await bench.ended(seq)) for seq in accepted}) == 1
    await bench.quiet()


async def test_a_sequence_without_room_that_then_finds_the_queue_full_blocks_nobody(bench: Bench) -> None:
    readers, asker = [bench.seq(PROMPT) for _ in range(4)], bench.seq(PROMPT)
    for reader in readers:
        await bench.reserve(reader)
    assert not await bench.engine.reserve(asker)
    crowd = [bench.seq(PROMPT) for _ in range(MAX_QUEUE)]
    for seq in crowd:
        await bench.engine.add(seq)
    with pytest.raises(QueueFull):
        await bench.engine.add(asker)
    for reader in readers:
        filling: list[int] = []
        await bench.engine.abort(reader.id, filling)
        await bench.engine.release(filling)
    assert len({tuple(await bench.ended(seq)) for seq in crowd}) == 1
    await bench.quiet()


@pytest.mark.parametrize("when", ["waiting", "running", "held", "fetching", "unknown"])
async def test_an_abort_in_any_state_leaves_nothing(bench: Bench, when: str) -> None:
    crowd = [bench.seq(PROMPT, max_tokens=60) for _ in range(6 if when == "waiting" else 1)]
    filling: list[int] = []
    seq = bench.seq(PROMPT, hold=when == "held", salt=when, max_tokens=100)
    if when == "fetching":
        await bench.reserve(seq)
    elif when != "unknown":
        for other in crowd:
            await bench.engine.add(other)
        await bench.engine.add(seq)
        await bench.until(lambda: when == "waiting" or bench.tokens(seq))
    await bench.engine.abort(seq.id, filling)
    assert bool(filling) == (when == "fetching")
    await bench.engine.release(filling)
    seen = len(bench.tokens(seq))
    for other in crowd:
        if other.state is not State.WAITING or when == "waiting":
            await bench.ended(other)
    await bench.quiet()
    assert len(bench.tokens(seq)) <= seen + 1, "it computed on"


async def test_a_sequence_that_waits_too_long_is_not_computed(bench: Bench) -> None:
    crowd = [bench.seq(PROMPT, max_tokens=60) for _ in range(4)]
    late = bench.seq(PROMPT)
    late.expires_at = 0.0
    for seq in (*crowd, late):
        await bench.engine.add(seq)
    await bench.ended(late)
    assert [output.expired for output in bench.of(late)] == [True]
    for seq in crowd:
        await bench.ended(seq)


CHOICES: dict[str, Any] = {"temperature": 1.1, "logprobs": 2, "min_p": 0.02}


async def alone(bench: Bench, seeds: range, prompt: list[int], **params: Any) -> list[list[Any]]:
    """What each of several answers is without the others, in a cache of its own."""
    seqs = [bench.seq(prompt, salt=f"alone {seed}", **CHOICES, seed=seed, **params) for seed in seeds]
    for seq in seqs:
        await bench.run(seq)
    return [[output.sampled for output in bench.of(seq)] for seq in seqs]


async def computed(bench: Bench) -> int:
    return (await bench.quiet()).counts.computed_tokens


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK, BLOCK + 1, 150])
async def test_several_answers_to_a_prompt_are_those_of_requests_of_their_own(bench: Bench, length: int) -> None:
    """To the last bit of a log-probability; and the prompt is computed once, but for its last position."""
    prompt = PROMPT[:length]
    apart = await alone(bench, range(4), prompt)
    before = await computed(bench)
    first, *others = [bench.seq(prompt, salt=f"forks {length}", **CHOICES, seed=seed) for seed in range(4)]
    await bench.engine.add(first, list(others))
    for seq, expected in zip([first, *others], apart, strict=True):
        await bench.ended(seq)
        assert [output.sampled for output in bench.of(seq)] == expected
        assert bench.of(seq)[-1].finish is Finish.LENGTH
    again = (length - 1) % BLOCK if bench.engine.traits.lends else length  # who lends no blocks shares no memory, but caches full ones
    slack = 24 * 4 if bench.separates_output else 0  # guesses that were wrong are not counted
    assert await computed(bench) - before <= length + 3 * (1 + (0 if bench.engine.traits.lends else again)) + 4 * 23 + slack


async def test_answers_go_on_from_a_prompt_that_a_peer_computed(bench: Bench) -> None:
    apart = await alone(bench, range(4), PROMPT)
    holder = bench.seq(PROMPT, hold=True, salt="held", **CHOICES, seed=0)
    token, before = (await bench.run(holder))[0], (await bench.engine.look()).counts
    reader, *others = [bench.seq(PROMPT, salt="read", **CHOICES, seed=seed) for seed in range(4)]
    await bench.reserve(reader)
    bench.copy(holder, reader)
    await bench.engine.adopt(reader, len(PROMPT), token, list(others))
    for seq, expected in zip([reader, *others], apart, strict=True):
        await bench.ended(seq)
        assert [output.sampled for output in bench.of(seq)] == expected[1 if seq is reader else 0 :]
    bench.engine.forget(holder.id)
    after = (await bench.quiet()).counts
    if bench.engine.traits.lends:
        assert after.forks - before.forks == 3 and after.computed_tokens - before.computed_tokens <= 3 + 4 * 24


async def test_answers_whose_fetch_fails_are_computed_here(bench: Bench) -> None:
    apart = await alone(bench, range(3), PROMPT)
    reader = bench.seq([*PROMPT, apart[0][0].token], len(PROMPT), salt="failed", **CHOICES, seed=0)
    others = [bench.seq(PROMPT, salt="failed", **CHOICES, seed=seed) for seed in (1, 2)]
    await bench.reserve(reader)
    filling: list[int] = []
    await bench.engine.give_up(reader, filling, None, list(others))
    await bench.engine.release(filling)
    for seq, expected in zip([reader, *others], apart, strict=True):
        await bench.ended(seq)
        assert [output.sampled for output in bench.of(seq)] == expected[1 if seq is reader else 0 :]
    await bench.quiet()


@pytest.mark.parametrize("who", [0, 1, 3])
@pytest.mark.parametrize("when", ["waiting", "begun"])
async def test_an_answer_that_is_aborted_leaves_the_others(bench: Bench, who: int, when: str) -> None:
    apart = await alone(bench, range(4), PROMPT)
    seqs = [bench.seq(PROMPT, salt=f"abort {who} {when}", **CHOICES, seed=seed) for seed in range(4)]
    await bench.engine.add(seqs[0], seqs[1:])
    if when == "begun":
        await bench.until(lambda: bench.tokens(seqs[who]))
    await bench.engine.abort(seqs[who].id, [])
    for seq, expected in zip(seqs, apart, strict=True):
        if seq is not seqs[who]:
            await bench.ended(seq)
            assert [output.sampled for output in bench.of(seq)] == expected
    await bench.quiet()


async def test_answers_without_room_wait_and_are_the_same(bench: Bench) -> None:
    """More of them than sequences may run, beside others."""
    apart = await alone(bench, range(9), PROMPT)
    other = bench.seq(PROMPT, salt="other")
    await bench.engine.add(other)
    seqs = [bench.seq(PROMPT, salt="crowd", **CHOICES, seed=seed) for seed in range(9)]
    await bench.engine.add(seqs[0], seqs[1:])
    for seq, expected in zip(seqs, apart, strict=True):
        await bench.ended(seq)
        assert [output.sampled for output in bench.of(seq)] == expected
    await bench.ended(other)
    await bench.quiet()


async def test_answers_to_other_prompts_do_not_go_on_from_one(bench: Bench) -> None:
    for wrong in (bench.seq(PROMPT[:-1]), bench.seq(PROMPT, salt="x"), bench.seq([*PROMPT, 1], len(PROMPT)), bench.seq(PROMPT, hold=True)):
        with pytest.raises(ValueError, match="does not go on from the prompt"):
            await bench.engine.add(bench.seq(PROMPT), [wrong])
    await bench.quiet()


async def test_stops_are_the_shared_rule(bench: Bench) -> None:
    whole = await bench.run(bench.seq(PROMPT))
    stop = whole[5]
    at = whole.index(stop) + 1
    seq = bench.seq(PROMPT, stop_token_ids=frozenset([stop]))
    assert await bench.run(seq) == whole[:at] and bench.of(seq)[-1].finish is Finish.STOP
    longer = bench.seq(PROMPT, stop_token_ids=frozenset([stop]), min_tokens=at + 4)
    tokens = await bench.run(longer)
    assert len(tokens) >= at + 4
    one = bench.seq(PROMPT, hold=True, max_tokens=1)
    assert await bench.run(one) == whole[:1] and bench.of(one)[-1].finish is Finish.LENGTH, "an output of one token is not held"
    await bench.quiet()


async def test_log_probabilities_are_of_the_models_own_logits(bench: Bench) -> None:
    bench.needs("logits")
    seq = bench.seq(PROMPT, temperature=2.0, seed=5, logprobs=3, max_tokens=4)
    await bench.run(seq)
    for output in bench.of(seq):
        assert output.sampled is not None and output.sampled.logprob is not None and output.sampled.logprob <= 0
        best = [value for _, value in output.sampled.top]
        assert best == sorted(best, reverse=True)


async def test_cache_events_and_snapshot_agree_and_name_our_keys(bench: Bench) -> None:
    tokens = await bench.run(bench.seq(PROMPT, salt="events"))
    keys: list[bytes] = []
    output_from = len(PROMPT) if bench.separates_output else None
    extend_keys(keys, root_key(bench.engine.traits.model_fingerprint, "events"), PROMPT + tokens[:-1], BLOCK, output_from)
    await bench.quiet()

    def cached() -> set[bytes]:
        kept: set[bytes] = set()
        for event in bench.events:
            kept = kept | set(event.keys) if event.kind == "stored" else kept - set(event.keys)
        return kept

    await bench.until(lambda: set(keys) <= cached())
    sequence, snapshot = await bench.engine.snapshot()
    assert [event.sequence for event in bench.events] == list(range(bench.events[0].sequence, sequence + 1))
    assert cached() <= set(snapshot[DEVICE])
    again = bench.seq(PROMPT, salt="events")
    await bench.run(again)
    assert again.cached == len(PROMPT) // BLOCK * BLOCK
    pinned: list[int] = []
    await bench.engine.pin(keys, pinned)
    assert len(pinned) == (len(keys) if bench.engine.traits.lends else 0)
    await bench.engine.release(pinned)


async def test_a_step_is_reported_and_progress_is_seen(bench: Bench) -> None:
    laps, _, _ = bench.engine.activity()
    before, batches = (await bench.engine.look()).counts, len(bench.batches)
    await bench.run(bench.seq(PROMPT, salt="steps"))
    await bench.quiet()
    after, fresh = (await bench.engine.look()).counts, bench.batches[batches:]
    assert after.computed_tokens - before.computed_tokens == sum(tokens for _, tokens, _ in fresh) >= len(PROMPT) + 23
    assert all(seconds >= 0 and sequences >= 1 for seconds, _, sequences in fresh)
    assert bench.engine.activity()[0] > laps
    await bench.until(lambda: bench.engine.activity()[1] is None)


async def test_refused_is_what_a_worker_catches() -> None:
    assert issubclass(QueueFull, SequenceRefused) and issubclass(TooLong, SequenceRefused) and issubclass(Malformed, SequenceRefused)
