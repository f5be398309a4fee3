"""The table of Flower nodes: one node key and one node number for each member of the charter.

`nodes.json` in the federation's folder holds the bindings. The coordinator makes them when it registers a member's
node key; the proxy's configuration and the round are made from them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oneflare.core.files import exclusive, read_json, write_json
from oneflare.errors import ConfigError, RunError
from oneflare.federation.charter import read_charter
from oneflare.simulation.engines.flower import QUIET

FILE = "nodes.json"


@dataclass(frozen=True)
class Bound:
    """The node of one member."""

    node: int
    """the number that the SuperLink gave it"""
    key: str
    """its public key, as `ssh-keygen` writes it"""


def read_nodes(federation: Path) -> dict[str, Bound]:
    """member -> its node; empty if no node was registered."""
    path = federation / FILE
    if not path.exists():
        return {}
    content = read_json(path)
    try:
        nodes = {str(name): Bound(int(entry["node"]), str(entry["key"])) for name, entry in content.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RunError(f"{path} is damaged; delete it and register every member's node again") from None
    if len({bound.node for bound in nodes.values()}) != len(nodes):
        raise RunError(f"{path} gives one node to two members; delete it and register every member's node again")
    return nodes


def bind_node(federation: Path, member: str, key: Path, register: Callable[[Path], int]) -> Bound:
    """Register a member's node key with the SuperLink and write down whose it is.

    register: hands the file with the public key to the SuperLink and returns the node's number.
    """
    charter = read_charter(federation)
    charter.check_member(member)
    text = read_node_key(key)
    with exclusive(federation):
        nodes = read_nodes(federation)
        owner = next((name for name, bound in nodes.items() if bound.key == text and name != member), None)
        if owner is not None:
            raise ConfigError(f"{key}: this node key is already {owner}'s; each member needs its own")
        nodes[member] = Bound(register(key), text)
        write_json(federation / FILE, {name: {"node": str(b.node), "key": b.key} for name, b in nodes.items()})
    return nodes[member]


def read_node_key(path: Path) -> str:
    """A public node key without its comment; refuses what a SuperNode could not use."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        text = " ".join(path.read_text().split()[:2])
        key = load_ssh_public_key(text.encode())
    except (OSError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path}: is no public node key; `ssh-keygen -t ecdsa -b 384` makes NAME.node.pub")
    return text


def header_of(key: str) -> str:
    """A public node key as SuperNodes send it with every request, in the header `flwr-public-key`."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    public = load_ssh_public_key(key.encode())
    return b64encode(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).decode()


def registered_number(answer: str) -> int:
    """The node's number in what `flwr supernode register --format json` prints."""
    try:
        return int(json.loads(answer)["node-id"])
    except (KeyError, TypeError, ValueError):
        raise RunError(f"flwr did not register the node: {' '.join(answer.split())[-300:]}") from None


def register_with_flwr(key: Path, connection: str | None) -> int:
    """`flwr supernode register`, over the Control API; returns the node's number."""
    words = [str(Path(sys.executable).parent / "flwr"), "supernode", "register", str(key)]
    words += [] if connection is None else [connection]
    outcome = subprocess.run([*words, "--format", "json"], capture_output=True, text=True, env=os.environ | QUIET)
    return registered_number(outcome.stdout if outcome.stdout.strip() else outcome.stderr)
