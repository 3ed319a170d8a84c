"""Recorded workloads, read from files in the forms in which they are published.

    sharegpt   JSON list of {"id", "conversations": [{"from", "value"}, ...]}, or one such object after another
               A conversation is a session: human text is encoded and becomes the prompt of a turn, the encoded answer's length its
               output_tokens (the answer itself is the server's own in a replay). Text of the system, or of several messages in a row,
               joins the next prompt; answers in a row are one answer; an answer before any question and a question without an answer are
               left out. No times.
    mooncake   JSONL of {"timestamp" ms, "input_length", "output_length", "hash_ids"}, one id for each 512 tokens begun: the same id holds
               the same tokens wherever it stands (Qin et al., "Mooncake", 2024). Without "hash_ids" a prompt shares nothing.
    burstgpt   CSV with the columns Timestamp (s), Request tokens, Response tokens; others are ignored, Session ID too: the trace does not
               say whether a request's tokens hold those of the session before it (Wang et al., "BurstGPT", 2024)
    azure      CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens; 2023 and 2024 (Patel et al., "Splitwise", 2024;
               Stojkovic et al., "DynamoLLM", 2025). Times without an offset are UTC.
    plain      JSONL of {"tokens": [ids] or "prompt_tokens": n, "output_tokens": n} and, optionally, "at" s, "session", "think_s": ours.
               `at` is given for all requests or for none, where a later turn of a session may lack it.

Where a trace gives lengths only, the prompt is drawn at random from the seed and shares nothing with the others.
Times are seconds after the earliest request that was kept (plain: as written), and the items are sorted by them.

Two kinds of lines give no item. *Malformed* ones raise WorkloadError with file, line and field; with `lenient` they are counted instead.
*Unusable* ones are well-formed and always counted: a request without prompt or without answer (BurstGPT records a failed request as
0 response tokens, and an open-loop replay of one would ask for nothing), a conversation without a question that is answered, a request
beyond `max_tokens`. A file that yields no item at all raises, since a run of nothing is nobody's wish.
"""

import codecs
import csv
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, get_args

from loadtest.workload import MAX_TOKENS, Item, Vocabulary, Window, WorkloadError, scaled

Format = Literal["sharegpt", "mooncake", "burstgpt", "azure", "plain"]
FORMATS: tuple[Format, ...] = get_args(Format)

MOONCAKE_BLOCK = 512  # tokens
MAX_LINE = 1 << 26  # bytes of a line, or characters of a conversation: a file without line ends must not fill the memory
CHUNK = 1 << 20  # bytes

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Trace:
    items: tuple[Item, ...]
    skipped: Mapping[str, int]  # reason -> lines (sharegpt: conversations; requests where the reason is a request's)
    format: Format


def read(
    path: str | Path,
    format: Format | Literal["auto"] = "auto",
    *,
    first_id: int,
    vocab: int,
    seed: int = 0,
    encode: Encode | None = None,
    limit: int | None = None,
    factor: float = 1.0,
    max_tokens: int | None = None,
    lenient: bool = False,
    block: int = MOONCAKE_BLOCK,
) -> Trace:
    """The first `limit` requests of a file.

    first_id, vocab   token ids are drawn from [first_id, vocab); those that the file holds are below vocab
    encode            text to token ids, without special tokens; needed for sharegpt
    factor            as in `workload.scale`, before the request is kept: a long trace need not be held at full length (8 bytes a token)
    max_tokens        as in `workload.bound`, after the scaling; requests beyond do not count towards the limit
    block             tokens of a hash id (mooncake)

    Raises WorkloadError; also where the file cannot be opened."""
    path = Path(path)
    if format != "auto" and format not in FORMATS:
        raise WorkloadError(f"format: {format!r} is none of auto, {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise WorkloadError(f"limit: {limit} is less than 1")
    if block < 1:
        raise WorkloadError(f"block: {block} is less than 1")
    chosen = detect(path) if format == "auto" else format
    reader = _reader(chosen, Vocabulary(first_id, vocab), seed, encode, block)
    window = Window(max_tokens) if max_tokens is not None else None
    skipped: Counter[str] = Counter()

    def items() -> Generator[Item, None, None]:
        with _open(path) as file:
            records = reader.records(file)
            while True:
                line = 0
                try:
                    line, record = next(records)
                    requests = list(reader.requests(record))
                except StopIteration:
                    return
                except _Malformed as error:
                    if not lenient:
                        raise WorkloadError(f"{path}, line {error.line or line}: {error}") from None
                    skipped[error.reason] += 1
                    continue  # where the records themselves broke off, `next` says so now
                if not requests:
                    skipped[reader.nothing] += 1
                for request in requests:
                    if not request.tokens or request.output_tokens == 0:
                        skipped["no prompt tokens" if not request.tokens else "no output tokens"] += 1
                        continue
                    item = scaled(request, factor)
                    if window and not window.admits(item):
                        skipped["more than max_tokens"] += 1
                        continue
                    yield item

    with closing(items()) as stream:
        kept = list(islice(stream, limit))
    if not kept:
        counts = "; ".join(f"{number} skipped: {reason}" for reason, number in skipped.items())
        raise WorkloadError(f"{path}: no request in it" + (f" ({counts})" if counts else ""))
    return Trace(tuple(_by_time(kept, rebase=chosen != "plain")), dict(skipped), chosen)


def detect(path: str | Path) -> Format:
    """The format, from the first line that is not blank. Raises WorkloadError if it is none of ours."""
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
    columns = {_column(name) for name in text.split(",")}
    if _column("Request tokens") in columns:
        return "burstgpt"
    if _column("ContextTokens") in columns:
        return "azure"
    raise WorkloadError(f"{path}: the format cannot be told from {_short(text)}; it is none of {', '.join(FORMATS)}")


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error


def _by_time(items: list[Item], rebase: bool) -> list[Item]:
    """Sorted by `at`; equal times, and turns without one, keep their places. Without times nothing moves."""
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


# What a line can be wrong in


class _Malformed(Exception):
    def __init__(self, field: str, problem: str, value: object = None, line: int = 0) -> None:
        self.reason = f"{field}: {problem}" if field else problem  # without the value, so that lines of one kind count together
        self.line = line  # 0: that of the record
        super().__init__(self.reason if value is None else f"{self.reason}: {_short(value)}")


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def _number(record: Mapping[str, object], field: str, least: float = 0) -> float:
    value = record.get(field)
    if value is None:
        raise _Malformed(field, "is missing")
    if isinstance(value, str):  # of a CSV file
        try:
            value = float(value) if value.isascii() and "_" not in value else None
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Malformed(field, "not a number", record[field])
    if not value < 1e15:  # as NaN is
        raise _Malformed(field, "not a plausible number", record[field])
    if value < least:
        raise _Malformed(field, f"less than {least:g}", record[field])
    return value


def _count(record: Mapping[str, object], field: str, least: int = 0) -> int:
    """A count of tokens. 906.0 is one, since pandas writes such."""
    value = _number(record, field, least)
    if value != int(value):
        raise _Malformed(field, "not a whole number", record[field])
    if value > MAX_TOKENS:
        raise _Malformed(field, f"more than {MAX_TOKENS}", record[field])
    return int(value)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _Malformed("", "not UTF-8", raw[error.start : error.start + 8]) from None


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _Malformed("", "not a JSON object", value)
    return value


def _json_line(raw: bytes) -> dict[str, object]:
    text = _text(raw)
    try:
        return _object(json.loads(text))
    except (ValueError, RecursionError):  # JSONDecodeError is a ValueError; so are integers of thousands of digits
        raise _Malformed("", "not JSON", text) from None


# Files as records


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1, undecoded: one that is not UTF-8 must not hide the others."""
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            raise _Malformed("", f"longer than {MAX_LINE} bytes; the rest of the file is left out", line=number)
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line := line.strip():
            yield number, line


class _JsonValues:
    """The elements of a JSON list, or values one after another, read in chunks, each with the line on which it begins."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._buffer = ""
        self._at = 0  # index in the buffer
        self._line = 1  # of that index
        self._ended = False
        self._broken: _Malformed | None = None  # what comes after the buffer

    def __iter__(self) -> Iterator[tuple[int, object]]:
        listed = self._peek() == "["
        if listed:
            self._advance(self._at + 1)
        separator = False
        while (char := self._peek()) and not (listed and char == "]"):
            if separator:
                if char != ",":
                    raise self._malformed(self._at)
                self._advance(self._at + 1)
                self._peek()
            line = self._line
            yield line, self._value()
            separator = listed
        if listed and not char:
            raise self._malformed(self._at)

    def _value(self) -> object:
        size = CHUNK
        while True:
            try:
                value, end = DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                # the buffer may end inside the value; a literal or an escape that is cut is shorter than 16 characters
                end = len(self._buffer.rstrip())
                unterminated = error.msg.startswith("Unterminated string")
                cut = unterminated or error.pos > end - 16
                if self._ended or not cut or len(self._buffer) - self._at > MAX_LINE:
                    raise self._malformed(end if unterminated else error.pos) from None
                self._fill(size)
                size *= 2  # so that a long value is not parsed again for every chunk
            except (ValueError, RecursionError):
                raise self._malformed(self._at) from None
            else:
                self._advance(end)
                return value

    def _peek(self) -> str:
        """The next character that is not blank, "" at the end; the position moves there."""
        while True:
            blank = WHITESPACE.match(self._buffer, self._at)
            self._advance(blank.end() if blank else self._at)
            if self._at < len(self._buffer) or self._ended:
                return self._buffer[self._at : self._at + 1]
            self._fill(CHUNK)

    def _fill(self, size: int) -> None:
        if self._broken:
            raise self._broken
        raw = self._file.read(size)
        self._ended = not raw
        rest = self._buffer[self._at :]
        try:
            text = self._decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            text = error.object[: error.start].decode()
            line = self._line + rest.count("\n") + text.count("\n")
            self._broken = _Malformed("", "not UTF-8; the rest of the file is left out", line=line)
        self._buffer, self._at = rest + text, 0

    def _advance(self, at: int) -> None:
        self._line += self._buffer.count("\n", self._at, at)
        self._at = at

    def _malformed(self, at: int) -> _Malformed:
        line = self._line + self._buffer.count("\n", self._at, at)
        if at >= len(self._buffer.rstrip()):
            return _Malformed("", "the file ends inside the JSON", line=line)
        return _Malformed("", "not JSON; the rest of the file is left out", self._buffer[at : at + 40], line)


WHITESPACE = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder()


# Records as requests


class _Reader(Protocol):
    nothing: str  # why a record gives no request

    def records(self, file: BinaryIO) -> Iterator[tuple[int, object]]: ...
    def requests(self, record: object) -> Iterable[Item]: ...


def _reader(format: Format, vocabulary: Vocabulary, seed: int, encode: Encode | None, block: int) -> _Reader:
    if format == "sharegpt":
        if encode is None:
            raise WorkloadError("encode: a sharegpt file holds text, which needs a tokenizer")
        return _ShareGpt(encode)
    if format == "mooncake":
        return _Mooncake(vocabulary, seed, block)
    if format == "plain":
        return _Plain(vocabulary, seed)
    if format == "burstgpt":
        return _Csv(vocabulary, seed, "Timestamp", "Request tokens", "Response tokens", _number)
    return _Csv(vocabulary, seed, "TIMESTAMP", "ContextTokens", "GeneratedTokens", _moment)


class _ShareGpt:
    nothing = "no question with an answer"
    QUESTION = ("human", "user", "system")
    ANSWER = ("gpt", "assistant", "chatgpt", "bard", "bing")

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._conversations = 0  # ids in published files are not unique

    def records(self, file: BinaryIO) -> Iterator[tuple[int, object]]:
        return iter(_JsonValues(file))

    def requests(self, record: object) -> list[Item]:
        number = self._conversations
        self._conversations += 1
        messages = _object(record).get("conversations")
        if not isinstance(messages, list):
            raise _Malformed("conversations", "is missing" if messages is None else "not a list", messages)
        turns: list[tuple[list[int], int]] = []  # prompt, tokens of the answer
        prompt: list[int] = []
        asked = False
        for message in messages:
            role, tokens = self._message(message)
            if role in self.QUESTION:
                prompt += tokens
                asked = asked or role != "system"
            elif asked:
                turns.append((prompt, len(tokens)))
                prompt, asked = [], False
            elif turns:
                turns[-1] = (turns[-1][0], turns[-1][1] + len(tokens))
        session = f"c{number}" if len(turns) > 1 else ""
        return [Item(tuple(prompt), answer, session) for prompt, answer in turns]

    def _message(self, message: object) -> tuple[str, list[int]]:
        if not isinstance(message, dict):
            raise _Malformed("conversations", "a message is not a JSON object", message)
        role, text = message.get("from"), message.get("value")
        if role not in self.QUESTION and role not in self.ANSWER:
            raise _Malformed("from", "nobody we know", role)
        if not isinstance(text, str):
            raise _Malformed("value", "not a text", text)
        # an emoji cut in half by an escape has no UTF-8 form, and tokenizers refuse it
        return str(role), list(self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")))


class _Mooncake:
    nothing = ""

    def __init__(self, vocabulary: Vocabulary, seed: int, block: int) -> None:
        self._draw = vocabulary.draw
        self._seed = seed
        self._block = block
        self._rng = random.Random(f"{seed} prompts")
        self._tokens = lru_cache(maxsize=1 << 14)(self._draw_block)  # 64 MiB; published traces hold 180,000 blocks

    def records(self, file: BinaryIO) -> Iterator[tuple[int, object]]:
        return _lines(file)

    def requests(self, record: object) -> list[Item]:
        assert isinstance(record, bytes)
        fields = _json_line(record)
        at = _number(fields, "timestamp") / 1000
        prompt, output = _count(fields, "input_length"), _count(fields, "output_length")
        return [Item(self._prompt(fields.get("hash_ids"), prompt), output, at=at)]

    def _prompt(self, ids: object, count: int) -> tuple[int, ...]:
        if ids is None:
            return self._draw(self._rng, count)
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise _Malformed("hash_ids", "not a list of whole numbers", ids)
        if len(ids) != math.ceil(count / self._block):
            raise _Malformed("hash_ids", f"not one for each {self._block} tokens begun", f"{len(ids)} for {count} tokens")
        return tuple(token for number in ids for token in self._tokens(number))[:count]

    def _draw_block(self, number: int) -> tuple[int, ...]:
        return self._draw(random.Random(f"{self._seed} block {number}"), self._block)


class _Csv:
    """Columns are found by name, upper or lower case, so that releases that differ in the others read alike."""

    nothing = ""

    def __init__(
        self, vocabulary: Vocabulary, seed: int, at: str, prompt: str, output: str, moment: Callable[[Mapping[str, object], str], float]
    ) -> None:
        self._draw = vocabulary.draw
        self._rng = random.Random(f"{seed} prompts")
        self._at, self._prompt, self._output = at, prompt, output
        self._moment = moment
        self._columns: dict[str, int] = {}

    def records(self, file: BinaryIO) -> Iterator[tuple[int, object]]:
        for line, raw in _lines(file):
            if self._columns:
                yield line, raw
            else:
                self._columns = self._header(raw, line)

    def requests(self, record: object) -> list[Item]:
        assert isinstance(record, bytes)
        cells = self._cells(record)
        fields = {name: cells[place].strip() for name, place in self._columns.items() if place < len(cells)}
        at = self._moment(fields, self._at)
        prompt, output = _count(fields, self._prompt), _count(fields, self._output)
        if output == 0:
            prompt = min(prompt, 1)  # it is skipped, so its tokens need not be drawn
        return [Item(self._draw(self._rng, prompt), output, at=at)]

    def _header(self, raw: bytes, line: int) -> dict[str, int]:
        places = {_column(name): place for place, name in enumerate(self._cells(raw))}
        for name in (self._at, self._prompt, self._output):
            if _column(name) not in places:
                raise _Malformed(name, "no such column; the rest of the file is left out", line=line)
        return {name: places[_column(name)] for name in (self._at, self._prompt, self._output)}

    def _cells(self, raw: bytes) -> list[str]:
        try:
            return next(csv.reader([_text(raw)], strict=True))
        except csv.Error:
            raise _Malformed("", "not CSV", raw[:40]) from None


def _column(name: str) -> str:
    return name.strip().strip('"').strip().lower()


MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,9})?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII)
EPOCH = datetime(2023, 1, 1, tzinfo=UTC)  # near the traces, so that a float still resolves their 100 ns


def _moment(record: Mapping[str, object], field: str) -> float:
    """Seconds since EPOCH."""
    text = record.get(field)
    if not text:
        raise _Malformed(field, "is missing")
    match = MOMENT.fullmatch(str(text))
    try:
        if match is None:
            raise ValueError
        date, time, fraction, sign, hours, minutes = match.groups()
        offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
        whole = datetime.fromisoformat(f"{date} {time}").replace(tzinfo=timezone(-offset if sign == "-" else offset))
    except ValueError:
        raise _Malformed(field, "not a time as 2023-11-16 18:15:46.6805900", text) from None
    return (whole - EPOCH).total_seconds() + float(fraction or 0)


class _Plain:
    nothing = ""
    FIELDS = ("tokens", "prompt_tokens", "output_tokens", "at", "session", "think_s")

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._vocabulary = vocabulary
        self._rng = random.Random(f"{seed} prompts")
        self._timed: bool | None = None  # whether the requests have times; None: there was none yet
        self._latest: dict[str, float] = {}  # session -> `at` of its last turn that had one

    def records(self, file: BinaryIO) -> Iterator[tuple[int, object]]:
        return _lines(file)

    def requests(self, record: object) -> list[Item]:
        assert isinstance(record, bytes)
        fields = _json_line(record)
        for field in fields:
            if field not in self.FIELDS:
                raise _Malformed(field, f"unknown; the fields are {', '.join(self.FIELDS)}")
        output = _count(fields, "output_tokens", least=1)
        think = _number(fields, "think_s") if fields.get("think_s") is not None else 0.0
        tokens = self._tokens(fields)
        session = "" if fields.get("session") is None else fields["session"]
        if isinstance(session, bool) or not isinstance(session, str | int):
            raise _Malformed("session", "not a text or a whole number", session)
        session = str(session)
        return [Item(tokens, output, session, self._time(fields, session), think)]

    def _time(self, fields: Mapping[str, object], session: str) -> float | None:
        """Last, since it remembers: a line that is skipped must leave no trace."""
        at = _number(fields, "at") if fields.get("at") is not None else None
        later_turn = session in self._latest
        if self._timed is not None and (at is not None) != self._timed and not (later_turn and at is None):
            raise _Malformed("at", "is missing, but the requests before have it" if self._timed else "given, but not for all before")
        if at is not None and session and at < self._latest.get(session, 0.0):
            raise _Malformed("at", "earlier than the turn before it", at)
        if self._timed is None:
            self._timed = at is not None
        if at is not None and session:
            self._latest[session] = at
        return at

    def _tokens(self, fields: Mapping[str, object]) -> tuple[int, ...]:
        if ("tokens" in fields) == ("prompt_tokens" in fields):
            raise _Malformed("tokens", "either tokens or prompt_tokens is needed, not both")
        if "prompt_tokens" in fields:
            return self._vocabulary.draw(self._rng, _count(fields, "prompt_tokens", least=1))
        tokens = fields["tokens"]
        if not isinstance(tokens, list) or not tokens:
            raise _Malformed("tokens", "not a list of token ids", tokens)
        if len(tokens) > MAX_TOKENS:
            raise _Malformed("tokens", f"more than {MAX_TOKENS}")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self._vocabulary.vocab:
                raise _Malformed("tokens", f"not a token id below {self._vocabulary.vocab}", token)
        return tuple(tokens)
