"""OpenVINO GenAI, with its continuous batching pipeline stepped by hand."""

import subprocess
import sys
import time

import numpy as np
import openvino_genai
from openvino import Tensor

from peers.driver import Handler, Message, engine, serve


def convert(message: Message) -> None:
    kind = {"float32": ["fp32"], "int8": ["int8"], "int4": ["int4", "--group-size", "32", "--sym", "--ratio", "1.0"]}[message["precision"]]
    command = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--task", "text-generation-with-past"]
    command += ["--model", message["model"], "--weight-format", *kind, message["out"]]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])


def start(message: Message) -> tuple[str, Handler]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = message["kv_tokens"] // 32  # tokens of a block on a CPU
    scheduler.max_num_batched_tokens = message["max_batched_tokens"]
    scheduler.max_num_seqs = message["max_seqs"]
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[message["dtype"]],
        "KV_CACHE_PRECISION": {"float32": "f32", "bfloat16": "bf16", "int8": "u8"}[message["kv_dtype"]],
        "INFERENCE_NUM_THREADS": message["threads"],
        "PERFORMANCE_HINT": "LATENCY",
    }
    pipe = openvino_genai.ContinuousBatchingPipeline(message["model"], scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[list[tuple[int, float]]]:
        handles = []
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
            handles.append(pipe.add_request(i, Tensor(np.array([prompt], dtype=np.int64)), config))
        made: list[list[tuple[int, float]]] = [[] for _ in prompts]
        while pipe.has_non_finished_requests():
            pipe.step()
            now = time.perf_counter()
            for row, handle in zip(made, handles, strict=True):
                if handle.can_read():
                    row += [(token, now) for output in handle.read().values() for token in output.generated_ids]
        return made

    return openvino_genai.__version__, engine(generate)


if __name__ == "__main__":
    serve(start, convert)
