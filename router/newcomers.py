"""Which of the workers that have started prove themselves next, and when one that failed tries again. It only decides: time is an argument.

While nobody decodes a model, one decode worker at a time is tried, alone: whoever comes then is compared with it. Prefill workers wait for
that, and the other decode workers for the first prefill worker, if one is there, so that they prove that they read KV, too. One that fails
is tried again after RETRY_S, then after twice as long each time.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from baton.cluster.records import RoleName, WorkerRecord
from router.proof import Try

AT_ONCE = 8
RETRY_S, RETRY_MOST_S = 1.0, 60.0
Identity = tuple[str, int]  # name and incarnation


@dataclass(slots=True)
class _Newcomer:
    record: WorkerRecord
    trying: bool = False
    failures: int = 0
    undecided: int = 0  # tries in which others did not answer
    again_at: float = 0.0
    why: str = ""  # the last proof failed


class Newcomers:
    def __init__(self) -> None:
        self._known: dict[Identity, _Newcomer] = {}

    def keep(self, there: Iterable[WorkerRecord]) -> None:
        """The members that have not proved themselves. Others are forgotten, but for those that are being tried."""
        found = {_identity(record): record for record in there}
        self._known = {identity: one for identity, one in self._known.items() if identity in found or one.trying}
        for identity, record in found.items():
            self._known.setdefault(identity, _Newcomer(record)).record = record

    def next(self, able: Collection[str], served: Mapping[RoleName, Collection[str]], now: float) -> list[WorkerRecord]:
        """Whom to try now. `able`: names of those that answer. `served`: for each role, fingerprints of the models that are served."""
        known = self._known.values()
        alone = {one.record.model_fingerprint for one in known if one.trying and "decode" in one.record.proving}
        fresh = [one for one in known if not one.failures and one.record.name in able]
        filling = {one.record.model_fingerprint for one in fresh if "prefill" in one.record.proving}
        room = AT_ONCE - sum(one.trying for one in known)
        chosen: list[WorkerRecord] = []
        for one in sorted(known, key=lambda one: (one.failures, one.record.name)):
            model, decodes = one.record.model_fingerprint, "decode" in one.record.proving
            if one.trying or one.record.name not in able or now < one.again_at or len(chosen) >= room:
                continue
            if model not in served["decode"]:
                if not decodes or model in alone:
                    continue
                alone.add(model)
            elif decodes and model not in served["prefill"] and model in filling:
                continue
            chosen.append(one.record)
        return chosen

    def begin(self, worker: WorkerRecord) -> Try:
        """It is being tried."""
        one = self._known[_identity(worker)]
        one.trying = True
        return Try(one.failures + one.undecided, one.undecided)

    def admit(self, worker: WorkerRecord) -> None:
        self._known.pop(_identity(worker))

    def refuse(self, worker: WorkerRecord, why: str, now: float, own_fault: bool) -> float:
        """Returns in how many seconds it is tried again."""
        one = self._known[_identity(worker)]
        wait_s = min(RETRY_MOST_S, RETRY_S * 2**one.failures) if own_fault else RETRY_S
        one.trying, one.why, one.again_at = False, why, now + wait_s
        one.failures += own_fault
        one.undecided += not own_fault
        return wait_s

    def why(self, name: str) -> str:
        """Why a worker has not proved itself yet; empty: it was not tried, or is none of these."""
        return next((one.why for (known, _), one in self._known.items() if known == name and one.why), "")

    def __len__(self) -> int:
        return len(self._known)


def _identity(worker: WorkerRecord) -> Identity:
    return worker.name, worker.incarnation
