"""Units in an object store that several workers share: what it holds, whom it refuses, and a network that fails."""

import json
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import pytest
from s3_server import Server, bucket, credentials, server
from store_benches import CAPACITY, KIND, SECRET, UNIT, content, get, held, key, put

from baton.tiers.object_store import HEADER, ObjectStore
from baton.tiers.sealed_store import SEAL_BYTES, SealedStore, seal_name
from baton.tiers.store import StoreFailed, Wanted

WITHIN_S = 20.0
ALL = range(40)


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/kv"


@pytest.fixture
def s3() -> Iterator[Callable[..., ObjectStore]]:
    """Makes stores on one prefix of a bucket."""
    with bucket() as (url, endpoint):
        yield partial(opened, url, options={"endpoint_url": endpoint})


def opened(url: str, capacity: int = CAPACITY, **more: Any) -> ObjectStore:
    return ObjectStore(url, KIND, capacity, **more)


def names(store: ObjectStore) -> set[str]:
    return {each.name for each in store._objects.list()}


def contents(store: ObjectStore) -> dict[str, bytes | None]:
    return {name: store._objects.read(name) for name in names(store)}


def name_of(number: int) -> str:
    return f"units/{key(number).hex()}"


# What is held, and what others do


def test_what_was_put_is_there_after_the_end(s3: Callable[..., ObjectStore]) -> None:
    store = s3()
    put(store, *range(5))
    store.close()
    again = s3()
    assert held(again, ALL) == list(range(5)) and all(get(again, *range(5)))
    assert names(again) == {HEADER, *map(name_of, range(5))}


def test_what_goes_is_deleted(s3: Callable[..., ObjectStore]) -> None:
    store = s3()
    put(store, *range(CAPACITY))
    put(store, 20, 21)
    store.drop([key(5)])
    assert names(store) == {HEADER, *map(name_of, [n for n in (*range(2, CAPACITY), 20, 21) if n != 5])}


def test_workers_share_what_each_has_put(s3: Callable[..., ObjectStore]) -> None:
    one, two = s3(), s3()
    put(one, 1, 2)
    assert get(two, 1) == [False], "nobody has told it"
    change = two.refresh()
    assert set(change.gained) == {key(1), key(2)} and change.lost == [] and get(two, 1, 2) == [True, True]
    put(two, 3)
    one.drop([key(1)])
    assert two.refresh() == ([], [key(1)]) and held(two, ALL) == [2, 3]
    assert get(one, 2) == [True] and one.refresh().gained == [key(3)]


def test_what_another_worker_has_deleted_is_absent(s3: Callable[..., ObjectStore]) -> None:
    one, two = s3(), s3()
    put(one, 1, 2)
    two.refresh()
    one.drop([key(1)])
    assert get(two, 1, 2) == [False, True] and held(two, ALL) == [2]


def test_two_workers_that_put_the_same_key_disturb_nobody(s3: Callable[..., ObjectStore]) -> None:
    one, two = s3(), s3()
    put(one, 1)
    put(two, 1)
    assert get(one, 1) == [True] and get(two, 1) == [True]


def test_more_than_there_is_room_for_is_not_taken_from_a_listing(url: str) -> None:
    put(opened(url), *range(CAPACITY))
    small = opened(url, 5)
    assert len(small.keys()) == 5
    put(small, 30, 31)
    assert len(small.keys()) == 5 and held(small, [30, 31]) == [30, 31]
    small.refresh()
    assert len(small.keys()) == 5


def test_a_listing_that_was_begun_before_a_put_does_not_undo_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(url)
    put(store, 1, 2)
    real = store._names

    def slow() -> list[str]:
        names = real()
        put(store, 3)
        store.drop([key(1)])
        return names

    monkeypatch.setattr(store, "_names", slow)
    assert store.refresh() == ([], []) or held(store, ALL) == [2, 3]
    assert held(store, ALL) == [2, 3] and get(store, 2, 3) == [True, True]


# Units that are not what their name says


def _exchanged(data: dict[int, bytes]) -> dict[int, bytes]:
    return {1: data[2], 2: data[1]}


def _cut(data: dict[int, bytes]) -> dict[int, bytes]:
    return {1: data[1][:-1], 2: b""}


def _longer(data: dict[int, bytes]) -> dict[int, bytes]:
    return {1: data[1] + b"\0", 2: data[2] + data[2]}


def _other_digest(data: dict[int, bytes]) -> dict[int, bytes]:
    return {n: data[n][:16] + bytes(16) + data[n][32:] for n in (1, 2)}


@pytest.mark.parametrize("alter", [_exchanged, _cut, _longer, _other_digest])
def test_a_foreign_or_torn_object_is_found(url: str, alter: Callable[[dict[int, bytes]], dict[int, bytes]]) -> None:
    store = opened(url)
    put(store, 1, 2, 3)
    for number, data in alter({n: store._objects.read(name_of(n)) or b"" for n in (1, 2)}).items():
        store._objects.write(name_of(number), data)
    assert get(store, 1, 2, 3) == [False, False, True] and held(store, ALL) == [3] and store.refresh().gained == []
    assert put(store, 2) == [] and get(store, 1, 2) == [False, True] and names(store) == {HEADER, name_of(2), name_of(3)}


def test_objects_that_are_nobodys_units_are_left_alone(url: str) -> None:
    store = opened(url)
    put(store, 1)
    for name in ("notes.txt", "units/short", f"units/{'x' * 32}", f"units/{'0' * 34}"):
        store._objects.write(name, b"mine")
    again = opened(url)
    assert again.keys() == [key(1)] and again.refresh() == ([], []) and len(names(again)) == 6


# Refused by name, and nothing altered


def _foreign(store: ObjectStore) -> None:
    store._objects.delete(HEADER)
    store._objects.write("thesis.tex", b"years of work")


def _header(**facts: object) -> Callable[[ObjectStore], None]:
    def change(store: ObjectStore) -> None:
        header = json.loads(store._objects.read(HEADER) or b"")
        store._objects.write(HEADER, json.dumps({**header, **facts}).encode())

    return change


def _damaged(store: ObjectStore) -> None:
    store._objects.write(HEADER, b"\xff{")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_foreign, "holds other objects than Baton's KV: 'thesis.tex'"),
        (_damaged, "damaged, or not Baton's"),
        (_header(fingerprint="00"), "another model or layout: fingerprint 00 there"),
        (_header(unit_bytes=1), "unit_bytes 1 there, 5000 here"),
        (_header(seal="0123"), "encrypted with the key 0123, and the store not encrypted"),
        (_header(format="baton-kv-objects-2"), "format 'baton-kv-objects-2'"),
    ],
)
def test_a_prefix_that_is_not_ours_is_refused_and_stays_as_it_is(url: str, change: Callable[[ObjectStore], None], said: str) -> None:
    store = opened(url)
    change(store)
    before = contents(store)
    with pytest.raises(ValueError, match=said) as refused:
        opened(url)
    assert url in str(refused.value) and contents(store) == before


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("/var/kv", {}, "is no URL"),
        ("nothing://kv", {}, "nothing"),
        ("s3:///kv", {}, "s3://BUCKET"),
        ("s3://bucket", {"endpoint": "http://x"}, "unknown option 'endpoint'"),
        ("s3://bucket", {"endpoint_url": "x"}, "x"),
    ],
)
def test_a_url_that_is_not_understood_is_refused(url: str, options: dict[str, str], said: str) -> None:
    with credentials(), pytest.raises(ValueError, match=f"(?s){url}.*{said}"):
        opened(url, options=options)


@pytest.mark.parametrize(("url", "library"), [("s3://bucket/kv", "boto3"), ("memory://kv", "fsspec")])
def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, url: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    for module in ("bucket_objects", "fsspec_objects"):
        monkeypatch.delitem(sys.modules, f"baton.tiers.{module}", raising=False)
    with pytest.raises(ValueError, match=rf"{url}: needs {library}: pip install 'baton-llm\[tiers\]'"):
        opened(url)


def test_no_message_has_a_password() -> None:
    with pytest.raises(ValueError, match=r"ftp://127\.0\.0\.1:1/kv") as refused:
        ObjectStore("ftp://me:hunter2@127.0.0.1:1/kv", KIND, 0)
    assert "hunter2" not in str(refused.value)


def test_another_key_is_refused_and_the_right_one_opens(url: str) -> None:
    kind = replace(KIND, unit_bytes=UNIT + SEAL_BYTES, seal=seal_name(SECRET))
    store = SealedStore(ObjectStore(url, kind, CAPACITY), SECRET)
    put(store, 1)
    with pytest.raises(ValueError, match="encrypted with the key"):
        ObjectStore(url, replace(kind, seal=seal_name(bytes(32))), CAPACITY)
    assert get(SealedStore(ObjectStore(url, kind, CAPACITY), SECRET), 1) == [True]
    assert all(content(1)[:16] not in (data or b"") for data in contents(opened_sealed(url)).values())


def opened_sealed(url: str) -> ObjectStore:
    return ObjectStore(url, replace(KIND, unit_bytes=UNIT + SEAL_BYTES, seal=seal_name(SECRET)), CAPACITY)


# A network that fails


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def test_a_server_that_is_down_fails_at_once_and_is_used_when_it_is_up() -> None:
    port = free_port()
    with credentials():
        store = opened("s3://bucket-kv/kv", options={"endpoint_url": f"http://127.0.0.1:{port}"})
        assert store.keys() == []
        for call in (lambda: put(store, 1), lambda: get(store, 1), store.refresh):
            with pytest.raises(StoreFailed, match=r"s3://bucket-kv/kv: EndpointConnectionError"):
                call()
        up = Server(port)
        try:
            with pytest.raises(StoreFailed, match="NoSuchBucket"):
                put(store, 1)
            boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="bucket-kv")
            assert put(store, 1) == [] and get(store, 1) == [True]
        finally:
            up.stop()
        with pytest.raises(StoreFailed, match="Connect"):
            get(store, 1)


def test_a_bucket_that_vanishes_fails_and_comes_back_empty(s3: Callable[..., ObjectStore]) -> None:
    store = s3()
    put(store, 1)
    client, name = boto3.client("s3", endpoint_url=server().address), store.place.split("/")[2]
    for each in client.list_objects_v2(Bucket=name)["Contents"]:
        client.delete_object(Bucket=name, Key=each["Key"])
    client.delete_bucket(Bucket=name)
    for call in (lambda: put(store, 2), store.refresh):
        with pytest.raises(StoreFailed, match="NoSuchBucket"):
            call()
    client.create_bucket(Bucket=name)
    assert get(store, 1) == [False] and put(store, 2) == [] and get(store, 2) == [True]
    again = s3()
    assert again.keys() == [key(2)] and HEADER in names(again), "a header that was lost is written again"


class Busy(BaseHTTPRequestHandler):
    """Answers that it has too much to do."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Silent(BaseHTTPRequestHandler):
    """Does not answer before it may."""

    may = threading.Event()

    def do_GET(self) -> None:
        self.may.wait(WITHIN_S)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[dict[str, str]]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    made.daemon_threads, made.block_on_close = True, False
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    try:
        with credentials():
            yield {"endpoint_url": f"http://127.0.0.1:{made.server_port}"}
    finally:
        made.shutdown()
        made.server_close()
        thread.join(WITHIN_S)


def test_a_server_that_has_too_much_to_do_is_not_asked_again_by_this_call() -> None:
    with serving(Busy) as options:
        store = opened("s3://bucket/kv", options=options)
        with pytest.raises(StoreFailed, match=r"s3://bucket/kv: ClientError: .*SlowDown"):
            put(store, 1)


def test_a_server_that_does_not_answer_costs_a_deadline() -> None:
    with serving(Silent) as options:
        store = opened("s3://bucket/kv", options=options, deadline_s=0.1, at_once=2)
        began = time.monotonic()
        with pytest.raises(StoreFailed, match=r"s3://bucket/kv: .*imed? ?out"):
            put(store, 1)
        assert time.monotonic() - began < WITHIN_S / 2
        Silent.may.set()


def test_whatever_a_library_raises_is_a_failure_of_the_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(url)
    put(store, 1)

    def fail(*_: object) -> bytes:
        raise ZeroDivisionError("deep inside")

    with monkeypatch.context() as patch:
        patch.setattr(store._objects, "read", fail)
        patch.setattr(store._objects, "write", fail)
        for call in (lambda: get(store, 1), lambda: put(store, 2)):
            with pytest.raises(StoreFailed, match=f"{url}: ZeroDivisionError: deep inside"):
                call()
    assert held(store, ALL) == [1] and put(store, *range(CAPACITY)) == [] and all(get(store, *range(CAPACITY))), "no room is lost"


def test_what_comes_late_is_not_written_into_anybodys_memory(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's memory is a block of a pool, which has another owner by then."""
    store = opened(url, deadline_s=0.05)
    put(store, 1)
    may, came, real = threading.Event(), threading.Event(), store._objects.read

    def late(name: str) -> bytes | None:
        assert may.wait(WITHIN_S)
        data = real(name)
        came.set()
        return data

    monkeypatch.setattr(store._objects, "read", late)
    into = bytearray(UNIT)
    with pytest.raises(StoreFailed, match="no answer"):
        store.get([Wanted(key(1), memoryview(into))])
    may.set()
    assert came.wait(WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    while store._calls._running and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not any(into)


def test_what_could_not_be_deleted_is_deleted_later_and_never_given_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(url)
    put(store, 1, 2)

    def fail(name: str) -> None:
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(store._objects, "delete", fail)
        store.drop([key(1)])
        assert get(store, 1, 2) == [False, True] and store.refresh().gained == [] and name_of(1) in names(store)
        with pytest.raises(StoreFailed, match="gone"):
            put(store, 3)
    assert put(store, 3) == [] and names(store) == {HEADER, name_of(2), name_of(3)}
