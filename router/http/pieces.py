"""Answers in JSON that may be long: made and sent piece by piece, so that nothing else waits for the whole."""

from collections.abc import Iterable, Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.errors import to_json
from router.turn_budget import TurnBudget

PIECE_BYTES = 64 << 10
JOINING = 1 / 16  # of what it costs to make the same number of bytes
IDS_AT_ONCE = 4096
ENTRIES_AT_ONCE = 64


class InPieces(Response):
    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for number, piece in enumerate(self._pieces, 1):
            await send({"type": "http.response.body", "body": piece, "more_body": number < len(self._pieces)})


async def gather(parts: Iterable[bytes], budget: TurnBudget) -> list[bytes]:
    """The pieces that `parts` make together; at least one."""
    pieces: list[bytes] = []
    for piece in joined(parts):
        pieces.append(piece)
        await rest(piece, budget)
    return pieces or [b""]


def joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same one by one: what is made of `parts` for the next piece is made when that is asked for. Where `parts` fails, what it made
    before comes first."""
    held: list[bytes] = []
    size = 0
    try:
        for part in parts:
            held.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                yield b"".join(held)
                held, size = [], 0
    except Exception:
        if held:
            yield b"".join(held)
        raise
    if held:
        yield b"".join(held)


async def rest(piece: bytes, budget: TurnBudget) -> None:
    """Lets others have their turn after a piece of full size."""
    if len(piece) >= PIECE_BYTES:
        await budget.spend(int(PIECE_BYTES * JOINING))


def members(value: dict[str, object], **lists: Iterable[bytes]) -> Iterator[bytes]:
    """An object: the members of `value`, and after them those of `lists`, whose values are written already."""
    yield to_json(value)[:-1]
    first = not value
    for name, parts in lists.items():
        yield (b"" if first else b",") + to_json(name) + b":"
        yield from parts
        first = False
    yield b"}"


def list_of_ids(ids: Sequence[int]) -> Iterator[bytes]:
    yield b"["
    for at in range(0, len(ids), IDS_AT_ONCE):
        yield (b"," if at else b"") + to_json(ids[at : at + IDS_AT_ONCE])[1:-1]
    yield b"]"


def list_of(entries: Sequence[bytes]) -> Iterator[bytes]:
    """A list of values that are written already."""
    yield b"["
    for at in range(0, len(entries), ENTRIES_AT_ONCE):
        yield (b"," if at else b"") + b",".join(entries[at : at + ENTRIES_AT_ONCE])
    yield b"]"
