"""The seven experiments: what each shows, what to look at, and which knobs it has where. Decides and does nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from baton.cluster.errors import invalid
from baton.cockpit.knobs import KNOBS, LABELS, Menu, Settings, Slider, Where, settings_of

LOAD = ("rate", "duration_s", "prompt", "output")
SHEET = ("by", "device", "model")
OBJECTIVES = ("ttft_ms", "tpot_ms")
STEPS = 5  # of the breaking point: a fifth of the rate, two fifths, …


@dataclass(frozen=True, slots=True)
class Experiment:
    """`says`: two sentences. `real`: the knobs on a cluster that runs; none: it cannot be done there, and `instead` says why. `own`:
    those on a cluster that is started for the run; none: it needs no such cluster."""

    name: str
    title: str
    says: str
    look: str
    simulated: tuple[str, ...]
    real: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    instead: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of a simulated run, where they are not those of `Settings`
    real_defaults: Mapping[str, Any] = field(default_factory=dict)
    own_defaults: Mapping[str, Any] = field(default_factory=dict)
    ramp: bool = False  # the rate rises in STEPS steps up to `rate`

    def settings(self, where: Where, given: Mapping[str, Any]) -> Settings:
        """Raises BatonError(INVALID_FIELD)."""
        if not self.knobs(where):
            raise invalid("where", self.instead if where == "real" else "the running cluster can do it: none is started for it")
        return settings_of(given, self.knobs(where), self.defaults_of(where), where)

    def knobs(self, where: Where) -> tuple[str, ...]:
        return {"real": self.real, "own": self.own, "simulated": self.simulated}[where]

    def defaults_of(self, where: Where) -> Mapping[str, Any]:
        return {"real": self.real_defaults, "own": self.own_defaults, "simulated": self.defaults}[where]


EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment(
            "static",
            "Static batching",
            "A static batch starts together and ends when its longest answer ends, so short answers wait for long ones and new requests"
            " wait for the batch. The scheduler is Baton's own, in its mode for comparisons; the wider the spread of the lengths, the more"
            " it loses.",
            "Batch use falls at the end of each batch while the queue grows, and the time to the first token jumps by a whole batch.",
            (*LOAD, "spread", "batch", "batching", "decode", *SHEET),
            own=(*LOAD, "spread", "batch", "batching", "decode"),
            instead="a running cluster keeps its batching (--engine.batching static): run it on one of its own, or simulate it",
            own_defaults={"batching": "static", "spread": 0.9, "output": 128, "rate": 10.0, "batch": 8, "prefill": 0},
            defaults={"batching": "static", "spread": 0.9, "output": 128, "rate": 10.0, "batch": 32, "prefill": 0, "duration_s": 30},
        ),
        Experiment(
            "continuous",
            "Continuous batching",
            "A sequence joins the batch at the next step and leaves it with its last token. The batch is as large as the load, and every"
            " sequence more makes each step a little longer.",
            "Batch use follows the rate; tokens per second grow with it, and time per output token only a little, until the batch is full.",
            (*LOAD, "spread", "batch", "decode", *SHEET),
            (*LOAD, "spread"),
            real_defaults={"spread": 0.9, "output": 64},
            defaults={"spread": 0.9, "output": 128, "rate": 10.0, "batch": 32, "prefill": 0, "duration_s": 30},
        ),
        Experiment(
            "caching",
            "Prefix caching",
            "Requests that begin alike compute that part once: KV of full blocks is kept, and the router sends a prompt to where it is."
            " Without it, every prompt is computed from its first token.",
            "Time to the first token with caching on and off, at one rate, and the share of prompt tokens that were cached.",
            (*LOAD, "shared", "caching", "prefill", "decode", *SHEET),
            (*LOAD, "shared", "caching"),
            defaults={"prompt": 2048, "shared": 0.8, "rate": 8.0, "decode": 2},
            real_defaults={"prompt": 384, "shared": 0.6},
        ),
        Experiment(
            "speculation",
            "Speculation",
            "Cheap guesses of the next tokens are verified together in one step, so a step yields several tokens where guesses are right."
            " It pays while a step is bound by reading the weights, and stops paying in large batches.",
            "Time per output token with speculation on and off, first at a low rate and then at a high one.",
            (*LOAD, "speculation", "acceptance", "guesses", "batch", "decode", *SHEET),
            (*LOAD, "speculation"),
            real_defaults={"speculation": "on", "rate": 2.0, "output": 64},
            defaults={"speculation": "on", "prefill": 0, "rate": 2.0, "output": 128, "batch": 128},
        ),
        Experiment(
            "workers",
            "More workers",
            "More GPUs serve more requests, if they are of the right role. Whether prefill or decode is short of workers depends on the"
            " lengths of prompts and outputs.",
            "The queue shows that workers are missing, time to the first token that prefill ones are, batch use that decode ones are.",
            (*LOAD, "prefill", "decode", "batch", *SHEET, *OBJECTIVES),
            own=(*LOAD, "prefill", "decode", "checkpoint", "batch", *OBJECTIVES),
            instead="`baton scale` changes the workers of a running cluster; experiments leave it as it is",
            own_defaults={"rate": 4.0, "prompt": 512, "checkpoint": "untrained-27m"},
            defaults={"rate": 16.0, "prompt": 2048, "output": 64, "prefill": 1, "decode": 2, "batch": 64},
        ),
        Experiment(
            "breaking",
            "The breaking point",
            "The rate rises in five steps up to the one that is set. From some step on the queue grows without end, and fewer than nine"
            " requests in ten meet their objectives: that is the breaking point.",
            "The step from which the queue does not empty any more, and what time to the first token does there.",
            (*LOAD, "prefill", "decode", "batch", *SHEET, *OBJECTIVES),
            (*LOAD, *OBJECTIVES),
            real_defaults={"rate": 12.0, "duration_s": 30},
            defaults={"rate": 40.0, "prompt": 2048, "output": 64, "duration_s": 30, "batch": 64},
            ramp=True,
        ),
        Experiment(
            "size",
            "Model size",
            "A step reads all weights, so a model twice as large takes twice as long for each token, and fewer bits take it back. What"
            " the weights leave free is room for KV, and with it for a batch.",
            "Time per output token against the size of the weights, and KV use: a large model on a small GPU has no room for sequences.",
            (*LOAD, "device", "model", "gpus", "weight_bits", "kv_bits", "batch", "decode"),
            own=(*LOAD, "checkpoint", "weight_dtype", "kv_dtype", "batch", "decode"),
            instead="a running cluster serves the model that it was started with",
            own_defaults={"rate": 2.0, "output": 64, "prefill": 0},
            defaults={"rate": 4.0, "prompt": 1024, "output": 128, "prefill": 0, "batch": 64},
        ),
    )
}


def find(name: Any) -> Experiment:
    """Raises BatonError(INVALID_FIELD)."""
    if not isinstance(name, str) or name not in EXPERIMENTS:
        raise invalid("experiment", f"must be one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def catalogue(workers: int = 8) -> dict[str, Any]:
    """Experiments and knobs as the page needs them. `workers`: how many a cluster of its own may have here."""
    usual = {one.name: one.default for one in fields(Settings)}
    return {
        "knobs": {name: _knob(knob) for name, knob in KNOBS.items()},
        "own_most": {"prefill": workers - 1, "decode": workers},
        "experiments": [
            {
                "name": one.name, "title": one.title, "says": one.says, "look": one.look, "instead": one.instead,
                "knobs": {where: one.knobs(where) for where in LABELS},
                "defaults": {where: usual | dict(one.defaults_of(where)) for where in LABELS},
            }
            for one in EXPERIMENTS.values()
        ],
    }  # fmt: skip


def _knob(knob: Slider | Menu) -> dict[str, Any]:
    if isinstance(knob, Menu):
        return {"label": knob.label, "options": dict(knob.options)}
    return {
        "label": knob.label, "least": knob.least, "most": knob.most, "step": knob.step, "unit": knob.unit, "real_most": knob.real_most,
    }  # fmt: skip
