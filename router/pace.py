"""How fast requests are being served: running means over those that ended recently. Pure; all times are in seconds.

Each new request has a weight of one sixteenth, so the means follow a change of load within a few dozen requests.
"""

from dataclasses import dataclass

WEIGHT = 1 / 16


@dataclass(slots=True)
class Pace:
    held_s: float | None = None  # from getting a place to giving it back; None before the first request
    first_s: float = 0.0  # of these, until the first token
    token_s: float = 0.0  # for each token after the first

    def note(self, held_s: float, first_s: float, tokens: int) -> None:
        """Records a request that was served: how long it held its place, when its first token came, and how many tokens it got."""
        token_s = max(0.0, held_s - first_s) / max(1, tokens - 1)
        if self.held_s is None:
            self.held_s, self.first_s, self.token_s = held_s, first_s, token_s
            return
        self.held_s += WEIGHT * (held_s - self.held_s)
        self.first_s += WEIGHT * (first_s - self.first_s)
        self.token_s += WEIGHT * (token_s - self.token_s)

    def note_failure(self, held_s: float) -> None:
        """Records a request that ran out of time: it would have held its place for longer than this."""
        if self.held_s is None or held_s > self.held_s:
            self.note(held_s, held_s, 1)

    def needs_s(self, max_tokens: int) -> float:
        """How long a request needs once it has a place. Its output length is unknown: assume the mean, or its own limit if that is less."""
        return min(self.held_s or 0.0, self.first_s + self.token_s * max_tokens)
