"""What an engine has done so far, as numbers."""

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Guessed:
    drafted: int = 0  # guesses that were computed
    accepted: int = 0  # part of them: they became output


@dataclass(slots=True)
class Counts:
    """What an engine has done so far. Each only grows."""

    chunks: int = 0  # sequences over all steps
    computed_tokens: int = 0  # positions
    recomputed_tokens: int = 0  # part of `computed_tokens`: computed again because a preemption discarded their KV
    queried_tokens: int = 0  # tokens of started sequences that were looked up in the prefix cache
    hit_tokens: int = 0  # part of `queried_tokens`: found there
    preemptions: int = 0
    guesses: dict[tuple[str, int], Guessed] = field(default_factory=dict)  # by method and place in the draft, from 1
    forks: int = 0  # sequences that went on from what another one had computed

    def copy(self) -> "Counts":
        return replace(self, guesses={key: replace(each) for key, each in self.guesses.items()})

    def note_guesses(self, method: str, drafted: int, accepted: int) -> None:
        for place in range(1, drafted + 1):
            if (counted := self.guesses.get((method, place))) is None:
                counted = self.guesses[method, place] = Guessed()
            counted.drafted += 1
            counted.accepted += place <= accepted

    @property
    def drafted_tokens(self) -> int:
        return sum(each.drafted for each in self.guesses.values())

    @property
    def accepted_tokens(self) -> int:
        return sum(each.accepted for each in self.guesses.values())
