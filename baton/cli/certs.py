"""`baton certs`: an authority of one's own, and the certificates of a cluster and of a client, to try TLS with.

ca.pem      the authority: `security.tls_ca` of every process, --ca of every client
ca.key      its private key. No process needs it; it signs new certificates (`--renew`)
server.pem, server.key   of every process of the cluster. It names the service, so it fits any host
client.pem, client.key   of a client. It names no service, so nobody can pass for a process of the cluster with it
"""

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.cluster.config import ConfigError, SecurityConfig

SERVER_NAME: str = SecurityConfig.model_fields["server_name"].default
HERE = ("localhost", "127.0.0.1", "::1")
CA_DAYS, DAYS = 3650, 365
SKEW = timedelta(minutes=5)  # a host whose clock is behind ours must accept a new certificate, too


@dataclass(frozen=True, slots=True)
class Pair:
    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def cert_pem(self) -> bytes:
        return self.cert.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        plain = serialization.NoEncryption()
        return self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


@dataclass(frozen=True, slots=True)
class Authority:
    pair: Pair

    @classmethod
    def new(cls) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Baton test authority")
        draft = (
            _draft(name, name, key, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(Pair(draft.sign(key, hashes.SHA256()), key))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises OSError and ConfigError."""
        try:
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
            cert = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{folder}: ca.pem and ca.key cannot be read: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
            raise ConfigError(f"{folder}: ca.key is not the key of ca.pem")
        return cls(Pair(cert, key))

    def issue(self, name: str, server: bool, hosts: Iterable[str] = HERE) -> Pair:
        """A certificate for a process (`server`), which is a client of others, too, or for a client only."""
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if server else ())]
        draft = (
            _draft(_name(name), self.pair.cert.subject, key, DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.pair.key.public_key()), critical=False)
        )
        if server:
            draft = draft.add_extension(x509.SubjectAlternativeName([_alternative(each) for each in (name, *hosts)]), critical=False)
        return Pair(draft.sign(self.pair.key, hashes.SHA256()), key)


def make(folder: Path, renew: bool) -> None:
    """Raises ConfigError and OSError. `renew`: the authority stays; a cluster that runs takes the new certificates without a restart."""
    if renew:
        authority = Authority.read(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if present := [name for name in _files() if (folder / name).exists()]:
            raise ConfigError(
                f"{folder} already holds {', '.join(present)}; choose another folder, or replace the certificates with --renew"
            )
        authority = Authority.new()
    write(folder, authority, authority.issue(SERVER_NAME, server=True), authority.issue("baton client", server=False))


def write(folder: Path, authority: Authority, server: Pair, client: Pair) -> None:
    """Each file appears whole, keys before certificates. Raises OSError."""
    for name, pair in (("ca", authority.pair), ("server", server), ("client", client)):
        _write(folder / f"{name}.key", pair.key_pem(), 0o600)
        _write(folder / f"{name}.pem", pair.cert_pem(), 0o644)


def advice(folder: Path) -> str:
    """The lines that a person needs next."""
    at = folder.resolve()
    return f"""made in {at}, valid for {DAYS} days: for trying, and for a network that you trust with ca.key

start a cluster:
  baton up --security.tls-cert {at}/server.pem --security.tls-key {at}/server.key --security.tls-ca {at}/ca.pem
ask it from another machine, with client.pem, client.key and ca.pem from this folder:
  baton generate "Once upon a time" --address HOST:8470 --ca ca.pem --cert client.pem --key client.key --server-name {SERVER_NAME}
replace the certificates while it runs:
  baton certs {at} --renew"""


def _files() -> list[str]:
    return [f"{name}.{end}" for name in ("ca", "server", "client") for end in ("pem", "key")]


def _write(path: Path, data: bytes, mode: int) -> None:
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    new.replace(path)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _draft(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number(), now - SKEW, now + timedelta(days))


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
