"""Tiers of a simulated cluster: what of a configuration and a profile says how large they are and how long moving takes."""

from dataclasses import replace

from baton.cluster.config import Config
from baton.profile.file import Profile
from baton.simulate.cluster import Sizes
from baton.simulate.tiers import TierSizes

MIB = 1 << 20


def with_tiers(sizes: Sizes, config: Config, profile: Profile) -> tuple[Sizes, list[str]]:
    """The sizes of a cluster whose workers have tiers as configured, and what is to be doubted, in words. None are simulated where the
    profile does not say how large KV is. Raises ValueError, which names the key, for a tier that has no room for a block."""
    tiers, found = config.tiers, list[str]()
    if not tiers.any:
        return sizes, found
    if tiers.object:
        found.append("tiers.object: no object store is simulated: what it alone would hold is computed again")
    asked = {"tier_memory": ("tiers.memory_mib", tiers.memory_mib), "tier_disk": ("tiers.disk_mib", tiers.disk_mib)}
    given = {model: (key, mib) for model, (key, mib) in asked.items() if mib is not None}
    if not given:
        return sizes, found
    if not profile.kv_token_bytes:
        return sizes, [*found, "tiers: the profile does not say how large KV is: what leaves the pool is computed again"]
    missing = [(key, model) for model, (key, _) in given.items() if model not in profile.models]
    found += [f"{key}: the profile has no {model}: moving takes no time" for key, model in missing]
    found += _beside(config)
    size, rate = max(1, round(profile.kv_token_bytes * sizes.block_size)), tiers.save_mib_per_s
    rooms = {model: mib * MIB for model, (_, mib) in given.items()}
    made = TierSizes.of(rooms, size, rate and rate * MIB, tiers.save == "at_once", tiers.wait_s, tiers.keep == "all")
    for (key, mib), (_, blocks) in zip(given.values(), made.blocks, strict=True):
        if blocks < 1:
            raise ValueError(f"{key}: {mib} MiB hold no block: one takes {size / MIB:.1f} MiB")
    return replace(sizes, tiers=made), found


def _beside(config: Config) -> list[str]:
    """What is configured for tiers and not simulated."""
    found = []
    if config.tiers.long_contexts:
        found.append("tiers.long_contexts: sequences longer than the pool are refused")
    if config.tiers.key_file is not None:
        found.append("tiers.key_file: encryption takes what it took when the profile was measured, if there was a key")
    if config.kv.events is not None:
        found.append("kv.events: nothing is loaded before its sequence is there; here it is")
    return found
