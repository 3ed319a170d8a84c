"""What of a cluster's configuration the simulator takes over, and what of it the simulator does not know."""

from dataclasses import dataclass

from baton.cluster.config import Config
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.predict.guessing import with_guesses
from baton.predict.tiered import with_tiers
from baton.profile.file import Profile
from baton.simulate.cluster import Sizes

# What decides nothing that is simulated but is left open in the configuration of an engine, as `baton.engine.defaults` has it on a CPU.
DEFAULTS = {
    "max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": 16, "max_model_len": 1 << 16, "kv_blocks": 4096,
    "speculation_batch_tokens": 256,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterSetting:
    """`cores`: which all processes, the one that asks included, share; None: each has its own. `unknown`: what is configured and not
    simulated, in words."""

    sizes: Sizes
    router: RouterConfig
    slo: SloConfig
    routers: int = 1
    cores: int | None = None
    unknown: tuple[str, ...] = ()

    @property
    def asked(self) -> dict[str, float]:
        """What is asked, by the names of a profile's region."""
        sizes = self.sizes
        found: dict[str, float] = {
            "prefill workers": sizes.prefill,
            "decode workers": sizes.decode,
            "tokens a step": sizes.max_num_batched_tokens,
        }
        return found if sizes.speculation == "none" else {**found, "guesses a step": sizes.speculation_tokens}


def setting_of(config: Config, profile: Profile, cores: int | None = None) -> ClusterSetting:
    """Options that are left open are those of the engine that was profiled. Raises ValueError, which names the key, for a tier that has no
    room for a block."""

    def option(name: str) -> int:
        given = getattr(config.engine, name, None)
        return int(given if given is not None else profile.engine.get(name, DEFAULTS[name]))

    block = option("block_size")
    kv_blocks = int(profile.engine.get("kv_blocks", DEFAULTS["kv_blocks"]))
    if config.engine.kv_memory_bytes is not None and profile.kv_token_bytes:
        kv_blocks = max(1, int(config.engine.kv_memory_bytes // (profile.kv_token_bytes * block)))
    length = config.model.max_model_len or int(profile.engine.get("max_model_len", DEFAULTS["max_model_len"]))
    sizes = Sizes(
        config.prefill.replicas, config.decode.replicas, option("max_num_seqs"), kv_blocks, option("max_num_batched_tokens"), block,
        min(length, kv_blocks * block), config.engine.max_queue, batching=config.engine.batching,
        batch_wait_s=config.engine.batch_wait_s,
    )  # fmt: skip
    sizes, guesses = with_guesses(sizes, config, profile, option("speculation_batch_tokens"))
    sizes, tiers = with_tiers(sizes, config, profile)
    unsure = (*guesses, *tiers)
    return ClusterSetting(sizes, config.router, config.slo, config.router.replicas, cores, (*unsure, *_unknown(config, profile)))


def _unknown(config: Config, profile: Profile) -> list[str]:
    engine = config.engine
    found = []
    for name in ("threads", "weight_dtype", "kv_dtype", "kind"):
        given, measured = getattr(engine, name), profile.engine.get(name)
        if measured is not None and given is not None and given != measured and given != "auto":
            found.append(f"engine.{name} {given}: the profile has {measured}")
    return found
