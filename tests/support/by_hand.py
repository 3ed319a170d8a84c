"""Processes managed by hand, without `baton up`."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_cluster import ends_of_logs

from baton.cli.admin import read_status
from baton.v1 import worker_pb2, worker_pb2_grpc


@dataclass
class Hand:
    """Processes started as a person would start them: a command, an environment, a log."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, env={**clean, **(env or {})}, cwd=self.folder, stdout=log, stderr=log)
        self.started.append(process)
        return process

    def python(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        return self.start(module, sys.executable, "-m", module, *arguments, env=env)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        return ends_of_logs(self.folder)

    def wait(self, condition: Callable[[], Any], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"the condition was not met in time\n{self.logs()}"
            time.sleep(0.03)

    def stop(self) -> None:
        for process in reversed(self.started):
            if process.poll() is None:
                process.kill()
            process.wait(10)


def healthy(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def workers(admin: str) -> list[dict[str, Any]]:
    """Those that the router with this admin door knows."""
    with grpc.insecure_channel(admin) as channel:
        answer = worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=5)
    return list(read_status(answer)["workers"])
