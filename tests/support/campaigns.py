"""Campaigns that are small simulations with a known answer."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loadtest.campaign import Arm, Campaign, Probe
from loadtest.record import Record
from loadtest.slo import Slo

DURATION_S = 16.0
SLO = Slo(ttft_s=0.6, tpot_s=0.045)
GAP_S = 0.02


def simulate(arm: str, rate: float, seed: int) -> tuple[Record, ...]:
    """One server that computes prompts first in, first out, and then emits a token every 20 ms.

    "mixed": a prompt takes 0.15 ms per token, and no request gets a token meanwhile.
    "split": a prompt takes 0.21 ms per token and a handoff of 5 ms + bytes / (1 GiB/s), while other requests keep getting tokens. Every
    16th prompt misses its TTFT.
    """
    draw, split = random.Random(seed), arm == "split"
    free, due = 0.0, 0.0
    plan: list[tuple[float, float, float, int]] = []
    while (due := due + draw.uniform(0.3, 1.7) / rate) < DURATION_S:
        prompt = 3000 if len(plan) % 16 == 5 else draw.randrange(50, 400)
        begin = max(due, free)
        free = begin + prompt * (0.21e-3 if split else 0.15e-3)
        plan.append((due, begin, free, prompt))
    return tuple(_answer(i, *each, split, [] if split else [(b, e) for _, b, e, _ in plan]) for i, each in enumerate(plan))


def _answer(number: int, due: float, begin: float, end: float, prompt: int, split: bool, stalls: Sequence[tuple[float, float]]) -> Record:
    kv_bytes = prompt * 16_384 if split else 0
    transfer = 0.005 + kv_bytes / 2**30 if split else 0.0
    times = [end]
    for i in range(15):
        at = times[-1] + GAP_S + (transfer if i == 0 else 0.0)
        for stall_begin, stall_end in stalls:
            if stall_begin < at <= stall_end:
                at = stall_end + GAP_S
        times.append(at)
    stages = {"queue": begin - due, "prefill": end - begin, "transfer": transfer, "decode": times[-1] - end - transfer}
    if split:
        stages |= {"prefill_compute": end - begin, "prefill_wait": 0.0, "read": transfer * 0.8}
    return Record(
        number=number,
        session="",
        scheduled=due,
        sent=due + 0.0002,
        token_times=tuple(times),
        ended=times[-1],
        outcome="ok",
        reason="",
        prompt_tokens=prompt,
        output_tokens=16,
        asked_tokens=16,
        cached_tokens=prompt // 4 if split else 0,
        stages_ms={stage: 1000 * s for stage, s in stages.items()},
        prefill_worker="p0" if split else "",
        decode_worker="d0",
        retries=0,
        transport="tcp" if split else "",
        kv_bytes=kv_bytes,
        kv_blocks=kv_bytes // 2**18,
        recomputed_tokens=0,
    )


SIMULATED = {
    "mixed": Arm("mixed", {"prefill.replicas": "0", "decode.replicas": "2", "engine.block_size": "16"}, "every worker does both"),
    "split": Arm("split", {"prefill.replicas": "1", "decode.replicas": "1", "engine.block_size": "16"}, "prefill and decode apart"),
}


def campaign(probes: Sequence[Probe], **fields: Any) -> Campaign:
    whole = Campaign(
        title="Simulated arms",
        slo=SLO,
        warm_up_s=1.0,
        cool_down_s=1.0,
        arms=tuple(SIMULATED.get(name, Arm(name, {})) for name in dict.fromkeys(probe.arm for probe in probes)),
        probes=tuple(probes),
        workload={"kind": "synthetic", "input": [100, 900]},
        config={"engine": {"device": "cpu"}},
        machine={"processor": "a simulation", "packages": {"numpy": "2"}},
    )
    return replace(whole, **fields)


def probe(arm: str, rate: float, seed: int = 0, **fields: Any) -> Probe:
    records = simulate(arm, rate, seed)
    return replace(Probe(arm, rate, seed, records, len(records), DURATION_S), **fields)


def counted(arm: str, rate: float, seed: int, met: int, missed: int, **fields: Any) -> Probe:
    """A run of 12 s, 10 s of them in the window, in which `met` requests meet the SLO and `missed` are refused."""
    good = simulate("split", 0.5, 0)[0]
    records = []
    for i in range(met + missed):
        due = 1 + 10 * i / (met + missed)
        ok = i < met
        times = tuple(due + 0.1 + GAP_S * k for k in range(16)) if ok else ()
        records.append(
            replace(
                good,
                number=i,
                scheduled=due,
                sent=due,
                token_times=times,
                ended=times[-1] if ok else due,
                outcome="ok" if ok else "refused",
                reason="" if ok else "SATURATED",
                output_tokens=len(times),
                stages_ms=good.stages_ms if ok else {},
                transport="tcp" if ok else "",
            )
        )
    return replace(Probe(arm, rate, seed, tuple(records), len(records), 12.0), **fields)


def late(run: Probe) -> Probe:
    """The same run with every request sent 90 ms late."""
    return replace(run, records=tuple(replace(record, sent=record.scheduled + 0.09) for record in run.records))
