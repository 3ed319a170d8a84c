"""The KV of a prompt that a prefill worker holds, as the dispatcher of the request sees it. The holder's own side is `kvtransfer.lease`.

    event →     read      hold      nothing   adopt     release
    none        read      held      none      none
    read                  held      given
    held                                      given     none
    given                                     given

`read`: a live decode call begins to read it. `hold`: the prefill has ended, and the lease is ours. `nothing`: it has ended without a lease,
because its token ended the output, or because the live call has it all. `adopt`: the decode worker has the KV, or has given it up, and ends
the lease. `release`: we end it. So exactly one side ends a lease, whatever happens: we do while it is `held`.
"""

from dataclasses import dataclass
from enum import Enum

from baton.cluster.records import WorkerRecord
from baton.moves import Moves
from router.live_decode import LiveDecode
from router.request import Request
from router.uncached import Sought
from router.workers import Fork


class Lent(Enum):
    NONE = "none"
    READ = "read"  # while the prompt is still being computed: its holder ends it if that fails
    HELD = "held"
    GIVEN = "given"


MOVES = Moves(
    {
        (Lent.NONE, "read"): Lent.READ,
        (Lent.NONE, "hold"): Lent.HELD,
        (Lent.NONE, "nothing"): Lent.NONE,
        (Lent.NONE, "adopt"): Lent.NONE,  # the decode worker computes the prompt
        (Lent.READ, "hold"): Lent.HELD,
        (Lent.READ, "nothing"): Lent.GIVEN,
        (Lent.HELD, "adopt"): Lent.GIVEN,
        (Lent.HELD, "release"): Lent.NONE,
        (Lent.GIVEN, "adopt"): Lent.GIVEN,  # what a live call reports when the prefill has ended
    }
)


@dataclass(slots=True)
class Started:
    """A decode call that the view counts. A live call is already running."""

    worker: WorkerRecord
    work: str
    known: int  # tokens sent to it
    whole_prompt: bool = False  # it computes the prompt, and nobody did before
    sought: Sought | None = None  # for that one, unless other answers share its prompt
    live: LiveDecode | None = None


@dataclass(frozen=True, slots=True)
class JoinedCall:
    """A decode call that begins with that of another answer to the same prompt, which leads."""

    leader: Request
    started: Started
    fork: Fork


@dataclass(slots=True)
class PromptLease:
    """The lease of one attempt."""

    holder: WorkerRecord | None = None  # the prefill worker, from its choice on
    state: Lent = Lent.NONE
    reader: Started | None = None  # the decode call that is already reading it
    _handle: bytes = b""

    @property
    def held(self) -> bool:
        return self.state is Lent.HELD

    @property
    def handle(self) -> bytes:
        """What a decode worker reads with; empty unless the lease is held."""
        return self._handle if self.held else b""

    def read(self, reader: Started) -> None:
        self._move("read")
        self.reader = reader

    def prefilled(self, handle: bytes) -> None:
        """`handle`: empty if there is none."""
        self._move("hold" if handle else "nothing")
        self._handle = handle

    def adopt(self) -> None:
        self._move("adopt")

    def release(self) -> bytes:
        """Returns the handle, with which the caller ends the lease."""
        handle = self._handle
        self._move("release")
        return handle

    def _move(self, event: str) -> None:
        self.state = MOVES.after(self.state, event, f"the lease of {self.holder.name if self.holder else 'nobody'}")
