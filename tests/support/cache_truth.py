"""Why tokens of prompts were computed, without asking the router: from the prompts that the test itself has sent, and from the blocks that
each worker says it holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from live_cluster import Cluster

from baton.client import Result
from baton.cluster.rpc import NO_PROXY
from baton.engine.core.block_key import KEY_BYTES, extend_keys, root_key
from baton.v1 import worker_pb2, worker_pb2_grpc

BLOCK = 16
Process = tuple[str, int]


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    tenant: str = ""
    salt: str = ""

    @property
    def rooted(self) -> str:
        return f"{self.tenant}\0{self.salt}" if self.tenant else self.salt


@dataclass(frozen=True)
class Moment:
    """What the workers hold before a prompt is sent."""

    processes: Mapping[str, Process]
    pools: Mapping[str, str]
    held: Mapping[str, frozenset[bytes]]


@dataclass
class CacheTruth:
    """The workers lend nothing, and there is one router."""

    live: Cluster
    had: dict[bytes, set[Process]] = field(default_factory=dict)  # who had the block last: several, if they computed it at once
    grown: set[bytes] = field(default_factory=set)  # another block followed
    salts: dict[tuple[str, tuple[int, ...]], set[str]] = field(default_factory=dict)  # tenant, first block → under which
    model: str = ""

    def now(self) -> Moment:
        workers = self.live.workers()
        self.model = workers[0]["model_fingerprint"]
        held = {}
        for worker in workers:
            to = worker_pb2.Addressee(**{name: worker[name] for name in ("incarnation", "model_fingerprint")}, worker=worker["name"])
            with grpc.insecure_channel(worker["address"], [NO_PROXY]) as channel:
                pages = worker_pb2_grpc.WorkerStub(channel).Snapshot(worker_pb2.SnapshotRequest(to=to), timeout=30)
                found = b"".join(page.keys for page in pages)
            held[worker["name"]] = frozenset(found[at : at + KEY_BYTES] for at in range(0, len(found), KEY_BYTES))
        processes = {worker["name"]: (worker["name"], int(worker["incarnation"])) for worker in workers}
        return Moment(processes, {worker["name"]: worker["pool"] for worker in workers}, held)

    def keys(self, prompt: Prompt) -> list[bytes]:
        keys: list[bytes] = []
        extend_keys(keys, root_key(self.model, prompt.rooted), prompt.tokens, BLOCK)
        return keys

    def causes(self, prompt: Prompt, result: Result, before: Moment, twin: Result | None = None) -> list[set[str]]:
        """For each token that was computed, what may be said of it. `twin`: of the same prompt, which was under way when it was sent."""
        report, full = result.usage.cache, (len(prompt.tokens) - 1) // BLOCK
        assert report is not None
        keys, delivered = self.keys(prompt), result.usage.cached_tokens
        chosen, computing = _worker(result), _worker(twin) if twin else ""
        depths = {name: _depth(keys, held) for name, held in before.held.items()}
        told: list[set[str]] = []
        known = next((at for at, key in enumerate(keys[:full]) if key not in self.had), full)
        for at in range(delivered, len(prompt.tokens)):
            block = at // BLOCK
            holders = {name for name, depth in depths.items() if depth > block and name != chosen}
            if block >= full:
                told.append({"partial"})
            elif twin is not None and at < report.promised_tokens:
                told.append({"computing"})
            elif twin is not None and at < report.reachable_tokens and report.holder == computing:
                told.append({"busy"})
            elif holders:
                told.append({"busy" if before.pools[report.holder] == "prefill" else "dearer"} if report.holder in holders else set())
            elif block >= known:
                told.append({self._unknown(prompt, keys, known)})
            else:
                alive = {before.processes.get(name) == (name, number) for name, number in self.had[keys[block]]}
                told.append({"evicted" if each else "restarted" for each in alive})
                if at < report.promised_tokens:  # then it is right, too, that the worker no longer held it
                    told[-1].add("stale")
        return told

    def note(self, prompt: Prompt, result: Result, before: Moment, too: bool = False) -> None:
        """`too`: at once with the one that was noted last, which is the same."""
        keys = self.keys(prompt)
        chosen = before.processes[_worker(result)]
        for key in keys:
            self.had[key] = {chosen, *(self.had.get(key, ()) if too else ())}
        self.grown.update(keys[:-1])
        if keys and prompt.tenant:
            self.salts.setdefault((prompt.tenant, prompt.tokens[:BLOCK]), set()).add(prompt.salt)

    def _unknown(self, prompt: Prompt, keys: Sequence[bytes], known: int) -> str:
        """Of blocks that no prompt began with."""
        if known:
            return "changed" if keys[known - 1] in self.grown else "grown"
        others = self.salts.get((prompt.tenant, prompt.tokens[:BLOCK]), set()) - {prompt.salt} if prompt.tenant else set()
        return "salt" if others else "new"


def named(result: Result) -> list[str]:
    """The cause of each token that was computed, as the router tells it."""
    assert result.usage.cache is not None
    return [cause for cause, tokens in result.usage.cache.uncached for _ in range(tokens)]


def _worker(result: Result) -> str:
    """The one that computed the prompt."""
    return str(result.workers["prefill"] or result.workers["decode"])


def _depth(keys: Sequence[bytes], held: frozenset[bytes]) -> int:
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))
