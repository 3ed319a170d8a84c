"""Peers in processes of their own, driven over stdin and stdout: each has a pool with known bytes, serves it, and reads from others on
command.

    python peer.py      forks one for each request: importing the libraries takes longer than most tests

Requests come over the socket that is its stdin, one at a time, and each gets an answer in JSON:

    ["start", options, environment]   with the peer's stdin and stdout → its pid. Options: {"kind": "nixl", "name": "a", "num_blocks": 64 …}
    ["stopped", pid]                  → null, once it has
    ["ended", pid, seconds]           → its exit status, null if it goes on

A peer says its address in hex, then one answer per command.

Commands, one JSON list per line: ["fill", seed] ["read", peer, address, remote, local] ["digest"] ["cpu"] ["detail"] ["close"].
"""

import ctypes
import json
import mmap
import os
import platform
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from baton.cluster.config import SecurityConfig
from baton.cluster.errors import BatonError
from baton.engine.core.kvcache import PROBE_PIECES, Dma, KvLayout, KvPool, Region
from baton.worker.kv_tls import kv_tls
from kvtransfer import nixl_transport
from kvtransfer.auto_transport import AutoTransport
from kvtransfer.cuda_ipc_transport import CudaIpcTransport
from kvtransfer.device_transport import DeviceTransport
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.select import make_transport
from kvtransfer.tcp_transport import TcpTransport
from kvtransfer.transport import Transport
from kvtransfer.ucx import Ucx

DEVICE = 3  # its index
PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}.get(platform.machine())


def layout(block_kib: int) -> KvLayout:
    """Blocks of `block_kib` KiB."""
    return KvLayout("test", "float32", block_size=4, num_layers=block_kib, num_kv_heads=1, head_dim=32)


def pattern(seed: int, num_blocks: int, block_bytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=(num_blocks, block_bytes), dtype=np.uint8)


class MappedPool(KvPool):
    """Stands in for the memory of a device, which another process of this machine can map."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        size = num_blocks * layout.block_bytes
        self._file = os.memfd_create("device")
        os.ftruncate(self._file, size)
        super().__init__(layout, num_blocks, mmap.mmap(self._file, size))

    def __del__(self) -> None:
        os.close(self._file)

    def share(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._file}".encode()

    def open(self, shared: bytes) -> Any:
        with open(shared, "r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8).reshape(-1, self.layout.block_bytes)

    def begin_copy(self, peer: Any, remote: Sequence[int], local: Sequence[int]) -> Callable[[], bool]:
        self.array[list(local)] = peer[list(remote)]
        return lambda: True


class Mirror(KvPool):
    """The host's memory for the blocks of a `Device`."""

    def __init__(self, device: MappedPool) -> None:
        super().__init__(device.layout, device.num_blocks)
        self._device = device

    def expose(self, blocks: Sequence[int]) -> None:
        self.array[list(blocks)] = self._device.array[list(blocks)]

    def take_in(self, blocks: Sequence[int]) -> None:
        self._device.array[list(blocks)] = self.array[list(blocks)]


class Device:
    """The pool of a device (`baton.engine.gpu.pool.DevicePool`) whose memory another process of this machine can map."""

    staged: KvPool
    read_bytes = 8 << 20
    waits = direct = True
    dma: Dma | None = None

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout, self.num_blocks = layout, num_blocks
        self._memory = memory = MappedPool(layout, num_blocks + 1 + PROBE_PIECES * layout.probe_blocks)
        self.probes = range(num_blocks + 1, memory.num_blocks)
        self.staged = Mirror(memory)
        self.array = memory.array[:num_blocks]
        self.share, self.open, self.begin_copy = memory.share, memory.open, memory.begin_copy
        self.expose, self.take_in, self.back = self.staged.expose, self.staged.take_in, memory.back
        self.digests, self.flip, self.nbytes = memory.digests, memory.flip, num_blocks * layout.block_bytes
        self.carrier, self.unit_bytes = memory.carrier, memory.unit_bytes

    @property
    def region(self) -> Region:
        own = self._memory.region
        return Region(own.address, own.blocks, "VRAM", DEVICE, own.address + self.probes[-1] * self.layout.block_bytes)


class Injected:
    """An agent of NIXL to which memory of the device DEVICE is the host's. All else goes on as with a device's."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> Any:
        assert {region[2] for region in regions} == {DEVICE if kind == "VRAM" else 0}
        return self._agent.register_memory([(*region[:2], 0, "") for region in regions], "DRAM")

    def prep_xfer_dlist(self, agent: str, descriptors: np.ndarray, kind: str) -> Any:
        assert set(descriptors[:, 2]) == {DEVICE if kind == "VRAM" else 0}
        descriptors[:, 2] = 0
        return self._agent.prep_xfer_dlist(agent, descriptors, "DRAM")

    def get_xfer_descs(self, descriptors: list[tuple[int, int, int]], kind: str) -> Any:
        assert {descriptor[2] for descriptor in descriptors} == {DEVICE if kind == "VRAM" else 0}
        return self._agent.get_xfer_descs([(*descriptor[:2], 0) for descriptor in descriptors], "DRAM")


@contextmanager
def injected() -> Iterator[None]:
    start = nixl_transport._start_agent
    with mock.patch.object(nixl_transport, "_start_agent", lambda *args: Injected(start(*args))):
        yield


def make_pool(kind: str, layout: KvLayout, num_blocks: int) -> Any:
    if kind.startswith("device"):
        return Device(layout, num_blocks)
    return MappedPool(layout, num_blocks) if kind == "cuda_ipc" else KvPool(layout, num_blocks)


def transport(kind: str, name: str, pool: Any, host: str = "127.0.0.1", key: str = "key", **options: Any) -> Transport:
    """`kind`: "nixl", "nixl-tcp" (NIXL without copies between processes), "tcp", "tls" (TCP inside it, with the certificates of the folder
    BATON_TEST_TLS), "auto", "auto-tcp" (auto without NIXL), or "cuda_ipc" over a `MappedPool`. Over a
    `Device`: "device-vram" (NIXL with the device's memory alone) and "device-tcp"."""
    if isinstance(pool, Device):
        if kind == "device-vram":
            with injected():
                nixl = NixlTransport(f"{name}/vram", pool, host, ucx=Ucx(**options))
            return DeviceTransport("nixl", pool, {"nixl_vram": nixl})
        return make_transport(kind.removeprefix("device-"), peer=name, pool=pool, host=host, key=key.encode(), ucx=Ucx(**options))
    if isinstance(pool, MappedPool):
        return CudaIpcTransport(pool)
    if kind == "tls":
        return TcpTransport(pool, host, key.encode(), **{"tls": kv_tls(security(Path(os.environ["BATON_TEST_TLS"]))), **options})
    if kind in ("tcp", "auto-tcp"):
        tcp = TcpTransport(pool, host, key.encode(), **options)
        return tcp if kind == "tcp" else AutoTransport(None, tcp)
    if kind == "auto":
        return make_transport("auto", peer=name, pool=pool, host=host, key=key.encode(), ucx=Ucx(**options))
    network_only: dict[str, Any] = {"tls": "tcp", "allow_tcp": True} if kind == "nixl-tcp" else {}
    settings = network_only | options
    permits = {permit: settings.pop(permit, False) for permit in ("allow_tcp", "in_memory_only")}
    return NixlTransport(name, pool, host, ucx=Ucx(**settings), **permits)


def security(folder: Path) -> SecurityConfig:
    return SecurityConfig(tls_cert=f"{folder}/server.pem", tls_key=f"{folder}/server.key", tls_ca=f"{folder}/ca.pem")


def forbid_reading_other_processes() -> None:
    """A seccomp filter that makes process_vm_readv fail with EPERM in this process, as a container may do."""
    load_number, skip_unless, refuse, allow = (0x20, 0, 0, 0), (0x15, 0, 1, PROCESS_VM_READV), (6, 0, 0, 0x00050001), (6, 0, 0, 0x7FFF0000)
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in (load_number, skip_unless, refuse, allow))
    program = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", 4, ctypes.addressof(program))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
    assert prctl(22, 2, ctypes.c_char_p(header), 0, 0) == 0, f"PR_SET_SECCOMP: {ctypes.get_errno()}"


def main() -> None:
    line = socket.socket(fileno=0)
    while True:
        told, pipes, _, _ = socket.recv_fds(line, 1 << 20, 2)
        if not told:
            return
        answer: int | None = None
        match json.loads(told):
            case ["start", options, environment]:
                answer = os.fork()
                if not answer:
                    line.close()
                    for number, pipe in enumerate(pipes):
                        os.dup2(pipe, number)
                        os.close(pipe)
                    os.environ.clear()
                    os.environ.update(environment)
                    return serve(options)
                for pipe in pipes:
                    os.close(pipe)
            case ["stopped", pid]:
                os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            case ["ended", pid, seconds]:
                answer = ended(pid, time.monotonic() + seconds)
        line.send(json.dumps(answer).encode())


def ended(pid: int, deadline: float) -> int | None:
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(found[1])


def serve(options: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what UCX prints out of the answers
    if options.pop("forbid", False):
        forbid_reading_other_processes()
    seed, num_blocks, block_kib = (options.pop(name) for name in ("seed", "num_blocks", "block_kib"))
    pool = make_pool(options["kind"], layout(block_kib), num_blocks)
    pool.array[:] = pattern(seed, *pool.array.shape)
    pool.expose(range(num_blocks))
    served = transport(options.pop("kind"), options.pop("name"), pool, **options)

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(served.address().hex())
    for line in os.fdopen(0):
        match json.loads(line):
            case ["fill", seed]:
                pool.array[:] = pattern(seed, *pool.array.shape)
                pool.expose(range(num_blocks))
                answer(None)
            case ["read", peer, address, remote, local]:
                try:
                    served.connect(peer, bytes.fromhex(address))
                    served.read(peer, remote, local, timeout=10)
                    if (route := served.route(peer)) is not None and route.through_host:
                        pool.take_in(local)
                        pool.expose(local)  # for those that read from here next
                    answer(None)
                except BatonError as error:
                    answer(str(error))
            case ["digest"]:
                answer(blake2b(pool.array.tobytes(), digest_size=16).hexdigest())
            case ["cpu"]:
                answer(time.process_time())
            case ["detail"]:
                answer(served.backend_detail())
            case ["flush"]:  # what C libraries have written to files
                answer(ctypes.CDLL(None).fflush(None))
            case ["close"]:
                served.close()
                answer(None)
    os._exit(0)


if __name__ == "__main__":
    main()
