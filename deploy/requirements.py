"""Prints what pip installs into the image: the dependencies of pyproject.toml, those of the variant, and those of extras: the two that
`baton fetch` needs, and further ones.

python requirements.py cpu|cuda [EXTRA,...]
"""

import sys
import tomllib
from pathlib import Path

ALWAYS = ("hub", "s3")
VARIANTS = {"cpu": (), "cuda": ("flashinfer-python",)}  # of the extra `gpu`

variant, extras = sys.argv[1], [extra for extra in sys.argv[2].split(",") if extra]
project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
if variant not in VARIANTS or set(extras) - set(project["optional-dependencies"]):
    sys.exit(f"VARIANT must be one of {', '.join(VARIANTS)}, and EXTRAS some of {', '.join(project['optional-dependencies'])}")
optional = project["optional-dependencies"]
of_variant = [line for line in optional["gpu"] if line.startswith(VARIANTS[variant])]
of_extras = [line for extra in dict.fromkeys([*ALWAYS, *extras]) for line in optional[extra]]
print("\n".join([*project["dependencies"], *of_variant, *of_extras]))
