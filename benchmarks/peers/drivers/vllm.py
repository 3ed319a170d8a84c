"""vLLM's CPU build, with its engine stepped by hand in this process."""

import time

import vllm
from vllm import LLM, SamplingParams

from peers.driver import Handler, Message, engine, serve


def start(message: Message) -> tuple[str, Handler]:
    ours = LLM(
        model=message["model"],
        dtype=message["dtype"],
        max_model_len=message["context"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=message["max_seqs"],
        max_num_batched_tokens=message["max_batched_tokens"],
        speculative_config=message.get("speculation"),
        seed=0,
    ).llm_engine

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        made: list[list[tuple[int, float]]] = [[] for _ in prompts]
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
            ours.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while ours.has_unfinished_requests():
            done = ours.step()
            now = time.perf_counter()
            for one in done:
                row = made[int(one.request_id)]
                row += [(token, now) for token in one.outputs[0].token_ids[len(row) :]]
        return made

    return vllm.__version__, engine(generate)


if __name__ == "__main__":
    serve(start)
