"""Finds stop strings in a stream of text, however the text is cut into pieces. Holds back only what may become a stop string."""

from collections.abc import Sequence


class StopMatcher:
    """The match that is completed first ends the output; of those completed by the same character, the longest.

    So the result does not depend on how the text was cut, and the output ends with the character that completes a match: waiting to see
    whether a longer string follows would cost tokens and change nothing that the client reads.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` must not be empty strings."""
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)  # of the longest beginning of each stop string that the text ends with
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """Returns the text that is certainly output, and the stop string that ended it, if any. After that, nothing more is output.

        A stop string that `text` completes while the output may not end yet is output. Later text may still complete another one that
        began in it.
        """
        if not self._stops:
            return text, None
        if self._matched is not None:
            return "", self._matched
        for position, char in enumerate(text, 1):
            completed = self._advance(char)
            self._matched = completed if may_end else None
            if self._matched is not None:
                seen, self._held = self._held + text[:position], ""
                return seen[: -len(self._matched)], self._matched
        seen = self._held + text
        keep = len(seen) - max(map(self._open, range(len(self._stops))))
        self._held = seen[keep:]
        return seen[:keep], None

    def flush(self) -> str:
        """Returns what was held back, at the end of the text."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._stops)
        return held

    def _open(self, i: int) -> int:
        """The characters at the end of the text that may yet become stop string `i`; a completed one no longer can."""
        length = self._lengths[i]
        return self._borders[i][-1] if length == len(self._stops[i]) else length

    def _advance(self, char: str) -> str | None:
        """One step of Knuth, Morris and Pratt's matcher for each stop string."""
        best = None
        for i, stop in enumerate(self._stops):
            length = self._lengths[i]
            while length and (length == len(stop) or stop[length] != char):  # equal: the output could not end there
                length = self._borders[i][length - 1]
            self._lengths[i] = length = length + (stop[length] == char)
            if length == len(stop) and (best is None or length > len(best)):
                best = stop
        return best


def _borders(stop: str) -> list[int]:
    """The length of each prefix's longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders
