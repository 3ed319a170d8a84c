"""The program that test_launcher.py has started: python launched.py BEHAVIOUR FOLDER. It reports on itself in FOLDER/NAME.jsonl."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

NAME = os.environ["BATON_WORKER_NAME"]


def tell(**facts: object) -> None:
    with open(Path(sys.argv[2]) / f"{NAME}.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\n")


def birth(**more: object) -> None:
    tell(
        event="start",
        pid=os.getpid(),
        incarnation=secrets.randbits(63),
        at=time.monotonic(),
        env=dict(os.environ),
        cwd=os.getcwd(),
        cores=sorted(os.sched_getaffinity(0)),
        nice=os.nice(0),
        session=os.getsid(0),
        blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        **more,
    )


def serve() -> None:
    """Answers each connection with its pid until SIGTERM, then exits cleanly."""

    def leave(*_: object) -> None:
        tell(event="asked")
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    server = socket.create_server(("127.0.0.1", 0))
    birth(port=server.getsockname()[1])
    while True:
        client, _ = server.accept()
        with client:
            client.sendall(str(os.getpid()).encode())


def crash() -> None:
    birth()
    sys.exit(3)


def stubborn() -> None:
    signal.signal(signal.SIGTERM, lambda *_: tell(event="asked"))
    birth()
    while True:
        time.sleep(60)


def parent() -> None:
    birth(grandchild=subprocess.Popen(["sleep", "600"]).pid)
    signal.pause()


def hang() -> None:
    """Sends one pulse, then none, and ignores SIGTERM, and SIGUSR2 as a process of ours does that hangs."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    birth()
    pulse(0.0)
    signal.pause()


def stall() -> None:
    """Its event loop runs, but its engine does not."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    birth()
    began = time.monotonic()
    while True:
        pulse(time.monotonic() - began)
        time.sleep(0.05)


def pulse(stalled_s: float) -> None:
    os.write(int(os.environ["BATON_PULSE_FD"]), f"{stalled_s:.3f}\n".encode())


if __name__ == "__main__":
    {"serve": serve, "crash": crash, "stubborn": stubborn, "parent": parent, "hang": hang, "stall": stall}[sys.argv[1]]()
