"""The cheapest configurations of the GPUs that there are, and why the others are none.

Every pair of kinds of workers (prefill, decode), and every kind alone (colocated), gets as few workers as hold the objectives; of these
the cheapest come first. Estimated by `baton.plan.pools`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, exp

from baton.plan import formulae
from baton.plan.hardware import Device
from baton.plan.pools import PlannedPool, Question, Speed, WorkerKind, attained, colocated_pool, decode_pool, prefill_pool
from baton.plan.shape import Shape
from baton.plan.sheet import ERROR
from baton.plan.size import RESERVE

Z = 1.645  # 90 % of a normal distribution lie within so many standard deviations
LINK_USE = 0.8  # of what the links of prefill workers carry
BOUND = 4096  # workers of a pool: more are not looked at


@dataclass(frozen=True, slots=True)
class Stock:
    """GPUs of one kind that one has."""

    device: Device
    count: int
    price: float  # of one for an hour
    per_node: int = 8


@dataclass(frozen=True, slots=True)
class Configuration:
    """`prefill` is None where it is colocated."""

    prefill: PlannedPool | None
    decode: PlannedPool
    attainment: float  # estimated
    cost: float  # an hour

    @property
    def pools(self) -> tuple[PlannedPool, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def kinds(self) -> tuple[WorkerKind, ...]:
        return tuple(pool.kind for pool in self.pools)

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools)

    def gpus_of(self, device: Device) -> int:
        return sum(pool.gpus for pool in self.pools if pool.kind.device == device)

    def __str__(self) -> str:
        if self.prefill is None:
            return f"colocated: {self.decode.workers} x {self.decode.kind}"
        return f"{self.prefill.workers} x {self.prefill.kind} : {self.decode.workers} x {self.decode.kind}"


def order(one: Configuration) -> tuple[float, ...]:
    """The sort key: cost, then fewer GPUs, smaller workers (of which one can fail alone), fewer pools and stages."""
    return (
        round(one.cost, 6), one.gpus, max(kind.gpus for kind in one.kinds), len(one.kinds), max(kind.stages for kind in one.kinds),
        -one.attainment,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rejected:
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """`held`: the cheapest of each pair of kinds, cheapest first."""

    held: tuple[Configuration, ...]
    rejected: tuple[Rejected, ...]


def kinds(shape: Shape, stock: Stock, weight_bits: float, kv_bits: float) -> Iterator[WorkerKind | Rejected]:
    """Tensor parallelism inside a node. Layers are shared out where that is forbidden (latent attention in Baton), where GPUs have no links
    of their own, and over nodes if one has too little memory."""
    device, weights = stock.device, formulae.weight_bytes(shape.parameters, weight_bits)
    least = max(1, ceil(weights / (device.memory * (1 - RESERVE))))
    if least > stock.count:
        yield Rejected(device.name, f"{weights / 1e9:.0f} GB of weights need at least {least} GPUs; there are {stock.count}")
        return
    degrees = [degree for degree in _powers(stock.per_node) if shape.heads % degree == 0]
    for tensor in degrees:
        for stages in _stages(shape, stock, least, tensor):
            if least <= tensor * stages <= stock.count and stages <= shape.layers:
                yield WorkerKind(device, tensor, stages, weight_bits, kv_bits)


def _stages(shape: Shape, stock: Stock, least: int, tensor: int) -> list[int]:
    if least > stock.per_node:
        return [ceil(least / tensor)] if tensor == max(_powers(stock.per_node)) else []
    if shape.latent is not None or not stock.device.linked:
        return _powers(stock.per_node // tensor)
    return [1]


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


class Search:
    """All that holds a question's objectives with some GPUs."""

    def __init__(self, asked: Question, stocks: Sequence[Stock], weight_bits: Iterable[float], kv_bits: Iterable[float]) -> None:
        self.asked = asked
        self._stocks = {stock.device.name: stock for stock in stocks}
        self._rejected: list[Rejected] = []
        self.speeds: list[Speed] = []
        self._pools: dict[tuple[str, WorkerKind, int], PlannedPool] = {}
        self._leasts: dict[tuple[str, WorkerKind], int | None] = {}
        for stock, weight, kv in product(stocks, weight_bits, kv_bits):
            for kind in kinds(asked.shape, stock, weight, kv):
                if isinstance(kind, Rejected):
                    self._rejected.append(kind)
                else:
                    self.speeds.append(Speed(kind, asked))

    def found(self) -> Found:
        held = []
        for speed in self.speeds:
            held.append(self._colocated(speed))
        for prefill, decode in product(self.speeds, self.speeds):
            if (prefill.kind.weight_bits, prefill.kind.kv_bits) == (decode.kind.weight_bits, decode.kind.kv_bits):
                held.append(self._split(prefill, decode))
        each = [one for one in held if one is not None]
        each.sort(key=order)
        return Found(tuple(each), tuple(dict.fromkeys(self._rejected)))

    def again(self, like: Configuration) -> Configuration | None:
        """The cheapest configuration of the same kinds of workers."""
        by_kind = {speed.kind: speed for speed in self.speeds}
        decode = by_kind[like.decode.kind]
        return self._colocated(decode) if like.prefill is None else self._split(by_kind[like.prefill.kind], decode)

    def with_more(self, one: Configuration, prefill: bool) -> Configuration | None:
        """The configuration with another worker in one of the pools; None: there are not so many GPUs."""
        if one.prefill is None:
            pool = self._pool("colocated", one.decode.speed, one.decode.workers + 1)
            return self._made(None, pool, attained(pool.ttft, pool.tpot))
        before = self._pool("prefill", one.prefill.speed, one.prefill.workers + prefill)
        after = self._pool("decode", one.decode.speed, one.decode.workers + (not prefill))
        return self._made(before, after, attained(before.ttft, after.tpot))

    def _most(self, speed: Speed) -> int:
        return min(BOUND, self._stocks[speed.kind.device.name].count // speed.kind.gpus)

    def _pool(self, role: str, speed: Speed, workers: int) -> PlannedPool:
        key = role, speed.kind, workers
        if key not in self._pools:
            make = {"prefill": prefill_pool, "decode": decode_pool, "colocated": colocated_pool}[role]
            self._pools[key] = make(speed, workers, self.asked)
        return self._pools[key]

    def _least(self, role: str, speed: Speed) -> int | None:
        """The fewest workers that hold their own objectives often enough, whatever the other pool does."""
        key = role, speed.kind
        if key not in self._leasts:
            self._leasts[key] = self._fewest(role, speed)
        return self._leasts[key]

    def _fewest(self, role: str, speed: Speed) -> int | None:
        few, enough = self._floor(role, speed), self._most(speed)
        if few > enough or not self._holds(role, speed, enough):
            return None
        while few < enough:  # more workers never make it worse
            middle = (few + enough) // 2
            if self._holds(role, speed, middle):
                enough = middle
            else:
                few = middle + 1
        return enough

    def _holds(self, role: str, speed: Speed, workers: int) -> bool:
        pool = self._pool(role, speed, workers)
        chances = tuple(map(float.__mul__, pool.ttft, pool.tpot)) if role == "colocated" else pool.ttft or pool.tpot
        return sum(chances) >= self.asked.attainment * len(chances)

    def _floor(self, role: str, speed: Speed) -> int:
        """Fewer workers could not even compute all prompts, or all tokens."""
        traffic, stages = self.asked.traffic, speed.kind.stages
        if role == "decode":
            most = max(1, speed.most)
            load = traffic.rate * (traffic.output - 1) * speed.steps[most - 1] / most
        else:
            load = traffic.rate * sum(shared for _, shared in speed.prompts) / len(speed.prompts)
        return max(1, int(load / stages))

    def _colocated(self, speed: Speed) -> Configuration | None:
        workers = self._least("colocated", speed)
        if workers is None:
            return None
        pool = self._pool("colocated", speed, workers)
        return self._made(None, pool, attained(pool.ttft, pool.tpot))

    def _split(self, prefill: Speed, decode: Speed) -> Configuration | None:
        first, second = self._least("prefill", prefill), self._least("decode", decode)
        if first is None or second is None:
            return None
        traffic = self.asked.traffic
        moved = traffic.rate * traffic.prompt * (1 - traffic.cached) * prefill.kv_token_bytes
        first = max(first, ceil(moved / (LINK_USE * self.asked.link_bytes_per_s)))
        best: Configuration | None = None
        ceiling = self._most(decode)
        for prompts in range(first, self._most(prefill) + 1):
            before = self._pool("prefill", prefill, prompts)
            for decodes in range(second, ceiling + 1):
                after = self._pool("decode", decode, decodes)
                if (share := attained(before.ttft, after.tpot)) >= self.asked.attainment:
                    made = self._made(before, after, share)
                    best = min((one for one in (best, made) if one), key=lambda one: one.cost, default=None)
                    ceiling = decodes - 1
                    break
                if decodes > 2 * second + 16:
                    break
            if ceiling < second or prompts > 2 * first + 16:
                break
        return best

    def _made(self, prefill: PlannedPool | None, decode: PlannedPool, share: float) -> Configuration | None:
        """None: there are not so many GPUs."""
        cost = sum(pool.gpus * self._stocks[pool.kind.device.name].price for pool in (prefill, decode) if pool)
        made = Configuration(prefill, decode, share, cost)
        enough = all(made.gpus_of(stock.device) <= stock.count for stock in self._stocks.values())
        return made if enough else None


def spread(asked: Question, stocks: Sequence[Stock], like: Configuration) -> tuple[Configuration | None, Configuration | None]:
    """The same kinds of workers if all steps were as fast, or as slow, as the sheet's error allows (90 %): what one would need then.
    None: as many as there are would not do."""
    ends = []
    for slower in (exp(-Z * ERROR), exp(Z * ERROR)):
        kind = like.decode.kind
        search = Search(replace(asked, slower=slower), stocks, [kind.weight_bits], [kind.kv_bits])
        ends.append(search.again(like))
    return ends[0], ends[1]
