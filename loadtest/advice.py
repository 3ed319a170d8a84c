"""What to do for a verdict where a campaign gave none, computed from what its runs showed. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence

from loadtest.compare import ATTAINMENT
from loadtest.distribution import percentile
from loadtest.latency import itl, tpot, ttft
from loadtest.lengths import ENOUGH
from loadtest.results import Best, Point, Results
from loadtest.slo import Slo, rounded_up
from loadtest.words import percent

ENOUGH_SEEDS = "1,2,3,4,5,6"
MARGIN = 1.2  # of a proposed objective over the latency that was seen


def advice(results: Results, bests: Mapping[str, Best], spread: bool, wide: Sequence[int] = ()) -> list[str]:
    """Sentences, the most useful first. `spread`: every comparison has one. `wide`: how many seeds would narrow each that is too wide."""
    seeds = [] if spread else [*_too_few_seeds(results)]
    if wide and not seeds:
        listed = ",".join(map(str, range(1, max(wide) + 2)))
        seeds = [f"more seeds: as far as the runs vary now, {max(wide)} seeds that judge would show such a difference: --seeds {listed}."]
    said = [*_late(results), *_too_fast(results, bests), *_too_short(results), *seeds]
    return [f"To do: {sentence}" for sentence in said or _again(results)]


def _late(results: Results) -> Iterator[str]:
    """The generator was late: it needs processor time, or objectives beside which its lag is small."""
    late = [run for run in results.runs if run.summary.late]
    if not late:
        return
    worst = max(value for run in late if (value := run.summary.lag_ms.p99) is not None)
    fewest = min(record.asked_tokens for run in late for record in run.probe.records)
    yield (
        f"in {len(late)} of {len(results.runs)} runs the generator was late, by up to {worst:.3g} ms at P99: close what else runs on this "
        f"machine, or allow for that delay: --slo {results.campaign.slo.allowing(worst / 1000, fewest)}."
    )


def _too_fast(results: Results, bests: Mapping[str, Best]) -> Iterator[str]:
    """No rate held: lower rates help if the requests waited for each other; if even a lone request misses, only other objectives do."""
    beaten = [arm for arm, found in bests.items() if found.rate is None and not found.unjudged]
    if not beaten or any(found.rate is not None for found in bests.values()):
        return
    lowest = [results.points(arm)[0] for arm in beaten]
    rate = min(point.rate for point in lowest)
    if any(arm.topology for arm in results.campaign.arms):
        yield f"lower rates: --rates {','.join(f'{rate / part:.2g}' for part in (8, 4, 2))}."
    else:  # `run` has one
        yield f"a lower rate: --rate {rate / 2:.2g}."
    objectives = _attained(results, max(lowest, key=lambda point: point.attainment))
    if objectives is not None:
        yield f"or looser objectives: {percent(ATTAINMENT)} of the requests at {rate:.3g}/s met --slo {objectives}."


def _attained(results: Results, point: Point) -> Slo | None:
    """The objectives that the share ATTAINMENT of the point's requests met, each with a margin. None: too few were answered."""
    answered = [record for record in results.records(point) if record.outcome == "ok"]
    if len(answered) < ATTAINMENT * point.requests:
        return None
    seen = {
        "ttft": [value for record in answered if (value := ttft(record)) is not None],
        "tpot": [value for record in answered if (value := tpot(record)) is not None],
        "itl_p99": [value for record in answered if (value := percentile(itl(record), 99)) is not None],
    }
    limits = {}
    for name, limit in results.campaign.slo.limits.items():
        high = percentile(seen[name], 100 * ATTAINMENT)
        limits[f"{name}_s"] = limit if high is None else max(limit, rounded_up(MARGIN * high))
    return Slo(**limits)


def _too_short(results: Results) -> Iterator[str]:
    few = [run for run in results.runs if not run.summary.late and not run.probe.partial and run.summary.requests < ENOUGH]
    if few:
        least = min(run.summary.requests for run in few)
        slowest = min(run.probe.rate for run in few)
        around = results.campaign.warm_up_s + results.campaign.cool_down_s
        yield (
            f"longer runs: {len(few)} runs judge fewer than {ENOUGH} requests, one of them {least}: "
            f"--duration {math.ceil(ENOUGH * 1.5 / slowest + around)}."
        )


def _too_few_seeds(results: Results) -> Iterator[str]:
    sound = [len({run.probe.seed for run in results.sound(arm)}) for arm in results.arms]
    yield f"more seeds: runs that count have {min(sound, default=0)}, and a spread needs at least two that judge: --seeds {ENOUGH_SEEDS}."


def _again(results: Results) -> Iterator[str]:
    early = sum(bool(run.probe.partial) for run in results.runs)
    if early:
        yield f"measure again: {early} of {len(results.runs)} runs ended early, and the report says why."
    else:
        yield "measure again with more seeds or longer runs (--seeds, --duration)."
