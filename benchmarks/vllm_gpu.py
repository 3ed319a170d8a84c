"""Everything about vLLM that only a GPU can show, in one go: `pip install "baton-llm[serve,vllm]"`, then

    python benchmarks/vllm_gpu.py --model FOLDER [--out FOLDER] [--only STEP ...]

    suite       the behaviours that all engines pass, on the device (tests/engine/test_contract.py)
    ranks       tensor and pipeline parallel ranks, preemption (tests/engine/test_vllm.py); needs two GPUs
    cluster     handoffs and their faults (tests/system/test_vllm.py)
    invariant   the suite in vLLM's batch-invariant mode
    speed       vLLM alone, its own disaggregation, Baton over it (benchmarks/vllm_speed.py)
    faults      what is lost, hung or wrong when parts die (benchmarks/vllm_faults.py)
    routing     the router over four workers (benchmarks/vllm_routing.py)
    divergence  outputs that are not those computed alone, without and with the batch-invariant mode (benchmarks/vllm_divergence.py)

No step stops the others. What each printed is in FOLDER, and the last lines say which succeeded. CUDA_VISIBLE_DEVICES names the GPUs that
the benchmarks give to workers and servers in turn. None of this has run on a GPU yet; with --device cpu it does what `make test-vllm` and
the benchmarks do, without the batch-invariant mode.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from machine import describe

ROOT = Path(__file__).resolve().parents[1]
STEP_S = 3600
TESTS = ("-m", "pytest", "-q", "-k", "vllm")


def steps(device: str, out: Path, model: Path | None) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Step → arguments of Python, and environment."""
    on = {"BATON_VLLM_DEVICE": device}
    known = ("--model", str(model)) if model else ()
    made: dict[str, tuple[list[str], dict[str, str]]] = {
        "suite": ([*TESTS, "tests/engine/test_contract.py"], on),
        "ranks": ([*TESTS, "tests/engine/test_vllm.py"], on),
        "cluster": ([*TESTS, "tests/system/test_vllm.py"], on),
    }
    if device != "cpu":
        made["invariant"] = ([*TESTS, "tests/engine/test_contract.py"], {**on, "BATON_VLLM_INVARIANT": "1"})
    for name in ("speed", "faults", "routing", "divergence"):
        made[name] = ([f"benchmarks/vllm_{name}.py", "--device", device, *known, "--json", str(out / f"{name}.json")], {})
    if device != "cpu":
        command = [*made["divergence"][0][:-1], str(out / "divergence-invariant.json"), "--batch-invariant"]
        made["divergence-invariant"] = (command, {})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint for the benchmarks, instead of theirs")
    parser.add_argument("--out", type=Path, default=Path("vllm-gpu"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("vllm") is None:
        sys.exit('vllm is not installed here: pip install "baton-llm[vllm]"')
    print(describe())
    ended = {}
    for name, (arguments, env) in steps(options.device, out, options.model).items():
        if options.only and name not in options.only:
            continue
        began = time.monotonic()
        with (out / f"{name}.log").open("w") as log:
            step = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code: int | str = step.wait(STEP_S)
            except subprocess.TimeoutExpired:
                os.killpg(step.pid, signal.SIGKILL)
                code = f"not done after {STEP_S} s"
        ended[name] = code
        print(
            f"{name:20} {'ok' if code == 0 else f'failed ({code})'} in {time.monotonic() - began:.0f} s: {out / f'{name}.log'}", flush=True
        )
    sys.exit(any(code != 0 for code in ended.values()))


if __name__ == "__main__":
    main()
