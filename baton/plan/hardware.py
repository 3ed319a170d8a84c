"""A sheet of devices: what their makers state. What a program reaches of it is `Efficiency`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    flop_per_s: float  # dense, bfloat16; 8 bits twice as many where `fast8`
    bytes_per_s: float  # of its memory
    memory: float  # bytes
    link_bytes_per_s: float  # to a neighbour, each direction
    fast8: bool
    source: str


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the stated figures."""

    compute: float
    bandwidth: float
    source: str


SHEET = "NVIDIA's data sheet"
DEVICES = {
    device.name: device
    for device in (
        Device("a10", 125e12, 600e9, 24e9, 32e9, False, SHEET),
        Device("l40s", 362e12, 864e9, 48e9, 32e9, True, SHEET),
        Device("a100", 312e12, 2039e9, 80e9, 300e9, False, f"{SHEET}, 80 GB SXM"),
        Device("h100", 989e12, 3350e9, 80e9, 450e9, True, f"{SHEET}, SXM"),
        Device("h200", 989e12, 4800e9, 141e9, 450e9, True, f"{SHEET}, SXM"),
        Device("b200", 2250e12, 7700e9, 180e9, 900e9, True, f"{SHEET} of a DGX B200, an eighth of it"),
    )
}
# benchmarks/gpu.py on an H200 with Llama-3.1-8B shapes: prefill 84 to 94 % of a large product's rate, which is 75 % of what is stated;
# decode 71 to 92 % of a copy's rate, which is 86 % of it.
MEASURED = Efficiency(0.65, 0.7, "measured on an H200 (docs/gpus.md), assumed for others")
