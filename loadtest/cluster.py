"""The clusters that `compare` measures, started and stopped by the commands that a person would type, all on the same hardware."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.arms import common_part
from loadtest.campaign import Arm
from loadtest.hardware import ClusterError, Hardware
from loadtest.priority import cluster_niceness

UP_WITHIN_S = 600.0  # vLLM may compile first
DOWN_WITHIN_S = 90.0
BAD_INPUT = 2  # exit status of `baton`


def flags(settings: Mapping[str, str]) -> list[str]:
    return [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value)]


def config_of(settings: Mapping[str, str]) -> dict[str, Any]:
    """The whole configuration that a cluster with these settings would have, as `section.key`. Raises ValueError for settings that are no
    configuration, and ClusterError."""
    done = _baton("config", "print", "--json", *flags(settings))
    if done.returncode:
        raise (ValueError if done.returncode == BAD_INPUT else ClusterError)(done.stderr.strip().removeprefix("baton: "))
    tree = json.loads(done.stdout)
    return {f"{section}.{key}": value for section, values in tree.items() for key, value in values.items()}


def check_equal(arms: Sequence[Arm], common: Mapping[str, str], hardware: Hardware) -> dict[str, Any]:
    """The configuration that all arms share. Raises as `config_of` and `common_part` do."""
    configs = {arm.name: config_of({**common, **arm.topology}) for arm in arms}
    return common_part(arms, configs, hardware)


class RunningCluster:
    """`async with RunningCluster(settings, name) as endpoints`, which holds "grpc" and "http" (host:port)."""

    def __init__(self, settings: Mapping[str, str], name: str) -> None:
        self._settings = settings
        self._name = name

    async def __aenter__(self) -> dict[str, str]:
        """Raises ClusterError."""
        ports = ("--router.port", "0", "--router.admin-port", "0", "--router.http-port", "0", "--router.page-port", "0")
        arguments = ["up", "--detach", "--name", self._name, *ports, *flags(self._settings)]
        up = asyncio.ensure_future(asyncio.to_thread(_baton, *arguments, timeout_s=UP_WITHIN_S, niceness=cluster_niceness()))
        try:
            done = await asyncio.shield(up)
        except asyncio.CancelledError as interruption:  # it goes on starting, and nobody else would end it
            await asyncio.wait({up})
            await self.__aexit__(None, interruption, None)
            raise
        if done.returncode:
            raise ClusterError(done.stderr.strip())
        return dict(json.loads(done.stdout)["endpoints"])

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raises ClusterError if the cluster did not stop, because the next arm would share its cores with what is left of it. An error
        that is already being raised, such as an interruption, is not replaced."""
        try:
            done = await asyncio.to_thread(_baton, "down", "--name", self._name, timeout_s=DOWN_WITHIN_S)
            if done.returncode:
                raise ClusterError(f"`baton down --name {self._name}` failed: {done.stderr.strip()}")
        except ClusterError:
            if error is None:
                raise


def _baton(*arguments: str, timeout_s: float = 60.0, niceness: int = 0) -> subprocess.CompletedProcess[str]:
    """Raises ClusterError if the command takes longer than `timeout_s`."""
    command = [*(["nice", "-n", str(niceness)] if niceness else []), sys.executable, "-m", "baton", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`baton {arguments[0]}` did not end within {timeout_s:g} s") from None
