"""What the router believes about the cluster: which workers exist, which can be used, what was sent to them, what they cache.

Facts come in from outside: records of the registry (`update`), failed calls (`mark_down`), answers to probes and their absence
(`note_answer`, `note_silence`), block events (`index`), our own work (`start_...`, `end_...`). The view decides nothing; it tells who
listens that a member has changed, or that a decode has ended.

A member leaves when two sources agree: the registry has answered without it for `absent_s` (one answer is enough if it is draining), and a
probe on its own connection has failed since the first of those answers. While the registry does not answer, `update` is not called and no
member leaves. So a worker that answers is not removed when the registry is away or has lost its contents.

Our own work is a set of requests per worker, not a counter: ending a request twice, or after the worker has left, changes nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from baton.cluster.records import Load, RoleName, WorkerRecord, WorkerState
from router.prefix_index import PrefixIndex

ABSENT_S = 3.0  # three heartbeats of the default configuration


@dataclass(frozen=True, slots=True)
class Joined:
    worker: WorkerRecord


@dataclass(frozen=True, slots=True)
class Left:
    worker: WorkerRecord


@dataclass(frozen=True, slots=True)
class Reincarnated:
    """Another process now has the name; the old one is gone."""

    old: WorkerRecord
    new: WorkerRecord


@dataclass(frozen=True, slots=True)
class Refused:
    """A member that gets no requests because this field of its record does not fit."""

    name: str
    field: str


Fact = Joined | Left | Reincarnated | Refused


@dataclass(frozen=True, slots=True)
class Served:
    """The served model. Only workers that agree on all of it are used."""

    model_fingerprint: str
    block_size: int  # tokens
    max_model_len: int  # tokens; workers may hold more
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Member:
    record: WorkerRecord
    probed: bool = False  # it answered the last probe. The registry may show its load and its roles of an earlier moment
    absent_since: float | None = None  # the registry's first answer without it; None: it was in the last answer
    failed: bool = False  # the last probe since then failed
    covers: int = 0  # the reported load includes work that started before this epoch
    down: bool = False  # a call failed, and no probe has been answered since
    hung: bool = False
    ejected: str = ""  # why it is put aside
    answers: int = 0  # probes that it has answered
    refused: str | None = None  # field that does not fit
    foreign_tokens: int = 0  # uncached prompt tokens waiting there that are not ours


@dataclass(frozen=True, slots=True)
class _Task:
    incarnation: int
    tokens: int
    since: int  # the epoch in which it started


class _Ledger:
    """Which of our requests is on which worker."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[str, _Task]] = {}  # worker → request → task
        self._places: dict[str, str] = {}  # request → worker
        self._ended: Counter[tuple[str, int]] = Counter()  # worker, incarnation → tokens that ended since the last report

    def start(self, request_id: str, worker: str, task: _Task) -> None:
        self.end(request_id)
        self._places[request_id] = worker
        self._tasks.setdefault(worker, {})[request_id] = task

    def end(self, request_id: str) -> None:
        worker = self._places.pop(request_id, None)
        if worker is None:
            return
        task = self._tasks[worker].pop(request_id)
        self._ended[worker, task.incarnation] += task.tokens
        if not self._tasks[worker]:
            del self._tasks[worker]

    def tokens(self, record: WorkerRecord, since: int = 0) -> int:
        """Tokens on the process that `record` describes. What an earlier process of that name had is lost."""
        tasks = self._tasks.get(record.name, {}).values()
        return sum(task.tokens for task in tasks if task.incarnation == record.incarnation and task.since >= since)

    def count(self, record: WorkerRecord) -> int:
        """Requests on that process."""
        return sum(task.incarnation == record.incarnation for task in self._tasks.get(record.name, {}).values())

    def recent_tokens(self, record: WorkerRecord) -> int:
        """As `tokens`, plus what has ended since the last report."""
        return self.tokens(record) + self._ended[record.name, record.incarnation]

    def note_update(self) -> None:
        self._ended.clear()

    def note_report(self, record: WorkerRecord) -> None:
        self._ended.pop((record.name, record.incarnation), None)


class ClusterView:
    def __init__(self, tokenizer_fingerprint: str, absent_s: float = ABSENT_S) -> None:
        """`tokenizer_fingerprint`: of the router's tokenizer; token ids mean something else to a worker with another one."""
        self.index = PrefixIndex()
        self.served: Served | None = None  # None until the first decode worker is ready
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._absent_s = absent_s
        self._members: dict[str, _Member] = {}
        self.version = 0  # grows with every change of a member; equal versions have equal workers
        self._usable_members: dict[RoleName, list[WorkerRecord]] = {}  # of this version: many requests choose between two changes
        self._pools: dict[RoleName, tuple[tuple[str, int], ...]] = {}  # of this version
        self._epoch = 0
        self._updated = 0  # the epoch of the last update
        self._prefills = _Ledger()
        self._decodes = _Ledger()
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """It is called after each change."""
        self._listeners.append(listener)

    # Members

    def update(self, records: Iterable[WorkerRecord], now: float) -> list[Fact]:
        """`records`: the registry's members at time `now` (seconds, always on the same clock). Returns what is new about them."""
        before, self._updated = self._updated, self.next_epoch()
        facts: list[Fact] = []
        present: set[str] = set()
        for record in records:
            facts += self._note(record, before, present)
        facts += self._drop_absent(now, present)
        facts += self._judge()
        self._change()
        self._prefills.note_update()
        self._decodes.note_update()
        return facts

    def next_epoch(self) -> int:
        """Begins a new stretch of our own work. Work that starts after a report was requested belongs to a later epoch than the report."""
        self._epoch += 1
        return self._epoch

    def mark_down(self, name: str, incarnation: int) -> bool:
        """Notes that a call failed. The process gets no requests until it answers a probe, or until another process takes its name.
        Returns whether this is news."""
        member = self._member(name, incarnation)
        if member is None:
            return False
        news, member.down = not member.down, True
        self._change()
        return news

    def mark_hung(self, name: str, incarnation: int, hung: bool) -> bool:
        """Notes whether the process, though connected, makes no progress. A hung decode worker gets requests only if no other is left, a
        hung prefill worker gets none. Returns whether this is news."""
        member = self._member(name, incarnation)
        if member is None or member.hung == hung:
            return False
        member.hung = hung
        self._change()
        return True

    def mark_ejected(self, name: str, incarnation: int, why: str) -> None:
        """Notes why the process is put aside; empty: it no longer is. It gets requests only if no other is left, prefills none."""
        if member := self._member(name, incarnation):
            member.ejected = why
            self._change()

    def ejected(self, name: str) -> str:
        """Why a member is put aside; empty: it is not."""
        return self._members[name].ejected if name in self._members else ""

    def answers(self, identity: tuple[str, int]) -> int | None:
        """How many probes a process has answered; None: it is no member."""
        member = self._member(*identity)
        return member.answers if member else None

    def pool(self, role: RoleName) -> tuple[tuple[str, int], ...]:
        """The processes that could serve a role, those included that are hung or put aside."""
        if role not in self._pools:
            self._pools[role] = tuple((m.record.name, m.record.incarnation) for m in self._fit(role))
        return self._pools[role]

    def hung(self, name: str) -> bool:
        member = self._members.get(name)
        return member is not None and member.hung

    def note_answer(
        self, name: str, incarnation: int, state: WorkerState, load: Load, epoch: int, roles: tuple[RoleName, ...] = ()
    ) -> None:
        """Notes the answer to a probe. Its load includes all work that started before `epoch`."""
        member = self._member(name, incarnation)
        if member is None:
            return
        member.failed, member.probed = False, True
        member.answers += 1
        member.down = member.down and (state != "ready" or member.hung)
        news = load != member.record.load  # otherwise it may date from before a long step
        member.record = replace(member.record, state=state, load=load, roles=roles or member.record.roles)
        if news:
            self._read_load(member, epoch)
            self._prefills.note_report(member.record)
        self._change()

    def note_roles(self, name: str, incarnation: int, roles: tuple[RoleName, ...]) -> None:
        """Notes what the process said that it serves from now on."""
        if member := self._member(name, incarnation):
            member.record = replace(member.record, roles=roles)
            self._change()

    def note_silence(self, name: str, incarnation: int) -> None:
        """Notes that a probe of the process failed."""
        if member := self._member(name, incarnation):
            member.failed = member.down = True
            member.probed = False
            self._change()

    def members(self) -> list[WorkerRecord]:
        """All of them, usable or not, sorted by name."""
        return [self._members[name].record for name in sorted(self._members)]

    def misfit(self, name: str) -> str | None:
        """Why a member gets no requests although it may be ready: what of its record does not fit the served model."""
        member = self._members.get(name)
        if member is None or member.refused is None:
            return None
        own, served = getattr(member.record, member.refused), getattr(self.served, member.refused, self._tokenizer_fingerprint)
        return f"{member.refused} {own} does not fit the {served} that is served"

    def state(self, name: str) -> Literal["ready", "draining", "unreachable", "unfit", "hung", "ejected"]:
        """What a person is told about a member."""
        member = self._members[name]
        if member.record.state == "draining":
            return "draining"
        if member.down:
            return "unreachable"
        if member.refused:
            return "unfit"
        if member.hung:
            return "hung"  # its event loop answers, its engine does not
        return "ejected" if member.ejected else "ready"

    def prefill_workers(self) -> list[WorkerRecord]:
        """Those that a request can be sent to, sorted by name."""
        return self._usable("prefill")

    def decode_workers(self) -> list[WorkerRecord]:
        """Those that a request can be sent to, sorted by name."""
        return self._usable("decode")

    def find(self, name: str) -> WorkerRecord | None:
        member = self._members.get(name)
        return member.record if member else None

    def record(self, name: str) -> WorkerRecord:
        """The record of a member. Raises KeyError for any other name."""
        return self._members[name].record

    # Our own work

    def start_prefill(self, request_id: str, worker: str, uncached_tokens: int) -> None:
        self._start(self._prefills, request_id, worker, uncached_tokens)

    def end_prefill(self, request_id: str) -> None:
        """Call it however the work ended. An unknown request changes nothing."""
        self._prefills.end(request_id)

    def start_decode(self, request_id: str, worker: str, tokens: int) -> None:
        """`tokens`: the most that the sequence may reach, prompt included."""
        self._start(self._decodes, request_id, worker, tokens)

    def end_decode(self, request_id: str) -> None:
        """Call it however the work ended. An unknown request changes nothing."""
        self._decodes.end(request_id)
        self._tell()

    def prefill_tokens(self, worker: str) -> int:
        """Uncached prompt tokens that wait on a member: ours exactly, and other routers' from its last report."""
        member = self._members[worker]
        return self._prefills.tokens(member.record) + member.foreign_tokens

    def unreported_decode_tokens(self, worker: str) -> int:
        """Tokens of our decodes on a member that its reported load does not show yet."""
        member = self._members[worker]
        return self._decodes.tokens(member.record, member.covers)

    def prefills(self, worker: str) -> int:
        """How many of our prompts are computed on a member, or wait there."""
        return self._prefills.count(self._members[worker].record)

    def decodes(self, worker: str) -> int:
        """How many of our requests decode on a member."""
        return self._decodes.count(self._members[worker].record)

    def _member(self, name: str, incarnation: int) -> _Member | None:
        member = self._members.get(name)
        return member if member is not None and member.record.incarnation == incarnation else None

    def _start(self, ledger: _Ledger, request_id: str, worker: str, tokens: int) -> None:
        ledger.start(request_id, worker, _Task(self._members[worker].record.incarnation, tokens, self._epoch))

    def _note(self, record: WorkerRecord, before: int, present: set[str]) -> list[Fact]:
        """`before`: the epoch of the last update. A report that this update brings was written after it."""
        member = self._members.get(record.name)
        if member is not None and record.incarnation < member.record.incarnation:
            return []  # a ghost; if it is the only one left, it joins when the newer one has left
        present.add(record.name)
        if member is not None and record.incarnation == member.record.incarnation:
            member.absent_since = None
            known = member.record
            if member.probed:
                member.record = replace(record, load=known.load, roles=known.roles, state=_later(known.state, record.state))
            else:
                member.record = replace(record, state=_later(known.state, record.state))
                if record.load != known.load:
                    self._read_load(member, before)
            return []
        fact: Fact = Reincarnated(member.record, record) if member else Joined(record)
        member = self._members[record.name] = _Member(record)
        self._read_load(member, before)
        self.index.join(record.name, record.incarnation)
        return [fact]

    def _read_load(self, member: _Member, covers: int) -> None:
        """Takes over the member's new load. It includes everything that was sent before the epoch `covers`, and perhaps more."""
        member.covers = covers
        member.foreign_tokens = max(0, member.record.load.waiting_tokens - self._prefills.recent_tokens(member.record))

    def _drop_absent(self, now: float, present: set[str]) -> list[Fact]:
        facts: list[Fact] = []
        for name, member in sorted(self._members.items()):
            if name in present:
                continue
            if member.absent_since is None:
                member.absent_since, member.failed = now, False
            patience_s = 0.0 if member.record.state == "draining" else self._absent_s
            if member.failed and now - member.absent_since >= patience_s:
                del self._members[name]
                self.index.forget(name)
                facts.append(Left(member.record))
        return facts

    def _judge(self) -> list[Fact]:
        """Takes the served model from the first ready decode worker, and keeps it while any of them fits. Finds members that do not fit."""
        ours = [record for record in self.members() if record.tokenizer_fingerprint == self._tokenizer_fingerprint]
        ready = [record for record in ours if record.serves("decode") and record.state == "ready"]
        if ready and (self.served is None or all(self._mismatch(record) for record in ready)):
            first = ready[0]
            self.served = Served(first.model_fingerprint, first.block_size, first.max_model_len, frozenset(first.eos_token_ids))
        facts: list[Fact] = []
        for record in self.members():
            member = self._members[record.name]
            before, member.refused = member.refused, self._mismatch(record)
            if member.refused and member.refused != before:
                facts.append(Refused(record.name, member.refused))
        return facts

    def _mismatch(self, record: WorkerRecord) -> str | None:
        """The first field that does not fit."""
        if record.tokenizer_fingerprint != self._tokenizer_fingerprint:
            return "tokenizer_fingerprint"
        if self.served is None:
            return None
        if record.model_fingerprint != self.served.model_fingerprint:
            return "model_fingerprint"
        if record.block_size != self.served.block_size:
            return "block_size"
        return "max_model_len" if record.max_model_len < self.served.max_model_len else None

    def _change(self) -> None:
        self.version += 1
        self._usable_members.clear()
        self._pools.clear()
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def _usable(self, role: RoleName) -> list[WorkerRecord]:
        if role not in self._usable_members:
            self._usable_members[role] = self._find_usable(role)
        return self._usable_members[role]

    def _find_usable(self, role: RoleName) -> list[WorkerRecord]:
        usable = self._fit(role)
        awake = [m for m in usable if not m.hung]
        good = [m for m in awake if not m.ejected]
        # Without a prefill worker the decode workers do its work. Without a decode worker the request would be refused, a bad worker serves
        # most of them, and one that seems to hang may recover at any moment.
        return [m.record for m in (good if good or role == "prefill" else awake or usable)]

    def _fit(self, role: RoleName) -> list[_Member]:
        members = (self._members[name] for name in sorted(self._members))
        return [m for m in members if m.record.serves(role) and m.record.state == "ready" and not m.down and m.refused is None]


def _later(known: WorkerState, reported: WorkerState) -> WorkerState:
    """No process becomes ready again once it drains."""
    return "draining" if known == "draining" else reported
