"""What a recording has of a router: the calls of its deciding objects, and their state before the first of them.

    admission     enter, leave, … of `router.admission`, with what `router.pace` measures
    members       `router.members`: records of the registry, answers to probes, failed calls, our own work
    models        `router.served`: who fits
    index         `router.prefix_index`: block events, snapshots, predictions
    policy        `router.policy`: the choice of a prefill and of a decode worker, and of one that may load meanwhile
    trust, outliers, budget, degradation, split     what was promised and came, who is put aside, retries, overload, the alarm

A prefix index may hold millions of keys, of which a recording shows those that were looked at: what the index held of a key when a stretch
began is noted when the key is first looked at or changed (`_Base`). Nothing is changed without that, so it is what was there.

No request's text or token is among the arguments.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from baton.cluster.records import BlockEvent, WorkerRecord
from baton.recorder.frozen import Chain, Freezer
from baton.recorder.recording import TapeSource
from baton.recorder.tape import Kept, Stretch, Tape
from router.prefix_index import TABLES, Filling, PrefixIndex

METHODS: Mapping[str, tuple[str, ...]] = {
    "admission": ("enter", "leave", "resize", "share_with", "note_served", "note_failure", "drop_hopeless", "retry_after"),
    "members": (
        *("update", "next_epoch", "mark_down", "mark_hung", "mark_ejected", "note_answer", "note_others", "note_prefill", "note_roles"),
        *("note_silence", "start_prefill", "end_prefill", "start_decode", "end_decode"),
    ),
    "models": ("judge",),
    "index": ("apply", "fill", "predict", "retract", "sweep"),
    "policy": ("prefill", "decode", "hint"),
    "trust": ("note",),
    "outliers": ("join", "note_call", "note_read", "note_pace", "take_back"),
    "budget": ("note_success", "note_failure", "allows"),
    "degradation": ("judge",),
    "split": ("note", "judge"),
}
FILLING = ("add", "end", "drop")
# Listeners, and what follows from the rest.
LEFT_OUT = {
    "Members": frozenset({"_listeners", "_followers"}),
    "ServedModel": frozenset({"_usable", "_pools", "_serving", "_standings"}),
    "PrefixIndex": frozenset({"_tables", "_shared"}),
}
DEFAULTS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "Members": lambda: {"_listeners": [], "_followers": []},
    "ServedModel": lambda: {"_usable": {}, "_pools": {}, "_serving": set(), "_standings": None},
    "PrefixIndex": lambda: {"_tables": [{} for _ in range(TABLES)], "_shared": {}},
}
# The modules whose classes a recording of a router may name.
MODULES = (
    *("baton.cluster.measures", "baton.cluster.records"),
    *(
        f"router.{name}"
        for name in (
            *("admission", "degradation", "ledger", "members", "outliers", "pace", "policy", "prefix_index", "retry_budget", "served"),
            *("split", "trust", "view"),
        )
    ),
    *("baton.engine.core.speculation", "baton.recorder.tape"),
)
KEY_BYTES = 250  # of a key that a stretch shows: itself, and what was known of it
REFERENCE_BYTES = 8
POOL, ANSWERS = "model.pool", "members.answers"  # functions among the arguments, by name


class RouterTape:
    """Follows the deciding objects of a router for one model. `objects`: by the names of METHODS."""

    def __init__(self, span_s: float, most_bytes: int, clock: Callable[[], float], objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._fillings: dict[int, Filling] = {}
        self._begun = 0
        self._base = _Base(objects["index"])
        self.tape = tape = Tape("router", span_s, most_bytes, clock, self._state)
        tape.began.append(self._begin)
        kept = _kept(self._base)
        for name, thing in objects.items():
            if name in METHODS:
                tape.follow(name, thing, METHODS[name], kept.get(name), {"fill": fill_told} if name == "index" else None)
        tape.opened(objects["members"], "tell")
        self._follow_fillings(objects["index"])
        self.source = TapeSource(tape, {"shared": frozenset({WorkerRecord})})

    def _state(self) -> tuple[Any, int]:
        freezer = Freezer(LEFT_OUT)
        state = {name: freezer.take(thing) for name, thing in self._objects.items()}
        state["fillings"] = freezer.take(self._fillings)
        return state, freezer.bytes + KEY_BYTES * self._base.outstanding()

    def _begin(self, stretch: Stretch) -> None:
        self._base.begin(stretch, self._fillings.values())

    def _follow_fillings(self, index: PrefixIndex) -> None:
        """A snapshot comes in parts, each of which is a call of what `fill` gave."""
        inner = index.fill

        def fill(*args: Any) -> Any:
            filling = inner(*args)
            if isinstance(filling, Filling):
                self._begun += 1
                self._fillings[self._begun] = filling
                self._follow_filling(self._begun, filling)
            return filling

        index.fill = fill  # type: ignore[method-assign, assignment]

    def _follow_filling(self, number: int, filling: Filling) -> None:
        def add(keys: Iterable[bytes], *medium: str) -> Any:
            keys = tuple(keys)
            return (number, keys, *medium), self._base.look(keys) * KEY_BYTES + 60 * len(keys)

        self.tape.follow("filling", filling, FILLING, {"add": add, **{name: lambda: ((number,), 0) for name in ("end", "drop")}})
        for name in ("end", "drop"):
            setattr(filling, name, self._last(number, getattr(filling, name)))

    def _last(self, number: int, method: Callable[[], Any]) -> Callable[[], Any]:
        def last() -> Any:
            try:
                return method()
            finally:
                self._fillings.pop(number, None)

        return last


def fill_told(answer: Any) -> Any:
    """What is compared of the answer of `fill`."""
    return "filling" if isinstance(answer, Filling) else answer


class _Base:
    """What an index held of each key when a stretch began: `stretch.notes["base"]`, key → mask."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self._masks: dict[bytes, int] = {}
        self._chains: dict[bytes, Chain] = {}

    def begin(self, stretch: Stretch, fillings: Iterable[Filling]) -> None:
        self._masks = stretch.notes["base"] = {}
        self._chains = {}
        for keys in self._changing():  # these may change without being looked at
            self.look(keys)

    def outstanding(self) -> int:
        return sum(len(keys) for keys in self._changing())

    def _changing(self) -> list[Collection[bytes]]:
        workers = self.index._workers.values()
        early = [event.keys for held in workers for event in held.ahead.values()]
        return [*(held.predicted for held in workers), *(batch[3] for batch in self.index._batches), *early]

    def look(self, keys: Iterable[bytes]) -> int:
        """Returns how many are new here."""
        masks, tables = self._masks, self.index._tables
        fresh = [key for key in keys if key not in masks]
        for key in fresh:
            masks[key] = tables[key[0]].get(key, 0)
        return len(fresh)

    def chain(self, keys: Sequence[bytes]) -> tuple[Chain, int]:
        """The keys of a prompt, as one object for all calls that have them, and its bytes if it is new. The last key tells all of them."""
        last = keys[-1] if keys else b""
        found = self._chains.get(last)
        if found is None:
            found = self._chains[last] = Chain(tuple(keys))
            return found, self.look(keys) * KEY_BYTES + REFERENCE_BYTES * len(keys)
        return found, 0


def _kept(base: _Base) -> dict[str, dict[str, Kept]]:
    """What is kept, by object and method, of calls whose arguments change later or would weigh too much."""
    return {
        "policy": _kept_of_policy(base),
        "index": _kept_of_index(base),
        "members": {"update": _updated},
        "outliers": {"join": _joined, "note_call": _pooled, "note_read": _pooled, "note_pace": _pooled, "take_back": _taken_back},
        "split": {"note": _ended},
    }


def _kept_of_policy(base: _Base) -> dict[str, Kept]:
    def prefill(keys: Sequence[bytes], prompt: int, longest: int, now: float, exclude: Iterable[Any], tie: int) -> Any:
        mine, more = base.chain(keys)
        return (mine, prompt, longest, now, frozenset(exclude), tie), more

    def decode(keys: Sequence[bytes], longest: int, now: float, exclude: Iterable[Any], tie: int) -> Any:
        mine, more = base.chain(keys)
        return (mine, longest, now, frozenset(exclude), tie), more

    def hint(keys: Sequence[bytes], prompt: int, now: float, exclude: Iterable[Any], tie: int) -> Any:
        mine, more = base.chain(keys)
        return (mine, prompt, now, frozenset(exclude), tie), more

    return {"prefill": prefill, "decode": decode, "hint": hint}


def _kept_of_index(base: _Base) -> dict[str, Kept]:
    def predict(worker: str, keys: Sequence[bytes], expires_at: float) -> Any:
        mine, more = base.chain(keys)
        return (worker, mine, expires_at), more

    def retract(worker: str, keys: Sequence[bytes]) -> Any:
        mine, more = base.chain(keys)
        return (worker, mine), more

    def apply(event: BlockEvent) -> Any:
        return (event,), base.look(event.keys) * KEY_BYTES + 60 * len(event.keys)

    return {"predict": predict, "retract": retract, "apply": apply}


def _updated(records: Iterable[WorkerRecord], now: float) -> Any:
    records = tuple(records)
    return (records, now), REFERENCE_BYTES * len(records)


def _joined(worker: Any, present: Iterable[Any], now: float) -> Any:
    present = tuple(present)
    return (worker, present, now), REFERENCE_BYTES * len(present)


def _pooled(*args: Any) -> Any:
    return (*args[:-2], POOL, args[-1]), 0


def _taken_back(answers: Any, now: float) -> Any:
    return (ANSWERS, now), 0


def _ended(trace: Any, path: tuple[str, str], computed: int) -> Any:
    return ((trace.handoff.transport, trace.handoff.lane), path, computed), 0
