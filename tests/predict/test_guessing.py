"""Guesses in a profile: what was measured finds what made it, and a cluster that guesses is simulated by it, or said not to be."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from baton.answer import Result, Token, Usage
from baton.cluster.config import Config
from baton.engine.core.engine import Engine
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import NONE, Speculation
from baton.predict.asker import Heard
from baton.predict.guessing import assumed
from baton.predict.measure_guesses import (
    GuessAmount,
    GuessedStep,
    HeardGuesses,
    chances_of,
    count_steps,
    count_text,
    guess_models,
    known_of,
    measure_guesses,
    steps_of,
    without_guesses,
)
from baton.predict.predict import Offer, Prediction, doubts, predict, run
from baton.predict.report import offer_of
from baton.predict.setting import setting_of
from baton.profile.file import Profile
from baton.profile.models import NUMBERS, Fitted, Work, step_seconds
from baton.simulate.engine import ModelledRunner
from baton.simulate.guesses import Guess, GuessChances, GuessedText, drafter_of
from baton.simulate.workers import Times
from loadtest.plan import Workload
from loadtest.slo import Slo
from loadtest.window import Window

STEP = {"step": 2e-3, "read": 0.0, "tokens": 5e-5, "pairs": 1e-8, "decodes": 3e-4, "context": 1e-7, "mixed": 0.0}
PLANTED = {"guess": 1.5e-4, "guess_context": 5e-8, "draft": 1e-4}
CHANCES = {"answers": 0.4, "half": 10.0, "first": 0.5, "further": 0.9}
PROFILE = Profile(
    "measured", "a processor", "m", {"kv_blocks": 512, "speculation": "prompt_lookup"}, 6144.0, "sum",
    {"step": Fitted({**STEP, **PLANTED}), "guesses": Fitted(CHANCES, source="3 answers")}, {"guesses a step": (1.0, 8.0)},
)  # fmt: skip
SLO = Slo.parse("ttft=60ms,tpot=10ms")


class SimulatedAsker:
    """A `baton.predict.asker.Asker` of an engine that takes what a profile says, and guesses right as often as its chances say. Those
    `n` answers that are asked for together run in one batch."""

    def __init__(self, pace: Callable[[Work], float], chances: GuessChances, bound: int = 8) -> None:
        self._pace, self._chances, self._bound = pace, chances, bound
        self._rng = random.Random(2)
        self.spent = 0.0

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(10, 256) for _ in range(tokens)]

    async def ask(self, prompt: Seq[int], tokens: int, n: int = 1, prediction: object = None, **how: Any) -> Heard:
        chances, pace = self._chances, self._pace
        if prediction:  # what the client says is right, and takes nobody's time
            chances, pace = GuessChances(1.0, 0.0, 1.0, 1.0), lambda work: self._pace(work._replace(drafts=0))
        runner = ModelledRunner(pace, 4096, 16, 1 << 14)
        engine = Engine(runner, Limits(), 1 << 14, drafter=drafter_of("draft", self._bound, chances, pace))
        params = SamplingParams(max_tokens=tokens, temperature=0.0, speculation=Speculation(**how.get("speculation", {})))
        for choice in range(n):
            engine.add(Sequence(str(choice), list(prompt), len(prompt), params, b""))
        told = list[Token]()
        while not engine.idle:
            for output in engine.step():
                if output.sampled is not None:
                    token, choice = output.sampled.token, int(output.seq.id)
                    told.append(Token(len(told), token, "", guessed=output.guessed, rejected=output.rejected, choice=choice))
            self.spent += runner.step_s
        ids = tuple(token.id for token in told if not token.choice)
        return Heard([], told, Result("", "", ids, "length", None, Usage(len(prompt), tokens, 0), {}, {}, {}))


def pace(work: Work) -> float:
    return step_seconds(PROFILE.values("step"), "sum", work)


async def test_the_measurement_finds_what_made_it() -> None:
    """Of a method that has always an answer."""
    sure = {"answers": 1.0, "half": 0.0, "first": 0.5, "further": 0.8}
    asker, amount = SimulatedAsker(pace, GuessChances(**sure)), GuessAmount(answers=150)
    heard = await measure_guesses(asker, amount, "draft", 8, lambda: asker.spent)
    made = guess_models({"step": Fitted(STEP, draws=(STEP,) * 16)}, heard)
    assert made["step"].values == pytest.approx({**STEP, **PLANTED}, rel=0.1)
    assert made["guesses"].values == pytest.approx(sure, rel=0.1) and made["guesses"].source.endswith("by draft")
    drawn = sorted(draw["first"] for draw in made["guesses"].draws)
    assert drawn[0] < 0.5 < drawn[-1], "the draws say how sure the number is"


@pytest.mark.parametrize("half", [0.0, 64.0])
def test_the_chances_of_texts_are_found(half: float) -> None:
    chances = {"answers": 0.5, "half": half, "first": 0.5, "further": 0.9}
    texts = [GuessedText([number], GuessChances(**chances)) for number in range(300)]
    for text in texts:
        text.at(1, 1)  # of the first token of the output, which nobody guesses
    found = chances_of([count_text(text.at(2, 300)) for text in texts], "made")
    assert found.values == pytest.approx(chances, rel=0.08) and found.rows == 300 * 300
    none = chances_of([count_text([Guess.NONE] * 9)], "made")
    assert (none.values["answers"], none.values["first"], none.values["further"]) == (0.0, 0.0, 0.0)


def test_the_steps_of_an_answer_follow_from_its_tokens() -> None:
    marks = [(False, 0), (True, 0), (True, 0), (False, 2), (False, 0), (False, 4), (True, 0)]
    tokens = [Token(i, 0, "", guessed=guessed, rejected=rejected) for i, (guessed, rejected) in enumerate(marks)]
    assert steps_of(tokens) == [(1, 2, 2), (4, 0, 0), (5, 0, 4), (6, 1, 0)]


def test_only_a_guess_of_which_the_one_before_is_known_is_counted() -> None:
    count = count_steps([GuessedStep(1, 2, 2), GuessedStep(4, 3, 0), GuessedStep(8, 0, 2), GuessedStep(9, 1, 0), GuessedStep(11, 0, 0)])
    assert count.asked == count.answered == {1: 1, 4: 1, 9: 1} and count.right == 3
    assert (count.went_on, count.right_again) == (4, 3), "R R W, R R R"


def test_what_an_engine_decides_by_is_in_its_log() -> None:
    words = "12:00:00 I decode-0 baton.engine.speculation: how many guesses a step gets follows from: "
    told = '{"step": [[1, 0.1], [5, 0.2], [8, 0.3]], "draft": [[1, 0.4], [2, 0.5], [8, 0.6]], "beside": [0.7, 0.8, 0.9, 1.0]}'
    found = known_of(f"{words}{{}}\n{words}{told}\n12:00:01 I decode-0 x: and so on\n")
    rows, beside = {"rows_1": 0.1, "rows_8": 0.3}, {"sequence": 0.7, "token": 0.8, "guess": 0.9, "guess_token": 1.0}
    assert found == {**rows, **beside, "draft_1": 0.4, "draft_8": 0.6} and known_of("nothing") == {}
    heard = HeardGuesses(8, "", [count_text([Guess.NONE])], [({"plain": 1.0, "guess": float(i)}, 1.0) for i in range(4)], found)
    plain = {"step": Fitted(STEP, draws=(STEP,) * 16)}
    made, heard.known = guess_models(plain, heard), {}
    assert made["known"].values == found and "known" not in guess_models(plain, heard)
    assert Times.of(replace(PROFILE, models=made)).known == {**dict.fromkeys(NUMBERS["known"], 0.0), **found}


def test_who_measures_without_guesses_leaves_out_what_only_they_have() -> None:
    given = {"engine.speculation": "draft", "engine.draft_model": "d", "engine.speculation_branches": "2", "engine.threads": "1"}
    assert without_guesses(given) == {"engine.threads": "1"}


def config(speculation: str, **engine: object) -> Config:
    given = {"prefill": {"replicas": 0}, "decode": {"replicas": 1}, "engine": {"speculation": speculation, **engine}}
    return Config.model_validate(given)


def offer(rate: float = 4.0, output: str = "64") -> Offer:
    return offer_of(Workload(input="64-100", output=output, duration_s=12.0), rate, 1, Window(12.0, 1, 1))[0]


def told_of(config: Config, profile: Profile = PROFILE, load: Offer | None = None, **how: object) -> Prediction:
    return predict(setting_of(config, profile), profile, load or offer(), SLO, **{"draws": 0, **how})  # type: ignore[arg-type]


def test_a_cluster_that_guesses_is_faster_where_guesses_are_right_and_hardly_slower_where_they_are_not() -> None:
    def token_ms(method: str, chance: float) -> float:
        profile = replace(PROFILE, models={**PROFILE.models, "guesses": Fitted({"answers": 1.0, "first": chance, "further": chance})})
        return told_of(config(method), profile).figures["TPOT P50 (ms)"].value

    plain = token_ms(NONE, 0.0)
    assert token_ms(NONE, 1.0) == plain
    verified = 1 + 8 * (PLANTED["guess"] + PLANTED["draft"]) / (STEP["step"] + STEP["decodes"])
    assert token_ms("prompt_lookup", 1.0) == pytest.approx(plain * verified / 9, rel=0.15)
    assert plain < token_ms("prompt_lookup", 0.0) < 1.06 * plain, "trials: answers are short"


def test_intervals_come_from_the_chances_too() -> None:
    unsure = Fitted(CHANCES, tuple({**CHANCES, "further": further} for further in (0.5, 0.98)))
    profile = replace(PROFILE, models={**PROFILE.models, "guesses": unsure})
    told = told_of(config("prompt_lookup"), profile, draws=4).figures["TPOT P50 (ms)"]
    exact = told_of(config("prompt_lookup"), draws=4).figures["TPOT P50 (ms)"]
    assert told.high > 1.05 * told.value and exact.high == pytest.approx(exact.value), "negative control"


def test_a_large_cluster_that_guesses_has_the_same_answers() -> None:
    setting, load = setting_of(config("prompt_lookup"), PROFILE), offer(2.0)
    exact, large = run(setting, PROFILE, load), run(setting, PROFILE, load, large=True)
    assert exact == run(setting, PROFILE, load), "bit for bit"
    ends = [sum(record.token_times[-1] - record.sent for record in each.records) for each in (exact, large)]
    assert ends[1] == pytest.approx(ends[0], rel=0.02)


def test_what_is_not_known_of_guesses_is_said() -> None:
    def said(profile: Profile, method: str = "prompt_lookup", **engine: object) -> tuple[str, ...]:
        return doubts(setting_of(config(method, **engine), profile), profile, offer())

    assert said(PROFILE, NONE) == ()
    assert said(PROFILE) == ("guesses are as often right as in 3 answers: other texts have others",)
    assert said(PROFILE, speculation_tokens=16)[1:] == ("guesses a step 16 (measured: 1 to 8)",)
    assert said(PROFILE, speculation_branches=2)[1:] == ("engine.speculation_branches 2: second choices are not simulated",)
    none = replace(PROFILE, models={"step": PROFILE.models["step"]})
    for profile, words in ((none, "the profile has no guesses"), (PROFILE, "the profile has the guesses of prompt_lookup")):
        setting = setting_of(config("lookahead"), profile)
        assert said(profile, "lookahead") == (f"engine.speculation lookahead: {words}: none are simulated",)
        assert setting.sizes.speculation == NONE
    drafted = replace(PROFILE, engine={**PROFILE.engine, "speculation": "draft"})
    assert said(drafted, "draft")[1:] == ("engine.speculation draft: what the draft keeps beside the KV takes no time in a handoff",)
    dear = replace(PROFILE, models={**PROFILE.models, "step": Fitted(STEP)})
    assert said(dear)[1:] == ("not measured, and so without a time: what a guess takes",)
    assert Profile.read(PROFILE.plain()) == PROFILE
    with pytest.raises(ValueError, match=r"models.guesses.first: 1.5 is a chance, and above 1"):
        Profile.read({**PROFILE.plain(), "models": {**PROFILE.plain()["models"], "guesses": {**wrong(), "values": {"first": 1.5}}}})


def wrong() -> dict[str, object]:
    return {"values": {}, "error": 0.0, "rows": 0, "source": ""}


def test_limits_of_the_configuration_hold() -> None:
    sizes = setting_of(config("prompt_lookup", speculation_tokens=3, speculation_batch_tokens=40), PROFILE).sizes
    assert (sizes.speculation, sizes.speculation_tokens, sizes.limits.speculation_batch_tokens) == ("prompt_lookup", 3, 40)
    assert setting_of(config("prompt_lookup"), PROFILE).sizes.limits.speculation_batch_tokens == 256


def test_guesses_can_be_assumed() -> None:
    plain = replace(PROFILE, models={"step": Fitted(STEP, draws=(STEP,))})
    made = assumed(plain, 0.7, 0.1)
    assert made.values("guesses") == {"answers": 1.0, "half": 0.0, "first": 0.7, "further": 0.7}
    assert made.values("step")["guess"] == STEP["decodes"] and made.values("step")["draft"] == pytest.approx(0.1 * 2.3e-3)
    assert made.models["step"].draws[0].keys() == made.models["step"].values.keys()
    assert assumed(PROFILE, 0.7, 0.1).values("step")["guess"] == PLANTED["guess"], "what was measured stays"
    known = replace(PROFILE, models={**PROFILE.models, "known": Fitted({"rows_1": 1.0, "rows_8": 1.0})})
    assert "known" not in assumed(known, 0.7, 0.1).models
