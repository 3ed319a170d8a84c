"""Requests that kill: which one of those on a worker that died was it, and who asks the same again. Decides and does nothing else.

    begin, died, end         every stretch of work of a request on a worker's process; `died` says whether the request is condemned
    may_try                  before each attempt: nobody is condemned because of the company that it was in
    quarantine, refusal      prompts that were condemned, for a while

A request is condemned at the second process that dies under it without a token in between, if it is more suspect than everything else that
was on that process. A stretch in which it got no token makes a request suspect: the others that were there had been computed before, and
what kills is what is computed. If two are equally suspect, nobody is condemned, and each of them is tried again while no other of its kind
is being tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from router.request import Request, Suspicion

MAX_PROMPTS = 256  # quarantined
MAX_DEAD = 64  # processes whose company is remembered
DEATHS = 2
_Process = tuple[str, int]  # name and incarnation of a worker


@dataclass(frozen=True, slots=True)
class _Stretch:
    request: Request
    process: _Process
    known: int  # tokens at its begin

    @property
    def suspicion(self) -> Suspicion:
        """Of the request, if the process has just died under it."""
        before, position = self.request.suspicion, len(self.request.tokens)
        if before.position != position:
            before = Suspicion(position)
        return Suspicion(position, before.deaths + 1, before.without_token + (position == self.known))


class Poison:
    def __init__(self) -> None:
        self._stretches: dict[str, _Stretch] = {}
        self._dead: dict[_Process, dict[str, Suspicion]] = {}  # who was on it, oldest first
        self._trial: Request | None = None
        self._until: dict[tuple[bytes, tuple[int, ...]], float] = {}  # key of the last full block, tokens after it → end; oldest first

    # Who was it

    def begin(self, work: str, request: Request, worker: str, incarnation: int) -> None:
        self._stretches[work] = _Stretch(request, (worker, incarnation), len(request.tokens))

    def end(self, work: str) -> None:
        """However it ended; nothing happens for one that is not there."""
        self._stretches.pop(work, None)

    def died(self, work: str) -> bool:
        """The process died under this work. True: the request is condemned."""
        stretch = self._stretches[work]
        company = self._dead.get(stretch.process)
        if company is None:  # the first to tell: what the others will say can be known already
            company = {name: other.suspicion for name, other in self._stretches.items() if other.process == stretch.process}
            self._dead[stretch.process] = company
            if len(self._dead) > MAX_DEAD:
                del self._dead[next(iter(self._dead))]
        mine = stretch.request.suspicion = company.setdefault(work, stretch.suspicion)
        others = (suspicion for name, suspicion in company.items() if name != work)
        return mine.deaths >= DEATHS and all(_weight(mine) > _weight(other) for other in others)

    def may_try(self, request: Request) -> bool:
        """False: it is one of several suspects, and another one is being tried. Ask again later, or `forget` it."""
        if request.suspicion.deaths < DEATHS or _has_moved(request):
            return True
        if self._trial is None or self._trial is request or _has_moved(self._trial):
            self._trial = request
        return self._trial is request

    def forget(self, request: Request) -> None:
        """It has ended."""
        if self._trial is request:
            self._trial = None

    # Who asks the same

    def quarantine(self, parents: Sequence[bytes], block_size: int, prompt: Sequence[int], until: float) -> None:
        """`parents`: the root key, then the keys of the full blocks of `prompt`. The table is bounded: the oldest goes."""
        full = len(prompt) // block_size
        self._until[parents[full], tuple(prompt[full * block_size :])] = until
        if len(self._until) > MAX_PROMPTS:
            del self._until[next(iter(self._until))]

    def refusal(self, parents: Sequence[bytes], block_size: int, prompt: Sequence[int], now: float) -> float | None:
        """Seconds for which `prompt` is still refused; None: it is not. Refused are the prompts in quarantine and those that begin with
        one of at least a block: a shorter one may begin many a prompt."""
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
    """It has got a token since a process died under it."""
    return len(request.tokens) != request.suspicion.position
