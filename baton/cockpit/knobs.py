"""What can be set in an experiment: each knob with its bounds, and the settings that it makes. Decides and does nothing else."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from baton.cluster.errors import invalid
from baton.cockpit.checkpoints import CHECKPOINTS
from baton.plan.hardware import DEVICES
from baton.plan.shape import KNOWN

Where = Literal["real", "own", "simulated"]
LABELS: Mapping[Where, str] = {"real": "real cluster", "own": "real cluster of its own", "simulated": "simulated"}
MOST_REQUESTS: Mapping[Where, int] = {"real": 600, "own": 600, "simulated": 4000}
MOST_TOKENS: Mapping[Where, int] = {"real": 400_000, "own": 400_000, "simulated": 4_000_000}  # of prompts and outputs of one run
MOST_OUTPUT: Mapping[Where, int] = {"real": 60_000, "own": 60_000, "simulated": 200_000}


@dataclass(frozen=True, slots=True)
class Slider:
    """A number. `real_most`: on a real cluster, one of its own or not, where that is less."""

    label: str
    least: float
    most: float
    step: float
    unit: str = ""
    real_most: float | None = None

    def check(self, name: str, value: Any, where: Where) -> float:
        """Raises BatonError(INVALID_FIELD)."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise invalid(name, "must be a number")
        most = self._most(where)
        if not self.least <= value <= most:
            there = f" on a {LABELS[where]}" if most < self.most else ""
            raise invalid(name, f"must be from {self.least:g} to {most:g}{there}, got {value:g}")
        whole = float(self.step).is_integer() and float(self.least).is_integer()
        if whole and not float(value).is_integer():
            raise invalid(name, f"must be a whole number, got {value:g}")
        return int(value) if whole else float(value)

    def _most(self, where: Where) -> float:
        return self.most if where == "simulated" or self.real_most is None else self.real_most


@dataclass(frozen=True, slots=True)
class Menu:
    """One of a few words, each with what a person reads."""

    label: str
    options: Mapping[str, str]

    def check(self, name: str, value: Any, where: Where) -> str:
        """Raises BatonError(INVALID_FIELD)."""
        if not isinstance(value, str) or value not in self.options:
            raise invalid(name, f"must be one of {', '.join(self.options)}")
        return value


Knob = Slider | Menu


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one run. Lengths are in tokens, `spread` is a share of them, times of objectives are in milliseconds."""

    rate: float = 4.0
    duration_s: int = 20
    prompt: int = 128
    output: int = 32
    spread: float = 0.0
    shared: float = 0.0
    caching: str = "on"
    speculation: str = "off"
    acceptance: float = 0.7
    guesses: int = 4
    prefill: int = 1
    decode: int = 1
    batch: int = 16
    batching: str = "continuous"
    device: str = "h100"
    model: str = "llama-3.1-8b"
    gpus: int = 1
    weight_bits: str = "16"
    kv_bits: str = "16"
    checkpoint: str = "tale"
    weight_dtype: str = "float"
    kv_dtype: str = "auto"
    by: str = "sheet"
    ttft_ms: int = 1000
    tpot_ms: int = 100


KNOBS: Mapping[str, Knob] = {
    "rate": Slider("Requests per second", 0.5, 200, 0.5, "/s", real_most=20),
    "duration_s": Slider("Seconds", 5, 120, 1, "s", real_most=60),
    "prompt": Slider("Prompt", 16, 8192, 16, "tokens", real_most=2048),
    "output": Slider("Output", 1, 1024, 1, "tokens", real_most=512),
    "spread": Slider("Spread of the lengths", 0, 0.9, 0.1),
    "shared": Slider("Share of the prompt that others begin with, too", 0, 0.9, 0.1),
    "caching": Menu("Prefix caching", {"on": "on", "off": "off: no request shares a prefix"}),
    "speculation": Menu("Speculation", {"off": "off", "on": "on"}),
    "acceptance": Slider("Guesses that are right", 0, 0.95, 0.05),
    "guesses": Slider("Guesses a step", 1, 8, 1),
    "prefill": Slider("Prefill workers", 0, 16, 1, real_most=7),
    "decode": Slider("Decode workers", 1, 16, 1, real_most=8),
    "batch": Slider("Sequences a batch, at most", 1, 256, 1),
    "batching": Menu(
        "Batching", {"static": "static: wait until it is full", "dynamic": "dynamic: take who waits", "continuous": "continuous"}
    ),
    "device": Menu("GPU", {name: name.upper() for name in DEVICES}),
    "model": Menu("Model", {name: name for name in KNOWN}),
    "gpus": Slider("GPUs a worker", 1, 8, 1),
    "weight_bits": Menu("Weights", {"16": "16 bits", "8": "8 bits", "4.5": "4 bits and scales"}),
    "kv_bits": Menu("KV", {"16": "16 bits", "8": "8 bits", "5": "4 bits and scales"}),
    "checkpoint": Menu("Model", {one.name: one.says for one in CHECKPOINTS.values()}),
    "weight_dtype": Menu("Weights", {"float": "floats of 32 bits", "int8": "8 bits", "int4": "4 bits and scales"}),
    "kv_dtype": Menu("KV", {"auto": "floats of 32 bits", "int8": "8 bits and scales", "int5": "5 bits and scales"}),
    "by": Menu("Times of a step from", {"sheet": "the sheet of devices", "profile": "the profile that was measured"}),
    "ttft_ms": Slider("Objective: first token within", 10, 10_000, 10, "ms"),
    "tpot_ms": Slider("Objective: time per output token", 1, 1000, 1, "ms"),
}


def settings_of(given: Mapping[str, Any], taken: Iterable[str], defaults: Mapping[str, Any], where: Where) -> Settings:
    """`taken`: the knobs that may be given; the others have their defaults. Raises BatonError(INVALID_FIELD) that names the field."""
    names = [*taken]
    for name in given:
        if name not in names:
            raise invalid(str(name)[:64], f"is not set in this experiment; it has {', '.join(names)}")
    values: dict[str, Any] = {one.name: one.default for one in fields(Settings)} | dict(defaults)
    checked = {name: KNOBS[name].check(name, value, where) for name, value in given.items()}
    made = Settings(**{**values, **checked})
    check(made, where)
    return made


def check(settings: Settings, where: Where) -> None:
    """The bounds of a whole run. Raises BatonError(INVALID_FIELD)."""
    requests = settings.rate * settings.duration_s
    if requests > MOST_REQUESTS[where]:
        raise invalid("rate", f"{requests:g} requests in {settings.duration_s} s: at most {MOST_REQUESTS[where]} in a run")
    if (tokens := requests * settings.output) > MOST_OUTPUT[where]:
        raise invalid("output", f"{tokens:g} output tokens: at most {MOST_OUTPUT[where]} in a run")
    if (tokens := requests * (settings.prompt + settings.output)) > MOST_TOKENS[where]:
        raise invalid("prompt", f"{tokens:g} tokens: at most {MOST_TOKENS[where]} in a run")
    if settings.batching != "continuous" and settings.prefill:
        raise invalid("batching", "whole batches are for workers that compute prompts themselves: without prefill workers")
