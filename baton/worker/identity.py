"""Who this worker is, and the refusal of a call that is meant for another.

A router reaches a worker at the address in its registry record. When that process has died, another one may have taken the port: of another
cluster, with another model. It must not compute a token for a caller who believes to be talking to the first.
"""

from dataclasses import dataclass

from baton.cluster.errors import BatonError, Reason
from baton.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class Identity:
    worker: str
    incarnation: int
    model_fingerprint: str

    def check(self, to: worker_pb2.Addressee) -> None:
        """Raises BatonError(WRONG_WORKER), which names the first field that differs. A call that names nobody is refused, too."""
        for field in ("worker", "incarnation", "model_fingerprint"):
            meant, mine = getattr(to, field), getattr(self, field)
            if meant != mine:
                message = f"{field}: the call is meant for {meant or 'nobody'}, this is {mine}"
                raise BatonError(Reason.WRONG_WORKER, message, metadata={"field": field})
