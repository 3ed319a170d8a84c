"""The life of a decode call: it is withdrawn unless the engine has told everything and no byte can land in its blocks."""

import asyncio
from typing import Any, cast

import pytest

from baton.engine.core.block_key import root_key
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.moves import IllegalMove
from decode_worker.call import MOVES, CallState, DecodeCall


def call_in(state: CallState) -> DecodeCall:
    seq = Sequence("r#d", [1, 2, 3], 3, SamplingParams(max_tokens=1, temperature=0.0, seed=0), root_key("toy"))
    return DecodeCall(seq, "r", None, lambda event: None, state=state)


def apply(call: DecodeCall, event: str) -> None:
    match event:
        case "fetch":
            call.begin(cast(Any, object()))
        case "verify":
            call.verified()
        case "end":
            call.end()
        case _:
            call.move(event)


@pytest.mark.parametrize("state", CallState)
@pytest.mark.parametrize("event", ["add", "fetch", "verify", "recompute", "settle", "end"])
async def test_every_event_in_every_state(state: CallState, event: str) -> None:
    call = call_in(state)
    over = call.is_over
    if target := MOVES.get((state, event)):
        apply(call, event)
        assert call.state is target and call.over.is_set() is (event == "end")
        assert call.is_over is (over or event == "end"), "what is over stays over, and only `end` ends it"
    else:
        with pytest.raises(IllegalMove, match=f"^call r is {state.value}: '{event}' is not possible$"):
            apply(call, event)
        assert call.state is state and call.fetch is None and not call.over.is_set(), "nothing was changed"


@pytest.mark.parametrize(
    "events", ["add end", "fetch verify end", "recompute settle end", "fetch recompute settle end", "fetch recompute end settle"]
)
async def test_the_ways_to_the_end(events: str) -> None:
    call = call_in(CallState.ARRIVED)
    for event in events.split():
        assert call.state is not CallState.ENDED, "until then it must be withdrawn"
        apply(call, event)
    assert call.state is CallState.ENDED
    await asyncio.wait_for(call.over.wait(), 1)
