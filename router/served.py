"""What is served: for each model its tokenizer, the limits that its workers agree on, which members serve it, and which of them caches
what. Who is there at all is told elsewhere (`router.members`). Nothing is decided here but who fits.
"""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from baton.cluster.records import RoleName, WorkerRecord
from baton.engine.core.speculation import NOTHING_OFFERED, Offer
from router.members import Members
from router.prefix_index import PrefixIndex
from router.standings import Standings
from router.trust import Trust


@dataclass(frozen=True, slots=True)
class Refused:
    """A member that gets no requests because this field of its record does not fit."""

    name: str
    field: str

    def __str__(self) -> str:
        more = " (other weights, type or arithmetic: its log names the last)" if self.field == "model_fingerprint" else ""
        return f"{self.name} gets no requests: its {self.field} differs from the served model's{more}"


@dataclass(frozen=True, slots=True)
class Served:
    """What the workers of a model agree on. Only those that agree on all of it are used."""

    model_fingerprint: str
    block_size: int  # tokens
    max_model_len: int  # tokens; workers may hold more
    eos_token_ids: frozenset[int] = frozenset()
    offer: Offer = NOTHING_OFFERED  # of guesses. Workers may differ in it: one that lacks a method uses its own, and no token depends on it


class ServedModel:
    def __init__(self, name: str, tokenizer_fingerprint: str, members: Members) -> None:
        """`tokenizer_fingerprint`: of the router's tokenizer; token ids mean something else to a worker with another one."""
        self.name = name
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.members = members  # of the whole cluster
        self.index = PrefixIndex()
        self.trust = Trust()
        self.served: Served | None = None  # None until the first decode worker is ready
        self._workers: dict[str, int] = {}  # this model's members, fit or not → incarnation
        self._misfits: dict[str, str] = {}  # those that do not fit → field
        self._version = self._shape = -1  # of the members, for what follows: many requests choose between two changes
        self._usable: dict[RoleName, list[WorkerRecord]] = {}
        self._names: dict[RoleName, list[str]] = {}  # of those
        self._serving: set[str] = set()  # of both roles
        self._standings: Standings | None = None  # made when a worker is chosen
        self._pools: dict[RoleName, tuple[tuple[str, int], ...]] = {}

    def judge(self, workers: Collection[WorkerRecord]) -> list[Refused]:
        """`workers`: this model's members, sorted by name. Takes what is served from the first ready decode worker, and keeps it while any
        of them fits. Returns the members that no longer fit."""
        self._follow(workers)
        ours = [record for record in workers if record.tokenizer_fingerprint == self.tokenizer_fingerprint]
        ready = [record for record in ours if record.serves("decode") and record.state == "ready"]
        if ready and (self.served is None or all(self._mismatch(record) for record in ready)):
            first = ready[0]
            offer = Offer(first.speculation, first.speculation_tokens) if first.speculation else NOTHING_OFFERED
            self.served = Served(first.model_fingerprint, first.block_size, first.max_model_len, frozenset(first.eos_token_ids), offer)
        before = self._misfits
        self._misfits = {record.name: field for record in workers if (field := self._mismatch(record))}
        return [Refused(name, field) for name, field in self._misfits.items() if before.get(name) != field]

    def prefill_workers(self) -> list[WorkerRecord]:
        """Those that a request can be sent to, sorted by name."""
        return self.workers("prefill")

    def decode_workers(self) -> list[WorkerRecord]:
        """Those that a request can be sent to, sorted by name."""
        return self.workers("decode")

    def workers(self, role: RoleName) -> list[WorkerRecord]:
        """Those that a request can be sent to, sorted by name."""
        names = self._names_of(role)
        if role not in self._usable:
            self._usable[role] = self.members.find_all(names)
        return self._usable[role]

    @property
    def standings(self) -> Standings:
        """The standings of the workers that a request can be sent to, as they are now."""
        if self._standings is None:
            self._standings = Standings(self.members)
        self._standings.renew(self._names_of)
        return self._standings

    def serves(self, name: str) -> bool:
        """Whether a request can be sent to this member."""
        self._renew()
        if not self._serving:
            self._serving = {*self._names_of("prefill"), *self._names_of("decode")}
        return name in self._serving

    def count(self, role: RoleName) -> int:
        """How many these are."""
        return len(self._names_of(role))

    def pool(self, role: RoleName) -> tuple[tuple[str, int], ...]:
        """The processes that could serve a role, those included that are hung or put aside."""
        self._renew()
        if role not in self._pools:
            fit = (member.record for member in self.members.answering(role) if self._fits(member.record.name))
            self._pools[role] = tuple((record.name, record.incarnation) for record in fit)
        return self._pools[role]

    def processes(self) -> AbstractSet[tuple[str, int]]:
        """Names and incarnations of all of this model's members."""
        return self._workers.items()

    def misfit(self, name: str) -> str | None:
        """Why a member gets no requests although it may be ready: what of its record does not fit what is served."""
        if (field := self._misfits.get(name)) is None:
            return None
        own, served = getattr(self.members.record(name), field), getattr(self.served, field, self.tokenizer_fingerprint)
        return f"{field} {own} does not fit the {served} that is served"

    def _follow(self, workers: Collection[WorkerRecord]) -> None:
        """What another process cached, or one that now serves something else, is forgotten."""
        known, self._workers = self._workers, {record.name: record.incarnation for record in workers}
        for name in known.keys() - self._workers.keys():
            self.index.forget(name)
            self.trust.forget(name)
        for name, incarnation in self._workers.items():
            if known.get(name) != incarnation:
                self.index.join(name, incarnation)

    def _mismatch(self, record: WorkerRecord) -> str | None:
        """The first field that does not fit."""
        if record.tokenizer_fingerprint != self.tokenizer_fingerprint:
            return "tokenizer_fingerprint"
        if self.served is None:
            return None
        if record.model_fingerprint != self.served.model_fingerprint:
            return "model_fingerprint"
        if record.block_size != self.served.block_size:
            return "block_size"
        return "max_model_len" if record.max_model_len < self.served.max_model_len else None

    def _fits(self, name: str) -> bool:
        return name in self._workers and name not in self._misfits

    def _renew(self) -> None:
        if self._version != self.members.version:
            self._version = self.members.version
            self._usable.clear()
        if self._shape != self.members.shape:
            self._shape = self.members.shape
            self._names.clear()
            self._serving = set()
            self._pools.clear()

    def _names_of(self, role: RoleName) -> list[str]:
        self._renew()
        if role not in self._names:
            self._names[role] = [record.name for record in self._find_usable(role)]
        return self._names[role]

    def _find_usable(self, role: RoleName) -> list[WorkerRecord]:
        usable = [member for member in self.members.answering(role) if self._fits(member.record.name)]
        awake = [m for m in usable if not m.hung]
        good = [m for m in awake if not m.ejected]
        # Without a prefill worker the decode workers do its work. Without a decode worker the request would be refused, a bad worker serves
        # most of them, and one that seems to hang may recover at any moment.
        return [m.record for m in (good if good or role == "prefill" else awake or usable)]


class ServedModels(Mapping[str, ServedModel]):
    """The models that a router serves, by name. Each member belongs to one of them."""

    def __init__(self, tokenizers: Mapping[str, str], members: Members) -> None:
        """`tokenizers`: name of the model → fingerprint of its tokenizer. Raises ValueError if there is none."""
        if not tokenizers:
            raise ValueError("a router serves at least one model")
        self._models = {name: ServedModel(name, fingerprint, members) for name, fingerprint in tokenizers.items()}
        self._members = members
        self._first = next(iter(self._models.values()))
        self._akin: dict[str, dict[str, ServedModel]] = {}  # fingerprint of a tokenizer → name → model
        for name, model in self._models.items():
            self._akin.setdefault(model.tokenizer_fingerprint, {})[name] = model

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def of(self, record: WorkerRecord) -> ServedModel:
        """The model to which a member belongs, and for which it may be unfit: the one with its tokenizer and its name, else the first with
        its tokenizer. What fits none belongs to the first."""
        akin = self._akin.get(record.tokenizer_fingerprint)
        return akin.get(record.model_name) or next(iter(akin.values())) if akin else self._first

    def judge(self) -> list[Refused]:
        """Every model judges its members. Returns those that no longer fit."""
        workers: dict[str, list[WorkerRecord]] = {name: [] for name in self._models}
        for record in self._members.records():
            workers[self.of(record).name].append(record)
        return [refused for name, model in self._models.items() for refused in model.judge(workers[name])]
