"""The calculators: what `baton size` says, each figure with its formula. Decides and does nothing else."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from baton.cluster.errors import invalid
from baton.cockpit.knobs import Knob, Menu, Slider
from baton.plan.hardware import DEVICES, MEASURED
from baton.plan.shape import KNOWN
from baton.plan.size import Asked, figures, shown

USUAL = Asked(4096, 512, 32)
FIELDS: Mapping[str, tuple[Knob, Any]] = {
    "model": (Menu("Model", {name: name for name in KNOWN}), "llama-3.1-8b"),
    "device": (Menu("GPU", {name: name.upper() for name in DEVICES}), "h100"),
    "devices": (Slider("GPUs a worker", 1, 64, 1), USUAL.devices),
    "prompt": (Slider("Prompt", 1, 1_000_000, 1, "tokens"), USUAL.prompt),
    "cached": (Slider("of it cached", 0, 1_000_000, 1, "tokens"), USUAL.cached),
    "output": (Slider("Output", 1, 1_000_000, 1, "tokens"), USUAL.output),
    "batch": (Slider("Sequences a step", 1, 4096, 1), USUAL.batch),
    "weight_bits": (Slider("Bits of a weight", 1, 64, 0.5), USUAL.weight_bits),
    "kv_bits": (Slider("Bits of a number of KV", 1, 64, 0.5), USUAL.kv_bits),
    "link_gbps": (Slider("Link between workers", 0.1, 10_000, 0.1, "Gbit/s"), 200.0),
    "price": (Slider("Price of a GPU for an hour", 0, 1000, 0.01), 2.5),
    "acceptance": (Slider("Guesses that are right", 0, 1, 0.01), 0.7),
}


def form() -> list[dict[str, Any]]:
    """The fields as the page needs them."""
    return [
        {"name": name, "label": knob.label, "value": value}
        | ({"options": dict(knob.options)} if isinstance(knob, Menu) else {"unit": knob.unit, **bounds(knob)})
        for name, (knob, value) in FIELDS.items()
    ]


def bounds(knob: Slider) -> dict[str, float]:
    return {"least": knob.least, "most": knob.most, "step": knob.step}


def size(given: Mapping[str, str]) -> dict[str, Any]:
    """`given`: fields as text; those that are missing have their usual values. Raises BatonError(INVALID_FIELD)."""
    values = {name: value for name, (_, value) in FIELDS.items()}
    for name, text in given.items():
        if name not in FIELDS:
            raise invalid(name[:64], f"is unknown; there are {', '.join(FIELDS)}")
        knob = FIELDS[name][0]
        values[name] = knob.check(name, text if isinstance(knob, Menu) else _number(name, text), "simulated")
    if values["cached"] >= values["prompt"]:
        raise invalid("cached", f"must be less than the prompt's {values['prompt']}")
    shape, device = KNOWN[values.pop("model")], DEVICES[values.pop("device")]
    asked = Asked(link_bytes_per_s=values.pop("link_gbps") / 8 * 1e9, **values)
    try:
        told = [*figures(shape, device, MEASURED, asked)]
    except ValueError as error:
        raise invalid("model", str(error)) from None
    reached = f"{MEASURED.compute:.0%} of compute and {MEASURED.bandwidth:.0%} of bandwidth, {MEASURED.source}"
    return {
        "figures": [asdict(one) | {"shown": shown(one)} for one in told],
        "from": f"{asked.devices} x {device.name}: {device.source}. Reached of it: {reached}. No queue, no interference: a bound.",
    }


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise invalid(name, "must be a number") from None
