"""What a comparison chooses where nobody said: objectives and rates from a short look, lengths and seeds from the time it may take."""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest import calibrate as calibration
from loadtest import plan, priority
from loadtest.access import DoorAccess
from loadtest.calibrate import Seen, calibrate
from loadtest.drive import Answer
from loadtest.hardware import Cores, default_cores
from loadtest.lengths import DRAIN_S, FEWEST_SEEDS, LONGEST_S, MOST_SEEDS, PILOT, SHORTEST_S, Lengths, choose
from loadtest.plan import ComparePlan, Workload

COMPARISON = ComparePlan(
    model="model", arms=("colocated",), hardware=Cores(default_cores()[:1], 1), ratio=(1, 1), chunk=64, rates=(), vary=("", ("",)),
    bisections=0,
)  # fmt: skip


class Server:
    """Answers with tokens 2 ms apart, of one request at a time."""

    def __init__(self, outcome: str = "ok") -> None:
        self._free, self.outcome, self.most, self.now = asyncio.Lock(), outcome, 0, 0

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: Callable[[int], None]) -> Answer:
        self.now += 1
        self.most = max(self.most, self.now)
        async with self._free:
            for _ in range(output_tokens):
                await asyncio.sleep(0.002)
                on_tokens(1)
        self.now -= 1
        return Answer(self.outcome, "" if self.outcome == "ok" else "SATURATED")  # type: ignore[arg-type]

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *_: object) -> None: ...


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], Any]:
    class Cluster:
        def __init__(self, *arguments: Any) -> None: ...

        async def __aenter__(self) -> dict[str, str]:
            return {"grpc": "127.0.0.1:1"}

        async def __aexit__(self, *arguments: Any) -> None: ...

    async def warm_up(*arguments: Any) -> None: ...

    def make(server: Server) -> Any:
        monkeypatch.setattr(plan, "RunningCluster", Cluster)
        monkeypatch.setattr(calibration, "warm_up", warm_up)
        monkeypatch.setattr(calibration, "BUSY_S", 0.3)
        monkeypatch.setattr(calibration, "RAMP_S", 0.05)
        monkeypatch.setattr(DoorAccess, "door", lambda *_: server)
        return calibrate(COMPARISON, Workload(input="8", output="4"), DoorAccess(), 5.0, lambda line: None)

    return make


async def test_a_look_proposes_objectives_and_rates_from_what_it_saw(served: Callable[[Server], Any]) -> None:
    server = Server()
    seen = await served(server)
    assert server.most == calibration.AT_ONCE and seen.arm == "colocated"
    assert seen.ttft_s >= 0.002 and seen.tpot_s >= 0.002 and 0 < seen.capacity <= 1 / 0.008
    assert seen.rates[0] < seen.rates[1] < seen.rates[2] == float(f"{seen.capacity:.2g}")
    assert seen.slo.limits["ttft"] >= 5 * seen.ttft_s and seen.slo.limits["tpot"] >= 3 * seen.tpot_s


async def test_a_look_at_a_server_that_refuses_says_so(served: Callable[[Server], Any]) -> None:
    with pytest.raises(ConnectionError, match="ended with refused: SATURATED"):
        await served(Server("refused"))


def test_proposals_are_short_to_type_and_leave_out_what_was_not_seen() -> None:
    seen = Seen("colocated", 0.1234, None, 3.14159, 4.0)
    assert str(seen.slo) == "ttft=620ms" and seen.rates == (0.79, 1.6, 3.1)
    assert str(Seen("colocated", 0.001, 0.0001, 99.0, 4.0).slo) == "ttft=100ms,tpot=10ms"


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=5), st.floats(1, 5000), st.integers(1, 12))
def test_what_is_chosen_fits_into_the_time_or_is_the_least(rates: list[float], seconds: float, clusters: int) -> None:
    seeds, found = choose(rates, seconds, clusters, 8.0, 5.0)
    assert FEWEST_SEEDS <= seeds <= MOST_SEEDS and all(SHORTEST_S <= found.of(rate) - 5.0 <= LONGEST_S for rate in rates)
    ordered = sorted(rates)
    once = sum(found.of(rate) + DRAIN_S for rate in [*ordered, ordered[len(ordered) // 2]]) + 8.0
    assert once * (seeds + PILOT) * clusters <= seconds * 1.001 or (seeds == FEWEST_SEEDS and found.factor == 0.5)


def test_a_length_that_was_given_is_kept() -> None:
    assert Lengths(5.0, None, 20.0).of(0.1) == Lengths(5.0, None, 20.0).of(100.0) == 20.0


def test_the_generator_is_preferred_during_a_run_and_only_then() -> None:
    """Without the privilege nothing changes, and clusters yield instead."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    may = priority.cluster_niceness() == 0
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    inside: list[int] = []
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    with priority.raised():
        inside += [os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, other.native_id or 0)]
    after = [os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, other.native_id or 0)]
    stop.set()
    other.join()
    assert inside == [min(before, priority.RAISED) if may else before] * 2 and after == [before] * 2


def test_clusters_yield_where_the_generator_may_not_be_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert priority.cluster_niceness() == priority.YIELDING
    with priority.raised():
        pass
