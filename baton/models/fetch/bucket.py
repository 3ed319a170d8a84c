"""An S3-compatible store. What verifies an object: its SHA-256 as the store keeps it, SHA256SUMS beside the objects, another checksum that
covers the whole object, or an ETag that is its MD5 (uploaded in one part, without a key of KMS)."""

import base64
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import botocore
import urllib3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError

from baton.engine.facts.fingerprint import SUMS
from baton.models.fetch import answers
from baton.models.fetch.digest import Check
from baton.models.fetch.selection import chosen
from baton.models.fetch.store import ByteStream, Changed, FetchError, Interrupted, Listing, RemoteFile, Wanted

CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SHARED_CREDENTIALS_FILE, of an account that may list and read it"
BUCKET = re.compile(r"s3://([\w.-]+)(?:/(.*))?")
SUMS_BYTES = 1 << 20
PIECE = 1 << 16
ATTRIBUTES = {"crc64nvme": "ChecksumCRC64NVME", "crc32c": "ChecksumCRC32C", "crc32": "ChecksumCRC32", "sha1": "ChecksumSHA1"}
NATIVE = {"crc64nvme", "crc32c"}  # need the library that boto3[crt] brings
Told = dict[str, Any]


class Bucket:
    """See `Store`."""

    def __init__(self, wanted: Wanted, stall_s: float, ca: str) -> None:
        found = BUCKET.fullmatch(wanted.source)
        assert found, wanted.source
        self._bucket = found[1]
        self._prefix = f"{found[2].strip('/')}/" if (found[2] or "").strip("/") else ""
        self._wanted, self._stall_s = wanted, stall_s
        with self._failing(wanted.source):
            session = boto3.session.Session()
            how = Config(
                connect_timeout=stall_s,
                read_timeout=stall_s,
                retries={"total_max_attempts": 1},  # ours are counted by what they bring
                response_checksum_validation="when_required",  # the whole file is verified, not the piece
                s3={"addressing_style": "path"} if wanted.endpoint else {},
                signature_version=None if session.get_credentials() else botocore.UNSIGNED,
            )
            self._client = session.client("s3", endpoint_url=wanted.endpoint or None, verify=answers.bundle(ca) or None, config=how)

    def list(self, commit: str = "") -> Listing:
        found = self._objects()
        sums = self._sums() if SUMS in found else {}
        chosen_names = [name for name in found if chosen(name, self._wanted.include)]
        return Listing(tuple(self._file(name, found[name], sums) for name in chosen_names))

    @contextmanager
    def open(self, file: RemoteFile, start: int) -> Iterator[ByteStream]:
        how = {"IfMatch": file.tag} | ({"Range": f"bytes={start}-"} if start else {})
        with self._failing(f"{self._wanted.source}: {file.name}"):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + file.name, **how)
            body = answer["Body"]
            try:
                yield ByteStream(answers.first_byte(answer.get("ContentRange", "")), self._pieces(body))
            finally:
                body.close()

    def unchanged(self, listing: Listing) -> bool:
        now = self._objects()
        return all(file.name in now and now[file.name]["ETag"] == file.tag for file in listing.files)

    def _objects(self) -> dict[str, Told]:
        with self._failing(self._wanted.source):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            told = [each for page in pages for each in page.get("Contents", ())]
        return {each["Key"].removeprefix(self._prefix): each for each in told if not each["Key"].endswith("/")}

    def _file(self, name: str, told: Told, sums: dict[str, str]) -> RemoteFile:
        with self._failing(f"{self._wanted.source}: {name}"):
            head = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name, ChecksumMode="ENABLED", IfMatch=told["ETag"])
        return RemoteFile(name, told["Size"], told["ETag"], _check(head, sums.get(name)))

    def _sums(self) -> dict[str, str]:
        with self._failing(f"{self._wanted.source}: {SUMS}"):
            text = self._client.get_object(Bucket=self._bucket, Key=self._prefix + SUMS)["Body"].read(SUMS_BYTES).decode(errors="replace")
        lines = (re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line) for line in text.splitlines())
        return {line[2]: line[1].lower() for line in lines if line}

    def _pieces(self, body: Any) -> Iterator[bytes]:
        with self._failing(self._wanted.source):
            yield from body.iter_chunks(PIECE)

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            told = error.response["ResponseMetadata"]
            if told["HTTPStatusCode"] == 412:
                raise Changed(f"{what} is another version") from None
            raise answers.refused(told["HTTPStatusCode"], what, CREDENTIALS, told.get("HTTPHeaders", {}).get("retry-after")) from None
        except ReadTimeoutError:
            raise Interrupted(f"no byte for {self._stall_s:g} s") from None
        except (NoConnection, HTTPClientError, IncompleteReadError, ResponseStreamingError, urllib3.exceptions.HTTPError) as error:
            raise answers.untrusted(error, what) or Interrupted(str(error)) from None
        except (BotoCoreError, ResponseParserError) as error:
            raise FetchError(f"{what}: {error}") from None


def _check(head: Told, listed: str | None) -> Check | None:
    """`listed`: what SHA256SUMS says."""
    # A composite checksum, VALUE-PARTS, is one of the parts' checksums.
    whole = {key: value for key, value in head.items() if key.startswith("Checksum") and "-" not in value}
    if head.get("ChecksumType") == "COMPOSITE":
        whole = {}
    if "ChecksumSHA256" in whole:
        return Check("sha256", _hex(whole["ChecksumSHA256"]))
    if listed:
        return Check("sha256", listed)
    native = importlib.util.find_spec("awscrt") is not None
    for kind, attribute in ATTRIBUTES.items():
        if attribute in whole and (native or kind not in NATIVE):
            return Check(kind, _hex(whole[attribute]))
    keyed = head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head
    tag = head["ETag"].strip('"')
    return Check("md5", tag) if re.fullmatch(r"[0-9a-f]{32}", tag) and not keyed else None


def _hex(encoded: str) -> str:
    return base64.b64decode(encoded).hex()
