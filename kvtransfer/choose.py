"""Which way KV takes between two pools on devices: what is tried next, and what carries it once enough is known. Decides and does nothing
else; `kvtransfer.device_transport` probes.

The ways are tried in the order of what they can reach, until one is as fast as it should be. A way that fails, or delivers other bytes, is
out. The first of the others carries KV, unless a later one was much faster.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

# Bytes/s at which a way needs no comparison. A few MiB are read, so they say less than the link can do.
ENOUGH: Mapping[str, float] = MappingProxyType({"cuda_ipc": 5e9, "nixl_vram": 5e9, "nixl": 2e9, "tcp": 0.0})
WAYS = tuple(ENOUGH)
MUCH_FASTER = 2.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What one way showed."""

    way: str
    rate: float = 0.0  # bytes/s
    why: str = ""  # it cannot be used; empty: it can


@dataclass(frozen=True, slots=True)
class TransportChoice:
    way: str = ""  # empty: none can be used
    rate: float = 0.0
    passed_over: Mapping[str, str] = field(default_factory=dict)  # the better ones, and those that cannot be used, with the reason


def next_way(offered: Collection[str], probes: Sequence[Probe]) -> str | None:
    """The way to probe next, of those that both sides offer. None: enough is known."""
    if any(not probe.why and probe.rate >= ENOUGH[probe.way] for probe in probes):
        return None
    tried = {probe.way for probe in probes}
    return next((way for way in WAYS if way in offered and way not in tried), None)


def choose(probes: Sequence[Probe], lacking: Mapping[str, str]) -> TransportChoice:
    """`lacking`: ways that one of the sides does not offer, and why."""
    passed = dict(lacking) | {probe.way: probe.why for probe in probes if probe.why}
    good = sorted((probe for probe in probes if not probe.why), key=lambda probe: WAYS.index(probe.way))
    for i, probe in enumerate(good):
        faster = max(good[i + 1 :], key=lambda other: other.rate, default=probe)
        if faster.rate <= MUCH_FASTER * probe.rate:
            return TransportChoice(probe.way, probe.rate, passed)
        passed[probe.way] = f"{in_words(probe.rate)}, where {faster.way} reaches {in_words(faster.rate)}"
    return TransportChoice(passed_over=passed)


def in_words(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
