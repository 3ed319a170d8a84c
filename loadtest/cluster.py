"""The clusters that `compare` measures, started and stopped by the commands that a person would type, all on the same cores."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.campaign import Arm
from loadtest.priority import cluster_niceness

UP_WITHIN_S = 600.0  # vLLM may compile first
DOWN_WITHIN_S = 90.0
# The only keys in which arms may differ.
TOPOLOGY = frozenset(
    {
        "prefill.replicas",
        "decode.replicas",
        "prefill.cores",
        "decode.cores",
        "router.bypass_tokens",
        "engine.max_num_batched_tokens",
        "engine.batching",
        "engine.kind",
        "engine.vllm",
    }
)
ENGINES = ("baton", "vllm")
OWN_ARMS = {  # of Baton's own engine alone
    "static": "vLLM batches continuously",
    "dynamic": "vLLM batches continuously",
    "unchunked": "vLLM reserves memory for as many tokens as a step may have",
}
VLLM_BLOCK = "32"  # tokens: vLLM on a CPU takes only multiples of it
BYPASS_TOKENS = 128
UNCHUNKED = 1_048_576  # tokens in one step: any prompt is one chunk


class ClusterError(RuntimeError):
    """A cluster did not start, or arms are not comparable; the text says what to look at."""


def default_cores() -> tuple[int, ...]:
    """All cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Hardware:
    """Every arm uses all of these cores: each worker computes on `threads` cores of its own."""

    cores: tuple[int, ...]
    threads: int

    def __post_init__(self) -> None:
        """Raises ClusterError for cores that this process may not use, or a number of cores that is not a multiple of `threads`."""
        allowed = default_cores()
        if missing := sorted(set(self.cores) - set(allowed)):
            raise ClusterError(f"cores: {missing} cannot be used; this machine offers {list(allowed)}")
        if self.threads < 1 or len(self.cores) % self.threads or not self.cores:
            raise ClusterError(f"threads: workers of {self.threads} cores do not fill {len(self.cores)} cores")

    @property
    def workers(self) -> int:
        return len(self.cores) // self.threads


def over_engines(arms: Sequence[Arm], engines: Sequence[str], vllm: str) -> tuple[Arm, ...]:
    """Each arm over each engine. `vllm`: arguments of vLLM, as engine.vllm. With one engine, arms keep their names.

    Raises ClusterError for an unknown engine, or an arm that an engine does not have.
    """
    if unknown := sorted(set(engines) - set(ENGINES)):
        raise ClusterError(f"engines: {unknown[0]!r} is not one of {', '.join(ENGINES)}")
    made = []
    for engine in dict.fromkeys(engines):
        for arm in arms:
            if engine == "vllm" and (kind := arm.name.partition("@")[0]) in OWN_ARMS:
                raise ClusterError(f"arms: {kind} is a mode of Baton's own engine: {OWN_ARMS[kind]}")
            chosen = {"engine.kind": engine, "engine.vllm": vllm if engine == "vllm" else "{}"}
            name = arm.name if len(set(engines)) == 1 else f"{arm.name}/{engine}"
            made.append(Arm(name, {**arm.topology, **chosen}, arm.explained + (", over vLLM" if engine == "vllm" else "")))
    return tuple(made)


def make_arms(names: Sequence[str], hardware: Hardware, ratio: tuple[int, int], chunk: int) -> tuple[Arm, ...]:
    """The arms by name, all on the same cores. `ratio`: prefill to decode workers. `chunk`: most tokens in one step, for arms whose
    name does not give its own as in `colocated@64`.

    Raises ClusterError for an unknown name, a chunk that is not a number, or a ratio by which the workers cannot be split.
    """
    n, (prefill_share, decode_share) = hardware.workers, ratio
    whole = {"prefill.replicas": "0", "decode.replicas": str(n), "decode.cores": str(list(hardware.cores))}
    shares = prefill_share + decode_share
    prefill = n * prefill_share // shares
    split = {
        "prefill.replicas": str(prefill),
        "decode.replicas": str(n - prefill),
        "prefill.cores": str(list(hardware.cores[: prefill * hardware.threads])),
        "decode.cores": str(list(hardware.cores[prefill * hardware.threads :])),
    }
    pair = f"{prefill}:{n - prefill}"
    known = {
        "colocated": (whole, f"{n} workers that do both, prompts in chunks of {{}} tokens among decodes"),
        "unchunked": (whole, f"{n} workers that do both, a prompt in one step"),
        "static": ({**whole, "engine.batching": "static"}, f"{n} workers that do both, in full batches that no request joins later"),
        "dynamic": ({**whole, "engine.batching": "dynamic"}, f"{n} workers that do both, in batches that no request joins later"),
        "disaggregated": ({**split, "router.bypass_tokens": "0"}, f"{pair} prefill and decode workers, every prompt handed over"),
        "bypass": (
            {**split, "router.bypass_tokens": str(BYPASS_TOKENS)},
            f"{pair} prefill and decode workers, prompts with up to {BYPASS_TOKENS} uncached tokens stay on the decode worker",
        ),
    }
    arms: list[Arm] = []
    for name in names:
        kind, _, own = name.partition("@")
        if kind not in known:
            raise ClusterError(f"arms: {name!r} is not one of {', '.join(known)}")
        if own and (not own.isdigit() or kind == "unchunked"):
            raise ClusterError(f"arms: {name!r}: after @ comes the number of tokens in one step, for an arm that works in chunks")
        if kind in ("disaggregated", "bypass") and (min(ratio) < 1 or (n * prefill_share) % shares):
            raise ClusterError(f"ratio: {n} workers cannot be split {prefill_share}:{decode_share}")
        topology, words = known[kind]
        size = UNCHUNKED if kind == "unchunked" else int(own or chunk)
        arms.append(Arm(name, {**topology, "engine.max_num_batched_tokens": str(size)}, words.format(size)))
    return tuple(arms)


def flags(settings: Mapping[str, str]) -> list[str]:
    return [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value)]


def config_of(settings: Mapping[str, str]) -> dict[str, Any]:
    """The whole configuration that a cluster with these settings would have, as `section.key`. Raises ClusterError."""
    done = _baton("config", "print", "--json", *flags(settings))
    if done.returncode:
        raise ClusterError(done.stderr.strip())
    tree = json.loads(done.stdout)
    return {f"{section}.{key}": value for section, values in tree.items() for key, value in values.items()}


def check_equal(arms: Sequence[Arm], common: Mapping[str, str], hardware: Hardware) -> dict[str, Any]:
    """The configuration that all arms share. Raises ClusterError if they differ in more than their topology, or in their hardware."""
    configs = {arm.name: config_of({**common, **arm.topology}) for arm in arms}
    first, *others = arms
    for arm in others:
        differing = {key for key, value in configs[arm.name].items() if value != configs[first.name][key]} - TOPOLOGY
        if differing:
            raise ClusterError(f"arms {first.name} and {arm.name} differ in {', '.join(sorted(differing))}: they cannot be compared")
    for arm in arms:
        config = configs[arm.name]
        used = [tuple(config[f"{role}.cores"]) for role in ("prefill", "decode") if config[f"{role}.replicas"]]
        workers = config["prefill.replicas"] + config["decode.replicas"]
        if sorted(core for cores in used for core in cores) != sorted(hardware.cores) or workers != hardware.workers:
            raise ClusterError(f"arm {arm.name} uses cores {used} and {workers} workers, not all of {list(hardware.cores)}")
    return {key: value for key, value in configs[first.name].items() if key not in TOPOLOGY}


class RunningCluster:
    """`async with RunningCluster(settings, name) as endpoints`, which holds "grpc" and "http" (host:port)."""

    def __init__(self, settings: Mapping[str, str], name: str) -> None:
        self._settings = settings
        self._name = name

    async def __aenter__(self) -> dict[str, str]:
        """Raises ClusterError."""
        ports = ("--router.port", "0", "--router.admin-port", "0", "--router.http-port", "0", "--router.page-port", "0")
        arguments = ["up", "--detach", "--name", self._name, *ports, *flags(self._settings)]
        up = asyncio.ensure_future(asyncio.to_thread(_baton, *arguments, timeout_s=UP_WITHIN_S, niceness=cluster_niceness()))
        try:
            done = await asyncio.shield(up)
        except asyncio.CancelledError as interruption:  # it goes on starting, and nobody else would end it
            await asyncio.wait({up})
            await self.__aexit__(None, interruption, None)
            raise
        if done.returncode:
            raise ClusterError(done.stderr.strip())
        return dict(json.loads(done.stdout)["endpoints"])

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raises ClusterError if the cluster did not stop, because the next arm would share its cores with what is left of it. An error
        that is already being raised, such as an interruption, is not replaced."""
        try:
            done = await asyncio.to_thread(_baton, "down", "--name", self._name, timeout_s=DOWN_WITHIN_S)
            if done.returncode:
                raise ClusterError(f"`baton down --name {self._name}` failed: {done.stderr.strip()}")
        except ClusterError:
            if error is None:
                raise


def _baton(*arguments: str, timeout_s: float = 60.0, niceness: int = 0) -> subprocess.CompletedProcess[str]:
    """Raises ClusterError if the command takes longer than `timeout_s`."""
    command = [*(["nice", "-n", str(niceness)] if niceness else []), sys.executable, "-m", "baton", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`baton {arguments[0]}` did not end within {timeout_s:g} s") from None
