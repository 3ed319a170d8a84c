"""Refuses a request whose output no worker could hold to its form, before it goes to one: the grammar is compiled here as a worker will."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.cluster.errors import BatonError, Reason, invalid
from baton.engine.core.grammar import GrammarRefused, GrammarsBusy
from baton.engine.core.thinking import ThinkingBudget
from baton.engine.grammars.store import GrammarStore
from router.served import Served
from router.validate import Ask


class GrammarCheck:
    def __init__(self, path: Path | None, vocab_size: int, clock: Callable[[], float]) -> None:
        """`path`: of the model's folder; without one, every form is refused."""
        self._path, self._vocab_size, self._clock = path, vocab_size, clock
        self._grammars: GrammarStore | None = None  # made for the first form: who serves none pays for none

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    async def form(self, ask: Ask, served: Served, deadline: float) -> tuple[str, ...]:
        """Compiles the form, in a thread. Returns what of it is not enforced. Raises INVALID_FIELD with its path in the schema, and
        SATURATED."""
        form = ask.sampling.structured
        if form is None:
            return ()
        with _refusing("sampling.structured"):
            return (await self._store(served).compiled(form, deadline - self._clock())).relaxed

    async def output(self, ask: Ask, thinking: ThinkingBudget | None, served: Served, deadline: float) -> None:
        """Whether a worker can hold the rest of the output to its form and to the budget of its thinking. Raises like `form`."""
        form, output = ask.sampling.structured, list(ask.output_so_far)
        if thinking is None and (form is None or not output):
            return
        with _refusing("max_thinking_tokens" if form is None else "sampling.structured"):
            async with asyncio.timeout(deadline - self._clock()):
                await self._store(served).ready(form, output, thinking)

    def _store(self, served: Served) -> GrammarStore:
        """Raises GrammarRefused."""
        if self._path is None:
            raise GrammarRefused("the files of this model are not here")
        if self._grammars is None:
            self._grammars = GrammarStore(self._path, self._vocab_size, served.eos_token_ids)
        return self._grammars


@contextmanager
def _refusing(field: str) -> Iterator[None]:
    try:
        yield
    except GrammarRefused as error:
        raise invalid(field, str(error)) from None
    except (GrammarsBusy, TimeoutError) as error:
        raise BatonError(Reason.SATURATED, str(error) or "the form of the output was not ready in time") from None
