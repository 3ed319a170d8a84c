"""What readers that do not read cost the router, and what a streamed token costs a reader.

The longest turn of the router's loop in processor time, over both doors, while N readers ask for log-probabilities, stall, and are cut; and
while 20 readers stall and then read on together. The bytes of an event: plain, with ids, with log-probabilities.

    python benchmarks/stalled_readers.py [--json FILE]

The doors, the service, the dispatcher and the decode session are the router's; the worker is a script in the same process
(`tests/support/readers.py`).
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from http_door import toy_tokenizer
from readers import Hall, hall
from turns import watched

from router.tokenizer import Tokenizer

TOKENS, LOGPROBS, STALL_S = 1900, 20, 2.0
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": TOKENS}
WITH_LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": LOGPROBS}
EVENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with ids": {"stream_options": {"include_event_ids": True}},
    f"with {LOGPROBS} log-probabilities": WITH_LOGPROBS,
}


async def ask(made: Hall, door: str, readers: int) -> list[Any]:
    if door == "gRPC":
        return [made.grpc_reader(TOKENS, LOGPROBS) for _ in range(readers)]
    return [await made.http_reader(CHAT | WITH_LOGPROBS) for _ in range(readers)]


async def stalled(tokenizer: Tokenizer, door: str, readers: int) -> dict[str, float]:
    async with hall(tokenizer, TOKENS, LOGPROBS, stall_s=STALL_S) as made:
        with watched() as turns:
            await ask(made, door, readers)
            await made.until(lambda: made.begun == readers and made.worker.done, 300)
            waits = max(made.waiting_bytes, default=0)
            await made.until(lambda: made.idle, 300)
    return {"longest_turn_ms": turns.longest.cpu_s * 1e3, "most_bytes_waiting_for_one": waits}


async def together(tokenizer: Tokenizer, door: str, readers: int) -> dict[str, float]:
    async with hall(tokenizer, TOKENS, LOGPROBS, stall_s=60.0) as made:
        clients = await ask(made, door, readers)
        await made.until(lambda: made.begun == readers and made.worker.done, 300)
        with watched() as turns:
            read: Callable[[Any], Any] = drain if door == "gRPC" else lambda client: client.rest()
            await asyncio.gather(*map(read, clients))
    return {"longest_turn_ms": turns.longest.cpu_s * 1e3}


async def drain(call: Any) -> None:
    async for _ in call:
        pass


async def bytes_of_an_event(tokenizer: Tokenizer, more: dict[str, Any]) -> float:
    async with hall(tokenizer, TOKENS, LOGPROBS if "logprobs" in more else 0) as made:
        answer = await (await made.http_reader(CHAT | more)).rest()
    return float(len(answer) / answer.count(b"data: "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    results: dict[str, Any] = {"machine": describe()}
    print(results["machine"])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = toy_tokenizer(Path(folder) / "toy")
        for door in ("HTTP", "gRPC"):
            for readers in (20, 200):
                results[f"{readers} stalled, {door}"] = row = asyncio.run(stalled(tokenizer, door, readers))
                print(f"{door}, {readers} readers that stall and are cut: the longest turn takes {row['longest_turn_ms']:.1f} ms")
            results[f"20 that read on, {door}"] = row = asyncio.run(together(tokenizer, door, 20))
            print(f"{door}, 20 readers that stall and read on together: the longest turn takes {row['longest_turn_ms']:.1f} ms")
        results["bytes of an event"] = {name: asyncio.run(bytes_of_an_event(tokenizer, more)) for name, more in EVENTS.items()}
        for name, size in results["bytes of an event"].items():
            print(f"an event {name}: {size:.0f} bytes")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
