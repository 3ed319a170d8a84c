"""The profile that explains what was measured (`baton.predict.measure`)."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

from baton.predict.crowding import crowding_of
from baton.predict.measure import LEAST_S, STEP, Amount, Measurements, Rows
from baton.predict.measure_guesses import guess_models
from baton.predict.measure_tiers import kv_token_bytes, tier_models
from baton.profile.file import Profile
from baton.profile.fit import fit
from baton.profile.models import NUMBERS, Fitted, Work, step_seconds
from loadtest.campaign import this_machine


def profile_of(found: Measurements, model: str, engine: Mapping[str, object], amount: Amount, chunk: int) -> Profile:
    """Fits the models; what nothing was measured of has none. Raises ValueError if too little was measured."""
    machine = this_machine()
    whole = fit(found.rows["step"], STEP, "times to the first token, and steps of batches, fitted together")
    step = _part(whole, NUMBERS["step"])
    costs = {name: _cost(found.rows[name], name) for name in ("router", "worker", "client")}
    spent = sum(costs[name].values["request"] + costs[name].values["token"] for name in costs)  # one after the other, nobody waits
    path = [{"request": max(0.0, each["path"] - spent)} for each in (whole.values, *whole.draws)]
    models = {
        "step": step,
        **costs,
        "path": Fitted(path[0], tuple(path[1:]), 0.0, whole.rows, "to the first token, less steps and what is computed beside"),
    }
    models |= tier_models(found.tiers)
    workers = 1.0
    if found.handoffs:
        models["handoff"] = fit(_beside_steps(found.handoffs, step), NUMBERS["handoff"], "from the first token to the second, less a step")
        workers = 2.0
    if found.starts:
        models["start"] = Fitted({"base": median(found.starts)}, (), 0.1, len(found.starts), "from `baton up` to the first answer")
    if found.prompts:
        models["sharing"] = _sharing(found, whole.values["path"], sum(costs[name].values["token"] for name in costs))
    if found.guesses is not None:
        models = guess_models(models, found.guesses)
    region = {
        "prompt tokens": (1.0, float(amount.prompts[-1])),
        "output tokens": (1.0, 160.0),
        "prefill workers": (0.0, workers if found.handoffs else 0.0),
        "decode workers": (1.0, workers),
        "tokens a step": (64.0, float(chunk)),
        **({} if found.guesses is None else {"guesses a step": (1.0, float(found.guesses.most))}),
    }
    cores = f"{machine['processor']}, {machine['cores']} cores"
    about = {"commit": _commit(), "when": str(machine["when"]), "load": machine["load_before"]}
    options = {**engine, **found.facts, "max_num_batched_tokens": chunk}
    made = Profile("measured", cores, model, options, kv_token_bytes(found), "sum", models, region, **about)
    if found.loads and "sharing" in models:
        made = replace(made, models=models | {"crowding": crowding_of(made, found.loads, int(machine["cores"]))})
    return made


def _cost(rows: Rows, model: str) -> Fitted:
    """A number that nothing was measured of has no value."""
    names = [name for name in NUMBERS[model] if any(counts.get(name) for counts, _ in rows)]
    return fit(rows, names, "processor time that the system counted")


def _sharing(found: Measurements, path: float, token: float) -> Fitted:
    """`path`: seconds to a first token that no step takes. `token`: what router, worker and client compute for one. While two workers
    compute, no core is left for that: it is a part of what a token then takes, and takes half of its time from the core of a prompt."""
    alone = median(first for first, _ in found.prompts) - path
    pace = median((first for first, _ in found.paces)) if found.paces else 0.0
    pairs = [{"pair": _speed(first - path, both - path)} for first, both in found.prompts]
    decodes = [{"decode": _speed(first, both - token)} for first, both in found.paces] or [{}]
    unlike = [
        {"prompt_beside": _speed(alone, each.prompt - path - each.tokens * token / 2), "decode_beside": _speed(pace, each.token - token)}
        for each in (found.unlike if pace else ())
    ] or [{}]
    draws = tuple({**one, **two, **three} for one, two, three in product(pairs, decodes, unlike))
    values = {name: median(draw[name] for draw in draws) for name in draws[0]}
    rows = len(found.prompts) + len(found.paces) + len(found.unlike)
    return Fitted(values, draws, 0.0, rows, "prompts, and answers, on one worker, on two, and beside each other")


def _speed(alone: float, beside: float) -> float:
    return max(LEAST_S, alone) / max(LEAST_S, alone, beside)


def _beside_steps(handoffs: Sequence[tuple[int, int, float]], step: Fitted) -> Rows:
    numbers = dict.fromkeys(NUMBERS["step"], 0.0) | dict(step.values)
    return [
        ({"base": 1.0, "byte": float(nbytes)}, max(LEAST_S, seconds - step_seconds(numbers, "sum", Work(decodes=1, context=context))))
        for context, nbytes, seconds in handoffs
    ]


def _part(whole: Fitted, names: Sequence[str]) -> Fitted:
    def only(values: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in values.items() if name in names}

    return Fitted(only(whole.values), tuple(only(draw) for draw in whole.draws), whole.error, whole.rows, whole.source)


def _commit() -> str:
    """Empty where this is no checkout."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
    return done.stdout.strip()
