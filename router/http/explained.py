"""What an answer tells, on request, of why its prompt was not cached: members for its usage."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.events import Finished
from router.http.errors import bad_value
from router.tokenizer import Tokenizer
from router.uncached import Uncached
from router.validate import Ask

EXPLAIN_HEADER = "x-baton-explain"
MAX_LOCATED = 8192  # tokens before a change that are looked through for the message: they are decoded in one turn of the loop
_Json = dict[str, Any]


def explains(headers: Mapping[str, str]) -> bool:
    """Raises HttpError for another wish than `cache`."""
    given = headers.get(EXPLAIN_HEADER)
    if given not in (None, "cache"):
        raise bad_value(EXPLAIN_HEADER, "must be `cache`")
    return given is not None


class Explained:
    """Collects what is told of the prompts of one answer."""

    def __init__(self, asks: Sequence[Ask], tokenizer: Tokenizer) -> None:
        self._asks = asks
        self._tokenizer = tokenizer
        self._told: dict[int, Uncached] = {}  # by prompt
        self._more: _Json = {}

    def take(self, prompt: int, event: Finished) -> None:
        """A choice has ended. Of several for which a prompt was computed, that counts which found least of it."""
        found, known = event.uncached, self._told.get(prompt)
        if found is None or (known is not None and known.tokens >= found.tokens):
            return
        self._told[prompt] = found
        if len(self._asks) == 1 and found.changed_at is not None:
            self._more = {"changed_at": found.changed_at}
            if self._asks[0].messages is not None and found.changed_at <= MAX_LOCATED:
                contents = [content for _, content in self._asks[0].messages]
                same = self._tokenizer.decode(event.request.tokens[: found.changed_at])
                self._more["changed_message"] = first_unlike(contents, same)

    def members(self) -> _Json:
        """The sums over all prompts. With one prompt that has changed, also the first token and the message that can differ."""
        causes: dict[str, int] = {}
        told = self._told.values()
        for cause, tokens in (one for found in told for one in found.causes):
            causes[cause] = causes.get(cause, 0) + tokens
        sums = {"promised_tokens": sum(one.promised for one in told), "reachable_tokens": sum(one.reachable for one in told)}
        return {**sums, "uncached_tokens": causes, **self._more}


def first_unlike(contents: Sequence[str], same: str) -> int | None:
    """The index of the first message that is not whole within `same`, the text that two prompts begin with. None: what differs is not one
    of them, such as the offered tools or what the template adds at the end."""
    at = 0
    for index, content in enumerate(contents):
        found = same.find(content.strip(), at)  # templates may strip a content
        if found < 0:
            return index
        at = found + len(content.strip())
    return None
