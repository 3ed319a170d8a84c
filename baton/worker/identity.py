"""The identity of this worker, and the refusal of calls that are meant for another.

A router reaches a worker at the address in its registry record. When that process has died, a process of another cluster, with another
model, may have taken its port. It must not compute a token for a caller that believes it is talking to the first process.
"""

from dataclasses import dataclass

from baton.cluster.errors import BatonError, Reason
from baton.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    worker: str
    incarnation: int
    model_fingerprint: str

    def check(self, to: worker_pb2.Addressee) -> None:
        """Raises BatonError(WRONG_WORKER), which names the first field that differs. A call that names no worker is refused, too."""
        for field in ("worker", "incarnation", "model_fingerprint"):
            meant, mine = getattr(to, field), getattr(self, field)
            if meant != mine:
                message = f"{field}: the call is meant for {meant or 'nobody'}, this is {mine}"
                raise BatonError(Reason.WRONG_WORKER, message, metadata={"field": field})
