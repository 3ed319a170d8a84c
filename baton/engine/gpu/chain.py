"""Drafts on a device: several steps of what drafts, each of which computes the token that the step before it has drawn.

The device goes from step to step on its own. What changes is in tensors at fixed addresses: after each step a kernel puts what was drawn
into a list, and its position, slot and noise before the next step. So a draft of k tokens takes one upload, k launches of captured graphs,
and one wait. There are two graphs for each number of sequences: the first step, which also computes the tokens that have no keys and values
yet, and any further one; each once with argmax and once with the draw of `baton.engine.gpu.sampler`, whose noise is that of the position.

Attention that plans its steps on the host (`TorchAttention`) gets them one by one.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.core.sampling import GREEDY_BELOW, SamplingParams, noise_key
from baton.engine.gpu.attention import DeviceAttention
from baton.engine.gpu.device import Mark, upload
from baton.engine.gpu.graphs import Compute
from baton.engine.gpu.inputs import DeviceStep, Following, Inputs, TokenRun
from baton.engine.gpu.sampler import Filters, Pick

SIZES = (1, 2, 4, 8, 16, 32, 64)  # sequences that a graph drafts for
NO_LIMIT = 1 << 62  # of tokens that top-k leaves
ALIGNED = 64  # bytes from one array of an upload to the next


class DraftLane(NamedTuple):
    """A sequence that is drafted for."""

    run: TokenRun  # its last tokens, as far as they have no KV, the last known one in any case
    last: int  # the last position that it has a block for
    params: SamplingParams
    known: int  # its tokens
    states: Seq[int] = ()  # for each token of the run, where the hidden state before it is; see `Model`


class Model(Protocol):
    """What drafts."""

    def __call__(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, attention: DeviceAttention, rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens and positions `[T]`, the hidden states before them `[T, H]` → of the tokens at `rows` `[R]` the logits `[R, V]`, and the
        hidden states, if it reads any."""
        ...


@dataclass(frozen=True, slots=True)
class ChainParts:
    """What a chain is made of."""

    model: Model
    attention: DeviceAttention
    inputs: Inputs
    pick: Pick
    capture: Callable[[Compute], Compute]
    bound: int  # steps at most
    wide: int  # tokens of a sequence that the first step computes, at most
    others: int  # other choices of the first token that are told
    states: Tensor | None = None  # [*, H]: known hidden states, the last of which is zero; None: the model reads none


class Chain:
    """Drafts for any number of sequences."""

    def __init__(self, how: ChainParts) -> None:
        self._how = how
        self._graphs: dict[tuple[int, bool], Captured] = {}
        if how.attention.capturable:
            most = how.inputs.capacity.max_num_seqs
            self._sizes = [size for size in SIZES if size < most] + [min(most, SIZES[-1])]
            for size in reversed(self._sizes):
                for greedy in (True, False):
                    self._graphs[size, greedy] = Captured(how, size, greedy)

    @torch.inference_mode()
    def draft(self, lanes: Seq[DraftLane], steps: int) -> tuple[list[list[int]], list[list[int]]]:
        """Drafts `steps` tokens for each of `lanes`, and the other choices of the first of them."""
        if not self._graphs:
            return self._one_by_one(lanes, steps)
        drafts, others = list[list[int]](), list[list[int]]()
        for at in range(0, len(lanes), self._sizes[-1]):
            some = lanes[at : at + self._sizes[-1]]
            greedy = all(lane.params.temperature < GREEDY_BELOW for lane in some)
            found = self._graphs[next(size for size in self._sizes if size >= len(some)), greedy].draft(some, steps)
            drafts += found[: len(some), :steps].tolist()
            others += found[: len(some), self._how.bound :].tolist()
        return drafts, others

    def _one_by_one(self, lanes: Seq[DraftLane], steps: int) -> tuple[list[list[int]], list[list[int]]]:
        how, drafts, others = self._how, [list[int]() for _ in lanes], list[list[int]]()
        going, runs = [*range(len(lanes))], [lane.run for lane in lanes]
        hidden = None if how.states is None else how.states[[state for lane in lanes for state in lane.states]]
        for count in range(steps):
            order = sorted(going, key=lambda i: len(runs[i].tokens) > 1)
            step = how.inputs.prepare_runs([runs[i]._replace(apart=len(runs[i].tokens) == 1) for i in order])
            how.attention.begin(step)
            if hidden is not None:
                hidden = hidden[_rows_of([runs[i] for i in going], [going.index(i) for i in order])]
            ends = np.cumsum([len(runs[i].tokens) for i in order]) - 1
            rows = torch.tensor([int(ends[order.index(i)]) for i in going], device=how.inputs.device)
            logits, hidden = how.model(step.tokens, hidden, step.positions, how.attention, rows)
            keys = [noise_key(lanes[i].params.seed, lanes[i].known + count) for i in going]
            filters = filters_of([lanes[i].params for i in going], keys, logits.shape[1], how.inputs.device)
            found, more = choices(logits, partial(_pick, how.pick, filters), 0 if count else how.others)
            others = others or more.T.tolist()
            for i, token in zip(going, found.tolist(), strict=True):
                drafts[i].append(token)
                runs[i] = TokenRun(runs[i].key, runs[i].end, drafts[i][-1:], runs[i].blocks, True, runs[i].end)
            left = [at for at, i in enumerate(going) if runs[i].start <= lanes[i].last]
            if not left:
                break
            going, hidden = [going[at] for at in left], None if hidden is None else hidden[left]
        return drafts, others


class Captured:
    """The graphs of one number of sequences."""

    def __init__(self, how: ChainParts, size: int, greedy: bool) -> None:
        self._how, self._size, self._greedy = how, size, greedy
        wide, device = how.wide * size, how.inputs.device
        types: list[tuple[str, npt.DTypeLike, tuple[int, ...]]] = [
            *((name, np.int64, (wide,)) for name in ("tokens", "positions", "slots", "tails", "states")),
            *((name, np.int32, (wide,)) for name in ("lens", "seats")),
            ("limits", np.int64, (size,)), ("counts", np.int64, (size,)), ("keys", np.int64, (how.bound + 1, size)),
            ("top_k", np.int64, (size,)), ("top_p", np.float64, (size,)), ("temperature", np.float32, (size,)),
            ("floor", np.float32, (size,)), ("greedy", np.bool_, (size,)),
        ]  # fmt: skip
        self._places, end = dict[str, tuple[int, npt.DTypeLike, tuple[int, ...]]](), 0
        for name, kind, shape in types:
            self._places[name] = end, kind, shape
            end += -(-int(np.prod(shape)) * np.dtype(kind).itemsize // ALIGNED) * ALIGNED
        self._memory = torch.zeros(end, dtype=torch.uint8, device=device)
        tensors = {name: self._on_device(name) for name in self._places}
        self._tensors, self._found = tensors, torch.zeros(how.bound + how.others, size, dtype=torch.int64, device=device)
        self._next = Following(*(tensors[name][-size:] for name in Following._fields))
        self._key = torch.zeros(size, dtype=torch.int64, device=device)
        self._hidden = None if how.states is None else torch.zeros(size, how.states.shape[1], dtype=how.states.dtype, device=device)
        self._filters = Filters(
            tensors["temperature"], tensors["top_k"], tensors["top_p"], tensors["floor"], tensors["greedy"], self._key, True
        )
        self._first, self._further = _step(tensors, wide), _step(self._next._asdict(), size)
        self._rows = torch.arange(wide - size, wide, device=device), torch.arange(size, device=device)
        self._memory.copy_(upload(self._packed([], 1), device))
        self._begin, self._go_on = (how.capture(compute) for compute in (self._compute_first, self._compute_further))

    def draft(self, lanes: Seq[DraftLane], steps: int) -> npt.NDArray[np.int64]:
        """`[S, bound + others]`: the first `steps` of each, and the other choices."""
        self._memory.copy_(upload(self._packed(lanes, steps), self._how.inputs.device))
        self._begin()
        for _ in range(steps - 1):
            self._go_on()
        found, copied = self._found.to("cpu", non_blocking=True), Mark(self._how.inputs.device)
        copied.record()
        copied.wait()
        answer: npt.NDArray[np.int64] = found.numpy().T
        return answer

    def _compute_first(self) -> Tensor:
        how, tensors = self._how, self._tensors
        how.attention.begin(self._first)
        self._key.copy_(tensors["keys"][0])
        hidden = None if how.states is None else how.states.index_select(0, tensors["states"])
        return self._settle(*how.model(tensors["tokens"], hidden, tensors["positions"], how.attention, self._rows[0]), how.others)

    def _compute_further(self) -> Tensor:
        how, following = self._how, self._next
        how.attention.begin(self._further)
        return self._settle(*how.model(following.tokens, self._hidden, following.positions, how.attention, self._rows[1]), 0)

    def _settle(self, logits: Tensor, hidden: Tensor | None, others: int) -> Tensor:
        from baton.engine.gpu.triton_chain import advance  # who captures has it

        how, tensors = self._how, self._tensors
        pick = _greatest if self._greedy else partial(_pick, how.pick, self._filters)
        found, more = choices(logits, pick, others)
        if others:
            self._found[how.bound :].copy_(more)
        if hidden is not None and self._hidden is not None:
            self._hidden.copy_(hidden)
        inputs = how.inputs
        tables = inputs.tables[: inputs.dummy + 1]
        advance(found, self._found, tensors["counts"], tensors["keys"], self._key, self._next, tables, inputs.block_size)
        return self._found

    def _packed(self, lanes: Seq[DraftLane], steps: int) -> npt.NDArray[np.uint8]:
        """What the steps read. Places of nobody are the dummy's."""
        how, size = self._how, self._size
        memory = np.zeros(len(self._memory), np.uint8)
        views = {name: _view(memory, *place) for name, place in self._places.items()}
        inputs, block = how.inputs, how.inputs.block_size
        views["slots"][:], views["lens"][:], views["seats"][:] = inputs.scratch_slot, 1, inputs.dummy
        views["limits"][:], views["temperature"][:], views["greedy"][:] = -1, 1.0, True
        views["top_k"][:], views["top_p"][:], views["floor"][:] = NO_LIMIT, 2.0, -np.inf
        seats = inputs.seats([lane.run for lane in lanes])
        if how.states is not None:
            views["states"][:] = len(how.states) - 1
        for i, (lane, seat) in enumerate(zip(lanes, seats, strict=True)):
            run, n = lane.run, len(lane.run.tokens)
            rows = range(size * (how.wide - n) + i, size * how.wide, size)
            positions = np.arange(run.start, run.end)
            views["tokens"][rows], views["positions"][rows], views["seats"][rows] = run.tokens, positions, seat
            views["slots"][rows] = [run.blocks[at // block] * block + at % block for at in range(run.start, run.end)]
            views["lens"][rows] = positions + 1
            if (run.end - 1) // block * block >= run.start:
                views["tails"][rows[-1]] = -run.end % block
            if lane.states:
                views["states"][rows] = lane.states
            views["limits"][i] = lane.last
            views["keys"][:steps, i] = [_signed(noise_key(lane.params.seed, lane.known + count)) for count in range(steps)]
        if lanes and not self._greedy:
            for name, value in _facts([lane.params for lane in lanes], NO_LIMIT).items():
                views[name][: len(lanes)] = value
        return memory

    def _on_device(self, name: str) -> Tensor:
        at, kind, shape = self._places[name]
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        return self._memory[at : at + size].view(TORCH[np.dtype(kind).name]).view(shape)


TORCH = {
    "int64": torch.int64, "int32": torch.int32, "float64": torch.float64, "float32": torch.float32, "bool": torch.bool,
}  # fmt: skip


def filters_of(params: Seq[SamplingParams], keys: Seq[int], vocab: int, device: torch.device) -> Filters:
    """The filters of a draw in which nothing depends on what was said before."""
    facts = {name: upload(value, device) for name, value in _facts(params, vocab).items()}
    noise = upload(np.array(keys, dtype=np.uint64).view(np.int64), device)
    return Filters(facts["temperature"], facts["top_k"], facts["top_p"], facts["floor"], facts["greedy"], noise, True)


def choices(logits: Tensor, pick: Callable[[Tensor], Tensor], others: int) -> tuple[Tensor, Tensor]:
    """What is drawn from logits `[R, V]`, `[R]`, and what would be, with the same noise, if it were forbidden, and so on: `[others, R]`."""
    first = pick(logits)
    found = [first]
    for _ in range(others):
        logits = logits.scatter(1, found[-1][:, None], -torch.inf)
        found.append(pick(logits))
    return first, torch.stack(found[1:]) if others else first.new_empty(0, len(first))


def _greatest(scores: Tensor) -> Tensor:
    return scores.argmax(dim=-1)


def _pick(pick: Pick, filters: Filters, scores: Tensor) -> Tensor:
    return pick(scores, scores.amax(dim=-1), filters)


def _facts(params: Seq[SamplingParams], vocab: int) -> dict[str, npt.NDArray[np.generic]]:
    """Top-a is left out: a draft is a guess."""
    cold = np.array([p.temperature < GREEDY_BELOW for p in params])
    with np.errstate(divide="ignore"):
        floor = np.log(np.array([p.min_p for p in params], np.float32))
    top_k = np.array([p.top_k if 0 < p.top_k < vocab else vocab for p in params])
    top_p = np.array([p.top_p if p.top_p < 1 else 2.0 for p in params], np.float32).astype(np.float64)
    return {
        "temperature": np.where(cold, 1.0, [p.temperature for p in params]).astype(np.float32),
        "top_k": np.where(cold, vocab, top_k),
        "top_p": np.where(cold, 2.0, top_p),
        "floor": np.where(cold, -np.inf, floor).astype(np.float32),
        "greedy": cold,
    }


def _rows_of(runs: Seq[TokenRun], order: Seq[int]) -> list[int]:
    """The rows of the tokens of `runs`, which stand one after the other, in another order of the runs."""
    starts = np.cumsum([0, *(len(run.tokens) for run in runs)])
    return [int(row) for i in order for row in range(starts[i], starts[i + 1])]


def _step(tensors: Mapping[str, Tensor], size: int) -> DeviceStep:
    """A captured step of `size` decodes in these tensors."""
    nothing: npt.NDArray[np.int32] = np.empty(0, np.int32)
    named = {name: tensors[name] for name in ("tokens", "positions", "slots", "tails", "seats", "lens")}
    firsts = torch.arange(size + 1, dtype=torch.int32, device=named["lens"].device)
    return DeviceStep(
        batch=[], order=[], seated=[], spans=[], decodes=0, size=size, captured=True, lengths=nothing, rows=nothing, firsts=firsts,
        again=[], sources=None, **named,
    )  # fmt: skip


def _view(memory: npt.NDArray[np.uint8], at: int, kind: npt.DTypeLike, shape: tuple[int, ...]) -> Any:
    return np.frombuffer(memory.data, kind, int(np.prod(shape)), at).reshape(shape)


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key
