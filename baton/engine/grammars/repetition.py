"""How large a regular expression becomes when its counted repetitions are written out. The library does that in its first masks, so the
count must be bounded before: `(a{1000}){1000}` takes seconds."""

import re

_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_DIGITS = 9  # of a count; one with more is too large anyway


def written_out(pattern: str) -> int:
    """The atoms of `pattern` with every `x{n}`, `x{n,}` and `x{m,n}` written out. Anything goes in: who compiles it finds what is wrong."""
    total, last = [0], [0]  # of each open group: its atoms so far, and those of the last item
    at = 0
    while at < len(pattern):
        char, size = pattern[at], 1
        if char == "(":
            total.append(0)
            last.append(0)
        elif char == ")" and len(total) > 1:
            size = max(1, total.pop())
            last.pop()
            total[-1], last[-1] = total[-1] + size, size
        elif char == "{" and (count := _COUNT.match(pattern, at)):
            times = max((int(each) if len(each) <= _DIGITS else 10**_DIGITS for each in count.groups() if each), default=1)
            total[-1] += last[-1] * (max(1, times) - 1)
            last[-1] *= max(1, times)
            at = count.end()
            continue
        elif char not in "|*+?":
            at = _atom_end(pattern, at)
            total[-1], last[-1] = total[-1] + 1, 1
            continue
        at += 1
    return sum(total)


def _atom_end(pattern: str, at: int) -> int:
    """The end of the escape, class or character that begins at `at`."""
    if pattern[at] == "\\":
        end = pattern.find("}", at) if pattern[at + 1 : at + 3] in ("p{", "P{", "x{", "u{") else -1
        return end + 1 if end > 0 else at + 2
    if pattern[at] != "[":
        return at + 1
    end = at + 1
    end += pattern[end : end + 1] == "^"
    end += pattern[end : end + 1] == "]"
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return end + 1
