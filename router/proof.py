"""A worker that is to serve another role proves first that it does, and says the truth: the same prompt goes through a worker that serves
the role already and through this one, and both must say the same tokens. Meanwhile it accepts work of the role and no record says so
(`baton.worker.role`), so nobody else sends it any.

Each run has a salt of its own: no cache shortens it, and the KV really moves. Where only one worker of the other role is there, both runs
go through it. Outputs are compared bit for bit, as the cluster's own continuations are.
"""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Protocol
from uuid import uuid4

from baton.clock import clock_of_loop
from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import ROLES, RoleName, WorkerRecord
from baton.engine.core.sampling import SamplingParams
from router.request import Request, Stopwatch, Trace
from router.workers import FirstToken, Workers

PROMPT = tuple(1 + (7 * i) % 31 for i in range(40))
TOKENS = 8
WITHIN_S = 1.5  # for each of at most four calls: a planner waits 8 s


class ProvingWorkers(Workers, Protocol):
    async def set_roles(
        self, worker: WorkerRecord, roles: Sequence[str], prove: bool = False
    ) -> tuple[tuple[RoleName, ...], tuple[RoleName, ...]]: ...


async def prove(
    workers: ProvingWorkers, usable: Mapping[RoleName, Sequence[WorkerRecord]], worker: WorkerRecord, roles: Sequence[str]
) -> None:
    """Returns when the worker has proved each role that it does not serve yet. Raises BatonError, and then it serves what it did before."""
    serving = worker.roles or (worker.role,)
    wanted = [role for role in ROLES if role in roles and role not in serving]
    if not wanted:
        return
    try:
        await workers.set_roles(worker, wanted, prove=True)
        for role in wanted:
            await _prove(workers, usable, worker, role)
    except BatonError:
        await workers.set_roles(worker, serving)
        raise


async def _prove(workers: Workers, usable: Mapping[RoleName, Sequence[WorkerRecord]], worker: WorkerRecord, role: str) -> None:
    prefills, decodes = ([one for one in usable[name] if one.name != worker.name] for name in ROLES)
    if not decodes:
        raise BatonError(Reason.INVALID_FIELD, f"{worker.name} cannot prove itself: no other worker decodes")
    prefill = prefills[0] if prefills else None
    known = await _tokens(workers, prefill, decodes[0])
    told = await _tokens(workers, worker, decodes[0]) if role == "prefill" else await _tokens(workers, prefill, worker)
    if told != known:
        raise BatonError(Reason.INTERNAL, f"{worker.name} is not admitted to {role}: it says {told} where others say {known}")


async def _tokens(workers: Workers, prefill: WorkerRecord | None, decode: WorkerRecord) -> list[int]:
    """What the two say to the prompt; without the first, the second computes it, too. Raises BatonError."""
    clock = clock_of_loop()
    request = Request(
        f"proof-{uuid4().hex}", list(PROMPT), len(PROMPT), SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        uuid4().hex, clock() + 2 * WITHIN_S, Trace(Stopwatch(clock)),
    )  # fmt: skip
    handle = b""
    if prefill is not None:
        handle = await _first(workers, prefill, request)
    try:
        async with aclosing(workers.decode(decode, request, handle, WITHIN_S)) as events:
            async for event in events:
                if isinstance(event, tuple):
                    request.tokens += [token.id for token in event]
    except BatonError:
        if prefill is not None and handle:
            workers.release(prefill, handle, request.id)
        raise
    return request.output


async def _first(workers: Workers, prefill: WorkerRecord, request: Request) -> bytes:
    """Computes the prompt. Returns the handle of its KV."""
    handle = b""
    async with aclosing(workers.prefill(prefill, request, WITHIN_S)) as events:
        async for event in events:
            if isinstance(event, FirstToken):
                request.tokens.append(event.token.id)
                handle = event.handle
    return handle
