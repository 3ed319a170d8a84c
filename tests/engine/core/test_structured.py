"""Outputs that are held to a grammar, with the toy, on both engines. Whatever else happens to a sequence, its output is that of an oracle
that knows no batches, blocks, guesses or preemptions, and it is valid when it ends with the end token."""

import json
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from late_toy import LateEngine, LateToy

from baton.engine.core.block_key import root_key
from baton.engine.core.commands import Commands
from baton.engine.core.contract import Listener
from baton.engine.core.drafting import Drafter, DraftRequest
from baton.engine.core.engine import Engine, Malformed, Output
from baton.engine.core.grammar import Grammar
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.masks import NOTHING, Matcher, without
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Finish, Sequence, State
from baton.engine.core.thinking import Marks, ThinkingBudget
from baton.engine.core.toy import ToyRunner, naive
from baton.engine.grammars.library import Compiled, Vocabulary, compile_grammar
from baton.models.make_small import make_toy
from router.tools.grammar import after_thinking
from router.tools.thinking import THINK

BLOCK, EOS = 4, 256
CONFIG = {"vocab_size": 257, "eos_token_id": EOS, "max_position_embeddings": 4096, "kv_width": 8}
ROOT = root_key("toy")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, "two", None]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "[0-9]{2,9}(-[a-f]+)?"),
    Grammar("choice", '["yes", "no", "yesterday"]'),
)


CLOSING = "\n</think>\n\n"
BUDGET = ThinkingBudget(9, (Marks("<think>", ("</think>",), tuple(CLOSING.encode())),), opened=True)
AFTER = after_thinking(FORMS[1], THINK, True, {})


@cache
def vocabulary() -> Vocabulary:
    with TemporaryDirectory() as folder:
        make_toy(Path(folder))
        return Vocabulary.load(Path(folder), 257, [EOS])


@cache
def compiled(form: Grammar | None) -> Any:
    return compile_grammar(vocabulary(), form) if form else Compiled(vocabulary(), None)


def matcher(form: Grammar | None, thinking: ThinkingBudget | None = None) -> Matcher | None:
    found: Matcher | None = compiled(form).matcher((), thinking) if form or thinking else None
    return found


class Guesser(Drafter):
    """Some guesses are right, some fit the grammar and are wrong, some do not fit it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [self._guess(ask.seq) for ask in asks]

    def _guess(self, seq: Sequence) -> list[int]:
        whole = expected(seq)
        known = whole[seq.output_len : seq.output_len + self._rng.randint(0, 5)]
        return [token if self._rng.random() < 0.7 else self._rng.randrange(257) for token in known]


def make(kind: str, guesses: bool = False, blocks: int = 64) -> Engine:
    limits, guesser = Limits(max_num_seqs=8, max_num_batched_tokens=16, reserve_growth=0.0), Guesser(1) if guesses else None
    if kind == "overlap":
        return LateEngine(LateToy(blocks, CONFIG, BLOCK), limits, min(128, blocks * BLOCK), True, guesser)
    runner = ToyRunner(CONFIG, "toy", BLOCK)
    runner.attach(KvPool(runner.layout, blocks))
    return Engine(runner, limits, min(128, blocks * BLOCK), drafter=guesser)


def sequence(name: str, tokens: list[int], form: Grammar | None, prompt_len: int | None = None, **params: Any) -> Sequence:
    values: dict[str, Any] = {"max_tokens": 40, "seed": len(name), "structured": form, **params}
    held = matcher(form, values.get("thinking"))
    return Sequence(name, list(tokens), prompt_len or len(tokens), SamplingParams(**values), ROOT, matcher=held)


def drain(engine: Engine) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    for _ in range(5000):
        if engine.idle:
            engine.pool.check()
            return outputs
        for output in engine.step():
            if output.sampled or output.failure:
                outputs.setdefault(output.seq.id, []).append(output)
    raise AssertionError("the engine does not come to rest")


def text(tokens: list[int]) -> str:
    return bytes(tokens).decode()


def expected(seq: Sequence) -> list[int]:
    return naive(seq.tokens[: seq.prompt_len], seq.params, matcher=matcher(seq.params.structured, seq.params.thinking))


@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("kind", ["engine", "overlap"])
def test_a_crowd_with_and_without_grammars_equals_the_oracle(kind: str, guesses: bool) -> None:
    """Few blocks: there are preemptions."""
    rng = random.Random(5)
    engine = make(kind, guesses, blocks=16)
    crowd = [
        sequence("s" * n, [rng.randrange(256) for _ in range(rng.randint(1, 12))], rng.choice((*FORMS, None)), seed=rng.randrange(1 << 40))
        for n in range(1, 30)
    ]
    wanted = {seq.id: expected(seq) for seq in crowd}
    for seq in crowd:
        engine.add(seq)
    outputs = drain(engine)
    assert {name: [each.sampled.token for each in of if each.sampled] for name, of in outputs.items()} == wanted
    assert engine.counts.preemptions and (not guesses or 0 < engine.counts.accepted_tokens < engine.counts.drafted_tokens)
    ended = [seq for seq in crowd if outputs[seq.id][-1].finish is Finish.STOP and seq.params.structured is FORMS[0]]
    assert ended
    for seq in ended:
        Draft202012Validator(SCHEMA).validate(json.loads(text(wanted[seq.id][:-1])))


@pytest.mark.parametrize("closing", [(), (1, 257), (-1,)])
def test_a_closing_that_cannot_be_sampled_is_refused(closing: tuple[int, ...]) -> None:
    seq = sequence("a", [1], None, thinking=replace(BUDGET, marks=(replace(BUDGET.marks[0], closing=closing),)))
    with pytest.raises(Malformed, match="closing"):
        make("engine").add(seq)
    unready = sequence("a", [1], None, thinking=BUDGET)
    unready.matcher = None
    with pytest.raises(Malformed, match="max_thinking_tokens"):
        make("engine").add(unready)


@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("kind", ["engine", "overlap"])
def test_a_crowd_whose_thinking_is_closed_equals_the_oracle(kind: str, guesses: bool) -> None:
    rng = random.Random(7)
    engine = make(kind, guesses, blocks=16)
    crowd = [
        sequence("s" * n, [rng.randrange(256)] * rng.randint(1, 12), form, thinking=thinking, seed=rng.randrange(1 << 40), min_tokens=25)
        for n, (form, thinking) in enumerate([(None, BUDGET), (AFTER, BUDGET), (None, None)] * 6, 1)
    ]
    wanted = {seq.id: expected(seq) for seq in crowd}
    for seq in crowd:
        engine.add(seq)
    outputs = drain(engine)
    assert {name: [each.sampled.token for each in of if each.sampled] for name, of in outputs.items()} == wanted
    assert engine.counts.preemptions and (not guesses or 0 < engine.counts.accepted_tokens < engine.counts.drafted_tokens)
    for seq in crowd:
        at = bytes(token for token in wanted[seq.id] if token != EOS).find(CLOSING.encode())
        assert (9 <= at < 13) == (seq.params.thinking is not None)


@pytest.mark.parametrize("kind", ["engine", "overlap"])
def test_an_output_goes_on_elsewhere_as_if_it_had_not_moved(kind: str) -> None:
    """After every token: by a retry, which has a new matcher, and by a handoff, where the first token was sampled elsewhere."""
    first = sequence("x", [7, 8, 9], FORMS[0])
    whole = expected(first)
    assert len(whole) > 12
    for cut in range(len(whole)):
        engine = make(kind)
        engine.add(sequence("x", [7, 8, 9, *whole[:cut]], FORMS[0], prompt_len=3))
        assert [each.sampled.token for each in drain(engine)["x"] if each.sampled] == whole[cut:]


def test_a_prompt_that_is_held_has_a_first_token_under_the_grammar() -> None:
    engine = make("engine")
    seq = sequence("x", [7, 8, 9], FORMS[2])
    seq.hold = True
    engine.add(seq)
    outputs = drain(engine)
    assert seq.state is State.HELD and outputs["x"][-1].sampled and outputs["x"][-1].sampled.token in b"yn"


@pytest.mark.parametrize("kind", ["engine", "overlap"])
@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 40}])
def test_who_wants_no_end_gets_the_longest_document_and_then_the_end(kind: str, params: dict[str, Any]) -> None:
    """A complete document that cannot go on ends; one that can go on does, as long as it must."""
    engine = make(kind)
    engine.add(sequence("closed", [1], FORMS[2], **params))
    engine.add(sequence("open", [1], Grammar("regex", "[a-c]+"), **params))
    outputs = drain(engine)
    words = [each.sampled.token for each in outputs["closed"] if each.sampled]
    assert words[-1] == EOS and text(words[:-1]) in ("no", "yesterday") and outputs["closed"][-1].finish is Finish.STOP
    assert len(outputs["open"]) == 40 and outputs["open"][-1].finish is Finish.LENGTH


def test_a_stop_token_inside_a_document_ends_it() -> None:
    engine = make("engine")
    engine.add(sequence("x", [1], Grammar("regex", "[a-c]{30}"), stop_token_ids=frozenset(b"a")))
    assert drain(engine)["x"][-1].finish is Finish.STOP


class Broken:
    """A library that gives up after three tokens."""

    failure = ""

    def mask(self, output: Any) -> Any:
        words = matcher(Grammar("regex", "[a-z]*")).mask(output)  # type: ignore[union-attr]
        if len(output) < 3:
            return words
        self.failure = "too complex"
        return NOTHING


@pytest.mark.parametrize("kind", ["engine", "overlap"])
def test_a_grammar_that_is_given_up_is_an_error_of_its_sequence_alone(kind: str) -> None:
    engine = make(kind)
    broken, others = sequence("broken", [1, 2], FORMS[1]), [sequence(name, [1, 2], form) for name, form in (("a", FORMS[0]), ("bc", None))]
    broken.matcher = Broken()
    for seq in (others[0], broken, others[1]):
        engine.add(seq)
    outputs = drain(engine)
    assert len(outputs["broken"]) == 4 and "too complex" in (outputs["broken"][-1].failure or "")
    for seq in others:
        assert [each.sampled.token for each in outputs[seq.id] if each.sampled] == expected(seq)


def test_an_output_that_does_not_fit_its_grammar_is_never_continued_without_it() -> None:
    engine = make("engine")
    engine.add(sequence("x", [1, 2, 3], FORMS[2], prompt_len=1))
    assert drain(engine)["x"][-1].failure


def test_an_engine_that_cannot_hold_an_output_to_a_grammar_refuses_it() -> None:
    engine = make("engine")
    seq = sequence("x", [1], FORMS[0])
    seq.matcher = None
    with pytest.raises(Malformed, match="structured"):
        engine.add(seq)
    assert not engine.sequences


async def test_a_worker_without_grammars_refuses_and_keeps_nothing() -> None:
    class Direct(Commands):
        async def call(self, function: Any) -> Any:
            return function(self._engine)

    silent = Listener(lambda outputs: None, lambda events: None, lambda error: None)
    engine = make("engine")
    seq = sequence("x", [1], FORMS[0])
    seq.matcher = None
    with pytest.raises(Malformed, match="structured"):
        await Direct(engine, silent).add(seq)
    with pytest.raises(Malformed, match="structured"):
        await Direct(engine, silent).reserve(seq)
    assert not engine.sequences


def test_tokens_are_taken_out_of_a_mask_unless_nothing_is_left() -> None:
    words = matcher(Grammar("regex", "[ab]*")).mask([])  # type: ignore[union-attr]
    assert words is not None
    fewer = without(words, [EOS, 97, 100_000, -1])
    assert [i for i in range(257) if fewer[i // 32] >> (i % 32) & 1] == [98]
    assert (without(fewer, [98]) == fewer).all()
