"""The requests of a run, and what its records say at the end. The same settings are always the same requests."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton.cockpit.experiments import STEPS, Experiment
from baton.cockpit.knobs import Settings
from loadtest.arrivals import Poisson
from loadtest.distribution import percentile
from loadtest.latency import tpot, ttft
from loadtest.plan import FIRST_ID
from loadtest.record import Record
from loadtest.slo import Slo
from loadtest.window import Window, attainment, goodput
from loadtest.workload import Item, Vocabulary

VOCAB = 256  # every model has so many ids
HOLDS = 0.9  # share of the requests that meets the objectives before the breaking point


@dataclass(frozen=True, slots=True)
class ExperimentLoad:
    """`items` are due at `times`, seconds from the start."""

    items: Sequence[Item]
    times: Sequence[float]
    slo: Slo

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max((len(item.tokens) + item.output_tokens for item in self.items), default=0)


def load_of(experiment: Experiment, settings: Settings, seed: int = 1, shares: bool = True) -> ExperimentLoad:
    """`shares`: the common part of the prompts is the same tokens; otherwise each request has its own."""
    times = [*_times(settings, random.Random(f"{seed} arrivals"), experiment.ramp)]
    lengths, tokens = random.Random(f"{seed} lengths"), random.Random(f"{seed} tokens")
    vocabulary = Vocabulary(FIRST_ID, VOCAB)
    common = vocabulary.draw(random.Random(f"{seed} common"), int(settings.prompt * settings.shared)) if shares else ()
    items = []
    for _ in times:
        prompt, output = (_around(count, settings.spread, lengths) for count in (settings.prompt, settings.output))
        begins = common[: prompt - 1]
        items.append(Item((*begins, *vocabulary.draw(tokens, prompt - len(begins))), output))
    return ExperimentLoad(items, times, Slo(settings.ttft_ms / 1000, settings.tpot_ms / 1000))


def rate_at(experiment: Experiment, settings: Settings, at: float) -> float:
    """Requests per second that are offered at a moment of the run."""
    if not experiment.ramp:
        return settings.rate
    return settings.rate * (min(STEPS - 1, int(at * STEPS / settings.duration_s)) + 1) / STEPS


def _times(settings: Settings, rng: random.Random, ramp: bool) -> Iterator[float]:
    steps = STEPS if ramp else 1
    length = settings.duration_s / steps
    for step in range(steps):
        for at in Poisson(settings.rate * (step + 1) / steps).times(rng):
            if at >= length:
                break
            yield step * length + at


def _around(count: int, spread: float, rng: random.Random) -> int:
    """A number of tokens, evenly from `count` less a share of it to `count` and that share more."""
    return max(1, round(count * (1 + spread * rng.uniform(-1, 1))))


def figures(experiment: Experiment, settings: Settings, load: ExperimentLoad, records: Sequence[Record], until_s: float) -> dict[str, Any]:
    """What is kept of a run for comparison. Times are in seconds; None: there is none. `until_s`: how long requests became due."""
    window = Window(max(until_s, 1e-3))
    done = [record for record in window.select(records) if record.outcome == "ok"]
    firsts, gaps = ([each for record in done if (each := of(record)) is not None] for of in (ttft, tpot))
    prompt = sum(record.prompt_tokens for record in done)
    outcomes: dict[str, int] = {}
    for record in records:
        what = record.outcome if record.outcome == "ok" else f"{record.outcome}: {record.reason}"
        outcomes[what] = outcomes.get(what, 0) + 1
    last = max((record.ended for record in records), default=until_s)
    return {
        "requests": len(records),
        "completed": len(done),
        "outcomes": outcomes,
        "ttft_p50": percentile(firsts, 50), "ttft_p95": percentile(firsts, 95),
        "tpot_p50": percentile(gaps, 50), "tpot_p95": percentile(gaps, 95),
        "tokens_per_s": sum(record.output_tokens for record in records) / max(last, 1e-3),
        "goodput": goodput(records, window, load.slo),
        "attainment": attainment(records, window, load.slo),
        "cached": sum(record.cached_tokens for record in done) / prompt if prompt else None,
        **({"breaks": breaking(settings, load, records)} if experiment.ramp else {}),
    }  # fmt: skip


def breaking(settings: Settings, load: ExperimentLoad, records: Sequence[Record]) -> dict[str, Any]:
    """The last rate that held, and the first that did not, in requests per second; None: there was none."""
    length = settings.duration_s / STEPS
    held: float | None = None
    for step in range(STEPS):
        window = Window(settings.duration_s, step * length, max(0.0, settings.duration_s - (step + 1) * length))
        share = attainment(records, window, load.slo)
        rate = settings.rate * (step + 1) / STEPS
        if share is not None and share < HOLDS:
            return {"held": held, "broke": rate}
        held = held if share is None else rate
    return {"held": held, "broke": None}
