"""All figures of one configuration, or of two side by side."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.models.evaluate import measure, questions
from baton.models.evaluate.measure import Continuations, Reading, Tick
from baton.models.evaluate.questions import MultipleChoice
from baton.models.evaluate.reader import Reader
from baton.models.evaluate.texts import Speller, Texts
from baton.models.train.evaluate import DISTANCES

REPORT_S = 5.0
BEGUN = 32  # tokens of a text that a continuation begins with
ROOM = 200  # tokens beyond the distance that a question of recall may have
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured; the time is in proportion."""

    trials: int = 10  # questions at each distance; 0: no recall
    longest: int = DISTANCES[-1]  # tokens between fact and question
    questions: bool = True
    continuations: int = 8
    within_s: float = 900.0  # no further part begins after that
    continued: int = 48  # tokens of each continuation


class Evaluation:
    """The evaluation of one reader, or of two: what is said of the second is beside the first."""

    def __init__(self, readers: Sequence[Reader], speller: Speller, extent: Extent, say: Say) -> None:
        """Raises ValueError if the readers do not share a vocabulary."""
        if len({reader.vocab for reader in readers}) > 1:
            raise ValueError(f"{readers[-1].folder} has {readers[-1].vocab} tokens, {readers[0].folder} has {readers[0].vocab}")
        self._readers, self._speller, self._extent, self._say = readers, speller, extent, say
        self._longest = min(reader.max_len for reader in readers)
        self._end = time.monotonic() + extent.within_s
        self.rows: list[dict[str, Any]] = [{"texts": {}, "recall": {}, "seconds": {}, "left_out": []} for _ in readers]

    def run(self, texts: Texts) -> None:
        """Raises ValueError if logits are not finite. What can be had alone comes first."""
        texts = {kind: [text[: self._longest] for text in of] for kind, of in texts.items()}
        for kind, of in texts.items():
            self._part(kind, sum(map(len, of)), "tokens", partial(self._read, kind, of))
        begun = [text[:BEGUN] for of in texts.values() for text in of][: self._extent.continuations]
        if begun and self._longest > BEGUN:
            self._part("continuations", len(begun), "texts", partial(self._continue, begun))
        for name, made in (("facts", questions.facts), ("sums", questions.sums)) if self._extent.questions else ():
            self._part(name, questions.COUNT, "questions", partial(self._choose, name, made))
        for distance in self._distances() if self._extent.trials else ():
            self._part(f"recall {distance}", self._extent.trials, "questions", partial(self._recall, distance))

    def _distances(self) -> list[int]:
        return [each for each in DISTANCES if each <= self._extent.longest and each + ROOM <= self._longest]

    def _read(self, kind: str, texts: Sequence[list[int]], tick: Tick) -> None:
        for row, reading in zip(self.rows, measure.read(self._readers, texts, tick=tick), strict=True):
            row["texts"][kind] = _told(reading)

    def _continue(self, begun: Sequence[list[int]], tick: Tick) -> None:
        tokens = min(self._extent.continued, self._longest - BEGUN)
        for row, continued in zip(self.rows, measure.go_on(self._readers, begun, tokens, tick), strict=True):
            row["continuations"] = _continued(continued)

    def _choose(self, name: str, made: Callable[[Speller], Iterable[MultipleChoice]], tick: Tick) -> None:
        for row, reader in zip(self.rows, self._readers, strict=True):
            row[name] = measure.choose(reader, made(self._speller), tick)

    def _recall(self, distance: int, tick: Tick) -> None:
        for row, reader in zip(self.rows, self._readers, strict=True):
            row["recall"][distance] = measure.recall(reader, questions.recall(self._speller, distance, self._extent.trials), tick)

    def _part(self, name: str, total: int, unit: str, work: Callable[[Tick], None]) -> None:
        began = said = time.monotonic()
        if began > self._end:
            self._say(f"{name}: left out, the time is over")
            for row in self.rows:
                row["left_out"].append(name)
            return

        def tick(done: int) -> None:
            nonlocal said
            if time.monotonic() - said > REPORT_S:
                said = time.monotonic()
                self._say(f"{name}: {done} of {total} {unit}")

        work(tick)
        took = round(time.monotonic() - began, 2)
        self._say(f"{name}: {total} {unit} in {took:.1f} s")
        for row in self.rows:
            row["seconds"][name] = took


def _told(reading: Reading) -> dict[str, float]:
    names = ("tokens", "loss", "perplexity", "kl", "same_choice")
    return {name: getattr(reading, name) for name in names}


def _continued(told: Continuations) -> dict[str, int]:
    return {name: getattr(told, name) for name in ("tokens", "possible", "same", "drafted", "accepted")}
