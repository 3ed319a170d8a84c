"""A whole cluster in conditions that a developer's machine lacks: TLS, a company proxy, an impatient user."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from authority import make
from live_cluster import Cluster, cluster, toy

from baton.cli import certs
from baton.cli.certs import SERVER_NAME
from baton.cluster.packages import command
from baton.launch.state import alive

pytestmark = pytest.mark.system
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")
DEAD_PROXY = {**dict.fromkeys(PROXIES, "http://127.0.0.1:9"), "no_proxy": ""}
PROMPT = "Once upon a time there was a fox who lived near the river and wanted to see the sea"
WHOLE = ("--ignore-eos", "--json")  # one of a hundred drawn seeds ends the toy's answer with its first token, before any handoff
FREE_PORTS = ("--router.port", "0", "--router.admin-port", "0", "--router.http-port", "0", "--router.page-port", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("models") / "toy")


# --- TLS -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates that name the service and no address: the processes and the commands find each other at 127.0.0.1 all the same."""
    return make(tmp_path_factory.mktemp("tls") / "cluster")


@pytest.fixture(scope="module")
def secured(model: Path, authority: Path) -> Iterator[Cluster]:
    """In the background. KV over TCP, so that it goes through TLS, too. A worker that a test stops is not restarted before the test lets it
    go on. Workers give way to the router."""
    flags = ("--kv.transport", "tcp", "--launcher.hang-s", "120", "--launcher.worker-niceness", "2")
    with cluster(model, *flags, tls=authority, detach=True) as running:
        yield running


def test_commands_on_the_host_of_a_tls_cluster_need_no_flags(secured: Cluster) -> None:
    """It needs neither flags nor variables, because the cluster's state file names the certificate files."""
    verbs = ("generate", PROMPT, "--json"), ("status", "--json"), ("trace", "--last", "--json"), ("top", "--once")
    for verb, run in zip(verbs, (secured.baton, secured.here, secured.here, secured.here), strict=True):
        done = run(*verb, "--name", secured.name)
        assert done.returncode == 0, (verb, done.stderr)
    done = secured.baton("chat", "--name", secured.name, "--temperature", "0", input="hello\n")  # a drawn seed may end at once
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert len(json.loads(secured.here("status", "--json", "--name", secured.name).stdout)["workers"]) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the groups are Linux's")
def test_workers_give_way_to_the_router(secured: Cluster) -> None:
    """Each process has a session of its own, so their groups count, where there are any."""
    told = secured.status()
    router, workers = told["router"]["pid"], [worker["pid"] for worker in told["workers"]]
    niceness = {pid: os.getpriority(os.PRIO_PROCESS, pid) for pid in (router, *workers)}
    assert len(workers) == 2 and all(niceness[pid] == min(19, niceness[router] + 2) for pid in workers)
    groups = {pid: file.read_text().split()[-1] for pid in niceness if (file := Path(f"/proc/{pid}/autogroup")).exists()}
    assert groups in ({}, {router: "0"} | dict.fromkeys(workers, "2"))


def test_with_an_address_the_tls_files_come_from_the_configuration(secured: Cluster, authority: Path, tmp_path: Path) -> None:
    files = {"tls_cert": "client.pem", "tls_key": "client.key", "tls_ca": "ca.pem"}
    env = {f"BATON_SECURITY_{key.upper()}": str(authority / file) for key, file in files.items()}
    by_env = replace(secured, env={**secured.env, **env}).here("status", "--address", secured.admin)
    assert by_env.returncode == 0, by_env.stderr
    settings = "".join(f"  {key}: {authority}/{file}\n" for key, file in files.items())
    (tmp_path / "cluster.yaml").write_text(f"security:\n{settings}")
    by_file = secured.here("generate", PROMPT, "--address", secured.grpc, "--config", str(tmp_path / "cluster.yaml"))
    assert by_file.returncode == 0, by_file.stderr


def test_flags_or_a_profile_reach_a_tls_cluster_with_every_command(secured: Cluster, authority: Path, tmp_path: Path) -> None:
    parts = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
    flags = [part for name, file in parts.items() for part in (f"--{name}", str(authority / file))]
    by_flags = secured.here("status", "--address", secured.admin, *flags, "--server-name", SERVER_NAME)
    assert by_flags.returncode == 0, by_flags.stderr
    doors = f"address: {secured.grpc}\nadmin_address: {secured.admin}\nhttp_address: {secured.http}\n"
    files = "".join(f"{name}: {authority}/{file}\n" for name, file in parts.items())
    (tmp_path / "client.yaml").write_text(f"{doors}{files}server_name: {SERVER_NAME}\n")
    secured.env["BATON_CLIENT_CONFIG"] = str(tmp_path / "client.yaml")
    secured.env["BATON_STATE_DIR"], state = str(tmp_path / "elsewhere"), secured.env["BATON_STATE_DIR"]
    load = ("loadtest", "run", "--slo", "ttft=60s", "--rate", "2", "--duration", "2", "--warm-up", "0", "--cool-down", "0", "--seeds", "1")
    try:
        for verb in (
            ("generate", PROMPT), ("status",), ("trace", "--last"), ("top", "--once"), ("roles", "decode-0", "decode"),
            (*load, "--out", str(tmp_path / "grpc")), (*load, "--door", "http", "--out", str(tmp_path / "http")),
        ):  # fmt: skip
            done = secured.baton(*verb, timeout=120) if verb[0] == "loadtest" else secured.here(*verb)
            late = "the generator was late" in done.stderr  # on a busy machine; it reached the door all the same
            assert done.returncode == 0 or late, (verb, done.stderr)
        refused = secured.here("generate", PROMPT, "--timeout", "5", "--server-name", "other.internal")
        assert refused.returncode == 1 and refused.stderr.startswith("baton: UNAVAILABLE"), "flags win over the profile"
    finally:
        del secured.env["BATON_CLIENT_CONFIG"]
        secured.env["BATON_STATE_DIR"] = state


def test_kv_moves_inside_tls_and_certificates_are_renewed_while_the_cluster_runs(secured: Cluster, authority: Path) -> None:
    def handoff(opening: str) -> dict[str, Any]:
        """Of a prompt that no worker caches."""
        done = secured.here("generate", f"{opening} {PROMPT}", *WHOLE, "--name", secured.name)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)["handoff"]
        return told

    told = handoff("first")
    assert told["transport"] == "tcp" and told["blocks"] and not told["recomputed_tokens"]
    before = {door: served_certificate(getattr(secured, door), authority) for door in ("grpc", "http", "admin", "page")}
    assert {*before.values()} == {(authority / "server.pem").read_text()}
    certs.make(authority, renew=True)
    after = {served_certificate(getattr(secured, door), authority) for door in before}
    assert after == {(authority / "server.pem").read_text()} and not after & {*before.values()}
    assert handoff("second")["blocks"] and secured.here("status", "--name", secured.name).returncode == 0
    assert "Traceback" not in "".join(secured.log(name) for name in ("router-0", "prefill-0", "decode-0"))


def served_certificate(address: str, authority: Path) -> str:
    """The PEM text of the certificate that a door presents to a client of the cluster."""
    context = ssl.create_default_context(cafile=authority / "ca.pem")
    context.load_cert_chain(authority / "client.pem", authority / "client.key")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as plain, context.wrap_socket(plain, server_hostname=SERVER_NAME) as sock:
        return ssl.DER_cert_to_PEM_cert(sock.getpeercert(binary_form=True) or b"")


def test_without_the_tls_files_commands_are_refused(secured: Cluster) -> None:
    """Negative control."""
    for verb in (("generate", PROMPT, "--timeout", "5", "--address", secured.grpc), ("status", "--address", secured.admin)):
        done = secured.here(*verb)
        assert done.returncode == 1 and done.stderr.startswith("baton: UNAVAILABLE") and "Traceback" not in done.stderr


# --- a proxy -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def behind_a_proxy(model: Path) -> Iterator[Cluster]:
    with cluster(model, env=DEAD_PROXY) as running:
        yield running


def test_a_cluster_works_behind_a_company_proxy(behind_a_proxy: Cluster) -> None:
    done = behind_a_proxy.baton("generate", PROMPT, *WHOLE, "--name", behind_a_proxy.name)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["handoff"]["blocks"] > 0, "the workers did not reach each other"
    by_address = behind_a_proxy.baton("generate", PROMPT, "--address", behind_a_proxy.grpc)
    assert by_address.returncode == 0, by_address.stderr


def test_a_plain_grpc_channel_would_use_the_proxy(behind_a_proxy: Cluster) -> None:
    """Negative control: a plain channel to loopback goes to the proxy and fails."""
    code = (
        "import sys, grpc; from grpc_health.v1 import health_pb2 as h, health_pb2_grpc as g\n"
        "try: g.HealthStub(grpc.insecure_channel(sys.argv[1])).Check(h.HealthCheckRequest(), timeout=5)\n"
        "except grpc.RpcError as error: sys.exit(error.code().name)"
    )
    for env, status in (({**os.environ, **DEAD_PROXY}, 1), (dict(os.environ), 0)):
        done = subprocess.run([sys.executable, "-c", code, behind_a_proxy.grpc], env=env, capture_output=True, timeout=60)
        assert done.returncode == status, done.stderr


# --- Logs ---------------------------------------------------------------------------------------------------------------------------


def test_the_log_of_a_process_is_shown_while_it_runs_and_when_it_cannot_be_asked(secured: Cluster) -> None:
    for name in ("router-0", "prefill-0", "decode-0"):
        shown = secured.here("logs", name, "--name", secured.name)
        assert shown.returncode == 0 and f" I {name} " in shown.stdout and " ready on " in shown.stdout, shown
    assert secured.here("logs", "decode-0", "--lines", "1", "--name", secured.name).stdout.count("\n") == 1
    unknown = secured.here("logs", "decode-9", "--name", secured.name)
    assert unknown.returncode == 1 and "known processes: router-0, decode-0, prefill-0" in unknown.stderr
    pid = secured.kill("decode-0", signal.SIGSTOP)
    try:
        assert " ready on " in secured.here("logs", "decode-0", "--name", secured.name).stdout, "the file is here"
    finally:
        os.kill(pid, signal.SIGCONT)


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
        generate = command("baton", "generate", PROMPT, "--max-tokens", "500", "--ignore-eos")
        asking = subprocess.Popen(generate, env=env, stdout=subprocess.PIPE)
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
        assert (up.returncode, "Traceback" in rest) == (0, False), rest
        assert time.monotonic() - began < 15, "it waited for the drain, which may take thirty seconds"
        assert pids and not any(map(alive, pids))
        assert asking.poll() is None, "the client waits for the router to come back, and would continue its stream"
        asking.send_signal(signal.SIGINT)
        assert asking.wait(30) == 130
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
