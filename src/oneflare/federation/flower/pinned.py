"""A SuperNode that runs only the app with the pinned digest, and connects with a client certificate.

Flower's `--trusted-entities` accepts only apps that its public Hub delivered with a signature; an app of one's own,
signed or not, is refused. Here the digest decides: this process makes a key that never leaves its memory, is the one
trusted entity, and signs what the SuperLink delivers if, and only if, its SHA-256 is the pinned one and it holds no
code of its own. Flower's check therefore stays in force: where this module is bypassed, every app is refused.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import ssl
import sys
import tempfile
import time
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflare.core.files import write_text
from oneflare.errors import ConfigError
from oneflare.federation.flower.template import COMPONENTS
from oneflare.simulation.engines.flower import require_flower

ENTITY = "pinned"
CONTENT = {"pyproject.toml", ".info/CONTENT"}
log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Seat:
    """What one member's SuperNode needs."""

    superlink: str
    """address:port of the coordinator's proxy"""
    authority: Path
    certificate: Path
    certificate_key: Path
    node_key: Path
    app: str
    """SHA-256 of the one app that may run, in hexadecimal"""
    port: int = 9094
    """of the SuperNode's own interface on 127.0.0.1"""

    def check(self) -> None:
        for path in (self.authority, self.certificate, self.certificate_key, self.node_key):
            if not path.is_file():
                raise ConfigError(f"no file at {path}; the coordinator's certificates and your own node key are needed")
        if len(self.app) != 64 or set(self.app) - set("0123456789abcdef"):
            raise ConfigError(
                f"--app {self.app:.80}: an app's digest has 64 hexadecimal digits; the coordinator reads it with "
                "`oneflare flower digest APP`"
            )
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self.certificate, self.certificate_key)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{self.certificate} and {self.certificate_key} do not fit together ({error})") from None


def run_node(seat: Seat, node_config: str) -> None:
    """Run a SuperNode until it is stopped."""
    seat.check()
    require_flower()
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.cli.flower_supernode import flower_supernode

    voucher = Voucher(seat.app)
    with tempfile.TemporaryDirectory(prefix="oneflare-") as folder:
        trusted = Path(folder) / "trusted.yaml"
        write_text(trusted, json.dumps({ENTITY: voucher.public}))
        fleet_http_connection.FleetHttpClient = fleet_client(seat, voucher)  # type: ignore[misc]
        sys.argv = ["flower-supernode", "--superlink", seat.superlink, "--root-certificates", str(seat.authority)]
        sys.argv += ["--auth-supernode-private-key", str(seat.node_key), "--trusted-entities", str(trusted)]
        sys.argv += ["--host", "127.0.0.1", "--port", str(seat.port), "--node-config", node_config]
        flower_supernode()


class Voucher:
    """Signs the pinned app for the SuperNode of this process."""

    def __init__(self, digest: str) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self.digest = digest
        self._key = Ed25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()

    def vouch(self, fab: Any) -> None:
        """Replace what the SuperLink says about an app (Flower's `Fab` message) by what this member says about it."""
        fab.verifications.clear()
        reason = self.refusal(fab.content, fab.hash_str)
        if reason is not None:
            log.error("refused to run the app that the coordinator sent: %s", reason)
            return
        moment = int(time.time())
        signature = self._key.sign(moment.to_bytes(8, "big") + hashlib.sha256(fab.content).digest())
        fab.verifications["valid_license"] = ENTITY
        fab.verifications[ENTITY] = json.dumps(
            {"signed_at": moment, "signature": base64.urlsafe_b64encode(signature).decode()}
        )

    def refusal(self, content: bytes, claimed: str) -> str | None:
        """Why an app may not run here; None: it may."""
        digest = hashlib.sha256(content).hexdigest()
        if not digest == claimed == self.digest:
            return f"its digest is {digest}, and --app pins {self.digest}"
        return foreign_code(content)


def foreign_code(content: bytes) -> str | None:
    """What an app holds besides the names of OneFlare's two modules; None: nothing."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = set(archive.namelist())
            project = tomllib.loads(archive.read("pyproject.toml").decode()) if names == CONTENT else {}
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return "it is not a Flower app bundle"
    if names != CONTENT:
        return f"it holds files of its own: {', '.join(sorted(names - CONTENT))[:200]}"
    if project.get("tool", {}).get("flwr", {}).get("app", {}).get("components") != COMPONENTS:
        return "it runs other modules than OneFlare's"
    return None


def fleet_client(seat: Seat, voucher: Voucher) -> type[Any]:
    """Flower's client of the Fleet API with a client certificate, and with our word on every app it fetches."""
    from flwr.supernode.fleet_http_client import FleetHttpClient

    class PinnedFleetClient(FleetHttpClient):
        def __init__(self, base_url: str, *, verify: Any, **more: Any) -> None:
            if not isinstance(verify, ssl.SSLContext):
                raise ConfigError("this version of Flower sets up TLS in another way; use 1.41")
            verify.load_cert_chain(seat.certificate, seat.certificate_key)
            super().__init__(base_url, verify=verify, **more)

        def GetFab(self, request: Any) -> Any:
            response = super().GetFab(request)
            voucher.vouch(response.fab)
            return response

    return PinnedFleetClient
