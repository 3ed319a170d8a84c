"""A fetch that a test can repeat. Not in `model_stores`, which also runs where `baton` is not installed."""

from pathlib import Path
from typing import Any, NamedTuple

from baton.models.fetch import fetcher
from baton.models.fetch.fetcher import FetchOptions
from baton.models.fetch.manifest import Manifest
from baton.models.fetch.store import Wanted
from baton.models.fetch.stores import connect

TALE = Path(__file__).resolve().parents[2] / "baton" / "models" / "tale"
WEIGHTS = "model.safetensors"
BIG = 3 << 20


class Fetched(NamedTuple):
    wanted: Wanted
    folder: Path
    said: list[str]

    def run(self, stall_s: float = 20, ca: str = "", **how: Any) -> Manifest:
        how = {"attempts": 3, "pause_s": 0.0, "lock_s": 30} | how
        return fetcher.fetch(self.wanted, self.folder, lambda: connect(self.wanted, stall_s, ca), FetchOptions(**how), self.said.append)
