"""`baton doctor`: does everything that a cluster needs work here? Each finding comes from trying the thing, not from merely finding it.

Whatever may hang or crash (a native library, Ray's daemons) runs in its own process with a time limit.
"""

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import numpy as np

from baton.cli.up import with_model
from baton.cluster.address import advertised
from baton.cluster.config import PORTS, Config, ConfigError
from baton.cluster.config_layers import mask_password, to_env
from baton.cluster.device import NOT_BUILT, ROCM, too_old, torch_build
from baton.cluster.gpus import HostGpus, find, unusable
from baton.cluster.packages import command
from baton.cluster.redis_registry import RedisRegistry
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.defaults import CPU_SHARE
from baton.engine.machine import available_memory, quota_cores, usable_cores
from baton.launch import state
from baton.launch.gpus import settle
from baton.launch.plan import UpError, check_ports
from baton.launch.redis_server import EmbeddedRedis
from kvtransfer.select import make_transport
from kvtransfer.transport import Transport
from kvtransfer.ucx import Ucx, rdma_ports

BLOCK_BYTES, BLOCKS = 64 << 10, 1024  # 64 MiB in blocks of a typical size
REPEATS = 5
PEER_WITHIN_S = 20.0
RAY_WITHIN_S = 90.0
KERNELS_WITHIN_S = 300.0  # the first process of a machine compiles them


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Literal["ok", "warn", "fail"]
    subject: str
    detail: str


def examine(config: Config, with_ray: bool, quick: bool = False, begin: Callable[[str], None] = lambda subject: None) -> Iterator[Finding]:
    """Each finding as soon as it is there; `begin` is called with what is tried next. `with_ray`: start a Ray cluster, which takes ten
    seconds or more. `quick`: leave out what computes for seconds: the transports, torch and the products."""
    config, found = _settled(config)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "python": lambda: [_python()],
        "memory": lambda: [_memory(config)],
        "gpus": lambda: [*found, *gpus(find(), torch_build(), quick, config.engine.device)],
        "transports": lambda: [] if quick else _transports(config),
        "rdma": lambda: [locks(rdma_ports(), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], lambda: _pool_needed(config), config.kv.rdma)],
        "redis": lambda: [_redis(config)],
        "ray": lambda: [_ray(with_ray)],
        "ports": lambda: [_ports(config)],
        "torch": lambda: [] if quick else [_tried("torch", TORCH, 60.0, _threads(config))],
        "products": lambda: [] if quick else _products(config),
    }
    for subject, check in checks.items():
        begin(subject)
        yield from check()


def _python() -> Finding:
    return Finding("ok", "python", f"{sys.version.split()[0]} on {sys.platform}, {usable_cores()} cores usable")


def _settled(config: Config) -> tuple[Config, list[Finding]]:
    """The configuration with the device and the GPUs that its workers would get here, and a finding if they would get none or too few."""
    try:
        settled = settle(with_model(config))
    except (UpError, ConfigError) as error:
        device = "cpu" if config.engine.device == "cpu" else "cuda"
        return config.model_copy(update={"engine": config.engine.model_copy(update={"device": device})}), [
            Finding("fail", "gpus", str(error))
        ]
    device = settled.config.engine.device
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"device": device})})
    return config, [Finding("warn", "gpus", settled.note)] if settled.note else []


def gpus(host: HostGpus, built: str, quick: bool, device: str) -> Iterator[Finding]:
    """`built`: as `torch_build` tells; `device`: on which workers would compute here."""
    if not host.gpus:
        yield Finding("ok" if device == "cpu" else "warn", "gpus", f"none: {host.reason}")
        return
    runs = f"driver {host.driver}" + (f" for CUDA up to {host.cuda[0]}.{host.cuda[1]}" if host.cuda else "")
    if built in NOT_BUILT:
        yield Finding("warn", "driver", f"{runs}; {NOT_BUILT[built]}: install torch's build for CUDA to use the GPUs")
    else:
        why = "" if built == ROCM else too_old(host, built)
        yield Finding("fail" if why else "ok", "driver", why or f"{runs}; torch is built for {built}")
    for gpu in host.gpus:
        if why := unusable(gpu):
            yield Finding("fail", "gpu", f"{gpu}: {why}")
            continue
        free = f"{(gpu.memory_total - gpu.memory_used) / 2**30:.1f} of {gpu.memory_total / 2**30:.1f} GiB free"
        capability = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else "compute capability unknown"
        peers = ", ".join(f"GPU {other} by {link}" for other, link in gpu.peers.items())
        slices = f"; MIG slices: {', '.join(f'{part.name} {part.uuid}' for part in gpu.slices)}" if gpu.mig else ""
        yield Finding("ok", "gpu", f"{gpu}: {free}, {capability}; peers: {peers or 'none'}{slices}")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"))
    absent = "not found, so FlashInfer cannot compile its kernels: install the CUDA toolkit, or set engine.attention_backend to triton"
    yield Finding("ok" if nvcc else "warn", "nvcc", nvcc or absent)
    if not quick:
        yield _tried("attention", ATTENTION, 120.0)
        yield _tried("nixl backends", NIXL, 60.0)


def _memory(config: Config) -> Finding:
    free, share = available_memory(), _pool_bytes(config)
    workers = config.prefill.replicas + config.decode.replicas
    detail = f"{free / 2**30:.1f} GiB free; KV pools of {workers} workers take up to {share / 2**30:.1f} GiB each"
    return Finding("ok" if share * workers < free else "warn", "memory", detail)


def _pool_bytes(config: Config) -> int:
    return config.engine.kv_memory_bytes or int(available_memory() * (config.engine.kv_memory_fraction or CPU_SHARE))


POOL = """
from baton.cluster.config_layers import load
from baton.engine.build import pool_bytes
from baton.worker.host import options
print(pool_bytes(options(load().config)))
"""


def _pool_needed(config: Config) -> int:
    """What the served model's pool takes; if that cannot be known, the most that a pool may take."""
    found = _tried("pool", POOL, 60.0, env=to_env(with_model(config)))
    return int(found.detail) if found.verdict == "ok" else _pool_bytes(config)


def locks(adapters: Sequence[str], limit: int, needed: Callable[[], int], wanted: bool = False) -> Finding:
    """Whether this process may lock as much memory as an RDMA adapter needs to read a KV pool. `limit`: RLIMIT_MEMLOCK, bytes; -1: none;
    `needed`: the pool's bytes, asked only if they matter. `wanted`: kv.rdma."""
    if not adapters and wanted:
        return Finding("fail", "rdma", "no adapter can be opened here, and kv.rdma asks for one; KV goes over shared memory or TCP")
    if not adapters:
        return Finding("ok", "rdma", "no adapter can be opened here; KV goes over shared memory or TCP")
    names = ", ".join(adapters)
    if limit in (-1, resource.RLIM_INFINITY) or limit >= (pool_bytes := needed()):
        return Finding("ok", "rdma", f"{names}; enough memory may be locked for a KV pool")
    return Finding(
        "fail",
        "rdma",
        f"{names}; but a KV pool of {pool_bytes >> 20} MiB must be locked, and this process may lock {limit >> 20} MiB: raise memlock in"
        " the container runtime of the node, or with ulimit -l",
    )


TORCH = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]) or torch.get_num_threads())
a, b = torch.arange(512 * 512, dtype=torch.float32).reshape(512, 512) % 7, torch.eye(512) * 2
assert torch.equal(a @ b, a * 2), "a product of two matrices is wrong"
began = time.perf_counter()
for _ in range(20):
    a @ b
rate = 20 * 2 * 512**3 / (time.perf_counter() - began)
print(f"{torch.__version__} multiplies matrices at {rate / 1e9:.0f} GFLOP/s with {torch.get_num_threads()} threads")
"""
ATTENTION = """
import torch
from baton.engine.gpu.choice import BACKENDS, BackendFacts, why_not
facts = BackendFacts("cuda", torch.bfloat16, 16, 128, 2)
print("; ".join(f"{name}: {why_not(name, facts) or 'possible'}" for name in BACKENDS))
"""
NIXL = """
from nixl_cu13 import _api as api
agent = api.nixl_agent("doctor", api.nixl_agent_config(backends=[]))
opened = {}
for name in agent.get_plugin_list():
    try:
        agent.create_backend(name, {})
        opened[name] = "opens"
    except Exception as error:
        opened[name] = f"does not open: {error}"
print("; ".join(f"{name} {said}" for name, said in opened.items()) or "no plugin was found: install nixl-cu13 again")
"""
RAY = """
import os, socket
import ray
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=False, num_cpus=1)
assert ray.get(ray.remote(lambda: 6 * 7).remote(), timeout=40) == 42, "a task returned a wrong answer"
print(f"{ray.__version__} starts a cluster here and runs a task")
ray.shutdown()
"""


PRODUCTS = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]) or torch.get_num_threads())
from baton.engine.cpu.compiled_ops import choice
from baton.engine.cpu.features import target
found = {name: choice(getattr(torch, name)) for name in ("float32", "bfloat16", "int8")}
others = [name for name, each in found.items() if each.by != "baton"]
exact = f"may differ in its last bits in {', '.join(others)}: set engine.products to baton" if others else "has the same bits"
said = "; ".join(f"{name} by {each}" for name, each in found.items())
print(f"with {torch.get_num_threads()} threads, for 1, 8 and 256 rows: {said}; among workers for {target()}, a continued stream {exact}")
"""


def _threads(config: Config) -> str:
    """How many a worker computes with; 0: as many as torch chooses."""
    return str(config.engine.threads or quota_cores() or 0)


def _products(config: Config) -> Iterator[Finding]:
    """What multiplies matrices of weights on this CPU. Found out now, as a worker would, if no worker has."""
    engine = config.engine
    if engine.kind != "baton" or engine.device == "cuda" or not engine.compiled:
        return
    if engine.products != "auto":
        yield Finding("ok", "products", f"by {engine.products}, as engine.products says")
        return
    found = _tried("products", PRODUCTS, KERNELS_WITHIN_S, _threads(config))
    yield found if found.verdict == "ok" else Finding("warn", "products", f"by plain torch: {found.detail}")


def _tried(subject: str, code: str, within_s: float, *arguments: str, env: Mapping[str, str] | None = None) -> Finding:
    """Runs a program. The finding is the last line of its output or, if it fails, of its error output."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(env or {})},
    )
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        return Finding("fail", subject, f"no answer within {within_s:g} s")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and everything it started
        process.communicate()
    lines = (err if process.returncode else out).strip().splitlines() or [f"ended with status {process.returncode}"]
    return Finding("fail" if process.returncode else "ok", subject, lines[-1])


def _transports(config: Config) -> list[Finding]:
    """Each transport by itself. With `auto`, two workers on this host use NIXL if it works, else TCP."""
    findings = []
    works = False
    for kind in ("nixl", "tcp"):
        needed = config.kv.transport == kind or (kind == "tcp" and config.kv.transport == "auto" and not works)
        try:
            detail = _measure(kind, config)
            used = needed or (kind == "nixl" and config.kv.transport == "auto")
            works = works or used
            findings.append(Finding("ok", kind, detail + (" (in use)" if used else "")))
        except Exception as error:  # any failure of a native library is a finding
            findings.append(Finding("fail" if needed else "warn", kind, str(error)))
    return findings


def _measure(kind: str, config: Config) -> str:
    """Reads 64 MiB from another process, and compares the rate with that of a plain copy of the same bytes."""
    peer = subprocess.Popen(
        command("baton.cli.doctor", kind, advertised(config), config.kv.ucx_tls or "", config.kv.ucx_net_devices or ""),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert peer.stdout is not None
        line = peer.stdout.readline()
        if not line:
            raise RuntimeError("the other process could not open the transport")
        pool = _pool()
        mine = _open(kind, "doctor-reader", pool, advertised(config), config.kv.ucx_tls, config.kv.ucx_net_devices)
        try:
            mine.connect("doctor-peer", bytes.fromhex(json.loads(line)["address"]))
            blocks = list(range(BLOCKS))
            read = min(_timed(lambda: mine.read("doctor-peer", blocks, blocks, PEER_WITHIN_S)) for _ in range(REPEATS))
            if not (pool.array == CONTENT).all():
                raise RuntimeError("the bytes that arrived are not the bytes that were sent")
            copy = min(_timed(lambda: np.copyto(pool.array, CONTENT)) for _ in range(REPEATS))
            rate = pool.nbytes / read / 1e9
            return f"{rate:.1f} GB/s between two processes, {copy / read:.0%} of a plain copy; {mine.backend_detail()}"
        finally:
            mine.close()
    finally:
        peer.communicate("", timeout=PEER_WITHIN_S)


def _pool() -> KvPool:
    return KvPool(KvLayout("doctor", "int64", 16, 1, 1, BLOCK_BYTES // 2 // 16 // 8), BLOCKS)


CONTENT = (np.arange(BLOCK_BYTES * BLOCKS, dtype=np.uint32) % 251).astype(np.uint8).reshape(BLOCKS, BLOCK_BYTES)


def _open(kind: str, name: str, pool: KvPool, host: str, tls: str | None, devices: str | None) -> Transport:
    return make_transport(kind, peer=name, pool=pool, host=host, key=b"doctor" * 6, ucx=Ucx(tls or None, devices or None))


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _redis(config: Config) -> Finding:
    async def ask(url: str) -> float:
        registry = RedisRegistry(url, "baton-doctor", config.redis, config.security)
        try:
            await registry.ping()
            began = time.perf_counter()
            await registry.ping()
            return time.perf_counter() - began
        finally:
            await registry.close()

    try:
        if config.redis.url != "embedded":
            return Finding(
                "ok", "redis", f"{mask_password(config.redis.url)} answers in {asyncio.run(ask(config.redis.url)) * 1000:.2f} ms"
            )
        with EmbeddedRedis() as server:
            return Finding("ok", "redis", f"embedded server starts and answers in {asyncio.run(ask(server.url)) * 1000:.2f} ms")
    except Exception as error:
        return Finding("fail", "redis", str(error))


def _ray(tried: bool) -> Finding:
    try:
        installed = version("ray")
    except PackageNotFoundError:
        return Finding("warn", "ray", "not installed; the local launcher works without it")
    if not tried:
        return Finding("ok", "ray", f"{installed} is installed; not tried (--ray starts a cluster)")
    return _tried("ray", RAY, RAY_WITHIN_S)


def _ports(config: Config) -> Finding:
    running = state.read(config.cluster.name)
    if running is not None:
        return Finding("ok", "ports", f"cluster {running.name!r} is running (pid {running.pid}) on {running.endpoints['grpc']}")
    try:
        check_ports(config)
    except UpError as error:
        return Finding("fail", "ports", str(error))
    free = shutil.disk_usage(state.state_dir()).free
    ports = ", ".join(str(config.at(name)) for name in PORTS["router"] if config.at(name))
    return Finding("ok", "ports", f"{ports or 'any free ones'} available; {free / 2**30:.0f} GiB of disk for logs")


def _serve() -> None:
    """The other process of `_measure`: offers a pool of known bytes until stdin closes."""
    kind, host, tls, devices = sys.argv[1:5]
    pool = _pool()
    pool.array[:] = CONTENT
    transport = _open(kind, "doctor-peer", pool, host, tls, devices)
    print(json.dumps({"address": transport.address().hex()}), flush=True)
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    _serve()
