"""The lives of a link to a NIXL agent and of a read over it. Needs no NIXL."""

from collections.abc import Callable

import pytest

from baton.engine.core.kvcache import Region
from baton.moves import IllegalMove
from kvtransfer.nixl_link import MOVES, OPEN, READS, Link, LinkState, NixlAddress, Read, ReadState

EVENTS: dict[str, Callable[[Link], None]] = {
    "copies": lambda link: link.open(True, "blocks"),
    "sends": lambda link: link.open(False, "blocks"),
    "break": lambda link: link.break_("cut"),
    "drop": lambda link: link.drop("disconnected"),
    "free": lambda link: link.free(),
}


def link_in(state: LinkState) -> Link:
    return Link("d0:1", NixlAddress(Region(0, 1), 64, b""), state, blocks="blocks" if state in OPEN else None)


@pytest.mark.parametrize("state", LinkState)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_of_a_link_in_every_state(state: LinkState, event: str) -> None:
    link = link_in(state)
    before = link.usable, link.blocks, link.why
    if target := MOVES.get((state, event)):
        EVENTS[event](link)
        assert link.state is target and link.usable is (event in ("copies", "sends"))
        assert bool(link.why) is (event in ("break", "drop"))
    else:
        with pytest.raises(IllegalMove, match=f"^the link to d0:1 is {state.value}: '{event}' is not possible$"):
            EVENTS[event](link)
        assert (link.usable, link.blocks, link.why) == before and link.state is state, "nothing was changed"


def test_the_first_reason_stays() -> None:
    link = link_in(LinkState.OPENING)
    link.break_("the peer died")
    link.break_("cut")
    link.drop("connected anew")
    assert link.why == "the peer died" and not link.usable


@pytest.mark.parametrize("state", ReadState)
@pytest.mark.parametrize("event", ["give up", "lose sight", "settle"])
def test_every_event_of_a_read_in_every_state(state: ReadState, event: str) -> None:
    read = Read(link_in(LinkState.COPIED), object(), state)
    if target := READS.get((state, event)):
        read.move(event)
        assert read.state is target
    else:
        with pytest.raises(IllegalMove, match=f"^a read from d0:1 is {state.value}: '{event}' is not possible$"):
            read.move(event)
        assert read.state is state
