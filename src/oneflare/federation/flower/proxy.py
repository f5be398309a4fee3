"""An nginx configuration for the SuperLink that admits only the members' SuperNodes.

A SuperLink offers Fleet (for SuperNodes), Control (for `flwr`, without a login) and Runtime on one port. It listens
on the loopback interface; nginx listens for the members, asks each for a client certificate, and passes only requests
that (1) come with the certificate of a member and the node key bound to this member, (2) go to one of Fleet's paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oneflare.core.files import write_text
from oneflare.errors import ConfigError
from oneflare.federation.flower.certificates import LOOPBACK_NAME, Certificates
from oneflare.federation.flower.nodes import Bound, header_of

FLEET = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
"""What a registered SuperNode calls. `register-node` and `unregister-node` are the coordinator's, so they are shut."""

REFUSED = "this door is for the SuperNodes of members, and this path is none of theirs"
STRANGER = "the certificate and the node key are not those of one member of this federation"
NOBODY = "this door asks for the client certificate of a member, and got none that its CA signed"
_PLAIN = re.compile(r"[\w./+@%=,:-]+")
_LOOPBACK = re.compile(r"(127(\.\d{1,3}){3}|\[::1\]|localhost):\d{1,5}")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}")


@dataclass(frozen=True)
class ProxyAddresses:
    """Where the proxy listens, and where the SuperLink does."""

    listen: str
    """address:port that members reach"""
    superlink: str
    """127.0.0.1:port"""


def write_proxy(folder: Path, door: ProxyAddresses, certificates: Certificates, nodes: Mapping[str, Bound]) -> Path:
    """Write nginx.conf, and the folders nginx needs, so that an ordinary user can run it; an older file is replaced."""
    if not nodes:
        raise ConfigError("no member has a node yet; register each with `oneflare flower register`")
    for address in (door.listen, door.superlink):
        if not _ADDRESS.fullmatch(address):
            raise ConfigError(f"{address}: give an address and a port, such as 0.0.0.0:8443")
    if not _LOOPBACK.fullmatch(door.superlink):
        raise ConfigError(f"{door.superlink}: the SuperLink must listen on 127.0.0.1, because its Control has no login")
    place = folder.resolve()
    paths = [place, *(path.resolve() for path in (certificates.authority, certificates.certificate, certificates.key))]
    for path in paths:
        if not _PLAIN.fullmatch(str(path)):
            raise ConfigError(f"{path}: nginx cannot read a path with spaces or quotes; rename it")
    for path in paths[1:]:
        if not path.is_file():
            raise ConfigError(f"no file at {path}; `oneflare flower certificates` makes it")
    (place / "temporary").mkdir(parents=True, exist_ok=True)
    write_text(place / "nginx.conf", _configuration(place, door, paths[1:], nodes))
    return place / "nginx.conf"


def start_command(configuration: Path) -> list[str]:
    """How the proxy is started in the foreground; `-s reload` and `-s stop` at the end talk to a running one."""
    return ["nginx", "-p", str(configuration.parent), "-c", str(configuration)]


def _configuration(place: Path, door: ProxyAddresses, files: list[Path], nodes: Mapping[str, Bound]) -> str:
    authority, certificate, key = files
    members = "\n".join(f'        "CN={name} {header_of(nodes[name].key)}" {name};' for name in sorted(nodes))
    fleet = "\n".join(
        f"        location = /v1/fleet/{name} {{ proxy_pass https://{door.superlink}/v1/fleet/{name}; }}"
        for name in FLEET
    )
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"    {kind}_temp_path {place}/temporary/{kind};" for kind in kinds)
    return f"""\
# Written by `oneflare flower proxy`, which replaces it when members change.
daemon off;
worker_processes 1;
pid {place}/nginx.pid;
error_log {place}/error.log;
events {{}}
http {{
    server_tokens off;
    access_log {place}/access.log;
{temporary}
    map_hash_bucket_size 1024;
    # The subject of the client certificate and the node key of the same member, both at once.
    map "$ssl_client_s_dn $http_flwr_public_key" $member {{
        default "";
{members}
    }}
    server {{
        listen {door.listen} ssl;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_client_certificate {authority};
        ssl_verify_client on;
        client_max_body_size 64m;
        client_header_timeout 20s;
        client_body_timeout 60s;
        proxy_http_version 1.1;
        # Uploads pass through and are never on this disk.
        proxy_request_buffering off;
        proxy_buffering off;
        proxy_read_timeout 120s;
        proxy_set_header flwr-public-key $http_flwr_public_key;
        proxy_ssl_verify on;
        proxy_ssl_trusted_certificate {authority};
        proxy_ssl_name {LOOPBACK_NAME};
        default_type application/json;
        if ($member = "") {{ {_answer(400, STRANGER)} }}
        if ($request_method != POST) {{ return 405; }}
        error_page 495 496 = @nobody;
        location @nobody {{ {_answer(400, NOBODY)} }}
        location / {{ {_answer(403, REFUSED)} }}
{fleet}
    }}
}}
"""


def _answer(status: int, text: str) -> str:
    """A refusal in the form that `flwr` and SuperNodes print.

    A SuperNode takes 403 for the end of a run and stays without a word; 400 ends it with the text of the refusal.
    """
    return f"return {status} '{json.dumps({'code': status, 'detail': text})}';"
