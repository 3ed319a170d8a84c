"""What every arm of a comparison gets whole: cores, or GPUs. An arm decides only how many of its workers prefill."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from baton.cluster.gpus import find, visible


class ClusterError(RuntimeError):
    """A cluster did not start, or arms are not comparable; the text says what to look at."""


class Hardware(Protocol):
    @property
    def workers(self) -> int:
        """That fill it."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What every arm is configured with because of it."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a reader of the report has to know of it, beside the machine."""

    def place(self, prefill: int) -> dict[str, str]:
        """What an arm is configured with whose first `prefill` workers only prefill."""

    def check(self, arm: str, config: Mapping[str, Any]) -> None:
        """Raises ClusterError for the configuration (`section.key` → value) of an arm that uses less, or more."""


def default_cores() -> tuple[int, ...]:
    """All cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Cores:
    """Each worker computes on `threads` cores of its own."""

    cores: tuple[int, ...]
    threads: int = 1

    def __post_init__(self) -> None:
        """Raises ClusterError for cores that this process may not use, or a number of cores that is not a multiple of `threads`."""
        allowed = default_cores()
        if missing := sorted(set(self.cores) - set(allowed)):
            raise ClusterError(f"cores: {missing} cannot be used; this machine offers {list(allowed)}")
        if self.threads < 1 or len(self.cores) % self.threads or not self.cores:
            raise ClusterError(f"threads: workers of {self.threads} cores do not fill {len(self.cores)} cores")

    def __str__(self) -> str:
        return f"{len(self.cores)} cores"

    @property
    def workers(self) -> int:
        return len(self.cores) // self.threads

    @property
    def settings(self) -> Mapping[str, str]:
        return {"engine.threads": str(self.threads)}

    @property
    def facts(self) -> Mapping[str, Any]:
        return {}

    def place(self, prefill: int) -> dict[str, str]:
        at = prefill * self.threads
        pools = {"prefill.cores": self.cores[:at], "decode.cores": self.cores[at:]}
        return {key: str(list(cores)) for key, cores in pools.items() if cores}

    def check(self, arm: str, config: Mapping[str, Any]) -> None:
        used = [tuple(config[f"{role}.cores"]) for role in ("prefill", "decode") if config[f"{role}.replicas"]]
        workers = config["prefill.replicas"] + config["decode.replicas"]
        if sorted(core for cores in used for core in cores) != sorted(self.cores) or workers != self.workers:
            raise ClusterError(f"arm {arm} uses cores {used} and {workers} workers, not all of {list(self.cores)}")


@dataclass(frozen=True, slots=True)
class WorkerGpus:
    """Each worker computes on `parallel` GPUs of its own; the launcher chooses which. `names`: of those that there are."""

    count: int
    parallel: int
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that make no comparison."""
        if self.parallel < 1 or self.count < 1 or self.count % self.parallel:
            raise ValueError(f"tensor-parallel: workers of {self.parallel} GPUs do not fill {self.count}")
        if self.workers < 2:
            each = f"{self.parallel} GPUs" if self.parallel > 1 else "a GPU"
            raise ValueError(f"gpus: {self.count} is one worker; prefill and decode with {each} of their own need {2 * self.parallel}")

    def __str__(self) -> str:
        return f"{self.count} GPUs" + (f", {self.parallel} for each worker" if self.parallel > 1 else "")

    @property
    def workers(self) -> int:
        return self.count // self.parallel

    @property
    def settings(self) -> Mapping[str, str]:
        return {"engine.device": "cuda", "prefill.gpus": str(self.parallel), "decode.gpus": str(self.parallel)}

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"gpus": ", ".join(self.names), "gpus_used": self.count}

    def place(self, prefill: int) -> dict[str, str]:
        return {}

    def check(self, arm: str, config: Mapping[str, Any]) -> None:
        used = sum(config[f"{role}.replicas"] * config[f"{role}.gpus"] for role in ("prefill", "decode"))
        if used != self.count:
            raise ClusterError(f"arm {arm} uses {used:g} GPUs, not all of {self.count}")


def find_gpus(count: int, parallel: int, env: Mapping[str, str] = os.environ, nvml: Any = None) -> WorkerGpus:
    """Raises ValueError as `WorkerGpus` does and for a CUDA_VISIBLE_DEVICES that names what is not there, and ClusterError if there are too
    few or they are unlike: an arm would be faster by the GPU that it got."""
    wanted = WorkerGpus(count, parallel, ())
    host = find(nvml)
    there = visible(host, env)
    if len(there) < count:
        why = f": {host.reason}" if host.reason else ": CUDA_VISIBLE_DEVICES hides others" if len(there) < len(host.gpus) else ""
        raise ClusterError(f"gpus: {count} are asked for, and {len(there)} can be used here{why}")
    if len(kinds := sorted({device.kind for device in there})) > 1:
        raise ClusterError(f"gpus: {' and '.join(kinds)} are unlike: have CUDA_VISIBLE_DEVICES name those of one kind")
    return WorkerGpus(wanted.count, wanted.parallel, tuple(f"{device}" for device in there))


def with_ranks(vllm: str, parallel: int, engines: Sequence[str]) -> str:
    """engine.vllm with so many tensor-parallel ranks. Raises ValueError, also for an engine that has none."""
    if parallel == 1:
        return vllm
    if others := sorted(set(engines) - {"vllm"}):
        raise ValueError(f"tensor-parallel: {others[0]} computes on one GPU; name --engines vllm")
    try:
        given = yaml.safe_load(vllm) or {}
    except yaml.YAMLError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"vllm: {vllm!r} is no mapping of arguments")
    if given.get("tensor_parallel_size", parallel) != parallel:
        raise ValueError(f"vllm: tensor_parallel_size {given['tensor_parallel_size']} is not --tensor-parallel {parallel}")
    return json.dumps({**given, "tensor_parallel_size": parallel})
