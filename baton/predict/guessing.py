"""Guesses of a simulated cluster: what of a configuration and a profile says how many there are and how often they are right."""

from collections.abc import Mapping
from dataclasses import replace

from baton.cluster.config import Config
from baton.profile.file import Profile
from baton.profile.models import Fitted, Work, step_seconds
from baton.simulate.cluster import Sizes


def with_guesses(sizes: Sizes, config: Config, profile: Profile, batch_tokens: int) -> tuple[Sizes, list[str]]:
    """The sizes of a cluster whose engines guess as configured, and what is to be doubted, in words. None are simulated where the profile
    does not say how often those of this method are right. `batch_tokens`: of the steps that guesses may fill."""
    engine = config.engine
    method, measured = engine.speculation, profile.engine.get("speculation")
    if method == "none":
        return sizes, []
    if "guesses" not in profile.models:
        return sizes, [f"engine.speculation {method}: the profile has no guesses: none are simulated"]
    if measured is not None and measured != method:
        return sizes, [f"engine.speculation {method}: the profile has the guesses of {measured}: none are simulated"]
    found = [f"guesses are as often right as in {profile.models['guesses'].source}: other texts have others"]
    if "guess" not in profile.models["step"].values:
        found.append("not measured, and so without a time: what a guess takes")
    if method in ("draft", "heads"):
        found.append(f"engine.speculation {method}: what the draft keeps beside the KV takes no time in a handoff")
    if engine.speculation_branches > 1:
        found.append(f"engine.speculation_branches {engine.speculation_branches}: second choices are not simulated")
    return replace(sizes, speculation=method, speculation_tokens=engine.speculation_tokens, speculation_batch_tokens=batch_tokens), found


def assumed(profile: Profile, acceptance: float, cost: float) -> Profile:
    """The profile with guesses of which each is right with the same chance, whatever was before it. `cost`: what each place of a draft
    takes, in steps of one sequence. To verify one takes what was measured, or as long as another sequence's decode."""
    step, numbers = profile.models["step"], profile.values("step")
    alone = step_seconds(numbers, profile.form, Work(decodes=1))

    def guessing(values: Mapping[str, float]) -> dict[str, float]:
        return {"guess": values.get("decodes", 0.0), **values, "draft": cost * alone}

    guesses = Fitted({"answers": 1.0, "half": 0.0, "first": acceptance, "further": acceptance}, source="an assumption")
    step = replace(step, values=guessing(step.values), draws=tuple(guessing(draw) for draw in step.draws))
    others = {name: fitted for name, fitted in profile.models.items() if name != "known"}  # which is of other guesses
    return replace(profile, models={**others, "step": step, "guesses": guesses})
