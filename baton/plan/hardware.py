"""A sheet of devices: what their makers state. What a program reaches of it is `Efficiency`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    flop_per_s: float  # dense, bfloat16
    bytes_per_s: float  # of its memory
    memory: float  # bytes
    link_bytes_per_s: float  # to a neighbour, each direction
    fast8: bool  # 8 bits are multiplied twice as fast
    source: str
    product: str  # the label nvidia.com/gpu.product, as NVIDIA's GPU feature discovery gives it to nodes

    @property
    def linked(self) -> bool:
        """Whether neighbours have links of their own (NVLink), not PCI Express."""
        return self.link_bytes_per_s > 100e9

    def flop_rate(self, weight_bits: float) -> float:
        """The rate of products with weights of so many bits. With fewer than 8, as in AWQ and GPTQ, weights become 16 bits again where they
        are multiplied: that saves memory and reading, no arithmetic."""
        return self.flop_per_s * (2 if self.fast8 and 5 < weight_bits <= 8 else 1)


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
        Device("a10", 125e12, 600e9, 24e9, 32e9, False, SHEET, "NVIDIA-A10"),
        Device("l40s", 362e12, 864e9, 48e9, 32e9, True, SHEET, "NVIDIA-L40S"),
        Device("a100", 312e12, 2039e9, 80e9, 300e9, False, f"{SHEET}, 80 GB SXM", "NVIDIA-A100-SXM4-80GB"),
        Device("h100", 989e12, 3350e9, 80e9, 450e9, True, f"{SHEET}, SXM", "NVIDIA-H100-80GB-HBM3"),
        Device("h200", 989e12, 4800e9, 141e9, 450e9, True, f"{SHEET}, SXM", "NVIDIA-H200"),
        Device("b200", 2250e12, 7700e9, 180e9, 900e9, True, f"{SHEET} of a DGX B200, an eighth of it", "NVIDIA-B200"),
    )
}
# benchmarks/gpu.py on an H200 with Llama-3.1-8B shapes: prefill 84 to 94 % of a large product's rate, which is 75 % of what is stated;
# decode 71 to 92 % of a copy's rate, which is 86 % of it.
MEASURED = Efficiency(0.65, 0.7, "measured on an H200 (docs/gpus.md), assumed for others")
