"""`baton certs`: files that TLS accepts, with rights that keep private keys private, and never over files that exist."""

import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from baton.cli import certs
from baton.cli.main import app


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["certs", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_it_makes_everything_that_mutual_tls_needs(tmp_path: Path) -> None:
    status, out, _ = run(str(tmp_path / "tls"))
    assert status == 0
    assert sorted(path.name for path in (tmp_path / "tls").iterdir()) == sorted(certs._files()), "nothing else is left"
    for word in ("--security.tls-cert", "--security.tls-ca", f"--server-name {certs.SERVER_NAME}", "--renew"):
        assert word in out
    for name in ("ca", "server", "client"):
        assert stat.S_IMODE((tmp_path / "tls" / f"{name}.key").stat().st_mode) == 0o600
    for name in ("server", "client"):
        ssl.create_default_context().load_cert_chain(tmp_path / "tls" / f"{name}.pem", tmp_path / "tls" / f"{name}.key")


def test_only_the_certificate_of_a_process_can_serve(tmp_path: Path) -> None:
    certs.make(tmp_path / "tls", renew=False)
    server, client = (x509.load_pem_x509_certificate((tmp_path / "tls" / f"{name}.pem").read_bytes()) for name in ("server", "client"))
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [certs.SERVER_NAME, "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    uses = client.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(uses) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    with pytest.raises(x509.ExtensionNotFound):
        client.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_existing_files_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "server.key").write_text("precious")
    status, out, err = run(str(tmp_path))
    assert (status, out) == (2, "") and "already holds server.key" in err and "--renew" in err
    assert [path.name for path in tmp_path.iterdir()] == ["server.key"] and (tmp_path / "server.key").read_text() == "precious"


def test_renewed_certificates_come_from_the_same_authority(tmp_path: Path) -> None:
    certs.make(tmp_path, renew=False)
    before = {name: (tmp_path / name).read_bytes() for name in certs._files()}
    assert run(str(tmp_path), "--renew")[0] == 0
    for name, old in before.items():
        assert ((tmp_path / name).read_bytes() == old) == name.startswith("ca."), name
    authority = x509.load_pem_x509_certificate(before["ca.pem"])
    x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes()).verify_directly_issued_by(authority)


@pytest.mark.parametrize("damage", ["missing", "other", "nonsense"])
def test_without_the_authoritys_key_nothing_is_renewed(tmp_path: Path, damage: str) -> None:
    certs.make(tmp_path / "a", renew=False)
    certs.make(tmp_path / "b", renew=False)
    match damage:
        case "missing":
            (tmp_path / "a" / "ca.key").unlink()
        case "other":
            (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
        case "nonsense":
            (tmp_path / "a" / "ca.key").write_text("x")
    before = (tmp_path / "a" / "server.pem").read_bytes()
    status, _, err = run(str(tmp_path / "a"), "--renew")
    assert status in (1, 2) and "ca.key" in err and (tmp_path / "a" / "server.pem").read_bytes() == before


def test_other_commands_do_not_load_the_library() -> None:
    code = "import baton.cli.main, sys; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
