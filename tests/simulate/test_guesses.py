"""Guesses in simulated engines: as often right as the chances say, worth what arithmetic says, and given up where they are wrong."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.config_router import RouterConfig
from baton.engine.core.engine import Engine
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import NONE, Speculation
from baton.engine.core.step_costs import Upkeep
from baton.plan.formulae import tokens_per_step
from baton.profile.models import NUMBERS, Work
from baton.simulate import guesses
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.engine import ModelledRunner, StepPace
from baton.simulate.guesses import Guess, GuessChances, GuessedText, StepPrices, drafter_of, looked_up
from baton.simulate.virtual_time import run
from baton.simulate.workers import Times

Pace = Callable[[Work], float]
CHEAP = GuessChances(1.0, 0.0, 0.7, 0.9)


def guess_free(work: Work) -> float:
    """As where reading the weights takes all the time."""
    return 0.01


def guess_dear(work: Work) -> float:
    """As where computing does: a guess takes as long as a step of its own."""
    return 0.01 * (work.decodes + work.guesses)


def steps(
    pace: Pace, chances: GuessChances | None, bound: int = 4, batch: int = 1, output: int = 200,
    known: Mapping[str, float] | None = None, **params: object,
) -> tuple[int, float]:  # fmt: skip
    """How many steps answers take together after their first tokens, and seconds."""
    runner = ModelledRunner(pace, 4096, 16, 1 << 14)
    drafter = None if chances is None else drafter_of("draft", bound, chances, pace, known)
    engine = Engine(runner, Limits(batch, 512), 1 << 14, drafter=drafter)
    for number in range(batch):
        asked = SamplingParams(max_tokens=output, temperature=0.0, **params)  # type: ignore[arg-type]
        engine.add(Sequence(f"s{number}", [number, *range(40)], 41, asked, b""))
    count, seconds, ended = 0, 0.0, list[list[int]]()
    while not engine.idle:
        for told in engine.step():
            if told.finish is not None:
                ended.append(told.seq.tokens[41:])
        count, seconds = count + 1, seconds + runner.step_s
    assert ended == [[*range(41, 41 + output)]] * batch, "no guess changes a token"
    assert engine.drafter.remembered == 0
    return count - 1, seconds


def test_right_guesses_save_the_steps_that_arithmetic_says() -> None:
    assert steps(guess_free, None)[0] == 199
    assert steps(guess_free, GuessChances(1.0, 0.0, 1.0, 1.0), bound=4)[0] == 40, "199 tokens, five a step"
    assert steps(guess_free, GuessChances(1.0, 0.0, 1.0, 1.0), bound=1)[0] == 100
    independent = steps(guess_free, GuessChances(1.0, 0.0, 0.6, 0.6), bound=4, output=4000)[0]
    assert independent == pytest.approx(3999 / tokens_per_step(0.6, 4), rel=0.05)


def test_wrong_guesses_are_given_up_and_cost_next_to_nothing() -> None:
    alone = steps(guess_dear, None, output=2000)[1]
    assert steps(guess_dear, GuessChances(1.0, 0.0, 0.0, 0.0), output=2000)[1] < 1.03 * alone
    assert steps(StepPace(), GuessChances(1.0, 0.0, 0.0, 0.0), output=2000)[1] < 1.03 * steps(StepPace(), None, output=2000)[1]


def test_without_the_decision_wrong_guesses_cost_all_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(guesses, "Paced", lambda drafter, bound, step, upkeep: drafter)
    monkeypatch.setattr(guesses.ModelledDrafter, "bound", 4)
    assert steps(guess_dear, GuessChances(1.0, 0.0, 0.0, 0.0))[1] > 4.5 * steps(guess_dear, None)[1]


def test_guesses_that_are_dear_are_few_where_the_batch_is_large() -> None:
    def roof(work: Work) -> float:
        return 0.01 + max(0.0, (work.decodes + work.guesses - 16) * 0.001)

    gain = {batch: steps(roof, None, batch=batch)[1] / steps(roof, CHEAP, batch=batch)[1] for batch in (1, 8, 64)}
    assert gain[1] > gain[8] > gain[64] > 0.99 and gain[1] > 2


def test_a_request_that_wants_no_guesses_gets_none_and_a_limit_holds() -> None:
    sure = GuessChances(1.0, 0.0, 1.0, 1.0)
    assert steps(guess_free, sure, speculation=Speculation(NONE))[0] == 199
    assert steps(guess_free, sure, speculation=Speculation(max_tokens=2))[0] == 67


def test_a_text_is_guessed_as_often_right_as_its_chances_say() -> None:
    chances = GuessChances(0.4, 0.0, 0.5, 0.8)
    found = GuessedText([1, 2, 3], chances).at(3, 40_000)
    after_right = [here for before, here in pairwise(found) if before is Guess.RIGHT]
    after_other = [here for before, here in pairwise(found) if before is not Guess.RIGHT]
    assert after_right.count(Guess.RIGHT) / len(after_right) == pytest.approx(0.8, abs=0.02) and Guess.NONE not in after_right
    assert after_other.count(Guess.NONE) / len(after_other) == pytest.approx(0.6, abs=0.02)
    assert after_other.count(Guess.RIGHT) / len(after_other) == pytest.approx(0.4 * 0.5, abs=0.02)


def test_answers_become_more_as_the_output_grows() -> None:
    found = [GuessedText([number], GuessChances(0.6, 50.0, 0.0, 0.0)).at(1, 400) for number in range(200)]
    share = {n: sum(text[n] is not Guess.NONE for text in found) / len(found) for n in (1, 50, 350)}
    near = [sum(each is not Guess.NONE for text in found for each in text[n - 10 : n + 10]) / (20 * len(found)) for n in (50, 350)]
    assert share[1] < 0.1 and near == pytest.approx([0.3, 0.6 * 350 / 400], abs=0.03)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=30), st.integers(0, 5))
def test_what_is_right_is_the_same_however_it_is_asked_for(asks: list[tuple[int, int]], number: int) -> None:
    chances = GuessChances(0.6, 0.0, 0.5, 0.7)
    whole = GuessedText([number, 9], chances).at(2, 250)
    text, place = GuessedText(array("q", [number, 9]), chances), 2
    for step, count in asks:
        assert text.at(place, count) == whole[place - 2 : place - 2 + count]
        place += step
    assert GuessedText([number, 10], chances).at(2, 250) != whole, "another prompt has another answer"


def test_what_is_known_of_steps_is_what_they_take() -> None:
    def pace(work: Work) -> float:
        rows = 0.0005 * work.decodes + 0.0002 * work.guesses + 0.0001 * work.drafts
        return 0.002 + rows + 1e-6 * work.context + 5e-7 * work.guess_context

    prices = StepPrices.of(pace)
    assert prices.upkeep == pytest.approx(Upkeep(0.0003, 1e-6, 0.0, 5e-7))
    assert [prices.drafts.at(count) for count in (1, 8)] == [pytest.approx((0.0, 0.0001 / count)) for count in (1, 8)]
    for batch, guesses_ in ((1, 0), (3, 5), (8, 64)):
        known = prices.step.at(batch + guesses_) + prices.upkeep.sequence * batch
        assert known == pytest.approx(pace(Work(decodes=batch, guesses=guesses_)))


KNOWN = {"rows_1": 0.01, "rows_8": 0.011, "sequence": 1e-3, "token": 1e-6, "draft_1": 0.002, "draft_8": 0.004, "drafts_1": 0.005}
KNOWN = {**dict.fromkeys(NUMBERS["known"], 0.0), **KNOWN, "drafts_8": 0.013}


def test_an_engine_decides_by_what_it_has_measured_whatever_steps_take() -> None:
    prices = StepPrices.known(KNOWN, 8)
    assert prices.step.points == ((1, 0.01), (8, 0.011)) and prices.upkeep == Upkeep(1e-3, 1e-6, 0.0, 0.0)
    assert prices.drafts.at(1) == pytest.approx((0.001, 0.001)) and prices.drafts.at(8) == pytest.approx((0.000125, 0.000375))
    with pytest.raises(ValueError, match=r"models.known: two of rows_1"):
        StepPrices.known({**KNOWN, "rows_8": 0.0}, 8)
    sure, dear = GuessChances(1.0, 0.0, 1.0, 1.0), {**KNOWN, "rows_8": 0.2}
    assert steps(guess_free, sure, known=dear)[0] > 150 and steps(guess_free, sure)[0] == 40, "it believes that they are dear"
    assert steps(guess_dear, sure, known=KNOWN)[0] == 40 and steps(guess_dear, sure)[0] > 150, "or that they cost nothing"


@pytest.mark.parametrize("name", ["answers", "first", "further"])
def test_what_is_no_chance_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 1.5 is no chance"):
        GuessChances(**{name: 1.5})
    with pytest.raises(ValueError, match=r"half: -1\.0 is no number of tokens"):
        GuessChances(half=-1.0)


def test_what_is_looked_up_is_known_from_the_text() -> None:
    """After 4 5 there came 6, which is right; 4 5 6 → 7 is wrong; after 9 nothing is known."""
    found = looked_up([1, 4, 5, 6, 7], [8, 4, 5, 6, 9, 9])
    assert found == [Guess.NONE, Guess.NONE, Guess.RIGHT, Guess.WRONG, Guess.NONE]


GUESSING = Sizes(0, 1, speculation="prompt_lookup", speculation_tokens=4)
TIMES = Times(StepPace(), guesses=GuessChances(1.0, 0.0, 1.0, 1.0))


def answered(sizes: Sizes, times: Times, level: int = 0) -> tuple[float, int]:
    """Seconds of an answer of 101 tokens, and of how many messages. `level`: of overload, that is in force."""

    async def main() -> tuple[float, int]:
        cluster, messages = SimulatedCluster(sizes, times, RouterConfig(degrade=("speculation",))), list[int]()
        cluster.routers[0].journal.degradation.level = level
        async with cluster.watched():
            request = await cluster.ask([*range(50)], 101, told=lambda count, _: messages.append(count))
        assert request.tokens[50:] == [*range(50, 151)] and sum(messages) == 101
        assert cluster.records[0].speculation == ((sizes.speculation,) if sizes.speculation != NONE else ())
        return sum(lap.end - lap.start for lap in request.trace.watch.laps), len(messages)

    return run(main())


def test_a_step_with_right_guesses_brings_several_tokens_at_once() -> None:
    plain, guessed = answered(replace(GUESSING, speculation=NONE), TIMES), answered(GUESSING, TIMES)
    assert plain[1] == 101 and guessed[1] == 21 and guessed[0] < plain[0] / 4
    assert guessed == answered(GUESSING, TIMES), "bit for bit"


def test_under_overload_nothing_is_guessed() -> None:
    assert answered(GUESSING, TIMES, level=1) == answered(replace(GUESSING, speculation=NONE), TIMES)
    assert answered(GUESSING, TIMES, level=0) != answered(GUESSING, TIMES, level=1), "negative control"


def test_a_method_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(ValueError, match="speculation: prompt_lookup: nothing says how often"):
        answered(GUESSING, Times())
