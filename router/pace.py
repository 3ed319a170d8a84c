"""How fast requests are being served: means over those that ended lately. Pure; every time is seconds.

Each new request counts a sixteenth, so the means follow a change of load within a few dozen requests.
"""

from dataclasses import dataclass

WEIGHT = 1 / 16


@dataclass(slots=True)
class Pace:
    held_s: float | None = None  # from the place that a request got to the place that it gave back; None before the first
    first_s: float = 0.0  # of these, until its first token
    token_s: float = 0.0  # for each token after the first

    def note(self, held_s: float, first_s: float, tokens: int) -> None:
        """A request that was served: how long it held its place, when its first token came, how many there were."""
        token_s = max(0.0, held_s - first_s) / max(1, tokens - 1)
        if self.held_s is None:
            self.held_s, self.first_s, self.token_s = held_s, first_s, token_s
            return
        self.held_s += WEIGHT * (held_s - self.held_s)
        self.first_s += WEIGHT * (first_s - self.first_s)
        self.token_s += WEIGHT * (token_s - self.token_s)

    def note_failure(self, held_s: float) -> None:
        """A request that ran out of time: it would have held its place for longer than this."""
        if self.held_s is None or held_s > self.held_s:
            self.note(held_s, held_s, 1)

    def needs_s(self, max_tokens: int) -> float:
        """What a request needs once it has a place. Nobody knows how long its output will be: as long as others', or its own limit."""
        return min(self.held_s or 0.0, self.first_s + self.token_s * max_tokens)
