"""Moves blocks over NIXL with its UCX backend: RDMA where there is a fabric, a copy between processes on one host, TCP otherwise.

How NIXL 1.5 behaves, and what we do about it:

- Its progress thread spins on a whole core, so it stays off. Instead, a thread of ours makes progress every TICK_S: it sets up
  connections, notices when they end, and sends bytes to readers over TCP. Other readers do not depend on it. A tick takes some 90 µs, so
  while nobody connects or reads there is one every IDLE_TICK_S; who wants to connect asks for the address first, which wakes the thread.
- Between processes on one host, the copy happens inside `transfer()`. Such a read is split into pieces of INLINE_BYTES, so that it keeps
  its deadline and other threads get a turn.
- Transfers cannot be cancelled, and a released handle reports DONE while its bytes still land. If a read runs out of time, we keep its
  handle until it is really done or its connection is closed; until then its ReadPending is not settled.
- A READ over TCP is emulated: the peer's UCX sends the bytes, and aborts its whole process if the connection breaks before it has
  begun to send. A reader that dies would kill the worker that it reads from. So UCX is told to emulate nothing, and such links are
  refused, unless `allow_tcp` is set; `kvtransfer.tcp_transport` is three times as fast there.
- Memory of a device is VRAM to NIXL, with the device's index in each descriptor. UCX reads it by RDMA or CUDA IPC; anything else would be
  emulated. Two pools of different kinds do not read each other: which of the copies UCX can make depends on the machine.
- A peer's descriptors must outlive every handle made from them. So a disconnected peer is dropped only when its last read has ended.
- Unless NIXL locks everything (STRICT), arriving notifications race with progress. Our own lock around every call has the same effect;
  threads wait for it without holding the interpreter lock, and it covers our tables, too.
- Its serialised descriptors are pickles and its metadata listener binds every interface. We use neither.
"""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np

from baton.engine.core.kvcache import Region
from kvtransfer.nixl_link import Link, LinkState, NixlAddress, Read, ReadState
from kvtransfer.transport import ReadPending, Registered, Route, check_blocks, transfer_failed
from kvtransfer.ucx import ON_DEVICES, ONE_SIDED, Ucx, devices_of, is_one_sided, uses_rdma
from kvtransfer.ucx import environment as ucx_environment

log = logging.getLogger(__name__)

MODULES = ("nixl_cu13._api", "nixl._api", "nixl_cu12._api")
TICK_S = 0.002
IDLE_TICK_S = 0.1  # a connection that is set up meanwhile takes a few of them longer
BUSY_S = 2.0  # so long after a call, ticks come every TICK_S
POLL_S = 0.0001  # between polls of a read under way
CONNECT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 0.5
INLINE_BYTES = 16 << 20
PROBE_BYTES = 64  # read on connect, because the first transfer sets up the connection
PROBE_S, PROBES = 0.2, 8  # minimum time and count to rule out a copy in memory
INLINE_RUN = 6  # probes in a row that were done at once show one. One alone may be an answer over TCP, if this thread lost its core

GONE = "nixlRemoteDisconnectError"
NOT_ALONE = "; it has ended, or UCX reaches it only over TCP, which is not safe: configure the tcp transport"
ONLY_TCP = "UCX reaches it only over TCP, which is not safe; configure the tcp transport"
EMULATED = "UCX_PROTO_EMULATION_ENABLE is on, so UCX may read over TCP, which is not safe; unset it, or configure the tcp transport"
TOLD = {
    "memory": "copied in memory by the reader (same host)",
    "rdma": "RDMA",
    "tcp": "TCP, sent by the peer",
    "": "by an adapter or a device, or by TCP where that is allowed",
}


class _State(Enum):
    GOING = auto()
    DONE = auto()
    CUT = auto()  # the connection is closed: no more bytes land
    UNKNOWN = auto()  # an error that does not tell whether bytes still land


class NixlTransport:
    """`agent_name` is unique to this incarnation of the process. If `ucx` names no devices, UCX listens on the interface of the address
    `host` and, except on loopback, on RDMA devices. `allow_tcp` permits links over UCX's TCP; see above. `in_memory_only` permits no link
    that leaves this host: NIXL encrypts nothing.

    Raises ImportError if NIXL is missing, BatonError(TRANSFER_FAILED) if UCX does not start with these settings or cannot register the
    memory.
    """

    name = "nixl"

    def __init__(
        self,
        agent_name: str,
        pool: Registered,
        host: str,
        *,
        ucx: Ucx | None = None,
        allow_tcp: bool = False,
        in_memory_only: bool = False,
    ) -> None:
        self._region = region = pool.region
        self._block_bytes = pool.layout.block_bytes
        self._name = agent_name
        self._lock = threading.Lock()  # held around every call into NIXL; also guards all tables below
        self._links: dict[str, Link] = {}
        self._dropped: list[Link] = []  # disconnected, but still in use
        self._pending: list[Read] = []  # given up, not settled
        ucx = ucx or Ucx()
        devices = ucx.net_devices or devices_of(host)
        settings = {"UCX_TLS": ucx.tls, "UCX_NET_DEVICES": devices, "UCX_TCP_PORT_RANGE": ucx.port_range}
        ours = ({} if allow_tcp else ONE_SIDED) | (ON_DEVICES if region.kind == "VRAM" else {})
        with ucx_environment(settings | ours) as self._settings:
            self._agent = _start_agent(agent_name, self._settings)
        self._allow_tcp = allow_tcp
        self._in_memory_only = in_memory_only
        self._rdma = uses_rdma(self._settings)
        # Whether what is no copy in memory is still read without the peer's help. From a pool on the host only an adapter does that.
        self._reads_alone = is_one_sided(self._settings) and (self._rdma or region.kind == "VRAM")
        self._probe = np.zeros(0 if region.spare else PROBE_BYTES, dtype=np.uint8)
        self._register()
        self._blocks = self._descriptors("NIXL_INIT_AGENT", region)
        self._address = NixlAddress(region, self._block_bytes, self._agent.get_agent_metadata()).pack()
        self._stop = threading.Event()
        self._stirred = threading.Event()
        self._busy_until = 0.0
        self._thread = threading.Thread(target=self._progress, name="kv-nixl-progress", daemon=True)
        self._thread.start()

    def address(self) -> bytes:
        self._stir()
        return self._address

    def backend_detail(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in sorted(self._settings.items()))
        with self._lock:
            links = [f"{link.peer}: {self._describe(link)}" for link in self._links.values()]
        return "; ".join([f"UCX with {settings}", *links])

    def connect(self, peer: str, address: bytes) -> None:
        self._stir()
        target = NixlAddress.parse(address)
        if target.block_bytes != self._block_bytes:
            raise transfer_failed(f"blocks have {target.block_bytes} bytes at {peer}, {self._block_bytes} here")
        if target.region.kind != self._region.kind:
            raise transfer_failed(f"the pool of {peer} is {target.region.kind}, and the one here {self._region.kind}")
        with self._lock:
            self._require_open()
            link = self._links.get(peer)
            if link is None or not link.usable or link.address != target:
                self._forget(peer, "connected anew")
                link = self._links[peer] = Link(peer, target)
        with link.opening:  # a second caller waits for the result of the first
            if link.state is LinkState.OPENING:
                self._open(link)
        if not link.usable:
            hint = NOT_ALONE if GONE in link.why and is_one_sided(self._settings) else ""
            raise transfer_failed(f"cannot connect to {peer}: {link.why}{hint}")

    def read(self, peer: str, remote: Sequence[int], local: Sequence[int], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._stir()
        with self._lock:
            link = self._links.get(peer)
            if link is None or link.state is LinkState.OPENING:
                raise transfer_failed(f"not connected to {peer}")
            check_blocks(remote, link.address.region.blocks, local, self._region.blocks)
            copied = link.state is LinkState.COPIED
            link.calls += 1
        try:
            step = max(1, INLINE_BYTES // link.address.block_bytes if copied else len(remote))
            for i in range(0, len(remote), step):
                self._transfer(link, deadline, partial(self._handle_of, link, local[i : i + step], remote[i : i + step]))
        finally:
            with self._lock:
                self._leave(link)

    def route(self, peer: str) -> Route:
        with self._lock:
            link = self._links.get(peer)
            lane = self._lane(link) if link else ""
        return Route("nixl", lane=lane) if self._region.kind == "DRAM" else Route("nixl_vram", through_host=False, lane=lane)

    def disconnect(self, peer: str) -> None:
        with self._lock:
            self._forget(peer, "disconnected")

    def close(self) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()  # from here on nothing new begins
            self._stirred.set()
            for peer in list(self._links):
                self._forget(peer, "the transport is closed")
        self._thread.join()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._dropped and time.monotonic() < deadline:
            time.sleep(TICK_S)  # reads under way see that their link is broken and leave
            self._tick()
        with self._lock:
            self._destroy()

    def _stir(self) -> None:
        self._busy_until = time.monotonic() + BUSY_S
        self._stirred.set()

    def _progress(self) -> None:
        while not self._stop.is_set():
            if self._allow_tcp or self._pending or self._dropped or time.monotonic() < self._busy_until:
                self._stop.wait(TICK_S)
            else:
                self._stirred.clear()
                if not self._stop.is_set() and time.monotonic() >= self._busy_until:  # else this has cleared what should wake it
                    self._stirred.wait(IDLE_TICK_S)
            try:
                self._tick()
            except Exception:
                log.exception("NIXL makes no progress")
                self._stop.wait(1.0)

    def _tick(self) -> None:
        with self._lock:
            self._agent.get_new_notifs()  # without a progress thread, this call drives UCX
            self._sweep()

    def _open(self, link: Link) -> None:
        """Leaves the link open, or broken and forgotten."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        with self._lock:
            link.calls += 1
        try:
            self._await_predecessor(link, deadline)
            with self._lock:
                self._add_agent(link)
            enough, probes, run = time.monotonic() + PROBE_S, 0, 0
            while run < INLINE_RUN and (run or probes < PROBES or time.monotonic() < enough):
                run = run + 1 if self._transfer(link, deadline, partial(self._probe_of, link)) else 0
                probes += 1
            copied = run == INLINE_RUN
            if self._in_memory_only and not copied:
                raise transfer_failed("NIXL would send KV over the network in clear, and this cluster has TLS; use the tcp transport")
            if not (copied or self._allow_tcp or self._reads_alone):
                raise transfer_failed(EMULATED if self._rdma else ONLY_TCP)
            with self._lock:
                if not link.usable:
                    raise transfer_failed(link.why)
                link.open(copied, self._descriptors(link.agent, link.address.region))
        except Exception as error:  # the bindings' exceptions share no base class
            with self._lock:
                link.break_(f"{type(error).__name__}: {error}")
        with self._lock:
            if not link.usable and self._links.get(link.peer) is link:
                self._forget(link.peer, link.why)
            self._leave(link)

    def _await_predecessor(self, link: Link, deadline: float) -> None:
        """NIXL accepts an agent only once. An earlier link to it, which pending reads still hold, must be dropped first."""
        while True:
            with self._lock:
                if not link.usable or all(other.address != link.address for other in self._dropped):
                    return
            if time.monotonic() >= deadline:
                raise TimeoutError("reads from before the disconnect are still pending")
            time.sleep(TICK_S)

    def _transfer(self, link: Link, deadline: float, make: Callable[[], Any]) -> bool:
        """Posts the transfer that `make` returns and waits for its end. Returns whether it was done immediately. Raises like `read`."""
        with self._lock:
            if not link.usable or time.monotonic() >= deadline:
                raise transfer_failed(f"reading from {link.peer}: {link.why or 'timed out'}")
            read = self._make(link, make)
            if self._ended(read, self._agent.transfer):
                return True
        while True:
            time.sleep(POLL_S)
            with self._lock:
                if self._agent is None:
                    _release(read)
                    raise transfer_failed(f"reading from {link.peer}: the transport is closed")
                if self._ended(read, self._agent.check_xfer_state):
                    return False
                if not link.usable or time.monotonic() >= deadline:
                    raise self._give_up(read, "give up")

    # Callers of the methods below hold the lock.

    def _describe(self, link: Link) -> str:
        if not link.usable:
            return f"broken ({link.why})"
        return TOLD[self._lane(link)]

    def _lane(self, link: Link) -> str:
        """See `Route.lane`. NIXL does not say which lane UCX has taken. It follows from what UCX must not take: a read that nobody
        emulates, and that is no copy, is done by an adapter or, in memory of a device, perhaps by the device."""
        if link.state is not LinkState.SENT:
            return "memory" if link.state is LinkState.COPIED else ""
        if self._reads_alone:
            return "" if self._region.kind == "VRAM" else "rdma"
        return "" if self._rdma else "tcp"

    def _require_open(self) -> None:
        if self._stop.is_set():
            raise transfer_failed("the transport is closed")

    def _add_agent(self, link: Link) -> None:
        name = self._agent.add_remote_agent(link.address.metadata)
        name = name.decode() if isinstance(name, bytes) else name
        if name == self._name or any(name == other.agent for other in [*self._links.values(), *self._dropped]):
            raise transfer_failed(f"agent {name} is connected under another name, or is this process")
        link.agent = name

    def _register(self) -> None:
        region, nbytes = self._region, self._region.blocks * self._block_bytes
        try:
            self._memory = [self._agent.register_memory([(region.address, nbytes, region.device, "")], region.kind)]
            if len(self._probe):
                self._memory.append(self._agent.register_memory([(self._probe.ctypes.data, PROBE_BYTES, 0, "")], "DRAM"))
        except Exception as error:
            raise transfer_failed(f"NIXL cannot register the pool as {region.kind}: {type(error).__name__}: {error}") from error

    def _descriptors(self, agent: str, region: Region) -> Any:
        size = self._block_bytes
        compressed = np.array([[region.address, size, region.device, size, region.blocks]], dtype=np.uint64)  # the fourth: the stride
        return self._agent.prep_xfer_dlist(agent, compressed, region.kind)

    def _handle_of(self, link: Link, local: Sequence[int], remote: Sequence[int]) -> Any:
        here, there = np.asarray(local, dtype=np.int32), np.asarray(remote, dtype=np.int32)
        return self._agent.make_prepped_xfer("READ", self._blocks, here, link.blocks, there)

    def _probe_of(self, link: Link) -> Any:
        size, here, there = min(PROBE_BYTES, self._block_bytes), self._region, link.address.region
        at, device = (here.spare, here.device) if here.spare else (self._probe.ctypes.data, 0)
        local = self._agent.get_xfer_descs([(at, size, device)], here.kind)
        remote = self._agent.get_xfer_descs([(there.address, size, there.device)], there.kind)
        return self._agent.initialize_xfer("READ", local, remote, link.agent)

    def _make(self, link: Link, make: Callable[[], Any]) -> Read:
        try:
            return Read(link, make())
        except Exception as error:  # nothing was posted; NIXL itself forgets a peer that it sees disconnect
            link.break_(f"{type(error).__name__}: {error}")
            raise transfer_failed(f"reading from {link.peer}: {link.why}") from error

    def _ended(self, read: Read, ask: Callable[[Any], str]) -> bool:
        """Returns whether the read is done. Raises like `read` if it is neither done nor under way."""
        state = self._state(read, ask)
        if state is _State.UNKNOWN:
            raise self._give_up(read, "lose sight")
        if state is not _State.GOING:
            _release(read)
        if state is _State.CUT:
            raise transfer_failed(f"reading from {read.link.peer}: {read.link.why}")
        return state is _State.DONE

    def _state(self, read: Read, ask: Callable[[Any], str]) -> _State:
        try:
            answer = ask(read.handle)
        except Exception as error:
            name = type(error).__name__
            read.link.break_(f"{name}: {error}")
            return _State.CUT if name == GONE else _State.UNKNOWN
        match answer:
            case "PROC":
                return _State.GOING
            case "DONE":
                return _State.DONE
        read.link.break_(f"transfer state {answer}")
        return _State.UNKNOWN

    def _give_up(self, read: Read, event: str) -> ReadPending:
        read.move(event)
        self._pending.append(read)
        why = f"reading from {read.link.peer}: {read.link.why or 'timed out'}; bytes may still land"
        return ReadPending(why, lambda: read.state is ReadState.SETTLED)

    def _forget(self, peer: str, why: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.drop(why)
            self._dropped.append(link)
            self._sweep()

    def _leave(self, link: Link) -> None:
        link.calls -= 1
        self._sweep()

    def _in_use(self, link: Link) -> bool:
        """Whether something of the link must not be freed. A blind read waits for just that."""
        return link.calls > 0 or any(read.link is link and read.state is ReadState.PENDING for read in self._pending)

    def _sweep(self) -> None:
        """Cleans up: first pending reads that are done, then disconnected peers that nothing reads from."""
        for read in [read for read in self._pending if read.state is ReadState.PENDING]:
            state = self._state(read, self._agent.check_xfer_state)
            if state is _State.UNKNOWN:
                read.move("lose sight")
            elif state is not _State.GOING:
                self._settle(read)
        for link in [link for link in self._dropped if not self._in_use(link)]:
            self._free(link)

    def _settle(self, read: Read) -> None:
        self._pending.remove(read)
        _release(read)
        read.move("settle")

    def _free(self, link: Link) -> None:
        """Frees what NIXL holds for the link: handles before descriptors, descriptors before the agent they point into."""
        self._dropped.remove(link)
        reads = [read for read in self._pending if read.link is link]
        for read in reads:
            _release(read)
        if link.blocks is not None:
            with suppress(Exception):
                link.blocks.release()
        link.free()
        if link.agent:
            with suppress(Exception):  # NIXL may have removed it already
                self._agent.remove_remote_agent(link.agent)
        for read in reads:
            self._settle(read)

    def _destroy(self) -> None:
        """Destroys the agent and with it every connection. No byte can land after this, not even of reads that are still pending."""
        for read in self._pending:
            _release(read)
        for link in self._dropped:
            link.blocks = None
        with suppress(Exception):
            self._blocks.release()
            for memory in self._memory:
                self._agent.deregister_memory(memory)
        self._agent = self._blocks = None
        self._memory.clear()
        for read in list(self._pending):
            self._settle(read)


def _start_agent(name: str, settings: Mapping[str, str]) -> Any:
    api = _load_api()
    config = api.nixl_agent_config(backends=[], enable_prog_thread=False, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    try:
        agent = api.nixl_agent(name, config)
        agent.create_backend("UCX", {})
    except Exception as error:
        raise transfer_failed(f"NIXL does not start with {dict(settings)}: {error}") from error
    return agent


def _load_api() -> Any:
    for module in MODULES:
        with suppress(ModuleNotFoundError):
            api = importlib.import_module(module)
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints a greeting on stdout
            return api
    raise ImportError("the nixl transport needs the package nixl-cu13 (pip install nixl-cu13)")


def _release(read: Read) -> None:
    handle, read.handle = read.handle, None
    if handle is not None:
        with suppress(Exception):  # NIXL keeps a handle that it cannot release yet until the agent ends
            handle.release()
