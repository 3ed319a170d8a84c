"""What a cluster of an experiment's own may take of this machine, how it is started, and what is to be said of it. Decides and does nothing
else."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster.errors import invalid
from baton.cockpit.checkpoints import CHECKPOINTS
from baton.cockpit.knobs import Settings

MIB = 1 << 20
MOST_WORKERS, LEAST_MOST = 8, 3  # on a machine of two cores, there is still something to compare
KV_MIB = 128  # of each worker
WORKER_BYTES = 640 * MIB  # of a worker's process, without weights and KV
OTHER_BYTES = 512 * MIB  # of the router, Redis and the supervisor
COPIES = 2  # of the weights, while a worker loads them
DRAIN_S = 1.0  # nothing runs any more when it is taken down, unless the run was stopped


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """What this machine has for it: processor cores, and bytes of memory that are free."""

    cores: int
    memory: int

    @property
    def workers(self) -> int:
        """How many it may have: each computes on one thread."""
        return min(MOST_WORKERS, max(LEAST_MOST, self.cores))


def refuse_beyond(settings: Settings, longest: int, room: MachineRoom) -> None:
    """`longest`: tokens of the longest request. Raises BatonError(INVALID_FIELD) for more than this machine, or the model, has room for."""
    model, workers = CHECKPOINTS[settings.checkpoint], settings.prefill + settings.decode
    if workers > room.workers:
        field = "decode" if settings.decode > 1 else "prefill"
        raise invalid(field, f"{workers} workers: at most {room.workers} on the {room.cores} cores of this machine")
    needed = OTHER_BYTES + workers * (WORKER_BYTES + KV_MIB * MIB + COPIES * model.weight_bytes)
    if needed > room.memory:
        field = "decode" if settings.decode > 1 else "prefill" if settings.prefill else "checkpoint"
        told = f"{workers} workers with {model.name} need {needed / 1e9:.3g} GB of memory, and {room.memory / 1e9:.3g} GB are free"
        raise invalid(field, told)
    if longest > model.context:
        told = f"the longest request has {longest} tokens with its output, and the context of {model.name} is {model.context}"
        raise invalid("prompt", told)


def start_flags(settings: Settings, name: str, folder: str) -> tuple[str, ...]:
    """The arguments of `baton` that start it. `folder`: of the model. It listens on loopback at free ports, and computes on the CPU."""
    flags = {
        "model.path": folder,
        "model.served-name": settings.checkpoint,
        "cluster.name": name,
        "prefill.replicas": settings.prefill,
        "decode.replicas": settings.decode,
        "prefill.drain-s": DRAIN_S,
        "decode.drain-s": DRAIN_S,
        "engine.device": "cpu",
        "engine.threads": 1,
        "engine.kv-memory-mib": KV_MIB,
        "engine.max-num-seqs": settings.batch,
        "engine.batching": settings.batching,
        "engine.weight-dtype": settings.weight_dtype,
        "engine.kv-dtype": settings.kv_dtype,
        **dict.fromkeys(("router.port", "router.admin-port", "router.http-port", "router.page-port"), 0),
    }
    return ("up", *(part for key, value in flags.items() for part in (f"--{key}", str(value))))


def notes(settings: Settings, room: MachineRoom, others: Sequence[str]) -> list[str]:
    """What is to be said before its figures. `others`: names of the clusters that run on this host."""
    workers = settings.prefill + settings.decode
    told = [f"the cluster {name} runs on the same cores: the two disturb each other" for name in others]
    if workers >= room.cores:
        told.append(f"its {workers} workers of one thread share {room.cores} cores with its router and the load")
    if CHECKPOINTS[settings.checkpoint].made:
        told.append(f"{settings.checkpoint} is untrained: its steps are those of a model of its size, its text is noise")
    return told
