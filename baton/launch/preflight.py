"""What would keep a cluster from starting and can be known before anything starts: packages and files that are missing here. Devices are
the task of `baton.launch.gpus`.

What only an engine can judge (a model's config.json, say) ends the worker with the exit status CANNOT, and `baton up` does not try again.
Nothing is checked where Ray may run the processes on other hosts.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from baton.cluster.config import Config
from baton.launch.plan import UpError

FILES = ("tls_cert", "tls_key", "tls_ca", "api_keys", "redis_ca")  # of `security`


@dataclass(frozen=True, slots=True)
class ModuleNeed:
    key: str
    value: str  # with which the module is needed; *: any
    module: str
    way: str  # to get it


NEEDS = (
    ModuleNeed("engine.kind", "vllm", "vllm", "pip install 'baton-llm[vllm]'; for a CPU: python scripts/install_vllm.py"),
    ModuleNeed("telemetry.otlp_endpoint", "*", "opentelemetry.sdk", "pip install 'baton-llm[otel]'"),
    ModuleNeed("telemetry.otlp_endpoint", "*", "opentelemetry.exporter.otlp.proto.grpc", "pip install 'baton-llm[otel]'"),
    ModuleNeed("kv.transport", "nixl", "nixl_cu13", "pip install nixl-cu13 (Linux), or set kv.transport to auto"),
    ModuleNeed("engine.attention_backend", "flashinfer", "flashinfer", "pip install 'baton-llm[gpu]'"),
    ModuleNeed("engine.attention_backend", "flash_attn", "flash_attn", "it is built from source: docs/gpus.md says how; auto does without"),
    ModuleNeed("engine.attention_backend", "triton", "triton", "pip install triton"),
)
RAY = ModuleNeed("launcher.kind", "ray", "ray", "pip install ray")


def check_here(config: Config) -> None:
    """Raises UpError, which names the key and what to do."""
    for need in (RAY,) if config.launcher.ray_address else (RAY, *NEEDS):
        value = config.at(need.key)
        asked = value == need.value or (need.value == "*" and value is not None)
        if need.key == "engine.attention_backend" and config.engine.device == "cpu":
            continue  # the engine says that it is not for a CPU
        if asked and not _installed(need.module):
            raise UpError(f"{need.key} {value}: the package {need.module.partition('.')[0]} is not installed here: {need.way}")
    for name in FILES:
        file = getattr(config.security, name)
        if file is not None and not (Path(file).is_file() and os.access(file, os.R_OK)):
            raise UpError(f"security.{name}: {file} {'cannot be read' if Path(file).exists() else 'does not exist'}")


def _installed(module: str) -> bool:
    with suppress(ImportError):  # of a parent, which this imports
        return find_spec(module) is not None
    return False
