"""The profile of a cluster, and the file that keeps it: YAML, for people to read and for `baton simulate` and `baton plan` to use.

    version: 1
    source: measured                      # or the sheet that it was computed from
    processor: AMD EPYC, 2 cores
    model: tale
    engine: {threads: 1, block_size: 16, …}
    commit: 9aa3e62
    when: 2026-01-31T12:00:00+00:00
    load: 0.1                             # average before the measurement; near 0: the machine was quiet
    kv_token_bytes: 6144
    form: sum                             # of a step
    region: {prompt: [16, 1024], …}       # what was measured, and so may be asked
    models:
      step:
        values: {step: 0.0011, tokens: 4.1e-05, …}
        error: 0.03
        rows: 42
        source: …
        draws: [{step: 0.00109, …}, …]

`drawn` gives a profile as the measurements also allow it: who asks several gets an interval.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import yaml

from baton.profile.models import CHANCES, NUMBERS, OF_GUESSES, OF_LOADS, OF_TIERS, Fitted, Form

VERSION = 1
DIGITS = 6  # significant
WORST = 0.5  # of the errors that a draw takes: a fit that is more wrong, as on a busy machine, says nothing that a wider factor would
FIELDS = ("source", "processor", "model", "engine", "commit", "when", "load", "kv_token_bytes", "form", "region")


class ProfileError(ValueError):
    """A file is no profile. The text names the file and the field."""


@dataclass(frozen=True, slots=True)
class Profile:
    source: str
    processor: str
    model: str
    engine: Mapping[str, Any]
    kv_token_bytes: float
    form: Form
    models: Mapping[str, Fitted]  # by the names in `NUMBERS`; one that is missing takes no time
    region: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # name → least and most
    commit: str = ""
    when: str = ""
    load: float | None = None

    def values(self, model: str) -> Mapping[str, float]:
        """All numbers of a model; those that it does not have are 0."""
        found = self.models.get(model)
        return dict.fromkeys(NUMBERS[model], 0.0) | dict(found.values if found else {})

    def drawn(self, rng: random.Random) -> Self:
        """Each model with one of its draws, times a factor as wide as its error. The error of `crowding` is that of the times of loads, so
        its factor is for all that a load takes."""
        models = {name: _drawn(fitted, rng) for name, fitted in self.models.items() if name != "crowding"}
        if (crowding := self.models.get("crowding")) is not None:
            models["crowding"] = _drawn(replace(crowding, error=0.0), rng)
            factor = _factor(crowding.error, rng)
            models |= {name: _times(models[name], factor) for name in OF_LOADS if name in models}
        return replace(self, models=models)

    def outside(self, asked: Mapping[str, float]) -> list[str]:
        """What of a question lies beyond what was measured, in words; a name that the region does not have is not judged."""
        found = []
        for name, value in asked.items():
            if name in self.region and not self.region[name][0] <= value <= self.region[name][1]:
                least, most = self.region[name]
                found.append(f"{name} {value:g} (measured: {least:g} to {most:g})")
        return found

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Names of the models that it does not have: what they would tell takes no time."""
        return tuple(name for name in NUMBERS if name not in (*self.models, *OF_GUESSES, *OF_TIERS))

    def plain(self) -> dict[str, Any]:
        """What a file of it contains, as `read` takes it."""
        content = {"version": VERSION, **{name: _plain(getattr(self, name)) for name in FIELDS}}
        return content | {"models": {name: _written(fitted) for name, fitted in self.models.items()}}

    def save(self, path: Path) -> None:
        """Raises OSError."""
        path.write_text(yaml.safe_dump(self.plain(), sort_keys=False, width=110))

    @classmethod
    def load_file(cls, path: Path) -> Self:
        """Raises ProfileError."""
        try:
            content = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ProfileError(f"{path}: {error.strerror or error}") from None
        except (yaml.YAMLError, UnicodeDecodeError):
            raise ProfileError(f"{path}: is not YAML") from None
        try:
            return cls.read(content)
        except KeyError as error:
            raise ProfileError(f"{path}: {error.args[0]}: is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ProfileError(f"{path}: {error}") from None

    @classmethod
    def read(cls, content: Any) -> Self:
        """Raises KeyError, TypeError, ValueError and AttributeError for what is no profile."""
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ValueError(f"version: is not {VERSION}")
        if unknown := sorted(set(content) - {"version", "models", *FIELDS}):
            raise ValueError(f"{unknown[0]}: is no field of a profile")
        if content["form"] not in ("sum", "roof"):
            raise ValueError(f"form: {content['form']!r} is not sum or roof")
        models = {name: _fitted(name, told) for name, told in content["models"].items()}
        if "step" not in models:
            raise ValueError("models.step: is missing")
        region = {name: (float(least), float(most)) for name, (least, most) in content["region"].items()}
        fields = {name: content[name] for name in FIELDS}
        return cls(**{**fields, "region": region, "kv_token_bytes": float(content["kv_token_bytes"])}, models=models)


def _drawn(fitted: Fitted, rng: random.Random) -> Fitted:
    values = rng.choice(fitted.draws) if fitted.draws else fitted.values
    return _times(replace(fitted, values=values), _factor(fitted.error, rng))


def _factor(error: float, rng: random.Random) -> float:
    return math.exp(rng.gauss(0.0, min(error, WORST)))


def _times(fitted: Fitted, factor: float) -> Fitted:
    return replace(fitted, values={name: value * factor for name, value in fitted.values.items()})


def _written(fitted: Fitted) -> dict[str, Any]:
    told: dict[str, Any] = {"values": _plain(fitted.values), "error": _plain(fitted.error), "rows": fitted.rows, "source": fitted.source}
    return told | ({"draws": [_plain(draw) for draw in fitted.draws]} if fitted.draws else {})


def _fitted(name: str, told: Mapping[str, Any]) -> Fitted:
    """Raises KeyError and ValueError."""
    if name not in NUMBERS:
        raise ValueError(f"models.{name}: is none of {', '.join(NUMBERS)}")
    draws = tuple(_numbers(name, draw) for draw in told.get("draws", ()))
    return Fitted(_numbers(name, told["values"]), draws, float(told["error"]), int(told["rows"]), str(told["source"]))


def _numbers(model: str, told: Mapping[str, Any]) -> dict[str, float]:
    values = {name: float(value) for name, value in told.items()}
    for name, value in values.items():
        if name not in NUMBERS[model]:
            raise ValueError(f"models.{model}.{name}: is none of {', '.join(NUMBERS[model])}")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"models.{model}.{name}: {value!r} is not a finite number from 0 on")
        if name in CHANCES and value > 1:
            raise ValueError(f"models.{model}.{name}: {value!r} is a chance, and above 1")
    return values


def _plain(value: Any) -> Any:
    """The value for YAML, with as many digits as mean something."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value
