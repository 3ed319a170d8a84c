"""What is sent: requests of token ids, made from a seed. They hold no text; only a trace of text needs a tokenizer (`traces`).

    Item           one request
    Synthetic      draws prompts, answer lengths, shared prefixes and sessions
    scale          the same workload with longer or shorter prompts and answers; what was shared stays shared
    bound          the same workload without the requests that a context window cannot hold
    hit_rate       how much of the prompts a prefix cache could have held

A distribution on the command line (`parse_tokens`, `parse_seconds`):

    512                       always 512
    100-600                   uniform, both ends included
    lognormal:512:0.6         median 512, sigma 0.6 (standard deviation of the logarithm); mean = median * exp(sigma^2 / 2)
    lognormal:512:0.6:4096    the same, nothing above 4096
"""

import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

MAX_TOKENS = 1 << 20  # of one prompt or answer: more exceeds any context window, so it must be a typo, and could fill the memory
MAX_VOCAB = 1 << 24
MAX_SIGMA = 5.0  # e^5 already spreads two thirds of the draws over a factor of 22,000
MAX_SECONDS = 86_400.0


class WorkloadError(ValueError):
    """The workload cannot be made. Names the field, and if a file was read, the file and the line."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request to send."""

    tokens: tuple[int, ...]  # new prompt tokens of this turn (the session's earlier prompt and answers come before them)
    output_tokens: int  # exactly this many are requested
    session: str = ""  # items of one session are turns, in order; "" = a single request
    at: float | None = None  # seconds from the start, if the trace says; else the arrival process decides
    think_s: float = 0.0  # pause between the previous turn's answer and this turn (sessions only)


class Vocabulary:
    """The token ids that prompts are drawn from: `first_id` (above the special ones) up to but not including `vocab`."""

    def __init__(self, first_id: int, vocab: int) -> None:
        if not 0 <= first_id < vocab <= MAX_VOCAB:
            raise WorkloadError(f"vocab: there is no token id from {first_id} up to {vocab}; vocab is at most {MAX_VOCAB}")
        self.first_id = first_id
        self.vocab = vocab
        self._ids = list(range(first_id, vocab))  # all prompts share these objects: 8 bytes per token instead of 40

    def draw(self, rng: random.Random, count: int) -> tuple[int, ...]:
        return tuple(rng.choices(self._ids, k=count))


# Distributions of token counts and of seconds


@dataclass(frozen=True, slots=True)
class Fixed:
    value: float

    def tokens(self, rng: random.Random) -> int:
        return int(self.value)

    def seconds(self, rng: random.Random) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    low: float
    high: float

    def tokens(self, rng: random.Random) -> int:
        return rng.randint(int(self.low), int(self.high))

    def seconds(self, rng: random.Random) -> float:
        return rng.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    median: float
    sigma: float
    most: float  # larger draws become this

    def tokens(self, rng: random.Random) -> int:
        return max(1, round(self.seconds(rng)))

    def seconds(self, rng: random.Random) -> float:
        return min(self.most, self.median * math.exp(rng.normalvariate(0.0, self.sigma)))


Distribution = Fixed | Uniform | LogNormal

WHOLE = re.compile(r"[0-9]{1,12}")
DECIMAL = re.compile(r"[0-9]{1,12}(\.[0-9]+)?")


def parse_tokens(text: str, field: str) -> Distribution:
    """A distribution of token counts (or of turns): 1 to MAX_TOKENS. Raises a WorkloadError that names the field."""
    return _parse(text, field, WHOLE, 1, MAX_TOKENS)


def parse_seconds(text: str, field: str) -> Distribution:
    """A distribution of seconds: 0 to a day. Raises a WorkloadError that names the field."""
    return _parse(text, field, DECIMAL, 0, MAX_SECONDS)


def _parse(text: str, field: str, number: re.Pattern[str], least: float, most: float) -> Distribution:
    def value(part: str) -> float:
        if not number.fullmatch(part):
            kind = "whole number" if number is WHOLE else "number"
            raise WorkloadError(f"{field}: {part!r} in {text!r} is not a {kind}; write 512, 100-600 or lognormal:MEDIAN:SIGMA")
        if not least <= float(part) <= most:
            raise WorkloadError(f"{field}: {part} in {text!r} is not from {least:g} to {most:g}")
        return float(part)

    text = text.strip()
    name, colon, arguments = text.partition(":")
    if colon:
        parts = arguments.split(":")
        if name != "lognormal" or not 2 <= len(parts) <= 3:
            raise WorkloadError(f"{field}: {text!r} is not like 512, 100-600, lognormal:MEDIAN:SIGMA or lognormal:MEDIAN:SIGMA:MOST")
        if not DECIMAL.fullmatch(parts[1]) or not 0 < float(parts[1]) <= MAX_SIGMA:
            raise WorkloadError(f"{field}: sigma {parts[1]!r} in {text!r} is not a number above 0, at most {MAX_SIGMA:g}")
        median, highest = value(parts[0]), value(parts[2]) if len(parts) == 3 else most
        if median <= 0 or highest < median:
            raise WorkloadError(f"{field}: the median in {text!r} is not above 0 and at most {highest:g}")
        return LogNormal(median, float(parts[1]), highest)
    low, dash, high = text.partition("-")
    if not dash:
        return Fixed(value(low))
    if value(low) > value(high):
        raise WorkloadError(f"{field}: {text!r} runs downwards")
    return Uniform(value(low), value(high))


# Synthetic


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A workload drawn from distributions. The same seed yields the same items, and a shorter list is the beginning of a longer one.
    Lengths, paths and token ids come from separate random generators: another `hit_rate` changes neither the lengths nor the sessions.

    Shared prefixes form a tree. `prefix_depth` levels hang below an empty root; every node has `prefix_branching` children and holds
    `prefix_tokens` tokens. A prompt that opens a session (or is a single request) follows one path, chosen uniformly, takes some whole
    levels from its top, and continues with at least one token of its own. Branching 1 is one system prompt; branching 8 and depth 2 are
    eight applications with eight documents each.

    `hit_rate` is the share that a prefix cache that never forgets would reuse, to the token:

        sum over opening prompts of the longest prefix shared with an earlier opening prompt
        / sum over opening prompts of their tokens

    Later turns do not count: they repeat their own session's past, which comes on top and depends on the answers. The first visit to a node
    is a miss, which later prompts make up for, so a list that is short relative to the tree stays below the rate; `hit_rate(items)` returns
    the actual one. Each prompt takes as many levels as bring the running rate nearest to the requested one.

    The length of a later turn is drawn from `prompt`, too. All items of a session follow one another in the list.
    Raises WorkloadError, also if no number of requests could reach the hit rate.
    """

    prompt: Distribution  # tokens
    output: Distribution  # tokens
    first_id: int
    vocab: int
    hit_rate: float = 0.0
    prefix_depth: int = 1
    prefix_branching: int = 1
    prefix_tokens: int = 256
    turns: Distribution = Fixed(1)  # requests in a session
    think: Distribution = Fixed(0)  # seconds

    def __post_init__(self) -> None:
        for field in ("prefix_depth", "prefix_branching", "prefix_tokens"):
            if not 1 <= getattr(self, field) <= MAX_TOKENS:
                raise WorkloadError(f"{field}: {getattr(self, field)} is not from 1 to {MAX_TOKENS}")
        if not 0 <= self.hit_rate < 1:
            raise WorkloadError(f"hit_rate: {self.hit_rate!r} is not from 0 up to, but not including, 1")
        Vocabulary(self.first_id, self.vocab)
        if self.hit_rate > 0 and self.hit_rate > (reach := self._reach()):
            raise WorkloadError(
                f"hit_rate: {self.hit_rate:g} is out of reach; with these prompts {self.prefix_depth} levels of {self.prefix_tokens} "
                f"tokens give at most {reach:.2f}"
            )

    def items(self, count: int, seed: int) -> list[Item]:
        """`count` requests; the last session may be cut short."""
        if count < 0:
            raise WorkloadError(f"count: {count} is negative")
        items: list[Item] = []
        for item in self._draw(seed):
            if len(items) == count:
                break
            items.append(item)
        return items

    def _draw(self, seed: int) -> Iterator[Item]:
        vocabulary = Vocabulary(self.first_id, self.vocab)
        lengths, own = random.Random(f"{seed} lengths"), random.Random(f"{seed} tokens")
        tree = _PrefixTree(self, vocabulary, seed)
        session = 0
        while True:
            turns = self.turns.tokens(lengths)
            name = f"s{session}" if turns > 1 else ""
            for turn in range(turns):
                prompt, output = self.prompt.tokens(lengths), self.output.tokens(lengths)
                think = self.think.seconds(lengths) if turn else 0.0
                prefix = tree.prefix(prompt) if turn == 0 else ()
                yield Item(prefix + vocabulary.draw(own, prompt - len(prefix)), output, name, think_s=think)
            session += 1

    def _reach(self) -> float:
        """Share of the prompts that whole levels can fill, estimated from 4,096 draws."""
        rng = random.Random(0)
        prompts = [self.prompt.tokens(rng) for _ in range(4096)]
        return sum(_levels(self, prompt) * self.prefix_tokens for prompt in prompts) / sum(prompts)


def _levels(workload: Synthetic, prompt_tokens: int) -> int:
    """Whole levels that fit and leave the prompt a token of its own."""
    return min(workload.prefix_depth, (prompt_tokens - 1) // workload.prefix_tokens)


class _PrefixTree:
    """Hands out prefixes so that the hit rate so far stays near the requested one."""

    def __init__(self, workload: Synthetic, vocabulary: Vocabulary, seed: int) -> None:
        self._workload = workload
        self._vocabulary = vocabulary
        self._seed = seed
        self._paths = random.Random(f"{seed} paths")
        self._nodes: dict[tuple[int, ...], tuple[int, ...]] = {}  # path from the root -> tokens of a node that was handed out before
        self._total = 0  # tokens of the prompts so far
        self._hits = 0  # of them, tokens of nodes handed out before

    def prefix(self, prompt_tokens: int) -> tuple[int, ...]:
        workload = self._workload
        self._total += prompt_tokens
        wanted = workload.hit_rate * self._total - self._hits
        levels = max(0, min(_levels(workload, prompt_tokens), round(wanted / workload.prefix_tokens)))
        path = tuple(self._paths.randrange(workload.prefix_branching) for _ in range(workload.prefix_depth))
        tokens: tuple[int, ...] = ()
        for depth in range(1, levels + 1):
            node = path[:depth]
            if node in self._nodes:  # then its parents are, too: prefixes are handed out from the top
                self._hits += workload.prefix_tokens
            else:
                self._nodes[node] = self._vocabulary.draw(random.Random(f"{self._seed} node {node}"), workload.prefix_tokens)
            tokens += self._nodes[node]
        return tokens


# Operations on any list of items


def scale(items: Iterable[Item], factor: float) -> list[Item]:
    """Prompts and answers `factor` times as long, each at least one token. Sessions, times and think times stay.

    Token j of a scaled prompt is token floor(j / factor) of the old one, so a beginning of the new prompt depends only on a beginning of
    the old one. Two prompts that shared their first L tokens share their first L * factor (rounded up), at any factor and whatever made
    them: tree levels and Mooncake's blocks shrink in place, and the hit rate stays about the same. A factor above 1 repeats tokens.
    Raises WorkloadError for a factor that is not finite and above 0, or a result of more than MAX_TOKENS."""
    return [scaled(item, factor) for item in items]


def scaled(item: Item, factor: float) -> Item:
    """One item of `scale`."""
    if not (math.isfinite(factor) and factor > 0):
        raise WorkloadError(f"scale: {factor!r} is not a finite number above 0")
    if factor == 1:
        return item
    prompt, output = max(1, round(len(item.tokens) * factor)), max(1, round(item.output_tokens * factor))
    if max(prompt, output) > MAX_TOKENS:
        raise WorkloadError(f"scale: {factor:g} makes a request of {prompt} + {output} tokens; at most {MAX_TOKENS} each")
    last = len(item.tokens) - 1
    return replace(item, tokens=tuple(item.tokens[min(last, int(j / factor))] for j in range(prompt)), output_tokens=output)


@dataclass(frozen=True, slots=True)
class Bounded:
    items: tuple[Item, ...]
    dropped: int


def bound(items: Iterable[Item], max_tokens: int) -> Bounded:
    """The items whose context, answer included, is at most `max_tokens`. For a turn, the context is the whole session so far.

    Longer items are dropped, not cut, so the workload contains every request exactly as it is sent. A session ends before the first turn
    that does not fit, because later turns refer to it. Raises WorkloadError if no request fits into `max_tokens` (less than 2)."""
    window = ContextWindow(max_tokens)
    kept, dropped = [], 0
    for item in items:
        if window.admits(item):
            kept.append(item)
        else:
            dropped += 1
    return Bounded(tuple(kept), dropped)


class ContextWindow:
    """The rule of `bound`, one item at a time."""

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 2:
            raise WorkloadError(f"max_tokens: {max_tokens} has no room for a prompt and an answer")
        self._max_tokens = max_tokens
        self._context: dict[str, int] = {}  # session -> tokens so far

    def admits(self, item: Item) -> bool:
        context = self._context.get(item.session, 0) + len(item.tokens) + item.output_tokens
        if item.session:
            self._context[item.session] = context  # a refused turn counts too, so all later turns are refused
        return context <= self._max_tokens


def hit_rate(items: Iterable[Item], block: int = 1) -> float:
    """Share of the opening prompts' tokens that an unlimited prefix cache of whole blocks of `block` tokens would have held (`Synthetic`
    has the definition, for `block` 1). 0 for no items. Memory grows with the number of different blocks."""
    children: dict[tuple[int, Sequence[int]], int] = {}  # (node, tokens) -> node; 0 is the root
    seen: set[str] = set()
    total = hits = 0
    for item in items:
        if item.session in seen:
            continue
        if item.session:
            seen.add(item.session)
        total += len(item.tokens)
        node = 0
        for start in range(0, len(item.tokens) - block + 1, block):
            edge = (node, item.tokens[start : start + block])
            hits += block if edge in children else 0  # a new node has no children, so no hit follows a miss
            node = children.setdefault(edge, len(children) + 1)
    return hits / total if total else 0.0
