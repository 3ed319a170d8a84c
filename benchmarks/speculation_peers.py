"""Peers beside `benchmarks/speculation.py`: the same prompts, each peer with guesses and without, in turns. What counts is a peer's own
factor.

vLLM's CPU build runs from the environment that `python scripts/install_vllm.py` makes, or `benchmarks/peers.py --install vllm`. What is not
installed, or fails, is a hole with its reason.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peers.engines import ROOT, Places, environment
from peers.process import Driver, DriverError

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
START_DEADLINE_S, ROUND_DEADLINE_S = 600, 300  # it compiles the model when it starts
GROUPS = 4  # of a round, at most: the peers' steps are longer
CONTEXT = 1024


@dataclass(slots=True)
class Peers:
    """Those that run, by name: without guesses first."""

    places: Places
    threads: int
    most: int  # streams
    holes: dict[str, str] = field(default_factory=dict)  # arm → why it does not run
    _drivers: dict[str, Driver] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._stack.close()

    def start(self, model: Path, draft: Path | None) -> None:
        """Starts those that can read the model. Call it once."""
        arms: dict[str, Mapping[str, Any] | None] = {"vllm": None, "vllm ngram": NGRAM}
        if draft is not None:
            arms["vllm draft"] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
        python = self._vllm()
        for arm, speculation in arms.items():
            if python is None or self.holes.get("vllm"):
                self.leave_out(
                    arm, "not installed: python scripts/install_vllm.py" if python is None else "without guesses it does not start"
                )
                continue
            settings = {**environment("vllm", self.threads, self.places.cache), **VLLM}
            driver = Driver([str(python), "-P", "-m", "peers.drivers.vllm"], settings, self.places.log(f"speculation {arm}"))
            self._stack.callback(driver.end)
            asked = {"do": "start", "model": str(model), "dtype": "float32", "context": CONTEXT, "max_seqs": self.most}
            try:
                driver.ask({**asked, "max_batched_tokens": 2048, "speculation": speculation}, START_DEADLINE_S)
            except DriverError as error:
                self.leave_out(arm, str(error))
                continue
            driver.sleep()
            self._drivers[arm] = driver

    def rates(self, groups: Sequence[Sequence[list[int]]], tokens: int) -> dict[str, float]:
        """Tokens/s of each arm, greedy: prompts of a group begin together, and each answer has so many tokens."""
        found = dict[str, float]()
        for arm, driver in list(self._drivers.items()):
            said, seconds = 0, 0.0
            try:
                with driver.awake():
                    for prompts in groups[:GROUPS]:
                        asked = {"do": "run", "prompts": list(prompts), "outputs": [tokens] * len(prompts)}
                        count, taken = together(driver.ask(asked, ROUND_DEADLINE_S)["times"])
                        said, seconds = said + count, seconds + taken
            except DriverError as error:
                self._drivers.pop(arm).end()
                self.leave_out(arm, str(error))
                continue
            if seconds > 0:
                found[arm] = said / seconds
        return found

    def leave_out(self, arm: str, why: str) -> None:
        self.holes[arm] = why
        print(f"left out: {arm}: {why}", file=sys.stderr, flush=True)

    def _vllm(self) -> Path | None:
        beside = ROOT / ".venv-vllm" / "bin" / "python"
        if self.places.installed("vllm"):
            return self.places.python("vllm")
        return beside if beside.exists() else None


def together(times: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Tokens, and seconds, from the moment when each stream has a token until the first one ends. `times`: of each stream's tokens."""
    start, end = max(row[0] for row in times), min(row[-1] for row in times)
    return sum(start < at <= end for row in times for at in row), max(0.0, end - start)
