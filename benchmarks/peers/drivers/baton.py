"""This engine."""

import time
from dataclasses import fields
from pathlib import Path

from baton.engine.build import Options, build
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduler import Limits
from baton.engine.core.sequence import Sequence
from peers.driver import Handler, Message, engine, serve


def start(message: Message) -> tuple[str, Handler]:
    chosen = {key: message[key] for key in ("dtype", "weight_dtype") if key in message}
    unknown = chosen.keys() - {field.name for field in fields(Options)}
    if unknown:
        raise ValueError(f"engine.build.Options has no {', '.join(sorted(unknown))}")
    options = Options(
        Path(message["model"]),
        max_model_len=message["context"],
        kv_memory_bytes=message["kv_bytes"],
        threads=message["threads"],
        prefix_caching=False,
        limits=Limits(max_num_seqs=message["max_seqs"], max_num_batched_tokens=message["max_batched_tokens"]),
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
