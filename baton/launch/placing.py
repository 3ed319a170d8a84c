"""Decides which worker gets which GPU. Devices are handed out whole; a worker shares one only if its pool asks for less than one, and then
gets that share of its memory. The workers of a pool get devices of one kind: streams and KV do not cross unlike ones.

1 `spared` leaves out what is full → 2 `kinds` finds, before anything starts, which kind each pool gets, or says what is lacking →
3 `place` gives devices to the processes that start, within what the others hold. A process keeps its devices for as long as its name
lives, so a restart finds the same ones.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.cluster.gpus import Device

LEAST_FREE = 1 << 30  # bytes: what CUDA and the kernels of a process take before the model
ROUNDING = 1e-9
GIB = 1 << 30


class NoRoom(ValueError):
    """Too few devices; the text says how many there are, how many are lacking, and what to do."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """What a launcher on this host may give its processes."""

    devices: tuple[Device, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)  # role → kind of its devices


@dataclass(frozen=True, slots=True)
class GpuDemand:
    role: str
    gpus: float  # of each process; less than 1: a share of one
    replicas: int

    @property
    def share(self) -> float:
        return min(self.gpus, 1.0)

    @property
    def count(self) -> int:
        """Devices of each process."""
        return 1 if 0 < self.gpus < 1 else int(self.gpus)


@dataclass(frozen=True, slots=True)
class HeldGpus:
    role: str
    share: float  # of each device
    devices: tuple[Device, ...]


def spared(devices: Iterable[Device], least: int = LEAST_FREE) -> tuple[tuple[Device, ...], str]:
    """The devices with `least` bytes free, and of the others a text for a person. A GPU that does not tell its memory counts as free."""
    every = tuple(devices)
    full = [each for each in every if each.memory_total and each.memory_total - each.memory_used < least]
    said = "; ".join(
        f"{each} is full: {(each.memory_total - each.memory_used) / GIB:.1f} of {each.memory_total / GIB:.1f} GiB are free" for each in full
    )
    return tuple(each for each in every if each not in full), said


def kinds(devices: Sequence[Device], demands: Sequence[GpuDemand], full: str = "") -> dict[str, str]:
    """The kind of device for each pool; the same for all if there is one that suffices. `full`: what `spared` says. Raises NoRoom."""
    wanting = [demand for demand in demands if demand.count and demand.replicas]
    there = list(dict.fromkeys(device.kind for device in devices))
    choices = sorted(itertools.product(there, repeat=len(wanting)), key=lambda chosen: len(set(chosen)))
    for chosen in choices:
        found = {demand.role: kind for demand, kind in zip(wanting, chosen, strict=True)}
        if _fits(devices, wanting, found):
            return found
    raise NoRoom(lacking(devices, wanting, full))


def _fits(devices: Sequence[Device], demands: Sequence[GpuDemand], found: Mapping[str, str]) -> bool:
    held: dict[str, HeldGpus] = {}
    for demand in demands:
        given = place(devices, held, demand, [f"{demand.role}-{number}" for number in range(demand.replicas)], found)
        if given is None:
            return False
        held |= given
    return True


def place(
    devices: Sequence[Device], held: Mapping[str, HeldGpus], demand: GpuDemand, names: Sequence[str], found: Mapping[str, str]
) -> dict[str, HeldGpus] | None:
    """What each of `names` gets; None if there is no room for all. `held`: what processes have, by name; `found`: as `kinds` told."""
    if not demand.count:
        return {name: HeldGpus(demand.role, 0.0, ()) for name in names}
    own = next((each.devices[0].kind for each in held.values() if each.role == demand.role and each.devices), found.get(demand.role))
    for kind in [own] if own is not None else dict.fromkeys(device.kind for device in devices):
        given: dict[str, HeldGpus] = {}
        for name in names:
            taken = _pick([device for device in devices if device.kind == kind], [*held.values(), *given.values()], demand)
            if taken is None:
                break
            given[name] = HeldGpus(demand.role, demand.share, taken)
        else:
            return given
    return None


def _pick(devices: Sequence[Device], held: Sequence[HeldGpus], demand: GpuDemand) -> tuple[Device, ...] | None:
    """The devices of one process: the first that is free, and those that it reaches best."""

    def room(device: Device) -> bool:
        used = sum(each.share for each in held if device in each.devices)
        return used + demand.share <= 1 + ROUNDING and (demand.count == 1 or not device.part)

    free = [device for device in devices if room(device)]
    if len(free) < demand.count:
        return None
    chosen = [free.pop(0)]
    while len(chosen) < demand.count:
        best = max(free, key=lambda device: sum(_reach(one, device) for one in chosen))  # of equal ones the first
        free.remove(best)
        chosen.append(best)
    return tuple(chosen)


def _reach(one: Device, other: Device) -> int:
    return {"NVLink": 2, "P2P": 1}.get(one.peers.get(other.gpu, ""), 0)


def lacking(devices: Sequence[Device], demands: Sequence[GpuDemand], full: str = "") -> str:
    """The sentences for a person whose GPUs do not suffice."""
    workers = sum(demand.replicas for demand in demands)
    pools = ", ".join(f"{demand.role}: {demand.replicas} x {demand.gpus:g}" for demand in demands)
    asked = sum(demand.replicas * demand.gpus for demand in demands)
    there = ", ".join(map(str, devices)) or "none"
    who = "1 worker needs" if workers == 1 else f"{workers} workers need"
    said = f"{who} {asked:g} GPUs ({pools}), and {len(devices)} can be used here ({there})"
    less = math.ceil(asked - len(devices) - ROUNDING)
    if full:
        said += f"; {full}"
    if less <= 0 and any(demand.count > 1 for demand in demands) and any(device.part for device in devices):
        return f"{said}: a process can use one slice of a GPU in MIG mode, not several: ask for one GPU each"
    if less <= 0:
        return f"{said}: there are not enough of one kind for each pool, and streams and KV do not cross unlike GPUs: start fewer workers"
    ways = "start fewer with --prefill and --decode (--prefill 0: each worker does both)"
    if devices and all(demand.count == 1 for demand in demands):
        share = f"{int(100 / -(-workers // len(devices))) / 100:g}"
        ways += f", or let them share GPUs, each with its part of the memory: --prefill.gpus {share} --decode.gpus {share}"
    return f"{said}: {less} too few; {ways}"
