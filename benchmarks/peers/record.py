"""A run's record: a line of JSON for each fact as it is found, so that whatever ends the run loses nothing; and the tables' rows from it.

{"run": {...}}                                  machine, commit, cores, threads, seed
{"model": {...}, "kv_tokens": N, "shape": {...}}
{"model": M, "engine": LABEL, "start_s": [...], "needed": BYTES, "version": TEXT}
{"ceiling": NAME, "value": X}
{"model": M, "engine": LABEL, "cell": CELL, "repeat": I, "tokens_per_s": X}
{"model": M, "engine": LABEL, "same": [EQUAL, ALL]}      greedy tokens, of one cell of one repeat
{"model": M, "engine": LABEL, "peak_rss": BYTES}
{"hole": WHAT, "why": TEXT}                     an engine or a ceiling that is left out from here on
{"note": TEXT}
{"minutes": X}                                  since the start
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers.cells import Model
from peers.engines import ENGINES
from peers.report import Ceilings, Samples, Spread, summary

Line = dict[str, Any]


class Record:
    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file

    def add(self, **line: Any) -> None:
        with self.file.open("a") as whole:
            whole.write(json.dumps(line) + "\n")

    def add_model(self, model: Model, kv_tokens: int, shape: Mapping[str, int]) -> None:
        self.add(model=asdict(model), kv_tokens=kv_tokens, shape=dict(shape))


def lines(file: Path) -> Iterator[Line]:
    """All but a last one that is not whole: its run was ended. Raises ValueError for any other line that is no object of JSON."""
    text = file.read_text().split("\n")
    for number, line in enumerate(text[:-1], 1):
        try:
            found = json.loads(line)
            if not isinstance(found, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        yield found


def results(record: Iterable[Line]) -> dict[str, Any]:
    """What the tables, the picture and the JSON file show. Raises ValueError if no run has begun."""
    found = _Found()
    for line in record:
        found.take(line)
    if found.run is None:
        raise ValueError("the record holds no run")
    ceilings = Ceilings({name: Spread.of(values) for name, values in found.ceilings.items()}, found.run["threads"])
    rows = [row for name, model in found.models.items() for row in summary(found.of(name), ceilings, model)]
    return {
        **found.run,
        "repeats": max((len(rates) for one in found.samples.values() for rates in one.rates.values()), default=0),
        "minutes": found.minutes,
        "versions": found.versions,
        "left_out": found.holes,
        "notes": found.notes,
        "ceilings": {name: {"median": one.median, "spread": one.half_range} for name, one in ceilings.found.items()},
        "models": found.described,
        "rows": rows,
    }


class _Found:
    def __init__(self) -> None:
        self.run: Line | None = None
        self.models: dict[str, Model] = {}
        self.described: dict[str, Any] = {}
        self.samples: dict[tuple[str, str], Samples] = {}  # of (model, engine)
        self.ceilings: defaultdict[str, list[float]] = defaultdict(list)
        self.versions: dict[str, str] = {}
        self.holes: dict[str, str] = {}
        self.notes: list[str] = []
        self.minutes = 0.0
        self._engines = {engine.label: engine for engine in ENGINES}

    def take(self, line: Line) -> None:
        if "run" in line:
            self.run = line["run"]
            self.versions.update(line["run"].get("versions", {}))
        elif "ceiling" in line:
            self.ceilings[line["ceiling"]].append(line["value"])
        elif "hole" in line:
            self.holes[line["hole"]] = line["why"]
        elif "note" in line:
            self.notes.append(line["note"])
        elif "engine" in line:
            self._take_of_engine(line)
        elif "model" in line:
            model = Model(**line["model"])
            self.models[model.name] = model
            self.described[model.name] = {
                "shape": line["shape"],
                "parameters": model.parameters,
                "read_per_token": model.read_parameters,
                "kv_tokens": line["kv_tokens"],
            }
        self.minutes = line.get("minutes", self.minutes)

    def _take_of_engine(self, line: Line) -> None:
        label = line["engine"]
        if label not in self._engines:
            self.holes[label] = "this version of the benchmark does not know it"
            return
        engine = self._engines[label]
        one = self.samples.setdefault((line["model"], label), Samples(engine))
        if "start_s" in line:
            one.start_s, one.needed = line["start_s"], line["needed"]
            self.versions[engine.name] = line["version"]
        elif "cell" in line:
            one.rates.setdefault(line["cell"], {})[line["repeat"]] = line["tokens_per_s"]
        elif "same" in line:
            one.same = one.same[0] + line["same"][0], one.same[1] + line["same"][1]
        else:
            one.peak_rss = line["peak_rss"]

    def of(self, model: str) -> list[Samples]:
        """Those with a sample: also of an engine that failed later."""
        return [one for (name, _), one in self.samples.items() if name == model and one.rates]
