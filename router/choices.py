"""Several choices for one prompt: what tells them apart, and what they share."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from baton.engine.core.sampling import SamplingParams
from router.family import Family
from router.request import Request, Stopwatch, Trace
from router.turnstile import Turnstile

SEEDS = 1 << 64
A_CHOICE = 2048  # tokens whose copy takes as long as the rest of a choice
COPIED_A_TURN = 1 << 19  # tokens; about 4 ms
T = TypeVar("T")


def seeded(params: SamplingParams, choice: int) -> SamplingParams:
    """Choice i has the seed plus i, so it is the answer that a request of its own would get with that seed."""
    return replace(params, seed=(params.seed + choice) % SEEDS)


def sibling(first: Request, request_id: str, choice: int) -> Request:
    """Another choice of the request whose first choice is `first`. It copies the prompt."""
    trace = Trace(Stopwatch(first.trace.watch.clock))
    trace.follow(first.trace)
    return replace(
        first,
        id=f"{request_id}-{choice}",
        tokens=list(first.tokens),
        params=replace(seeded(first.params, choice), prompt_logprobs=None),  # the first tells them for all
        keys=list(first.keys),
        trace=trace,
        choice=choice,
    )


def relate(requests: Sequence[Request]) -> None:
    """Makes all choices of a request, in their order, a family."""
    family: Family[Request, Any] = Family(requests)
    for request in requests:
        request.family = family


async def siblings(
    first: Request, request_id: str, count: int, text: Callable[[Request], T], turns: Turnstile
) -> tuple[tuple[Request, T], ...]:
    """The other choices of a request that has `count` of them, each with its `text`. They are made over turns of the event loop: a hundred
    copies of a long prompt take longer than others should wait."""
    if count == 1:
        return ()
    size, made = A_CHOICE + len(first.tokens) + len(first.params.speculation.prediction), list[tuple[Request, T]]()
    for choice in range(1, count):
        await turns.enter(size)
        made.append((request := sibling(first, request_id, choice), text(request)))
    relate([first, *(request for request, _ in made)])
    return tuple(made)
