"""What a worker asks of an engine. Four behaviours stand behind it: our own engine (`baton.engine.core.loop`) with a real model or the toy,
vLLM (`baton.engine.vllm`), and our own in virtual time (`baton.simulate.engine`). One suite, tests/support/engine_contract.py, holds for
all of them.

A sequence that this engine computes      add → outputs … → finish
one whose KV a peer will read             the same with `hold`: it stays after its first token, until `abort` or `forget`
one whose KV comes from a peer            reserve → (the KV is copied into `seq.blocks` of `pool`) → adopt → outputs …
                                          or give_up: the engine computes the KV itself
several for one prompt                    the same with `forks`

`pool` is the memory that peers read and that fetched KV is copied into. Whether the model computes in it, or the engine copies between it
and memory of its own, is the engine's business: `seq.blocks` always means blocks of `pool`.

Methods that take blocks away from a sequence append them to a list that the caller gives, while the command runs: a caller that is
cancelled meanwhile still has them.
"""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, Protocol

from baton.engine.core.block_key import MAX_EVENT_KEYS
from baton.engine.core.blocks import BlockContent, CacheChange
from baton.engine.core.counts import Counts
from baton.engine.core.engine import Output
from baton.engine.core.grammar import Grammar
from baton.engine.core.kvcache import Pool
from baton.engine.core.masks import Matcher
from baton.engine.core.sequence import Sequence
from baton.engine.core.speculation import NOTHING_OFFERED, Offer
from baton.engine.core.thinking import ThinkingBudget


class Grammars(Protocol):
    """What prepares grammars for an engine, and what closes its thinking."""

    async def ready(self, grammar: Grammar | None, output: Seq[int], thinking: ThinkingBudget | None = None) -> Matcher:
        """Prepares a grammar, a budget, or both. `output`: what there is already. Raises GrammarRefused, also if the output does not match,
        or GrammarsBusy."""
        ...


def taken(forks: list[Sequence] | None) -> tuple[Sequence, ...]:
    """Those of a command that is given now."""
    if not forks:
        return ()
    now = tuple(forks)
    forks.clear()
    return now


class EngineStopped(RuntimeError):
    """The engine was closed or has failed: the command did not and will not run."""


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A run of keys that the prefix cache gained ("stored") or lost ("removed"). Numbered from 1 without gap."""

    sequence: int
    kind: Literal["stored", "removed"]
    keys: tuple[bytes, ...]
    medium: str
    contents: tuple[BlockContent | None, ...] = ()  # of stored blocks, if the engine describes them


def cache_events(changes: Seq[CacheChange], after: int) -> list[CacheEvent]:
    """Changes of the prefix cache in order, as runs of one kind and medium, MAX_EVENT_KEYS at most. `after`: the number of the event
    before."""
    if len(changes) == 1:  # most steps that change anything fill one block
        stored, key, medium, content = changes[0]
        return [CacheEvent(after + 1, "stored" if stored else "removed", (key,), medium, () if content is None else (content,))]
    events: list[CacheEvent] = []
    for (stored, medium), run in itertools.groupby(changes, key=attrgetter("stored", "medium")):
        whole = list(run)
        for start in range(0, len(whole), MAX_EVENT_KEYS):
            _, keys, _, contents = zip(*whole[start : start + MAX_EVENT_KEYS], strict=True)
            after += 1
            events.append(CacheEvent(after, "stored" if stored else "removed", keys, medium, contents if any(contents) else ()))
    return events


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's load at one moment."""

    running: int
    waiting: int
    waiting_tokens: int  # known and not computed
    free_blocks: int  # free or evictable
    cached_blocks: int
    owned_blocks: int
    sequences: int
    credit_tokens: int
    counts: Counts


@dataclass(frozen=True, slots=True)
class Traits:
    """What does not change while an engine lives."""

    model_fingerprint: str  # equal: one engine can go on with the other's streams and KV
    tokenizer_fingerprint: str
    max_model_len: int
    max_num_seqs: int
    num_blocks: int  # of the memory that sequences compute in
    eos_token_ids: frozenset[int]
    lends: bool  # whether `pin` can find cached blocks for a peer
    offer: Offer = NOTHING_OFFERED  # of guesses
    matrices: str = ""  # see `baton.engine.core.protocol.Runner`
    brings: bool = False  # whether `bring` can find blocks in tiers


@dataclass(frozen=True, slots=True)
class Listener:
    """The callbacks of an engine. The first three are called on the event loop that was current when the engine started."""

    on_step: Callable[[list[Output]], None]
    on_cache: Callable[[list[CacheEvent]], None]
    # Called once. The engine's memory is then in doubt: it runs nothing more, and the process must exit.
    on_failure: Callable[[BaseException], None]
    # (seconds, tokens, sequences) of a step that computed something; called in another thread, perhaps. It must not wait.
    on_batch: Callable[[float, int, int], None] = lambda seconds, tokens, sequences: None


class ServingEngine(Protocol):
    """An engine and the thread or the processes that run it. Commands run between two steps and raise EngineStopped when it has ended."""

    @property
    def pool(self) -> Pool: ...

    @property
    def traits(self) -> Traits: ...

    async def add(self, seq: Sequence, forks: list[Sequence] | None = None) -> None:
        """Queues a sequence. Raises `SequenceRefused`, and then keeps nothing of it.

        `forks`: sequences with the same prompt and no output. The engine computes the prompt once, if it can, and each goes on from there;
        if it cannot, because it lacks room, because `seq` left early, or because it does not share memory, they run all the same. Each has
        outputs of its own and is aborted by itself. The list is emptied when the command is given: what
        is still in it the engine does not know.
        """
        ...

    async def reserve(self, seq: Sequence) -> bool:
        """Reserves room for KV that comes from a peer, to be copied into `seq.blocks` from position `seq.computed` on. Returns False while
        there is no room: call again, or `abort`. Raises `SequenceRefused`."""
        ...

    async def adopt(self, seq: Sequence, end: int | None = None, first: int | None = None, forks: list[Sequence] | None = None) -> None:
        """The reserved blocks hold the KV up to position `end` (None: nothing was copied); the engine computes what is pending. `first` is
        a token that became known meanwhile. `forks`: as in `add`."""
        ...

    async def give_up(self, seq: Sequence, filling: list[int], first: int | None = None, forks: list[Sequence] | None = None) -> None:
        """The KV does not come: the engine computes it. `filling` gets the blocks that were reserved; the caller releases them once no byte
        can land in them. `first` and `forks`: as in `adopt`. Raises `SequenceRefused` if nothing was reserved and the queue is full."""
        ...

    async def abort(self, seq_id: str, filling: list[int]) -> None:
        """Forgets a sequence in any state, also one that it does not have. `filling`: as in `give_up`."""
        ...

    def forget(self, seq_id: str) -> None:
        """`abort` of a sequence for which nothing was reserved, without waiting: for clean-up, which must not be cancelled."""
        ...

    async def pin(self, keys: Seq[bytes], pinned: list[int]) -> None:
        """Appends the cached blocks of the longest known prefix of `keys`, for a peer to read. The caller releases them."""
        ...

    async def bring(self, keys: Seq[bytes], wait_s: float, rival_s: float | None = None, hint: bool = False) -> int:
        """Loads into the prefix cache what tiers hold of a prefix, `keys`, beyond it, as far as that is sooner than computing it, or than
        `rival_s` for a block. Returns how many blocks have come, after `wait_s` at most. A caller that is cancelled ends its load. `hint`:
        nobody may come for it, so it counts as saved only when somebody does."""
        ...

    async def release(self, blocks: Seq[int]) -> None:
        """Gives back blocks from `give_up`, `abort` or `pin`."""
        ...

    def release_soon(self, blocks: Seq[int]) -> None:
        """`release` without waiting."""
        ...

    async def look(self) -> EngineLoad: ...

    async def snapshot(self) -> tuple[int, dict[str, list[bytes]]]:
        """The number of the last cache event, and the keys that each medium holds after it; the device is always one."""
        ...

    def activity(self) -> tuple[int, float | None, float | None]:
        """(number of steps and commands so far; start of the one under way, on the monotonic clock, None at rest; processor seconds of the
        engine's thread, None where they are not known, always the same where a device computes). Never waits."""
        ...

    async def close(self) -> None:
        """Stops after the step in flight. Drops the running sequences and refuses the commands that wait."""
        ...
