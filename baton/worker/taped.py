"""What a recording has of an engine: what was asked of it, the batches that its scheduler chose, and what became of each sequence, with the
state of scheduler and blocks before the first of them.

Of a sequence it has lengths, numbers and block keys, and no token: whether a sampled token was an end is told by the output. Engines
that guess, that have tiers or steps in flight are not recorded.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from baton.engine.core.engine import Engine, Output
from baton.engine.core.protocol import Chunk, NothingToSample, OutOfDeviceMemory, Tokens
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import NONE, PREDICTION
from baton.recorder.frozen import Freezer
from baton.recorder.recording import TapeSource
from baton.recorder.tape import Kept, Stretch, Tape

METHODS = ("add", "reserve", "arrive", "adopt", "give_up", "abort", "fork", "pin", "release", "step")
# Without `tokens`, `params` and `matcher`, which say what was said.
FACTS = (
    *("id", "prompt_len", "root", "hold", "computed", "drafted", "blocks", "sealed", "state", "began", "cached", "reached", "recomputed"),
    *("prefilled", "preemptions", "arrival", "arrived_with", "started_at", "scored", "expires_at"),
)
LEFT_OUT = ("_changes", "describes", "_key_of")  # of the pool; the last is the reverse of `_block_of`
GUESSES = "guesses"  # in place of the error of a run
SEQUENCE_BYTES = 3000
KEY_BYTES = 60
MODULES = ("baton.engine.core.limits", "baton.engine.core.scheduler", "baton.engine.core.sequence", "baton.recorder.tape")


class ToldSequence:
    """A sequence as it was when it was first told of, and its keys, which are known later: `keys` once it has left."""

    __slots__ = ("facts", "keys", "seq")

    def __init__(self, seq: Sequence) -> None:
        self.seq: Sequence | None = seq
        self.keys: list[bytes] = seq.keys
        self.facts = {name: list(seq.blocks) if name == "blocks" else getattr(seq, name) for name in FACTS}
        self.facts |= {"length": len(seq.tokens), "max_tokens": seq.params.max_tokens, "scores": seq.params.prompt_logprobs is not None}
        self.facts["depends"] = _depends(seq)

    def left(self) -> None:
        if self.seq is not None:
            self.keys, self.seq = self.seq.keys, None

    def to_dict(self) -> dict[str, Any]:
        keys = self.keys if self.seq is None else self.seq.keys
        return {**self.facts, "keys": list(keys)}


def _depends(seq: Sequence) -> str:
    """Why what becomes of it cannot be told without its tokens; empty: it can."""
    if seq.params.beams is not None or seq.owner is not None:
        return "a beam search"
    asked = seq.params.speculation
    return "guesses" if asked.prediction or asked.method not in ("", NONE) else ""


def unrecorded(engine: Engine) -> str:
    """Why an engine is not recorded; empty: it is."""
    if type(engine) is not Engine:
        return "its steps overlap (a GPU)"
    if not {*engine.drafter.offer.methods} <= {NONE, PREDICTION}:
        return "it guesses tokens (engine.speculation)"
    if engine.runner.layout.draft is not None:
        return "it keeps the KV of a draft"
    return "it has tiers" if engine.colder is not None else ""


def outcome(ran: Any, outputs: list[Output]) -> Any:
    """What is compared of a step: its batch, how many outputs it had, and those that are more than a token."""
    special = [
        (output.seq.id, output.finish and output.finish.value, bool(output.failure), output.expired, output.full, len(output.scores))
        for output in outputs
        if output.finish or output.sampled is None
    ]
    return ran, len(outputs), special


class EngineTape:
    """Follows an engine, before it runs. The tape's time is that of the last step."""

    def __init__(self, span_s: float, most_bytes: int, engine: Engine) -> None:
        self._engine = engine
        self._at = 0.0
        self._told: dict[str, ToldSequence] = {}  # of the sequences that are here
        self._ran: Any = None  # the batch of this step, and how its run ended if not well
        self.tape = tape = Tape("engine", span_s, most_bytes, lambda: self._at, self._state)
        tape.began.append(self._begin)
        tape.follow("engine", engine, METHODS, self._kept(), {"step": lambda outputs: outcome(self._ran, outputs)})
        self._follow_runs()
        self.source = TapeSource(tape, {"special": {ToldSequence: ToldSequence.to_dict}})

    def _begin(self, stretch: Stretch) -> None:
        engine, pool = self._engine, self._engine.pool
        for name in self._told.keys() - engine.sequences.keys() - engine.scheduler.claims.keys():
            self._told.pop(name).left()  # it was refused
        stretch.notes["engine"] = {
            "limits": engine.scheduler.limits,
            "max_len": engine.max_len,
            "block_size": engine.block_size,
            "num_blocks": pool.num_blocks,
            "prefix_caching": pool.prefix_caching,
        }

    def _follow_runs(self) -> None:
        """What a step ran, and who has left."""
        engine, run, leave = self._engine, self._engine.runner.run, self._engine._leave

        def ran(batch: Seq[Chunk]) -> list[Tokens]:
            # Before the step changes them. A list for each fact: quicker than a tuple for each chunk.
            self._ran = [[chunk.seq.id for chunk in batch], [chunk.n for chunk in batch], None]
            if any(chunk.drafts for chunk in batch):
                self._ran[2] = (GUESSES, ())
            try:
                return run(batch)
            except NothingToSample as error:
                self._ran[2] = type(error).__name__, tuple(error.sequence_ids)
                raise
            except OutOfDeviceMemory:
                self._ran[2] = OutOfDeviceMemory.__name__, ()
                raise

        def left(seq: Sequence) -> None:
            leave(seq)
            if (told := self._told.pop(seq.id, None)) is not None:
                told.left()

        engine.runner.run, engine._leave = ran, left  # type: ignore[method-assign]

    def _state(self) -> tuple[Any, int]:
        engine, scheduler, pool = self._engine, self._engine.scheduler, self._engine.pool
        freezer = Freezer()
        names = ("waiting", "running", "fetching")
        state = {
            "pool": {name: freezer.take(each) for name, each in vars(pool).items() if name not in LEFT_OUT},
            "sequences": [self._tell(seq) for seq in engine.sequences.values()],
            "attached": [(parent.id, [seq.id for seq in forks]) for parent, forks in scheduler.attached.items()],
            "places": freezer.take(scheduler._arrivals._places),
            "claims": dict(scheduler.claims),
            "last": scheduler._last,
            "forming_since": scheduler._forming_since,
            **{name: [seq.id for seq in getattr(scheduler, name)] for name in names},
        }
        return state, freezer.bytes + SEQUENCE_BYTES * len(engine.sequences)

    def _tell(self, seq: Sequence) -> ToldSequence:
        if (known := self._told.get(seq.id)) is not None:
            known.left()
        told = self._told[seq.id] = ToldSequence(seq)
        return told

    def _kept(self) -> dict[str, Kept]:
        def told(seq: Sequence) -> Any:
            """A sequence that is here by its id, another one as it is."""
            return seq.id if self._engine.sequences.get(seq.id) is seq else self._tell(seq)

        def begin(seq: Sequence, first: int | None, forks: Seq[Sequence]) -> Any:
            news = tuple(map(self._tell, forks))
            return (told(seq), first is not None, news), SEQUENCE_BYTES * (1 + len(news))

        def step(now: float = 0.0) -> Any:
            self._at, self._ran = now, None
            return (now,), 200 * len(self._engine.scheduler.running)

        def abort(seq_id: str) -> Any:
            if seq_id not in self._engine.sequences and (claimed := self._told.pop(seq_id, None)) is not None:
                claimed.left()
            return (seq_id,), 0

        def several(values: Iterable[Any]) -> Any:
            values = tuple(values)
            return (values,), KEY_BYTES * len(values)

        return {
            "add": lambda seq, forks=(): begin(seq, None, forks),
            "adopt": lambda seq, first=None, forks=(): begin(seq, first, forks),
            "give_up": lambda seq, first=None, forks=(): begin(seq, first, forks),
            "reserve": lambda seq: ((told(seq),), SEQUENCE_BYTES),
            "arrive": lambda seq, end: ((told(seq), end), 0),
            "abort": abort,
            "fork": lambda parent, child: ((parent.id, self._tell(child)), SEQUENCE_BYTES),
            "pin": several,
            "release": several,
            "step": step,
        }
