"""What a pool of workers of one kind does with the traffic, by formulae: the chance of each request to get its first token, and its other
tokens, in time. Estimates; `baton.predict.verify` simulates what is chosen by them.

A pool is a queue with several servers in front of prefills, and a number of sequences that decode at once behind them:

    prefill    a prompt waits for one of the workers (`formulae.wait_within`), and is computed in steps of at most `CHUNK` tokens
    decode     by Little's law, as many sequences decode in a worker as make it yield the tokens that are asked of it. Their number varies
               (`formulae.peakedness`), and the steps with it. A sequence gets its KV first; what that takes counts as part of its TPOT
    colocated  both in the same steps. A prompt makes the steps longer for those that decode, by as much as it adds to a step that reads
               the weights anyway; how many prompts come during an answer varies

A pipeline of p stages counts as p workers that have the weights once: each of p groups of sequences is in one stage at a time, so no stage
waits while there are as many groups (`formulae.pipeline_bubble` says what fewer cost).
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from statistics import fmean, pvariance

from baton.plan import formulae
from baton.plan.hardware import Device, Efficiency
from baton.plan.shape import Shape
from baton.plan.sheet import HANDOFF_S, ROUTER, step_numbers
from baton.plan.size import RESERVE
from baton.plan.traffic import BLOCK, Traffic
from baton.profile.file import Profile
from baton.profile.models import Work, step_seconds, works_of_prompt

CHUNK, MOST_SEQUENCES = 8192, 256  # of a step, as the engine's defaults on large GPUs
SMALL_CHUNK, LARGE = 2048, 64 << 30  # the default below so many bytes of memory


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A kind of worker: `tensor` GPUs share each layer, `stages` groups of these share the layers."""

    device: Device
    tensor: int = 1
    stages: int = 1
    weight_bits: float = 16
    kv_bits: float = 16

    @property
    def gpus(self) -> int:
        return self.tensor * self.stages

    def __str__(self) -> str:
        how = [f"TP {self.tensor}"] * (self.tensor > 1) + [f"PP {self.stages}"] * (self.stages > 1)
        return f"{self.device.name} {' '.join(how)}".strip()


def kv_room(kind: WorkerKind, shape: Shape) -> float:
    """Bytes that the GPUs of one stage have beside its weights; negative if these do not fit."""
    room = kind.device.memory * (1 - RESERVE) * kind.gpus
    return (room - formulae.weight_bytes(shape.parameters, kind.weight_bits)) / kind.stages


def kv_blocks(kind: WorkerKind, shape: Shape, tokens: int) -> int:
    """Blocks of so many tokens in that room, with the copies of KV that its GPUs keep."""
    return int(kv_room(kind, shape) / (shape.kv_bytes(kind.kv_bits / 8) * shape.kv_copies(kind.tensor) * tokens))


def sized(profile: Profile, kind: WorkerKind, shape: Shape) -> Profile:
    """A sheet's profile with what a worker of this kind chooses for itself: the sizes of its batches and of its pool. Raises ValueError if
    there is no room for KV."""
    blocks = kv_blocks(kind, shape, BLOCK)
    if blocks < 1:
        raise ValueError(f"{kind.gpus} x {kind.device.name} have no room for KV beside the weights of {shape.name}")
    chunk = CHUNK if kind.device.memory >= LARGE else SMALL_CHUNK
    chosen = {"max_num_seqs": MOST_SEQUENCES, "max_num_batched_tokens": chunk, "block_size": BLOCK, "kv_blocks": blocks}
    return replace(profile, engine={**profile.engine, **chosen})


@dataclass(frozen=True, slots=True)
class Question:
    """`slower`: how many times as long all steps take as the sheet says, for intervals."""

    shape: Shape
    traffic: Traffic
    ttft_s: float
    tpot_s: float
    reached: Efficiency
    link_bytes_per_s: float = 25e9
    attainment: float = 0.9
    slower: float = 1.0


class Speed:
    """The speed of one kind of worker with the requests of a question."""

    def __init__(self, kind: WorkerKind, asked: Question) -> None:
        self.kind, self._asked = kind, asked
        self._lengths = asked.traffic.lengths
        self._numbers = step_numbers(asked.shape, kind.device, asked.reached, kind.tensor, kind.weight_bits, kind.kv_bits, CHUNK)

    @cached_property
    def kv_room(self) -> float:
        """Bytes of one stage's share: of a worker if it has one stage."""
        return kv_room(self.kind, self._asked.shape)

    @property
    def kv_token_bytes(self) -> float:
        return self._asked.shape.kv_bytes(self.kind.kv_bits / 8)

    @property
    def sequence_bytes(self) -> float:
        """Bytes of a sequence in the memory of a stage's worth of workers."""
        return self.kv_token_bytes * self._asked.shape.kv_copies(self.kind.tensor) * self._asked.traffic.whole

    @cached_property
    def most(self) -> int:
        """Sequences that decode at once."""
        return min(MOST_SEQUENCES, max(0, int(self.kv_room / self.sequence_bytes)))

    @cached_property
    def prompts(self) -> list[tuple[float, float]]:
        """The seconds of each request's prefill alone, and its share of steps that are full of prompts."""
        return [self._prompt(each.prompt) for each in self._lengths]

    def _prompt(self, tokens: int) -> tuple[float, float]:
        n = self._numbers
        works = works_of_prompt(tokens, min(tokens - 1, int(tokens * self._asked.traffic.cached)), CHUNK)
        alone = sum(step_seconds(n, "roof", work) for work in works)
        shared = 0.0
        for work in works:
            part = work.tokens / CHUNK
            shared += part * n["step"] + max(work.tokens * n["tokens"] + work.pairs * n["pairs"], part * n["read"])
        return self._asked.slower * alone, self._asked.slower * shared

    @cached_property
    def steps(self) -> list[float]:
        """Seconds of a decode step of 1, 2, … sequences."""
        context = self._asked.traffic.context
        return [self._asked.slower * step_seconds(self.numbers(b), "roof", Work(decodes=b, context=int(b * context))) for b in BATCHES]

    def numbers(self, batch: int) -> dict[str, float]:
        """The numbers of steps with so many tokens; how many matters only with experts."""
        shape, kind = self._asked.shape, self.kind
        if shape.experts is None:
            return self._numbers
        return step_numbers(shape, kind.device, self._asked.reached, kind.tensor, kind.weight_bits, kind.kv_bits, batch)

    @cached_property
    def added(self) -> list[float]:
        """Seconds that each prompt adds to steps that a batch decodes in anyway: what it computes beyond the time of reading."""
        n = self.numbers(16)
        hidden = max(0.0, n["read"] - 16 * n["decodes"])
        return [max(0.05 * alone, alone - self._asked.slower * (n["step"] + hidden)) for alone, _ in self.prompts]


BATCHES = range(1, MOST_SEQUENCES + 1)


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """`workers` of a kind and what they make of each request. `busy`: share of the time in which prompts are computed; `batch`: sequences
    of a worker's stage that decode at once, on average, of `most` that have room."""

    speed: Speed
    workers: int
    ttft: tuple[float, ...] = ()  # chance of each request
    tpot: tuple[float, ...] = ()
    busy: float = 0.0
    batch: float = 0.0

    @property
    def kind(self) -> WorkerKind:
        return self.speed.kind

    @property
    def gpus(self) -> int:
        return self.workers * self.kind.gpus


def attained(ttft: tuple[float, ...], tpot: tuple[float, ...]) -> float:
    return sum(map(float.__mul__, ttft, tpot)) / len(ttft)


def prefill_pool(speed: Speed, workers: int, asked: Question) -> PlannedPool:
    servers = workers * speed.kind.stages
    shares = [shared for _, shared in speed.prompts]
    mean = fmean(shares)
    load = asked.traffic.rate * mean
    if load >= servers:
        return PlannedPool(speed, workers, (0.0,) * len(shares), busy=load / servers)
    chances = tuple(
        formulae.wait_within(asked.ttft_s - ROUTER["request"] - alone, servers, load, mean, asked.traffic.cv2, _cv2(shares))
        for alone, _ in speed.prompts
    )
    return PlannedPool(speed, workers, chances, busy=load / servers)


def decode_pool(speed: Speed, workers: int, asked: Question) -> PlannedPool:
    servers = workers * speed.kind.stages
    traffic = asked.traffic
    link = traffic.rate * traffic.prompt * (1 - traffic.cached) * speed.kv_token_bytes / (workers * asked.link_bytes_per_s)
    batch = _batch(speed, traffic.rate * (traffic.output - 1) / servers)
    if batch is None or link >= 1:
        return PlannedPool(speed, workers, tpot=(0.0,) * len(traffic.lengths), batch=speed.most)
    deviation = sqrt(formulae.peakedness(traffic.cv2) * batch / servers)
    byte_s = speed.kv_token_bytes / asked.link_bytes_per_s / (1 - link)
    chances = []
    for each in traffic.lengths:
        handoff = HANDOFF_S + each.prompt * (1 - traffic.cached) * byte_s
        fits = bisect_right(speed.steps, asked.tpot_s - handoff / max(1, each.output - 1)) if each.output > 1 else MOST_SEQUENCES
        chances.append(formulae.normal_below(min(fits, speed.most) + 0.5, batch, deviation) if fits else 0.0)
    return PlannedPool(speed, workers, tpot=tuple(chances), batch=batch)


def colocated_pool(speed: Speed, workers: int, asked: Question) -> PlannedPool:
    servers = workers * speed.kind.stages
    traffic = asked.traffic
    count = len(traffic.lengths)
    rate = traffic.rate / servers
    busy = rate * fmean(speed.added)
    batch = _batch(speed, rate * (traffic.output - 1) / (1 - busy)) if busy < 1 else None
    if batch is None:
        return PlannedPool(speed, workers, (0.0,) * count, (0.0,) * count, min(busy, 1.0), speed.most)
    decodes = asked.slower * batch * speed.numbers(CHUNK)["decodes"]
    cv2 = _cv2([shared for _, shared in speed.prompts])
    # A step that computes a prompt decodes, too.
    shares = [shared + decodes for _, shared in speed.prompts]
    step = speed.steps[max(0, min(len(speed.steps), round(batch)) - 1)]
    load = traffic.rate * fmean(shares)
    waits = asked.ttft_s - ROUTER["request"] - decodes - step / 2
    ttft = tuple(formulae.wait_within(waits - alone, servers, load, fmean(shares), traffic.cv2, cv2) for alone, _ in speed.prompts)
    spread = fmean(speed.added) ** 2 * (traffic.cv2 + _cv2(speed.added))
    deviation = sqrt(formulae.peakedness(traffic.cv2) * batch / servers)
    slope = (speed.steps[-1] - speed.steps[0]) / (len(speed.steps) - 1)
    room = formulae.normal_below(speed.most + 0.5, batch, deviation)
    tpot = []
    for each in traffic.lengths:
        gaps = max(1, each.output - 1)
        mean = step / (1 - busy)
        of_prompts = rate * gaps * mean * spread / gaps**2
        chance = formulae.normal_below(asked.tpot_s, mean, sqrt(of_prompts + (slope * deviation / (1 - busy)) ** 2))
        tpot.append(room * chance if each.output > 1 else 1.0)
    return PlannedPool(speed, workers, ttft, tuple(tpot), busy, batch)


def _batch(speed: Speed, tokens_per_s: float) -> float | None:
    """Sequences that must decode at once in a worker to yield so many tokens (Little's law); None: not even all that fit do."""
    most = speed.most
    if most < 1 or tokens_per_s * speed.steps[most - 1] > most:
        return None
    least = bisect_left(range(1, most), True, key=lambda batch: tokens_per_s * speed.steps[batch - 1] <= batch)
    return tokens_per_s * speed.steps[least]


def _cv2(values: list[float]) -> float:
    return pvariance(values) / fmean(values) ** 2
