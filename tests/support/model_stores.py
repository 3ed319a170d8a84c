"""A server that speaks as much of a Hugging Face hub and of S3 as a fetch needs, with the faults of real ones, and a proxy. It counts what
it sends. Standard library only, so that it also runs as a file in a pod: `python model_stores.py FOLDER PORT`."""

import base64
import hashlib
import json
import select
import socket
import ssl
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

REPO, BUCKET = "own/tale", "models"
LFS_BYTES = 100_000  # a hub keeps larger files by their SHA-256
PIECE = 1 << 16


@dataclass
class Contents:
    """What a server holds, and how it behaves."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    prefix: str = "tale/"  # of the keys in the bucket
    token: str = ""  # without it: 401
    checks: tuple[str, ...] = ("ChecksumSHA256",)  # that S3 tells; "etag": the ETag is the MD5
    page: int = 1000  # keys of one listing
    cuts: list[int] = field(default_factory=list)  # the next answers end after so many bytes
    stalls: list[int] = field(default_factory=list)  # the next answers stop after so many bytes, and the connection stays
    wrong: set[str] = field(default_factory=set)  # files with an altered byte
    junk: bytes = b""  # every answer
    failures: list[int] = field(default_factory=list)  # the status of the next answers
    ranges: bool = True
    cdn: str = ""  # address that large files are redirected to
    sent: Counter[str] = field(default_factory=Counter)  # bytes by file
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # path, headers
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def tag(self, name: str) -> str:
        data = self.files[name]
        return hashlib.sha256(data).hexdigest() if len(data) > LFS_BYTES else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    contents: Contents

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        self.contents.requests.append((path, {name.lower(): value for name, value in self.headers.items()}))
        if self.contents.junk:
            self._answer(200, self.contents.junk)
        elif self.contents.failures:
            self._answer(self.contents.failures.pop(0))
        elif path.startswith(f"/api/models/{REPO}"):
            self._info(path)
        elif path.startswith(f"/{REPO}/resolve/"):
            self._resolve(*path.removeprefix(f"/{REPO}/resolve/").split("/", 1))
        elif path.startswith("/cdn/"):
            self._file(path.removeprefix("/cdn/"), {})
        elif path.rstrip("/") == f"/{BUCKET}":
            self._objects(query)
        elif path.startswith(f"/{BUCKET}/"):
            self._object(path.removeprefix(f"/{BUCKET}/"))
        else:
            self._answer(404)

    do_HEAD = do_GET

    def _info(self, path: str) -> None:
        here = self.contents
        if here.token and self.headers.get("Authorization") != f"Bearer {here.token}":
            return self._answer(401)
        revision = path.rpartition("/revision/")[2]
        if revision not in ("main", here.commit):
            return self._answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings: list[dict[str, Any]] = []
        for name, data in here.files.items():
            told: dict[str, Any] = {
                "rfilename": name,
                "size": len(data),
                "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
            }
            if len(data) > LFS_BYTES:
                told["lfs"] = {"sha256": here.tag(name), "size": len(data), "pointerSize": 134}
            siblings.append(told)
        self._answer(200, json.dumps({"_id": "1", "id": REPO, "sha": here.commit, "siblings": siblings}).encode())

    def _resolve(self, commit: str, name: str) -> None:
        here = self.contents
        if here.token and self.headers.get("Authorization") != f"Bearer {here.token}":
            return self._answer(401)
        if commit != here.commit or name not in here.files:
            return self._answer(404)
        headers = {"ETag": f'"{here.tag(name)}"', "X-Repo-Commit": here.commit}
        if here.cdn and len(here.files[name]) > LFS_BYTES:
            return self._answer(302, headers={"Location": f"{here.cdn}/cdn/{name}", "X-Linked-Etag": f'"{here.tag(name)}"'})
        self._file(name, headers)

    def _objects(self, query: dict[str, list[str]]) -> None:
        here = self.contents
        keys = sorted(here.prefix + name for name in here.files)
        keys = [key for key in keys if key.startswith(query.get("prefix", [""])[0]) and key > query.get("continuation-token", [""])[0]]
        shown, more = keys[: here.page], len(keys) > here.page
        sizes = {key: len(here.files[key.removeprefix(here.prefix)]) for key in shown}
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><ETag>{escape(self._etag(key))}</ETag><Size>{size}</Size></Contents>"
            for key, size in sizes.items()
        )
        token = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}</ListBucketResult>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _object(self, key: str) -> None:
        here = self.contents
        name = key.removeprefix(here.prefix)
        if name not in here.files:
            return self._answer(404)
        if self.headers.get("If-Match", self._etag(key)) != self._etag(key):
            return self._answer(412)
        headers = {"ETag": self._etag(key)}
        if self.headers.get("x-amz-checksum-mode") == "ENABLED":
            for kind in here.checks:
                if kind.startswith("Checksum"):
                    digest = _checksum(kind, here.files[name])
                    headers[f"x-amz-checksum-{kind.removeprefix('Checksum').removesuffix('-parts').lower()}"] = digest
        self._file(name, headers)

    def _etag(self, key: str) -> str:
        digest = hashlib.md5(self.contents.files[key.removeprefix(self.contents.prefix)]).hexdigest()
        return f'"{digest}"' if "etag" in self.contents.checks else f'"{digest}-2"'

    def _file(self, name: str, headers: dict[str, str]) -> None:
        here = self.contents
        data = bytearray(here.files[name])
        if name in here.wrong:
            data[len(data) // 2] ^= 1
        asked = self.headers.get("Range") if here.ranges else None
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        if asked:
            headers = headers | {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        self._head(206 if asked else 200, len(data) - start, headers)
        if self.command != "HEAD":
            self._send(name, bytes(data[start:]))

    def _send(self, name: str, data: bytes) -> None:
        here = self.contents
        large = len(data) > LFS_BYTES  # faults are for files in which there is a middle
        cut = here.cuts.pop(0) if large and here.cuts else None
        stall = here.stalls.pop(0) if large and here.stalls and cut is None else None
        stop = min(len(data) if cut is None else cut, len(data) if stall is None else stall)
        for at in range(0, stop, PIECE):
            piece = data[at : min(at + PIECE, stop)]
            self.wfile.write(piece)
            here.sent[name] += len(piece)
        if stall is not None:
            self.wfile.flush()
            here.stalled.set()
            here.go_on.wait(60)
        if cut is not None or stall is not None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self._head(status, len(body), headers or {})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/octet-stream", **headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _checksum(kind: str, data: bytes) -> str:
    name = kind.removeprefix("Checksum")
    if name.endswith("-parts"):  # of a file that was uploaded in two parts
        return f"{base64.b64encode(hashlib.sha256(data).digest()).decode()}-2"
    if name in ("SHA256", "SHA1"):
        return base64.b64encode(hashlib.new(name.lower(), data).digest()).decode()
    if name == "CRC32":
        return base64.b64encode(zlib.crc32(data).to_bytes(4)).decode()
    from awscrt import checksums

    return base64.b64encode(checksums.crc32c(data).to_bytes(4) if name == "CRC32C" else checksums.crc64nvme(data).to_bytes(8)).decode()


class Proxy(BaseHTTPRequestHandler):
    """Forwards plain requests and opens tunnels; `seen` has what it was asked for."""

    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        url = urlsplit(self.path)
        request = f"{self.command} {url.path}{'?' + url.query if url.query else ''} HTTP/1.0\r\n"
        request += "".join(
            f"{name}: {value}\r\n" for name, value in self.headers.items() if name.lower() not in ("connection", "proxy-connection")
        )
        with socket.create_connection((str(url.hostname), url.port or 80), timeout=30) as other:
            other.sendall(f"{request}Connection: close\r\n\r\n".encode())
            self._pump(other)

    do_HEAD = do_GET

    def do_CONNECT(self) -> None:
        self.seen.append(f"CONNECT {self.path}")
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as other:
            self.wfile.write(b"HTTP/1.0 200 tunnel\r\n\r\n")
            self._pump(other)

    def _pump(self, other: socket.socket) -> None:
        ends = {self.connection: other, other: self.connection}
        while True:
            readable, _, _ = select.select(list(ends), (), (), 30)
            for end in readable:
                data = end.recv(PIECE)
                if not data:
                    return
                ends[end].sendall(data)
            if not readable:
                return

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that was killed


@contextmanager
def serving(contents: Contents, tls: Path | None = None) -> Iterator[str]:
    """The server's address. `tls`: a folder with server.pem and server.key."""
    handler = type("Bound", (Handler,), {"contents": contents})
    with _running(handler, tls) as port:
        try:
            yield f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
        finally:
            contents.go_on.set()


@contextmanager
def proxying() -> Iterator[tuple[str, list[str]]]:
    """The proxy's address, and what it was asked for."""
    seen: list[str] = []
    with _running(type("Bound", (Proxy,), {"seen": seen}), None) as port:
        yield f"http://127.0.0.1:{port}", seen


@contextmanager
def _running(handler: type[BaseHTTPRequestHandler], tls: Path | None) -> Iterator[int]:
    server = _Server(("127.0.0.1", 0), handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.pem", tls / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


if __name__ == "__main__":
    found = {path.name: path.read_bytes() for path in Path(sys.argv[1]).iterdir() if path.is_file()}
    _Server(("", int(sys.argv[2])), type("Bound", (Handler,), {"contents": Contents(found)})).serve_forever()
