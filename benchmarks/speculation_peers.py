"""Peers beside `benchmarks/speculation.py`: the same prompts, each peer with guesses and without, in turns. What counts is a peer's own
factor.

vLLM's CPU build runs from the environment that `python scripts/install_vllm.py` makes, or `benchmarks/peers.py --install vllm`, llama.cpp
from `benchmarks/peers.py --install llama.cpp`. vLLM reads folders alone, in float32. llama.cpp reads the GGUF file, or the folder converted
to float32; its Python package guesses for one sequence, by prompt lookup. What is not installed, or fails, is a hole with its reason.
"""

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peers.engines import ROOT, Places, environment
from peers.process import Driver, DriverError
from safetensors.torch import load_file, save_file

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
LLAMA = "llama.cpp"
INSTALL = {"vllm": "python scripts/install_vllm.py", LLAMA: f"python benchmarks/peers.py --install {LLAMA}"}
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
LOOKUP = (4, 8)  # as NGRAM has it: its longest n-gram, its tokens
START_DEADLINE_S, ROUND_DEADLINE_S = 600, 300  # vLLM compiles the model when it starts
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

    def start(self, model: Path, draft: Path | None, gguf: Path | None) -> None:
        """Starts those that can read the model, a folder, or its GGUF file. Call it once."""
        if gguf is None:
            arms: dict[str, Mapping[str, Any] | None] = {"vllm": None, "vllm ngram": NGRAM}
            if draft is not None:
                arms["vllm draft"] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
            command = self._vllm()
            for arm, speculation in arms.items():
                asked = {"model": str(model), "dtype": "float32", "max_seqs": self.most, "max_batched_tokens": 2048}
                self._start(arm, command, VLLM, {**asked, "speculation": speculation})
        command = self.places.command("llama_lookup", LLAMA) if self.places.installed(LLAMA) else None
        if command is not None and gguf is None:
            try:
                gguf = self._converted(model, command)
            except DriverError as error:
                self.leave_out(LLAMA, str(error))
        for arm, lookup in ((LLAMA, None), (f"{LLAMA} lookup", LOOKUP)):
            self._start(arm, command, {}, {"model": str(gguf), "threads": self.threads, "lookup": lookup})

    def _start(self, arm: str, command: list[str] | None, settings: Mapping[str, str], asked: Mapping[str, Any]) -> None:
        peer = arm.split()[0]
        if command is None or peer in self.holes:
            self.leave_out(arm, f"not installed: {INSTALL[peer]}" if command is None else "without guesses it does not start")
            return
        settings = {**environment(peer, self.threads, self.places.cache), **settings}
        driver = Driver(command, settings, self.places.log(f"speculation {arm}"))
        self._stack.callback(driver.end)
        try:
            driver.ask({"do": "start", "context": CONTEXT, **asked}, START_DEADLINE_S)
        except DriverError as error:
            self.leave_out(arm, str(error))
            return
        driver.sleep()
        self._drivers[arm] = driver

    def _converted(self, model: Path, command: list[str]) -> Path:
        """A folder with the model in float32, as llama.cpp reads it."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        shutil.copy(model / "config.json", folder)
        save_file({name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}, folder / "model.safetensors")
        with Driver(command, environment(LLAMA, self.threads, self.places.cache), self.places.log(f"speculation {LLAMA}")) as driver:
            driver.ask({"do": "convert", "model": str(folder), "precision": "float32", "out": str(folder)}, START_DEADLINE_S)
        return folder

    def rates(self, groups: Sequence[Sequence[list[int]]], tokens: int) -> dict[str, float]:
        """Tokens/s of each arm, greedy: prompts of a group begin together, and each answer has so many tokens."""
        found = dict[str, float]()
        for arm, driver in list(self._drivers.items()):
            if arm.startswith(LLAMA) and len(groups[0]) > 1:
                continue
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

    def _vllm(self) -> list[str] | None:
        beside = ROOT / ".venv-vllm" / "bin" / "python"
        if self.places.installed("vllm"):
            return self.places.command("vllm", "vllm")
        return [str(beside), "-P", "-m", "peers.drivers.vllm"] if beside.exists() else None


def together(times: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Tokens, and seconds, from the moment when each stream has a token until the first one ends. `times`: of each stream's tokens."""
    start, end = max(row[0] for row in times), min(row[-1] for row in times)
    return sum(start < at <= end for row in times for at in row), max(0.0, end - start)
