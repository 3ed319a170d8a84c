"""Recorded workloads, read from files in the formats in which they are published (`trace_formats` lists them).

    Reading   how to read a file: which part of it, and how lengths become tokens
    read      the requests of a file, sorted by time
    detect    its format

If a trace has only lengths, each prompt is drawn at random from the seed and shares nothing with the others. Tokens are drawn only for the
requests that are kept, and a file is read line by line, so memory grows with what is kept, not with the file.
Times are seconds after the earliest request of the file (plain: as written), and the items are sorted by them.

Two kinds of lines yield no item. *Malformed* ones raise WorkloadError with file, line and field; with `lenient` they are counted instead.
*Unusable* ones are well-formed and always counted: a request without prompt or without answer (BurstGPT records a failed request as
0 response tokens, and an open-loop replay of one would ask for nothing), a conversation without an answered question, a request beyond
`max_tokens`. A file that yields no item at all raises WorkloadError, because an empty run measures nothing.
"""

import codecs
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from loadtest.trace_formats import FORMATS, MOONCAKE_BLOCK, Encode, Format, Reader, Request, make_reader
from loadtest.trace_lines import Malformed, column, short
from loadtest.workload import ContextWindow, Item, Vocabulary, WorkloadError, scaled

TOLD_EVERY = 50_000  # rows


@dataclass(frozen=True, slots=True)
class Trace:
    items: tuple[Item, ...]
    skipped: Mapping[str, int]  # reason -> lines (sharegpt: conversations; requests where the reason is a request's)
    format: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Raises WorkloadError for settings that fit no file."""

    first_id: int  # token ids are drawn from [first_id, vocab); those that the file holds are below vocab
    vocab: int
    format: str = "auto"
    seed: int = 0
    encode: Encode | None = None  # text to token ids, without special tokens; needed for sharegpt
    limit: int | None = None  # requests
    openings: int | None = None  # sessions and single requests; ends the reading early
    within_s: float | None = None  # only requests less than this long after the earliest
    factor: float = 1.0  # as in `workload.scale`, applied before the request is kept
    max_tokens: int | None = None  # as in `workload.bound`, after the scaling; longer requests do not count towards the limit
    lenient: bool = False
    block: int = MOONCAKE_BLOCK  # tokens of a hash id (mooncake)

    def __post_init__(self) -> None:
        if self.format != "auto" and self.format not in FORMATS:
            raise WorkloadError(f"format: {self.format!r} is not one of auto, {', '.join(FORMATS)}")
        for name in ("limit", "openings", "block"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise WorkloadError(f"{name}: {value} is less than 1")


def read(path: str | Path, reading: Reading, note: Callable[[int], None] = lambda rows: None) -> Trace:
    """Calls `note` now and then with the number of rows read so far. Raises WorkloadError, also if the file cannot be opened."""
    path = Path(path)
    rows = _Rows(path, reading, note)
    with closing(rows.requests()) as requests:
        kept = _first(rows, requests, reading) if reading.within_s is None else _earliest(rows, requests, reading.within_s, reading.limit)
    if not kept:
        counts = "; ".join(f"{number} skipped: {reason}" for reason, number in rows.skipped.items())
        raise WorkloadError(f"{path}: no request in it" + (f" ({counts})" if counts else ""))
    return Trace(tuple(_by_time(kept, rebase=rows.format != "plain")), dict(rows.skipped), rows.format)


def _first(rows: "_Rows", requests: Iterator[Request], reading: Reading) -> list[Item]:
    kept: list[Item] = []
    sessions: set[str] = set()
    openings = 0
    for request in requests:
        if (item := rows.item(request)) is None:
            continue
        openings += not item.session or item.session not in sessions
        if reading.openings is not None and openings > reading.openings:
            break
        if item.session:
            sessions.add(item.session)
        kept.append(item)
        if len(kept) == reading.limit:
            break
    return kept


def _earliest(rows: "_Rows", requests: Iterator[Request], within_s: float, limit: int | None) -> list[Item]:
    """The requests less than `within_s` after the earliest, wherever in the file that is. A turn without a time goes with its session.

    The earliest so far is never before the earliest of all, so a request that is too late for the former is too late for the latter, and
    its tokens are not even drawn.
    """
    kept: dict[int, tuple[float, Item]] = {}
    sessions: dict[str, float] = {}  # session -> when its last turn with a time was
    start = math.inf
    for number, request in enumerate(requests):
        at = sessions.get(request.session) if request.at is None else request.at
        if at is None or at - start >= within_s or (item := rows.item(request)) is None:
            continue
        kept[number] = (at, item)
        if item.session:
            sessions[item.session] = at
        if at < start:
            start = at
            for late in [number for number, (at, _) in kept.items() if at - start >= within_s]:
                del kept[late]
        if len(kept) == limit:
            break
    return [item for _, item in kept.values()]


class _Rows:
    """The requests of a file, one at a time, and the count of what yielded none."""

    def __init__(self, path: Path, reading: Reading, note: Callable[[int], None]) -> None:
        self.format: Format = detect(path) if reading.format == "auto" else next(name for name in FORMATS if name == reading.format)
        self.skipped: Counter[str] = Counter()
        self._path = path
        self._lenient = reading.lenient
        self._factor = reading.factor
        self._window = ContextWindow(reading.max_tokens) if reading.max_tokens is not None else None
        self._note = note
        vocabulary = Vocabulary(reading.first_id, reading.vocab)
        self._reader: Reader = make_reader(self.format, vocabulary, reading.seed, reading.encode, reading.block)

    def requests(self) -> Generator[Request, None, None]:
        """The requests with a prompt and an answer. Raises WorkloadError."""
        with _open(self._path) as file:
            for number, record in enumerate(self._records(file), start=1):
                for request in record:
                    if request.prompt_tokens and request.output_tokens:
                        yield request
                    else:
                        self.skipped["no output tokens" if request.prompt_tokens else "no prompt tokens"] += 1
                if number % TOLD_EVERY == 0:
                    self._note(number)

    def item(self, request: Request) -> Item | None:
        """None if the item is longer than `max_tokens`; such items are counted."""
        item = scaled(request.item(), self._factor)
        if self._window and not self._window.admits(item):
            self.skipped["more than max_tokens"] += 1
            return None
        return item

    def _records(self, file: BinaryIO) -> Iterator[list[Request]]:
        records = self._reader.records(file)
        while True:
            line = 0
            try:
                line, record = next(records)
                requests = self._reader.requests(record)
            except StopIteration:
                return
            except Malformed as error:
                if not self._lenient:
                    raise WorkloadError(f"{self._path}, line {error.line or line}: {error}") from None
                self.skipped[error.reason] += 1
                continue  # if the iterator itself raised, the next `next` ends the loop
            if not requests:
                self.skipped[self._reader.nothing] += 1
            yield requests


def detect(path: str | Path) -> Format:
    """The format, from the first line that is not blank. Raises WorkloadError if it is unknown."""
    path = Path(path)
    with _open(path) as file:
        head = next((line.strip() for line in iter(lambda: file.readline(1 << 16), b"") if line.removeprefix(codecs.BOM_UTF8).strip()), b"")
    text = head.decode("utf-8", errors="replace").removeprefix("\ufeff").strip()
    if not text:
        raise WorkloadError(f"{path}: the file is empty")
    if text[0] == "[":
        return "sharegpt"
    if text[0] == "{":
        if '"conversations"' in text:
            return "sharegpt"
        if '"input_length"' in text:
            return "mooncake"
        if '"prompt_tokens"' in text or '"tokens"' in text:
            return "plain"
    columns = {column(name) for name in text.split(",")}
    if column("Request tokens") in columns:
        return "burstgpt"
    if column("ContextTokens") in columns:
        return "azure"
    raise WorkloadError(f"{path}: unknown format: {short(text)} does not look like any of {', '.join(FORMATS)}")


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error


def _by_time(items: list[Item], rebase: bool) -> list[Item]:
    """Sorted by `at`; equal times, and turns without a time, keep their order. Without any times, nothing moves."""
    times = [item.at for item in items if item.at is not None]
    if not times:
        return items
    start = min(times) if rebase else 0.0
    keys: list[float] = []
    latest: dict[str, float] = {}
    for item in items:
        key = item.at if item.at is not None else latest[item.session]
        if item.session:
            latest[item.session] = key
        keys.append(key)
    order = sorted(range(len(items)), key=keys.__getitem__)
    return [item if item.at is None else replace(item, at=item.at - start) for item in (items[i] for i in order)]
