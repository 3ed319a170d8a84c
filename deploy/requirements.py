"""Prints what pip installs into the image: the dependencies of pyproject.toml, those of the variant and the engine, and those of extras:
`serve`, the two that `baton fetch` needs, the one for traces, the one for the chart's load test, and further ones. For vLLM on a CPU,
vllm_cpu.py adds its own.

python requirements.py cpu|cuda [EXTRA,...] [baton|vllm]
"""

import sys
import tomllib
from pathlib import Path

ALWAYS = ("serve", "hub", "s3", "otel", "k8s")
VARIANTS = {"cpu": (), "cuda": ("flashinfer-python",)}  # of the extra `gpu`
ENGINES = ("baton", "vllm")

variant, extras, engine = sys.argv[1], [extra for extra in sys.argv[2].split(",") if extra], (*sys.argv[3:], ENGINES[0])[0]
project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
optional = project["optional-dependencies"]
known = sorted(set(optional) - {"vllm"})
if variant not in VARIANTS or engine not in ENGINES or set(extras) - set(known):
    sys.exit(f"VARIANT must be one of {', '.join(VARIANTS)}, ENGINE one of {', '.join(ENGINES)}, and EXTRAS some of {', '.join(known)}")
of_variant = [line for line in optional["gpu"] if line.startswith(VARIANTS[variant])]
of_engine = optional["vllm"] if (engine, variant) == ("vllm", "cuda") else []
of_extras = [line for extra in dict.fromkeys([*ALWAYS, *extras]) for line in optional[extra]]
print("\n".join([*project["dependencies"], *of_variant, *of_engine, *of_extras]))
