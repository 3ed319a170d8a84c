"""Thinking is closed at its budget, and where it is open is what the router's reader takes for it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_parts import tokenizer_of
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.engine.core.masks import Matcher, Words, allowed_ids
from baton.engine.core.thinking import Marks, ThinkingBudget
from baton.engine.facts.fields import Fields
from baton.engine.facts.tokenizer_files import gather
from baton.engine.grammars.closing import Closer, ClosingPhase, inside_character
from baton.engine.grammars.library import Compiled, Vocabulary
from router.conversation import Setting
from router.tools.forms import Forms
from router.tools.thinking import BY_NAME, THINK, Thinking, ThinkingReader

VOCAB = 257
CLOSING = tuple(b"\n</think>\n\n")
MARKS = Marks(THINK.begin, (THINK.end, "<tool_call>"), CLOSING)
BUDGET = ThinkingBudget(4, (MARKS,), opened=True)


def closer(budget: ThinkingBudget, inner: "Only | None" = None) -> Closer:
    return Closer(budget, lambda token: bytes([token]) if token < 256 else b"", VOCAB, inner)


class Only:
    """A grammar of one token."""

    failure = ""

    def mask(self, output: Sequence[int]) -> Words | None:
        return closer(ThinkingBudget(0, (replace(MARKS, closing=(7,)),), True)).mask([])


def forced(made: Closer, output: bytes | list[int]) -> int | None:
    """The only token that may follow."""
    words = made.mask(list(output))
    assert words is not None
    ids = allowed_ids(words, VOCAB).tolist()
    assert len(ids) in (1, VOCAB)
    return ids[0] if len(ids) == 1 else None


def run(made: Closer, own: bytes) -> bytes:
    """What is written if the model wants to write `own`."""
    output = list[int]()
    left = list(own)
    while left or forced(made, output) is not None:
        token = forced(made, output)
        output.append(left.pop(0) if token is None else token)
    return bytes(output)


@pytest.mark.parametrize(
    "budget, own, written",
    [
        (BUDGET, b"abcdefg", b"abcd\n</think>\n\nefg"),
        (replace(BUDGET, max_tokens=0), b"yes", b"\n</think>\n\nyes"),
        (replace(BUDGET, max_tokens=9), b"a</think>long answer", b"a</think>long answer"),
        (replace(BUDGET, max_tokens=12), b"a<tool_call>long call", b"a<tool_call>long call"),  # what ends it otherwise ends it, too
        (replace(BUDGET, max_tokens=7), b"a</think>answer", b"a</thin\n</think>\n\nk>answer"),
        (BUDGET, "abcé".encode() + b"d", "abcé\n</think>\n\nd".encode()),  # no character is cut
        (BUDGET, b"abc\xffd", b"abc\xff\n</think>\n\nd"),  # a byte that begins none is none
        (replace(BUDGET, opened=False), b"an answer", b"an answer"),  # without thinking there is nothing to close
        (replace(BUDGET, opened=False), b" \n<think>abc", b" \n<think>\n</think>\n\nabc"),
        (replace(BUDGET, opened=False, max_tokens=9), b"<think>abc", b"<think>ab\n</think>\n\nc"),
        (ThinkingBudget(9, (Marks("[THINK]", ("[/THINK]",), tuple(b"[/THINK]")), MARKS)), b"[THINK]abc", b"[THINK]ab[/THINK]c"),
        (ThinkingBudget(9, (Marks("[THINK]", ("[/THINK]",), tuple(b"[/THINK]")), MARKS)), b"<think>abc", b"<think>ab\n</think>\n\nc"),
    ],
)
def test_what_is_inside_its_thinking_at_the_budget_is_closed(budget: ThinkingBudget, own: bytes, written: bytes) -> None:
    assert run(closer(budget), own) == written


def test_it_depends_on_the_output_alone_whatever_was_asked_before() -> None:
    whole = run(closer(BUDGET), b"abcdefg")
    asked = closer(BUDGET)
    for at in [*range(len(whole)), 3, 9, 0, len(whole), 5, 17]:
        assert forced(asked, whole[:at]) == forced(closer(BUDGET), whole[:at])
        assert asked.mask([*whole[:5], 0, 1]) is None, "another token where one was forced"


def test_a_form_has_the_word_where_nothing_is_forced() -> None:
    made = closer(BUDGET, Only())
    assert [forced(made, b"abcd"[:n]) for n in range(5)] == [7, 7, 7, 7, CLOSING[0]]
    assert forced(made, b"abcd" + bytes(CLOSING)) == 7


@pytest.mark.parametrize("special", [True, False])
def test_marks_that_are_tokens_of_their_own_are_read_and_written_as_such(special: bool) -> None:
    """And no other control token has text."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["<eos>", "<x>"], show_progress=False))
    (made.add_special_tokens if special else made.add_tokens)(["<think>", "</think>"])
    tokenizer = tokenizer_of(made.to_str(), template="{{ messages }}</think>")
    where = Fields(Path("x/tokenizer_config.json"), {}), Fields(Path("x/config.json"), {})
    vocabulary = Vocabulary(gather(made.to_str(), *where), tokenizer.vocab_size, [0])
    forms = Forms.of(tokenizer)
    ids = partial(tokenizer.encode, add_special_tokens=False)
    budget = forms.budget(Setting(max_thinking=3, splits_reasoning=True), "", ids)
    assert budget is not None and tokenizer.id_for("</think>") in budget.marks[0].closing
    follow = Compiled(vocabulary, None).matcher((), budget)
    output = ids("<think>ab")
    assert len(output) == 3 and all(len(allowed(follow, output[:n], tokenizer.vocab_size)) > 1 for n in range(3))
    for token in budget.marks[0].closing:
        assert allowed(follow, output, tokenizer.vocab_size) == [token]
        output.append(token)
    assert len(allowed(follow, output, tokenizer.vocab_size)) > 1 and tokenizer.spelled(output) == "<think>ab\n</think>\n\n"
    silent = [tokenizer.id_for("<x>") or 0, *ids("<think>a")]
    assert len(allowed(follow, silent, tokenizer.vocab_size)) == 1, "what has no text comes before nothing"


def allowed(matcher: Matcher, output: list[int], vocab_size: int) -> list[int]:
    words = matcher.mask(output)
    assert words is not None
    return [int(id_) for id_ in allowed_ids(words, vocab_size)]


@given(st.data())
def test_the_reader_and_the_closer_see_the_same_thinking(data: st.DataObject) -> None:
    opened = data.draw(st.booleans())
    thinking: Thinking = data.draw(st.sampled_from([THINK, BY_NAME["mistral"]]))
    ends = data.draw(st.sampled_from([(), ("<tool_call>",)]))
    marks = [Marks(thinking.begin, (thinking.end, *ends), (0,))]
    if thinking.other is not None:
        marks.append(Marks(thinking.other.begin, (thinking.other.end,), (0,)))
    parts = ["<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", " ", "\n", "a", "é", "</thin", "<", "[THI"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    made = closer(ThinkingBudget(1 << 30, tuple(marks), opened))
    reader, output = ThinkingReader(thinking, opened, ends), list[int]()
    for char in text:
        reader.push(char)
        output += char.encode()
        assert made.mask(output) is not None
        assert (made._states[-1].phase is ClosingPhase.INSIDE) == reader.thinks, (text, output)


@given(st.binary(max_size=6), st.text(max_size=3))
def test_a_character_is_open_where_python_waits_for_more(junk: bytes, text: str) -> None:
    for end in range(len(text.encode()) + 1):
        part = text.encode()[:end]
        whole = True
        try:
            part.decode()
        except UnicodeDecodeError:
            whole = False
        assert inside_character(part) == (not whole)
    inside_character(junk)
