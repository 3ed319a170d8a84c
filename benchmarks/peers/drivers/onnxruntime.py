"""ONNX Runtime GenAI. A batch has one length, so requests that arrive while others run wait for the next batch."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime_genai as og

from peers.driver import Handler, Message, engine, in_static_batches, serve


def convert(message: Message) -> None:
    kind = {"float32": "fp32"}.get(message["precision"], message["precision"])
    command = ["-m", "onnxruntime_genai.models.builder", "-i", message["model"], "-o", message["out"], "-p", kind, "-e", "cpu"]
    command += ["--extra_options", "hf_token=false"]
    if kind != "fp32":
        command.append("accuracy_level=4")  # activations of int8 and int4 products are int8, as in our own
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])


def start(message: Message) -> tuple[str, Handler]:
    config = og.Config(message["model"])
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": message["threads"]}}}}))
    model = og.Model(config)
    pad = json.loads((Path(message["model"]) / "genai_config.json").read_text())["model"]["pad_token_id"]

    def batch(prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        longest = max(len(prompt) for prompt in prompts)
        padded = np.array([prompt + [pad] * (longest - len(prompt)) for prompt in prompts], dtype=np.int32)
        params = og.GeneratorParams(model)
        params.set_search_options(
            do_sample=False, batch_size=len(prompts), min_length=longest + max(outputs), max_length=longest + max(outputs)
        )
        generator = og.Generator(model, params)
        generator.append_tokens(padded)
        made: list[list[tuple[int, float]]] = [[] for _ in prompts]
        for _ in range(max(outputs)):
            generator.generate_next_token()
            now = time.perf_counter()
            for row, token, output in zip(made, generator.get_next_tokens(), outputs, strict=True):
                if len(row) < output:
                    row.append((int(token), now))
        return made

    return og.__version__, engine(in_static_batches(batch))


if __name__ == "__main__":
    serve(start, convert)
