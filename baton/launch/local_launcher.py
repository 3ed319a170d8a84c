"""The launcher for one machine: it starts child processes of this process."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.cluster.errors import BatonError, Reason
from baton.launch.child import Child
from baton.launch.launcher import Launcher, Place, RestartRule, Template


class LocalLauncher(Launcher):
    """`gpu_ids`: the devices that it may assign, as CUDA_VISIBLE_DEVICES names them. If there are none, the processes inherit that variable
    and `Template.gpus` is ignored. `Template.cpus` is always ignored: use `cores` to keep processes apart."""

    def __init__(self, rule: RestartRule | None = None, log_dir: Path | None = None, gpu_ids: Sequence[str] = ()) -> None:
        super().__init__()
        self._rule = rule or RestartRule()
        self._log_dir = log_dir
        self._gpu_ids = tuple(gpu_ids)
        self._held: dict[str, tuple[float, tuple[str, ...]]] = {}  # name → (share of each, devices); also of drained names

    async def start(self) -> None:
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)

    async def _open(self, template: Template, names: list[str]) -> dict[str, Place]:
        self._held = self._hold_gpus(template, names)
        places: dict[str, Place] = {}
        for name in names:
            env = dict(os.environ)
            if self._gpu_ids:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(self._held[name][1])
            places[name] = child = Child(name, template, self._rule, env, "localhost", self._log_dir)
            child.start()
        return places

    async def _close(self) -> None:
        self._held.clear()

    def _hold_gpus(self, template: Template, names: list[str]) -> dict[str, tuple[float, tuple[str, ...]]]:
        """Which name holds which devices once `names` have theirs. Raises SATURATED, and changes nothing."""
        held = {name: self._held[name] for name in self._places if name in self._held}
        for name in names if self._gpu_ids else ():
            used = {gpu: sum(share for share, gpus in held.values() if gpu in gpus) for gpu in self._gpu_ids}
            gpus = pick_gpus(used, template.gpus)
            if gpus is None:
                asked = f"{len(names)} processes of {template.gpus:g} GPUs each"
                raise BatonError(Reason.SATURATED, f"{template.role}: no room for {asked} on {len(used)} devices; in use: {used}")
            held[name] = (min(template.gpus, 1.0), gpus)
        return held


def pick_gpus(used: Mapping[str, float], asked: float) -> tuple[str, ...] | None:
    """The first devices that fit one process; None if too few are free. `used`: device → share (0 to 1) that other processes hold."""
    share, count = min(asked, 1.0), 1 if 0 < asked < 1 else int(asked)
    fitting = [gpu for gpu, taken in used.items() if taken + share <= 1 + 1e-9]
    return tuple(fitting[:count]) if len(fitting) >= count else None
