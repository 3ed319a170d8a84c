"""Who is there: the processes that are members, whether they live, how busy they are, and what this router has sent to them. What they
serve is told elsewhere (`router.served`).

Facts come in from outside: records of the registry (`update`), failed calls (`mark_down`), answers to probes and their absence
(`note_answer`, `note_silence`), our own work (`start_...`, `end_...`). Nothing is decided here. Who listens is told that a member has
changed, or that a decode has ended.

A member leaves when two sources agree: the registry has answered without it for `absent_s` (one answer is enough if it is draining), and a
probe on its own connection has failed since the first of those answers. While the registry does not answer, `update` is not called and no
member leaves. So a worker that answers is not removed when the registry is away or has lost its contents.

    event →     listed      missed      silent      answered    leave
    listed      listed      missing     listed      listed
    missing     listed      missing     given up    missing
    given up    listed      given up    given up    missing     left

What its own connection shows is another life. `fail`: a call or a probe failed; `answer`: a probe was answered, and it takes requests;
`hang` and `progress`: it is connected, and makes no progress or makes it again.

    event →     fail        answer      hang        progress
    up          down        up          hung
    down        down        up          lost
    hung        lost        hung                    up
    lost        lost        lost                    down
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from baton.cluster.records import Load, RoleName, WorkerRecord, WorkerState
from baton.moves import Moves
from router.ledger import Ledger, Task

WEIGHT = 1 / 8  # of the newest prompt in the pace of a worker
ABSENT_S = 3.0  # three heartbeats of the default configuration
Standing = Literal["ready", "draining", "unreachable", "hung", "ejected", "unproven"]


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


Change = Joined | Left | Reincarnated


class Presence(Enum):
    """What the registry, and the probes since it answered without the member, say about whether it is one."""

    LISTED = "listed"  # it was in the registry's last answer
    MISSING = "missing"
    GIVEN_UP = "given up"  # the last probe since then failed
    LEFT = "left"


class Health(Enum):
    UP = "up"
    DOWN = "down"  # a call or a probe failed, and no probe has been answered since
    HUNG = "hung"
    LOST = "lost"  # both: an answer does not bring it back, for its event loop may answer while its engine hangs


PRESENCES = Moves(
    {
        (Presence.LISTED, "listed"): Presence.LISTED,
        (Presence.LISTED, "missed"): Presence.MISSING,
        (Presence.LISTED, "silent"): Presence.LISTED,
        (Presence.LISTED, "answered"): Presence.LISTED,
        (Presence.MISSING, "listed"): Presence.LISTED,
        (Presence.MISSING, "missed"): Presence.MISSING,
        (Presence.MISSING, "silent"): Presence.GIVEN_UP,
        (Presence.MISSING, "answered"): Presence.MISSING,
        (Presence.GIVEN_UP, "listed"): Presence.LISTED,
        (Presence.GIVEN_UP, "missed"): Presence.GIVEN_UP,
        (Presence.GIVEN_UP, "silent"): Presence.GIVEN_UP,
        (Presence.GIVEN_UP, "answered"): Presence.MISSING,
        (Presence.GIVEN_UP, "leave"): Presence.LEFT,
    }
)
HEALTHS = Moves(
    {
        (Health.UP, "fail"): Health.DOWN,
        (Health.UP, "answer"): Health.UP,
        (Health.UP, "hang"): Health.HUNG,
        (Health.DOWN, "fail"): Health.DOWN,
        (Health.DOWN, "answer"): Health.UP,
        (Health.DOWN, "hang"): Health.LOST,
        (Health.HUNG, "fail"): Health.LOST,
        (Health.HUNG, "answer"): Health.HUNG,
        (Health.HUNG, "progress"): Health.UP,
        (Health.LOST, "fail"): Health.LOST,
        (Health.LOST, "answer"): Health.LOST,
        (Health.LOST, "progress"): Health.DOWN,
    }
)


@dataclass(slots=True)
class Member:
    record: WorkerRecord
    presence: Presence = Presence.LISTED
    health: Health = Health.UP
    told_by: Literal["registry", "probe"] = "registry"  # its load and its roles: the registry's may be those of an earlier moment
    missed_at: float = 0.0  # the registry's first answer without it, if it is not listed
    covers: int = 0  # the reported load includes everything that started before this epoch, and perhaps more
    others_tokens: int = 0  # uncached prompt tokens there that other routers sent, as it told last, and when that was
    others_at: float = 0.0
    follows: bool = False  # whether it says so by itself, as soon as that changes
    token_s: float = 0.0  # for each prompt token that it computes, about; 0: unknown
    ejected: str = ""  # why it is put aside (`router.outliers`); empty: it is not
    answers: int = 0  # probes that it has answered

    @property
    def reachable(self) -> bool:
        return self.health in (Health.UP, Health.HUNG)

    @property
    def hung(self) -> bool:
        return self.health in (Health.HUNG, Health.LOST)

    def note_presence(self, event: str) -> None:
        self.presence = PRESENCES.after(self.presence, event, f"member {self.record.name}")

    def note_health(self, event: str) -> None:
        self.health = HEALTHS.after(self.health, event, f"member {self.record.name}")


class Members:
    def __init__(self, absent_s: float = ABSENT_S) -> None:
        self.version = 0  # grows with every change of a member; equal versions have equal workers
        self.shape = 0  # grows with every change but those of loads alone, which come with each probe of each worker
        self._absent_s = absent_s
        self._members: dict[str, Member] = {}
        self._epoch = 0
        self._updated = 0  # the epoch of the last update
        self._prefills = Ledger()
        self._decodes = Ledger()
        self._listeners: list[Callable[[], None]] = []
        self._followers: list[set[str]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """It is called after each change."""
        self._listeners.append(listener)

    def follow(self) -> set[str]:
        """A set that gets the name of each member whose load or work changes; it is the caller's to empty. What else changes shows in
        `shape`."""
        self._followers.append(names := set[str]())
        return names

    def update(self, records: Iterable[WorkerRecord], now: float) -> list[Change]:
        """`records`: the registry's members at time `now` (seconds, always on the same clock). Returns who is new and who is gone. The
        caller tells the listeners (`tell`), when the models have judged the members."""
        before, self._updated = self._updated, self.next_epoch()
        changes: list[Change] = []
        present: set[str] = set()
        for record in records:
            changes += self._note(record, before, present)
        changes += self._drop_absent(now, present)
        self.version += 1
        self.shape += 1
        return changes

    def tell(self) -> None:
        """Calls the listeners."""
        for listener in self._listeners:
            listener()

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
        news = member.reachable
        member.note_health("fail")
        self._change()
        return news

    def mark_hung(self, name: str, incarnation: int, hung: bool) -> bool:
        """Notes whether the process, though connected, makes no progress. A hung decode worker gets requests only if no other is left, a
        hung prefill worker gets none. Returns whether this is news."""
        member = self._member(name, incarnation)
        if member is None or member.hung == hung:
            return False
        member.note_health("hang" if hung else "progress")
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
        before = member.record.state, member.record.roles, member.health
        member.note_presence("answered")
        if state == "ready":
            member.note_health("answer")
        member.told_by = "probe"
        member.answers += 1
        news = load != member.record.load  # otherwise it may date from before a long step
        member.record = replace(member.record, state=state, load=load, roles=roles or member.record.roles)
        if news:
            member.covers = epoch
        self._touch(name)
        self._change((member.record.state, member.record.roles, member.health) != before)

    def note_others(self, name: str, incarnation: int, tokens: int, now: float, news: bool = False) -> None:
        """Notes how many uncached tokens of other routers' prompts a process has. `news`: it said so unasked."""
        if member := self._member(name, incarnation):
            member.others_tokens, member.others_at = tokens, now
            member.follows = member.follows or news
            self._touch(name)

    def note_prefill(self, name: str, incarnation: int, token_s: float) -> None:
        """Notes how long a process took for each token of a prompt that it computed."""
        if member := self._member(name, incarnation):
            member.token_s += (token_s - member.token_s) * (WEIGHT if member.token_s else 1)

    def note_roles(self, name: str, incarnation: int, roles: tuple[RoleName, ...]) -> None:
        """Notes what the process said that it serves from now on."""
        if member := self._member(name, incarnation):
            member.told_by = "probe"  # the registry's may still be those of before
            member.record = replace(member.record, roles=roles)
            self._change()

    def note_silence(self, name: str, incarnation: int) -> None:
        """Notes that a probe of the process failed."""
        if member := self._member(name, incarnation):
            member.note_presence("silent")
            member.note_health("fail")
            member.told_by = "registry"
            self._change()

    def records(self) -> list[WorkerRecord]:
        """All members' records, usable or not, sorted by name."""
        return [self._members[name].record for name in sorted(self._members)]

    def standing(self, name: str) -> Standing:
        """How a member stands, apart from what it serves."""
        member = self._members[name]
        if member.record.state == "draining":
            return "draining"
        if not member.reachable:
            return "unreachable"
        if member.hung:
            return "hung"  # its event loop answers, its engine does not
        if member.record.unproven:
            return "unproven"
        return "ejected" if member.ejected else "ready"

    def answering(self, role: RoleName) -> list[Member]:
        """Those that serve a role and answer, sorted by name. They may be hung or put aside."""
        members = (self._members[name] for name in sorted(self._members))
        return [m for m in members if m.record.serves(role) and m.record.state == "ready" and m.reachable]

    def newcomers(self) -> list[Member]:
        """Those that have started and not proved themselves yet (`router.proof`)."""
        return [member for member in self._members.values() if member.record.unproven and member.record.state == "ready"]

    def unproven(self, name: str) -> bool:
        return name in self._members and self._members[name].record.unproven

    def find(self, name: str) -> WorkerRecord | None:
        member = self._members.get(name)
        return member.record if member else None

    def find_all(self, names: Iterable[str]) -> list[WorkerRecord]:
        """The records of members. Raises KeyError for any other name."""
        members = self._members
        return [members[name].record for name in names]

    def record(self, name: str) -> WorkerRecord:
        """The record of a member. Raises KeyError for any other name."""
        return self._members[name].record

    # Our own work

    def start_prefill(self, request_id: str, worker: str, uncached_tokens: int) -> None:
        self._start(self._prefills, request_id, worker, uncached_tokens)

    def end_prefill(self, request_id: str) -> None:
        """Call it however the work ended. An unknown request changes nothing."""
        self._touch(self._prefills.end(request_id))

    def start_decode(self, request_id: str, worker: str, tokens: int) -> None:
        """`tokens`: the most that the sequence may reach, prompt included."""
        self._start(self._decodes, request_id, worker, tokens)

    def end_decode(self, request_id: str) -> None:
        """Call it however the work ended. An unknown request changes nothing."""
        self._touch(self._decodes.end(request_id))
        self.tell()

    def prefill_tokens(self, worker: str, now: float) -> float:
        """Uncached prompt tokens that wait on a member or are computed: ours exactly, and those that other routers have there. Where only
        probes tell of these, what the worker can have computed since the last one is taken off: a prompt takes less time than passes
        between two probes, so that otherwise an idle worker counts as busy for long (Mitzenmacher, "How Useful Is Old Information?",
        2000). Where each change is told, they count like ours, in full until they end."""
        member = self._members[worker]
        computed = (now - member.others_at) / member.token_s if member.token_s and not member.follows else 0.0
        return self._prefills.tokens(member.record) + max(0.0, member.others_tokens - computed)

    def shared(self, worker: str) -> bool:
        """Whether `prefill_tokens` of a member depends on the time."""
        member = self._members[worker]
        return member.others_tokens > 0 and not member.follows

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

    def _member(self, name: str, incarnation: int) -> Member | None:
        member = self._members.get(name)
        return member if member is not None and member.record.incarnation == incarnation else None

    def _start(self, ledger: Ledger, request_id: str, worker: str, tokens: int) -> None:
        self._touch(ledger.start(request_id, worker, Task(self._members[worker].record.incarnation, tokens, self._epoch)))
        self._touch(worker)

    def _note(self, record: WorkerRecord, before: int, present: set[str]) -> list[Change]:
        """`before`: the epoch of the last update. A report that this update brings was written after it."""
        member = self._members.get(record.name)
        if member is not None and record.incarnation < member.record.incarnation:
            return []  # a ghost; if it is the only one left, it joins when the newer one has left
        present.add(record.name)
        if member is not None and record.incarnation == member.record.incarnation:
            member.note_presence("listed")
            known = member.record
            if member.told_by == "probe":
                member.record = replace(record, load=known.load, roles=known.roles, state=_later(known.state, record.state))
            else:
                member.record = replace(record, state=_later(known.state, record.state))
                if record.load != known.load:
                    member.covers = before
            return []
        change: Change = Reincarnated(member.record, record) if member else Joined(record)
        member = self._members[record.name] = Member(record)
        member.covers = before
        return [change]

    def _drop_absent(self, now: float, present: set[str]) -> list[Change]:
        changes: list[Change] = []
        for name, member in sorted(self._members.items()):
            if name in present:
                continue
            if member.presence is Presence.LISTED:
                member.missed_at = now
            member.note_presence("missed")
            patience_s = 0.0 if member.record.state == "draining" else self._absent_s
            if member.presence is Presence.GIVEN_UP and now - member.missed_at >= patience_s:
                member.note_presence("leave")
                del self._members[name]
                changes.append(Left(member.record))
        return changes

    def _touch(self, name: str | None) -> None:
        if name in self._members:
            for names in self._followers:
                names.add(name)

    def _change(self, shape: bool = True) -> None:
        self.version += 1
        self.shape += shape
        self.tell()


def _later(known: WorkerState, reported: WorkerState) -> WorkerState:
    """No process becomes ready again once it drains."""
    return "draining" if known == "draining" else reported
