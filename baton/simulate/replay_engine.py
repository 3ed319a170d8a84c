"""An engine as it was at the start of a stretch (`baton.worker.taped`): the real scheduler and blocks, and a runner that samples what the
recording says of it, which is whether a token was an end."""

from collections.abc import Sequence as Seq
from typing import Any

from baton.engine.core.engine import Engine, Output
from baton.engine.core.protocol import Chunk, NonFiniteLogits, NothingAllowed, OutOfDeviceMemory, Tokens
from baton.engine.core.sampling import Sampled, SamplingParams, Scored
from baton.engine.core.sequence import Sequence
from baton.recorder.recording import BadRecording, RecordedCall, RecordedStretch
from baton.recorder.values import ValueReader, classes
from baton.simulate.engine import ModelledRunner
from baton.simulate.replay import Depends, attempt, told
from baton.worker.taped import FACTS, GUESSES, METHODS, MODULES, outcome

ANY, END = 0, 1  # a token, and one that ends an output
ERRORS = {kind.__name__: kind for kind in (NonFiniteLogits, NothingAllowed)}


class _Runner(ModelledRunner):
    eos_token_ids = frozenset({END})

    def __init__(self, num_blocks: int, block_size: int, max_positions: int) -> None:
        super().__init__(lambda batch: 0.0, num_blocks, block_size, max_positions)
        self.ends: frozenset[str] = frozenset()  # sequences of this step that sample one
        self.error: Exception | None = None
        self.ran: Any = None

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        told: tuple[str, tuple[str, ...]] | None = None
        if isinstance(self.error, OutOfDeviceMemory):
            told = OutOfDeviceMemory.__name__, ()
        elif isinstance(self.error, NonFiniteLogits | NothingAllowed):
            told = type(self.error).__name__, tuple(self.error.sequence_ids)
        self.ran = [[chunk.seq.id for chunk in batch], [chunk.n for chunk in batch], told]
        if self.error is not None:
            raise self.error
        return [self._yielded(chunk) for chunk in batch]

    def _yielded(self, chunk: Chunk) -> Tokens:
        sampled = (Sampled(END if chunk.seq.id in self.ends else ANY),) if chunk.samples else ()
        return (*(Scored(ANY) for _ in range(chunk.scored)), *sampled)


class ReplayedEngine:
    def __init__(self, stretch: RecordedStretch) -> None:
        """Raises Unreadable, BadRecording, Depends."""
        self._reader = ValueReader(classes(MODULES))
        state = self._reader.read(stretch.state)
        facts = {name: value for part in stretch.notes.get("engine", ()) for name, value in self._reader.read(part).items()}
        try:
            self._runner = _Runner(facts["num_blocks"], facts["block_size"], facts["max_len"])
            self._engine = Engine(self._runner, facts["limits"], facts["max_len"], facts["prefix_caching"])
            self._keys: dict[Sequence, list[bytes]] = {}
            self._engine.scheduler.extend_keys = self._extend_keys  # type: ignore[method-assign]
            self._restore(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRecording(f"line {stretch.line}: the state of an engine cannot be restored: {error!r}") from None

    def _restore(self, state: dict[str, Any]) -> None:
        engine, scheduler = self._engine, self._engine.scheduler
        for name, value in state["pool"].items():
            setattr(engine.pool, name, value)
        engine.pool._key_of = {block: key for key, block in engine.pool._block_of.items()}
        for one in state["sequences"]:
            engine.sequences[one["id"]] = self._sequence(one)
        for name in ("waiting", "running", "fetching"):
            getattr(scheduler, name)[:] = [engine.sequences[id_] for id_ in state[name]]
        scheduler.claims.update(state["claims"])
        for parent, forks in state["attached"]:
            scheduler.attached[engine.sequences[parent]] = [engine.sequences[id_] for id_ in forks]
        scheduler._arrivals._places = state["places"]
        scheduler._last, scheduler._forming_since = state["last"], state["forming_since"]

    def recorded(self, call: RecordedCall) -> Any:
        return told(call.result, self._reader.read)

    def answer(self, call: RecordedCall) -> Any:
        name, _, method = call.method.partition(".")
        if name != "engine" or method not in METHODS:
            raise BadRecording(f"line {call.line}: {call.method} is no decision of an engine")
        args = self._reader.read(call.args)
        engine = self._engine
        match method:
            case "step":
                answer = self._step(call, args[0])
            case "add":
                answer = attempt(engine.add, self._known(args[0]), [self._sequence(each) for each in args[2]])
            case "adopt" | "give_up":
                forks = [self._sequence(each) for each in args[2]]
                answer = attempt(getattr(engine, method), self._known(args[0]), ANY if args[1] else None, forks)
            case "reserve" | "arrive":
                answer = attempt(getattr(engine, method), self._known(args[0]), *args[1:])
            case "fork":
                answer = attempt(engine.fork, engine.sequences.get(args[0]), self._sequence(args[1]))
            case _:
                answer = attempt(getattr(engine, method), *args)
        engine.pool.drain_changes()
        return answer

    def _step(self, call: RecordedCall, now: float) -> Any:
        recorded = self.recorded(call)
        runner = self._runner
        runner.ends, runner.error, runner.ran = frozenset(), None, None
        if isinstance(recorded, tuple):
            ran, _, special = recorded
            runner.ends = frozenset(each[0] for each in special if each[1] == "stop")
            runner.error = self._error(*ran[2]) if ran is not None and ran[2] is not None else None
        answer = attempt(self._engine.step, now)
        if isinstance(answer, list):
            outputs: list[Output] = answer
            return outcome(runner.ran, outputs)
        return answer

    def _error(self, kind: str, ids: tuple[str, ...]) -> Exception:
        if kind == GUESSES:
            raise Depends("guesses depend on the tokens")
        return ERRORS[kind]([*ids]) if kind in ERRORS else OutOfDeviceMemory("as recorded")

    def _known(self, one: str | dict[str, Any]) -> Any:
        return self._engine.sequences.get(one) if isinstance(one, str) else self._sequence(one)

    def _sequence(self, one: dict[str, Any]) -> Sequence:
        if one["depends"]:
            raise Depends(f"{one['id']}: {one['depends']} depends on the tokens")
        params = SamplingParams(max_tokens=one["max_tokens"], prompt_logprobs=0 if one["scores"] else None)
        seq = Sequence(one["id"], [ANY] * one["length"], one["prompt_len"], params, one["root"])
        for name in FACTS:
            setattr(seq, name, one[name])
        seq.blocks = list(one["blocks"])
        self._keys[seq] = one["keys"]
        return seq

    def _extend_keys(self, seq: Sequence) -> None:
        """Replaces `Scheduler.extend_keys`, which makes the keys from the tokens."""
        seq.keys += self._keys[seq][len(seq.keys) : len(seq.tokens) // self._engine.block_size]
