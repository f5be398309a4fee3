"""The door of a SuperLink: what the written nginx configuration lets through, and which app a SuperNode runs."""

from __future__ import annotations

import hashlib
import http.client
import http.server
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest

from flower_parts import MEMBERS, make_charter
from oneflare.simulation.engines.flower import require_flower

require_flower()

from flwr.proto.fab_pb2 import Fab  # noqa: E402

from oneflare.errors import ConfigError, RunError  # noqa: E402
from oneflare.federation.flower.certificates import make_certificates  # noqa: E402
from oneflare.federation.flower.deployment import free_port  # noqa: E402
from oneflare.federation.flower.nodes import bind_node, header_of, read_node_key, read_nodes  # noqa: E402
from oneflare.federation.flower.pinned import ENTITY, Seat, Voucher, fleet_client  # noqa: E402
from oneflare.federation.flower.proxy import (  # noqa: E402
    FLEET,
    NOBODY,
    REFUSED,
    STRANGER,
    ProxyAddresses,
    start_command,
    write_proxy,
)
from oneflare.federation.flower.template import app_digest, write_app  # noqa: E402


@pytest.fixture(scope="module")
def office(tmp_path_factory):
    """A federation whose three members have certificates and registered nodes 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("office")
    make_charter(folder)
    files = make_certificates(folder / "certificates", ["127.0.0.1"], MEMBERS)
    for number, name in enumerate(MEMBERS, start=1):
        bind_node(folder / "federation", name, files.node_public(name), lambda _, node=number: node)
    return folder, files


def test_the_written_configuration_passes_fleets_paths_and_no_other(office):
    from flwr.superlink.routers.fleet.router import router

    folder, files = office
    nodes = read_nodes(folder / "federation")
    path = write_proxy(folder / "written", ProxyAddresses("0.0.0.0:8443", "127.0.0.1:8000"), files, nodes)
    text = path.read_text()
    passed = re.findall(r"location = (\S+) \{ proxy_pass https://127\.0\.0\.1:8000(\S+); \}", text)
    assert {given for given, _ in passed} == {f"/v1/fleet/{name}" for name in FLEET}
    assert all(given == target for given, target in passed)
    assert text.count("proxy_pass") == len(FLEET)
    assert {route.path for route in router.routes} - {given for given, _ in passed} == {
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
    }
    assert "ssl_verify_client on;" in text
    assert re.search(rf"location / {{ return 403 '[^']*{REFUSED}[^']*'; }}", text)
    for name, bound in nodes.items():
        assert f'"CN={name} {header_of(bound.key)}" {name};' in text


def test_the_key_in_the_configuration_is_the_header_that_a_supernode_sends(office):
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.protobuf.client import ProtobufRequestContext
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    _, files = office
    private = load_ssh_private_key(files.node("north").read_bytes(), None)
    request = httpx.Request("POST", "https://localhost/v1/fleet/get-run")
    context = ProtobufRequestContext("", Fab(), request)
    NodeAuthHttpInterceptor(private, private.public_key()).intercept(context, lambda _: httpx.Response(200))
    assert request.headers["flwr-public-key"] == header_of(read_node_key(files.node_public("north")))


class Upstream(http.server.BaseHTTPRequestHandler):
    """Stands where the SuperLink stands, and writes down what reaches it."""

    seen: list[str]

    def do_POST(self) -> None:
        self.seen.append(self.path)
        body = self.rfile.read(int(self.headers.get("content-length", 0))) or b"ok"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words) -> None:
        del words


@pytest.fixture(scope="module")
def door(office):
    """A running nginx with the written configuration, and the paths that came through it."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed; apt-get install nginx-light")
    folder, files = office
    seen: list[str] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Upstream,), {"seen": seen}))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = free_port()
    addresses = ProxyAddresses(f"127.0.0.1:{port}", f"127.0.0.1:{server.server_port}")
    path = write_proxy(folder / "proxy", addresses, files, read_nodes(folder / "federation"))
    process = subprocess.Popen(start_command(path), stdout=subprocess.DEVNULL)
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.05)
        yield port, seen
    finally:
        process.terminate()
        process.wait(20)
        server.shutdown()
        server.server_close()


def knock(files, port: int, path: str, certificate: str | None = "north", key: str = "north", **more):
    """One request with a member's certificate and node key; returns the status and the text of the answer."""
    context = ssl.create_default_context(cafile=str(files.authority))
    if certificate is not None:
        context.load_cert_chain(files.member(certificate), files.member_key(certificate))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
    method, body = more.get("method", "POST"), more.get("body", b"")
    headers = {"flwr-public-key": header_of(read_node_key(files.node_public(key)))} if key else {}
    connection.putrequest(method, path, skip_accept_encoding=True)
    for name, value in (headers | {"content-length": str(len(body))}).items():
        connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def refusal(answer: tuple[int, str]) -> tuple[int, str]:
    """The status, and the sentence that Flower's own programs read from the answer."""
    from flwr.supercore.error import FlowerError

    error = FlowerError.from_json(answer[1])
    assert error is not None, answer
    assert error.code == answer[0]
    return answer[0], error.message


def test_nginx_passes_a_members_fleet_calls(office, door):
    _, files = office
    port, seen = door
    seen.clear()
    for name in FLEET:
        assert knock(files, port, f"/v1/fleet/{name}") == (200, "ok")
    assert seen == [f"/v1/fleet/{name}" for name in FLEET]
    chunk = "x" * (6 << 20)
    assert knock(files, port, "/v1/fleet/push-object", body=chunk.encode()) == (200, chunk)


def test_nginx_passes_nothing_else_whoever_asks(office, door):
    from flwr.superlink.routers.control import router as control

    _, files = office
    port, seen = door
    seen.clear()
    paths = [route.path for route in control.routes]
    assert "/v1/control/start-run" in paths
    paths += ["/v1/fleet/register-node", "/v1/runtime/acquire-task", "/health", "/docs", "/"]
    paths += ["/v1/fleet/../control/start-run", "/v1/fleet/get-run/../../control/start-run", "//v1/control/start-run"]
    paths += ["/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/get-run/", "/v1/fleet/get-run/x", "/V1/fleet/get-run"]
    for path in paths:
        assert refusal(knock(files, port, path)) == (403, REFUSED), path
    for certificate, key in (("north", "south"), ("north", "")):
        assert refusal(knock(files, port, "/v1/fleet/get-run", certificate, key)) == (400, STRANGER)
    assert knock(files, port, "/v1/fleet/get-run", method="GET")[0] == 405
    for path in ("/v1/fleet/get-run", "/v1/control/start-run"):
        assert refusal(knock(files, port, path, None)) == (400, NOBODY)
    assert seen == []


def test_nginx_refuses_certificates_of_another_authority_and_of_a_server(office, door, tmp_path):
    _, files = office
    port, seen = door
    seen.clear()
    other = make_certificates(tmp_path / "other", ["127.0.0.1"], ["north"])
    for certificate, key in ((other.member("north"), other.member_key("north")), (files.certificate, files.key)):
        context = ssl.create_default_context(cafile=str(files.authority))
        context.load_cert_chain(certificate, key)
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
        headers = {"flwr-public-key": header_of(read_node_key(files.node_public("north")))}
        connection.request("POST", "/v1/fleet/get-run", b"", headers)
        answer = connection.getresponse()
        assert refusal((answer.status, answer.read().decode())) == (400, NOBODY)
        connection.close()
    assert seen == []


def test_mistakes_when_a_door_is_written_or_a_node_bound(office, tmp_path):
    folder, files = office
    federation = folder / "federation"
    nodes = read_nodes(federation)
    with pytest.raises(ConfigError, match=r"must listen on 127\.0\.0\.1"):
        write_proxy(tmp_path, ProxyAddresses("0.0.0.0:8443", "0.0.0.0:8000"), files, nodes)
    with pytest.raises(ConfigError, match=r"must listen on 127\.0\.0\.1"):
        write_proxy(tmp_path, ProxyAddresses("0.0.0.0:8443", "127.example.org:8000"), files, nodes)
    with pytest.raises(ConfigError, match="give an address and a port"):
        write_proxy(tmp_path, ProxyAddresses("8443", "127.0.0.1:8000"), files, nodes)
    with pytest.raises(ConfigError, match="no member has a node yet"):
        write_proxy(tmp_path, ProxyAddresses("0.0.0.0:8443", "127.0.0.1:8000"), files, {})
    with pytest.raises(ConfigError, match="this node key is already south's"):
        bind_node(federation, "north", files.node_public("south"), lambda _: 9)
    with pytest.raises(ConfigError, match="'nroth' is not a member"):
        bind_node(federation, "nroth", files.node_public("north"), lambda _: 9)
    with pytest.raises(ConfigError, match="is no public node key"):
        bind_node(federation, "north", files.node("north"), lambda _: 9)
    assert read_nodes(federation) == nodes
    (tmp_path / "nodes.json").write_text('{"north": {"node": "x"}}')
    with pytest.raises(RunError, match="is damaged"):
        read_nodes(tmp_path)


def test_the_command_writes_the_door_without_removed_members(office, tmp_path):
    from typer.testing import CliRunner

    from oneflare.cli.flower import flower
    from oneflare.core.files import write_json

    folder, files = office
    federation = tmp_path / "federation"
    shutil.copytree(folder / "federation", federation)
    write_json(federation / "state.json", {"removed": {"south": "2027-01-01T00:00:00+00:00"}})
    words = ["proxy", str(federation), str(tmp_path / "proxy"), "--certificates", str(files.folder)]
    assert CliRunner().invoke(flower, words).exit_code == 0
    text = (tmp_path / "proxy" / "nginx.conf").read_text()
    assert '"CN=north ' in text
    assert '"CN=south ' not in text


def bundle(folder: Path, **files: str) -> bytes:
    from flwr.cli.build import build_fab_from_disk

    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return build_fab_from_disk(folder)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_runs_the_pinned_app_and_no_other(tmp_path):
    from flwr.common.serde import fab_from_proto
    from flwr.supernode.start_client_internal import _verify_fab

    ours = write_app(tmp_path / "ours", tmp_path / "federation").parent
    voucher = Voucher(app_digest(ours))
    trusted = {ENTITY: voucher.public}

    def judged(content: bytes, claimed: str | None = None) -> tuple[bool, bool]:
        fab = Fab(hash_str=claimed or hashlib.sha256(content).hexdigest(), content=content)
        fab.verifications["valid_license"] = "Valid"
        voucher.vouch(fab)
        there = fab_from_proto(fab)
        return bool(there.verifications.get("valid_license")), _verify_fab(there, trusted)

    content = bundle(ours)
    assert judged(content) == (True, True)
    other = write_app(tmp_path / "other", tmp_path / "federation", 2).parent
    assert judged(bundle(other)) == (False, False)
    assert judged(bundle(other), voucher.digest) == (False, False)
    assert judged(content, "0" * 64) == (False, False)
    assert "pins" in str(voucher.refusal(b"", voucher.digest))


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_a_pinned_app_with_code_of_its_own_is_refused_too(tmp_path):
    app = write_app(tmp_path / "app", tmp_path / "federation").parent
    content = bundle(app, evil="import os")
    digest = hashlib.sha256(content).hexdigest()
    assert Voucher(digest).refusal(content, digest) == "it holds files of its own: evil.py"
    (app / "evil.py").unlink()
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("oneflare.federation.flower.client_app:app", "antigravity:app"))
    content = bundle(app)
    digest = hashlib.sha256(content).hexdigest()
    assert Voucher(digest).refusal(content, digest) == "it runs other modules than OneFlare's"
    digest = hashlib.sha256(b"no archive").hexdigest()
    assert Voucher(digest).refusal(b"no archive", digest) == "it is not a Flower app bundle"


def test_a_seat_is_checked_before_flower_starts(office):
    _, files = office
    own = (files.authority, files.member("north"), files.member_key("north"), files.node("north"))
    Seat("localhost:1", *own, "0" * 64).check()
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        Seat("localhost:1", *own, "abc").check()
    with pytest.raises(ConfigError, match="do not fit together"):
        Seat("localhost:1", own[0], own[1], files.member_key("south"), own[3], "0" * 64).check()
    with pytest.raises(ConfigError, match="no file at"):
        Seat("localhost:1", own[0] / "x", *own[1:], "0" * 64).check()
    client = fleet_client(Seat("localhost:1", *own, "0" * 64), Voucher("0" * 64))
    with pytest.raises(ConfigError, match="sets up TLS in another way"):
        client("https://localhost:1", verify=True)
    assert json.loads((office[0] / "federation" / "nodes.json").read_text())["north"]["node"] == "2"
