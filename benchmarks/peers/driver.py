"""The child's side of the protocol, shared by all drivers. Standard library only, because it runs in the interpreters of all engines.

A message is a line of JSON: `{"do": "convert" | "start" | "run", ...}`. So is the answer, which has `error` if there was one.
The program exits at the end of its input.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Handler = Callable[[Message], Message]
Generate = Callable[[list[list[int]], list[int]], list[list[tuple[int, float]]]]
PR_SET_PDEATHSIG = 1
STATIC_BATCH = 16


def serve(start: Callable[[Message], tuple[str, Handler]], convert: Callable[[Message], None] | None = None) -> None:
    """`start` returns the engine's version and the handler of `run`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    if sys.platform == "linux":  # a paused child would outlive a killed parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    handle: Handler | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer: Message = {}
            if message["do"] == "convert":
                assert convert is not None
                convert(message)
            elif message["do"] == "start":
                answer["version"], handle = start(message)
            else:
                assert handle is not None
                answer = handle(message)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # the threads of some engines keep the interpreter from exiting


def engine(generate: Generate) -> Handler:
    """`generate(prompts, outputs)` returns for each request its (token, `time.perf_counter()` when it was available)."""

    def handle(message: Message) -> Message:
        began = time.perf_counter()
        made = generate(message["prompts"], message["outputs"])
        tokens = [[int(token) for token, _ in row] for row in made]
        if [len(row) for row in tokens] != message["outputs"]:
            raise RuntimeError(f"asked for {message['outputs']} tokens, got {[len(row) for row in tokens]}")
        return {"tokens": tokens, "times": [[at - began for _, at in row] for row in made]}

    return handle


def in_static_batches(batch: Generate) -> Generate:
    """For an engine without continuous batching. Requests of equal lengths form one batch; others go in order, 16 at a time, padded by the
    engine."""

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        equal = len({(len(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)}) == 1
        size = len(prompts) if equal else STATIC_BATCH
        places = range(0, len(prompts), size)
        return [row for at in places for row in batch(prompts[at : at + size], outputs[at : at + size])]

    return generate
