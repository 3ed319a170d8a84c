"""Where a command finds its cluster and its identity, and which source wins."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from baton.access import profile
from baton.access.access import find, identify
from baton.access.options import ClientIdentity, ClusterOptions
from baton.cli.main import app
from baton.cluster.config import ConfigError
from baton.launch.state import ClusterState, StateError, born, write
from baton.v1 import worker_pb2, worker_pb2_grpc

DOORS = {"grpc": "127.0.0.1:1", "admin": "127.0.0.1:2", "http": "127.0.0.1:3"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Files of two identities: own-ca, ..., other-ca, ..."""
    made = {}
    for owner in ("own", "other"):
        for part in ("ca", "cert", "key"):
            made[f"{owner}-{part}"] = tmp_path / f"{owner}-{part}"
            made[f"{owner}-{part}"].write_text("x")
    return made


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


def write_profile(env: dict[str, str], text: str) -> Path:
    folder = Path(env["XDG_CONFIG_HOME"]) / "baton"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "client.yaml").write_text(text)
    return folder


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
    """A cluster `baton` on this machine, with TLS, and one named `plain` without."""
    monkeypatch.setenv("BATON_STATE_DIR", str(tmp_path / "state"))
    tls = {part: str(files[f"own-{part}"]) for part in ("ca", "cert", "key")} | {"server_name": "baton.internal"}
    for name, its in (("baton", tls), ("plain", {})):
        write(ClusterState(name, os.getpid(), DOORS, "redis://127.0.0.1:4", "/nowhere", born(os.getpid()), its))


class TestFinding:
    def test_a_cluster_on_this_machine_needs_nothing(self, running: None, env: dict[str, str], files: dict[str, Path]) -> None:
        found = find("admin", ClusterOptions(), ClientIdentity(), env)
        assert found.address == DOORS["admin"] and found.identity == ClientIdentity(
            tls=True, ca=files["own-ca"], cert=files["own-cert"], key=files["own-key"], server_name="baton.internal"
        )
        assert find("grpc", ClusterOptions(name="plain"), ClientIdentity(), env).identity.tls is False

    def test_flags_win_over_what_the_cluster_wrote_down(self, running: None, env: dict[str, str], files: dict[str, Path]) -> None:
        found = find("grpc", ClusterOptions(), ClientIdentity(ca=files["other-ca"], server_name="x", api_key="k"), env).identity
        assert (found.ca, found.server_name, found.api_key, found.cert) == (files["other-ca"], "x", "k", files["own-cert"])

    def test_an_address_in_the_profile_wins_over_the_default_cluster_but_not_over_a_name(self, running: None, env: dict[str, str]) -> None:
        write_profile(env, "address: far:8470\nadmin_address: far:8471\nhttp_address: https://far:443/\nserver_name: far.internal")
        assert [find(door, ClusterOptions(), ClientIdentity(), env).address for door in ("grpc", "admin", "http")] == [
            "far:8470",
            "far:8471",
            "far:443",
        ]
        assert find("http", ClusterOptions(), ClientIdentity(), env).identity == ClientIdentity(tls=True, server_name="far.internal")
        assert find("grpc", ClusterOptions(name="plain"), ClientIdentity(), env).address == DOORS["grpc"]
        assert find("grpc", ClusterOptions(name="plain"), ClientIdentity(), env).identity.server_name is None, (
            "the profile is of another cluster"
        )
        assert find("grpc", ClusterOptions(address="near:1"), ClientIdentity(), env).address == "near:1"

    def test_the_profile_can_name_a_cluster_of_this_machine(self, running: None, env: dict[str, str]) -> None:
        write_profile(env, "name: plain\napi_key: k")
        found = find("grpc", ClusterOptions(), ClientIdentity(), env)
        assert found.identity == ClientIdentity(api_key="k")
        write_profile(env, "name: nobody")
        with pytest.raises(StateError, match="nobody"):
            find("grpc", ClusterOptions(), ClientIdentity(), env)


class TestIdentity:
    def test_flags_win_over_a_servers_configuration_and_that_over_the_profile(
        self, env: dict[str, str], files: dict[str, Path], tmp_path: Path
    ) -> None:
        write_profile(env, f"ca: {files['other-ca']}\nserver_name: of.profile\napi_key: of-profile")
        assert identify(ClientIdentity(), None, env) == ClientIdentity(
            tls=True, ca=files["other-ca"], server_name="of.profile", api_key="of-profile"
        )
        (tmp_path / "cluster.yaml").write_text(f"security: {{tls_ca: {files['own-ca']}, server_name: of.cluster}}")
        by_file = identify(ClientIdentity(), [tmp_path / "cluster.yaml"], env)
        assert (by_file.ca, by_file.server_name) == (files["own-ca"], "of.cluster")
        by_env = identify(ClientIdentity(), None, {**env, "BATON_SECURITY_TLS_CA": str(files["own-ca"])})
        assert (by_env.ca, by_env.server_name) == (files["own-ca"], "baton.internal"), "a cluster's own TLS names the service"
        flags = ClientIdentity(ca=files["other-cert"], server_name="of.flags", api_key="of-flags")
        assert identify(flags, [tmp_path / "cluster.yaml"], env) == ClientIdentity(
            tls=True, ca=files["other-cert"], server_name="of.flags", api_key="of-flags"
        )

    def test_without_any_file_nothing_is_encrypted(self, env: dict[str, str]) -> None:
        """Negative control."""
        assert identify(ClientIdentity(), None, env) == ClientIdentity() and not identify(ClientIdentity(server_name="x"), None, env).tls
        assert identify(ClientIdentity(tls=True), None, env).tls

    def test_files_that_cannot_serve_are_refused_by_name(self, env: dict[str, str], files: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cert and key go together"):
            identify(ClientIdentity(cert=files["own-cert"]), None, env)
        with pytest.raises(ConfigError, match=r"none\.pem: no such file"):
            identify(ClientIdentity(ca=tmp_path / "none.pem"), None, env)


class TestProfile:
    def test_its_files_are_relative_to_it(self, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        folder = write_profile(env, "ca: tls/ca.pem\nkey: /absolute/key\ncert: ~/cert.pem")
        monkeypatch.setenv("HOME", "/home/somebody")
        read = profile.read(env)
        assert (read.ca, read.key, read.cert) == (folder / "tls/ca.pem", Path("/absolute/key"), Path("/home/somebody/cert.pem"))

    def test_the_variable_names_another_file_which_must_exist(self, env: dict[str, str], tmp_path: Path) -> None:
        write_profile(env, "name: one")
        (tmp_path / "other.yaml").write_text("name: other")
        assert profile.read(env).name == "one"
        assert profile.read({**env, "BATON_CLIENT_CONFIG": str(tmp_path / "other.yaml")}).name == "other"
        with pytest.raises(ConfigError, match=r"BATON_CLIENT_CONFIG: there is no file .*nowhere\.yaml"):
            profile.read({**env, "BATON_CLIENT_CONFIG": str(tmp_path / "nowhere.yaml")})

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("adress: a:1", "unknown key 'adress'; did you mean address?"),
            ("8: a", "unknown key 8"),
            ("- a", "must be a mapping, not list"),
            ("a: [", "cannot be read"),
            ("address: 8470", "address: Input should be a valid string"),
            ("api_key: ''", "api_key"),
        ],
    )
    def test_a_profile_that_cannot_be_used_is_refused_by_name(self, env: dict[str, str], text: str, said: str) -> None:
        folder = write_profile(env, text)
        with pytest.raises(ConfigError) as caught:
            profile.read(env)
        assert said in str(caught.value) and str(folder) in str(caught.value)

    def test_no_file_is_an_empty_profile(self, env: dict[str, str]) -> None:
        assert profile.read(env) == profile.Profile()

    def test_a_key_in_it_is_not_shown(self, env: dict[str, str]) -> None:
        write_profile(env, "api_key: secret-key")
        assert "secret-key" not in repr(profile.read(env))


class Admin(worker_pb2_grpc.AdminServicer):
    def __init__(self) -> None:
        self.keys: list[Any] = []

    def Status(self, request: worker_pb2.StatusRequest, context: grpc.ServicerContext) -> worker_pb2.StatusResponse:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        return worker_pb2.StatusResponse(router=worker_pb2.RouterStatus(registry="reachable"))


@pytest.fixture
def admin() -> Iterator[tuple[str, Admin]]:
    door, server = Admin(), grpc.server(ThreadPoolExecutor(1))
    worker_pb2_grpc.add_AdminServicer_to_server(door, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", door
    server.stop(None)


def test_admin_commands_send_the_key(admin: tuple[str, Admin], env: dict[str, str]) -> None:
    address, door = admin
    for flags, extra in ((("--api-key", "flag"), {"BATON_API_KEY": "variable"}), ((), {"BATON_API_KEY": "variable"}), ((), {})):
        done = CliRunner().invoke(app, ["status", "--address", address, *flags], env={**env, "BATON_API_KEY": None, **extra})
        assert done.exit_code == 0, done.output
    write_profile(env, f"admin_address: {address}\napi_key: profile")
    assert CliRunner().invoke(app, ["status"], env={**env, "BATON_API_KEY": None}).exit_code == 0
    assert door.keys == ["Bearer flag", "Bearer variable", None, "Bearer profile"]


def test_every_command_that_reaches_a_cluster_takes_the_same_flags() -> None:
    names = ("--address", "--ca", "--cert", "--key", "--server-name", "--api-key", "--tls", "--config", "--name")
    for verb in (("generate",), ("chat",), ("status",), ("top",), ("trace",), ("roles",), ("scale",), ("loadtest", "run")):
        shown = CliRunner().invoke(app, [*verb, "--help"], env={"COLUMNS": "200"}).output
        assert not [name for name in names if f" {name} " not in shown.replace(",", " ")], verb


def test_a_profile_that_is_refused_is_one_line_and_status_2(env: dict[str, str]) -> None:
    write_profile(env, "adress: a:1")
    for verb in (["status"], ["loadtest", "run", "--slo", "ttft=1s", "--rate", "1"]):
        done = CliRunner().invoke(app, verb, env=env)
        assert done.exit_code == 2 and "did you mean address?" in done.stderr and done.stderr.count("\n") == 1


def test_an_address_that_nobody_listens_on_is_a_failure(env: dict[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        done = CliRunner().invoke(app, ["status", "--address", f"127.0.0.1:{free.getsockname()[1]}"], env=env)
    assert done.exit_code == 1 and "UNAVAILABLE" in done.stderr
