"""Why tokens of a prompt were computed although prompts are cached. Pure.

A prompt is a chain of blocks, so the causes stand one behind another, and their tokens add up to what was not cached:

    tokens of the prompt   0 ── delivered ── promised ── reachable ── remembered ── full ── all
    what they were           cached   broken      elsewhere    lost       new    partial

    delivered     what the worker that computed the prompt found in a cache
    promised      what it was thought to hold, or to fetch, when it was chosen
    reachable     what any worker was thought to hold then
    remembered    how far earlier prompts of this router began in the same way (`History`)
    full          the blocks that can be cached: a last token is always computed

Each has causes of its own (`baton.uncached`). Keys are rooted in the salt, so another tenant's prompts are never
compared with; that a prompt is known under another salt is said only of salts of the same tenant.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any

from baton.engine.core.block_key import block_key, root_key
from baton.uncached import Cause
from router.chat_map import ChatMap
from router.policy import Cached, Choice, Identity
from router.served import ServedModel

REMEMBERED = 262_144  # keys in each of two generations: at most 80 MB in all
_GREW = 1  # another key followed


@dataclass(frozen=True, slots=True)
class Sought:
    """What was known when the worker was chosen that computes the prompt. In blocks. (When it has been computed, prompts that were sent
    with it may have changed what is known.)"""

    worker: Identity
    promised: int = 0
    reachable: int = 0
    remembered: int = 0  # at least as many as reachable
    broken: Cause = "stale"  # why it would deliver less than promised
    elsewhere: Cause = "busy"  # why no more was promised than is reachable
    lost: Cause = "evicted"  # why no more was reachable than is remembered
    beyond: Cause = "new"  # why no more is remembered
    holder: str = ""  # of what is reachable


@dataclass(frozen=True, slots=True)
class Uncached:
    """Counts of tokens; see the head of this file. The sum of `causes` is what was computed."""

    promised: int
    reachable: int
    causes: tuple[tuple[Cause, int], ...]
    holder: str = ""  # the worker that held what was reachable, if that was more than was promised
    changed_at: int | None = None  # with the cause `changed`: the first token that can differ; one of its block does
    changed_message: int | None = None  # the message of that chat which can differ

    @property
    def tokens(self) -> int:
        """That were computed."""
        return sum(tokens for _, tokens in self.causes)

    def to_json(self) -> dict[str, Any]:
        """The members of a `CacheReport`."""
        return {
            "promised_tokens": self.promised,
            "reachable_tokens": self.reachable,
            "uncached": [{"cause": cause, "tokens": tokens} for cause, tokens in self.causes],
            "holder": self.holder,
            "changed_at": self.changed_at,
            "changed_message": self.changed_message,
        }


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Sequence[int]  # output may follow
    length: int  # tokens of the prompt
    keys: Sequence[bytes]  # of its full blocks, at least
    tenant: str = ""
    salt: str = ""
    scored: bool = False  # all of it was computed, to tell what the model says of it
    chat_map: ChatMap | None = None  # of a chat


class Explainer:
    """Explains the prompts of one model."""

    def __init__(self, model: ServedModel, fetch_tokens: int, load_tokens: int, caching: bool) -> None:
        """`fetch_tokens`, `load_tokens`: see `router.policy.Terms`. `caching`: whether the workers keep what they computed."""
        self._model = model
        self._fetch_tokens, self._load_tokens = fetch_tokens, load_tokens
        self._caching = caching
        self._history = History()

    def seek(self, found: Choice, bypass: bool, keys: Sequence[bytes], failed: Collection[Identity]) -> Sought:
        """What is known when `found` is chosen to compute the prompt of these full blocks; for a bypass it is a decode worker. Call it
        before the prompt is predicted there."""
        record, most = self._model.members.record(found.worker), found.most or Cached(found.worker, found.overlap_blocks)
        promised = min(found.overlap_blocks, len(keys))
        reachable = max(promised, min(most.blocks, len(keys)))
        remembered, lost, beyond = self._history.recall(keys, reachable, self._model.processes())
        broken: Cause = "stale"
        if found.source is not None:
            broken = "unfetched"
        elif found.reason == "loaded prefix":
            broken = "unloaded"
        elif promised and self._model.index.is_predicted(found.worker, keys[promised - 1]):
            broken = "computing"
        elsewhere: Cause = "busy"
        if reachable > promised:
            elsewhere = self._why_elsewhere(found, most.worker, bypass, failed, (reachable - promised) * record.block_size)
        identity = record.name, record.incarnation
        return Sought(identity, promised, reachable, remembered, broken, elsewhere, lost, beyond, most.worker)

    def explain(self, asked: Prompt, sought: Sought, delivered: int) -> Uncached:
        """The prompt was computed, `delivered` tokens of it came from a cache."""
        served = self._model.served
        assert served is not None
        size, first = served.block_size, None
        keys = asked.keys[: (asked.length - 1) // size]
        if not self._caching or asked.scored:
            found = Uncached(0, 0, (("scored" if asked.scored else "off", asked.length - delivered),))
        else:
            beyond = self._history.beyond(keys, sought, delivered // size)
            found = explain(sought, beyond, len(keys), delivered, asked.length, size)
        if asked.chat_map is not None and (at := found.changed_at) is not None:
            found = replace(found, changed_message=asked.chat_map.message(asked.tokens, at, at + size))
        new = any(cause == "new" for cause, _ in found.causes)
        if asked.tenant and keys and (new or not self._history.is_fresh(keys[0])):  # else it is noted already
            first = block_key(root_key("", asked.tenant), asked.tokens[:size])
        if new and first is not None and self._history.other_salt(first, asked.salt):
            found = replace(found, causes=tuple(("salt" if cause == "new" else cause, tokens) for cause, tokens in found.causes))
        self._history.note(asked.keys[: asked.length // size], sought.worker, first, asked.salt, delivered // size)
        return found

    def _why_elsewhere(self, found: Choice, holder: str, bypass: bool, failed: Collection[Identity], gain: int) -> Cause:
        """`gain`: tokens that the holder has, and that were not promised."""
        if holder == found.worker:  # in its own tiers; who decodes loads from them, too, where that was not what it was chosen for
            return "unloaded" if found.source is None and gain > self._load_tokens else "dearer"
        if any(name == holder for name, _ in failed):
            return "failed"
        peers = self._model.decode_workers() if bypass else self._model.prefill_workers()
        if any(record.name == holder for record in peers):
            return "busy"
        if all(record.name != holder for record in (*self._model.prefill_workers(), *self._model.decode_workers())):
            return "unusable"
        if bypass or gain <= self._fetch_tokens or not self._fetch_tokens:
            return "dearer"
        return "unlent"


class History:
    """The prompts that were computed lately: which worker did, by block, and how each went on. Bounded."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._young: dict[bytes, int] = {}  # key → number of the worker, times 2, and _GREW
        self._old: dict[bytes, int] = {}
        self._salts: tuple[dict[bytes, str], dict[bytes, str]] = {}, {}  # first block under the tenant alone → salt
        self._workers: list[Identity] = []
        self._numbers: dict[Identity, int] = {}

    def find(self, key: bytes) -> int | None:
        found = self._young.get(key)
        return self._old.get(key) if found is None else found

    def is_fresh(self, key: bytes) -> bool:
        """Whether a prompt with it was noted lately."""
        return key in self._young

    def depth(self, keys: Sequence[bytes], start: int) -> int:
        """How many leading keys are known, if the first `start` are."""
        young, old = self._young, self._old
        for place in range(start, len(keys)):
            if keys[place] not in young and keys[place] not in old:
                return place
        return max(start, len(keys))

    def worker(self, key: bytes) -> Identity:
        """The last that had the block. The key must be known."""
        found = self.find(key)
        assert found is not None
        return self._workers[found >> 1]

    def recall(self, keys: Sequence[bytes], reachable: int, current: Collection[Identity]) -> tuple[int, Cause, Cause]:
        """See `Sought`: remembered, lost, beyond. `keys`: of the blocks that can be cached, `current`: the processes there are."""
        depth = self.depth(keys, reachable)
        gone = depth > reachable and self.worker(keys[reachable]) not in current
        return depth, "restarted" if gone else "evicted", self._after(keys, depth)

    def beyond(self, keys: Sequence[bytes], sought: Sought, found: int) -> Cause:
        """Why no more is remembered than that, or than was `found`, when the prompt has been computed. What an earlier prompt has in common
        with it may be known only now; but a prompt that was sent with it and is the same tells nothing."""
        place = max(sought.remembered, found)
        if place >= len(keys) or (place == sought.remembered and sought.beyond != "new"):
            return sought.beyond
        return self._after(keys, place) if self.find(keys[place]) is None else "new"

    def _after(self, keys: Sequence[bytes], place: int) -> Cause:
        """What a block is that no prompt is known to have there."""
        before = self.find(keys[place - 1]) if place else None
        if before is None:
            return "new"
        return "changed" if before & _GREW else "grown"

    def note(self, keys: Sequence[bytes], worker: Identity, first: bytes | None, salt: str, cached: int = 0) -> None:
        """A prompt of these full blocks was computed, but for the first `cached`. `first`: its first block under the tenant alone."""
        if not keys:
            return
        young, value = self._young, self._number(worker) << 1
        cached = min(cached, len(keys))
        if cached and {young.get(keys[0], -2) >> 1, young.get(keys[cached - 1], -2) >> 1} == {value >> 1}:  # and so those between
            young[keys[cached - 1]] |= cached < len(keys)
        else:
            cached = 0
        if cached < len(keys):
            last = (self.find(keys[-1]) or 0) & _GREW
            young.update(zip(islice(keys, cached, None), repeat(value | _GREW)))
            young[keys[-1]] = value | last
        if len(self._young) > self._most:
            self._young, self._old = {}, self._young
        if first is not None:
            self._salts[0][first] = salt
            if len(self._salts[0]) > self._most // 16:
                self._salts = {}, self._salts[0]

    def other_salt(self, first: bytes, salt: str) -> bool:
        return any(salts.get(first, salt) != salt for salts in self._salts)

    def _number(self, worker: Identity) -> int:
        number = self._numbers.get(worker)
        if number is None:
            number = self._numbers[worker] = len(self._workers)
            self._workers.append(worker)
        return number


def explain(sought: Sought, beyond: Cause, full: int, delivered: int, length: int, block_size: int) -> Uncached:
    """`beyond`: see `History`. `full`: how many blocks can be cached. `delivered` and `length` in tokens."""
    causes = list[tuple[Cause, int]]()
    at = delivered

    def until(cause: Cause, blocks: int) -> None:
        nonlocal at
        if blocks * block_size > at:
            causes.append((cause, blocks * block_size - at))
            at = blocks * block_size

    until(sought.broken, sought.promised)
    until(sought.elsewhere, sought.reachable)
    until(sought.lost, sought.remembered)
    changed_at = at // block_size * block_size if beyond == "changed" and at < full * block_size else None
    until(beyond, full)
    if length > at:
        causes.append(("partial", length - at))
    holder = sought.holder if sought.reachable > sought.promised else ""
    return Uncached(sought.promised * block_size, sought.reachable * block_size, tuple(causes), holder, changed_at)
