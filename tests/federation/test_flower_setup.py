"""What a deployment needs before it runs: certificates, node keys, the app folder, the commands that make them."""

from __future__ import annotations

import ssl
import stat
import subprocess
import sys

import pytest

from oneflare.simulation.engines.flower import require_flower

require_flower()

from oneflare.errors import ConfigError  # noqa: E402
from oneflare.federation.flower.asking import DEFAULTS, Settings  # noqa: E402
from oneflare.federation.flower.certificates import make_certificates  # noqa: E402
from oneflare.federation.flower.template import write_app  # noqa: E402


def test_the_certificate_holds_for_its_hosts_under_its_own_authority_only(tmp_path):
    ours = make_certificates(tmp_path / "ours", ["127.0.0.1", "superlink.example"], ["north"])
    other = make_certificates(tmp_path / "other", ["127.0.0.1"])
    for files, host, good in [
        (ours, "127.0.0.1", True),
        (ours, "superlink.example", True),
        (ours, "elsewhere.example", False),
        (other, "127.0.0.1", False),
    ]:
        assert shakes_hands(ours, files.authority, host) is good, host
    for secret in (ours.key, ours.node("north")):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="is not overwritten"):
        make_certificates(tmp_path / "ours", ["127.0.0.1"])


def shakes_hands(server_files, authority, host: str) -> bool:
    """A TLS handshake in memory."""
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(server_files.certificate, server_files.key)
    trusting = ssl.create_default_context(cafile=str(authority))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server, server_hostname=host)
    server = served.wrap_bio(to_server, to_client, server_side=True)
    done = set()
    for _ in range(10):
        for side in (client, server):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
    return len(done) == 2


def test_node_keys_are_what_supernode_and_registration_read(tmp_path):
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    files = make_certificates(tmp_path, ["127.0.0.1"], ["north"])
    private = load_ssh_private_key(files.node("north").read_bytes(), None)
    public = load_ssh_public_key(files.node_public("north").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == public
    assert private.curve.name == "secp384r1"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_accepts_the_app_folder_and_its_settings_are_ours(tmp_path):
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    path = write_app(tmp_path / "digits-app", tmp_path / "federation", 2)
    config, warnings = load_and_validate(path)
    assert warnings == []
    settings = config["tool"]["flwr"]["app"]["config"]
    assert settings.keys() == DEFAULTS.keys()
    assert {key: settings[key] for key in DEFAULTS if key not in ("federation", "min-members")} == {
        key: value for key, value in DEFAULTS.items() if key not in ("federation", "min-members")
    }
    assert Settings.of(settings).min_members == 2
    assert Settings.of(settings).federation == tmp_path / "federation"
    assert len(build_fab_from_disk(tmp_path / "digits-app")) < 5000
    with pytest.raises(ConfigError, match="exists"):
        write_app(tmp_path / "digits-app", tmp_path)
    with pytest.raises(ConfigError, match="cannot be an app's name"):
        write_app(tmp_path / "1_app", tmp_path)


def test_starting_does_not_load_flower():
    code = (
        "import sys, oneflare.cli.main; print([name for name in sys.modules if name.split('.')[0] in ('flwr', 'ray')])"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == "[]"
