"""The beams of each search of an engine (`baton.engine.core.beams` decides about them), as sequences that share blocks.

    admitted as one sequence ──its prompt is computed──▶ it branches: its beams run in its place ──▶ the search is done
         ▲                                                     │    ▲
         └───────────── preempted: all beams are dropped ──────┘    └── all beams have a token's log-probabilities: step

A beam takes the blocks of the one that it continues; if several continue one, the others share its full blocks and copy the last. What a
preempted search has found is kept. It comes back as one sequence, which is what all its beams begin with; when that is computed, it
branches into the beams that it had, and each computes the rest of its own.

A beam waits for the others of its group with nothing pending, so the scheduler passes it over.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from baton.engine.core.beam_search import BeamSearch
from baton.engine.core.beams import Hypothesis
from baton.engine.core.protocol import Runner
from baton.engine.core.sampling import RAW, Sampled
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import Sequence, State


@dataclass(eq=False, slots=True)
class BeamGroup:
    owner: Sequence
    search: BeamSearch
    beams: list[Sequence] = field(default_factory=list)  # one for each of `search.live`; none while the owner computes what they share
    rows: dict[Sequence, Sampled] = field(default_factory=dict)  # of the beams that wait for the others
    rooms: list[tuple[Sequence, Sequence]] = field(default_factory=list)  # (parent, beam) that need blocks before the next step
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)


class Groups:
    def __init__(
        self, scheduler: Callable[[], Scheduler], runner: Runner, sequences: dict[str, Sequence], forget: Callable[[Sequence], None]
    ) -> None:
        """`sequences`: those of the engine, by id; beams are among them while they run. `forget`: what drafts may remember of a beam."""
        self._forget = forget
        self._scheduler = scheduler
        self._runner = runner
        self._sequences = sequences
        self._groups: dict[Sequence, BeamGroup] = {}

    @property
    def wanted(self) -> int:
        """Blocks that beams need before the next step."""
        return sum(self._fresh(parent, beam) for group in self._groups.values() for parent, beam in group.rooms)

    def open(self, owner: Sequence) -> None:
        """A sequence has come. Nothing is kept of one that will not branch."""
        params, eos = owner.params, self._runner.eos_token_ids
        if params.beams is None or not owner.branches:
            return
        stops = frozenset(params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos)
        search = BeamSearch(params.beams, stops, params.max_tokens, params.min_tokens)
        owner.params = replace(params, temperature=0.0, logprobs=search.looks_at, logprobs_mode=RAW)
        self._groups[owner] = BeamGroup(owner, search)

    def close(self, owner: Sequence) -> None:
        """The sequence has left: its beams are dropped."""
        group = self._groups.pop(owner, None)
        for beam in group.beams if group is not None else ():
            self._drop(beam)

    def land(self, seq: Sequence, sampled: Sampled) -> tuple[Hypothesis, ...]:
        """A sequence that branches, or a beam, has computed all its tokens; `sampled` has its best continuations. Returns the answer when
        the search is done."""
        group = self._groups[seq.owner or seq]
        search = group.search
        if seq.owner is not None:
            group.rows[seq] = sampled
            if len(group.rows) == len(group.beams):
                rows = [group.rows[beam].top for beam in group.beams]
                group.rows.clear()
                self._continue(group, group.beams, search.step(rows))
        elif search.length:  # it was preempted: the beams that it had go on
            self._continue(group, [self._branch(group)], [0] * len(search.live))
        elif parents := search.step([sampled.top]):
            self._continue(group, [self._branch(group)], parents)
        return search.found if search.done else ()

    def steps(self, owner: Sequence) -> int:
        """How many tokens were computed for each beam."""
        return self._groups[owner].search.steps

    def make_room(self) -> list[Sequence]:
        """Gives the beams of the next step their blocks. Returns who was preempted for that."""
        preempted: list[Sequence] = []
        for group in list(self._groups.values()):
            for parent, beam in group.rooms:
                while parent.state is State.RUNNING and not self._place(parent, beam):
                    self._scheduler().make_way(parent, preempted)
            group.rooms.clear()
        return preempted

    def restart(self, owners: Iterable[Sequence]) -> None:
        """Those of `owners` that had beams were preempted."""
        for owner in owners:
            if (group := self._groups.get(owner)) is None or not group.beams:
                continue
            for beam in group.beams:
                self._drop(beam)
            group.beams = []
            group.rows.clear()
            group.rooms.clear()
            owner.tokens[owner.prompt_len :] = group.search.trunk
            del owner.keys[len(owner.tokens) // self._runner.layout.block_size :]  # of another beam, perhaps

    def _branch(self, group: BeamGroup) -> Sequence:
        """The first beam, with all that the owner has computed. It runs in its place."""
        owner, running = group.owner, self._scheduler().running
        beam = self._beam(group, owner, owner.tokens)
        beam.blocks, beam.sealed, beam.computed, beam.reached = owner.blocks, owner.sealed, owner.computed, owner.computed
        beam.drafted = owner.drafted
        owner.blocks, owner.sealed, owner.computed, owner.drafted = [], 0, 0, 0
        running[running.index(owner)] = beam
        beam.move("admit")
        owner.move("branch")
        self._sequences[beam.id] = beam
        return beam

    def _beam(self, group: BeamGroup, parent: Sequence, tokens: list[int]) -> Sequence:
        owner = group.owner
        full = parent.computed // self._runner.layout.block_size
        return Sequence(
            f"{owner.id}/{next(group.numbers)}",
            list(tokens),
            owner.prompt_len,
            owner.params,
            owner.root,
            keys=parent.keys[:full],
            arrival=owner.arrival,
            started_at=owner.started_at,
            owner=owner,
        )

    def _continue(self, group: BeamGroup, parents: list[Sequence], chosen: list[int]) -> None:
        """The search's new beams continue `parents`, which have computed all their tokens: beam i that of number `chosen[i]`."""
        beams: list[Sequence] = []
        for beam, number in zip(group.search.live, chosen, strict=False):
            parent = parents[number]
            new = beam.tokens[parent.computed - parent.prompt_len :]
            if parent in beams:
                beams.append(self._beam(group, parent, [*parent.tokens[: parent.computed], *new]))
            else:
                parent.tokens[parent.computed :] = new
                beams.append(parent)
            group.rooms.append((parent, beams[-1]))
        for parent in parents:
            if parent not in beams:
                self._drop(parent)
        group.beams = beams

    def _fresh(self, parent: Sequence, beam: Sequence) -> int:
        shared = 0 if parent is beam else parent.computed // self._runner.layout.block_size
        return self._scheduler().missing(beam) - shared

    def _place(self, parent: Sequence, beam: Sequence) -> bool:
        if parent is beam:
            return self._scheduler().extend(beam)
        if not self._scheduler().branch(parent, beam, parent.computed):
            return False
        self._sequences[beam.id] = beam
        full, rest = divmod(parent.computed, self._runner.layout.block_size)
        if rest:
            self._runner.copy(parent.blocks[full], beam.blocks[full])
        return True

    def _drop(self, beam: Sequence) -> None:
        """Drops a beam in any state: it may wait for its first blocks, or have been preempted."""
        self._sequences.pop(beam.id, None)
        self._forget(beam)
        if beam.state is State.RUNNING:
            self._scheduler().drop(beam)
