"""What the router believes about the cluster: its members (`router.members`), and the models that they serve (`router.served`).

Here is what concerns both: the records of the registry say who is there and what is served, and block events belong to the index of their
worker's model. Those who serve requests for one model ask that model.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from baton.cluster.records import BlockEvent, RoleName, WorkerRecord
from router.members import ABSENT_S, Change, Members, Standing
from router.prefix_index import Applied, Filling
from router.served import Refused, ServedModel, ServedModels

Fact = Change | Refused


class ClusterView:
    def __init__(self, tokenizers: Mapping[str, str], absent_s: float = ABSENT_S) -> None:
        """`tokenizers`: name of a served model → fingerprint of its tokenizer. Raises ValueError if there is none."""
        self.members = Members(absent_s)
        self.models = ServedModels(tokenizers, self.members)

    def update(self, records: Iterable[WorkerRecord], now: float) -> list[Fact]:
        """`records`: the registry's members at time `now` (seconds, always on the same clock). Returns what is new about them."""
        facts: list[Fact] = [*self.members.update(records, now)]
        facts += self.models.judge()
        self.members.tell()
        return facts

    def note_roles(self, worker: WorkerRecord, roles: tuple[RoleName, ...]) -> list[Refused]:
        """Notes what a member said that it serves from now on. Returns the members that no longer fit."""
        self.members.note_roles(worker.name, worker.incarnation, roles)
        return self.models.judge()

    def prefill_workers(self) -> list[WorkerRecord]:
        """Those that a request for some model can be sent to."""
        return [record for model in self.models.values() for record in model.prefill_workers()]

    def decode_workers(self) -> list[WorkerRecord]:
        """Those that a request for some model can be sent to."""
        return [record for model in self.models.values() for record in model.decode_workers()]

    def model_of(self, name: str) -> ServedModel | None:
        """The model of a member; None for any other name."""
        record = self.members.find(name)
        return self.models.of(record) if record else None

    def misfit(self, name: str) -> str | None:
        """See `ServedModel.misfit`: of the member's model."""
        model = self.model_of(name)
        return model.misfit(name) if model else None

    def state(self, name: str) -> Standing | Literal["unfit"]:
        """What a person is told about a member. Raises KeyError for any other name."""
        standing = self.members.standing(name)
        return "unfit" if standing not in ("draining", "unreachable") and self.misfit(name) else standing

    # Prefix caches

    def apply(self, event: BlockEvent) -> Applied:
        """See `PrefixIndex.apply`."""
        model = self.model_of(event.worker)
        return model.index.apply(event) if model else "stale"

    def fill(self, worker: str, incarnation: int, sequence: int) -> Filling | Applied:
        """See `PrefixIndex.fill`."""
        model = self.model_of(worker)
        return model.index.fill(worker, incarnation, sequence) if model else "stale"

    def needing_snapshot(self) -> list[str]:
        """Members whose cache is not exactly known."""
        return [name for model in self.models.values() for name in model.index.needing_snapshot()]

    def trust_in(self, name: str, now: float) -> float:
        """See `Trust.shares`."""
        model = self.model_of(name)
        return model.trust.shares(now).get(name, 1.0) if model else 1.0

    def sweep(self, most: int) -> None:
        """See `PrefixIndex.sweep`: for each model."""
        for model in self.models.values():
            model.index.sweep(most)
