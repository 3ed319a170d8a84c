"""Grammars where vLLM chooses tokens: in the processes of its ranks.

Our process has compiled a grammar, within its bounds, before a rank hears of it. A rank compiles it in the thread of the link, so that no
step waits, and the request comes after all ranks have answered.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from baton.engine.core.grammar import Grammar, GrammarRefused, GrammarsBusy
from baton.engine.core.masks import Matcher
from baton.engine.core.thinking import ThinkingBudget
from baton.engine.facts.model_facts import end_tokens
from baton.engine.grammars.store import GrammarStore

if TYPE_CHECKING:
    from baton.engine.grammars.library import Compiled, Vocabulary

KNOWN = 64  # grammars of which our process believes that every rank has them
REMEMBERED = 2 * KNOWN  # by a rank
WITHIN_S = 10.0


class RankForms:
    """`baton.engine.core.contract.Grammars` of an engine whose tokens are chosen elsewhere. Its methods run on the event loop."""

    def __init__(self, store: GrammarStore, tell: Callable[[dict[str, Any]], None], ranks: int) -> None:
        """`tell` sends a message to every one of so many ranks, and may block."""
        self._store, self._tell, self._ranks = store, tell, ranks
        self._known: OrderedDict[Grammar, asyncio.Future[None]] = OrderedDict()
        self._asked: dict[int, tuple[Grammar, int]] = {}  # number → grammar, ranks that have not answered
        self._numbers = count()

    async def ready(self, grammar: Grammar | None, output: Seq[int], thinking: ThinkingBudget | None = None) -> Matcher:
        matcher = await self._store.ready(grammar, output, thinking)
        if grammar is not None:
            await self._at_ranks(grammar)
        return matcher

    async def _at_ranks(self, grammar: Grammar) -> None:
        """Raises GrammarRefused or GrammarsBusy."""
        if (known := self._known.get(grammar)) is None:
            known = self._known[grammar] = asyncio.get_running_loop().create_future()
            known.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waits may have gone
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
            self._asked[number := next(self._numbers)] = grammar, self._ranks
            await asyncio.to_thread(self._tell, {"number": number, **grammar.told()})
        self._known.move_to_end(grammar)
        try:
            async with asyncio.timeout(WITHIN_S):
                await asyncio.shield(known)
        except TimeoutError:
            raise GrammarsBusy("the grammar was not compiled in time") from None

    def answered(self, number: int, why: str) -> None:
        """A rank has compiled a grammar, or says why not."""
        if (asked := self._asked.pop(number, None)) is None:
            return
        grammar, left = asked
        known = self._known.get(grammar)
        if why:
            self._known.pop(grammar, None)
            if known is not None and not known.done():
                known.set_exception(GrammarRefused(why))
        elif left > 1:
            self._asked[number] = grammar, left - 1
        elif known is not None and not known.done():
            known.set_result(None)

    def close(self) -> None:
        self._store.close()


class VllmForms:
    """Belongs to the thread of the link and that of the model runner. The library is loaded with the first grammar."""

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        self._path, self._vocab_size = model_path, vocab_size
        self._vocabulary: Vocabulary | None = None
        self._done: OrderedDict[Grammar | None, Compiled] = OrderedDict()
        self._lock = Lock()

    def compile(self, grammar: Grammar) -> str:
        """Returns why it cannot be used; empty if it can."""
        try:
            self._compiled(grammar)
        except (GrammarRefused, ValueError, OSError) as error:
            return str(error)
        return ""

    def matcher(self, grammar: Grammar | None, thinking: ThinkingBudget | None) -> Matcher:
        """Compiles only what `compile` has not seen, or has forgotten. Raises GrammarRefused, ValueError or OSError."""
        return self._compiled(grammar).matcher(thinking=thinking)

    def _compiled(self, grammar: Grammar | None) -> "Compiled":
        from baton.engine.grammars.library import Compiled, Vocabulary, compile_grammar

        with self._lock:
            if (found := self._done.get(grammar)) is None:
                if self._vocabulary is None:
                    self._vocabulary = Vocabulary.load(self._path, self._vocab_size, sorted(end_tokens(self._path)))
                found = Compiled(self._vocabulary, None) if grammar is None else compile_grammar(self._vocabulary, grammar)
                self._done[grammar] = found
                while len(self._done) > REMEMBERED:
                    self._done.popitem(last=False)
            self._done.move_to_end(grammar)
            return found


@cache
def forms_of(model_path: Path, vocab_size: int) -> VllmForms:
    """The same for all parts of a process."""
    return VllmForms(model_path, vocab_size)
