"""The arms: ways to use the same hardware, each a configuration that differs from the others' in TOPOLOGY alone. It starts nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.campaign import Arm
from loadtest.hardware import ClusterError, Hardware

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
WHOLE = ("colocated", "unchunked", "static", "dynamic")
SPLIT = ("disaggregated", "bypass")
BYPASS_TOKENS = 128
UNCHUNKED = 1_048_576  # tokens in one step: any prompt is one chunk
Ratio = tuple[int, int] | None  # prefill to decode workers; None: every split


@dataclass(frozen=True, slots=True)
class Way:
    """A name as it is given: `colocated`, `colocated@64` (its own chunk), `disaggregated-1:3` (its own split)."""

    kind: str
    split: tuple[int, int] | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        split = "" if self.split is None else "-{}:{}".format(*self.split)
        return self.kind + split + ("" if self.chunk is None else f"@{self.chunk}")


def parse(name: str) -> Way:
    """Raises ClusterError."""
    body, at, own = name.partition("@")
    kind, dash, split = body.partition("-")
    if kind not in (*WHOLE, *SPLIT):
        raise ClusterError(f"arms: {name!r} is not one of {', '.join((*WHOLE, *SPLIT))}")
    if at and (not own.isdigit() or kind == "unchunked"):
        raise ClusterError(f"arms: {name!r}: after @ comes the number of tokens in one step, for an arm that works in chunks")
    prefill, _, decode = split.partition(":")
    if dash and not (kind in SPLIT and prefill.isdigit() and decode.isdigit()):
        raise ClusterError(f"arms: {name!r}: after - come prefill and decode workers, 1:3, for an arm that has both")
    return Way(kind, (int(prefill), int(decode)) if dash else None, int(own) if at else None)


def ways(names: Sequence[str], workers: int, ratio: Ratio) -> Iterator[tuple[str, Way]]:
    """Each arm's name with its split. With `ratio` None, every split of an arm that names none is an arm.

    Raises ClusterError for a split that is none of so many workers.
    """
    for name in names:
        way = parse(name)
        if way.kind in WHOLE:
            yield name, way
        elif way.split is not None:
            if min(way.split) < 1 or sum(way.split) != workers:
                raise ClusterError(f"arms: {name!r}: there are {workers} workers, at least one for each")
            yield name, way
        elif ratio is None:
            if workers < 2:
                raise ClusterError(f"ratio: {workers} worker cannot be split")
            every = (Way(way.kind, (prefill, workers - prefill), way.chunk) for prefill in range(1, workers))
            yield from ((str(each), each) for each in every)
        else:
            shares = sum(ratio)
            if min(ratio) < 1 or (workers * ratio[0]) % shares:
                raise ClusterError(f"ratio: {workers} workers cannot be split {ratio[0]}:{ratio[1]}; `all` tries every split")
            prefill = workers * ratio[0] // shares
            yield name, Way(way.kind, (prefill, workers - prefill), way.chunk)


def make_arms(names: Sequence[str], hardware: Hardware, ratio: Ratio, chunk: int | None) -> tuple[Arm, ...]:
    """The arms by name, all on the same hardware. `chunk`: most tokens in one step, for arms whose name does not give its own; None leaves
    it to the engine.

    Raises ClusterError for an unknown name, a chunk that is not a number, or a split that is not possible.
    """
    return tuple(_arm(name, way, hardware, chunk) for name, way in ways(names, hardware.workers, ratio))


def _arm(name: str, way: Way, hardware: Hardware, chunk: int | None) -> Arm:
    prefill, decode = way.split or (0, hardware.workers)
    size = UNCHUNKED if way.kind == "unchunked" else chunk if way.chunk is None else way.chunk
    modes = {
        "static": {"engine.batching": "static"},
        "dynamic": {"engine.batching": "dynamic"},
        "disaggregated": {"router.bypass_tokens": "0"},
        "bypass": {"router.bypass_tokens": str(BYPASS_TOKENS)},
    }
    both, pair = f"{decode} workers that do both", f"{prefill}:{decode} prefill and decode workers"
    chunks = "in the engine's own chunks" if size is None else f"in chunks of {size} tokens"
    words = {
        "colocated": f"{both}, prompts {chunks} among decodes",
        "unchunked": f"{both}, a prompt in one step",
        "static": f"{both}, in full batches that no request joins later",
        "dynamic": f"{both}, in batches that no request joins later",
        "disaggregated": f"{pair}, every prompt handed over",
        "bypass": f"{pair}, prompts with up to {BYPASS_TOKENS} uncached tokens stay on the decode worker",
    }
    topology = {"prefill.replicas": str(prefill), "decode.replicas": str(decode), **hardware.place(prefill), **modes.get(way.kind, {})}
    if size is not None:
        topology["engine.max_num_batched_tokens"] = str(size)
    return Arm(name, topology, words[way.kind])


def check_engines(engines: Sequence[str]) -> None:
    """Raises ClusterError for an unknown one."""
    if unknown := sorted(set(engines) - set(ENGINES)):
        raise ClusterError(f"engines: {unknown[0]!r} is not one of {', '.join(ENGINES)}")


def over_engines(arms: Sequence[Arm], engines: Sequence[str], vllm: str) -> tuple[Arm, ...]:
    """Each arm over each engine. `vllm`: arguments of vLLM, as engine.vllm. With one engine, arms keep their names.

    Raises ClusterError for an unknown engine, or an arm that an engine does not have.
    """
    check_engines(engines)
    made = []
    for engine in dict.fromkeys(engines):
        for arm in arms:
            if engine == "vllm" and (kind := parse(arm.name).kind) in OWN_ARMS:
                raise ClusterError(f"arms: {kind} is a mode of Baton's own engine: {OWN_ARMS[kind]}")
            chosen = {"engine.kind": engine, "engine.vllm": vllm if engine == "vllm" else "{}"}
            name = arm.name if len(set(engines)) == 1 else f"{arm.name}/{engine}"
            made.append(Arm(name, {**arm.topology, **chosen}, arm.explained + (", over vLLM" if engine == "vllm" else "")))
    return tuple(made)


def common_part(arms: Sequence[Arm], configs: Mapping[str, Mapping[str, Any]], hardware: Hardware) -> dict[str, Any]:
    """The configuration that all arms share. `configs`: arm → `section.key` → value. Raises ClusterError if they differ in more than their
    topology, or in their hardware."""
    first, *others = arms
    for arm in others:
        differing = {key for key, value in configs[arm.name].items() if value != configs[first.name][key]} - TOPOLOGY
        if differing:
            raise ClusterError(f"arms {first.name} and {arm.name} differ in {', '.join(sorted(differing))}: they cannot be compared")
    for arm in arms:
        hardware.check(arm.name, configs[arm.name])
    return {key: value for key, value in configs[first.name].items() if key not in TOPOLOGY}
