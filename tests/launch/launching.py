"""A program that owns a launcher, so that a test can kill it: python launching.py HOW FOLDER [RAY_ADDRESS].

HOW is local, local-without-leash, ray, ray-empty (no process), or ray-aborting (none, and Ray's own handler of SIGTERM). It prints one line
of JSON when its process is up, another at each SIGTERM, and stops the launcher when its stdin is closed.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from baton.launch import child
from baton.launch.launcher import Launcher, RestartRule, Template
from baton.launch.local_launcher import LocalLauncher

LAUNCHED = Path(__file__).with_name("launched.py")
NO_LEASH = Path(__file__).with_name("no_leash.py")


async def main(how: str, folder: str, address: str | None = None) -> None:
    os.environ.pop("PYTHONPATH")  # as if nothing was installed: the launcher must see to it that its processes find this project
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: print(json.dumps([0, "SIGTERM"]), flush=True))
    launcher: Launcher
    if how.startswith("local"):
        launcher = LocalLauncher(RestartRule(0.1, 1.0, 5.0))
        if how == "local-without-leash":
            child.LEASH = NO_LEASH
    else:
        from baton.launch import ray_launcher

        if how == "ray-aborting":
            ray_launcher.take_back = lambda number: None
        launcher = ray_launcher.RayLauncher(address, RestartRule(0.1, 1.0, 5.0), ray_num_cpus=8, ray_num_gpus=2)
    await launcher.start()
    count = 0 if how in ("ray-empty", "ray-aborting") else 1
    await launcher.add(Template("decode", (sys.executable, str(LAUNCHED), "serve", folder), grace_s=5.0), count)
    states = await launcher.processes()
    told = {"pid": os.getpid(), "children": [state.pid for state in states], "address": getattr(launcher, "address", None)}
    print(json.dumps(told), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    ended = await launcher.stop()
    print(json.dumps([state.last_exit for state in ended]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
