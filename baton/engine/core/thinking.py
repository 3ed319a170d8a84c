"""A bound on what a model thinks before it answers: plain data, standard library.

Like a grammar, it travels as data, and where an output stands follows from the output alone (`baton.engine.grammars.closing`). So thinking
is closed at the same token after a preemption, a handoff or a retry.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands around a thought. `ends`: the first belongs to it, the others only end it. `closing`: the token ids that close it, which
    spell the first end."""

    begin: str
    ends: tuple[str, ...]
    closing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """An output that is inside its thinking after `max_tokens` tokens or more goes on with `closing`, from the first whole character on.

    `marks`: those that may open it, at the output's beginning, after white space. `opened`: the prompt has opened it with the first ones.
    """

    max_tokens: int
    marks: tuple[Marks, ...]
    opened: bool = False
