"""Compiles grammars in threads of their own, a bounded number at a time, and remembers them: an answer of several choices, and every later
request with the same grammar, compile nothing. Refusals are remembered, too, so a grammar that is dear to refuse costs once. The library is
loaded with the first grammar: who serves none pays for none."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton.engine.core.grammar import Grammar, GrammarRefused, GrammarsBusy
from baton.engine.core.thinking import ThinkingBudget

if TYPE_CHECKING:
    from baton.engine.core.masks import Matcher
    from baton.engine.grammars.library import Compiled, Vocabulary

REMEMBERED = 64
WAITING = 64  # grammars that may wait for a thread
REPLAYED_HERE = 100  # tokens of an output: 0.1 ms
WITHIN_S = 10.0  # the slowest that the bounds let through takes 1


class GrammarStore:
    """`baton.engine.core.contract.Grammars` for the tokenizer of a model folder. One that the library cannot use refuses every grammar."""

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._facts = model_path, vocab_size, sorted(eos_token_ids)
        self._vocabulary: Vocabulary | ValueError | None = None
        self._done: OrderedDict[Grammar | None, Compiled | GrammarRefused] = OrderedDict()
        self._begun: dict[Grammar | None, asyncio.Future[Compiled | GrammarRefused]] = {}
        self._thread = ThreadPoolExecutor(1, "grammars")  # a second hostile grammar waits for the first, and the cores are free

    async def ready(self, grammar: Grammar | None, output: Seq[int], thinking: ThinkingBudget | None = None) -> "Matcher":
        compiled = await self.compiled(grammar, WITHIN_S)
        if len(output) < REPLAYED_HERE:
            return compiled.matcher(output, thinking)
        return await asyncio.get_running_loop().run_in_executor(self._thread, compiled.matcher, output, thinking)

    async def compiled(self, grammar: Grammar | None, within_s: float) -> "Compiled":
        """Raises GrammarRefused or GrammarsBusy. A compilation that was given up goes on, and is remembered. None: without a grammar, only
        the bytes of the tokens are needed."""
        found = self._done.get(grammar)
        if found is None:
            found = await self._compiled(grammar, within_s)
        else:
            self._done.move_to_end(grammar)
        if isinstance(found, GrammarRefused):
            raise GrammarRefused(found.why, found.path)
        return found

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compiled(self, grammar: Grammar | None, within_s: float) -> "Compiled | GrammarRefused":
        future = self._begun.get(grammar)
        if future is None:
            if len(self._begun) >= WAITING:
                raise GrammarsBusy("too many grammars wait to be compiled")
            future = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
            self._begun[grammar] = future
            future.add_done_callback(partial(self._remember, grammar))
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.shield(future)
        except TimeoutError:
            raise GrammarsBusy("the grammar was not compiled in time") from None

    def _compile(self, grammar: Grammar | None) -> "Compiled | GrammarRefused":
        from baton.engine.grammars.library import Compiled, Vocabulary, compile_grammar

        if self._vocabulary is None:
            try:
                self._vocabulary = Vocabulary.load(*self._facts)
            except (ValueError, OSError) as error:
                self._vocabulary = ValueError(str(error))
        if isinstance(self._vocabulary, ValueError):
            return GrammarRefused(str(self._vocabulary))
        try:
            return Compiled(self._vocabulary, None) if grammar is None else compile_grammar(self._vocabulary, grammar)
        except GrammarRefused as refused:
            return refused

    def _remember(self, grammar: Grammar | None, future: "asyncio.Future[Compiled | GrammarRefused]") -> None:
        del self._begun[grammar]
        if not future.cancelled() and future.exception() is None:
            self._done[grammar] = future.result()
            while len(self._done) > REMEMBERED:
                self._done.popitem(last=False)
