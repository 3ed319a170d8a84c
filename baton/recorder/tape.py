"""A ring of what deciding objects were asked and what they answered, in stretches that each begin with the state of the objects.

The ring is bounded in time and in bytes, both about: a call is counted as CALL_BYTES and what its arguments weigh. A stretch is a quarter
of it, and is dropped whole. What an object calls of another one that is followed, too, is no entry: it happens again when the outer call is
replayed. A tape belongs to one thread.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

STRETCHES = 4  # of the ring
CALL_BYTES = 500
UNENDED = object()  # in place of the result of a call that is not over

Kept = Callable[..., tuple[tuple[Any, ...], int]]  # a call's arguments → what is kept of them, and its bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """A call did not return."""

    kind: str
    text: str


@dataclass(slots=True)
class Stretch:
    began: float
    state: Any  # before the first call
    calls: list[list[Any]] = field(default_factory=list)  # number of the method, arguments, keyword arguments, result
    bytes: int = 0
    notes: dict[Any, Any] = field(default_factory=dict)  # what the owner adds: state that is taken when it is first looked at


class Tape:
    def __init__(self, name: str, span_s: float, most_bytes: int, clock: Callable[[], float], state: Callable[[], tuple[Any, int]]) -> None:
        """`state`: of all objects that are followed, and its bytes."""
        self.name = name
        self.methods: list[str] = []  # "object.method", by number
        self.refused = ""  # why nothing is recorded any more
        self.began: list[Callable[[Stretch], None]] = []  # told of each new stretch
        self._span_s, self._most_bytes = span_s, most_bytes
        self._clock, self._state = clock, state
        self._stretches: deque[Stretch] = deque()
        self._inside = False
        self._until = float("-inf")
        self._full = most_bytes // STRETCHES
        self.now: Stretch | None = None

    @property
    def bytes(self) -> int:
        """The approximate size."""
        return sum(stretch.bytes for stretch in self.stretches())

    def stretches(self) -> list[Stretch]:
        """Oldest first. Any thread may ask."""
        return list(self._stretches)

    def follow(
        self,
        name: str,
        thing: object,
        methods: Iterable[str],
        kept: Mapping[str, Kept] | None = None,
        told: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        """Notes these calls of `thing`. `kept`: for methods whose arguments change later, or are not to be kept. `told`: what is noted of a
        result."""
        for method in methods:
            noted = self._noting(f"{name}.{method}", getattr(thing, method), (kept or {}).get(method), (told or {}).get(method))
            setattr(thing, method, noted)

    def opened(self, thing: object, method: str) -> None:
        """What is called within this method is noted again: listeners act on their own account."""
        inner = getattr(thing, method)

        def opened(*args: Any, **named: Any) -> Any:
            before, self._inside = self._inside, False
            try:
                return inner(*args, **named)
            finally:
                self._inside = before

        setattr(thing, method, opened)

    def _noting(self, name: str, method: Callable[..., Any], kept: Kept | None, told: Callable[[Any], Any] | None) -> Callable[..., Any]:
        if name not in self.methods:
            self.methods.append(name)
        number = self.methods.index(name)

        def noted(*args: Any, **named: Any) -> Any:
            if self._inside or self.refused:
                return method(*args, **named)
            stretch = self.now
            if stretch is None or stretch.bytes > self._full or self._clock() > self._until:
                stretch = self._turn()
                if stretch is None:
                    return method(*args, **named)
            if kept is None:
                call, stretch.bytes = [number, args, named, UNENDED], stretch.bytes + CALL_BYTES
            else:
                mine, more = kept(*args, **named)
                call, stretch.bytes = [number, mine, None, UNENDED], stretch.bytes + CALL_BYTES + more
            stretch.calls.append(call)
            self._inside = True
            try:
                result = method(*args, **named)
                call[3] = result if told is None else told(result)
            except BaseException as error:
                call[3] = Raised(type(error).__name__, str(error))
                raise
            finally:
                self._inside = False
            return result

        return noted

    def _turn(self) -> Stretch | None:
        """Begins a stretch. None: the state alone is too large."""
        now = self._clock()
        state, size = self._state()
        if 2 * size > self._full:  # else little but states would be kept
            self.refused = f"the state of {self.name} takes {size / 2**20:.1f} MiB, more than an eighth of recorder.mib"
            self._stretches.clear()
            self.now = None
            return None
        self.now = stretch = Stretch(now, state, bytes=size)
        part = self._span_s / STRETCHES
        self._until = now + part
        while self._stretches and (self.bytes > self._most_bytes - self._full or self._stretches[0].began + part < now - self._span_s):
            self._stretches.popleft()
        self._stretches.append(stretch)
        for told in self.began:
            told(stretch)
        return stretch
