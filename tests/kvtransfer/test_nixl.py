"""Behavior specific to the NIXL transport: how UCX is set up, what is polled, and what cannot be cancelled."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path
from signal import SIGABRT
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from redis_servers import until

from baton.cluster.errors import BatonError, Reason
from kvtransfer.transport import ReadPending

if TYPE_CHECKING:
    from tests.kvtransfer.conftest import MakeReader, SharedPeers, StartPeer

if sys.platform != "linux":
    pytest.skip("NIXL has wheels for Linux only", allow_module_level=True)

import kvtransfer.nixl_transport as nixl
from kvtransfer import ucx

LISTEN = "0A"
UCX = [name for name in os.environ if name.startswith("UCX_")]


def inodes_of(pid: int) -> set[str]:
    """Socket inodes of a process."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def listening(pid: int) -> set[str]:
    """Addresses (without ports) on which a process listens, IPv4 and IPv6."""
    own, found = inodes_of(pid), set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == LISTEN and fields[9] in own:
                raw = bytes.fromhex(fields[1].split(":")[0])
                found.add(".".join(str(byte) for byte in raw[::-1]) if len(raw) == 4 else raw.hex())
    return found


def own_address() -> str | None:
    """An IPv4 address of this host that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


@pytest.mark.skipif(bool(UCX), reason=f"environment variables override the settings: {UCX}")
def test_it_listens_on_loopback_only(shared_peers: SharedPeers) -> None:
    assert listening(shared_peers("nixl").pid) == {"127.0.0.1"}


@pytest.mark.skipif(bool(UCX) or own_address() in (None, "127.0.0.1"), reason="no other interface")
def test_it_listens_only_on_the_interface_of_its_host(start_peer: StartPeer, make_reader: MakeReader) -> None:
    peer, reader = start_peer("nixl", host=own_address()), make_reader("nixl", host=own_address())
    assert listening(peer.pid) == {own_address()}
    reader.connect(peer)
    reader.read(peer, [3], [4])
    assert reader.has(peer, [3], [4])
    # What this prevents: by default, UCX listens on every interface.
    assert len(listening(start_peer("nixl", "other:1", net_devices="all").pid)) > 1


def test_ucx_environment_variables_take_precedence_and_stay_unchanged(make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.delenv("UCX_TLS", raising=False)
    before = dict(os.environ)
    reader = make_reader("nixl", net_devices="no-such-device", tls="^posix,sysv,mm")
    assert os.environ == before
    detail = reader.transport.backend_detail()
    assert "UCX_NET_DEVICES=lo" in detail and "UCX_TLS=^posix,sysv,mm" in detail


@pytest.mark.parametrize(("mode", "signal"), [(None, 0), ("reloc", -SIGABRT)])
def test_libraries_can_be_loaded_after_an_agent_has_started(mode: str | None, signal: int) -> None:
    """boto3 loads awscrt. With UCX's relocated hooks for freed memory, that aborts the process."""
    pytest.importorskip("awscrt")
    code = """
from kvtransfer import nixl_transport, ucx
with ucx.environment({}) as settings:
    agent = nixl_transport._start_agent("a:1", settings)
import awscrt.auth
"""
    clean = {name: value for name, value in os.environ.items() if name not in UCX}
    chosen = {"UCX_MEM_MMAP_HOOK_MODE": mode} if mode else {}
    done = subprocess.run([sys.executable, "-c", code], env={**clean, **chosen}, capture_output=True, text=True, timeout=120)
    assert done.returncode == signal, done.stderr


def test_settings_that_leave_no_transport_are_refused(make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    with pytest.raises(BatonError) as info:
        make_reader("nixl", tls="cma")  # cannot set up a connection by itself
    assert info.value.reason is Reason.TRANSFER_FAILED and "cma" in info.value.message


def test_rdma_counts_only_on_devices_that_ucx_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "rdma_ports", lambda: ["mlx5_0:1", "mlx5_1:1"])
    for devices, used in (("lo", False), ("eth0", False), ("eth0,mlx5_1:1", True), ("all", True)):
        assert ucx.uses_rdma({"UCX_NET_DEVICES": devices}) == used
    assert ucx.uses_rdma({})
    monkeypatch.setattr(ucx, "rdma_ports", list)
    assert not ucx.uses_rdma({})


def test_rdma_counts_only_on_adapters_that_this_process_can_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container sees the adapters of its whole host in /sys, but has the device files of its own only."""
    devices = tmp_path / "dev"
    devices.mkdir()
    for number, adapter in enumerate(("mlx5_0", "mlx5_1")):
        (tmp_path / adapter / "ports" / "1").mkdir(parents=True)
        (tmp_path / adapter / "device" / "infiniband_verbs" / f"uverbs{number}").mkdir(parents=True)
    monkeypatch.setattr(ucx, "INFINIBAND", tmp_path)
    monkeypatch.setattr(ucx, "DEVICES", devices)
    assert ucx.rdma_ports() == [] and not ucx.uses_rdma({})
    (devices / "uverbs1").touch()
    assert ucx.rdma_ports() == ["mlx5_1:1"] and ucx.uses_rdma({})


def test_a_host_maps_to_its_network_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "rdma_ports", lambda: ["mlx5_0:1"])
    entries = [SimpleNamespace(family=family, address=at) for family, at in ((socket.AF_INET, "10.0.0.7"), (socket.AF_INET6, "fd00::7"))]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": entries})
    assert ucx.devices_of("10.0.0.7") == ucx.devices_of("fd00::7") == "eth0,mlx5_0:1"
    assert ucx.devices_of("127.0.0.1") == ucx.devices_of("localhost") == ucx.devices_of("::1") == "lo"
    assert ucx.devices_of("0.0.0.0") is None
    assert ucx.devices_of("203.0.113.77") is None


def test_an_idle_transport_uses_almost_no_cpu(shared_peers: SharedPeers, make_reader: MakeReader) -> None:
    """NIXL's own progress thread would use a whole core."""
    reader, peer = make_reader("nixl"), shared_peers("nixl")
    reader.connect(peer)
    reader.read(peer, [0], [0])
    used = peer.ask("cpu")
    time.sleep(2)
    assert (peer.ask("cpu") - used) / 2 < 0.1


def test_progress_is_rare_while_nothing_happens_and_whoever_connects_wakes_it(
    start_peer: StartPeer, make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that shakes hands asks for the holder's address, so the holder makes progress while the connection is set up."""
    monkeypatch.setattr(nixl, "BUSY_S", 1e9)
    monkeypatch.setattr(nixl, "IDLE_TICK_S", 60.0)
    holder = make_reader("nixl", "holder:1").transport
    ticks: list[float] = []
    tick = holder._tick

    def counted() -> None:
        ticks.append(time.monotonic())
        tick()

    monkeypatch.setattr(holder, "_tick", counted)
    time.sleep(0.2)
    assert not ticks, "it rests"
    address = holder.address().hex()
    until(lambda: len(ticks) > 10)
    assert start_peer("nixl", "reader:7").ask("read", "holder:1", address, [0], [0]) is None


def test_ucx_over_tcp_is_refused_where_processes_cannot_read_each_other(start_peer: StartPeer, make_reader: MakeReader) -> None:
    """A container's seccomp profile may forbid process_vm_readv. UCX would then copy correctly over TCP, but see the next test."""
    served = make_reader("nixl")
    served.pool.array[:] = np.arange(64, dtype=np.uint8)[:, None]
    address, blocks = served.transport.address().hex(), list(range(64))
    assert start_peer("nixl", "free:1").ask("read", "served:1", address, blocks, blocks) is None
    assert "configure the tcp transport" in start_peer("nixl", "confined:1", forbid=True).ask("read", "served:1", address, blocks, blocks)
    in_tls = start_peer("nixl", "confined:3", forbid=True, allow_tcp=True, in_memory_only=True)
    assert "in clear" in in_tls.ask("read", "served:1", address, blocks, blocks), "not even where UCX over TCP is allowed"
    assert start_peer("nixl", "free:2", in_memory_only=True).ask("read", "served:1", address, blocks, blocks) is None
    allowed = start_peer("nixl", "confined:2", forbid=True, allow_tcp=True)
    assert allowed.ask("read", "served:1", address, blocks, blocks) is None
    assert "TCP" in allowed.ask("detail")
    allowed.fill(1)
    assert allowed.ask("read", "served:1", address, blocks, blocks[::-1]) is None
    served.pool.array[:] = served.pool.array[::-1].copy()
    assert allowed.ask("digest") == blake2b(served.pool.array.tobytes(), digest_size=16).hexdigest()


def test_what_ucx_cannot_read_by_itself_is_refused_whoever_owns_the_memory(start_peer: StartPeer) -> None:
    """Not by the time that answers take, but because UCX is told to emulate nothing. So nobody who dies can kill the holder."""
    for kind in ("nixl", "device-vram"):
        holder, reader = start_peer(kind, f"{kind}-holder:1"), start_peer(kind, f"{kind}-reader:1", tls="tcp")
        assert "which is not safe" in reader.ask("read", holder.name, holder.address.hex(), [0], [0])
        reader.kill()
        assert start_peer(kind, f"{kind}-sound:1").ask("read", holder.name, holder.address.hex(), [0], [0]) is None


@pytest.mark.skipif(bool(UCX), reason=f"environment variables override the settings: {UCX}")
def test_an_adapter_here_helps_nobody_if_the_peer_is_reached_over_tcp(
    shared_peers: SharedPeers, make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That UCX may use RDMA does not tell what it uses between two hosts."""
    monkeypatch.setattr(ucx, "rdma_ports", lambda: ["lo"])
    reader = make_reader("nixl", tls="tcp")
    with pytest.raises(BatonError, match="which is not safe"):
        reader.connect(shared_peers("nixl"))
    monkeypatch.setattr(nixl, "ONE_SIDED", {})
    with pytest.raises(BatonError, match="UCX_PROTO_EMULATION_ENABLE is on, so UCX may read over TCP"):
        make_reader("nixl", "other:1", tls="tcp").connect(shared_peers("nixl"))
    monkeypatch.setattr(nixl, "is_one_sided", lambda settings: True)  # negative control: UCX does take TCP
    make_reader("nixl", "third:1", tls="tcp").connect(shared_peers("nixl"))


def test_a_setting_that_lets_ucx_take_tcp_leaves_only_copies_in_memory(
    shared_peers: SharedPeers, start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's variable wins over ours. Without an adapter the refusal is the same as ever."""
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")
    peer = shared_peers("nixl")
    assert start_peer("nixl", "copies:1").ask("read", peer.name, peer.address.hex(), [0], [0]) is None
    assert "only over TCP" in start_peer("nixl", "sends:1", tls="tcp").ask("read", peer.name, peer.address.hex(), [0], [0])


@pytest.mark.skipif(bool(UCX), reason=f"environment variables override the settings: {UCX}")
@pytest.mark.parametrize(("kind", "lane", "told"), [("nixl", "memory", " cma/memory "), ("nixl-tcp", "tcp", " tcp/lo ")])
def test_the_lane_is_the_one_that_ucx_itself_logs(
    kind: str, lane: str, told: str, start_peer: StartPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = start_peer(kind, "holder:1")
    monkeypatch.setenv("UCX_PROTO_INFO", "y")
    monkeypatch.setenv("UCX_LOG_FILE", str(tmp_path / "ucx.log"))
    reader = start_peer(kind, "reader:1")
    assert reader.ask("read", holder.name, holder.address.hex(), [0], [0]) is None
    assert nixl.TOLD[lane] in reader.ask("detail")
    reader.ask("flush")
    tables = (tmp_path / "ucx.log").read_text().split("reader:1 ")
    reads = [table for table in tables if "-node" in table and "read by ucp_get" in table]
    assert reads and all(told in table for table in reads), tables


@pytest.mark.skipif(bool(UCX), reason=f"environment variables override the settings: {UCX}")
def test_ucx_is_told_what_the_memory_needs(make_reader: MakeReader) -> None:
    emulates_not, by_cuda_ipc = "UCX_PROTO_EMULATION_ENABLE=n", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on"
    told = {kind: make_reader(kind, f"{kind}:1").transport.backend_detail() for kind in ("nixl", "nixl-tcp", "device-vram")}
    assert {kind: (emulates_not in detail, by_cuda_ipc in detail) for kind, detail in told.items()} == {
        "nixl": (True, False),
        "nixl-tcp": (False, False),
        "device-vram": (True, True),
    }


def test_pools_in_memory_of_different_kinds_do_not_read_each_other(shared_peers: SharedPeers, make_reader: MakeReader) -> None:
    host, device = shared_peers("nixl"), make_reader("device-vram").transport._ways["nixl_vram"]
    with pytest.raises(BatonError, match=f"the pool of {host.name} is DRAM, and the one here VRAM"):
        device.connect(host.name, host.address)
    with pytest.raises(BatonError, match=r"the pool of device:1 is VRAM, and the one here DRAM"):
        make_reader("nixl").transport.connect("device:1", device.address())


@pytest.mark.parametrize("late", [1, 3, nixl.INLINE_RUN])
def test_answers_over_tcp_that_are_there_at_once_now_and_then_are_no_copy_in_memory(
    late: int, shared_peers: SharedPeers, make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that loses its core between the request and its first look finds the answer there, as after a copy."""
    reader, peer = make_reader("nixl").transport, shared_peers("nixl")
    probes = itertools.count(1)
    monkeypatch.setattr(reader, "_transfer", lambda *_: next(probes) % late != 0)
    with pytest.raises(BatonError, match="only over TCP"):
        reader.connect(peer.name, peer.address)
    monkeypatch.undo()
    reader.connect(peer.name, peer.address)


def test_over_ucx_tcp_a_dying_reader_crashes_a_slow_peer(start_peer: StartPeer) -> None:
    """The reason such links are refused: UCX aborts the sending process. If this test ever fails, UCX has been fixed: allow them."""
    for kind, dies in (("nixl-tcp", True), ("nixl", False), ("tcp", False)):
        peer, reader = start_peer(kind, "peer:1", block_kib=64), start_peer(kind, "reader:1", block_kib=64)
        blocks = list(range(64))
        assert reader.ask("read", peer.name, peer.address.hex(), [0], [0]) is None
        peer.stop()
        reader.tell("read", peer.name, peer.address.hex(), blocks, blocks)
        time.sleep(0.2)
        reader.kill()
        peer.resume()
        assert (peer.ended(5.0 if dies else 0.5) not in (None, 0)) == dies, kind


def test_an_in_memory_copy_fails_when_its_peer_dies_halfway(
    start_peer: StartPeer, make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "INLINE_BYTES", 1)  # one block at a time
    reader, peer = make_reader("nixl"), start_peer("nixl")
    reader.connect(peer)
    make, made = reader.transport._handle_of, list[object]()

    def make_and_kill(link: Any, local: Any, remote: Any) -> Any:
        made.append(local)
        if len(made) == 10:
            peer.kill()
        return make(link, local, remote)

    monkeypatch.setattr(reader.transport, "_handle_of", make_and_kill)
    with pytest.raises(BatonError) as info:
        reader.read(peer, range(64), range(64))
    assert info.value.reason is Reason.TRANSFER_FAILED and not isinstance(info.value, ReadPending)
    assert np.array_equal(reader.pool.array[:9], peer.bytes[:9]) and (reader.pool.array[10:] == 0xA5).all()
    assert reader.still(0.2)


def test_an_in_memory_copy_respects_its_deadline(
    shared_peers: SharedPeers, make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "INLINE_BYTES", 1)
    reader, peer = make_reader("nixl"), shared_peers("nixl")
    reader.connect(peer)
    make = reader.transport._handle_of

    def make_slowly(*args: Any) -> Any:
        time.sleep(0.02)
        return make(*args)

    monkeypatch.setattr(reader.transport, "_handle_of", make_slowly)
    with pytest.raises(BatonError, match="timed out") as info:
        reader.read(peer, range(64), range(64), timeout=0.3)
    assert not isinstance(info.value, ReadPending)
    assert not reader.untouched() and reader.still(0.2)


def test_a_read_with_an_unclear_error_settles_when_its_link_is_replaced(
    start_peer: StartPeer, make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, peer = make_reader("nixl-tcp", block_kib=64), start_peer("nixl-tcp", block_kib=64)
    reader.connect(peer)
    agent = reader.transport._agent

    def unclear(handle: object) -> None:
        raise RuntimeError("NIXL_ERR_UNKNOWN")

    with monkeypatch.context() as patch:
        patch.setattr(agent, "check_xfer_state", unclear)
        with pytest.raises(ReadPending) as info:
            reader.read(peer, range(64), range(64))
    time.sleep(0.1)
    assert not info.value.settled()
    with pytest.raises(BatonError, match="NIXL_ERR_UNKNOWN"):
        reader.read(peer, [0], [0])  # the link is no longer trusted
    reader.connect(peer)  # a new link replaces the old one
    assert info.value.settled()
    reader.read(peer, range(64), range(64))
    assert reader.has(peer, range(64), range(64))


def test_a_peer_can_be_connected_under_only_one_name(shared_peers: SharedPeers, make_reader: MakeReader) -> None:
    reader, peer = make_reader("nixl"), shared_peers("nixl")
    reader.connect(peer)
    with pytest.raises(BatonError):
        reader.transport.connect("alias:1", peer.address)
    with pytest.raises(BatonError):
        reader.transport.connect("self:1", reader.transport.address())
    reader.read(peer, [0], [0])
    assert reader.has(peer, [0], [0])


def test_successive_incarnations_leave_nothing_behind(start_peer: StartPeer, make_reader: MakeReader) -> None:
    """Each is read, killed and disconnected. The descriptors of a dead peer must be freed before its agent."""
    reader = make_reader("nixl")
    for i in range(4):
        peer = start_peer("nixl", f"peer:{i}", seed=i)
        reader.connect(peer)
        reader.read(peer, range(64), range(64))
        assert reader.has(peer, range(64), range(64))
        peer.kill()
        if i % 2:
            with pytest.raises(BatonError):
                reader.read(peer, [0], [0])
        reader.transport.disconnect(peer.name)
    assert not reader.transport._links and not reader.transport._dropped and not reader.transport._pending
