"""A whole cluster in conditions that a developer's machine lacks: TLS, a company proxy, an impatient user."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_cluster import Cluster, cluster, toy

from baton.cluster.packages import command
from baton.launch.state import alive
from loadtest.grpc_door import GrpcDoor

pytestmark = pytest.mark.system
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")
DEAD_PROXY = {**dict.fromkeys(PROXIES, "http://127.0.0.1:9"), "no_proxy": ""}
PROMPT = "Once upon a time there was a fox who lived near the river and wanted to see the sea"
FREE_PORTS = ("--router.port", "0", "--router.admin-port", "0", "--router.http-port", "0", "--router.page-port", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("models") / "toy")


# --- TLS -----------------------------------------------------------------------------------------------------------------------------


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem and a certificate that it signed for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, *new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority")
    openssl(folder, *new, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=baton")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    sign = ("x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl(folder, *sign, "-out", "cert.pem")
    return folder


@pytest.fixture(scope="module")
def secured(model: Path, authority: Path) -> Iterator[Cluster]:
    files = [part for key in ("cert", "key", "ca") for part in (f"--security.tls-{key}", str(authority / f"{key}.pem"))]
    with cluster(model, *files, tls=authority) as running:
        yield running


def test_commands_on_the_host_of_a_tls_cluster_need_no_flags(secured: Cluster) -> None:
    """It needs neither flags nor variables, because the cluster's state file names the certificate files."""
    for verb in (("generate", PROMPT, "--json"), ("status", "--json"), ("trace", "--last", "--json"), ("top", "--once")):
        done = secured.baton(*verb, "--name", secured.name)
        assert done.returncode == 0, (verb, done.stderr)
    done = secured.baton("chat", "--name", secured.name, input="hello\n")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert len(json.loads(secured.baton("status", "--json", "--name", secured.name).stdout)["workers"]) == 2


def test_with_an_address_the_tls_files_come_from_the_configuration(secured: Cluster, authority: Path, tmp_path: Path) -> None:
    env = {f"BATON_SECURITY_TLS_{key.upper()}": str(authority / f"{key}.pem") for key in ("cert", "key", "ca")}
    by_env = subprocess.run(
        command("baton", "status", "--address", secured.admin), env={**secured.env, **env}, capture_output=True, text=True, timeout=60
    )
    assert by_env.returncode == 0, by_env.stderr
    settings = "".join(f"  tls_{key}: {authority}/{key}.pem\n" for key in ("cert", "key", "ca"))
    (tmp_path / "client.yaml").write_text(f"security:\n{settings}")
    by_file = secured.baton("generate", PROMPT, "--address", secured.grpc, "--config", str(tmp_path / "client.yaml"))
    assert by_file.returncode == 0 and by_file.stdout.strip(), by_file.stderr


async def test_a_load_test_reaches_a_tls_cluster(secured: Cluster, authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with GrpcDoor(secured.grpc) as door:
        assert (await door.ask(range(1, 20), 4, 5.0, lambda count: None)).outcome != "ok", "negative control: no files"
    for key in ("cert", "key", "ca"):
        monkeypatch.setenv(f"BATON_SECURITY_TLS_{key.upper()}", str(authority / f"{key}.pem"))
    async with GrpcDoor(secured.grpc) as door:
        assert (await door.ask(range(1, 20), 4, 30.0, lambda count: None)).outcome == "ok"


def test_without_the_tls_files_commands_are_refused(secured: Cluster) -> None:
    """Negative control."""
    for verb in (("generate", PROMPT, "--timeout", "5", "--address", secured.grpc), ("status", "--address", secured.admin)):
        done = secured.baton(*verb)
        assert done.returncode == 1 and done.stderr.startswith("baton: UNAVAILABLE") and "Traceback" not in done.stderr


# --- a proxy -------------------------------------------------------------------------------------------------------------------------


def test_a_cluster_works_behind_a_company_proxy(model: Path) -> None:
    with cluster(model, env=DEAD_PROXY) as running:
        done = running.baton("generate", PROMPT, "--json", "--name", running.name)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["handoff"]["blocks"] > 0, "the workers did not reach each other"
        by_address = running.baton("generate", PROMPT, "--address", running.grpc)
        assert by_address.returncode == 0, by_address.stderr


def test_a_plain_grpc_channel_would_use_the_proxy(model: Path) -> None:
    """Negative control: a plain channel to loopback goes to the proxy and fails."""
    code = (
        "import sys, grpc; from grpc_health.v1 import health_pb2 as h, health_pb2_grpc as g\n"
        "try: g.HealthStub(grpc.insecure_channel(sys.argv[1])).Check(h.HealthCheckRequest(), timeout=5)\n"
        "except grpc.RpcError as error: sys.exit(error.code().name)"
    )
    with cluster(model) as running:
        for env, status in ((DEAD_PROXY, 1), ({}, 0)):
            done = subprocess.run([sys.executable, "-c", code, running.grpc], env={**running.env, **env}, capture_output=True, timeout=60)
            assert done.returncode == status, done.stderr


# --- Ctrl-C --------------------------------------------------------------------------------------------------------------------------


def test_a_second_ctrl_c_ends_running_requests_immediately(tmp_path: Path) -> None:
    """The first lets them finish (this one would take minutes) and says how many are running and how to end them."""
    slow = toy(tmp_path / "slow", step_delay_ms=200)
    env = {**os.environ, "BATON_STATE_DIR": str(tmp_path / "state")}
    up = subprocess.Popen(
        command("baton", "up", "--model", str(slow), *FREE_PORTS),
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert up.stderr is not None
    asking = None
    try:
        while "Ctrl-C stops it" not in (line := up.stderr.readline()):
            assert line, "the cluster did not come up"
        asking = subprocess.Popen(command("baton", "generate", PROMPT, "--max-tokens", "500"), env=env, stdout=subprocess.PIPE)
        assert asking.stdout is not None and asking.stdout.read(1)
        up.send_signal(signal.SIGINT)
        line = up.stderr.readline()
        assert "1 request is running; Ctrl-C again" in line, line
        with pytest.raises(subprocess.TimeoutExpired):
            up.wait(3)
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and parent(int(path.name)) == up.pid]
        began = time.monotonic()
        up.send_signal(signal.SIGINT)
        rest = up.communicate(timeout=30)[1]
        assert up.returncode == 0 and "Traceback" not in rest
        assert time.monotonic() - began < 15, "it waited for the drain, which may take thirty seconds"
        assert pids and not any(map(alive, pids))
        assert asking.wait(30) == 1
    finally:
        up.kill()
        up.communicate()
        if asking is not None:
            asking.kill()
            asking.communicate()


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
