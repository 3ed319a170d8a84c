"""What is particular to the NIXL transport: how UCX is set up, what is polled, what cannot be cancelled."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from baton.cluster.errors import BatonError, Reason
from kvtransfer.transport import ReadPending

if sys.platform != "linux":
    pytest.skip("NIXL has wheels for Linux only", allow_module_level=True)

import kvtransfer.nixl_transport as nixl

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
        return probe.getsockname()[0]


@pytest.mark.skipif(bool(UCX), reason=f"the environment decides: {UCX}")
def test_it_listens_on_loopback_only(shared_peers):
    assert listening(shared_peers("nixl").pid) == {"127.0.0.1"}


@pytest.mark.skipif(bool(UCX) or own_address() in (None, "127.0.0.1"), reason="no other interface")
def test_it_listens_on_the_interface_of_its_host_only(start_peer, make_reader):
    peer, reader = start_peer("nixl", host=own_address()), make_reader("nixl", host=own_address())
    assert listening(peer.pid) == {own_address()}
    reader.connect(peer)
    reader.read(peer, [3], [4])
    assert reader.has(peer, [3], [4])
    # What it is kept from: left alone, UCX takes every interface.
    assert len(listening(start_peer("nixl", "other:1", net_devices="all").pid)) > 1


def test_settings_of_the_environment_win_and_are_left_alone(make_reader, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.delenv("UCX_TLS", raising=False)
    before = dict(os.environ)
    reader = make_reader("nixl", net_devices="no-such-device", tls="^posix,sysv,mm")
    assert os.environ == before
    detail = reader.transport.backend_detail()
    assert "UCX_NET_DEVICES=lo" in detail and "UCX_TLS=^posix,sysv,mm" in detail


def test_settings_that_leave_no_transport_are_refused(make_reader, monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    with pytest.raises(BatonError) as info:
        make_reader("nixl", tls="cma")  # cannot set up a connection by itself
    assert info.value.reason is Reason.TRANSFER_FAILED and "cma" in info.value.message


def test_rdma_is_what_ucx_may_use_of_it(monkeypatch):
    monkeypatch.setattr(nixl, "_rdma_ports", lambda: ["mlx5_0:1", "mlx5_1:1"])
    for devices, used in (("lo", False), ("eth0", False), ("eth0,mlx5_1:1", True), ("all", True)):
        assert nixl._uses_rdma({"UCX_NET_DEVICES": devices}) == used
    assert nixl._uses_rdma({})
    monkeypatch.setattr(nixl, "_rdma_ports", list)
    assert not nixl._uses_rdma({})


def test_devices_of_a_host():
    assert nixl._devices_of("127.0.0.1") == nixl._devices_of("localhost") == nixl._devices_of("::1") == "lo"
    assert nixl._devices_of("0.0.0.0") is None
    assert nixl._devices_of("203.0.113.77") is None


def test_an_idle_transport_costs_next_to_nothing(shared_peers, make_reader):
    """NIXL's own progress thread would take a whole core; ours, which wakes every TICK_S, up to 3 % of one."""
    reader, peer = make_reader("nixl"), shared_peers("nixl")
    reader.connect(peer)
    reader.read(peer, [0], [0])
    used = peer.ask("cpu")
    time.sleep(2)
    assert (peer.ask("cpu") - used) / 2 < 0.1


def test_where_no_process_may_read_another_ucx_takes_tcp_and_we_refuse_it(start_peer, make_reader):
    """A container's seccomp profile may forbid process_vm_readv. The bytes would be right over TCP too, but see the next test."""
    served = make_reader("nixl")
    served.pool.array[:] = np.arange(64, dtype=np.uint8)[:, None]
    address, blocks = served.transport.address().hex(), list(range(64))
    assert start_peer("nixl", "free:1").ask("read", "served:1", address, blocks, blocks) is None
    assert "configure the tcp transport" in start_peer("nixl", "confined:1", forbid=True).ask("read", "served:1", address, blocks, blocks)
    allowed = start_peer("nixl", "confined:2", forbid=True, allow_tcp=True)
    assert allowed.ask("read", "served:1", address, blocks, blocks) is None
    assert "TCP" in allowed.ask("detail")
    allowed.fill(1)
    assert allowed.ask("read", "served:1", address, blocks, blocks[::-1]) is None
    served.pool.array[:] = served.pool.array[::-1].copy()
    assert allowed.ask("digest") == nixl.blake2b(served.pool.array.tobytes(), digest_size=16).hexdigest()


def test_over_ucx_tcp_a_reader_that_dies_takes_a_slow_peer_with_it(start_peer):
    """Why such links are refused: UCX aborts the process that was to send. If this fails one day, UCX has learnt better: allow them."""
    for kind, dies in (("nixl-tcp", True), ("nixl", False), ("tcp", False)):
        peer, reader = start_peer(kind, "peer:1", block_kib=64), start_peer(kind, "reader:1", block_kib=64)
        blocks = list(range(64))
        assert reader.ask("read", peer.name, peer.address.hex(), [0], [0]) is None
        peer.stop()
        reader.tell("read", peer.name, peer.address.hex(), blocks, blocks)
        time.sleep(0.2)
        reader.kill()
        peer.resume()
        try:
            assert (peer.process.wait(timeout=5 if dies else 0.5) != 0) == dies, kind
        except subprocess.TimeoutExpired:
            assert not dies, kind


def test_a_copy_in_memory_that_loses_its_peer_halfway_fails(start_peer, make_reader, monkeypatch):
    monkeypatch.setattr(nixl, "INLINE_BYTES", 1)  # a block at a time
    reader, peer = make_reader("nixl"), start_peer("nixl")
    reader.connect(peer)
    make, made = reader.transport._handle_of, []

    def make_and_kill(link, local, remote):
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


def test_a_copy_in_memory_keeps_its_deadline(shared_peers, make_reader, monkeypatch):
    monkeypatch.setattr(nixl, "INLINE_BYTES", 1)
    reader, peer = make_reader("nixl"), shared_peers("nixl")
    reader.connect(peer)
    make = reader.transport._handle_of
    monkeypatch.setattr(reader.transport, "_handle_of", lambda *args: (time.sleep(0.02), make(*args))[1])
    with pytest.raises(BatonError, match="timed out") as info:
        reader.read(peer, range(64), range(64), timeout=0.3)
    assert not isinstance(info.value, ReadPending)
    assert not reader.untouched() and reader.still(0.2)


def test_an_error_that_says_nothing_of_the_connection_settles_with_it(start_peer, make_reader, monkeypatch):
    reader, peer = make_reader("nixl-tcp", block_kib=64), start_peer("nixl-tcp", block_kib=64)
    reader.connect(peer)
    agent = reader.transport._agent

    def unclear(handle):
        raise RuntimeError("NIXL_ERR_UNKNOWN")

    with monkeypatch.context() as patch:
        patch.setattr(agent, "check_xfer_state", unclear)
        with pytest.raises(ReadPending) as info:
            reader.read(peer, range(64), range(64))
    time.sleep(0.1)
    assert not info.value.settled()
    with pytest.raises(BatonError):
        reader.read(peer, [0], [0])  # the link is not trusted any more
    reader.connect(peer)  # anew: the old one goes
    assert info.value.settled()
    reader.read(peer, range(64), range(64))
    assert reader.has(peer, range(64), range(64))


def test_a_peer_is_connected_under_one_name_only(shared_peers, make_reader):
    reader, peer = make_reader("nixl"), shared_peers("nixl")
    reader.connect(peer)
    with pytest.raises(BatonError):
        reader.transport.connect("alias:1", peer.address)
    with pytest.raises(BatonError):
        reader.transport.connect("self:1", reader.transport.address())
    reader.read(peer, [0], [0])
    assert reader.has(peer, [0], [0])


def test_many_incarnations_come_and_go(start_peer, make_reader):
    """Each is read, killed and forgotten; descriptors of the dead are freed before their agents."""
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
