"""The launcher for one machine: it starts child processes of this process."""

import os
from pathlib import Path

from baton.cluster.errors import BatonError, Reason
from baton.cluster.gpus import VISIBLE
from baton.launch.child import Child
from baton.launch.launcher import Launcher, ProcessKeeper, RestartRule, Template
from baton.launch.placing import GpuDemand, Gpus, HeldGpus, place


class LocalLauncher(Launcher):
    """`gpus`: what it may assign; None: the processes inherit CUDA_VISIBLE_DEVICES, and `Template.gpus` is ignored. `Template.cpus` is
    always ignored: use `cores` to keep processes apart."""

    def __init__(self, rule: RestartRule | None = None, log_dir: Path | None = None, gpus: Gpus | None = None) -> None:
        super().__init__()
        self._rule = rule or RestartRule()
        self._log_dir = log_dir
        self._gpus = gpus
        self._held: dict[str, HeldGpus] = {}  # by name; also of drained names

    async def start(self) -> None:
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)

    async def _open(self, template: Template, names: list[str]) -> dict[str, ProcessKeeper]:
        self._held = self._hold_gpus(template, names)
        places: dict[str, ProcessKeeper] = {}
        for name in names:
            env = dict(os.environ)
            if self._gpus is not None:
                env[VISIBLE] = ",".join(device.token for device in self._held[name].devices)
            places[name] = child = Child(name, template, self._rule, env, "localhost", self._log_dir)
            child.start()
        return places

    async def _close(self) -> None:
        self._held.clear()

    def _hold_gpus(self, template: Template, names: list[str]) -> dict[str, HeldGpus]:
        """Which name holds which devices once `names` have theirs. Raises SATURATED, and changes nothing."""
        if self._gpus is None:
            return {}
        held = {name: self._held[name] for name in self._places if name in self._held}
        given = place(self._gpus.devices, held, GpuDemand(template.role, template.gpus, len(names)), names, self._gpus.kinds)
        if given is None:
            there = ", ".join(map(str, self._gpus.devices)) or "none"
            used = "; ".join(f"{name} has {' and '.join(map(str, each.devices))}" for name, each in held.items() if each.devices)
            asked = f"{len(names)} processes of {template.gpus:g} GPUs each, of one kind with the others of the pool"
            raise BatonError(Reason.SATURATED, f"{template.role}: no room for {asked}; there are: {there}; {used or 'none is in use'}")
        return held | given
