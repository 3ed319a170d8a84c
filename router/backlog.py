"""What waits for one client to read, in bytes. Tokens wait as the worker sent them, which is a tenth of what they become at a door."""

from dataclasses import dataclass

ENTRY_BYTES = 64  # what keeping a token costs besides its content
TOP_BYTES = 12  # of one alternative of a token, as it waits


@dataclass(slots=True)
class Backlog:
    """The backlog of one answer: its choices share it."""

    size: int = 0  # bytes
