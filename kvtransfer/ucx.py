"""The settings of UCX, which reads them from the environment when an agent starts, and the network devices that it may use."""

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil

# UCX never chooses posix and sysv for reads that have to survive a peer's death, yet each takes 4 MiB of /dev/shm. (A list of allowed
# transports, instead of excluded ones, is refused on hosts with a GPU unless it names CUDA's.) To learn of memory that is freed, UCX would
# rewrite the code of the C library while other threads may run it, and spin for 0.4 s of processor time until it can. (Its other way,
# "reloc", aborts the process when some libraries are loaded later, such as awscrt.) It needs to know only for memory that it registers by
# itself; all memory that is transferred here is registered by name, and is freed last. The other settings detect a cut cable.
DEFAULTS = {
    "UCX_TLS": "^posix,sysv",
    "UCX_MEM_MMAP_HOOK_MODE": "none",
    "UCX_TCP_USER_TIMEOUT": "5s",
    "UCX_TCP_KEEPIDLE": "5s",
    "UCX_TCP_KEEPINTVL": "1s",
}
# Without these, UCX would fetch what it cannot read by itself by asking the peer to send it, which a reader's death turns into the peer's
# (`kvtransfer.nixl_transport`). It says so on stderr when a peer can only be reached like that.
ONE_SIDED = {"UCX_PROTO_EMULATION_ENABLE": "n"}
# Otherwise UCX reads by CUDA IPC only where it finds NVLinks. It does not know the name where it cannot load CUDA.
ON_DEVICES = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
OFF = ("n", "no", "off", "0", "false")  # in UCX's words
INFINIBAND = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")

_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Ucx:
    """Settings of UCX. None leaves the choice to the transport; an environment variable of the same meaning wins."""

    tls: str | None = None  # UCX_TLS
    net_devices: str | None = None  # UCX_NET_DEVICES
    port_range: str | None = None  # UCX_TCP_PORT_RANGE, FIRST-LAST


@contextmanager
def environment(settings: Mapping[str, str | None]) -> Iterator[dict[str, str]]:
    """Variables that are set already win. Yields the settings in force."""
    wanted = DEFAULTS | {name: value for name, value in settings.items() if value}
    with _lock:
        ours = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield {name: os.environ[name] for name in wanted}
        finally:
            for name in ours:
                del os.environ[name]


def devices_of(host: str) -> str | None:
    """Returns UCX_NET_DEVICES for one of our addresses. None (every device) if no interface has it."""
    try:
        address = ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:  # a name that only others resolve
        return None
    if address.is_loopback:
        return "lo"
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address == str(address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)):
            return ",".join([interface, *rdma_ports()])
    return None


def uses_rdma(settings: Mapping[str, str]) -> bool:
    """Whether UCX may use an RDMA device, which it prefers to TCP."""
    devices = settings.get("UCX_NET_DEVICES", "all").split(",")
    return any(port in devices or "all" in devices for port in rdma_ports())


def is_one_sided(settings: Mapping[str, str]) -> bool:
    """Whether UCX refuses to read what it could only ask a peer to send."""
    return settings.get("UCX_PROTO_EMULATION_ENABLE", "").lower() in OFF


def rdma_ports() -> list[str]:
    """Ports of the RDMA adapters that this process can open. A container sees every adapter of its host, but few devices."""
    adapters = [adapter for adapter in sorted(INFINIBAND.glob("*")) if any(map(_opens, _verbs(adapter)))]
    return [f"{adapter.name}:{port.name}" for adapter in adapters for port in sorted(adapter.glob("ports/*"))]


def _verbs(adapter: Path) -> list[Path]:
    """The device files through which a process uses an adapter."""
    return [DEVICES / entry.name for entry in adapter.glob("device/infiniband_verbs/uverbs*")]


def _opens(device: Path) -> bool:
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True
