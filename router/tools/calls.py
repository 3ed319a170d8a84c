"""Reads a model's text as it arrives: what is content, and which tools it calls.

A call names one of the request's tools and has a JSON object as arguments; whatever else looks like one is text. So a call is reported
when all of it has been read. Only where a grammar rules (`live`) are its arguments reported as they arrive.

    _main      content, up to the text with which a call may begin
    _attempt   the calls there, by each style of the family until one fits
    _objects, _named, _pythonic, _tagged    the styles

White space around calls belongs to nothing; every other character is reported once.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.tools.arguments import from_python, from_tags
from router.tools.delta import Arguments, CallBegin, Content, Delta
from router.tools.families import ModelFamily, Named, Objects, Pythonic, Style, Tagged, bare_of, begin_of
from router.tools.source import CutOff, NotACall, Reading, TextSource, members_of

NAME = "[A-Za-z0-9_.-]"
_NAME = re.compile(f"{NAME}*")
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({NAME}+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_HEAD_MOST = 256  # characters; what holds no name within them is not reported early
_BRACKETS = re.compile(r"""["'()\[\]{}]""")
_QUOTES = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
MAX_CALLS = 128  # of one answer; more are text


class CallReader:
    def __init__(
        self, family: ModelFamily, tools: Mapping[str, Any], live: bool = False, id_of: Callable[[int], str] = lambda index: ""
    ) -> None:
        """`tools`: name → JSON Schema of the arguments. `live`: a grammar guarantees that what begins as a call is one. `id_of`: the id of
        a call by its index."""
        self.count = 0  # calls that have begun
        self.whole = 0  # of them, those that have been read to the end
        self._id_of = id_of
        self._styles = family.styles
        self._tools = tools
        self._live = live
        self._source = TextSource()
        self._out: list[Delta] = []
        self._given = 0  # in the source's text; what is before it is reported
        self._fresh = True  # nothing but calls so far: a bare call may begin
        self._dropped = False  # the text has ended inside a call that its family's own mark began
        self._triggers = tuple(dict.fromkeys(begin for style in self._styles if (begin := begin_of(style))))
        self._run = self._main()
        self._step()

    def push(self, text: str) -> list[Delta]:
        self._source.text += text
        return self._step()

    def flush(self, cut: bool = False) -> list[Delta]:
        """The rest, at the end of the text. `cut`: it would have gone on; then a call that is not whole is dropped, since the reason why
        the answer ends tells that something is missing."""
        self._source.ended = True
        deltas = self._step()
        if not (cut and self._dropped):
            self._say(len(self._source.text))
        rest, self._out = self._out, []
        return deltas + rest

    def _step(self) -> list[Delta]:
        next(self._run, None)
        out, self._out = self._out, []
        return out

    def _say(self, end: int) -> None:
        """Reports the text up to `end` as content."""
        text = self._source.text[self._given : end]
        if text and (text.strip() or not self.count):
            self._out.append(Content(text))
        self._given = end

    def _main(self) -> Reading[None]:
        source = self._source
        while True:
            styles = yield from self._content()
            if not styles:
                return
            begun = source.at
            called = yield from self._attempt(styles, begun)
            if self._dropped:
                return
            if not called:
                self._fresh = False
                self._say(begun + 1)

    def _content(self) -> Reading[Sequence[Style]]:
        """Reports content up to the text with which a call may begin, and returns the styles of such a call; none at the end."""
        source = self._source
        while True:
            source.text = source.text[self._given :]
            self._given = source.at = 0
            if self._fresh:
                yield from source.space()
                char = source.text[source.at : source.at + 1]
                if styles := [style for style in self._styles if char and char in bare_of(style)]:
                    return styles
                self._fresh = not char
            found = [(at, trigger) for trigger in self._triggers if (at := source.text.find(trigger)) >= 0]
            if found:
                at, _ = min(found)
                self._say(len(source.text[:at].rstrip()))
                source.at = at
                return [style for style in self._styles if (begin := begin_of(style)) and source.text.startswith(begin, at)]
            if source.ended:
                self._say(len(source.text))
                return ()
            self._say(len(source.text[: len(source.text) - self._open(source.text)].rstrip()))
            yield

    def _open(self, text: str) -> int:
        """The characters at the end of `text` that may become a trigger."""
        most = min(len(text), max(map(len, self._triggers), default=1) - 1)
        return next((size for size in range(most, 0, -1) if any(one.startswith(text[-size:]) for one in self._triggers)), 0)

    def _attempt(self, styles: Sequence[Style], begun: int) -> Reading[bool]:
        """Reads the calls that begin here. Returns whether there was any."""
        source, before, dropped = self._source, self.count, False
        for style in styles:
            source.at, cut = begun, False
            try:
                yield from self._by(style)
            except NotACall:
                pass
            except CutOff:
                cut = True
            called = self.count > before
            dropped = (cut and (called or bool(begin_of(style)))) or (dropped and not called)
            if called:
                break
        self._dropped = dropped
        return self.count > before

    def _by(self, style: Style) -> Reading[None]:
        match style:
            case Objects():
                return self._objects(style)
            case Named():
                return self._named(style)
            case Pythonic():
                return self._pythonic(style)
            case Tagged():
                return self._tagged(style)

    def _objects(self, style: Objects) -> Reading[None]:
        source = self._source
        if style.begin:
            yield from source.literal(style.begin)
        yield from source.space()
        listed = yield from source.comes("[")
        if style.listed and not listed:
            raise NotACall
        while True:
            yield from source.space()
            yield from self._object()
            yield from source.space()
            for separator in style.separators:
                if (yield from source.comes(separator)):
                    break
            else:
                break
        if listed:
            yield from self._close("]")
        if style.end:
            yield from self._close(style.end)

    def _object(self) -> Reading[None]:
        source, begun = self._source, self._source.at
        if self._live and (yield from self._early()):
            return
        source.at = begun
        members = members_of((yield from source.object()))
        name, _ = members.get("name", (None, ""))
        arguments, written = members.get("arguments") or members.get("parameters") or (None, "")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise NotACall
        self._call(name, written)

    def _early(self) -> Reading[bool]:
        """Reports a call whose object has its name first while its arguments arrive. Returns whether it is one."""
        source, begun = self._source, self._source.at
        while (yield from source.peek()) == "{":
            if found := _HEAD.match(source.text, begun):
                break
            if source.ended or len(source.text) - begun > _HEAD_MOST:
                return False
            yield
        else:
            return False
        source.at = found.end()
        yield from self._json(found[1])
        yield from source.space()
        if (yield from source.comes("}")):
            self._given = source.at
        return True

    def _json(self, name: str) -> Reading[None]:
        """Reads the arguments of a call as JSON."""
        if not self._live:
            written = yield from self._source.object()
            members_of(written)
            self._call(name, written)
            return
        self._begin(name)
        index = self.count - 1

        def tell(text: str) -> None:
            self._out.append(Arguments(index, text))
            self._given += len(text)

        self._given = self._source.at
        try:
            yield from self._source.object(tell)
        except CutOff:
            tell(self._source.text[self._given :])
            raise
        self.whole = self.count

    def _named(self, style: Named) -> Reading[None]:
        source = self._source
        begin, end = style.section
        if begin:
            yield from source.literal(begin)
            yield from source.space()
        yield from source.literal(style.begin)
        while True:
            name = yield from self._name()
            if style.id_mark and (yield from source.comes(style.id_mark)):
                yield from self._name()
            yield from source.literal(style.between)
            yield from self._json(name)
            if style.end:
                yield from self._close(style.end)
            yield from source.space()
            if not (yield from source.comes(style.begin)):
                break
        if end:
            yield from self._close(end)

    def _pythonic(self, style: Pythonic) -> Reading[None]:
        source = self._source
        if style.begin:
            yield from source.literal(style.begin)
        yield from source.space()
        yield from source.literal("[")
        calls = []
        while True:  # the list is one expression: half of it calls nothing
            yield from source.space()
            calls.append(from_python((yield from self._python())))
            yield from source.space()
            if (yield from source.literal("]", ",")) == "]":
                break
        for name, arguments in calls:
            self._call(name, arguments)
        if style.end:
            yield from self._close(style.end)

    def _python(self) -> Reading[str]:
        """Reads `name(…)` by its brackets and quotes."""
        source, begun = self._source, self._source.at
        self._known((yield from self._name()))
        if (yield from source.peek()) != "(":
            raise NotACall
        at, depth, quote = source.at, 0, ""
        while True:
            found = (_QUOTES[quote] if quote else _BRACKETS).search(source.text, at)
            if found is None or (found[0] == "\\" and found.end() == len(source.text)):
                at = len(source.text) if found is None else found.start()
                yield from source.more()
                continue
            char, at = found[0], found.end()
            if char == "\\":
                at += 1
            elif char in "\"'":
                quote = "" if quote else char
            else:
                depth += 1 if char in "([{" else -1
            if depth == 0:
                source.at = at
                return source.text[begun:at]

    def _tagged(self, style: Tagged) -> Reading[None]:
        source = self._source
        begin, end = style.section
        if begin:
            yield from source.literal(begin)
            yield from source.space()
        yield from self._spaced(style.begin)
        while True:
            name = yield from self._name()
            self._known(name)
            given: list[tuple[str, str, bool | None]] = []
            ends = (style.after_name, style.empty) if style.empty else (style.after_name,)
            if (yield from source.literal(*ends)) != style.empty:
                while (one := (yield from self._parameter(style))) is not None:
                    given.append(one)
            self._call(name, from_tags(given, self._tools[name]))
            _, *rest = style.end.split("\n")
            if rest:
                yield from self._close(rest[0])
            yield from source.space()
            if not (begin and (yield from source.comes(style.begin))):
                break
        if end:
            yield from self._close(end)

    def _parameter(self, style: Tagged) -> Reading[tuple[str, str, bool | None] | None]:
        """Name and text of an argument, and whether the text is JSON; None at the end of the call."""
        source = self._source
        close, *_ = style.end.split("\n")
        yield from source.space()
        if (yield from source.literal(style.parameter, close)) == close:
            return None
        marks = (style.after_parameter, style.after_json) if style.after_json else (style.after_parameter,)
        name, mark = yield from source.until(*marks)
        is_json = (mark == style.after_json) if style.after_json else None
        if not style.newlines or (yield from source.peek()) != "\n":
            text, _ = yield from source.until(style.parameter_end)
            return name, text, is_json
        ends = [f"\n{one}" for one in (style.parameter_end, style.parameter, close)]
        text, found = yield from source.until(*ends)
        if found != ends[0]:  # the tag that ends the argument is missing
            source.at -= len(found) - 1
        return name, text[1:], is_json

    def _spaced(self, words: str) -> Reading[None]:
        """Reads literal words; a line break between them stands for any white space."""
        for word in words.split("\n"):
            yield from self._source.space()
            yield from self._source.literal(word)

    def _name(self) -> Reading[str]:
        source, begun = self._source, self._source.at
        while True:
            found = _NAME.match(source.text, begun)
            assert found is not None
            if found.end() < len(source.text):
                break
            yield from source.more()
        source.at = found.end()
        return found[0]

    def _close(self, words: str) -> Reading[None]:
        """Reads what ends a call or a section of calls. It may be missing: models forget it."""
        source = self._source
        yield from source.space()
        yield from source.comes(words.strip())
        self._given = source.at

    def _known(self, name: str) -> None:
        if name not in self._tools or self.count >= MAX_CALLS:
            raise NotACall

    def _begin(self, name: str) -> None:
        self._known(name)
        self._out.append(CallBegin(self.count, name, self._id_of(self.count)))
        self.count += 1

    def _call(self, name: str, arguments: str) -> None:
        self._begin(name)
        self._out.append(Arguments(self.count - 1, arguments))
        self.whole = self.count
        self._given = self._source.at
