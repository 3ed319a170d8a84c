"""What hints have brought into the pool before a sequence asked for it, and whether one came for it. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

AWAITED_S = 60.0  # how long a sequence may come later than its blocks
REMEMBERED = 64  # hints
Result = Literal["used", "unused", "nothing"]


@dataclass(slots=True)
class _Hint:
    keys: Sequence[bytes]
    until: float
    used: bool = False


class Ahead:
    def __init__(self) -> None:
        self._hints: dict[int, _Hint] = {}  # by the number of the load, the oldest first
        self._awaited: dict[bytes, tuple[int, str]] = {}  # key → hint, and the medium that the block came from

    def __bool__(self) -> bool:
        return bool(self._hints)

    def brought(self, number: int, blocks: Sequence[tuple[bytes, str]], now: float) -> list[Result]:
        """The load of a hint has ended with these. Returns what has become of hints."""
        if not blocks:
            return ["nothing"]
        self._hints[number] = _Hint([key for key, _ in blocks], now + AWAITED_S)
        self._awaited.update((key, (number, medium)) for key, medium in blocks)
        return self._end(now) if len(self._hints) > REMEMBERED else []

    def used(self, keys: Iterable[bytes]) -> Counter[str]:
        """A sequence finds these in the pool. Returns how many of them hints have brought from each medium; each counts once."""
        media = Counter[str]()
        for key in keys:
            if (found := self._awaited.pop(key, None)) is not None:
                number, medium = found
                media[medium] += 1
                self._hints[number].used = True
        return media

    def expire(self, now: float) -> list[Result]:
        """What has become of the hints whose time is over."""
        return self._end(now) if self._hints and next(iter(self._hints.values())).until <= now else []

    def _end(self, now: float) -> list[Result]:
        ended = list[Result]()
        for number, hint in list(self._hints.items()):
            if hint.until > now and len(self._hints) <= REMEMBERED:
                break
            del self._hints[number]
            ended.append("used" if hint.used else "unused")
            for key in hint.keys:
                if self._awaited.get(key, (None, ""))[0] == number:
                    del self._awaited[key]
        return ended
