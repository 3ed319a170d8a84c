"""Finds the request that killed a worker, and recognises the same prompt later. It only decides.

    begin, died, end         record each stretch of a request's work on a worker process; `died` says whether the request is condemned
    may_try                  is called before each attempt, so that no request is condemned because of its neighbours
    trial                    the suspect that is being tried: another one may be tried as soon as it has a token, or has ended
    quarantine, refusal      refuse condemned prompts for a while

A request is condemned when a second process dies under it with no token in between, if it is more suspect than every other request on that
process. A stretch without a token makes a request suspect: a worker dies of what it computes, and the other requests there had been
computed before. If two requests are equally suspect, neither is condemned, and each is retried while no other suspect is being tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.request import Request, Suspicion

MAX_PROMPTS = 256  # quarantined
MAX_DEAD = 64  # dead processes whose requests are remembered
DEATHS = 2
_Process = tuple[str, int]  # name and incarnation of a worker


@dataclass(frozen=True, slots=True)
class _Stretch:
    request: Request
    process: _Process
    known: int  # tokens at its start

    @property
    def suspicion(self) -> Suspicion:
        """How suspect the request is if the process has just died under it."""
        before, position = self.request.suspicion, len(self.request.tokens)
        if before.position != position:
            before = Suspicion(position)
        return Suspicion(position, before.deaths + 1, before.without_token + (position == self.known))


class Poison:
    def __init__(self) -> None:
        self._stretches: dict[str, _Stretch] = {}
        self._dead: dict[_Process, dict[str, Suspicion]] = {}  # the work that was on each, oldest first
        self.trial: Request | None = None
        self._until: dict[tuple[bytes, tuple[int, ...]], float] = {}  # key of the last full block, tokens after it → end; oldest first

    # Which request it was

    def begin(self, work: str, request: Request, worker: str, incarnation: int) -> None:
        self._stretches[work] = _Stretch(request, (worker, incarnation), len(request.tokens))

    def end(self, work: str) -> None:
        """Call it however the work ended. Unknown work changes nothing."""
        self._stretches.pop(work, None)

    def died(self, work: str) -> bool:
        """The process died under this work. Returns whether the request is condemned."""
        stretch = self._stretches[work]
        company = self._dead.get(stretch.process)
        if company is None:  # the first report of this death already shows what the other requests will report
            company = {name: other.suspicion for name, other in self._stretches.items() if other.process == stretch.process}
            self._dead[stretch.process] = company
            if len(self._dead) > MAX_DEAD:
                del self._dead[next(iter(self._dead))]
        mine = stretch.request.suspicion = company.setdefault(work, stretch.suspicion)
        others = (suspicion for name, suspicion in company.items() if name != work)
        return mine.deaths >= DEATHS and all(_weight(mine) > _weight(other) for other in others)

    def may_try(self, request: Request) -> bool:
        """Returns False if it is one of several suspects and another one is being tried. Ask again when that one moves or ends."""
        if request.suspicion.deaths < DEATHS or _has_moved(request):
            return True
        if self.trial is None or self.trial is request or _has_moved(self.trial):
            self.trial = request
        return self.trial is request

    def forget(self, request: Request) -> bool:
        """The request has ended. Returns whether it was the one that was being tried."""
        if self.trial is not request:
            return False
        self.trial = None
        return True

    # The same prompt again

    def quarantine(self, parents: Sequence[bytes], block_size: int, prompt: Sequence[int], until: float) -> None:
        """`parents`: the root key, then the keys of the full blocks of `prompt`. The table is bounded: the oldest entry is dropped."""
        full = len(prompt) // block_size
        self._until[parents[full], tuple(prompt[full * block_size :])] = until
        if len(self._until) > MAX_PROMPTS:
            del self._until[next(iter(self._until))]

    @property
    def quarantines(self) -> bool:
        """Whether any prompt may be refused."""
        return bool(self._until)

    def refusal(self, parents: Sequence[bytes], block_size: int, prompt: Sequence[int], now: float) -> float | None:
        """Returns the seconds for which `prompt` is still refused, or None. It is refused if it is in quarantine, or if it begins with a
        quarantined prompt of at least one block: many harmless prompts may begin with a shorter one."""
        self._until = {entry: until for entry, until in self._until.items() if until > now}
        if not self._until:
            return None
        places = {key: i for i, key in enumerate(parents)}
        for (parent, tail), until in self._until.items():
            block = places.get(parent)
            if block is None:
                continue
            rest = tuple(prompt[block * block_size :])
            if rest == tail or (block and rest[: len(tail)] == tail):
                return until - now
        return None


def _weight(suspicion: Suspicion) -> tuple[int, int]:
    return suspicion.without_token, suspicion.deaths


def _has_moved(request: Request) -> bool:
    """Whether the request has received a token since a process died under it."""
    return len(request.tokens) != request.suspicion.position
