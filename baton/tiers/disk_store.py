"""Units in a folder of a local disk: slots in a few large files, and a log of what is in them, which is replayed at the opening.

Nothing is flushed, so after a power failure some of the newest units may be torn: their digests tell. After the death of the process
nothing is lost that `put` had returned. Only what is dropped is flushed at once, so that it stays dropped.

Whatever the disk refuses ends a *session* (the open folder, its log, its files) and raises StoreFailed; the next call opens another one.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_128_digest

from baton.engine.core.block_key import DISK
from baton.tiers.disk_files import Files, Rates, measure, prefers_direct
from baton.tiers.disk_folder import LOG, Folder
from baton.tiers.disk_log import DROP, PUT, Log
from baton.tiers.kind import UnitKind
from baton.tiers.slots import Pins, SlotEntry, Slots
from baton.tiers.store import StoreFailed, Unit, Wanted

log = logging.getLogger(__name__)
PATIENCE_S = 5.0  # the longest call of a disk that is worth asking
OPENING_S = 15.0  # the longest that a caller waits for a folder to be opened


@dataclass(eq=False)
class DiskSession:
    folder: Folder
    log: Log
    files: Files
    slots: Slots
    told: threading.Lock = field(default_factory=threading.Lock)  # the log and the slots say the same whenever it is free
    calls: int = 0
    ended: bool = False  # closed when its last call has returned: a file's number may be another file's at once

    def close(self) -> None:
        self.files.close()
        self.log.close()
        self.folder.close()  # last: who opens the folder next finds nobody in it


@dataclass(eq=False)
class DiskCall:
    session: DiskSession
    began: float


class DiskStore:
    """See `Store`."""

    medium = DISK

    def __init__(
        self,
        folder: Path,
        kind: UnitKind,
        capacity: int,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity`: units; each takes `disk_folder.padded(kind.unit_bytes)` bytes.

        Raises ValueError, which names the folder, for one that is not ours, is in use, holds units of another kind, or lies on a disk that
        is smaller. If the disk fails, the store exists nevertheless, and the next call asks it again.
        """
        if kind.unit_bytes < 1 or capacity < 1:
            raise ValueError(f"{folder}: no room for a unit of {kind.unit_bytes} bytes")
        self.path = folder
        self.unit_bytes, self.capacity = kind.unit_bytes, capacity
        self.rates: Rates | None = None  # of this disk, once it was measured
        self._kind = kind
        self._patience_s = patience_s
        self._clock = clock
        self._device: int | None = None
        self._undropped: dict[bytes, SlotEntry] = {}  # dropped, but the log does not say so yet
        self._calls: set[DiskCall] = set()
        self._lock = threading.Lock()  # over the calls and the session; never held while the disk is waited for
        self._opening = threading.Lock()
        self._closed = False
        self.pins = Pins()
        self._slots = Slots(capacity, self.pins)
        self._session: DiskSession | None = None
        try:
            self._open()
        except OSError as error:
            log.warning("%s", self._failed(error))

    def keys(self) -> list[bytes]:
        return self._slots.keys()

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return self._slots.holds(keys)

    def put(self, units: Sequence[Unit]) -> list[bytes]:
        with self._call() as call:
            session = call.session
            self._tell_drops(session)
            placed = session.slots.reserve(units)
            try:
                session.files.write([entry.slot for entry in placed.entries], [unit.data for unit in placed.units])
                self._check_time(call)
                with session.told:
                    session.log.append(PUT, placed.entries)
                    session.slots.commit(placed.entries)
            except BaseException:
                session.slots.cancel(placed.entries)
                raise
            with session.told:
                if session.log.too_long(len(session.slots)):
                    session.log.rewrite(session.slots.entries())
            return placed.lost

    def get(self, wanted: Sequence[Wanted]) -> list[bool]:
        with self._call() as call:
            slots = call.session.slots
            found = [(i, entry) for i, entry in enumerate(slots.find([one.key for one in wanted])) if entry is not None]
            try:
                there = call.session.files.read([entry.slot for _, entry in found], [wanted[i].into for i, _ in found])
            except OSError as error:
                if error.errno == errno.EIO:  # these are not asked for again
                    self._lose(slots, [entry for _, entry in found])
                raise
            whole = [good and xxh3_128_digest(wanted[i].into) == entry.digest for good, (i, entry) in zip(there, found, strict=True)]
            slots.use(entry for good, (_, entry) in zip(whole, found, strict=True) if good)
            self._lose(slots, [entry for good, (_, entry) in zip(whole, found, strict=True) if not good])
            self._tell_drops(call.session)
            self._check_time(call)
            came = {i for good, (i, _) in zip(whole, found, strict=True) if good}
            return [i in came for i in range(len(wanted))]

    def drop(self, keys: Sequence[bytes]) -> None:
        gone = self._slots.forget(keys)
        with self._lock:
            self._undropped |= {entry.key: entry for entry in gone}
        if gone:
            with suppress(StoreFailed), self._call() as call:
                self._tell_drops(call.session)

    def close(self) -> None:
        """What was used last is remembered, too."""
        if self._closed:
            return
        with suppress(StoreFailed), self._call() as call, call.session.told:
            call.session.log.rewrite(call.session.slots.entries())
        self._closed = True
        with self._lock:
            session = self._session
        if session:
            self._end(session)

    @contextmanager
    def _call(self) -> Iterator[DiskCall]:
        """Raises StoreFailed at once if the disk is known to refuse or to hang."""
        call = self._enter()
        try:
            call.session.folder.check()
            yield call
        except OSError as error:
            self._end(call.session)
            raise self._failed(error) from error
        finally:
            self._leave(call)

    def _enter(self) -> DiskCall:
        if self._closed:
            raise StoreFailed(f"{self.path}: it is closed")
        if self._session is None:
            try:
                self._open()
            except (OSError, ValueError) as error:
                raise self._failed(error) from error
        with self._lock:
            now = self._clock()
            for call in self._calls:
                if now - call.began > self._patience_s:
                    raise StoreFailed(f"{self.path}: the disk has not answered for {now - call.began:.1f} s")
            if self._session is None:
                raise StoreFailed(f"{self.path}: another call has just failed")
            call = DiskCall(self._session, now)
            call.session.calls += 1
            self._calls.add(call)
            return call

    def _leave(self, call: DiskCall) -> None:
        with self._lock:
            self._calls.discard(call)
            call.session.calls -= 1
            last = call.session.ended and call.session.calls == 0
        if last:
            call.session.close()

    def _end(self, session: DiskSession) -> None:
        """Ends it, once; it is closed by whoever leaves it last."""
        with self._lock:
            if session.ended:
                return
            session.ended = True
            if self._session is session:
                self._session = None
            idle = session.calls == 0
        if idle:
            session.close()

    def _check_time(self, call: DiskCall) -> None:
        took = self._clock() - call.began
        if took > self._patience_s:
            raise StoreFailed(f"{self.path}: the disk is slow: a call took {took:.1f} s")

    def _failed(self, error: Exception) -> StoreFailed:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return StoreFailed(said if str(self.path) in said else f"{self.path}: {said}")

    def _lose(self, slots: Slots, entries: Sequence[SlotEntry]) -> None:
        lost = [entry for entry in entries if slots.lose(entry)]
        with self._lock:
            self._undropped |= {entry.key: entry for entry in lost}
        if lost:
            log.warning("%s: %d units were damaged; they are computed again", self.path, len(lost))

    def _tell_drops(self, session: DiskSession) -> None:
        with self._lock:
            entries = list(self._undropped.values())
        if entries:
            for entry in entries:
                session.slots.lose(entry)  # an earlier session may have dropped it
            with session.told:
                session.log.append(DROP, entries, sync=True)
            with self._lock:
                for entry in entries:
                    if self._undropped.get(entry.key) == entry:
                        del self._undropped[entry.key]

    def _open(self) -> None:
        """Opens a session, in a thread: a disk that hangs must not hang the process that starts. Raises ValueError for what is refused,
        OSError for what the disk refuses."""
        if not self._opening.acquire(blocking=False):
            raise OSError(errno.EBUSY, "it is being opened")
        failed: list[OSError | ValueError] = []
        thread = threading.Thread(target=self._open_there, args=(failed,), name="disk-opening", daemon=True)
        thread.start()
        thread.join(OPENING_S)
        if thread.is_alive():
            raise OSError(errno.ETIMEDOUT, f"the disk has not answered for {OPENING_S:.0f} s")
        if failed:
            raise failed[0]

    def _open_there(self, failed: list[OSError | ValueError]) -> None:
        try:
            if self._session is not None:  # another call was first
                return
            session = self._new_session()
            with self._lock:
                self._session, self._slots, self._device = session, session.slots, session.folder.device
            if self._closed:
                self._end(session)
        except (OSError, ValueError) as error:
            failed.append(error)
        finally:
            self._opening.release()

    def _new_session(self) -> DiskSession:
        began, slots = self._clock(), Slots(self.capacity, self.pins)
        with ExitStack() as opened:
            folder = Folder(self.path, self._kind, self.capacity, self._device)
            opened.callback(folder.close)
            journal = Log(self.path / LOG)
            opened.callback(journal.close)
            self.rates = self.rates or measure(self.path, folder.shape.slot_bytes)
            files = Files(self.path, folder.shape, self.capacity, prefers_direct(self.rates))
            slots.restore(files.present(journal.replay(self.capacity)))
            for entry in list(self._undropped.values()):
                slots.lose(entry)
            if journal.damaged:
                log.warning("%s: %d records of the log were damaged; what they told of is computed again", self.path, journal.damaged)
            if journal.damaged or journal.too_long(len(slots)):
                journal.rewrite(slots.entries())
            files.trim()
            opened.pop_all()
        log.info("%s: %d units after %.2f s, %s I/O", self.path, len(slots), self._clock() - began, self.way)
        return DiskSession(folder, journal, files, slots)

    @property
    def way(self) -> str:
        """How the disk is read and written."""
        return "unknown" if self.rates is None else "direct" if prefers_direct(self.rates) else "buffered"
