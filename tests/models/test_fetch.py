"""A model's folder from a hub, over real connections: whole or not there, resumed where it was cut, and never with a wrong byte."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import authority
import pytest
from fetching import BIG, TALE, WEIGHTS, Fetched
from model_stores import REPO, Contents, proxying, serving

from baton.engine.facts.fingerprint import fingerprint
from baton.engine.model.checkpoint import Checkpoint
from baton.engine.model.config_json import read_config
from baton.models.fetch import fetcher, lock, manifest, transfer
from baton.models.fetch.fetcher import FetchOptions
from baton.models.fetch.selection import chosen
from baton.models.fetch.store import ByteStream, FetchError, Listing, RemoteFile, Wanted

SOURCE = f"hf://{REPO}"
READ = {"config.json", "generation_config.json", WEIGHTS, "results.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "SSL_CERT_FILE", "HF_TOKEN", "HF_ENDPOINT"):
        for form in (name, name.upper()):
            monkeypatch.delenv(form, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def small() -> Contents:
    return Contents({"config.json": b"{}", WEIGHTS: os.urandom(BIG), "README.md": b"words", "pytorch_model.bin": b"pickle"})


@pytest.fixture
def hub(small: Contents, tmp_path: Path) -> Iterator[Fetched]:
    with serving(small) as address:
        yield Fetched(Wanted(SOURCE, address), tmp_path / "models" / "m", [])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {lock.FILE}


def test_a_fetched_model_loads_and_is_the_one_that_ships(tmp_path: Path) -> None:
    contents = Contents({path.name: path.read_bytes() for path in TALE.iterdir()})
    with serving(contents) as address:
        made = Fetched(Wanted(SOURCE, address), tmp_path, []).run()
    assert names(tmp_path) == READ | {manifest.COMPLETE} and set(made.files) == READ
    assert fingerprint(tmp_path) == fingerprint(TALE)
    Checkpoint(tmp_path, read_config(tmp_path))
    told = json.loads((tmp_path / manifest.COMPLETE).read_text())
    assert (told["source"], told["commit"]) == (SOURCE, contents.commit)
    assert {entry.verified for entry in made.files.values()} == {"sha256", "git"}


def test_a_complete_folder_costs_no_request(hub: Fetched, small: Contents) -> None:
    hub.run()
    before = len(small.requests)
    hub.run()
    assert len(small.requests) == before
    Fetched(Wanted(f"{SOURCE}@{small.commit}", hub.wanted.endpoint), hub.folder, []).run()
    assert len(small.requests) > before, "another source is another model"


def test_a_cut_connection_is_continued_where_it_ended(hub: Fetched, small: Contents) -> None:
    small.cuts += [BIG // 3, BIG // 3]
    hub.run()
    assert (hub.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS]
    assert small.sent[WEIGHTS] == BIG, "no byte came twice"


def test_a_store_that_cannot_continue_begins_again(hub: Fetched, small: Contents) -> None:
    small.cuts, small.ranges = [BIG // 2], False
    hub.run()
    assert (hub.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS]
    assert small.sent[WEIGHTS] == BIG + BIG // 2


def test_cuts_that_bring_little_are_counted_and_cuts_that_bring_much_are_not(hub: Fetched, small: Contents) -> None:
    small.cuts += [1000, 1000, 1000]
    with pytest.raises(FetchError, match=rf"{WEIGHTS}.*3 attempts"):
        hub.run()
    small.cuts += [transfer.ENOUGH] * 2
    hub.run(attempts=2)
    assert small.sent[WEIGHTS] == BIG


def test_a_server_that_stalls_ends_the_attempt(hub: Fetched, small: Contents) -> None:
    small.stalls += [1000]
    hub.run(stall_s=0.5)
    assert any("no byte for 0.5 s" in line for line in hub.said)
    assert (hub.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS]
    shutil.rmtree(hub.folder)
    small.stalls += [1000, 1000]
    with pytest.raises(FetchError, match=r"no byte for 0.5 s"):
        hub.run(stall_s=0.5, attempts=2)


def test_failures_of_the_store_are_tried_again(hub: Fetched, small: Contents) -> None:
    small.failures += [503, 429]
    hub.run()
    small.failures += [500] * 3
    shutil.rmtree(hub.folder)
    with pytest.raises(FetchError, match=r"the store answered 500; gave up after 3"):
        hub.run()


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_wrong_byte_never_gets_a_name(hub: Fetched, small: Contents, name: str) -> None:
    small.wrong = {name}
    with pytest.raises(FetchError, match=rf"{name}: wrong checksum"):
        hub.run()
    assert not (hub.folder / name).exists() and not (hub.folder / manifest.COMPLETE).exists()
    assert not transfer.parts(hub.folder), "wrong bytes are not continued"


def test_without_the_check_the_wrong_byte_would_be_there(hub: Fetched, small: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    small.wrong = {WEIGHTS}
    monkeypatch.setattr(transfer, "mismatch", lambda file, digests: "")
    hub.run()
    assert (hub.folder / WEIGHTS).read_bytes() != small.files[WEIGHTS]


class TooLong:
    """A store that sends more than it listed, and has no checksum that would show it."""

    def list(self, commit: str = "") -> Listing:
        return Listing((RemoteFile("config.json", 2, "tag", None),))

    @contextmanager
    def open(self, file: RemoteFile, start: int) -> Iterator[ByteStream]:
        yield ByteStream(start, iter([b"{}", b"more"]))

    def unchanged(self, listing: Listing) -> bool:
        return True


def test_more_bytes_than_listed_are_refused_even_unverified(tmp_path: Path) -> None:
    how = FetchOptions(attempts=2, pause_s=0.0, unverified=True)
    with pytest.raises(FetchError, match=r"config.json: wrong size"):
        fetcher.fetch(Wanted("s3://b/m"), tmp_path, TooLong, how, print)
    assert names(tmp_path) == {manifest.PARTIAL}


def test_a_part_with_a_wrong_byte_is_thrown_away_and_fetched_again(hub: Fetched, small: Contents) -> None:
    small.cuts += [BIG // 2]
    with pytest.raises(FetchError):
        hub.run(attempts=1)
    [part] = transfer.parts(hub.folder)
    part.write_bytes(bytes(part.stat().st_size))
    hub.run()
    assert (hub.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS]
    assert any("wrong checksum" in line for line in hub.said)


def test_a_file_that_changed_between_two_attempts_begins_again(hub: Fetched, small: Contents) -> None:
    small.cuts += [BIG // 2]
    with pytest.raises(FetchError):
        hub.run(attempts=1)
    small.files[WEIGHTS], small.commit = os.urandom(BIG), "d" * 40
    small.sent.clear()
    made = hub.run()
    assert (hub.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS] and small.sent[WEIGHTS] == BIG
    assert made.commit == small.commit and not transfer.parts(hub.folder)


def test_a_commit_stays_the_one_that_was_resolved_first(hub: Fetched, small: Contents) -> None:
    """Another attempt, in another process, asks for the commit and not for the branch."""
    small.cuts += [BIG // 2]
    with pytest.raises(FetchError):
        hub.run(attempts=1)
    small.requests.clear()
    hub.run()
    assert small.requests[0][0].endswith(f"/revision/{small.commit}")


def test_a_private_model_needs_a_token_and_the_message_says_where(
    hub: Fetched, small: Contents, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small.token = "secret"
    with pytest.raises(FetchError, match=r"HF_TOKEN"):
        hub.run()
    monkeypatch.setenv("HF_TOKEN", "another")
    with pytest.raises(FetchError, match=r"refused .401.*HF_TOKEN"):
        hub.run()
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.run()
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    shutil.rmtree(hub.folder)
    hub.run()


def test_what_is_not_there_is_named(hub: Fetched) -> None:
    for source in (f"{SOURCE}@gone", "hf://own/nothing"):
        with pytest.raises(FetchError, match=rf"{source}.*404"):
            Fetched(Wanted(source, hub.wanted.endpoint), hub.folder, []).run()


def test_a_redirect_is_followed_without_the_token(hub: Fetched, small: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    cdn = Contents(small.files, cuts=[BIG // 2])
    with serving(cdn) as address:
        small.cdn, small.token = address, "secret"
        hub.run()
    assert (hub.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS] and cdn.sent[WEIGHTS] == BIG
    assert len(cdn.requests) == 2 and "range" in cdn.requests[1][1]
    assert all("authorization" not in headers for _, headers in cdn.requests)
    assert all("authorization" in headers for _, headers in small.requests), "negative control"


def test_a_certificate_needs_an_authority(small: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = authority.make(tmp_path / "tls", "localhost")
    with serving(small, tls) as address:
        fetched = Fetched(Wanted(SOURCE, address), tmp_path / "m", [])
        with pytest.raises(FetchError, match=r"not trusted.*--ca"):
            fetched.run()
        fetched.run(ca=str(tls / "ca.pem"))
        shutil.rmtree(fetched.folder)
        monkeypatch.setenv("SSL_CERT_FILE", str(tls / "ca.pem"))
        fetched.run()
    with pytest.raises(FetchError, match=r"no such file"):
        Fetched(fetched.wanted, tmp_path / "n", []).run(ca=str(tmp_path / "none.pem"))


def test_a_proxy_carries_everything_unless_it_is_excepted(small: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = authority.make(tmp_path / "tls", "localhost")
    with serving(small, tls) as address, proxying() as (proxy, seen):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        fetched = Fetched(Wanted(SOURCE, address), tmp_path / "m", [])
        fetched.run(ca=str(tls / "ca.pem"))
        assert seen and set(seen) == {f"CONNECT {address.removeprefix('https://')}"}
        seen.clear()
        shutil.rmtree(fetched.folder)
        monkeypatch.setenv("NO_PROXY", "localhost")
        fetched.run(ca=str(tls / "ca.pem"))
        assert not seen
    with serving(small) as address, proxying() as (proxy, seen):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        Fetched(Wanted(SOURCE, address), tmp_path / "p", []).run()
        assert any(path.startswith(f"{address}/{REPO}/resolve/") for path in seen)


def test_too_little_space_is_said_before_a_byte_comes(hub: Fetched, small: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(count: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, count))

    free(BIG)
    with pytest.raises(FetchError, match=r"3.15 MB are needed and 3.15 MB are free"):
        hub.run()
    assert not small.sent
    free(BIG + 2)
    hub.run()


def test_a_disk_that_fills_up_is_named(hub: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer, "_update", full)
    with pytest.raises(FetchError, match=r"no space is left for"):
        hub.run()


def test_two_fetchers_fetch_once(hub: Fetched, small: Contents) -> None:
    small.stalls += [BIG // 2]
    first = threading.Thread(target=hub.run)
    first.start()
    assert small.stalled.wait(30)
    second = Fetched(hub.wanted, hub.folder, [])
    with pytest.raises(FetchError, match=r"another process has been fetching"):
        second.run(lock_s=0.1)
    waiting = threading.Thread(target=second.run)
    waiting.start()
    small.go_on.set()
    first.join(30)
    waiting.join(30)
    assert (hub.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS]
    assert small.sent[WEIGHTS] == BIG and any("waiting for it" in line for line in second.said)


def test_without_the_lock_two_fetchers_fetch_twice(hub: Fetched, small: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(lock, "held", lambda *_: nullcontext())
    small.stalls += [BIG // 2]
    first = threading.Thread(target=hub.run, kwargs={"stall_s": 3.0})  # ends an attempt that nobody answers
    first.start()
    assert small.stalled.wait(30)
    Fetched(hub.wanted, hub.folder, []).run()
    small.go_on.set()
    first.join(30)
    assert small.sent[WEIGHTS] > BIG


def test_it_says_how_far_it_is(hub: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "REPORT_S", 0.0)
    hub.run()
    assert any(line.startswith(f"{WEIGHTS}: 3.15 MB of 3.15 MB, ") for line in hub.said)


def test_an_answer_that_is_no_hubs_is_one_line(hub: Fetched, small: Contents) -> None:
    small.junk = b"<html>Who are you?"  # as a portal answers
    with pytest.raises(FetchError, match=r"not what a hub says"):
        hub.run()


def test_a_waiting_process_says_why_and_goes_on_when_everything_is_there(hub: Fetched, small: Contents) -> None:
    said: list[str] = []
    with pytest.raises(FetchError, match=r"nothing is there yet"):
        fetcher.wait(hub.wanted, hub.folder, 0.1, said.append)
    small.stalls += [BIG // 2]
    fetching = threading.Thread(target=hub.run)
    fetching.start()
    assert small.stalled.wait(30)
    with pytest.raises(FetchError, match=r"1 files are ready"):
        fetcher.wait(hub.wanted, hub.folder, 0.1, said.append)
    small.go_on.set()
    fetcher.wait(hub.wanted, hub.folder, 60, said.append)
    fetching.join(30)
    with pytest.raises(FetchError, match=rf"the folder holds {SOURCE}"):
        fetcher.wait(Wanted("hf://own/other", hub.wanted.endpoint), hub.folder, 0.1, said.append)
    (hub.folder / WEIGHTS).write_bytes(b"short")
    with pytest.raises(FetchError, match=rf"another size: {WEIGHTS}"):
        fetcher.wait(hub.wanted, hub.folder, 0.1, said.append)


def test_verify_finds_an_altered_byte_and_mends_it(hub: Fetched, small: Contents) -> None:
    hub.run()
    data = bytearray(small.files[WEIGHTS])
    data[7] ^= 1
    (hub.folder / WEIGHTS).write_bytes(data)
    hub.run()
    assert (hub.folder / WEIGHTS).read_bytes() == data, "negative control: sizes alone do not show it"
    small.sent.clear()
    hub.run(verify=True)
    assert (hub.folder / WEIGHTS).read_bytes() == small.files[WEIGHTS] and set(small.sent) == {WEIGHTS}
    small.requests.clear()
    hub.run(verify=True)
    assert not small.requests, "nothing was altered"


def test_a_missing_file_is_fetched_again_and_only_that(hub: Fetched, small: Contents) -> None:
    hub.run()
    (hub.folder / "config.json").unlink()
    small.sent.clear()
    hub.run()
    assert set(small.sent) == {"config.json"} and (hub.folder / "config.json").exists()


def test_another_model_in_the_same_folder_leaves_nothing_of_the_first(hub: Fetched, small: Contents) -> None:
    small.files["extra.json"] = b"[]"
    hub.run()
    del small.files["extra.json"]
    small.commit = "e" * 40
    Fetched(Wanted(f"{SOURCE}@{small.commit}", hub.wanted.endpoint), hub.folder, []).run()
    assert names(hub.folder) == {"config.json", WEIGHTS, manifest.COMPLETE}
    assert small.sent[WEIGHTS] == BIG, "what both have was not fetched twice"


def test_a_file_that_no_fetch_wrote_is_not_mixed_in(hub: Fetched) -> None:
    hub.folder.mkdir(parents=True)
    (hub.folder / "notes.md").write_text("of no concern")
    (hub.folder / "model-00001-of-00002.safetensors").write_bytes(b"old")
    with pytest.raises(FetchError, match=r"model-00001-of-00002.safetensors is there already"):
        hub.run()
    (hub.folder / "model-00001-of-00002.safetensors").unlink()
    hub.run()


@pytest.mark.parametrize("name", ["../out.json", "/etc/out.json", "a/../../out.json", ".baton-fetch.json", "a.0123456789abcdef.part"])
def test_a_name_that_leaves_the_folder_is_refused(hub: Fetched, small: Contents, name: str) -> None:
    small.files[name] = b"{}"
    wanted = Wanted(SOURCE, hub.wanted.endpoint, ("*/*", "*"))
    with pytest.raises(FetchError, match=r"no name of a file inside|keeps for itself"):
        Fetched(wanted, hub.folder, []).run()
    assert not small.sent


def test_what_an_engine_reads_is_fetched_and_what_it_does_not_is_not() -> None:
    read = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model", "merges.txt", "chat_template.jinja")
    other = ("pytorch_model.bin", "consolidated.00.pth", "original/params.json", "onnx/model.json", "m.gguf", "consolidated.safetensors")
    assert all(chosen(name, ()) for name in read) and not any(chosen(name, ()) for name in other)
    assert chosen("original/params.json", ("original/*",)) and not chosen("model.safetensors", ("original/*",))


def test_a_source_without_files_of_a_model_is_refused(hub: Fetched, small: Contents) -> None:
    small.files = {"README.md": b"words"}
    with pytest.raises(FetchError, match=r"none of its files is one of a model"):
        hub.run()
