"""Prints how long the router and a worker take until they could serve, and fails if the router loads torch: python starts.py MODEL"""

import subprocess
import sys
import time

ROUTER = "import sys, router.wiring; sys.exit('the router loads torch' if 'torch' in sys.modules else 0)"
WORKER = """
import sys, decode_worker.wiring
from pathlib import Path
from baton.engine.build import Options, build
build(Options(Path(sys.argv[1]), kv_memory_bytes=64 << 20, threads=1))
"""

for role, program in (("router", ROUTER), ("decode worker with its model", WORKER)):
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", program, sys.argv[1]], check=True)
    print(f"start of a {role}: {time.monotonic() - began:.1f} s", flush=True)
