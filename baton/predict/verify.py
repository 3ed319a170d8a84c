"""A planned configuration in the simulator: whether it holds what formulae say that it holds, and what it takes if it does not."""

from dataclasses import dataclass, replace

from baton.cluster.config_router import RouterConfig, SloConfig
from baton.plan.pools import CHUNK, MOST_SEQUENCES, PlannedPool, Question, kv_blocks
from baton.plan.search import Configuration, Search
from baton.plan.sheet import profile_of
from baton.plan.traffic import BLOCK
from baton.plan.values import routers_of
from baton.predict.predict import Offer, Prediction, doubts, predict
from baton.predict.setting import ClusterSetting
from baton.profile.file import Profile
from baton.simulate.cluster import Sizes
from loadtest.slo import Slo
from loadtest.summary import Summary

TRIES = 3  # times that a configuration gets another worker where it does not hold


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """`made` is what was simulated last. `added`: workers that the estimate had too few."""

    made: Configuration
    told: Prediction
    holds: bool
    added: int


def verify(one: Configuration, search: Search, offer: Offer, slo: Slo, draws: int) -> PlanVerdict:
    """Adds a worker where requests miss their objective, as long as there are GPUs; then `draws` runs more, for the intervals."""
    asked = search.asked
    for added in range(TRIES + 1):
        told = _predicted(one, asked, offer, slo, 0)
        held = (told.summary.attainment or 0.0) >= asked.attainment
        more = None if held or added == TRIES else search.with_more(one, prefill=_late_first(told.summary))
        if more is None:
            break
        one = more
    return PlanVerdict(one, _predicted(one, asked, offer, slo, draws) if draws else told, held, added)


def _late_first(summary: Summary) -> bool:
    """Whether more requests miss the first token's objective than another."""
    first = sum(count for miss, count in summary.misses.items() if miss.what == "ttft")
    return 2 * first > sum(summary.misses.values())


def _predicted(one: Configuration, asked: Question, offer: Offer, slo: Slo, draws: int) -> Prediction:
    setting, (profile, decode) = _setting(one, asked, offer)
    told = predict(setting, profile, offer, slo, draws, large=True, decode=decode)
    return replace(told, doubts=tuple(dict.fromkeys((*told.doubts, *doubts(setting, decode, offer)))))


def _setting(one: Configuration, asked: Question, offer: Offer) -> tuple[ClusterSetting, tuple[Profile, Profile]]:
    """A pipeline counts as a worker for each stage, as in `baton.plan.pools`."""
    first, decode = one.prefill or one.decode, one.decode
    longest = max((len(item.tokens) + item.output_tokens for item in offer.items), default=1)
    sizes = Sizes(
        prefill=0 if one.prefill is None else first.workers * first.kind.stages,
        decode=decode.workers * decode.kind.stages,
        max_num_seqs=MOST_SEQUENCES,
        kv_blocks=kv_blocks(first.kind, asked.shape, BLOCK),
        decode_kv_blocks=kv_blocks(decode.kind, asked.shape, BLOCK),
        max_num_batched_tokens=CHUNK,
        block_size=BLOCK,
        max_model_len=longest + BLOCK,
    )
    objectives = SloConfig(ttft_s=asked.ttft_s, tpot_s=asked.tpot_s)
    setting = ClusterSetting(sizes, RouterConfig(), objectives, routers_of(asked.traffic), unknown=_unknown(one))
    return setting, (_profile(first, asked, CHUNK), _profile(decode, asked, max(1, round(decode.batch))))


def _unknown(one: Configuration) -> tuple[str, ...]:
    if all(pool.kind.stages == 1 for pool in one.pools):
        return ()
    return ("pipelines: each stage is simulated as a worker, and no stage waits for another",)


def _profile(pool: PlannedPool, asked: Question, batch: int) -> Profile:
    kind = pool.kind
    roomy = replace(kind.device, memory=kind.device.memory * kind.stages)  # a stage has a part of the weights
    return profile_of(
        asked.shape, roomy, asked.reached, devices=kind.tensor, weight_bits=kind.weight_bits, kv_bits=kind.kv_bits,
        link_bytes_per_s=asked.link_bytes_per_s, batch=batch,
    )  # fmt: skip
