"""The cluster of a simulated run: its sizes, the times of its parts, and what is to be said of them first."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import invalid
from baton.cockpit.knobs import Settings
from baton.cockpit.load import ExperimentLoad
from baton.engine.core.limits import Batching
from baton.plan import formulae, pools
from baton.plan.hardware import DEVICES, MEASURED
from baton.plan.shape import KNOWN
from baton.plan.sheet import profile_of
from baton.predict.guessing import assumed
from baton.predict.predict import Offer, doubts
from baton.predict.setting import DEFAULTS, ClusterSetting
from baton.profile.file import Profile
from baton.simulate.cluster import BLOCK, Sizes
from baton.simulate.workers import Times
from loadtest.window import Window

GUESS_COST = 0.1  # of a guess, in decode steps (`baton size --guess-cost`)
MOST_BLOCKS = 1 << 17  # of a worker that are simulated
TIMEOUT_S = 60.0
BATCHINGS: tuple[Batching, ...] = get_args(Batching)


@dataclass(frozen=True, slots=True)
class Simulation:
    setting: ClusterSetting
    profile: Profile
    times: Times
    doubts: tuple[str, ...]


def simulation_of(settings: Settings, load: ExperimentLoad, measured: Path | None) -> Simulation:
    """`measured`: the file of a profile. Raises BatonError(INVALID_FIELD), and ProfileError for that file."""
    if settings.by == "profile":
        if measured is None:
            raise invalid("by", "no profile was given: `baton profile` measures one, and `baton cockpit --profile FILE` takes it")
        profile = Profile.load_file(measured)
        blocks = int(profile.engine.get("kv_blocks", DEFAULTS["kv_blocks"]))
        chunk = int(profile.engine.get("max_num_batched_tokens", DEFAULTS["max_num_batched_tokens"]))
    else:
        profile, blocks, chunk = _of_sheet(settings)
    if load.longest > blocks * BLOCK:
        raise invalid("prompt", f"a request has {load.longest} tokens, and a worker has room for the KV of {blocks * BLOCK}")
    sizes = Sizes(
        settings.prefill, settings.decode, settings.batch, blocks, chunk, BLOCK, blocks * BLOCK, batching=_batching(settings.batching),
    )  # fmt: skip
    setting = ClusterSetting(sizes, RouterConfig(), SloConfig(ttft_s=settings.ttft_ms / 1000, tpot_s=settings.tpot_ms / 1000))
    said = list(doubts(setting, profile, Offer(load.items, load.times, Window(settings.duration_s), TIMEOUT_S)))
    if settings.speculation == "on":
        profile = assumed(profile, settings.acceptance, GUESS_COST)
        setting = replace(setting, sizes=replace(sizes, speculation="draft", speculation_tokens=settings.guesses))
        said.append(
            f"guesses are assumed: {settings.guesses} a step at most, each right with {settings.acceptance:g}, which take {GUESS_COST:g} of"
            " a step to make; the engine decides how many are worth it"
        )
    return Simulation(setting, profile, Times.of(profile), tuple(said))


def _of_sheet(settings: Settings) -> tuple[Profile, int, int]:
    """The profile, the blocks of KV beside the weights, and the tokens of a step."""
    shape, device = KNOWN[settings.model], DEVICES[settings.device]
    weight_bits, kv_bits = float(settings.weight_bits), float(settings.kv_bits)
    blocks = pools.kv_blocks(pools.WorkerKind(device, settings.gpus, 1, weight_bits, kv_bits), shape, BLOCK)
    if blocks < 1:
        weights = formulae.weight_bytes(shape.parameters, weight_bits)
        raise invalid(
            "model", f"{shape.name} has {weights / 1e9:.3g} GB of weights: {settings.gpus} x {device.name} have no room for them and KV"
        )
    made = profile_of(shape, device, MEASURED, devices=settings.gpus, weight_bits=weight_bits, kv_bits=kv_bits, batch=settings.batch)
    return made, min(blocks, MOST_BLOCKS), 2048


def _batching(name: str) -> Batching:
    for known in BATCHINGS:
        if name == known:
            return known
    raise invalid("batching", f"must be one of {', '.join(BATCHINGS)}")
