"""This engine."""

import time
from pathlib import Path

from baton.engine.build import build
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.options import Options
from peers.driver import Handler, Message, engine, serve


def start(message: Message) -> tuple[str, Handler]:
    chosen = {key: message[key] for key in ("dtype", "weight_dtype") if key in message}
    options = Options.of(
        Path(message["model"]),
        max_model_len=message["context"],
        kv_memory_mib=message["kv_bytes"] / (1 << 20),
        threads=message["threads"],
        prefix_caching=False,
        max_num_seqs=message["max_seqs"],
        max_num_batched_tokens=message["max_batched_tokens"],
        **chosen,
    )
    ours = build(options).engine

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        made: list[list[tuple[int, float]]] = [[] for _ in prompts]
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
            ours.add(Sequence(str(i), list(prompt), len(prompt), params, b""))
        while not ours.idle:
            done = ours.step()
            now = time.perf_counter()
            for one in done:
                if one.sampled is None:
                    raise RuntimeError(one.failure)
                made[int(one.seq.id)].append((one.sampled.token, now))
        return made

    return "this tree", engine(generate)


if __name__ == "__main__":
    serve(start)
