"""The measures by which a router serves less under overload, as the configuration writes it (`router.degrade`)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["speculation", "max_tokens", "priority"]
FORM = re.compile(r"speculation|max_tokens=[1-9][0-9]{0,8}|priority=-?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Measure:
    """speculation: nothing is guessed. max_tokens: no answer is longer. priority: requests of a higher number are refused."""

    kind: Kind
    value: int = 0


def read_measures(texts: Sequence[str]) -> tuple[Measure, ...]:
    """Raises ValueError for a text that is no measure, or that does no more than one before it."""
    least: dict[str, int] = {}
    measures = []
    for text in texts:
        if FORM.fullmatch(text) is None:
            raise ValueError(f"{text!r} is no measure: speculation, max_tokens=N or priority=N")
        kind, _, value = text.partition("=")
        if kind in least and int(value or 0) >= least[kind]:
            raise ValueError(f"{text!r} does no more than a level before it")
        least[kind] = int(value or 0)
        measures.append(Measure(kind, least[kind]))  # type: ignore[arg-type]  # one of Kind, says FORM
    return tuple(measures)
