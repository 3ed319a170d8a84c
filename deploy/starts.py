"""Prints how long the router and a worker take until they could serve, and fails if the router loads torch: python starts.py MODEL IMAGE

In an image called vllm-cpu, it also imports vLLM, and in baton-cuda FlashInfer, whose kernels it loads as a worker does: a library could be
missing.
"""

import subprocess
import sys
import time

ROUTER = "import sys, router.wiring; sys.exit('the router loads torch' if 'torch' in sys.modules else 0)"
WORKER = """
import sys, decode_worker.wiring
from pathlib import Path
from baton.engine.build import build
from baton.engine.options import Options
build(Options.of(Path(sys.argv[1]), kv_memory_mib=64, threads=1))
"""
VLLM = "import vllm.v1.engine.async_llm, baton.engine.vllm.arguments as ours; ours.check_version()"
FLASHINFER = """
import flashinfer.decode, flashinfer.prefill, tvm_ffi
from flashinfer.jit import env
kernels = [tvm_ffi.load_module(str(path)) for path in env.FLASHINFER_AOT_DIR.glob("*/*.so")]
print(f"{len(kernels)} kernels of FlashInfer load")
"""

model, image = sys.argv[1:]
imports = {"vllm-cpu": {"vLLM, imports alone": VLLM}, "baton-cuda": {"FlashInfer, imports and kernels alone": FLASHINFER}}
programs = {"a router": ROUTER, "a decode worker with its model": WORKER} | imports.get(image, {})
for role, program in programs.items():
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", program, model], check=True)
    print(f"start of {role}: {time.monotonic() - began:.1f} s", flush=True)
