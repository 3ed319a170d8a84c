"""The interpreter accepts more than the compiler, so every kernel is also compiled for real devices, which need not be present."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path

import pytest
from all_pairs import EVERY_CASE

from baton.engine.gpu.tiles import SHARED_KIB, HeadShape, Tile, decode_tile, most_shared, prefill_tile, shared_bytes

HERE = Path(__file__).parent
ENGINE = HERE.parents[2] / "baton" / "engine"
MOST_KEPT = 16
CAPABILITIES = (80, 89, 90, 100, 120)
MOST_SPILLED = 256  # bytes of a thread; a tile that is too large spills thousands
HOPPER = (9, 0)


@pytest.mark.timeout(1800)  # a minute on two quiet cores
def test_every_kernel_compiles_for_every_kind_of_chip(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    told = kept()
    every = bool(os.environ.get(EVERY_CASE))
    if every or not told.exists():
        fresh = tmp_path / "variants.json"
        compile_all(fresh, tmp_path / "cache", every)
        keep(fresh, told)
    variants = json.loads(told.read_text())
    kernels = {line.split("(")[0][4:] for path in ENGINE.glob("gpu/triton_*.py") for line in launched(path)}
    assert {(capability, name) for capability, name, *_ in variants} == set(product(CAPABILITIES, kernels))
    for capability, name, shared, _, spilled in variants:
        assert shared <= most_shared(divmod(capability, 10)), (capability, name)
        assert spilled <= MOST_SPILLED, (capability, name)


def compile_all(told: Path, cache: Path, every: bool) -> None:
    """Each variant for every kind of chip, or each for every other one, and a variant of each kernel for all."""
    environment = {**os.environ, "PYTHONPATH": str(ENGINE.parents[1]), "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    options = ["--json", str(told), *([] if every else ["--thin"])]
    command = [sys.executable, str(HERE / "compile_kernels.py"), *options, *map(str, CAPABILITIES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1790)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)


def kept() -> Path:
    """What the compiler said is kept for this user under a key of what it depends on: the sources of these rooms, and the compiler."""
    key = hashlib.sha256(f"{sys.version} {version('torch')} {version('triton')} {CAPABILITIES}".encode())
    sources = (path for room in ("core", "gpu", "model") for path in sorted((ENGINE / room).rglob("*.py")))
    for path in (HERE / "compile_kernels.py", *sources):
        key.update(f"{path.relative_to(ENGINE.parents[1])} {path.stat().st_size} ".encode() + path.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "baton" / "tests" / f"variants-{key.hexdigest()[:24]}.json"


def keep(fresh: Path, told: Path) -> None:
    told.parent.mkdir(parents=True, exist_ok=True)
    draft = told.with_suffix(f".{os.getpid()}")  # another run must not read half of it
    shutil.copy(fresh, draft)
    draft.rename(told)
    for old in sorted(told.parent.glob("variants-*.json"), key=lambda path: path.stat().st_mtime)[:-MOST_KEPT]:
        old.unlink(missing_ok=True)


def launched(path: Path) -> list[str]:
    """Definitions of the kernels in a file; functions that kernels call are compiled with them."""
    return [line for line in path.read_text().splitlines() if line.startswith("def _") and "_kernel(" in line]


@pytest.mark.parametrize("capability", [*SHARED_KIB, (13, 0)], ids=str)
def test_tiles_fit_any_chip(capability: tuple[int, int]) -> None:
    """One that is not in the list counts as small. On Turing, latent attention in float32 does not fit at all."""
    heads = [HeadShape(value, 0, False, size) for value in (16, 64, 128, 256) for size in (2, 4)]
    for head in [*heads, HeadShape(512, 64, True, 2)] + [HeadShape(512, 64, True, 4)] * (capability != (7, 5)):
        for tile in (prefill_tile(head, capability), *(decode_tile(group, head, capability) for group in (1, 3, 8, 64, 128))):
            assert min(tile.rows, tile.keys) >= 16 and shared_bytes(tile, head) <= most_shared(capability), (head, tile)


def test_tiles_that_were_measured_on_hopper_are_those_of_hopper() -> None:
    plain, latent = HeadShape(128, 0, False, 2), HeadShape(512, 64, True, 2)
    assert decode_tile(4, plain, HOPPER) == Tile(16, 64, 4) and prefill_tile(plain, HOPPER) == Tile(128, 64, 8)
    assert decode_tile(128, latent, HOPPER) == Tile(64, 32, 8) and prefill_tile(latent, HOPPER) == Tile(16, 32, 4)
    assert decode_tile(128, latent, (8, 9)) == Tile(32, 32, 8)
