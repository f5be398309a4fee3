"""Certificates and node keys for trials: a private CA, the coordinator's and the members' certificates.

They expire after a month and their keys lie unprotected in a folder: for real use, have your own CA sign.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from oneflare.errors import ConfigError
from oneflare.upload.signing import check_name

DAYS = 30
AUTHORITY = "OneFlare trial CA"
LOOPBACK_NAME = "localhost"
"""The name under which the proxy knows the SuperLink; nginx checks names, not addresses, against a certificate."""


@dataclass(frozen=True)
class Certificates:
    """Where the files are."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.folder / "superlink.crt"

    @property
    def key(self) -> Path:
        return self.folder / "superlink.key"

    def member(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def member_key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def node(self, name: str) -> Path:
        return self.folder / f"{name}.node"

    def node_public(self, name: str) -> Path:
        return self.folder / f"{name}.node.pub"


def make_certificates(folder: Path, hosts: Sequence[str], members: Sequence[str] = ()) -> Certificates:
    """hosts: names or addresses under which members reach the coordinator. Existing files are never overwritten."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError("making certificates needs cryptography; pip install 'oneflare[flower]'") from None
    files = Certificates(folder)
    for name in members:
        if check_name(name) in ("ca", "superlink"):
            raise ConfigError(f"'{name}' is the name of another file in {folder}; choose another for the member")
    authority_key = ec.generate_private_key(ec.SECP384R1())
    name = _name(AUTHORITY)
    authority = (
        _builder(name, name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    _write(files.authority, _signed(authority, authority_key))
    server = x509.ExtendedKeyUsageOID.SERVER_AUTH
    names = list(dict.fromkeys([*hosts, LOOPBACK_NAME, "127.0.0.1"]))
    _issue(files.certificate, files.key, authority_key, hosts[0], server, names)
    for member in members:
        client = x509.ExtendedKeyUsageOID.CLIENT_AUTH
        _issue(files.member(member), files.member_key(member), authority_key, member, client)
        make_node_key(files, member)
    return files


def _issue(
    certificate: Path, private: Path, authority: Any, subject: str, purpose: Any, hosts: Sequence[str] = ()
) -> None:
    """A new key and a certificate for it that serves one purpose, for the server or for a client."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    builder = (
        _builder(_name(subject), _name(AUTHORITY), key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    _write(certificate, _signed(builder, authority))
    _write(private, _private(key), secret=True)


def make_node_key(files: Certificates, name: str) -> None:
    """What `ssh-keygen -t ecdsa -b 384` makes: the private key stays with the node, the public one is registered."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    _write(files.node(name), private, secret=True)
    _write(files.node_public(name), key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def _name(text: str) -> Any:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _builder(subject: Any, issuer: Any, key: Any) -> Any:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=DAYS))
    )


def _usage(*, signs_certificates: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(text: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _signed(builder: Any, key: Any) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM))


def _private(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if secret else 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except FileExistsError:
        raise ConfigError(f"{path} exists and is not overwritten; choose another folder") from None
