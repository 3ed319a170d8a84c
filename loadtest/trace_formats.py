"""The formats in which traces are published. Each has a reader that turns records into requests.

sharegpt   JSON list of {"id", "conversations": [{"from", "value"}, ...]}, or one such object after another
           A conversation is a session. The encoded human text is the prompt of a turn, and the length of the encoded answer is its
           output_tokens (in a replay, the server writes its own answer). System text, and several messages in a row, join the next
           prompt; answers in a row are one answer; an answer before any question and a question without an answer are left out.
           No times.
mooncake   JSONL of {"timestamp" ms, "input_length", "output_length", "hash_ids"}, one id for each block of 512 tokens, the last of which
           may be shorter: the same id means the same tokens wherever it occurs (Qin et al., "Mooncake", 2024). Without "hash_ids" a
           prompt shares nothing.
burstgpt   CSV with the columns Timestamp (s), Request tokens, Response tokens. Other columns are ignored, even Session ID: the trace does
           not say whether a request's tokens include those of its session's earlier requests (Wang et al., "BurstGPT", 2024)
azure      CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens; 2023 and 2024 (Patel et al., "Splitwise", 2024;
           Stojkovic et al., "DynamoLLM", 2025). Times without an offset are UTC.
plain      JSONL of {"tokens": [ids] or "prompt_tokens": n, "output_tokens": n} and, optionally, "at" s, "session", "think_s": Baton's
           own format. All requests have `at`, or none has; only a later turn of a session may lack it.
"""

import csv
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from functools import lru_cache, partial
from typing import BinaryIO, Literal, Protocol, get_args

from loadtest.trace_lines import JsonValues, Malformed, column, count_in, json_line, json_object, lines, number_in, text_of
from loadtest.workload import MAX_TOKENS, Item, Vocabulary, WorkloadError

Format = Literal["sharegpt", "mooncake", "burstgpt", "azure", "plain"]
FORMATS: tuple[Format, ...] = get_args(Format)
MOONCAKE_BLOCK = 512  # tokens

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Request:
    """An item whose tokens have not been drawn yet."""

    prompt_tokens: int
    draw: Callable[[], tuple[int, ...]]  # `prompt_tokens` of them
    output_tokens: int
    session: str = ""
    at: float | None = None
    think_s: float = 0.0

    def item(self) -> Item:
        return Item(self.draw(), self.output_tokens, self.session, self.at, self.think_s)


class Reader(Protocol):
    nothing: str  # why a record yields no request

    def records(self, file: BinaryIO) -> Iterator[tuple[int, object]]: ...
    def requests(self, record: object) -> list[Request]:
        """Raises Malformed."""


def make_reader(format: Format, vocabulary: Vocabulary, seed: int, encode: Encode | None, block: int) -> Reader:
    if format == "sharegpt":
        if encode is None:
            raise WorkloadError("tokenizer: a sharegpt file holds text; name the tokenizer.json that turns it into token ids (--tokenizer)")
        return _ShareGpt(encode)
    if format == "mooncake":
        return _Mooncake(vocabulary, seed, block)
    if format == "plain":
        return _Plain(vocabulary, seed)
    if format == "burstgpt":
        return _Csv(vocabulary, seed, "Timestamp", "Request tokens", "Response tokens", number_in)
    return _Csv(vocabulary, seed, "TIMESTAMP", "ContextTokens", "GeneratedTokens", _moment)


class _ShareGpt:
    nothing = "no question with an answer"
    QUESTION = ("human", "user", "system")
    ANSWER = ("gpt", "assistant", "chatgpt", "bard", "bing")

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._conversations = 0  # ids in published files are not unique

    def records(self, file: BinaryIO) -> Iterator[tuple[int, object]]:
        return iter(JsonValues(file))

    def requests(self, record: object) -> list[Request]:
        number = self._conversations
        self._conversations += 1
        messages = json_object(record).get("conversations")
        if not isinstance(messages, list):
            raise Malformed("conversations", "is missing" if messages is None else "not a list", messages)
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
        return [Request(len(prompt), partial(tuple, prompt), answer, session) for prompt, answer in turns]

    def _message(self, message: object) -> tuple[str, list[int]]:
        if not isinstance(message, dict):
            raise Malformed("conversations", "a message is not a JSON object", message)
        role, text = message.get("from"), message.get("value")
        if role not in self.QUESTION and role not in self.ANSWER:
            raise Malformed("from", "unknown role", role)
        if not isinstance(text, str):
            raise Malformed("value", "not a string", text)
        # an emoji that an escape cuts in half has no UTF-8 form, and tokenizers refuse it
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
        return lines(file)

    def requests(self, record: object) -> list[Request]:
        assert isinstance(record, bytes)
        fields = json_line(record)
        at = number_in(fields, "timestamp") / 1000
        prompt, output = count_in(fields, "input_length"), count_in(fields, "output_length")
        return [Request(prompt, self._prompt(fields.get("hash_ids"), prompt), output, at=at)]

    def _prompt(self, ids: object, count: int) -> Callable[[], tuple[int, ...]]:
        if ids is None:
            return partial(self._draw, self._rng, count)
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise Malformed("hash_ids", "not a list of whole numbers", ids)
        if len(ids) != math.ceil(count / self._block):
            raise Malformed("hash_ids", f"not one for each block of {self._block} tokens", f"{len(ids)} for {count} tokens")
        return lambda: tuple(token for number in ids for token in self._tokens(number))[:count]

    def _draw_block(self, number: int) -> tuple[int, ...]:
        return self._draw(random.Random(f"{self._seed} block {number}"), self._block)


class _Csv:
    """Columns are found by name, in upper or lower case, so releases that differ in other columns are read alike."""

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
        for line, raw in lines(file):
            if self._columns:
                yield line, raw
            else:
                self._columns = self._header(raw, line)

    def requests(self, record: object) -> list[Request]:
        assert isinstance(record, bytes)
        cells = self._cells(record)
        fields = {name: cells[place].strip() for name, place in self._columns.items() if place < len(cells)}
        at = self._moment(fields, self._at)
        prompt, output = count_in(fields, self._prompt), count_in(fields, self._output)
        return [Request(prompt, partial(self._draw, self._rng, prompt), output, at=at)]

    def _header(self, raw: bytes, line: int) -> dict[str, int]:
        places = {column(name): place for place, name in enumerate(self._cells(raw))}
        for name in (self._at, self._prompt, self._output):
            if column(name) not in places:
                raise Malformed(name, "no such column; the rest of the file is left out", line=line)
        return {name: places[column(name)] for name in (self._at, self._prompt, self._output)}

    def _cells(self, raw: bytes) -> list[str]:
        try:
            return next(csv.reader([text_of(raw)], strict=True))
        except csv.Error:
            raise Malformed("", "not CSV", raw[:40]) from None


MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d{1,9})?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII)
EPOCH = datetime(2023, 1, 1, tzinfo=UTC)  # close to the traces, so that a float still resolves their 100 ns


def _moment(record: Mapping[str, object], field: str) -> float:
    """Seconds since EPOCH."""
    text = record.get(field)
    if not text:
        raise Malformed(field, "is missing")
    match = MOMENT.fullmatch(str(text))
    try:
        if match is None:
            raise ValueError
        date, time, fraction, sign, hours, minutes = match.groups()
        offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
        whole = datetime.fromisoformat(f"{date} {time}").replace(tzinfo=timezone(-offset if sign == "-" else offset))
    except ValueError:
        raise Malformed(field, "not a time such as 2023-11-16 18:15:46.6805900", text) from None
    return (whole - EPOCH).total_seconds() + float(fraction or 0)


class _Plain:
    nothing = ""
    FIELDS = ("tokens", "prompt_tokens", "output_tokens", "at", "session", "think_s")

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._vocabulary = vocabulary
        self._rng = random.Random(f"{seed} prompts")
        self._timed: bool | None = None  # whether the requests have times; None: no request yet
        self._latest: dict[str, float] = {}  # session -> `at` of its last turn that had one

    def records(self, file: BinaryIO) -> Iterator[tuple[int, object]]:
        return lines(file)

    def requests(self, record: object) -> list[Request]:
        assert isinstance(record, bytes)
        fields = json_line(record)
        for field in fields:
            if field not in self.FIELDS:
                raise Malformed(field, f"unknown; the fields are {', '.join(self.FIELDS)}")
        output = count_in(fields, "output_tokens", least=1)
        think = number_in(fields, "think_s") if fields.get("think_s") is not None else 0.0
        prompt, draw = self._tokens(fields)
        session = "" if fields.get("session") is None else fields["session"]
        if isinstance(session, bool) or not isinstance(session, str | int):
            raise Malformed("session", "not a string or a whole number", session)
        session = str(session)
        return [Request(prompt, draw, output, session, self._time(fields, session), think)]

    def _time(self, fields: Mapping[str, object], session: str) -> float | None:
        """Called last, because it keeps state: a line that is skipped must not change it."""
        at = number_in(fields, "at") if fields.get("at") is not None else None
        later_turn = session in self._latest
        if self._timed is not None and (at is not None) != self._timed and not (later_turn and at is None):
            raise Malformed("at", "is missing, but earlier requests have it" if self._timed else "given, but earlier requests lack it")
        if at is not None and session and at < self._latest.get(session, 0.0):
            raise Malformed("at", "earlier than the previous turn", at)
        if self._timed is None:
            self._timed = at is not None
        if at is not None and session:
            self._latest[session] = at
        return at

    def _tokens(self, fields: Mapping[str, object]) -> tuple[int, Callable[[], tuple[int, ...]]]:
        if ("tokens" in fields) == ("prompt_tokens" in fields):
            raise Malformed("tokens", "either tokens or prompt_tokens is needed, not both")
        if "prompt_tokens" in fields:
            prompt = count_in(fields, "prompt_tokens", least=1)
            return prompt, partial(self._vocabulary.draw, self._rng, prompt)
        tokens = fields["tokens"]
        if not isinstance(tokens, list) or not tokens:
            raise Malformed("tokens", "not a list of token ids", tokens)
        if len(tokens) > MAX_TOKENS:
            raise Malformed("tokens", f"more than {MAX_TOKENS}")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self._vocabulary.vocab:
                raise Malformed("tokens", f"not a token id below {self._vocabulary.vocab}", token)
        return len(tokens), partial(tuple, tokens)
