"""A whole worker in this process, with the toy model and no registry."""

from pathlib import Path
from typing import Any

from baton.cluster.config import ClusterConfig, Config, RedisConfig
from baton.cluster.config_engine import KvConfig
from baton.cluster.lifecycle import Stop
from baton.engine.options import EngineOptions, ModelOptions
from baton.models.make_small import make_toy
from baton.worker.process import WorkerProcess


def toy_worker(folder: Path, stop: Stop, **kv: Any) -> WorkerProcess:
    """A prefill worker that was not started yet. Its model is written into the folder. `kv`: more of that section."""
    make_toy(folder / "toy")
    config = Config(
        cluster=ClusterConfig(key="k" * 32, prove_workers=False),  # no router would let it prove itself
        model=ModelOptions(path=str(folder / "toy")),
        redis=RedisConfig(url="redis://127.0.0.1:1"),
        engine=EngineOptions(kv_memory_mib=8),
        kv=KvConfig(transport="tcp", **kv),
    )
    return WorkerProcess(config, stop, "prefill")
