"""Grammars are compiled off the event loop, once each, with a bound on how many wait, and within a time."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.grammar import Grammar, GrammarRefused, GrammarsBusy
from baton.engine.grammars import library
from baton.engine.grammars.store import REMEMBERED, WAITING, GrammarStore
from baton.models.make_small import make_toy

FORM = Grammar("regex", "a+")


@pytest.fixture
def store(tmp_path: Path) -> GrammarStore:
    make_toy(tmp_path)
    return GrammarStore(tmp_path, 257, [256])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were compiled, in order."""
    texts, real = list[str](), library.compile_grammar

    def note(vocabulary: Any, grammar: Grammar) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        texts.append(grammar.text)
        return real(vocabulary, grammar)

    monkeypatch.setattr(library, "compile_grammar", note)
    return texts


async def test_a_grammar_is_compiled_once_for_all_who_ask(store: GrammarStore, compiled: list[str]) -> None:
    await asyncio.gather(*(store.ready(FORM, []) for _ in range(8)))
    assert (await store.ready(FORM, [97] * 500)).mask([97] * 500) is not None and compiled == ["a+"]
    for _ in range(2):
        with pytest.raises(GrammarRefused):
            await store.ready(Grammar("regex", "(a"), [])
    assert compiled == ["a+", "(a"]


async def test_an_output_that_does_not_fit_is_refused(store: GrammarStore) -> None:
    for output in ([98], [97] * 500 + [98]):
        with pytest.raises(GrammarRefused, match="does not fit"):
            await store.ready(FORM, output)


async def test_only_some_are_remembered(store: GrammarStore, compiled: list[str]) -> None:
    for i in range(REMEMBERED + 1):
        await store.ready(Grammar("choice", f'["{i}"]'), [])
    await store.ready(Grammar("choice", '["0"]'), [])
    assert compiled.count('["0"]') == 2 and compiled.count(f'["{REMEMBERED}"]') == 1


async def test_who_waits_too_long_or_behind_too_many_is_told(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), library.compile_grammar

    def slow(vocabulary: Any, grammar: Grammar) -> Any:
        gate.wait(30)
        return real(vocabulary, grammar)

    monkeypatch.setattr(library, "compile_grammar", slow)
    with pytest.raises(GrammarsBusy, match="in time"):
        await store.compiled(FORM, 0.05)
    waiting = [asyncio.create_task(store.ready(Grammar("choice", f'["{i}"]'), [])) for i in range(WAITING - 1)]
    await asyncio.sleep(0)
    with pytest.raises(GrammarsBusy, match="too many"):
        await store.ready(Grammar("regex", "b"), [])
    gate.set()
    await asyncio.gather(*waiting)
    assert (await store.compiled(FORM, 10)).relaxed == (), "the compilation that was given up has been remembered"


async def test_a_model_that_cannot_hold_an_output_to_a_grammar_refuses_all(tmp_path: Path) -> None:
    make_toy(tmp_path)
    with pytest.raises(GrammarRefused, match="end token"):
        await GrammarStore(tmp_path, 257, []).ready(FORM, [])
    with pytest.raises(GrammarRefused, match=r"tokenizer\.json"):
        await GrammarStore(tmp_path / "nothing", 257, [256]).ready(FORM, [])
