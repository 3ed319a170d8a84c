"""For how long an engine has made no progress.

An engine makes progress when it rests, when it ends a step or a command, and when its thread computes inside one: a prompt of a large model
may take a CPU many seconds, and a busy machine makes that longer without making it a fault. A thread that waits for something that does not
come uses no processor time. One that computes for ever does; such a step is given `longest_s`, far beyond what any step takes.
"""

from dataclasses import dataclass

COMPUTES = 0.02  # of the time: a thread that gets less than this is not computing, however many others want the processor


@dataclass(frozen=True, slots=True)
class Activity:
    """Of an engine's thread at one moment."""

    laps: int  # steps and commands that have ended
    busy_since: float | None  # start of the step or command under way, on the caller's clock; None: it rests
    cpu_s: float | None  # processor time of the thread so far; None where the system does not tell


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
        """Since the last progress. Where nobody can say, it is assumed: then only `longest_s` tells."""
        return seen.cpu_s is None or seen.cpu_s - self._cpu_s > COMPUTES * (now - self._marked)
