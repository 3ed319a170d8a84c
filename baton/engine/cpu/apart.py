"""Compiles kernels in a process of its own.

Code that a process compiles may have other last bits than the same code read back from the disk, as every later process has it. So nobody
computes with kernels of its own making: a process that misses some has another one compile them, and reads them.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from functools import cache
from importlib import import_module

import torch

from baton.engine.core.progress import Step, tell
from baton.engine.cpu.kernel_cache import ALL, OWN, Place, place_of

log = logging.getLogger(__name__)
APART = "BATON_KERNELS_APART"  # set in the process that compiles
WITHIN_S = 1200.0  # for all kernels, on a slow and busy machine
PROGRAM = """
import json, sys
from dataclasses import astuple
from baton.engine.core.progress import told_to
from baton.engine.cpu.apart import compile_here
with told_to(lambda step: print(json.dumps(astuple(step)), flush=True)):
    compile_here(sys.argv[1], half=bool(sys.argv[2:]))
"""


@cache
def compile_apart(group: str, half: bool = False) -> None:
    """Returns when all kernels of a group are on the disk, for float32 or bfloat16 (`half`), or cannot be compiled: then this process fails
    to compile them, too, and says why."""
    place = _place(group, half)
    if place is None or place.complete or os.environ.get(APART):
        return
    env = {**os.environ, APART: "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, group, *["half"] * half], env=env, stdout=subprocess.PIPE, text=True) as child:
        late = threading.Timer(WITHIN_S, child.kill)
        late.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                tell(Step(*json.loads(line)))
        finally:
            late.cancel()
    if child.returncode:
        log.warning("the process that compiles kernels ended with status %d", child.returncode)


def compile_here(*groups: str, half: bool = False) -> None:
    """Has this process compile what is missing of some groups: for an image, all of them, and for both types."""
    for group in groups:
        import_module(f"baton.engine.cpu.{'compiled_ops' if group == ALL else group}")
        if half:
            import_module("baton.engine.cpu.kernel").prepare(torch.bfloat16)
        if (place := _place(group, half)) is not None:
            place.finish()


def _place(group: str, half: bool) -> Place | None:
    return place_of(OWN if group == ALL else OWN.with_name(f"{group}.py"), half)
