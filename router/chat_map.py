"""Which message of a chat stands at a place in its prompt."""

from collections.abc import Callable, Sequence

MAX_LOCATED = 8192  # tokens of one text, before the token that is sought: they are decoded in one turn of the event loop
Encode = Callable[[], list[int]]
# (text between two control tokens, place of its first token in the prompt, how to encode it) → its ids, which may be known already
Known = Callable[[str, int, Encode], Sequence[int]]


class ChatMap:
    """The map of one chat. `ids` is asked for the ids of its texts, in their order, and notes where they stand."""

    def __init__(self, contents: Sequence[str], known: Known, decode: Callable[[Sequence[int]], str]) -> None:
        self._contents, self._known, self._decode = contents, known, decode
        self._texts: list[tuple[int, int, str]] = []  # place of the first token, of the one after the last, text

    def ids(self, text: str, at: int, encode: Encode) -> Sequence[int]:
        ids = self._known(text, at, encode)
        self._texts.append((at, at + len(ids), text))
        return ids

    def message(self, prompt: Sequence[int], start: int, end: int) -> int | None:
        """The first message of which a part stands in `prompt[start:end]`. None: all of that is other text, such as the offered tools, or
        it is not known, because the template changes the contents or a text is too long."""
        texts = [each for each in self._texts if each[0] < end]
        cut = next((first for first, stop, _ in texts if first < start < stop), start)
        if start - cut > MAX_LOCATED:
            return None
        begin = sum(len(text) for _, stop, text in texts if stop <= start) + len(self._decode(prompt[cut:start]))
        rest = begin + len(self._decode(prompt[start:end]))
        whole, at = "".join(text for *_, text in texts), 0  # begin, rest and at: places in this
        for index, content in enumerate(self._contents):
            core = content.strip()  # templates may strip a content
            found = whole.find(core, at)
            if found >= 0 and (at := found + len(core)) > begin:
                return index if found < rest else None
        return None
