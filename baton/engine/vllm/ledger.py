"""What the ranks copy in a step, and when a job's staged blocks are no longer touched. For the scheduler side of the connector; it decides
and does nothing else.

matched    how many positions vLLM need not compute, because their KV is staged
allocated  vLLM has blocks for them: their copies begin with this step, and the request is in none until they have landed
received   they have, on every rank
step       the blocks of prompts that this step fills are copied beside its forward
landed     the step is over on every rank
finished   the request has left vLLM, for whatever reason
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

KEY = "baton"  # under which an order lies in kv_transfer_params, and the link's address in the connector's configuration
PUBLISHER = "baton"  # vLLM's name for our receiver of block events
Pairs = list[tuple[int, int]]  # (staged block, vLLM's block)


@dataclass(frozen=True, slots=True)
class Order:
    """What our process says of a request. It travels in the request's `kv_transfer_params`."""

    job: str
    blocks: tuple[int, ...]  # staged
    load: int  # positions whose KV is in `blocks`
    save: int  # positions whose KV is to be copied to `blocks`

    def pack(self) -> dict[str, Any]:
        return {"job": self.job, "blocks": list(self.blocks), "load": self.load, "save": self.save}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> Self:
        return cls(packed["job"], tuple(packed["blocks"]), packed["load"], packed["save"])


@dataclass(eq=False, slots=True)
class LedgerEntry:
    request_id: str
    order: Order
    saved: int = 0  # leading blocks that were copied out, or will be in a step under way
    cached: int = 0
    loaded: int | None = None  # positions that vLLM took from staged blocks; None: not decided yet
    loading: bool = False  # they are being copied
    started: bool = False
    gone: bool = False
    last_step: int = 0  # the last step that saves for this job


@dataclass(slots=True)
class StepPlan:
    number: int
    loads: dict[str, Pairs] = field(default_factory=dict)  # by vLLM's id of the request
    saves: Pairs = field(default_factory=list)


@dataclass(slots=True)
class StepNews:
    started: list[tuple[str, int, int]] = field(default_factory=list)  # job, positions from the prefix cache, from staged blocks
    staged: list[tuple[str, int]] = field(default_factory=list)  # job, its leading blocks that can be read
    closed: list[str] = field(default_factory=list)


class JobLedger:
    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._entries: dict[str, LedgerEntry] = {}  # by vLLM's id of the request
        self._loads: dict[str, Pairs] = {}  # that begin with the step that is being planned
        self._steps = 0
        self._under_way: dict[int, StepNews] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def arrived(self, request_id: str, order: Order) -> None:
        self._entries[request_id] = LedgerEntry(request_id, order)

    def matched(self, request_id: str, computed: int) -> int:
        """Positions beyond `computed`, a multiple of the block size. vLLM asks at every attempt to schedule a request, so
        the answer stays the same until `allocated`."""
        entry = self._entries.get(request_id)
        if entry is None or entry.loaded is not None:  # a preempted request is computed again: its staged blocks are given back
            return 0
        entry.cached = computed
        return max(0, entry.order.load - computed)

    def allocated(self, request_id: str, block_ids: Sequence[int], loaded: int) -> None:
        """vLLM will run the request with these blocks; it takes `loaded` positions from staged blocks."""
        entry = self._entries.get(request_id)
        if entry is None or entry.loaded is not None:
            return
        entry.loaded = loaded
        if loaded:
            first, end = entry.cached // self._size, -(-(entry.cached + loaded) // self._size)
            self._loads[request_id] = list(zip(entry.order.blocks[first:end], block_ids[first:end], strict=True))
            entry.loading = True

    def received(self, request_ids: Iterable[str]) -> list[str]:
        """What these requests loaded is there. Returns the jobs that are closed with it: their requests have left."""
        news = StepNews()
        for entry in [self._entries[request_id] for request_id in request_ids]:
            entry.loading = False
            if entry.gone:
                self._close(entry, news)
        return news.closed

    def step(self, computed: Mapping[str, int], block_ids: Callable[[str], Sequence[int]]) -> StepPlan:
        """`computed`: positions of each request in this step that have KV after it."""
        self._steps += 1
        plan, news = StepPlan(self._steps, self._loads), StepNews()
        self._loads = {}
        for request_id, positions in computed.items():
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            if not entry.started:
                entry.started = True
                news.started.append((entry.order.job, entry.cached, entry.loaded or 0))
                if not entry.order.save:
                    news.closed.append(entry.order.job)
            self._save(request_id, entry, positions, block_ids, plan, news)
        self._under_way[plan.number] = news
        return plan

    def landed(self, number: int) -> StepNews:
        """Every rank has done what the plan said."""
        news = self._under_way.pop(number)
        for entry in [entry for entry in self._entries.values() if entry.gone and not entry.loading and entry.last_step <= number]:
            self._close(entry, news)
        return news

    def finished(self, request_id: str) -> list[str]:
        """Returns the job, which is closed now if it was not before; []: something still copies for it."""
        entry = self._entries.get(request_id)
        if entry is None:
            return []
        entry.gone = True
        if entry.loading or entry.last_step in self._under_way:
            return []
        news = StepNews()
        self._close(entry, news)
        return news.closed

    def _save(
        self, request_id: str, entry: LedgerEntry, positions: int, block_ids: Callable[[str], Sequence[int]], plan: StepPlan, news: StepNews
    ) -> None:
        order = entry.order
        whole = positions >= order.save
        full = -(-order.save // self._size) if whole else positions // self._size
        if not order.save or full <= entry.saved:
            return
        theirs = block_ids(request_id)
        plan.saves += zip(order.blocks[entry.saved : full], theirs[entry.saved : full], strict=True)
        entry.saved, entry.last_step = full, plan.number
        if whole:
            news.closed.append(order.job)
        else:
            news.staged.append((order.job, full))

    def _close(self, entry: LedgerEntry, news: StepNews) -> None:
        del self._entries[entry.request_id]
        if entry.order.job not in news.closed:
            news.closed.append(entry.order.job)
