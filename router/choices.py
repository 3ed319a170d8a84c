"""Several choices for one prompt: what tells them apart, and what they share."""

from dataclasses import replace
from typing import Any

from baton.engine.core.sampling import SamplingParams
from router.family import Family
from router.request import Request, Stopwatch, Trace

SEEDS = 1 << 64


def seeded(params: SamplingParams, choice: int) -> SamplingParams:
    """Choice i has the seed plus i, so it is the answer that a request of its own would get with that seed."""
    return replace(params, seed=(params.seed + choice) % SEEDS)


def siblings(first: Request, request_id: str, count: int) -> list[Request]:
    """The other choices of a request whose first choice is `first`, if it has `count` of them."""
    if count == 1:
        return []
    requests = [first]
    for choice in range(1, count):
        trace = Trace(Stopwatch(first.trace.watch.clock))
        trace.follow(first.trace)
        request = replace(
            first,
            id=f"{request_id}-{choice}",
            tokens=list(first.tokens),
            params=replace(seeded(first.params, choice), prompt_logprobs=None),  # the first tells them for all
            keys=list(first.keys),
            trace=trace,
            choice=choice,
        )
        requests.append(request)
    family: Family[Request, Any] = Family(requests)
    for request in requests:
        request.family = family
    return requests[1:]
