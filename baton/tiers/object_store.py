"""Units in an object store, which several workers may share: one object a unit, found by its name.

    PREFIX/baton-kv.json       what the units are: format, fingerprint of model and layout, key of encryption, size
    PREFIX/units/KEY           block key, 16 bytes | digest, 16 | the unit. KEY: the block key in hexadecimal digits

What is held is known from a listing, and from what this store has put since; `refresh` lists again. Each worker keeps the room for itself:
it deletes what it knows of and has not used for longest.
"""

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from xxhash import xxh3_128_digest

from baton.engine.core.block_key import KEY_BYTES, REMOTE
from baton.engine.core.kvcache import DIGEST_BYTES
from baton.tiers.calls import Calls
from baton.tiers.kind import UnitKind
from baton.tiers.objects import Objects
from baton.tiers.store import StoreFailed, Unit, Wanted

log = logging.getLogger(__name__)
FORMAT = "baton-kv-objects-1"
HEADER, UNITS = "baton-kv.json", "units/"
HEAD_BYTES = KEY_BYTES + DIGEST_BYTES
AT_ONCE = 8
DEADLINE_S = 5.0  # of one object
LIST_S = 30.0  # of a whole listing
T = TypeVar("T")


class Change(NamedTuple):
    gained: list[bytes]
    lost: list[bytes]


class ObjectStore:
    """See `Store`."""

    medium = REMOTE
    pins = None

    def __init__(
        self,
        url: str,
        kind: UnitKind,
        capacity: int,
        options: Mapping[str, str] | None = None,
        at_once: int = AT_ONCE,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`options`: of S3 `endpoint_url` and `region_name`, of other URLs what their file system in fsspec takes.

        Raises ValueError, which names the URL, for one that is not understood, whose library is not installed, or under which lie other
        objects than ours or units of another kind. If the store does not answer, this exists nevertheless, and the next call asks again.
        """
        self.place = _without_password(url)
        if kind.unit_bytes < 1 or capacity < 1:
            raise ValueError(f"{self.place}: no room for a unit of {kind.unit_bytes} bytes")
        self.unit_bytes, self.capacity = kind.unit_bytes, capacity
        self._kind = kind
        self._calls = Calls(at_once, deadline_s, clock)
        try:
            self._objects = connect(url, options or {}, at_once, deadline_s)
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}") from None
        self._held: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first
        self._undeleted: dict[bytes, None] = {}  # no longer held, and perhaps still there
        self._lock = threading.Lock()  # over the two above; never held while the store is waited for
        self._altering = threading.Lock()
        self._opening = threading.Lock()
        self._opened = self._closed = False
        try:
            self._open()
        except StoreFailed as error:
            log.warning("%s", error)

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self._held)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._held for key in keys]

    def put(self, units: Sequence[Unit]) -> list[bytes]:
        self._ready()
        with self._alone():
            with self._lock:
                news = list({unit.key: unit for unit in reversed(units) if unit.key not in self._held}.values())[::-1]
                over, kept = [unit.key for unit in news[: -self.capacity]], news[-self.capacity :]
                gone = list(self._held)[: max(0, len(self._held) + len(kept) - self.capacity)]
            self._delete(gone)
            self._ask([partial(self._objects.write, _name(unit.key), b"".join(unit)) for unit in kept])
            with self._lock:
                self._held.update((unit.key, None) for unit in kept)
        return [*gone, *over]

    def get(self, wanted: Sequence[Wanted]) -> list[bool]:
        self._ready()
        places = [i for i, held in enumerate(self.holds([one.key for one in wanted])) if held]
        found = self._ask([partial(self._objects.read, _name(wanted[i].key)) for i in places])
        good = [False] * len(wanted)
        for i, data in zip(places, found, strict=True):
            good[i] = data is not None and self._copied(wanted[i], data)
        bad = [wanted[i].key for i, data in zip(places, found, strict=True) if not good[i] and data is not None]
        with self._lock:
            for i in places:
                if good[i] and wanted[i].key in self._held:
                    self._held.move_to_end(wanted[i].key)
                elif not good[i]:
                    self._held.pop(wanted[i].key, None)
            self._undeleted.update(dict.fromkeys(bad))
        if bad:
            log.warning("%s: %d units were damaged; they are computed again", self.place, len(bad))
        return good

    def drop(self, keys: Sequence[bytes]) -> None:
        try:
            with self._alone():
                self._delete([key for key, held in zip(keys, self.holds(keys), strict=True) if held])
        except StoreFailed as error:
            with self._lock:
                dropped = {key: None for key in keys if key in self._held}
                self._undeleted.update(dropped)
                self._held = OrderedDict((key, None) for key in self._held if key not in dropped)
            log.warning("%s", error)

    def refresh(self) -> Change:
        """Learns what other workers have put and deleted. Raises StoreFailed."""
        self._ready()
        before = set(self.keys())
        listed = self._listed(self._names())
        with self._lock:
            lost = [key for key in before - set(listed) if key in self._held]
            for key in lost:
                del self._held[key]
            gained = [key for key in listed if key not in before and key not in self._held and key not in self._undeleted]
            gained = gained[max(0, len(self._held) + len(gained) - self.capacity) :]
            for key in reversed(gained):
                self._held[key] = None
                self._held.move_to_end(key, last=False)
        return Change(gained, lost)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self._held.clear()

    def _ready(self) -> None:
        if self._closed:
            raise StoreFailed(f"{self.place}: it is closed")
        if self._opened:
            return
        if not self._opening.acquire(blocking=False):
            raise StoreFailed(f"{self.place}: it is being opened")
        try:
            self._open()
        except ValueError as error:
            raise StoreFailed(str(error)) from None
        finally:
            self._opening.release()

    def _open(self) -> None:
        """Raises ValueError for what is refused, StoreFailed if there is no answer."""
        began = time.monotonic()
        names = self._names()
        if HEADER not in names:
            foreign = next((name for name in names if _key(name) is None), None)
            if foreign is not None:
                raise ValueError(f"{self.place} holds other objects than Baton's KV: {foreign!r}; name an empty or a new prefix")
            self._ask([partial(self._objects.write, HEADER, json.dumps({"format": FORMAT, **self._kind.facts}).encode())])
        self._check_header(self._ask([partial(self._objects.read, HEADER)])[0])
        with self._lock:
            self._held = OrderedDict.fromkeys(self._listed(names)[-self.capacity :])
            self._opened = True
        log.info("%s: %d units after %.2f s", self.place, len(self._held), time.monotonic() - began)

    def _check_header(self, data: bytes | None) -> None:
        try:
            found = dict(json.loads(data or b""))
        except (ValueError, TypeError):
            raise ValueError(f"{self.place}/{HEADER} is damaged, or not Baton's: name another prefix") from None
        if found.get("format") != FORMAT:
            raise ValueError(f"{self.place}/{HEADER}: format {found.get('format')!r}, this version reads {FORMAT!r}")
        self._kind.check(found, self.place)

    def _names(self) -> list[str]:
        """The names in the order of their writing."""
        found = self._ask([lambda: list(self._objects.list())], LIST_S)[0]
        return [each.name for each in sorted(found, key=lambda each: each.written)]

    def _listed(self, names: Sequence[str]) -> list[bytes]:
        return [key for name in names if (key := _key(name)) is not None]

    def _copied(self, wanted: Wanted, data: bytes) -> bool:
        view = memoryview(data)
        if len(view) != HEAD_BYTES + self.unit_bytes or view[:KEY_BYTES] != wanted.key:
            return False
        wanted.into[:] = view[HEAD_BYTES:]
        return xxh3_128_digest(wanted.into) == view[KEY_BYTES:HEAD_BYTES]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time alters objects: what is deleted and written again would else be deleted last."""
        if not self._altering.acquire(timeout=self._calls.deadline_s):
            raise StoreFailed(f"{self.place}: another call has not ended for {self._calls.deadline_s} s")
        try:
            yield
        finally:
            self._altering.release()

    def _delete(self, keys: Sequence[bytes]) -> None:
        """These, and what could not be deleted before."""
        with self._lock:
            for key in keys:
                self._held.pop(key, None)
            self._undeleted.update(dict.fromkeys(keys))
            now = list(self._undeleted)
        self._ask([partial(self._objects.delete, _name(key)) for key in now])
        with self._lock:
            for key in now:
                self._undeleted.pop(key, None)

    def _ask(self, calls: Sequence[Callable[[], T]], deadline_s: float = 0.0) -> list[T]:
        try:
            return self._calls.all(calls, deadline_s)
        except Exception as error:  # whatever its library raises
            raise StoreFailed(f"{self.place}: {type(error).__name__}: {error}") from error


def connect(url: str, options: Mapping[str, str], at_once: int, deadline_s: float) -> Objects:
    """Raises ValueError."""
    try:
        if urlsplit(url).scheme == "s3":
            from baton.tiers.bucket_objects import BucketObjects

            return BucketObjects(url, options, at_once, deadline_s)
        from baton.tiers.fsspec_objects import FsspecObjects
    except ModuleNotFoundError as error:
        raise ValueError(f"needs {error.name}: pip install 'baton-llm[tiers]'") from None
    if not urlsplit(url).scheme:
        raise ValueError("is no URL; a folder on a local disk is a tier of its own")
    return FsspecObjects(url, options)


def _without_password(url: str) -> str:
    return re.sub("//[^/]*@", "//", url).rstrip("/")


def _name(key: bytes) -> str:
    return f"{UNITS}{key.hex()}"


def _key(name: str) -> bytes | None:
    digits = name.removeprefix(UNITS)
    if not name.startswith(UNITS) or len(digits) != 2 * KEY_BYTES:
        return None
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return None
