"""How long an engine has made no progress.

An engine makes progress when it rests, when it finishes a step or a command, and when its thread computes inside one. A CPU may need many
seconds for a prompt of a large model, and a busy machine needs longer without being at fault. A thread that waits for an event that never
comes uses no processor time. A thread that computes forever does, so a step may take at most `longest_s`, far more than it needs.

On a GPU the thread computes nothing. What it uses there tells nothing, because drivers spin where they wait, also for a GPU that hangs. So
only a step that ends is progress there, and the processor time that is told stays the same.
"""

from dataclasses import dataclass

COMPUTES = 0.02  # share of the time: a thread that gets less is not computing, however busy the machine is


@dataclass(frozen=True, slots=True)
class Activity:
    """The state of an engine's thread at one moment."""

    laps: int  # steps and commands that have finished
    busy_since: float | None  # start of the current step or command, on the caller's clock; None: the thread rests
    cpu_s: float | None  # processor time of the thread so far; None if the system does not report it; constant where a device computes


class Stall:
    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._laps = -1
        self._cpu_s = 0.0
        self._marked = 0.0  # the last moment at which there was progress

    def look(self, now: float, seen: Activity) -> float:
        """Seconds without progress up to `now`. Ask several times a second: progress counts from the look that finds it."""
        if seen.busy_since is None or seen.laps != self._laps or self._computed(now, seen):
            self._laps, self._cpu_s, self._marked = seen.laps, seen.cpu_s or 0.0, now
        if seen.busy_since is None:
            return 0.0
        age = now - seen.busy_since
        return age if age > self._longest_s else min(age, now - self._marked)

    def _computed(self, now: float, seen: Activity) -> bool:
        """Whether the thread has computed since the last progress. Assumed if the system cannot say: then only `longest_s` counts."""
        return seen.cpu_s is None or seen.cpu_s - self._cpu_s > COMPUTES * (now - self._marked)
