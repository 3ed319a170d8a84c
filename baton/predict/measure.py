"""Measures what the models of a profile need, from outside: on clusters of the given configuration that it starts, one after the other.

    colocated   one worker that does both: prompts of several lengths and cached shares, one at a time; batches that decode over several
                contexts; prompts among decodes. Each time is a sum of steps, so all go into one fit.
    split       one prefill and one decode worker: handoffs, by the bytes of their KV
    pair        two workers that do both, alone and at once: how two busy cores slow each other, by what each of them does
    guesses     one worker that does both and guesses, if the configuration says so (`baton.predict.measure_guesses`); the others do not
    tiers       one worker that does both over each tier that is configured (`baton.predict.measure_tiers`); the others have none

Split and pair are also put under a load (`baton.predict.crowding`): what slows steps there, single requests do not show.

Each needs as many cores or GPUs as it has workers, and may be left out: the profile then has no model of what it would have told, and says
so. Processor time of router, workers and this process is what the system has counted, less what they use at rest. The machine must do
nothing else; `load` in the profile says whether it did. A prompt that is timed comes after a pause, as in a cluster that is not full: right
after another one, caches hold what it needs, and a small model's first token took a fifth less time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import mean, median
from typing import TypeVar

from baton.client import AsyncClient
from baton.predict.asker import PAUSE_S, Asker, Heard, Processes
from baton.predict.crowding import LOAD_OUTPUT, LOAD_PROMPT, LoadedRun, loaded
from baton.predict.measure_guesses import GUESSES, GuessAmount, HeardGuesses, known_of, measure_guesses, without_guesses
from baton.predict.measure_tiers import HeardTier, measure_tiers, without_tiers
from baton.profile.models import Work, works_of_prompt
from loadtest.cluster import RunningCluster

ARRANGEMENTS = ("colocated", "split", "pair", "guesses", "tiers")
LOADED = ("split", "pair")
Rows = list[tuple[Mapping[str, float], float]]
STEP = ("path", "step", "tokens", "pairs", "decodes", "context", "mixed")
LEAST_S = 1e-5  # of a difference that is fitted
LEAST_PROMPT, PACED = 16, 160  # tokens of a prompt that takes no time, and of an answer that takes much
ROUNDS = 4  # at most, for each that counts
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured."""

    prompts: tuple[int, ...] = (32, 64, 128, 256, 512, 768, 1024)
    cached: tuple[float, ...] = (0.0, 0.5, 0.85)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (32, 256, 900)
    among: tuple[int, ...] = (2, 6)  # decodes
    tokens: int = 48  # of a batch that decodes
    repeats: int = 4
    requests: int = 60  # of one measurement of processor time
    load: int = 80  # requests of a load
    guesses: GuessAmount = GUESSES


QUICK = Amount((64, 256, 768), (0.0, 0.5), (1, 4, 8), (32, 512), (4,), 24, 2, 20, 20, GuessAmount(answers=8))
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Unlike:
    """A prompt that one worker computed while the other decoded. Seconds."""

    prompt: float
    token: float  # of the other worker meanwhile
    tokens: int


@dataclass(slots=True)
class Measurements:
    """Rows for the fits, by model."""

    rows: dict[str, Rows] = field(default_factory=lambda: {"step": [], "router": [], "worker": [], "client": []})
    handoffs: list[tuple[int, int, float]] = field(default_factory=list)  # context, bytes, seconds from the first token to the second
    starts: list[float] = field(default_factory=list)
    prompts: list[tuple[float, float]] = field(default_factory=list)  # seconds of one: alone, and while the other worker has one, too
    paces: list[tuple[float, float]] = field(default_factory=list)  # seconds of a token: alone, and while the other worker decodes, too
    unlike: list[Unlike] = field(default_factory=list)
    loads: list[LoadedRun] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)
    guesses: HeardGuesses | None = None
    tiers: dict[str, HeardTier] = field(default_factory=dict)  # by model


async def measure(
    settings: Mapping[str, str], amount: Amount, chunk: int, note: Note = lambda line: None, only: Collection[str] = ARRANGEMENTS
) -> Measurements:
    """`settings`: the configuration, as `section.key`, but the sizes of the pools. `chunk`: tokens of a step. `only`: of ARRANGEMENTS.
    Raises ValueError for one that there is not, or without "colocated", which tells the steps; ClusterError, GenerateError."""
    if unknown := sorted(set(only) - set(ARRANGEMENTS)):
        raise ValueError(f"arrangements: {unknown[0]} is none of {', '.join(ARRANGEMENTS)}")
    if "colocated" not in only:
        raise ValueError("arrangements: colocated is missing: it is what tells how long steps take")
    found, plain = Measurements(), without_guesses(settings)
    usual, guessing = without_tiers(plain), {**without_tiers(settings), "telemetry.log_level": "info"}
    arrangements: dict[str, tuple[int, int, Mapping[str, str], Callable[[Asker, Processes], Awaitable[None]]]] = {
        "colocated": (0, 1, usual, lambda asker, processes: _colocated(found, asker, processes, amount, chunk)),
        "split": (1, 1, usual, lambda asker, processes: _split(found, asker, processes, amount, chunk)),
        "pair": (0, 2, usual, lambda asker, processes: _pair(found, asker, amount)),
    }
    if settings.get("engine.speculation", "none") != "none":
        arrangements["guesses"] = (0, 1, guessing, lambda asker, processes: _guesses(found, asker, processes, amount, settings))
    for name in (name for name in arrangements if name in only):
        prefill, decode, given, work = arrangements[name]
        note(f"{name}: {prefill} prefill and {decode} decode workers")
        sizes = {"prefill.replicas": str(prefill), "decode.replicas": str(decode), "router.bypass_tokens": "0"}
        async with _running(keys := {**given, **sizes}, found) as (asker, processes, door):
            await work(asker, processes)
            if name in LOADED:
                found.loads.append(await _load(asker, keys, door, amount))
    if "tiers" in only:
        found.tiers = await measure_tiers(plain, found, amount.repeats, note, lambda chosen: _running(chosen, Measurements()))
    return found


async def _load(asker: Asker, keys: Mapping[str, str], door: str, amount: Amount) -> LoadedRun:
    alone = [(await asker.ask_alone(asker.prompt(LOAD_PROMPT), LOAD_OUTPUT)).times[-1] for _ in range(amount.repeats)]
    return await loaded(door, keys, median(alone), amount.load)


@asynccontextmanager
async def _running(settings: Mapping[str, str], found: Measurements) -> AsyncIterator[tuple[Asker, Processes, str]]:
    """The last is the address for requests."""
    began = time.perf_counter()
    async with RunningCluster(settings, "profile") as endpoints, AsyncClient(endpoints["grpc"], max_resumes=0) as client:
        asker = Asker(client)
        for tokens in (16, 16, 200, 200):
            await asker.ask(asker.prompt(tokens), 4)
        found.starts.append(time.perf_counter() - began)
        processes = Processes.of(endpoints["admin"])
        found.facts = processes.facts
        yield asker, processes, endpoints["grpc"]


async def measure_one(endpoints: Mapping[str, str], amount: Amount, chunk: int) -> Measurements:
    """`colocated` alone, on a cluster that runs already: nothing about handoffs, starts, and cores that are shared."""
    found = Measurements()
    async with AsyncClient(endpoints["grpc"], max_resumes=0) as client:
        processes = Processes.of(endpoints["admin"])
        found.facts = processes.facts
        await _colocated(found, Asker(client), processes, amount, chunk)
    return found


async def _colocated(found: Measurements, asker: Asker, processes: Processes, amount: Amount, chunk: int) -> None:
    rows = found.rows["step"]
    await _prompts(rows, asker, amount, chunk)
    for context in amount.contexts:
        for batch in amount.batches:
            await _batch(rows, asker, batch, context, amount)
    for decodes in amount.among:
        for tokens in amount.prompts[2:]:
            await _among(rows, asker, decodes, tokens, amount, chunk)
    await _costs(found, asker, processes, amount)


async def _split(found: Measurements, asker: Asker, processes: Processes, amount: Amount, chunk: int) -> None:
    for tokens in amount.prompts:
        for _ in range(amount.repeats):
            heard = await asker.ask_alone(asker.prompt(tokens), 4)
            found.rows["step"].append((_first(works_of_prompt(tokens, 0, chunk)), heard.times[0]))
            found.handoffs.append((tokens, int(heard.result.handoff["bytes"]), heard.times[1] - heard.times[0]))
    await _costs(found, asker, processes, amount)


async def _guesses(found: Measurements, asker: Asker, processes: Processes, amount: Amount, settings: Mapping[str, str]) -> None:
    alone = settings.get("engine.threads") == "1" and not processes.gpus
    clock = processes.engine if alone else time.perf_counter
    method, most = settings["engine.speculation"], int(settings.get("engine.speculation_tokens", 8))
    known = known_of(processes.log())  # before answers push that out of its last lines
    found.guesses = await measure_guesses(asker, amount.guesses, method, most, clock)
    found.guesses.known = known


async def _prompts(rows: Rows, asker: Asker, amount: Amount, chunk: int) -> None:
    for tokens in amount.prompts:
        for share in amount.cached:
            times, cached = [], 0
            for _ in range(amount.repeats):
                prompt = asker.prompt(tokens)
                if share:
                    await asker.ask(prompt[: int(tokens * share)], 1)
                heard = await asker.ask_alone(prompt, 1)
                times.append(heard.times[0])
                cached = heard.result.usage.cached_tokens
            rows.append((_first(works_of_prompt(tokens, cached, chunk)), median(times)))


async def _batch(rows: Rows, asker: Asker, batch: int, context: int, amount: Amount) -> None:
    """Steps while all decode: from the last first token to the first last one."""
    begun = time.perf_counter()
    starts = [0.0] * batch

    async def one(i: int) -> list[float]:
        starts[i] = time.perf_counter() - begun
        heard = await asker.ask(asker.prompt(context), amount.tokens + 2 * batch)
        return [starts[i] + at for at in heard.times]

    streams = await asyncio.gather(*(one(i) for i in range(batch)))
    first, last = max(times[0] for times in streams), min(times[-1] for times in streams)
    gaps = [len([at for at in times if first < at <= last]) for times in streams]
    if last > first and min(gaps) > 2:
        steps = mean(gaps)
        grown = context + amount.tokens / 2
        rows.append((_sum([Work(decodes=batch, context=int(batch * grown))]), (last - first) / steps))


async def _among(rows: Rows, asker: Asker, decodes: int, tokens: int, amount: Amount, chunk: int) -> None:
    """The time to the first token of a prompt that others decode beside. It waits for the step under way, half a step on average."""
    context, running, all_run = 64, 0, asyncio.Event()

    def on_first() -> None:
        nonlocal running
        running += 1
        if running == decodes:
            all_run.set()

    others = [asyncio.create_task(asker.ask(asker.prompt(context), 160, on_first)) for _ in range(decodes)]
    await all_run.wait()
    times = [(await asker.ask(asker.prompt(tokens), 1)).times[0] for _ in range(2)]
    if any(task.done() for task in others):
        times = times[:1]
    await asyncio.gather(*others)
    beside = decodes * (context + 40)
    works = [Work(work.tokens, work.pairs, decodes, beside) for work in works_of_prompt(tokens, 0, max(1, chunk - decodes))]
    counts = _first(works)
    for name, count in _sum([Work(decodes=decodes, context=beside)]).items():
        counts[name] = counts.get(name, 0.0) + count / 2
    rows.append((counts, mean(times)))


async def _costs(found: Measurements, asker: Asker, processes: Processes, amount: Amount) -> None:
    """Processor time of requests with few tokens and with many."""
    before, began = processes.used(), time.perf_counter()
    await asyncio.sleep(1.0)
    rest = {name: (used - before[name]) / (time.perf_counter() - began) for name, used in processes.used().items()}
    for tokens in (2, 40):
        for _ in range(2):
            before, began = processes.used(), time.perf_counter()
            gate = asyncio.Semaphore(4)

            async def one(tokens: int, gate: asyncio.Semaphore) -> None:
                async with gate:
                    await asker.ask(asker.prompt(48), tokens)

            await asyncio.gather(*(one(tokens, gate) for _ in range(amount.requests)))
            passed = time.perf_counter() - began
            for name, used in processes.used().items():
                model, counts = _counts(name, tokens, split="prefill" in before)
                row = {number: amount.requests * count for number, count in counts.items()}
                found.rows[model].append((row, max(LEAST_S, used - before[name] - rest[name] * passed)))


def _counts(process: str, tokens: int, split: bool) -> tuple[str, dict[str, float]]:
    """The model of what a process computes, and how often each of its numbers enters with a request."""
    if process == "prefill":
        return "worker", {"request": 1, "token": 1, "lend": 1}
    if process == "decode":
        return "worker", {"request": 1, "token": tokens - split, "fetch": split}
    return process, {"request": 2 if split and process == "router" else 1, "token": tokens}  # a call of each worker


async def _pair(found: Measurements, asker: Asker, amount: Amount) -> None:
    """Prompts of middle length, and then answers, on one worker alone and on both at once; then one beside the other."""
    prompt = amount.prompts[len(amount.prompts) // 2]
    found.prompts = await _rounds(asker, prompt, 1, 2 * amount.repeats)
    found.paces = await _rounds(asker, LEAST_PROMPT, PACED, amount.repeats)
    found.unlike = await _unlike(asker, prompt, 2 * amount.repeats)


async def _rounds(asker: Asker, prompt: int, tokens: int, count: int) -> list[tuple[float, float]]:
    """Seconds to the first token, or of a further one if `tokens` are asked for: alone, and beside another request on the other worker. A
    round in which one worker got both says nothing."""

    async def several(streams: int) -> list[Heard]:
        await asyncio.sleep(PAUSE_S)
        return await asyncio.gather(*(asker.ask(asker.prompt(prompt), tokens) for _ in range(streams)))

    def seconds(every: list[Heard]) -> float:
        return mean((heard.times[-1] - heard.times[0]) / (tokens - 1) if tokens > 1 else heard.times[0] for heard in every)

    async def alone_and_both() -> tuple[float, float] | None:
        alone, both = await several(1), await several(2)
        return (seconds(alone), seconds(both)) if len({heard.result.workers["decode"] for heard in both}) == 2 else None

    return await _counted(alone_and_both, count)


async def _unlike(asker: Asker, prompt: int, count: int) -> list[Unlike]:
    """A round says nothing in which one worker got both, or the answer ended first."""

    async def meanwhile() -> Unlike | None:
        running, began = asyncio.Event(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asker.ask(asker.prompt(LEAST_PROMPT), PACED, running.set))
            await running.wait()
            start = time.perf_counter() - began
            heard = await asker.ask(asker.prompt(prompt), 1)
            end = time.perf_counter() - began
        other = task.result()
        times = [at for at in other.times if start < at <= end]
        if heard.result.workers["decode"] != other.result.workers["decode"] and other.times[-1] > end and len(times) > 1:
            return Unlike(heard.times[0], (times[-1] - times[0]) / (len(times) - 1), len(times))
        return None

    return await _counted(meanwhile, count)


async def _counted(one: Callable[[], Awaitable[T | None]], count: int) -> list[T]:
    """So many rounds that say something; fewer, if too many say nothing."""
    made = list[T]()
    for _ in range(ROUNDS * count):
        if (said := await one()) is not None:
            made.append(said)
        if len(made) == count:
            break
    return made


def _sum(works: Sequence[Work]) -> dict[str, float]:
    """How often each number of a step enters."""
    return {
        "step": float(len(works)),
        "tokens": float(sum(work.tokens for work in works)),
        "pairs": float(sum(work.pairs for work in works)),
        "decodes": float(sum(work.decodes for work in works)),
        "context": float(sum(work.context for work in works)),
        "mixed": float(sum(work.mixed for work in works)),
    }


def _first(works: Sequence[Work]) -> dict[str, float]:
    """The row of a time to the first token."""
    return {"path": 1.0, **_sum(works)}
