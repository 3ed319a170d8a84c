"""What pip would install."""

import os
import subprocess
import sys

import pytest


def resolve(*wanted: str) -> subprocess.CompletedProcess[str]:
    """What pip says that it would install, from the index that it has here, into an environment where nothing is. Wheels that lie on this
    machine do not count. Skips where there is no index."""
    env = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--disable-pip-version-check"]
    there = [*pip, "--quiet", "--no-deps", "--no-cache-dir", "--retries", "0", "--timeout", "20", "h11"]
    if subprocess.run(there, env=env, capture_output=True, timeout=120).returncode:
        pytest.skip("pip reaches no package index here")
    return subprocess.run([*pip, "--no-build-isolation", *wanted], env=env, capture_output=True, text=True, timeout=1700)
