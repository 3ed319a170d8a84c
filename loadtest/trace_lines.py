"""Reads the lines or JSON values of a trace file, with line numbers, and the fields in them. Raises Malformed for anything wrong."""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from loadtest.workload import MAX_TOKENS

MAX_LINE = 1 << 26  # bytes of a line, or characters of a conversation: a file without line ends must not fill the memory
CHUNK = 1 << 20  # bytes


class Malformed(Exception):
    def __init__(self, field: str, problem: str, value: object = None, line: int = 0) -> None:
        self.reason = f"{field}: {problem}" if field else problem  # without the value, so that similar lines count together
        self.line = line  # 0: the line of the record
        super().__init__(self.reason if value is None else f"{self.reason}: {short(value)}")


def short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def number_in(record: Mapping[str, object], field: str, least: float = 0) -> float:
    value = record.get(field)
    if value is None:
        raise Malformed(field, "is missing")
    if isinstance(value, str):  # from a CSV file
        try:
            value = float(value) if value.isascii() and "_" not in value else None
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(field, "not a number", record[field])
    if not value < 1e15:  # also true of NaN
        raise Malformed(field, "not a plausible number", record[field])
    if value < least:
        raise Malformed(field, f"less than {least:g}", record[field])
    return value


def count_in(record: Mapping[str, object], field: str, least: int = 0) -> int:
    """A count of tokens. 906.0 is accepted, because pandas writes counts like that."""
    value = number_in(record, field, least)
    if value != int(value):
        raise Malformed(field, "not a whole number", record[field])
    if value > MAX_TOKENS:
        raise Malformed(field, f"more than {MAX_TOKENS}", record[field])
    return int(value)


def text_of(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Malformed("", "not UTF-8", raw[error.start : error.start + 8]) from None


def json_object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise Malformed("", "not a JSON object", value)
    return value


def json_line(raw: bytes) -> dict[str, object]:
    text = text_of(raw)
    try:
        return json_object(json.loads(text))
    except (ValueError, RecursionError):  # JSONDecodeError is a ValueError; so are integers of thousands of digits
        raise Malformed("", "not JSON", text) from None


# Files as records


def lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1. They are not decoded: one that is not UTF-8 must not hide the others."""
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            raise Malformed("", f"longer than {MAX_LINE} bytes; the rest of the file is left out", line=number)
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line := line.strip():
            yield number, line


class JsonValues:
    """The elements of a JSON list, or consecutive values, read in chunks, each with the line on which it begins."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._buffer = ""
        self._at = 0  # index in the buffer
        self._line = 1  # of that index
        self._ended = False
        self._broken: Malformed | None = None  # why nothing can be read after the buffer

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
                # the buffer may end inside the value; a truncated literal or escape is shorter than 16 characters
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
            self._broken = Malformed("", "not UTF-8; the rest of the file is left out", line=line)
        self._buffer, self._at = rest + text, 0

    def _advance(self, at: int) -> None:
        self._line += self._buffer.count("\n", self._at, at)
        self._at = at

    def _malformed(self, at: int) -> Malformed:
        line = self._line + self._buffer.count("\n", self._at, at)
        if at >= len(self._buffer.rstrip()):
            return Malformed("", "the file ends inside the JSON", line=line)
        return Malformed("", "not JSON; the rest of the file is left out", self._buffer[at : at + 40], line)


WHITESPACE = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder()


def column(name: str) -> str:
    return name.strip().strip('"').strip().lower()
