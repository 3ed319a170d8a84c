"""The profile of a cluster that nobody has measured: from the formulae, the sheet of devices, and the shares of them that are reached."""

from baton.plan import formulae
from baton.plan.hardware import Device, Efficiency
from baton.plan.shape import Shape
from baton.profile.file import Profile
from baton.profile.models import Fitted

# What `benchmarks/gpu.py` measured on an H200 for Baton's engine (docs/gpus.md) lies within 15 % of the two shares of `MEASURED`, which
# it took there. On another device or model, the shares themselves are assumed: a fifth off is common.
ERROR = 0.25
LAUNCH_S = 0.0015  # of a step beside its kernels: scheduling, sampling, messages
# Of one all-reduce beside its bytes, two a layer: assumed, for GPUs with links of their own and for those without.
REDUCE_S, REDUCE_PCIE_S = 1e-5, 3e-5
HANDOFF_S = 0.002  # of a handoff beside its bytes: handshake, lease, digests
ROUTER = {"request": 0.001, "token": 6e-05}  # processor time, `benchmarks/serving.py`; the order of it on any processor
START_S = 60.0  # weights of tens of GB from a disk, graphs captured


def step_numbers(
    shape: Shape, device: Device, reached: Efficiency, devices: int = 1, weight_bits: float = 16, kv_bits: float = 16, batch: int = 32
) -> dict[str, float]:
    """The numbers of a step of `devices` with tensor parallelism, as in `baton.profile.models.NUMBERS`. A step reads as many experts as one
    with `batch` tokens does."""
    flop_per_s = device.flop_rate(weight_bits) * reached.compute * devices
    bytes_per_s = device.bytes_per_s * reached.bandwidth * devices
    row = 2 * shape.active_parameters / flop_per_s
    reduce_s = wait_s = 0.0
    if devices > 1:  # two a layer of each row
        wait_s = 2 * shape.layers * (REDUCE_S if device.linked else REDUCE_PCIE_S)
        reduce_s = formulae.ring_seconds(2 * shape.layers * shape.hidden * 2, devices, device.link_bytes_per_s)
    return {
        "step": LAUNCH_S + wait_s,
        "read": formulae.weight_bytes(shape.read_parameters(batch), weight_bits) / bytes_per_s,
        "tokens": row + reduce_s,
        "pairs": (shape.attention_flop(1, 1) - shape.attention_flop(1, 0)) / flop_per_s,
        "decodes": row + 2 * shape.head_parameters / flop_per_s + reduce_s,
        "context": shape.kv_bytes(kv_bits / 8) * shape.kv_copies(devices) / bytes_per_s,
    }


def profile_of(
    shape: Shape,
    device: Device,
    reached: Efficiency,
    *,
    devices: int = 1,
    weight_bits: float = 16,
    kv_bits: float = 16,
    link_bytes_per_s: float = 25e9,
    batch: int = 32,
) -> Profile:
    """The profile of one replica of `devices` with tensor parallelism. A step reads as many experts as one with `batch` tokens does. Raises
    ValueError if the weights do not fit."""
    weights = formulae.weight_bytes(shape.parameters, weight_bits)
    if weights > device.memory * devices:
        raise ValueError(f"{shape.name} has {weights / 1e9:.1f} GB of weights, and {devices} x {device.name} less")
    step = step_numbers(shape, device, reached, devices, weight_bits, kv_bits, batch)
    said = f"{device.name}: {device.source}; {reached.compute:.0%} of compute and {reached.bandwidth:.0%} of bandwidth, {reached.source}"
    return Profile(
        source=f"sheet {device.name}",
        processor=f"{devices} x {device.name}",
        model=shape.name,
        engine={"weight_bits": weight_bits, "kv_bits": kv_bits, "devices": devices},
        kv_token_bytes=shape.kv_bytes(kv_bits / 8),
        form="roof",
        models={
            "step": Fitted(step, error=ERROR, source=said),
            "handoff": Fitted({"base": HANDOFF_S, "byte": 1 / link_bytes_per_s}, error=ERROR, source="the link's rate"),
            "router": Fitted(ROUTER, error=ERROR, source="of the order that benchmarks/serving.py measures"),
            "start": Fitted({"base": START_S}, error=ERROR, source="assumed"),
        },
    )
