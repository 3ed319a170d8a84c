"""Measures how long steps of several sizes take, when a worker starts: `baton.engine.core.step_costs` decides by it."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate, product

from baton.engine.core.drafting import Drafter, DraftRequest
from baton.engine.core.engine import Engine
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk, Runner
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.step_costs import NO_UPKEEP, DraftCosts, Line, Upkeep

SIZES = (1, 8, 2, 4, 3, 6, 16, 32, 64)  # the first two are always measured
BUDGET_S = 0.5  # for one line
TURNS, TIMES = 2, 12  # at most; the least counts, for other work can only add to it
KNOWN = 48  # tokens of a sequence that is measured
GUESSES = 4  # of a draft and of an engine that is measured
TOGETHER, STEPS = 8, 12  # sequences of an engine that is measured, and how many of its steps
LONGER = 4 * KNOWN


def step_line(runner: Runner, most: int, guesses: int, longest: int) -> Line:
    """Seconds of `runner.run` by rows, up to `most`, as many as possible of which verify up to `guesses` guesses of one sequence of up to
    `longest` tokens: so the next row is what one guess more takes."""
    room = min(runner.pool.num_blocks * runner.layout.block_size, longest)  # a device has no place for more
    wide = 1 + min(guesses, room - 2)
    run = _decodes(runner, min(KNOWN, room - wide), wide)
    clock = clock_of(runner.on_device)
    line, begun = measured(run, max(2, most), clock), clock()
    for rows in range(1, most + wide):  # a recorded step is slow when it is computed first
        if clock() - begun < BUDGET_S / 2:
            run(rows)
    return line


def _decodes(runner: Runner, known: int, wide: int) -> Callable[[int], None]:
    """Runs a step of so many rows, up to `wide` of each sequence. No record refers to what it leaves in the pool's first blocks, which all
    sequences share: they are the same."""
    blocks = list(range(-(-(known + wide) // runner.layout.block_size)))
    params = SamplingParams(max_tokens=wide + 1, temperature=0.0)

    def run(rows: int) -> None:
        chunks = []
        for i, row in enumerate(range(0, rows, wide)):
            seq = Sequence(f"measured{i}", [0] * (known + 1), known, params, b"", computed=known, blocks=blocks)
            seq.drafted = known + 1  # the draft has costs of its own
            chunks.append(Chunk(seq, 1, (0,) * (min(wide, rows - row) - 1)))
        runner.run(chunks)

    return run


def upkeep(runner: Runner, step: Line, most: int, longest: int) -> Upkeep:
    """What a step of an engine takes beside its rows, for up to `most` sequences, short ones and longer ones; nothing on a device, where
    it is not measured. No record refers to what it leaves in the pool's first blocks."""
    size, blocks, wide = runner.layout.block_size, runner.pool.num_blocks, 1 + GUESSES
    lengths = [known for known in (KNOWN, LONGER) if known + STEPS <= min(longest, blocks * size)]
    if runner.on_device or not lengths:
        return NO_UPKEEP
    fitting = min(TOGETHER, most, blocks // -(-(lengths[-1] + STEPS) // size))
    count = max([count for count in range(2, fitting + 1) if 2 * step.at(count * sum(lengths)) < BUDGET_S], default=1)
    rows, guesses = step.at(count), count * GUESSES
    plain = [_least_step(runner, count, known) for known in lengths]
    guessed = _least_step(runner, count, lengths[0], GUESSES)
    guess = max(0.0, guessed - plain[0] - (step.at(count + guesses) - rows)) / guesses
    sequence, token = _by_length([(seconds - rows) / count for seconds in plain])
    alone, together = ([_least(_decodes(runner, known, each), count * each, time.thread_time) for known in lengths] for each in (1, wide))
    _, guess_token = _by_length([(many - one) / guesses for many, one in zip(together, alone, strict=True)])
    return Upkeep(sequence, token, max(0.0, guess - guess_token * KNOWN), guess_token)


def _by_length(seconds: list[float]) -> tuple[float, float]:
    """A constant and what each token adds to it, of what KNOWN and LONGER tokens take; neither is negative."""
    token = max(0.0, seconds[-1] - max(0.0, seconds[0])) / (LONGER - KNOWN) if len(seconds) > 1 else 0.0
    return max(0.0, seconds[0] - token * KNOWN), token


class _Zeros(Drafter):
    def __init__(self, guesses: int) -> None:
        self.bound = guesses

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [[0] * ask.most for ask in asks]


def _least_step(runner: Runner, count: int, known: int, guesses: int = 0) -> float:
    """Seconds of an engine's step in which `count` sequences of `known` tokens and a few more decode, with so many guesses each."""
    limits, drafter = Limits(count, count * max(1 + guesses, known)), _Zeros(guesses) if guesses else None  # all begin in one step
    engine = Engine(runner, limits, known + STEPS, prefix_caching=False, drafter=drafter)
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    seqs = [Sequence(f"measured{i}", [0] * known, known, params, b"") for i in range(count)]
    for seq in seqs:
        engine.add(seq)
    least = float("inf")
    while not engine.idle:
        whole = len(engine.sequences) == count and all(seq.output_len and seq.remaining > guesses for seq in seqs)
        start = time.thread_time()
        engine.step()
        least = min(least, time.thread_time() - start) if whole else least
    return least


def draft_costs(drafter: Drafter, most: int, block_size: int, on_device: bool = False, usual: int = 1) -> DraftCosts:
    """What it takes to draft for up to `most` sequences: all that a model's drafter does in Python, too. `usual`: tokens of each that
    wait when it is asked again, 1 or 2. No record refers to what it leaves in the pool's first blocks."""
    guesses = min(GUESSES, drafter.bound)
    blocks = list(range(-(-(3 + drafter.bound) // block_size)))

    def run(sequences: int, count: int, waiting: int, temperature: float = 0.0) -> None:
        params = SamplingParams(max_tokens=2, temperature=temperature, ignore_eos=True)
        seqs = [Sequence(f"measured{i}", [0] * 3, 1, params, b"", computed=2, drafted=3 - waiting, blocks=blocks) for i in range(sequences)]
        drafter.propose([DraftRequest(seq, count) for seq in seqs])

    def line(count: int) -> Line:
        return measured(lambda sequences: run(sequences, count, usual), max(2, most), clock_of(on_device))

    one = line(1)
    costs = DraftCosts(one, line(guesses), guesses) if guesses > 1 else DraftCosts(one)
    for waiting, temperature in product((1, 2), (0.0, 1.0)):
        run(1, drafter.bound, waiting, temperature)  # a recorded step is slow when it is computed first
    return costs


def copy_seconds(runner: Runner) -> float:
    """Seconds of `runner.copy`. No record refers to what it leaves in the pool's first blocks."""

    def run(count: int) -> None:
        for _ in range(count):
            runner.copy(0, min(1, runner.pool.num_blocks - 1))

    return measured(run, 2, clock_of(runner.on_device)).at(1)


def clock_of(on_device: bool) -> Callable[[], float]:
    """The thread's own time, of which other processes take nothing, or of what a device computes that which passes."""
    return time.perf_counter if on_device else time.thread_time


def measured(run: Callable[[int], None], most: int, clock: Callable[[], float] = time.thread_time) -> Line:
    """`run(count)` for some counts up to `most`, in seconds. What computes here is measured by the thread's own time, of which other
    processes take nothing. A count is run several times in succession, for a processor keeps in its cache what is read again and again,
    and all counts in two turns, for its pace varies from moment to moment."""
    sizes, points, begun = [size for size in SIZES if size <= most or size <= 2], dict[int, float](), clock()
    for turn, size in product(range(1, TURNS + 1), sizes):
        if len(points) >= 2 and clock() - begun > BUDGET_S * turn / TURNS:
            continue
        if size not in points:
            run(size)  # the first of a size is slower
        points[size] = min(points.get(size, float("inf")), _least(run, size, clock))
    counts = sorted(points)
    return Line(tuple(zip(counts, accumulate((points[count] for count in counts), max), strict=True)))  # more never takes less


def _least(run: Callable[[int], None], size: int, clock: Callable[[], float]) -> float:
    """Seconds, of several runs."""
    least, begun = float("inf"), clock()
    for _ in range(TIMES):
        start = clock()
        run(size)
        least = min(least, clock() - start)
        if clock() - begun > BUDGET_S / TURNS / len(SIZES):
            break
    return least
