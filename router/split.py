"""Whether a cluster that is set up to split prefill from decode does. Pure.

A split that never happens looks like a cluster that works. So each request says which path it took, and an alarm stands while most of the
prompts that are worth a handoff are not handed over, or while another transport carries the KV than was asked for.
"""

from collections import Counter, deque
from dataclasses import dataclass

from router.request import Trace

WORTH = 128  # uncached tokens from which on a prompt is expected to be handed over
LAST = 64  # such prompts that are looked at
LEAST = 16  # that a judgement needs
HANDOFF = "handoff"
WHERE = {
    "short": "router.bypass_tokens is high",
    "cached": "router.bypass_tokens is high",
    "longer than the pool": "such KV is not handed over: see engine.kv_memory_mib and tiers.long_contexts",
    "no prefill worker": "none is usable: see prefill.replicas, the roles of the workers, and `baton status`",
    "same worker": "workers serve both roles",
    "recomputed": "decode workers cannot read the KV: see kv.port and the network between the pools",
}
TCP = "tcp"  # as a transport, and as the lane of another
NIXL_WHERE = "kv.transport, kv.ucx_tls, kv.ucx_net_devices"
RDMA_WHERE = "kv.rdma: see what `baton doctor` says of adapters on the workers' hosts; with TLS only TCP leaves a host"


@dataclass(frozen=True, slots=True)
class Wanted:
    split: bool = False  # whether there is to be a prefill pool
    transport: str = ""  # that is to carry the KV; empty: any
    rdma: bool = False  # whether no TCP is to carry it: between hosts that leaves RDMA


def path_of(trace: Trace) -> tuple[str, str] | None:
    """How the prompt of a request that has ended came to its decode worker, and why if it was not handed over. None: it had no need to."""
    handoff = trace.handoff
    if handoff.failure and handoff.recomputed_tokens:
        return "recomputed", handoff.failure
    if handoff.transport:
        return HANDOFF, ""
    return ("bypass", trace.bypasses[-1]) if trace.bypasses else None


class Split:
    def __init__(self, wanted: Wanted = Wanted()) -> None:  # it is frozen
        self._wanted = wanted
        self._last: deque[tuple[str, str]] = deque(maxlen=LAST)
        self._carried: deque[tuple[str, str]] = deque(maxlen=LAST)  # transport, lane

    def note(self, trace: Trace, path: tuple[str, str], computed: int) -> None:
        """A request that took that path has ended well. `computed`: tokens of its prompt that were not cached."""
        if computed >= WORTH and path[1] != "prompt_logprobs":
            self._last.append(path)
        if path[0] == HANDOFF:
            self._carried.append((trace.handoff.transport, trace.handoff.lane))

    @property
    def alarm(self) -> str:
        """What is wrong, or nothing."""
        return self.judge()

    def judge(self) -> str:
        """See `alarm`."""
        return self._unsplit() or self._detour()

    def _unsplit(self) -> str:
        missing = Counter(path for path in self._last if path[0] != HANDOFF)
        if not self._wanted.split or len(self._last) < LEAST or 2 * missing.total() <= len(self._last):
            return ""
        (kind, why), _ = missing.most_common(1)[0]
        where = WHERE.get(why if kind == "bypass" else kind, "")
        told = f"{missing.total()} of the last {len(self._last)} prompts of {WORTH} or more uncached tokens were not handed over"
        return f"{told}: {why}" + (f" ({where})" if where else "")

    def _detour(self) -> str:
        wanted, used = self._wanted, Counter(self._carried)
        tcp = Counter({each: count for each, count in used.items() if wanted.rdma and TCP in each})
        other = Counter({each: count for each, count in used.items() if not each[0].startswith(wanted.transport)})
        for detours, asked, where in ((tcp, "RDMA", RDMA_WHERE), (other, wanted.transport, NIXL_WHERE)):
            if 2 * detours.total() > used.total():
                [((transport, lane), _)] = detours.most_common(1)
                return f"{transport}{f' over {lane}' if lane else ''} carries the KV, and {asked} was asked for ({where})"
        return ""
