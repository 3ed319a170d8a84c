"""Scripts that each need a process of their own: forks of one that has imported torch, which takes longer than most of them."""

import subprocess
import sys

PROGRAM = """
import os, sys
import torch
for script in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(script, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, script
    print(end=chr(0), flush=True)
"""


def forked(*scripts: str) -> list[str]:
    """What each of them prints. Raises CalledProcessError if one fails."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *scripts], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.split("\0")[:-1]
