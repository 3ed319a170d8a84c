"""What happened to one request, and the file that keeps the records of a run: one JSON object per line.

    {"number": 7, "session": "", "due": 1.25, "sent": 1.2501, "token_times": [1.45, 1.49], "ended": 1.4902, "outcome": "ok", ...}

Times and stages are kept to the microsecond (stages as milliseconds with three decimal places).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

Outcome = Literal["ok", "refused", "failed", "timeout", "cancelled"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class RecordError(ValueError):
    """A line is not a record. The text names the field and, if a file was read, the file and the line."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request as the generator saw it. Times are seconds on the generator's clock from the start of the run."""

    number: int
    session: str
    scheduled: float  # when it was due
    sent: float  # when it was sent; `sent - scheduled` is the generator's own lag
    token_times: tuple[float, ...]  # when each output token reached the client
    ended: float  # end of the stream, however it ended
    outcome: Outcome
    reason: str  # name in Baton's error table ("SATURATED", ...), "" when ok
    prompt_tokens: int
    output_tokens: int
    asked_tokens: int  # output tokens that were requested
    cached_tokens: int
    # From the server: queue, prefill, transfer, decode (which add up to its E2E) and the parts prefill_wait, prefill_compute, read, verify.
    # Empty if the answer was cut short: the server reports stages only at the end of an answer.
    stages_ms: Mapping[str, float]
    prefill_worker: str  # "" = bypass: the decode worker computed the prompt itself
    decode_worker: str
    retries: int
    transport: str  # "" when no KV moved
    kv_bytes: int
    kv_blocks: int
    recomputed_tokens: int

    def to_json(self) -> str:
        """One line, without the newline. Raises ValueError for a time that is not finite."""
        told = {
            "number": self.number,
            "session": self.session,
            "due": round(self.scheduled, 6),
            "sent": round(self.sent, 6),
            "token_times": [round(at, 6) for at in self.token_times],
            "ended": round(self.ended, 6),
            "outcome": self.outcome,
            "reason": self.reason,
            "prompt": self.prompt_tokens,
            "output": self.output_tokens,
            "asked": self.asked_tokens,
            "cached": self.cached_tokens,
            "stages_ms": {name: round(ms, 3) for name, ms in self.stages_ms.items()},
            "prefill_worker": self.prefill_worker,
            "decode_worker": self.decode_worker,
            "retries": self.retries,
            "transport": self.transport,
            "kv_bytes": self.kv_bytes,
            "kv_blocks": self.kv_blocks,
            "recomputed": self.recomputed_tokens,
        }
        return json.dumps(told, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Raises RecordError: not an object, a key that is missing, unknown or of the wrong kind, times that run backwards."""
        told = _Told(_parse(line))
        record = cls(
            number=told.count("number"),
            session=told.text("session"),
            scheduled=told.seconds("due"),
            sent=told.seconds("sent"),
            token_times=told.times("token_times"),
            ended=told.seconds("ended"),
            outcome=told.outcome("outcome"),
            reason=told.text("reason"),
            prompt_tokens=told.count("prompt"),
            output_tokens=told.count("output"),
            asked_tokens=told.count("asked"),
            cached_tokens=told.count("cached"),
            stages_ms=told.stages("stages_ms"),
            prefill_worker=told.text("prefill_worker"),
            decode_worker=told.text("decode_worker"),
            retries=told.count("retries"),
            transport=told.text("transport"),
            kv_bytes=told.count("kv_bytes"),
            kv_blocks=told.count("kv_blocks"),
            recomputed_tokens=told.count("recomputed"),
        )
        told.nothing_left()
        _check_order(record)
        return record


def write(path: Path | str, records: Iterable[Record]) -> None:
    """Replaces the file. Each record is written before the next one is taken, so a killed run loses at most one line."""
    with open(path, "w", encoding="ascii", buffering=1) as file:
        for record in records:
            file.write(record.to_json() + "\n")


def read(path: Path | str) -> "Records":
    return Records(path)


class Records:
    """The records of a file, read one at a time on each iteration.

    After an iteration to the end, `partial` says whether the file ends in half a line, which a killed run leaves and which is not a record.
    Iterating raises OSError, and a RecordError that names file, line and field.
    """

    def __init__(self, path: Path | str) -> None:
        self.partial = False
        self._path = path

    def __iter__(self) -> Iterator[Record]:
        self.partial = False
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if _cut(line):
                    self.partial = True
                    return
                try:
                    record = Record.from_json(line.decode())
                except UnicodeDecodeError:
                    raise RecordError(f"{self._path}:{number}: is not UTF-8") from None
                except RecordError as error:
                    raise RecordError(f"{self._path}:{number}: {error}") from None
                yield record


def _cut(line: bytes) -> bool:
    """Whether the line is only the beginning of an object. A line that parses is whole: only a whole object has its closing brace."""
    if line.endswith(b"\n") or not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _parse(line: str) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"is not JSON ({error})") from None
    if not isinstance(told, dict):
        raise RecordError(f"is not a JSON object but {type(told).__name__}")
    return told


class _Told:
    """The fields of one line, taken one by one. Each is checked for its type; fields that are left at the end are unknown."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str):
            raise RecordError(f"{key}: {value!r} is not a string")
        return value

    def count(self, key: str) -> int:
        value = self._take(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RecordError(f"{key}: {value!r} is not a whole number from 0")
        return value

    def seconds(self, key: str) -> float:
        return _number(key, self._take(key))

    def outcome(self, key: str) -> Outcome:
        value = self.text(key)
        for outcome in OUTCOMES:
            if value == outcome:
                return outcome
        raise RecordError(f"{key}: {value!r} is not one of {', '.join(OUTCOMES)}")

    def times(self, key: str) -> tuple[float, ...]:
        value = self._take(key)
        if not isinstance(value, list):
            raise RecordError(f"{key}: {value!r} is not a list")
        return tuple(_number(f"{key}[{i}]", at) for i, at in enumerate(value))

    def stages(self, key: str) -> dict[str, float]:
        """Accepts any names: a later server may report more stages than this one."""
        value = self._take(key)
        if not isinstance(value, dict):
            raise RecordError(f"{key}: {value!r} is not an object")
        stages = {name: _number(f"{key}.{name}", ms) for name, ms in value.items()}
        for name, ms in stages.items():
            if ms < 0:
                raise RecordError(f"{key}.{name}: {ms} is negative")
        return stages

    def nothing_left(self) -> None:
        if self._fields:
            raise RecordError(f"{', '.join(sorted(self._fields))}: unknown")

    def _take(self, key: str) -> Any:
        try:
            return self._fields.pop(key)
        except KeyError:
            raise RecordError(f"{key}: missing") from None


def _check_order(record: Record) -> None:
    """`due` is left out: a timer may fire a little early."""
    before = record.sent
    for i, at in enumerate((*record.token_times, record.ended)):
        if at < before:
            key = "ended" if i == len(record.token_times) else f"token_times[{i}]"
            raise RecordError(f"{key}: {at} is before {before}, and time does not run backwards")
        before = at


def _number(key: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            if math.isfinite(value):
                return float(value)
        except OverflowError:  # an integer too large for a float
            pass
    raise RecordError(f"{key}: {value!r} is not a finite number")
