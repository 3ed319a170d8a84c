"""The router constantly probes every worker over its own connection. So it knows without the registry which workers answer, which hang, and
how busy each one is.

    observed                            what happens to the worker
    0.6 `router.hang_s` without an      hung: it is chosen only if no other decode worker is left. Its streams stay. (Including the interval
        answer, or without progress     between two probes, this is noticed within `hang_s`.)
    2 `router.hang_s`                   lost: its streams continue elsewhere, as if it had been killed; if there is no other, they stay
    a failed probe                      down, until it answers again; once the registry does not list it either, it leaves

"Without progress" is what the worker reports about its engine (`worker.stall`): its event loop may answer while its engine hangs. Only time
during which the router itself was awake counts.
"""

import asyncio
import logging
from collections.abc import Set
from dataclasses import dataclass

from baton.clock import loop_time
from baton.cluster.awake import AwakeClock
from baton.cluster.errors import BatonError
from baton.cluster.records import WorkerRecord
from router.view import ClusterView
from router.workers import WatchedWorkers

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.25
ASK_SHARE = 0.25  # of hang_s, between an answer and the next probe
HUNG_SHARE = 0.6
LOST_SHARE = 2.0
_Identity = tuple[str, int]


@dataclass(slots=True)
class _Asked:
    task: "asyncio.Task[None]"
    since: float  # awake seconds


@dataclass(frozen=True, slots=True)
class _Answered:
    at: float  # awake seconds
    stalled_s: float


class Probes:
    def __init__(self, view: ClusterView, workers: WatchedWorkers, hang_s: float) -> None:
        self._view, self._members = view, view.members
        self._workers = workers
        workers.on_others = self._note_news
        self._hang_s = hang_s
        self._awake = AwakeClock(loop_time(), 2 * LOOK_EVERY_S)
        self._asked: dict[_Identity, _Asked] = {}
        self._answered: dict[_Identity, _Answered] = {}
        self._lost: set[_Identity] = set()
        self._epoch = 0

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                await self._look(self._awake.look(loop_time()))
        finally:
            for asked in self._asked.values():
                asked.task.cancel()

    async def _look(self, now: float) -> None:
        # A call sent just before a probe may arrive after it, so an answer counts as a report only of work that began a round earlier.
        epoch, self._epoch = self._epoch, self._members.next_epoch()
        members = {(worker.name, worker.incarnation): worker for worker in self._members.records()}
        self._forget(members.keys())
        for identity, worker in members.items():
            asked, answered = self._asked.get(identity), self._answered.get(identity)
            if asked is not None:
                silent_s = now - asked.since
                await self._judge(worker, max(silent_s, answered.stalled_s if answered else 0.0))
                if silent_s >= LOST_SHARE * self._hang_s:
                    self._members.note_silence(*identity)
            elif answered is None or now - answered.at >= ASK_SHARE * self._hang_s:
                self._asked[identity] = _Asked(asyncio.create_task(self._ask(worker, epoch)), now)

    async def _ask(self, worker: WorkerRecord, epoch: int) -> None:
        identity = worker.name, worker.incarnation
        try:
            answer = await self._workers.probe(worker, (LOST_SHARE + 1) * self._hang_s)
        except BatonError as error:
            log.debug("no answer from %s: %s", worker.name, error)
            self._members.note_silence(*identity)
        else:
            self._answered[identity] = _Answered(self._awake.seconds, answer.stalled_s)
            await self._judge(worker, answer.stalled_s)
            self._members.note_answer(*identity, answer.state, answer.load, epoch, answer.roles)
            self._members.note_others(*identity, answer.others_tokens, loop_time())
        finally:
            self._asked.pop(identity, None)

    def _note_news(self, worker: WorkerRecord, tokens: int) -> None:
        self._members.note_others(worker.name, worker.incarnation, tokens, loop_time(), news=True)

    async def _judge(self, worker: WorkerRecord, silent_s: float) -> None:
        """`silent_s`: time without an answer, or without progress."""
        identity = worker.name, worker.incarnation
        hung = silent_s >= HUNG_SHARE * self._hang_s
        if self._members.mark_hung(*identity, hung):
            log.warning("%s %s", worker.name, f"has hung for {silent_s:.1f} s" if hung else "makes progress again")
        if not hung:
            self._lost.discard(identity)
        elif silent_s >= LOST_SHARE * self._hang_s and identity not in self._lost and self._elsewhere(worker):
            self._lost.add(identity)
            log.warning("%s hangs: its requests continue elsewhere", worker.name)
            self._members.mark_down(*identity)
            await self._workers.lose(worker)

    def _elsewhere(self, worker: WorkerRecord) -> bool:
        model = self._view.model_of(worker.name)
        others = model.decode_workers() if model else []
        return any(other.name != worker.name and not self._members.hung(other.name) for other in others)

    def _forget(self, members: Set[_Identity]) -> None:
        for identity in [known for known in self._asked if known not in members]:
            self._asked.pop(identity).task.cancel()
        self._answered = {identity: at for identity, at in self._answered.items() if identity in members}
        self._lost &= members
