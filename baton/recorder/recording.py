"""The file of a recording: JSON, one value a line. Sections follow one another, so files may be joined; each is of one process.

    {"baton_recording": 1, "process": .., "role": .., "why": .., "at": .., "config": {..}, "code": .., "methods": {tape: [..]}, ..}
    {"request": {..}}                     one that has ended, as `baton trace` shows it
    {"stretch": tape, "began": .., "state": ..}     the state before the calls that follow
    {"note": name, "items": {..}}         a part of what else is known of that moment
    {"call": [number of the method, arguments, keyword arguments, result]}
    {"end": {"lines": .., "digest": ..}}  BLAKE2b-128 of the lines before

Values are those of `baton.recorder.values`. A section without its end is truncated, and refused.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from baton.recorder.tape import UNENDED, Raised, Tape
from baton.recorder.values import ValueWriter

VERSION = 1
DIGEST_BYTES = 16
MOST_LINE = 256 << 20  # bytes
NOTED_AT_ONCE = 1024  # items in a line: while one is made, no other thread runs


class BadRecording(ValueError):
    """The file is no recording that can be read. The text says why, and where."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    method: str  # "object.method"
    args: Any  # JSON, as the results
    named: Any
    result: Any
    line: int


@dataclass(slots=True)
class RecordedStretch:
    tape: str
    began: float
    state: Any
    line: int
    notes: dict[str, list[Any]] = field(default_factory=dict)  # name → parts
    calls: list[RecordedCall] = field(default_factory=list)


@dataclass(slots=True)
class Section:
    head: dict[str, Any]
    requests: list[dict[str, Any]] = field(default_factory=list)
    stretches: list[RecordedStretch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TapeSource:
    """A tape, and how its values are written."""

    tape: Tape
    writer: Mapping[str, Any]  # keyword arguments of `ValueWriter`, without `rename`


def lines(head: Mapping[str, Any], requests: Iterable[Any], sources: Iterable[TapeSource], secret: bytes) -> Iterator[bytes]:
    """One section. Block keys are replaced by their keyed digests under `secret`: which are equal is kept, and what they were made from
    cannot be found by trying. Any thread may write while the tapes go on."""
    sources = list(sources)
    digest, count = blake2b(digest_size=DIGEST_BYTES), 0
    renamed: dict[bytes, bytes] = {}

    def rename(key: bytes) -> bytes:
        if (known := renamed.get(key)) is None:
            known = renamed[key] = blake2b(key, digest_size=len(key), key=secret).digest()
        return known

    methods = {source.tape.name: list(source.tape.methods) for source in sources}
    refused = {source.tape.name: source.tape.refused for source in sources if source.tape.refused}
    values: Iterator[Any] = _values({"baton_recording": VERSION, **head, "methods": methods, "not_recorded": refused}, requests)
    for value in _chained(values, *(_stretches(source, rename) for source in sources)):
        line = json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        digest.update(line)
        count += 1
        yield line
    yield json.dumps({"end": {"lines": count, "digest": digest.hexdigest()}}).encode() + b"\n"


def _chained(*many: Iterator[Any]) -> Iterator[Any]:
    for each in many:
        yield from each


def _values(head: dict[str, Any], requests: Iterable[Any]) -> Iterator[Any]:
    yield head
    for request in requests:
        yield {"request": request}


def _stretches(source: TapeSource, rename: Any) -> Iterator[Any]:
    for stretch in source.tape.stretches():
        calls = list(stretch.calls)  # others may come meanwhile; the state and the notes cover them, too
        writer = ValueWriter(rename, **source.writer)
        notes = {name: list(each.items()) for name, each in stretch.notes.items()}
        yield {"stretch": source.tape.name, "began": stretch.began, "state": writer.write(stretch.state)}
        for name, items in notes.items():
            for start in range(0, len(items), NOTED_AT_ONCE):
                yield {"note": name, "items": writer.write(dict(items[start : start + NOTED_AT_ONCE]))}
        for number, args, named, result in calls:
            if result is UNENDED:
                return
            given = writer.write(tuple(args)), writer.write(named) if named else None  # first: what is written once is read in this order
            told = {"raised": [result.kind, result.text]} if isinstance(result, Raised) else writer.write(result)
            yield {"call": [number, *given, told]}


def read(path: Path) -> Iterator[Section]:
    """The sections of a file, one after the other. Raises BadRecording and OSError."""
    section: Section | None = None
    digest, count = blake2b(digest_size=DIGEST_BYTES), 0
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE):
            number += 1
            value = _parsed(line, path, number)
            if section is None:
                section, count, digest = Section(_head(value, path, number)), 0, blake2b(digest_size=DIGEST_BYTES)
            elif "end" in value:
                if value["end"] != {"lines": count, "digest": digest.hexdigest()}:
                    raise BadRecording(
                        f"{path}: line {number}: the section of {section.head.get('process')} was changed after it was written"
                    )
                yield section
                section = None
                continue
            else:
                _take(section, value, path, number)
            digest.update(line)
            count += 1
    if section is not None:
        raise BadRecording(f"{path} is truncated: the section of {section.head.get('process')} has no end")
    if not number:
        raise BadRecording(f"{path} is empty")


def _parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        why = f"{path} is truncated" if not line.endswith(b"\n") else f"{path}: line {number} is not JSON: this is no recording"
        raise BadRecording(why) from None
    if not isinstance(value, dict):
        raise BadRecording(f"{path}: line {number} is no object: this is no recording")
    return value


def _head(value: dict[str, Any], path: Path, number: int) -> dict[str, Any]:
    version = value.get("baton_recording")
    if version is None:
        raise BadRecording(f"{path}: line {number} does not begin a recording")
    if version != VERSION:
        raise BadRecording(f"{path}: line {number}: the recording has version {version}; this program reads version {VERSION}")
    return value


def _take(section: Section, value: dict[str, Any], path: Path, number: int) -> None:
    try:
        if "call" in value:
            method, args, named, result = value["call"]
            stretch = section.stretches[-1]
            stretch.calls.append(RecordedCall(section.head["methods"][stretch.tape][method], args, named, result, number))
        elif "stretch" in value:
            section.stretches.append(RecordedStretch(value["stretch"], value["began"], value["state"], number))
        elif "note" in value:
            section.stretches[-1].notes.setdefault(value["note"], []).append(value["items"])
        else:
            section.requests.append(value["request"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise BadRecording(f"{path}: line {number} is no part of a recording") from None
