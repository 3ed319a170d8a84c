"""Workers of the simulator that a router lets prove themselves, some of them bad."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import WorkerRecord
from baton.simulate.workers import ModelledWorkers
from router.proof import PROMPT
from router.request import Token
from router.workers import Ended, FirstToken


class ProvingWorkers(ModelledWorkers):
    """`liars` say other tokens; `stuck` ones do not serve what they were asked to; `mute` ones never answer; `stubborn` ones answer, and do
    not switch; `deaf` ones cannot read KV, or nobody can read theirs, so that the prompt is computed again."""

    def __init__(self, fleet: Any, **bad: str) -> None:
        super().__init__(fleet, "router")
        self.bad = {"liar": "", "stuck": "", "mute": "", "stubborn": "", "deaf": ""} | bad
        self.wishes: list[tuple[str, tuple[str, ...], bool]] = []
        self.told: list[tuple[str, str]] = []  # why a worker was not admitted
        self.asked: list[tuple[str, str]] = []

    async def set_roles(self, worker: WorkerRecord, roles: Sequence[str], prove: bool = False, why: str = "") -> Any:
        self.wishes.append((worker.name, tuple(roles), prove))
        if why:
            self.told.append((worker.name, why))
        if worker.name == self.bad["mute"]:
            raise BatonError(Reason.DEADLINE, "no answer")
        return () if prove or worker.name == self.bad["stubborn"] else tuple(roles), ()

    async def prefill(self, worker: WorkerRecord, request: Any, timeout_s: float, *rest: Any) -> AsyncGenerator[Any, None]:
        await self._check(worker, "prefill")
        async for event in super().prefill(worker, request, timeout_s, *rest):
            if worker.name == self.bad["liar"] and isinstance(event, FirstToken):
                event = replace(event, token=Token(event.token.id + 1))
            yield event

    async def decode(self, worker: WorkerRecord, request: Any, handle: bytes, timeout_s: float, *rest: Any) -> AsyncGenerator[Any, None]:
        await self._check(worker, "decode")
        holder = self._leases[handle][0] if handle else ""
        async for event in super().decode(worker, request, handle, timeout_s, *rest):
            if worker.name == self.bad["liar"] and isinstance(event, tuple):
                event = tuple(Token(token.id + 1) for token in event)
            if isinstance(event, Ended) and self.bad["deaf"] and self.bad["deaf"] in (worker.name, holder) and handle:
                event = replace(event, recomputed_tokens=len(PROMPT))
            yield event

    async def _check(self, worker: WorkerRecord, role: str) -> None:
        self.asked.append((worker.name, role))
        if worker.name == self.bad["stuck"]:
            raise BatonError(Reason.WRONG_ROLE, f"{worker.name} does not serve {role} now")
        if worker.name == self.bad["mute"]:
            await asyncio.Event().wait()
