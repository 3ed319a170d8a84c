"""Tiers of a simulated cluster: what of a configuration and a profile says how large they are and how long moving takes."""

from dataclasses import replace

from baton.cluster.config import Config
from baton.engine.core.block_key import DISK, HOST
from baton.engine.core.colder import TierPolicy
from baton.profile.file import Profile
from baton.simulate.cluster import Sizes
from baton.simulate.tiers import MODELS, TierSizes, room

MIB = 1 << 20


def with_tiers(sizes: Sizes, config: Config, profile: Profile) -> tuple[Sizes, list[str]]:
    """The sizes of a cluster whose workers have tiers as configured, and what is to be doubted, in words. None are simulated where the
    profile does not say how large KV is. Raises ValueError, which names the key, for a tier that has no room for a block."""
    tiers, found = config.tiers, list[str]()
    if not tiers.any:
        return sizes, found
    if tiers.object:
        found.append("tiers.object: no object store is simulated: what it alone would hold is computed again")
    asked = {HOST: ("memory_mib", tiers.memory_mib), DISK: ("disk_mib", tiers.disk_mib)}
    given = {medium: (key, mib) for medium, (key, mib) in asked.items() if mib is not None}
    if not given:
        return sizes, found
    if not profile.kv_token_bytes:
        return sizes, [*found, "tiers: the profile does not say how large KV is: what leaves the pool is computed again"]
    found += [f"tiers.{key}: the profile has no {MODELS[medium]}: moving takes no time" for medium, (key, _) in given.items()
              if MODELS[medium] not in profile.models]  # fmt: skip
    found += _beside(config)
    size = max(1, round(profile.kv_token_bytes * sizes.block_size))
    blocks = tuple((medium, _blocks(key, mib, room(medium, mib * MIB, size), size)) for medium, (key, mib) in given.items())
    rate = None if tiers.save_mib_per_s is None else tiers.save_mib_per_s * MIB
    policy = TierPolicy(tiers.save == "at_once", tiers.wait_s, tiers.keep == "all")
    return replace(sizes, tiers=TierSizes(blocks, size, policy, rate)), found


def _blocks(key: str, mib: int, blocks: int, size: int) -> int:
    if blocks < 1:
        raise ValueError(f"tiers.{key}: {mib} MiB hold no block: one takes {size / MIB:.1f} MiB")
    return blocks


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
