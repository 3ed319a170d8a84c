"""What the vLLM benchmarks put side by side: each stack is started as its documents say, and asked through /v1/completions.

On a CPU every engine gets the same model, type, block size, memory, bounds and threads, and vLLM's servers get two switches without which
they are slower here: threads that are not bound to cores, and a rank inside the scheduler's process. On GPUs each engine has its own
defaults: bfloat16, CUDA graphs, its own bounds and memory; engines that share a GPU share its memory, too.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil

from baton.cli.admin import read_status
from baton.v1 import worker_pb2, worker_pb2_grpc

HERE = Path(__file__).resolve().parent
READY_S = 300.0
HANG_S = 30.0  # Baton's supervisor replaces what hangs for longer; the default of 10 s is the length of a stop in vllm_faults
RECOVER_S = 60.0  # how long Baton's router keeps a request whose worker died: vLLM takes longer to start than the default of 10 s
BLOCK, SEQUENCES, STEP_TOKENS, CPU_KV_MIB = 32, 32, 512, 256  # on a CPU
VLLM_SHARE = 0.88  # of a GPU's memory, for all the engines on it; vLLM's own default is 0.92
VLLM_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    model: Path
    max_model_len: int
    threads: int = 1  # of each engine
    device: str = "cpu"
    dtype: str = ""  # "": float32 on a CPU, bfloat16 on GPUs
    kv_mib: int | None = None  # None: 256 on a CPU, on GPUs what the engine takes
    lease_s: float | None = None  # None: the stack's default (vLLM 30 s, Baton 10 s)
    policy: str = "recompute"  # of vLLM's NixlConnector
    failpoints: str = ""  # of Baton

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def type(self) -> str:
        return self.dtype or ("bfloat16" if self.on_gpu else "float32")


def devices() -> list[str]:
    """The GPUs that the environment names."""
    return [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]


def sharing(settings: Settings, engines: int) -> int:
    """How many of so many engines compute on one device."""
    return -(-engines // max(1, len(devices()))) if settings.on_gpu else 1


def utilisation(share: int) -> float:
    """Of vLLM: what it may take of a GPU's memory that `share` engines have."""
    return round(VLLM_SHARE / share, 2)


def vllm_flags(settings: Settings, engines: int) -> dict[str, str]:
    """The arguments of each of `engines` servers of vLLM. Without a value: a switch."""
    flags = {"dtype": settings.type, "max-model-len": str(settings.max_model_len)}
    if settings.kv_mib or not settings.on_gpu:
        flags["kv-cache-memory-bytes"] = str((settings.kv_mib or CPU_KV_MIB) << 20)
    if not settings.on_gpu:
        bounds = {"block-size": BLOCK, "max-num-seqs": SEQUENCES, "max-num-batched-tokens": STEP_TOKENS}
        return flags | {key: str(value) for key, value in bounds.items()} | {"enforce-eager": ""}
    if (share := sharing(settings, engines)) > 1:
        flags["gpu-memory-utilization"] = str(utilisation(share))
    return flags


def baton_settings(settings: Settings, kind: str, engines: int) -> dict[str, Any]:
    """The configuration of Baton's workers that corresponds to `vllm_flags`."""
    chosen: dict[str, Any] = {"model.max_model_len": settings.max_model_len, "model.dtype": settings.type, "engine.device": settings.device}
    if settings.kv_mib or not settings.on_gpu:
        chosen["engine.kv_memory_mib"] = settings.kv_mib or CPU_KV_MIB
    own: dict[str, Any] = {}
    if settings.on_gpu:
        own = {"gpu_memory_utilization": utilisation(share)} if (share := sharing(settings, engines)) > 1 else {}
    else:
        chosen |= {"engine.block_size": BLOCK, "engine.max_num_seqs": SEQUENCES, "engine.max_num_batched_tokens": STEP_TOKENS}
        chosen["engine.threads"], own = settings.threads, {"enforce_eager": True}
    return chosen | ({"engine.vllm": json.dumps(own)} if kind == "vllm" else {})


@dataclass
class Stack:
    """One that runs. `parts`: the process of each part at this moment, by name; the rest of its processes are their children."""

    address: str
    parts: Callable[[], dict[str, psutil.Process]]
    metrics: Sequence[str] = ()  # addresses of vLLM's /metrics
    admin: str = ""  # Baton's
    grpc: str = ""  # Baton's

    def cpu_s(self) -> float:
        """Processor time of all living processes so far."""
        total = 0.0
        for each in self._processes().values():
            with suppress(psutil.Error):
                times = each.cpu_times()
                total += times.user + times.system
        return total

    def _processes(self) -> dict[int, psutil.Process]:
        found: dict[int, psutil.Process] = {}
        for root in self.parts().values():
            with suppress(psutil.Error):
                found.update({each.pid: each for each in (root, *root.children(recursive=True))})
        return found


@dataclass
class Server:
    """A process of ours that is started again when it ends, as a supervisor or Kubernetes would."""

    command: Sequence[str]
    env: Mapping[str, str]
    health: str  # URL
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env={**os.environ, **self.env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.log.parent
            )

    def _keep(self) -> None:
        while not self._over.wait(0.1):
            if self.process.poll() is not None:
                self._start()

    def wait(self) -> None:
        """Raises RuntimeError."""
        deadline = time.monotonic() + READY_S
        while not answers(self.health):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.health} does not answer:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def close(self) -> None:
        self._over.set()
        self._keeper.join()
        end(self.process.pid)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def end(pid: int) -> None:
    """The process and all that it has started. What it has started outlives it otherwise."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        tree = [*root.children(recursive=True), root]
        for each in tree:
            with suppress(psutil.Error):
                each.send_signal(signal.SIGCONT)
                each.terminate()
        _, left = psutil.wait_procs(tree, timeout=10)
        for each in left:
            with suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(left, timeout=10)


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def _vllm(settings: Settings, port: int, folder: Path, name: str, *flags: str, number: int = 0, engines: int = 1, **env: str) -> Server:
    """`number`: of `engines` servers, each of which takes the next GPU."""
    given = vllm_flags(settings, engines)
    command = [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(settings.model), "--host", "127.0.0.1"),
        *("--port", str(port), *(part for key, value in given.items() for part in (f"--{key}", value) if part)),
        *("--disable-uvicorn-access-log", "--enable-prompt-tokens-details", *flags),
    ]
    fixed = {**VLLM_ENV, "OMP_NUM_THREADS": str(settings.threads), **env}
    if named := devices():
        fixed["CUDA_VISIBLE_DEVICES"] = named[number % len(named)]
    return Server(command, fixed, f"http://127.0.0.1:{port}/health", folder / f"{name}.log")


@contextmanager
def one_vllm(settings: Settings) -> Iterator[Stack]:
    """(a) vLLM's own server."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        port = free_port()
        server = _vllm(settings, port, Path(folder), "vllm")
        stack.callback(server.close)
        server.wait()
        address = f"127.0.0.1:{port}"
        yield Stack(address, lambda: {"vllm": psutil.Process(server.process.pid)}, [address])


@contextmanager
def several_vllm(settings: Settings, count: int) -> Iterator[list[str]]:
    """The addresses of servers that know nothing of each other."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ports = [free_port() for _ in range(count)]
        servers = [_vllm(settings, port, Path(folder), f"vllm-{port}", number=i, engines=count) for i, port in enumerate(ports)]
        for server in servers:
            stack.callback(server.close)
        for server in servers:
            server.wait()
        yield [f"127.0.0.1:{port}" for port in ports]


@contextmanager
def vllm_pair(settings: Settings) -> Iterator[Stack]:
    """(b) Two of vLLM's servers with its NixlConnector, and a proxy that calls one after the other."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers: dict[str, Server] = {}
        ports = {name: free_port() for name in ("prefill", "decode", "proxy")}
        for number, name in enumerate(("prefill", "decode")):
            connector: dict[str, Any] = {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": settings.policy,
            }
            if settings.lease_s:
                connector["kv_connector_extra_config"] = {"kv_lease_duration": settings.lease_s}
            if settings.device == "cpu":
                connector["kv_buffer_device"] = "cpu"
            flags = ("--kv-transfer-config", json.dumps(connector))
            side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            servers[name] = _vllm(settings, ports[name], Path(folder), name, *flags, number=number, engines=2, **side)
            stack.callback(servers[name].close)
        command = [sys.executable, "-P", str(HERE / "vllm_proxy.py"), *(str(ports[name]) for name in ("proxy", "prefill", "decode"))]
        servers["proxy"] = Server(command, {}, f"http://127.0.0.1:{ports['proxy']}/health", Path(folder) / "proxy.log")
        stack.callback(servers["proxy"].close)
        for server in servers.values():
            server.wait()
        pids = lambda: {name: psutil.Process(server.process.pid) for name, server in servers.items()}  # noqa: E731
        yield Stack(f"127.0.0.1:{ports['proxy']}", pids, [f"127.0.0.1:{ports[name]}" for name in ("prefill", "decode")])


def gpus(settings: Settings, workers: int) -> tuple[str, ...]:
    """Baton's flags where CUDA_VISIBLE_DEVICES names GPUs: one for each worker, or a share."""
    if not settings.on_gpu or not devices():
        return ()
    share = str(min(1.0, len(devices()) / workers))
    return ("--prefill.gpus", share, "--decode.gpus", share)


def baton(kind: str, prefill: int, decode: int, *flags: str) -> "Start":
    """(c), (d) and (e): Baton over an engine. Without prefill workers it is colocated."""

    @contextmanager
    def start(settings: Settings) -> Iterator[Stack]:
        chosen: dict[str, Any] = {
            **baton_settings(settings, kind, prefill + decode), "model.path": settings.model, "engine.kind": kind,
            "prefill.replicas": prefill, "decode.replicas": decode,
            "cluster.name": "bench", "router.recover_wait_s": RECOVER_S, "launcher.hang_s": HANG_S,
            **{f"router.{name}": 0 for name in ("port", "admin_port", "http_port", "page_port")},
        }  # fmt: skip
        if settings.lease_s:
            chosen |= {"kv.lease_ttl_s": settings.lease_s, "kv.read_timeout_s": settings.lease_s / 2}
        if settings.failpoints:
            chosen["cluster.prove_workers"] = "false"  # a proof would meet them
        arguments = [part for key, value in chosen.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "BATON_STATE_DIR": folder, "BATON_FAILPOINTS": settings.failpoints}
            command = [sys.executable, "-P", "-m", "baton"]
            start_up = [*command, "up", "--detach", *arguments, *flags, *gpus(settings, prefill + decode)]
            up = subprocess.run(start_up, env=env, capture_output=True, text=True, timeout=READY_S)
            if up.returncode:
                raise RuntimeError(up.stderr)
            endpoints = json.loads(up.stdout)["endpoints"]
            supervisor = psutil.Process(json.loads((Path(folder) / "bench.json").read_text())["pid"])
            try:
                parts = lambda: {"baton": supervisor, **_parts(endpoints["admin"])}  # noqa: E731
                yield Stack(endpoints["http"], parts, admin=endpoints["admin"], grpc=endpoints["grpc"])
            finally:
                subprocess.run([*command, "down", "--name", "bench"], env=env, capture_output=True, timeout=90)

    return start


Start = Callable[[Settings], Any]
STACKS: dict[str, Start] = {
    "a: vllm": one_vllm,
    "b: vllm pair (NIXL)": vllm_pair,
    "c: Baton over vllm": baton("vllm", 0, 1),
    "d: Baton over vllm, 1:1": baton("vllm", 1, 1, "--router.bypass-tokens", "0"),
    "e: Baton, own engine": baton("baton", 0, 1),
    "e: own engine, 1:1": baton("baton", 1, 1, "--router.bypass-tokens", "0"),
}
TWO_ENGINES = frozenset(name for name in STACKS if name[0] in "bd" or name.endswith("own engine, 1:1"))


def status(admin: str) -> dict[str, Any]:
    with grpc.insecure_channel(admin, [("grpc.enable_http_proxy", 0)]) as channel:
        return read_status(worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=10))


def _parts(admin: str) -> dict[str, psutil.Process]:
    told = status(admin)
    found = {each["name"].rpartition("-")[0]: each["pid"] for each in told["workers"]}
    return {name: psutil.Process(pid) for name, pid in {**found, "router": told["router"]["pid"]}.items()}


# --- asking ---


@dataclass(slots=True)
class Answer:
    asked_at: float  # of the monotonic clock, as `at`
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)  # when each token came
    cached: int = 0  # tokens of the prompt
    error: str = ""
    finish: str = ""
    late: bool = False  # its read was made late
    refused: bool = False  # nothing was done for it, and the server says that the client may try again

    @property
    def ttft(self) -> float:
        return self.at[0] - self.asked_at

    @property
    def tpot(self) -> float:
        return (self.at[-1] - self.at[0]) / (len(self.at) - 1)


async def ask(
    session: aiohttp.ClientSession, address: str, prompt: Sequence[int], tokens: int, timeout_s: float = 60.0, **headers: str
) -> Answer:
    """Greedy. Never raises: what went wrong is in `error`."""
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    answer = Answer(time.monotonic())
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(f"http://{address}/v1/completions", json=body, headers=headers) as response,
        ):
            if response.status != 200:
                answer.error = f"HTTP {response.status} {_code(await response.text())}"
                answer.refused = response.status in (429, 503)
                return answer
            async for line in response.content:
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    answer.error = _code(line[5:].decode())
                    return answer
                details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
                answer.cached = details.get("cached_tokens", answer.cached)
                for choice in chunk.get("choices") or ():
                    answer.finish = choice.get("finish_reason") or answer.finish
                    new = choice.get("token_ids") or ()
                    answer.tokens += new
                    answer.at += [time.monotonic()] * len(new)
        if len(answer.tokens) != tokens:
            answer.error = f"{len(answer.tokens)} of {tokens} tokens"
    except TimeoutError:
        answer.error = f"no end within {timeout_s:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def _code(body: str) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error["code"], int) else error["code"])
    except (ValueError, KeyError, TypeError):
        return body[:100].strip().replace("\n", " ")
