"""Compiles the kernels of FlashInfer that Baton's engine plans, into the installed package, from where they are loaded without a compiler:

    python flashinfer_kernels.py tools                                      prints what pip must install first; nothing needs it afterwards
    python flashinfer_kernels.py compile "8.0 9.0a 10.0a 12.0f" "bfloat16:128 float16:128" [ROOT]    chips, and dtype:head_dim of models

Below ROOT they have the paths at which FlashInfer looks for them below /; without one, they are put there. Needs g++ and no GPU. Each dtype
and head_dim has a kernel for decoding, one for prefills, and one more for prefills on Hopper. Those for windows and capped scores are left
out: such a model takes Triton's.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

TOOLS = "nvcc,cccl,cudart,curand"  # extras of cuda-toolkit, of which torch installs others


def toolkit(folder: Path) -> Path:
    """A CUDA_HOME as FlashInfer expects it, of the packages' one. The linker needs the name of the driver, which is not here."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
    home = folder / "cuda"
    (home / "lib64" / "stubs").mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (home / name).symlink_to(packages / name)
    (home / "lib64" / "libcudart.so").symlink_to(packages / "lib" / "libcudart.so.13")
    stub = home / "lib64" / "stubs" / "libcuda.so"
    subprocess.run(["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", stub, "-x", "c", "/dev/null"], check=True)
    return home


def compile(chips: str, models: str, root: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            CUDA_HOME=str(toolkit(Path(folder))),
            FLASHINFER_CUDA_ARCH_LIST=chips,
            FLASHINFER_WORKSPACE_BASE=folder,
            PATH=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",  # of ninja
        )
        import torch
        from flashinfer.jit import build_jit_specs, env
        from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module

        specs = []
        for model in models.split():
            dtype, dim = getattr(torch, model.partition(":")[0]), int(model.partition(":")[2])
            types = (dtype, dtype, dtype, torch.int32, dim, dim)
            how = (0, False, False)  # no rotation, no window, no cap
            specs.append(gen_batch_decode_module(*types, *how))
            kinds = ("fa2", "fa3") if "9.0a" in chips.split() else ("fa2",)
            specs += [gen_batch_prefill_module(kind, *types, *how, False) for kind in kinds]
        began = time.monotonic()
        build_jit_specs(specs, skip_prebuilt=False)
        for spec in specs:
            kernel = root / spec.aot_path.relative_to("/")
            kernel.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(spec.jit_library_path, kernel)
            print(f"{kernel.stat().st_size / 2**20:6.1f} MiB  {spec.name}")
        print(f"{len(specs)} kernels in {time.monotonic() - began:.0f} s, for {chips}, for {env.FLASHINFER_AOT_DIR}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tools"]:
            print(f"cuda-toolkit[{TOOLS}]=={version('cuda-toolkit')}", "ninja")
        case ["compile", chips, models, *root] if len(root) < 2:
            compile(chips, models, Path(*root or "/"))
        case _:
            sys.exit(__doc__)
