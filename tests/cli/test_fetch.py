"""`baton fetch` as a Job runs it: killed and started again, one line for each failure, and no secret on its command line."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fetching import BIG, WEIGHTS
from model_stores import BUCKET, REPO, Contents, serving
from typer.testing import CliRunner

from baton.cli.main import app
from baton.models.fetch import manifest, transfer

SOURCE = f"hf://{REPO}"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
CLEAN = {name: value for name, value in os.environ.items() if name.lower() not in PROXIES and not name.startswith(("AWS_", "HF_"))}


@pytest.fixture
def contents() -> Contents:
    return Contents({"config.json": b"{}", WEIGHTS: os.urandom(BIG)})


@pytest.fixture
def address(contents: Contents) -> Iterator[str]:
    with serving(contents) as told:
        yield told


def command(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    given = [sys.executable, "-m", "baton", "fetch", *map(str, arguments)]
    return subprocess.Popen(given, env=CLEAN | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(*arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    with command(*arguments, **environment) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_a_killed_process_is_continued_by_the_next(contents: Contents, address: str, tmp_path: Path) -> None:
    contents.stalls += [BIG // 2]
    with command(SOURCE, tmp_path, "--endpoint", address) as process:
        assert contents.stalled.wait(60)
        while sum(part.stat().st_size for part in transfer.parts(tmp_path)) < BIG // 2 - (1 << 17):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    kept = transfer.parts(tmp_path)[0].stat().st_size
    contents.go_on.set()
    assert manifest.read(tmp_path) is None and not (tmp_path / WEIGHTS).exists()
    contents.sent.clear()
    status, out, err = run(SOURCE, tmp_path, "--endpoint", address)
    assert (status, out) == (0, f"{tmp_path}\n"), err
    assert contents.sent[WEIGHTS] == BIG - kept and kept > BIG // 3
    assert (tmp_path / WEIGHTS).read_bytes() == contents.files[WEIGHTS]


def test_a_failure_is_one_line_and_a_status(contents: Contents, address: str, tmp_path: Path) -> None:
    contents.token = "secret"
    status, out, err = run(SOURCE, tmp_path, "--endpoint", address)
    assert (status, out) == (1, "") and err.startswith("baton: ") and err.count("\n") == 1 and "HF_TOKEN" in err


def test_secrets_come_from_files(contents: Contents, address: str, tmp_path: Path) -> None:
    contents.token = "secret"
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "HF_TOKEN").write_text("secret\n")
    assert run(SOURCE, tmp_path / "m", "--endpoint", address, "--secrets", secrets)[0] == 0
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        (secrets / name).write_text("mine")
    contents.requests.clear()
    assert run(f"s3://{BUCKET}/tale", tmp_path / "n", "--endpoint", address, "--secrets", secrets)[0] == 0
    assert all("Credential=mine/" in headers["authorization"] for _, headers in contents.requests)


def test_waiting_needs_no_network_and_no_right_to_write(contents: Contents, address: str, tmp_path: Path) -> None:
    wait = (SOURCE, tmp_path, "--endpoint", address, "--wait")
    status, _, err = run(*wait, "--within-s", "0.2")
    assert status == 1 and f"waiting for {SOURCE}: nothing is there yet" in err and "not complete after 0.2 s" in err
    with command(*wait, "--within-s", "100") as waiting:
        assert waiting.stderr and "nothing is there yet" in waiting.stderr.readline()
        assert run(SOURCE, tmp_path, "--endpoint", address)[0] == 0
        before = len(contents.requests)
        assert waiting.wait(60) == 0
    assert len(contents.requests) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [manifest.COMPLETE, ".baton-fetch.lock", "config.json", WEIGHTS]


def test_an_endpoint_is_a_url(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fetch", SOURCE, str(tmp_path), "--endpoint", "hub.example"])
    assert done.exit_code == 2 and "hub.example" in done.stderr


@pytest.mark.parametrize("source", ["tale", "https://hub/own/tale", "hf://tale", "s3://", "hf://own/tale/deeper"])
def test_what_names_no_store_is_a_wrong_command_line(source: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fetch", source, str(tmp_path)])
    assert done.exit_code == 2 and "no source of models" in done.stderr and not done.stdout


@pytest.mark.parametrize(("source", "library", "extra"), [(SOURCE, "huggingface_hub", "hub"), ("s3://b/m", "boto3", "s3")])
def test_a_missing_library_is_named_with_its_extra(
    source: str, library: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hub", "bucket"):
        monkeypatch.delitem(sys.modules, f"baton.models.fetch.{name}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    done = CliRunner().invoke(app, ["fetch", source, str(tmp_path)])
    assert done.exit_code == 1 and library in done.stderr and f"baton-llm[{extra}]" in done.stderr
