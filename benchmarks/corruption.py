"""Handoffs whose KV is damaged on purpose, and whether each damage was found: a bit flipped at the holder or in the reader's copy, a block
of another request in place of the right one, a lease that ends during the read while its blocks are reused.

    python benchmarks/corruption.py [--damages 100000] [--clean 1000000] [--json FILE]

A prefill and a decode worker of the toy model in one process, with real engines, leases, digests and a TCP transport. What a handoff yields
is compared with the tokens that the model must produce, so KV that is used although it is wrong shows in the text. As negative control, the
same damages are done with digests and lease checks off. Then `--clean` undamaged blocks are moved, and each must be accepted.

    found   the handoff failed (the reason is printed), the prompt was computed again, and all tokens are right
    wrong   at least one token is wrong
    unseen  the damage was not noticed, and no token depends on it
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import describe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from handoff_pair import BLOCK, Pair, greedy, pair
from host_pool import on_host

from baton.engine.core.toy import naive
from kvtransfer.importer import Checks

ENDED = "lease ended during the read"
KINDS = ("flipped at the holder", "flipped in the copy", "another request's block", ENDED)
BLOCKS = 24  # of a prompt
CONTROLS = 2000
PROGRESS = 10_000


class Damager:
    """Stands between the reader and its transport."""

    def __init__(self, p: Pair, rng: random.Random) -> None:
        self._pair, self._rng, self._loop = p, rng, asyncio.get_running_loop()
        self._foreign = on_host(p.engines[0].runner.pool).array.copy()
        transport = p.decode.port.importer.transport
        self._read, self.kind = transport.read, ""
        transport.read = self._read_damaged  # type: ignore[method-assign]

    def _read_damaged(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        there, here = (on_host(engine.runner.pool) for engine in self._pair.engines)
        victim = self._rng.randrange(len(remote))
        match self.kind:
            case "flipped at the holder":
                self._flip(there.block(remote[victim]))
            case "another request's block":
                there.array[remote[victim]] = self._foreign[remote[victim]]
            case _ if self.kind == ENDED:
                asyncio.run_coroutine_threadsafe(self._end_lease(remote), self._loop).result(10)
        self._foreign[:] = there.array
        self._read(peer, remote, local, timeout)
        if self.kind == "flipped in the copy":
            self._flip(here.block(local[victim]))

    def _flip(self, block: Any) -> None:
        block[self._rng.randrange(len(block))] ^= 1 << self._rng.randrange(8)

    async def _end_lease(self, blocks: Sequence[int]) -> None:
        self._pair.clock.now += 1000
        self._pair.prefill.port.exporter.reap()
        for block in blocks:
            on_host(self._pair.engines[0].runner.pool).array[block] = self._rng.randrange(256)


async def handoffs(count: int, kinds: tuple[str, ...], checks: Checks | None, seed: int) -> tuple[dict[str, Counter[str]], int]:
    """What became of the handoffs of each kind, and how many blocks they moved."""
    rng, outcomes, blocks = random.Random(seed), {kind: Counter[str]() for kind in kinds}, 0
    async with pair(checks=checks) as p:
        damager = Damager(p, rng)
        for number in range(count):
            kind = damager.kind = kinds[number % len(kinds)]
            prompt = rng.choices(range(256), k=rng.randrange(2, BLOCKS * BLOCK))
            first = await p.hand_over(str(number), prompt)
            await p.blocks_of(first.handle)
            call = p.start(first, str(number), tokens=prompt)
            await call.task
            right = [first.sampled.token, *call.tokens] == naive(prompt, greedy())
            failure = call.finished.handoff.failure
            outcomes[kind]["wrong" if not right else f"found ({failure})" if failure else "unseen" if kind else "accepted"] += 1
            blocks += call.finished.handoff.blocks
            if number % PROGRESS == PROGRESS - 1:
                print(f"  {number + 1} handoffs, {blocks} blocks", file=sys.stderr, flush=True)
        damager.kind = ""
        p.clock.now += 1000
        await p.settled()
    return outcomes, blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--damages", type=int, default=100_000)
    parser.add_argument("--clean", type=int, default=1_000_000, help="blocks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe(), "seed": options.seed}
    print(results["machine"])
    logging.disable(logging.WARNING)  # each failed handoff is logged
    few = min(CONTROLS, options.damages)
    for name, count, kinds, checks in (
        ("damaged", options.damages, KINDS, None),
        ("damaged, digests off", few, (ENDED,), Checks(digests=False)),
        ("damaged, digests and lease checks off", few, KINDS, Checks(digests=False, lease=False)),
        ("clean", 2 * options.clean // BLOCKS, ("",), None),  # a prompt has half of BLOCKS on average
    ):
        began = time.monotonic()
        outcomes, blocks = asyncio.run(handoffs(count, kinds, checks, options.seed))
        results[name] = {"handoffs": count, "blocks": blocks, "outcomes": outcomes}
        print(f"{name}: {count} handoffs, {blocks} blocks, {time.monotonic() - began:.0f} s")
        for kind, ended in outcomes.items():
            print(f"  {kind or 'undamaged':<28} {', '.join(f'{outcome} {number}' for outcome, number in sorted(ended.items()))}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1))
    ways = {outcome for name in ("damaged", "damaged, digests off") for kind in results[name]["outcomes"].values() for outcome in kind}
    if ways & {"wrong", "unseen"} or set(results["clean"]["outcomes"][""]) != {"accepted"}:
        sys.exit(1)


if __name__ == "__main__":
    main()
