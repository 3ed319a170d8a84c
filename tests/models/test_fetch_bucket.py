"""A model's folder from an S3-compatible store: the same guarantees, with whatever checksum the store keeps."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import authority
import pytest
from fetching import BIG, TALE, WEIGHTS, Fetched
from model_stores import BUCKET, Contents, proxying, serving

from baton.engine.facts.fingerprint import check_sums, fingerprint
from baton.models.fetch import digest, fetcher
from baton.models.fetch.fetcher import FetchOptions
from baton.models.fetch.store import FetchError, Wanted
from baton.models.fetch.stores import connect

SOURCE = f"s3://{BUCKET}/tale"
KINDS = {
    "ChecksumSHA256": "sha256", "ChecksumSHA1": "sha1", "ChecksumCRC32": "crc32", "ChecksumCRC32C": "crc32c",
    "ChecksumCRC64NVME": "crc64nvme", "etag": "md5",
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def small() -> Contents:
    return Contents({"config.json": b"{}", WEIGHTS: os.urandom(BIG), "README.md": b"words"})


@pytest.fixture
def bucket(small: Contents, tmp_path: Path) -> Iterator[Fetched]:
    with serving(small) as address:
        yield Fetched(Wanted(SOURCE, address), tmp_path / "m", [])


def test_a_fetched_model_is_the_one_that_ships(tmp_path: Path) -> None:
    contents = Contents({path.name: path.read_bytes() for path in TALE.iterdir()}, checks=(), page=3)
    with serving(contents) as address:
        made = Fetched(Wanted(SOURCE, address, ("*",)), tmp_path, [])
        with pytest.raises(FetchError, match=r"no checksum that verifies .*README.md"):
            made.run()
        done = Fetched(Wanted(SOURCE, address), tmp_path, [])
        with pytest.raises(FetchError, match=r"no checksum that verifies results.json;"):
            done.run()  # SHA256SUMS does not name it
        del contents.files["results.json"]
        files = done.run().files
    assert fingerprint(tmp_path) == fingerprint(TALE) and {entry.verified for entry in files.values()} == {"sha256"}
    shutil.copy(TALE / "SHA256SUMS", tmp_path)
    check_sums(tmp_path)


@pytest.mark.parametrize("check", KINDS)
def test_every_checksum_verifies_and_finds_a_wrong_byte(bucket: Fetched, small: Contents, check: str) -> None:
    small.checks = (check,)
    made = bucket.run()
    assert made.files[WEIGHTS].verified == KINDS[check] and (bucket.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS]
    shutil.rmtree(bucket.folder)
    small.wrong = {WEIGHTS}
    with pytest.raises(FetchError, match=rf"{WEIGHTS}: wrong checksum: {KINDS[check]}"):
        bucket.run()
    assert not (bucket.folder / WEIGHTS).exists()


def test_what_nothing_verifies_is_named_and_needs_a_word(bucket: Fetched, small: Contents) -> None:
    small.checks = ("ChecksumSHA256-parts",)  # of a file that was uploaded in parts
    with pytest.raises(FetchError, match=rf"no checksum that verifies config.json, {WEIGHTS}.*--unverified"):
        bucket.run()
    assert not small.sent
    assert bucket.run(unverified=True).unverified() == ["config.json", WEIGHTS]
    with pytest.raises(FetchError, match=r"--unverified"):
        bucket.run()
    small.requests.clear()
    bucket.run(unverified=True)
    assert not small.requests


def test_a_cut_connection_is_continued_where_it_ended(bucket: Fetched, small: Contents) -> None:
    small.cuts += [BIG // 3, BIG // 3]
    bucket.run()
    assert (bucket.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS]
    assert BIG <= small.sent[WEIGHTS] <= BIG + (1 << 17), "no more came twice than was on its way"
    ranges = [headers for path, headers in small.requests if "range" in headers]
    assert len(ranges) == 2 and all("if-match" in headers for headers in ranges)


def test_a_server_that_stalls_ends_the_attempt(bucket: Fetched, small: Contents) -> None:
    small.stalls += [1000, 1000]
    with pytest.raises(FetchError, match=r"no byte for 0.5 s"):
        bucket.run(stall_s=0.5, attempts=2)
    bucket.run()


def test_an_object_that_changed_between_two_attempts_begins_again(bucket: Fetched, small: Contents) -> None:
    small.cuts += [BIG // 2]
    with pytest.raises(FetchError):
        bucket.run(attempts=1)
    small.files[WEIGHTS] = os.urandom(BIG)
    small.sent.clear()
    bucket.run()
    assert (bucket.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS] and small.sent[WEIGHTS] == BIG


def test_an_object_that_changes_while_others_are_fetched_is_fetched_again(bucket: Fetched, small: Contents) -> None:
    """Files of two versions do not belong together, although each is right."""
    small.stalls += [BIG // 2]

    def replaced(line: str) -> None:
        bucket.said.append(line)
        small.files["config.json"] = b'{"of": "the next version"}'

    how = FetchOptions(attempts=3, pause_s=0.0)
    fetcher.fetch(bucket.wanted, bucket.folder, lambda: connect(bucket.wanted, 0.5, ""), how, replaced)
    assert any("changed while it was fetched" in line for line in bucket.said)
    assert (bucket.folder / "config.json").read_bytes() == small.files["config.json"]
    assert (bucket.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS]


def test_an_answer_that_is_no_stores_is_one_line(bucket: Fetched, small: Contents) -> None:
    small.junk = b"<html>Who are you?"  # the library takes it for a failure inside the store
    with pytest.raises(FetchError, match=r"s3://models/tale: the store answered 500"):
        bucket.run()


def test_credentials_sign_and_without_any_the_store_is_asked_openly(
    bucket: Fetched, small: Contents, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket.run()
    assert all("authorization" not in headers for _, headers in small.requests)
    small.requests.clear()
    shutil.rmtree(bucket.folder)
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = me\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    bucket.run()
    assert small.requests and all("Credential=me/" in headers["authorization"] for _, headers in small.requests)


@pytest.mark.parametrize(("status", "said"), [(403, "refused .403.*AWS_ACCESS_KEY_ID"), (404, "not there .404")])
def test_a_refusal_says_what_to_do(bucket: Fetched, small: Contents, status: int, said: str) -> None:
    small.failures += [status]
    with pytest.raises(FetchError, match=said):
        bucket.run()


def test_a_certificate_needs_an_authority_and_a_proxy_carries_everything(
    small: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = authority.make(tmp_path / "tls", "localhost")
    with serving(small, tls) as address, proxying() as (proxy, seen):
        fetched = Fetched(Wanted(SOURCE, address), tmp_path / "m", [])
        with pytest.raises(FetchError, match=r"not trusted.*--ca"):
            fetched.run()
        fetched.run(ca=str(tls / "ca.pem"))
        shutil.rmtree(fetched.folder)
        monkeypatch.setenv("SSL_CERT_FILE", str(tls / "ca.pem"))
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        assert not seen
        fetched.run()
        assert seen and set(seen) == {f"CONNECT {address.removeprefix('https://')}"}
        shutil.rmtree(fetched.folder)
        seen.clear()
        monkeypatch.setenv("NO_PROXY", "localhost")
        fetched.run()
        assert not seen


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("crc32", "cbf43926"), ("crc32c", "e3069283"), ("crc64nvme", "ae8b14860a799888"),
        ("md5", "25f9e794323b453885f5181f1b624d0b"), ("git", "e2e107ac61ac259b87c544f6e7a4eb03422c6c21"),
    ],
)  # fmt: skip
def test_checksums_of_known_values(kind: str, value: str) -> None:
    """The check values that the catalogues of CRCs give for 123456789; the last one is that of `git hash-object`."""
    made = digest.new(kind, 9)
    for piece in (b"1234", b"56789"):
        made.update(piece)
    assert made.hexdigest() == value
