"""What a model reads: its tokens of a file, or of texts that were made here."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer

from baton.engine.facts.tokenizer_files import TokenizerFiles
from baton.models.evaluate.general import PROSE
from baton.models.train.corpus import SPECIAL, documents
from baton.models.train.recipe import SEED
from baton.models.train.stories import story

WINDOW = 512  # tokens of a text that are read together; a longer one is cut
SIZES = (150, 350, 1250)  # words of a made document
STORIES = 200
Texts = Mapping[str, Sequence[list[int]]]  # by their kind


@dataclass(frozen=True, slots=True)
class Speller:
    """Text into tokens. `ours`: the model was trained on this project's texts, and knows their marks."""

    tokenizer: Tokenizer
    ours: bool

    @classmethod
    def of(cls, folder: Path) -> "Speller":
        """The speller of a model's folder. Raises ValueError, which names file and field."""
        files = TokenizerFiles.read(folder)
        tokenizer = Tokenizer.from_str(files.definition)
        tokenizer.add_tokens([AddedToken(**asdict(token)) for token in files.added])
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, all(files.ids.get(mark) == i for i, mark in enumerate(SPECIAL)))

    def spell(self, text: str) -> list[int]:
        """Token ids, with what the model's files put around a prompt; texts of this project have it already."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not self.ours).ids
        return ids

    def split(self, known: str, rest: str) -> tuple[list[int], list[int]]:
        """Tokens of `known` and of `rest`, as they are in the text of both: the first token that reaches into `rest` begins it."""
        found = self.tokenizer.encode(known + rest, add_special_tokens=not self.ours)
        # A token of the frame stands at (0, 0); one that ends at the cut belongs to what is known.
        cut = next(i for i, (_, end) in enumerate(found.offsets) if end > len(known))
        last = max(i for i, (_, end) in enumerate(found.offsets) if end > len(known)) + 1
        return found.ids[:cut], found.ids[cut:last]


def made_texts(speller: Speller, tokens: int) -> Texts:
    """Texts that no training and no calibration here has seen: up to so many tokens, but at least one text of each kind."""
    if speller.ours:
        return {"held out": taken(map(speller.spell, _documents("held out")), tokens)}
    prose = taken(map(speller.spell, PROSE[::2]), tokens // 2)
    return {"prose": prose, "stories": taken(map(speller.spell, _stories("held out")), tokens - sum(map(len, prose)))}


def calibration_texts(speller: Speller, tokens: int) -> list[list[int]]:
    """Texts like `made_texts`, but others: what a model is quantised with must not be what it is measured with."""
    if speller.ours:
        return taken(map(speller.spell, _documents("calibration")), tokens)
    prose = taken(map(speller.spell, PROSE[1::2]), tokens // 2)
    return prose + taken(map(speller.spell, _stories("calibration")), tokens - sum(map(len, prose)))


def file_texts(speller: Speller, file: Path, tokens: int) -> list[list[int]]:
    """The texts of a file: the whole of it, or the field `text` of each line of a .jsonl. Raises ValueError, which names file and line."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: cannot be read as text: {error}") from None
    texts = [content]
    if file.suffix == ".jsonl":
        texts = [_text(file, i, line) for i, line in enumerate(content.split("\n"), 1) if line.strip()]
    found = taken((window for text in texts for window in windows(speller.spell(text))), tokens)
    if sum(map(len, found)) < 2:
        raise ValueError(f"{file}: holds no text")
    return found


def windows(ids: list[int]) -> Iterator[list[int]]:
    return (ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW) if len(ids) - start > 1)


def taken(texts: Iterator[list[int]], tokens: int) -> list[list[int]]:
    """The first texts, cut at `WINDOW`, until there are so many tokens; the last one is cut. At least 2 tokens."""
    found: list[list[int]] = []
    left = max(tokens, 2)
    for text in texts:
        if left < 2:
            break
        found.append(text[: min(WINDOW, left)])
        left -= len(found[-1])
    return found


def _text(file: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ValueError(f'{file}, line {number}: is not an object with a text, as {{"text": "…"}}')
    return text


def _documents(split: str) -> Iterator[str]:
    made = [documents(SEED, split, size) for size in SIZES]
    return (next(kind) for _ in range(STORIES) for kind in made)


def _stories(split: str) -> Iterator[str]:
    return islice((story(Random(f"{SEED}/{split}/{i}"), 1 + i % 4).text for i in range(STORIES)), STORIES)
