"""Measures what tiers take, from outside, each on a cluster with a pool so small that prompts leave it.

A round asks for prompts of several lengths, then for others until those have left the pool, and then for each again, twice. The first time
its KV comes from the tier, the second time it is in the pool: the difference is what loading takes. What the tier has spent before anything
is read is processor time of writing, as the worker itself counts it.
"""

import asyncio
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np

from baton.predict.asker import Asker, Processes, status
from baton.profile.fit import DRAWS, least_squares
from baton.profile.models import NUMBERS, Fitted
from baton.v1 import worker_pb2

MIB = 1 << 20
LENGTHS = (80, 144, 272, 528)  # tokens of what returns; all but the last 16 of each can be cached
POOL, OTHERS = 1536, 512  # tokens of the pool, and of a prompt that pushes others out
LONGEST = 1024  # of the model
PUSHED = 1.25  # times the pool
MOST = 1 << 16  # tokens of a pool that is not ours to choose
TOLD_S = 2.5  # after it a worker's record says what its tier has done, with the usual redis.heartbeat_s
SOURCE = "the same prompts from the tier and from the pool; writing as the worker counts it"
KEYS = {"tier_memory": ("tiers.memory_mib",), "tier_disk": ("tiers.disk", "tiers.disk_mib")}  # by the model


class TierKnown(Protocol):
    """What has been measured so far."""

    handoffs: list[tuple[int, int, float]]  # context, bytes, seconds
    tiers: "dict[str, HeardTier]"
    facts: dict[str, int]


@dataclass(frozen=True, slots=True)
class HeardTier:
    """What one tier took. `loads`: bytes, and how many seconds later the first token came. `write`: processor seconds of a byte."""

    block_bytes: float
    loads: list[tuple[float, float]]
    write: float


def without_tiers(settings: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if not key.startswith("tiers.")}


def kv_token_bytes(known: TierKnown) -> float:
    """The bytes of a token's KV. 0: nothing that was measured tells."""
    if known.handoffs:
        return median(nbytes / context for context, nbytes, _ in known.handoffs)
    return next((tier.block_bytes / known.facts["block_size"] for tier in known.tiers.values()), 0.0)


async def measure_tiers(
    settings: Mapping[str, str], known: TierKnown, rounds: int, note: Callable[[str], None],
    running: Callable[[Mapping[str, str]], AbstractAsyncContextManager[tuple[Asker, Processes, str]]],
) -> dict[str, HeardTier]:  # fmt: skip
    """Each tier that is configured, by its model, but an object store. If it is not known how large KV is, pool and tiers have the sizes
    that `settings` say. Raises ValueError, which names the key, if such a pool is too large to be filled."""
    found, size = {}, kv_token_bytes(known)
    for model, keys in KEYS.items():
        if all(key in settings for key in keys):
            note(f"tiers: 1 decode worker with {keys[0]}")
            with _cluster(settings, keys, size, rounds) as chosen:
                async with running(chosen) as (asker, served, _):
                    found[model] = await _measure_one(asker, served, rounds, int(chosen[keys[-1]]) * MIB)
    return found


def tier_models(heard: Mapping[str, HeardTier]) -> dict[str, Fitted]:
    """The models of those of which enough came back. A difference of two times is as wrong where the load is short, so each size counts
    alike, and has the median of its loads, because now and then one waits for something else. The draws are a bootstrap, as in
    `baton.profile.fit`."""
    rng, models = np.random.default_rng(0), {}
    for model, one in heard.items():
        groups = {size: np.array([seconds for other, seconds in one.loads if other == size]) for size, _ in one.loads}
        if len(groups) > 1:
            counts = np.array([(1.0, size) for size in groups])
            middles = [[np.median(each) for each in groups.values()]]
            middles += [[np.median(rng.choice(each, len(each))) for each in groups.values()] for _ in range(DRAWS)]
            solved = [(*map(float, least_squares(counts, np.array(each))), one.write) for each in middles]
            values, *draws = [dict(zip(NUMBERS[model], each, strict=True)) for each in solved]
            models[model] = Fitted(values, tuple(draws), 0.0, len(one.loads), SOURCE)
    return models


@contextmanager
def _cluster(settings: Mapping[str, str], keys: Sequence[str], token_bytes: float, rounds: int) -> Iterator[dict[str, str]]:
    """The settings of a cluster with this tier alone. A disk gets a folder of its own: what others had kept would be found."""
    chosen = {**without_tiers(settings), **{key: settings[key] for key in keys}, "tiers.keep": "all"}
    chosen |= {"prefill.replicas": "0", "decode.replicas": "1", "router.bypass_tokens": "0"}
    if token_bytes:
        kept = (rounds + 1) * (sum(LENGTHS) + PUSHED * POOL + OTHERS)
        chosen["engine.kv_memory_mib"] = f"{POOL * token_bytes / MIB:.3f}"
        chosen["model.max_model_len"] = str(min(LONGEST, int(settings.get("model.max_model_len", LONGEST))))
        chosen[keys[-1]] = str(math.ceil(1.1 * kept * token_bytes / MIB))
    elif "engine.kv_memory_mib" not in settings:
        raise ValueError("arrangements: tiers needs split, which says how large KV is, or engine.kv_memory_mib")
    if "tiers.disk" not in chosen:
        yield chosen
        return
    parent = Path(settings["tiers.disk"])
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="baton-profile-") as folder:
        yield chosen | {"tiers.disk": folder}


async def _measure_one(asker: Asker, served: Processes, rounds: int, room: float) -> HeardTier:
    """`room`: bytes of the tier."""
    block, pool = served.facts["block_size"], served.facts["kv_blocks"] * served.facts["block_size"]
    if pool > MOST:
        raise ValueError(f"engine.kv_memory_mib: a pool of {pool} tokens is too large to be filled; at most {MOST} for arrangements tiers")
    loads, block_bytes, write = list[tuple[float, float]](), 0.0, 0.0
    for number in range(rounds):
        prompts = [asker.prompt(length) for length in LENGTHS]
        for prompt in (*prompts, *(asker.prompt(OTHERS) for _ in range(math.ceil(PUSHED * pool / OTHERS)))):
            await asker.ask(prompt, 1)
        if number == 0:
            block_bytes, write = await _written(served, room)
        for prompt in prompts:
            first, second = await asker.ask_alone(prompt, 1), await asker.ask_alone(prompt, 1)
            cached = [heard.result.usage.cached_tokens for heard in (first, second)]
            if cached[0] == cached[1] > 0:  # else a part was computed
                loads.append((cached[0] // block * block_bytes, first.times[0] - second.times[0]))
    return HeardTier(block_bytes, loads, write)


async def _written(served: Processes, room: float) -> tuple[float, float]:
    """The bytes of a block, and processor seconds of writing a byte, before anything is read."""
    await asyncio.sleep(TOLD_S)
    tier = await asyncio.to_thread(_tier, served.admin)
    size = room / tier.capacity
    return size, tier.spent_s / (tier.blocks * size) if tier.blocks else 0.0


def _tier(admin: str) -> worker_pb2.Tier:
    tier: worker_pb2.Tier = status(admin).workers[0].record.tiers[0]
    return tier
