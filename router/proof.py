"""A worker that has started, or is to serve another role, proves first that it serves the role, and says the truth: the same prompt goes
through workers that serve already and through this one, and both must say the same tokens. Meanwhile it accepts work of the role and no
record says that it serves it (`baton.worker.role`), so nobody else sends it any.

Each run has a salt of its own: no cache shortens it, and the KV really moves. A handoff whose KV could not be read, so that the prompt was
computed again, proves nothing, though its tokens are right. The first decode worker of all has nobody to be compared with: it must say the
same twice, once in a handoff if a prefill worker serves. What the first ones have said is remembered, so that a new worker need not wait
for busy ones.

Tokens are compared bit for bit, as the cluster's own continuations are, up to a place where those who serve already see a near tie: there,
unlike devices may round to different sides.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from baton.clock import clock_of_loop
from baton.cluster.errors import BatonError, Reason, invalid
from baton.cluster.records import ROLES, RoleName, WorkerRecord
from baton.engine.core.sampling import SamplingParams
from router.members import Members
from router.request import Request, Stopwatch, Token, Trace
from router.workers import Ended, FirstToken, Workers

PROMPT = tuple(1 + (7 * i) % 31 for i in range(40))
TOKENS = 8
FLIP_WITHIN_S = 1.5  # for each of at most four calls: a planner waits 8 s
START_WITHIN_S = 10.0  # the same for a worker that has just started: the first steps of vLLM, on a busy machine, took more than 5 s
SPARE_S = 1.0
TIE = 0.25  # of a log-probability: bfloat16 keeps 8 bits, so a logit of 30 is about as exact
MODELS = 8  # whose answer is kept
Usable = Mapping[RoleName, Sequence[WorkerRecord]]
Answers = dict[str, Sequence[Token]]  # fingerprint of the model → what its workers say


class ProvingWorkers(Workers, Protocol):
    async def set_roles(
        self, worker: WorkerRecord, roles: Sequence[str], prove: bool = False, why: str = ""
    ) -> tuple[tuple[RoleName, ...], tuple[RoleName, ...]]: ...


class NoReference(BatonError):
    """There is nothing to compare with: not the worker's fault."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.NO_WORKER, message)


def usable(members: Members, like: WorkerRecord) -> dict[RoleName, list[WorkerRecord]]:
    """Those that serve each role of the worker's model, without itself and without those that nobody would choose."""
    same, own = like.model_fingerprint, like.name
    good = {role: [m.record for m in members.answering(role) if not (m.hung or m.ejected)] for role in ROLES}
    return {role: [one for one in found if one.model_fingerprint == same and one.name != own] for role, found in good.items()}


async def prove(workers: ProvingWorkers, others: Usable, worker: WorkerRecord, roles: Sequence[str]) -> None:
    """Returns when a worker that serves has proved each role that it does not serve yet. Raises BatonError, and then it serves what it did
    before."""
    if worker.unproven:
        raise invalid("worker", f"{worker.name} has not proved the role yet in which it was started")
    wanted = [role for role in ROLES if role in roles and role not in worker.serving]
    if not wanted:
        return
    try:
        await workers.set_roles(worker, wanted, prove=True)
        for role in wanted:
            if not others["decode"]:
                raise BatonError(Reason.INVALID_FIELD, f"{worker.name} cannot prove itself: no other worker decodes")
            partners = _partner(others["prefill"]), _partner(others["decode"])
            await _Proof(workers, worker, FLIP_WITHIN_S).compare(role, *partners, {})
    except BaseException as error:
        if isinstance(error, BatonError | asyncio.CancelledError):  # whoever asked may have gone
            await asyncio.shield(workers.set_roles(worker, worker.serving))
        raise


@dataclass(frozen=True, slots=True)
class Try:
    """One try of a worker that has started. `turn`: each of the others is the partner in its turn, for it may be the bad one. `undecided`:
    how often partners did not answer; a decode worker then does without a handoff, for they may be busy just when it is needed."""

    turn: int = 0
    undecided: int = 0


async def admit(workers: ProvingWorkers, others: Usable, worker: WorkerRecord, which: Try, known: Answers) -> tuple[RoleName, ...]:
    """Lets a worker that has started serve, if it proves its roles. Returns what it serves. `known`: what was said before by those that
    proved themselves, by model; this one's is added. Raises NoReference, BatonError."""
    for role in worker.proving:
        if role == "prefill" and not others["decode"]:
            raise NoReference("no decode worker serves yet")
        prefill, decode = _partner(others["prefill"], which.turn), _partner(others["decode"], which.turn)
        if role == "decode" and which.undecided > len(others["prefill"]):
            prefill = None
        await _Proof(workers, worker, START_WITHIN_S).compare(role, prefill, decode, known)
    serving, _ = await workers.set_roles(worker, worker.proving)
    if not set(worker.proving) <= set(serving):
        asked, does = ", ".join(worker.proving), ", ".join(serving) or "nothing"
        raise BatonError(Reason.WRONG_ROLE, f"{worker.name} was told to serve {asked} and serves {does}")
    return serving


def _partner(found: Sequence[WorkerRecord], turn: int = 0) -> WorkerRecord | None:
    """The idlest first: a busy one may answer late."""
    by_load = sorted(found, key=lambda one: (one.load.waiting, one.load.running))
    return by_load[turn % len(by_load)] if by_load else None


def parting(known: Sequence[Token], told: Sequence[Token]) -> str:
    """Where they differ; empty: nowhere, or first where `known` tells that the two tokens were as good as equal."""
    differ = next((pair for pair in zip(known, told, strict=False) if pair[0].id != pair[1].id), None)
    if differ is None and len(known) == len(told):
        return ""
    if differ is not None:
        mine, other = differ[0], dict(differ[0].top).get(differ[1].id)
        if mine.logprob is not None and other is not None and abs(mine.logprob - other) < TIE:
            return ""
    return f"it says {[token.id for token in told]} where others say {[token.id for token in known]}"


@dataclass(frozen=True, slots=True)
class _Proof:
    """`within_s`: for each call."""

    workers: Workers
    worker: WorkerRecord
    within_s: float

    async def compare(self, role: str, prefill: WorkerRecord | None, decode: WorkerRecord | None, known: Answers) -> None:
        """Raises NoReference, BatonError."""
        worker, model = self.worker, self.worker.model_fingerprint
        if decode is None:  # nobody else decodes: it is compared with itself, and with a prefill worker if there is one
            reference: Sequence[Token] = await self._tokens(None, worker)
        else:
            reference = known.get(model) or await self._tokens(prefill, decode)
        through = (worker, decode) if role == "prefill" and decode is not None else (prefill, worker)
        if why := parting(reference, await self._tokens(*through)):
            raise BatonError(Reason.INTERNAL, f"{worker.name} is not admitted to {role}: {why}")
        known[model] = reference
        while len(known) > MODELS:
            del known[next(iter(known))]

    async def _tokens(self, prefill: WorkerRecord | None, decode: WorkerRecord) -> list[Token]:
        """What the two say to the prompt; without the first, the second computes it, too. Raises NoReference if one fails that is not to
        prove itself here, BatonError."""
        clock = clock_of_loop()
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
        deadline, salt = clock() + 2 * self.within_s, uuid4().hex
        request = Request(f"proof-{uuid4().hex}", list(PROMPT), len(PROMPT), params, salt, deadline, Trace(Stopwatch(clock)))
        said: list[Token] = []
        handle = b""
        if prefill is not None:
            async with self._answering(prefill):
                first = await _first(self.workers, prefill, request, self.within_s)
            handle = first.handle
            said.append(first.token)
            request.tokens.append(first.token.id)
        try:
            async with self._answering(decode):
                said += await _rest(self.workers, decode, request, handle, self.within_s)
        except BaseException as error:
            if prefill is not None and handle:
                self.workers.release(prefill, handle, request.id)
            if isinstance(error, Unread):
                if self.worker not in (prefill, decode):
                    raise NoReference(error.message) from None
                raise BatonError(Reason.INTERNAL, f"{self.worker.name} is not admitted: {error.message}") from None
            raise
        if len(said) != TOKENS:
            raise BatonError(Reason.INTERNAL, f"{decode.name} ended after {len(said)} of {TOKENS} tokens")
        return said

    @asynccontextmanager
    async def _answering(self, asked: WorkerRecord) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.within_s + SPARE_S):
                yield
        except TimeoutError:
            error = BatonError(Reason.DEADLINE, f"{asked.name} did not answer within {self.within_s:g} s")
        except Unread:
            raise  # the fault may be of either end
        except BatonError as failed:
            error = failed
        else:
            return
        if asked.name != self.worker.name:
            raise NoReference(f"{asked.name}, which serves already, did not answer: {error.message}") from None
        raise error


class Unread(BatonError):
    """A decode worker computed a prompt again, because it could not read the KV."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.INTERNAL, message)


async def _rest(workers: Workers, decode: WorkerRecord, request: Request, handle: bytes, within_s: float) -> list[Token]:
    said: list[Token] = []
    async with aclosing(workers.decode(decode, request, handle, within_s)) as events:
        async for event in events:
            if isinstance(event, tuple):
                said += event
            elif isinstance(event, Ended) and handle and 2 * event.recomputed_tokens > len(PROMPT):
                raise Unread(f"{decode.name} could not read the KV that it was handed, and computed the prompt itself")
    return said


async def _first(workers: Workers, prefill: WorkerRecord, request: Request, within_s: float) -> FirstToken:
    """Computes the prompt."""
    found: FirstToken | None = None
    async with aclosing(workers.prefill(prefill, request, within_s)) as events:
        async for event in events:
            if isinstance(event, FirstToken):
                found = event
    if found is None:
        raise BatonError(Reason.INTERNAL, f"{prefill.name} ended without a token")
    return found
