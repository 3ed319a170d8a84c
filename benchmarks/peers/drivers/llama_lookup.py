"""llama.cpp through llama-cpp-python's `Llama`, one sequence at a time, without guesses or with the prompt lookup that it comes with."""

import time
from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from peers.driver import Handler, Message, engine, serve
from peers.drivers.llama_cpp import convert


def start(message: Message) -> tuple[str, Handler]:
    """`lookup`: None, or the n-gram's length and the number of tokens guessed at most."""
    path, lookup = Path(message["model"]), message["lookup"]
    model = llama_cpp.Llama(
        str(path / "model.gguf" if path.is_dir() else path),
        n_ctx=message["context"],
        n_threads=message["threads"],
        n_threads_batch=message["threads"],
        draft_model=LlamaPromptLookupDecoding(max_ngram_size=lookup[0], num_pred_tokens=lookup[1]) if lookup else None,
        verbose=False,
    )

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        return [one(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]

    def one(prompt: list[int], output: int) -> list[tuple[int, float]]:
        made: list[tuple[int, float]] = []
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            made.append((token, time.perf_counter()))
            if len(made) == output:
                break
        return made

    return f"{llama_cpp.__version__} (llama-cpp-python)", engine(generate)


if __name__ == "__main__":
    serve(start, convert)
