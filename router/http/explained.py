"""What an answer tells, on request, of why its prompt was not cached: members for its usage."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.events import Finished
from router.http.errors import bad_value
from router.uncached import Uncached
from router.validate import Ask

EXPLAIN_HEADER = "x-baton-explain"
_Json = dict[str, Any]


def explains(headers: Mapping[str, str]) -> bool:
    """Raises HttpError for another wish than `cache`."""
    given = headers.get(EXPLAIN_HEADER)
    if given not in (None, "cache"):
        raise bad_value(EXPLAIN_HEADER, "must be `cache`")
    return given is not None


class Explained:
    """Collects what is told of the prompts of one answer."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = asks
        self._told: dict[int, Uncached] = {}  # by prompt
        self._more: _Json = {}

    def take(self, prompt: int, event: Finished) -> None:
        """A choice has ended. Of several for which a prompt was computed, that counts which found least of it."""
        found, known = event.uncached, self._told.get(prompt)
        if found is None or (known is not None and known.tokens >= found.tokens):
            return
        self._told[prompt] = found
        if len(self._asks) == 1 and found.changed_at is not None:
            more = {"changed_at": found.changed_at, "changed_message": found.changed_message}
            self._more = {name: place for name, place in more.items() if place is not None}

    def members(self) -> _Json:
        """The sums over all prompts. With one prompt that has changed, also the first token and the message that can differ."""
        causes: dict[str, int] = {}
        told = self._told.values()
        for cause, tokens in (one for found in told for one in found.causes):
            causes[cause] = causes.get(cause, 0) + tokens
        sums = {"promised_tokens": sum(one.promised for one in told), "reachable_tokens": sum(one.reachable for one in told)}
        return {**sums, "uncached_tokens": causes, **self._more}
