"""Guesses in a profile: what was measured finds what made it, and a cluster that guesses is simulated by it, or said not to be."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.answer import Result, Token, Usage
from baton.cluster.config import Config
from baton.engine.core.engine import Engine
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import NONE, Speculation
from baton.predict.guessing import assumed
from baton.predict.measure import Heard
from baton.predict.measure_guesses import GuessAmount, GuessedStep, chances_of, measure_guesses, steps_of, with_guesses, without_guesses
from baton.predict.predict import Offer, Prediction, doubts, predict, run
from baton.predict.report import offer_of
from baton.predict.setting import setting_of
from baton.profile.file import Profile
from baton.profile.models import Fitted, Work, step_seconds
from baton.simulate.engine import ModelledRunner
from baton.simulate.guesses import GuessChances, drafter_of
from loadtest.plan import Workload
from loadtest.slo import Slo
from loadtest.window import Window

STEP = {"step": 2e-3, "read": 0.0, "tokens": 5e-5, "pairs": 1e-8, "decodes": 3e-4, "context": 1e-7, "mixed": 0.0}
PLANTED, CHANCES = {"guess": 1.5e-4, "draft": 1e-4}, {"answers": 0.4, "first": 0.5, "further": 0.9}
PROFILE = Profile(
    "measured", "a processor", "m", {"kv_blocks": 512, "speculation": "prompt_lookup"}, 6144.0, "sum",
    {"step": Fitted({**STEP, **PLANTED}), "guesses": Fitted(CHANCES, source="3 answers")}, {"guesses a step": (1.0, 8.0)},
)  # fmt: skip
SLO = Slo.parse("ttft=60ms,tpot=10ms")


class SimulatedAsker:
    """A `baton.predict.measure.Asker` of an engine that takes what a profile says, and guesses right as often as its chances say. Answers
    that are asked for at the same time run in one batch."""

    def __init__(self, pace: Callable[[Work], float], chances: GuessChances, bound: int = 8) -> None:
        self._pace, self._chances, self._bound = pace, chances, bound
        self._rng, self._number, self._now = random.Random(2), 0, 0.0
        self._engine: Engine | None = None
        self._heard: dict[str, tuple[list[Token], list[float]]] = {}

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(10, 256) for _ in range(tokens)]

    async def ask(self, prompt: list[int], tokens: int, **how: object) -> Heard:
        self._number += 1
        seq = self._sequence(prompt, tokens, how)
        engine = self._engine = self._engine or self._made(bool(how.get("prediction")))
        engine.add(seq)
        self._heard[seq.id] = [], []
        began = self._now
        await asyncio.sleep(0)  # those that are asked together join
        while self._engine is engine and not engine.idle:
            self._step(engine)
        self._engine = None
        told, times = self._heard.pop(seq.id)
        usage = Usage(len(prompt), len(told), 0)
        result = Result("", "", tuple(token.id for token in told), (), "length", None, usage, {}, {}, {}, 0)
        return Heard(began, [at - began for at in times], told, result)

    def _sequence(self, prompt: list[int], tokens: int, how: dict[str, object]) -> Sequence:
        asked = Speculation(**how.get("speculation", {}))  # type: ignore[arg-type]
        return Sequence(str(self._number), list(prompt), len(prompt), SamplingParams(tokens, 0.0, speculation=asked), b"")

    def _made(self, predicted: bool) -> Engine:
        pace = self._pace
        if predicted:  # what the client says takes nobody's time
            pace = lambda work: self._pace(work._replace(drafts=0))  # noqa: E731
        chances = GuessChances(1.0, 1.0, 1.0) if predicted else self._chances
        drafter = drafter_of("prompt_lookup", self._bound, chances, pace)
        return Engine(ModelledRunner(pace, 4096, 16, 1 << 14), Limits(), 1 << 14, drafter=drafter)

    def _step(self, engine: Engine) -> None:
        outputs = engine.step(self._now)
        assert isinstance(engine.runner, ModelledRunner)
        self._now += engine.runner.step_s
        for output in outputs:
            if output.sampled is not None:
                told, times = self._heard[output.seq.id]
                told.append(Token(len(told), output.sampled.token, "", guessed=output.guessed, rejected=output.rejected))
                times.append(self._now)


def pace(work: Work) -> float:
    return step_seconds(PROFILE.values("step"), "sum", work)


async def test_the_measurement_finds_what_made_it() -> None:
    amount = GuessAmount(answers=150, tokens=160)
    heard = await measure_guesses(SimulatedAsker(pace, GuessChances(**CHANCES)), amount, 8)  # type: ignore[arg-type]
    made = with_guesses({"step": Fitted(STEP, draws=(STEP,) * 16)}, heard)
    assert made["step"].values == pytest.approx({**STEP, **PLANTED}, rel=0.1)
    assert made["guesses"].values == pytest.approx(CHANCES, rel=0.12)
    for name, value in CHANCES.items():
        drawn = sorted(draw[name] for draw in made["guesses"].draws)
        assert drawn[0] < drawn[-1] and drawn[0] < 1.1 * value and drawn[-1] > 0.9 * value
    assert "150 answers of 160 tokens to prompts of 64 random tokens" in made["guesses"].source and heard.most == 8


def test_the_steps_of_an_answer_follow_from_its_tokens() -> None:
    marks = [(False, 0), (True, 0), (True, 0), (False, 2), (False, 0), (False, 4), (True, 0)]
    tokens = [Token(i, 0, "", guessed=guessed, rejected=rejected) for i, (guessed, rejected) in enumerate(marks)]
    told = [(step.known, step.right, step.wrong, step.at) for step in steps_of(tokens, [float(i) for i in range(7)])]
    assert told == [(1, 2, 2, 3.0), (4, 0, 0, 4.0), (5, 0, 4, 5.0), (6, 1, 0, 6.0)]


def test_a_pause_between_questions_is_no_answer_that_is_missing() -> None:
    """After two questions in vain nobody asks for two tokens."""
    waits = [GuessedStep(0.0, known, 0, 0) for known in (1, 2, 3)] + [GuessedStep(0.0, 4, 1, 0), GuessedStep(0.0, 6, 0, 2)]
    found = chances_of([waits], "made")
    assert found.values == {"answers": 0.0, "first": 0.0, "further": 0.0} and found.rows == 2, "those at 1 and 2"
    right = chances_of([[GuessedStep(0.0, 1, 3, 1), GuessedStep(0.0, 5, 0, 4)]], "made")
    assert right.values == {"answers": 1.0, "first": 0.5, "further": pytest.approx(2 / 3)}


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
    assert made.values("guesses") == {"answers": 1.0, "first": 0.7, "further": 0.7}
    assert made.values("step")["guess"] == STEP["decodes"] and made.values("step")["draft"] == pytest.approx(0.1 * 2.3e-3)
    assert made.models["step"].draws[0].keys() == made.models["step"].values.keys()
    assert assumed(PROFILE, 0.7, 0.1).values("step")["guess"] == PLANTED["guess"], "what was measured stays"
