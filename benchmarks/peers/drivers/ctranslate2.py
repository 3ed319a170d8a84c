"""CTranslate2. It has no continuous batching, so requests of unequal lengths go in batches, as with `transformers.generate`."""

import json
import time
from pathlib import Path

import ctranslate2
from ctranslate2.converters import TransformersConverter

from peers.driver import Handler, Message, engine, in_static_batches, serve


def convert(message: Message) -> None:
    kind = message["precision"]
    TransformersConverter(message["model"]).convert(message["out"], quantization=kind, force=True)


def start(message: Message) -> tuple[str, Handler]:
    folder = Path(message["model"])
    words = json.loads((folder / "vocabulary.json").read_text())
    generator = ctranslate2.Generator(str(folder), device="cpu", compute_type=message["compute_type"], intra_threads=message["threads"])

    def batch(prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        times: list[list[float]] = [[] for _ in prompts]
        results = generator.generate_batch(
            [[words[token] for token in prompt] for prompt in prompts],
            max_length=max(outputs),
            min_length=max(outputs),
            include_prompt_in_result=False,
            callback=lambda step: times[step.batch_id].append(time.perf_counter()),
        )
        rows = zip(results, times, outputs, strict=True)
        return [list(zip(result.sequences_ids[0][:output], at[:output], strict=True)) for result, at, output in rows]

    return ctranslate2.__version__, engine(in_static_batches(batch))


if __name__ == "__main__":
    serve(start, convert)
