"""The contract of all engines, of the modelled one, in virtual time. Where steps are jumped over it tells later, and all else is the same
(tests/simulate/test_jumps.py)."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from engine_bench import BLOCK, CHUNK, MAX_LEN, MAX_QUEUE, Bench, Capability
from engine_contract import *  # noqa: F403

from baton.engine.core.block_key import HOST
from baton.engine.core.contract import EngineStopped
from baton.engine.core.drafting import Drafter
from baton.engine.core.limits import Limits
from baton.profile.models import Work
from baton.simulate.cores import OwnCores
from baton.simulate.engine import ModelledEngine, ModelledRunner, StepPace
from baton.simulate.guesses import GuessChances, drafter_of
from baton.simulate.tiers import ModelledTiers, TierPace, TierSizes

LACKS: dict[Capability, str] = {
    "grammars": "nothing is drawn: a modelled token is its position",
    "kv": "no step writes into its blocks, so that no token depends on them",
    "logits": "there is no model",
}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.virtual_time]


def started(pace: Callable[[Work], float], drafter: Drafter | None = None, blocks: int = 0) -> Bench:
    """`blocks`: that a tier of it has room for."""
    made = Bench(separates_output=True, lacks=LACKS)
    limits = Limits(4, CHUNK, max_queue=MAX_QUEUE)
    engine = ModelledEngine(ModelledRunner(pace, 256, BLOCK, MAX_LEN), limits, made.listener, drafter=drafter)
    if blocks:
        engine.attach(ModelledTiers(TierSizes(((HOST, blocks),), 1000), {HOST: TierPace(0.001, 1e-6, 1e-6)}, OwnCores()))
    engine.start()
    made.engine = engine
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["plain", "guessing", "tier"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    pace = StepPace()
    drafter = drafter_of("draft", 4, GuessChances(0.8, 0.0, 0.6, 0.8), pace) if request.param == "guessing" else None
    made = started(pace, drafter, 500 if request.param == "tier" else 0)
    yield made
    await made.close()


async def test_the_step_in_flight_ends_before_the_engine_closes() -> None:
    made = started(lambda work: 1.0)
    seq = made.seq([1])
    await made.engine.add(seq)
    await asyncio.sleep(0.5)
    assert not made.outputs
    await made.engine.close()
    assert len(made.tokens(seq)) == 1


async def test_a_step_that_fails_is_told_once_and_is_the_last() -> None:
    def broken(work: Work) -> float:
        raise ZeroDivisionError

    made = started(broken)
    await made.engine.add(made.seq([1]))
    await made.until(lambda: made.failures)
    with pytest.raises(EngineStopped):
        await made.engine.add(made.seq([1]))
    assert [type(error) for error in made.failures] == [ZeroDivisionError]
