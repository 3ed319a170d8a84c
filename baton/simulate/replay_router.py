"""The deciding objects of a router as they were at the start of a stretch (`router.taped`)."""

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from baton.recorder.recording import BadRecording, RecordedCall, RecordedStretch
from baton.recorder.values import ValueReader, classes
from baton.simulate.replay import attempt, told
from router.prefix_index import Filling
from router.taped import ANSWERS, DEFAULTS, FILLING, METHODS, MODULES, POOL, fill_told


class ReplayedRouter:
    def __init__(self, stretch: RecordedStretch) -> None:
        """Raises Unreadable, BadRecording."""
        for name in MODULES:
            if name not in sys.modules:
                import_module(name)
        self._reader = ValueReader(classes(MODULES), DEFAULTS)
        self._objects: dict[str, Any] = self._reader.read(stretch.state)
        if missing := {*METHODS, "fillings"} - self._objects.keys():
            raise BadRecording(f"line {stretch.line}: the state lacks {', '.join(sorted(missing))}")
        self._fillings: dict[int, Filling] = self._objects["fillings"]
        self._begun = max(self._fillings, default=0)
        self._functions = {POOL: self._objects["policy"].model.pool, ANSWERS: self._objects["members"].answers}
        tables = self._objects["index"]._tables
        for part in stretch.notes.get("base", ()):
            for key, mask in self._reader.read(part).items():
                if mask:
                    tables[key[0]][key] = mask

    def recorded(self, call: RecordedCall) -> Any:
        return told(call.result, self._reader.read)

    def answer(self, call: RecordedCall) -> Any:
        name, _, method = call.method.partition(".")
        args, named = list(self._reader.read(call.args)), self._reader.read(call.named) or {}
        if name == "filling" and method in FILLING:
            return self._part(args[0], method, args[1:])
        if method not in METHODS.get(name, ()):
            raise BadRecording(f"line {call.line}: {call.method} is no decision of a router")
        if name == "outliers":
            args = [self._functions.get(each, each) if isinstance(each, str) else each for each in args]
        if call.method == "split.note":
            transport, lane = args[0]
            args[0] = SimpleNamespace(handoff=SimpleNamespace(transport=transport, lane=lane))
        answer = attempt(getattr(self._objects[name], method), *args, **named)
        if isinstance(answer, Filling):
            self._begun += 1
            self._fillings[self._begun] = answer
        return fill_told(answer)

    def _part(self, number: int, method: str, args: list[Any]) -> Any:
        filling = self._fillings[number] if method == "add" else self._fillings.pop(number)
        return attempt(getattr(filling, method), *args)
