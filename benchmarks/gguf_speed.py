"""Prefill and decode of one sequence from a GGUF file, beside llama.cpp on the same file where `llama-cpp-python` is installed.

    python benchmarks/gguf_speed.py FILE.gguf [--json FILE] [--threads N]

The arms take turns; numbers are medians, with the least and the greatest. Each runs in a process of its own, and memory is the
peak of a process over its whole life, file pages included.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import describe

PROMPT, OUTPUT, ROUNDS = 512, 64, 5
ARMS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "as stored, the rest bfloat16": {"dtype": "bfloat16"},
    "dequantised": {"weight_dtype": "float"},
}
PEER = "llama.cpp"
Rates = dict[str, float]  # tokens per second, by phase; MiB


def ours(folder: Path, threads: int, more: dict[str, Any]) -> None:
    """A process: measures once for every line that it reads."""
    from baton.engine.build import build
    from baton.engine.core.sampling import SamplingParams
    from baton.engine.core.sequence import Sequence
    from baton.engine.options import Options

    options = Options.of(folder, threads=threads, kv_memory_mib=128, max_model_len=2048, prefix_caching=False, max_num_seqs=1, **more)
    engine = build(options).engine
    print(json.dumps(getattr(engine.runner, "matrices", "")), flush=True)
    for number, _ in enumerate(sys.stdin):
        params = SamplingParams(max_tokens=OUTPUT + 1, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        engine.add(Sequence(str(number), prompt_of(number), PROMPT, params, b""))
        times = list[float]()
        while not engine.idle:
            times += [time.perf_counter() for one in engine.step() if one.sampled is not None]
        tell(began, times)


def theirs(file: Path, threads: int) -> None:
    """The same in llama.cpp, with its defaults: KV in float16, prompts in pieces of 512."""
    import ctypes

    import llama_cpp
    import numpy as np

    silent = llama_cpp.llama_log_callback(lambda level, text, _: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    wanted = llama_cpp.llama_context_default_params()
    wanted.n_ctx, wanted.n_batch, wanted.n_ubatch, wanted.n_threads, wanted.n_threads_batch = 2048, 2048, 512, threads, threads
    context = llama_cpp.llama_init_from_model(model, wanted)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(PROMPT, 0, 1)

    def step(tokens: list[int], first: int) -> int:
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, first + at, 1, 0
            batch.logits[at] = at + 1 == len(tokens)
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(context, len(tokens) - 1)
        return int(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (vocab,)).argmax())

    print(json.dumps(llama_cpp.llama_print_system_info().decode()), flush=True)
    for number, _ in enumerate(sys.stdin):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        began = time.perf_counter()
        token = step(prompt_of(number), 0)
        times = [time.perf_counter()]
        for at in range(OUTPUT):
            token = step([token], PROMPT + at)
            times.append(time.perf_counter())
        tell(began, times)


def prompt_of(number: int) -> list[int]:
    return [(17 * number + 31 * k) % 4000 + 10 for k in range(PROMPT)]


def tell(began: float, times: list[float]) -> None:
    """`times`: of the first token, and of OUTPUT more."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"prefill": PROMPT / (times[0] - began), "decode": OUTPUT / (times[-1] - times[0]), "MiB": peak}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm == PEER:
        return theirs(given.file, given.threads)
    if given.arm is not None:
        return ours(given.file, given.threads, ARMS[given.arm])
    from baton.models.gguf.unpack import cached

    folder = cached(given.file, lambda line: print(line, file=sys.stderr))
    files = dict.fromkeys(ARMS, folder) | ({PEER: given.file} if find_spec("llama_cpp") else {})
    processes = {
        arm: subprocess.Popen(
            [sys.executable, __file__, str(file), "--threads", str(given.threads), "--arm", arm],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for arm, file in files.items()
    }  # fmt: skip
    samples: dict[str, list[Rates]] = {arm: [] for arm in files}
    told = {arm: json.loads(asked(process, None)) for arm, process in processes.items()}
    for turn in range(given.rounds + 1):
        for arm, kept in samples.items():
            found = json.loads(asked(processes[arm], f"{turn}\n"))
            kept += [found] if turn else []  # the first one warms up
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    show(samples, told)
    if given.json:
        given.json.write_text(json.dumps({"machine": describe(), "file": given.file.name, "matrices": told, "samples": samples}, indent=1))
    return None


def asked(process: "subprocess.Popen[str]", line: str | None) -> str:
    assert process.stdin is not None and process.stdout is not None
    if line is not None:
        process.stdin.write(line)
        process.stdin.flush()
    return process.stdout.readline()


def show(samples: dict[str, list[Rates]], told: dict[str, str]) -> None:
    print(describe())
    for arm, kept in samples.items():
        cells = []
        for phase in ("prefill", "decode"):
            rates = sorted(each[phase] for each in kept)
            ratio = statistics.median(rates) / statistics.median(each[phase] for each in samples.get(PEER, kept))
            cells.append(f"{phase} {statistics.median(rates):8.1f} ({rates[0]:.1f} … {rates[-1]:.1f}) tokens/s, {ratio:4.2f} x")
        print(f"{arm:30} {'  '.join(cells)}  {max(each['MiB'] for each in kept):6.0f} MiB  {told.get(arm, '')}")


if __name__ == "__main__":
    main()
