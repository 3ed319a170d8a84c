"""Hugging Face transformers: `generate`, or its continuous batching."""

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from peers.driver import Generate, Handler, Message, engine, in_static_batches, serve

PAGE = 128  # tokens


class Clock(StoppingCriteria):
    """Records the time after each token; never stops the generation."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def static(model: Any) -> Generate:
    def batch(prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        clock = Clock()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(outputs),
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        rows = zip(out[:, longest:].tolist(), outputs, strict=True)
        return [list(zip(row[:output], clock.times[:output], strict=True)) for row, output in rows]

    return in_static_batches(batch)


def continuous(model: Any, message: Message) -> Generate:
    """Uses what `generate_batch` wraps, because the wrapper supports only one output length for all requests."""
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=message["kv_tokens"] // PAGE,
        max_batch_tokens=message["max_batched_tokens"],
        max_requests_per_batch=message["max_seqs"],
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
    manager.start()

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        names = [
            manager.add_request(prompt, max_new_tokens=output, record_timestamps=True, eos_token_id=-1)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        made: dict[str, list[tuple[int, float]]] = {}
        while len(made) < len(names):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the generation thread ended")
            elif result.error:
                raise RuntimeError(result.error)
            elif result.is_finished():
                made[result.request_id] = list(zip(result.generated_tokens, result.timestamps, strict=True))
        return [made[name] for name in names]

    return generate


def start(message: Message) -> tuple[str, Handler]:
    torch.set_num_threads(message["threads"])
    model = AutoModelForCausalLM.from_pretrained(message["model"], dtype=getattr(torch, message["dtype"])).eval()
    return transformers.__version__, engine(continuous(model, message) if message.get("continuous") else static(model))


if __name__ == "__main__":
    serve(start)
