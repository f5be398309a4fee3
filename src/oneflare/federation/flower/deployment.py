"""A whole deployment on one machine for trials and tests: SuperLink, proxy, SuperNodes and one `flwr run`.

Every process gets a free port of the loopback interface, its own Flower home and its own log file, and is ended by its
process group. On several machines the same commands are typed by hand: docs/flower.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from oneflare.client.observer import Observer
from oneflare.core.files import write_text
from oneflare.errors import ConfigError, RunError
from oneflare.federation.flower.certificates import Certificates
from oneflare.federation.flower.nodes import Bound, bind_node, read_nodes, registered_number
from oneflare.federation.flower.pinned import Seat
from oneflare.federation.flower.proxy import ProxyAddresses, start_command, write_proxy
from oneflare.federation.flower.template import app_digest
from oneflare.simulation.engines.flower import QUIET, require_flower

HOST = "127.0.0.1"
CONNECTION = "here"
START_SECONDS = 90.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"^INFO *: *")


@dataclass(frozen=True)
class Protection:
    """What closes a deployment to strangers."""

    certificates: Certificates
    federation: Path
    """folder with federation.yaml, where bindings of nodes to members are kept"""
    app: Path
    """folder of the one app that SuperNodes run"""


@dataclass
class Deployment:
    """Use as a context: leaving it ends every process it started.

    closed: TLS, a proxy that admits members only, nodes bound to members, one pinned app; None: none of these, and
    whoever reaches the port can run code here, so only for a rehearsal on the loopback interface.
    """

    folder: Path
    closed: Protection | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0
    """of the SuperLink"""
    door: int = 0
    """of the proxy, where members connect"""

    def __enter__(self) -> Deployment:
        require_flower()
        if self.closed is not None and shutil.which("nginx") is None:
            raise ConfigError("nginx is not installed, and a closed deployment needs it; apt-get install nginx-light")
        self.port, self.door = free_port(), free_port()
        secure = self._certificates
        trust = f'root-certificates = "{secure.authority.resolve()}"' if secure is not None else "insecure = true"
        write_text(
            self.folder / "flwr" / "config.toml",
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{HOST}:{self.port}"\n{trust}\n',
        )
        try:
            self._start_superlink()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _certificates(self) -> Certificates | None:
        return None if self.closed is None else self.closed.certificates

    def _start_superlink(self) -> None:
        words = ["flower-superlink", "--host", HOST, "--port", str(self.port)]
        words.append("--disable-runtime-dependency-installation")
        secure = self._certificates
        if secure is None:
            words.append("--insecure")
        else:
            words += ["--ssl-ca-certfile", str(secure.authority)]
            words += ["--ssl-certfile", str(secure.certificate), "--ssl-keyfile", str(secure.key)]
            words.append("--enable-supernode-auth")
        self._start("superlink", words)
        self._until(self._healthy, "superlink")

    def _healthy(self) -> bool:
        secure = self._certificates
        context = None if secure is None else ssl.create_default_context(cafile=str(secure.authority))
        scheme = "http" if secure is None else "https"
        try:
            with urllib.request.urlopen(f"{scheme}://{HOST}:{self.port}/health", timeout=2, context=context) as page:
                return bool(page.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def start_node(self, name: str, config: Mapping[str, Any]) -> None:
        """A member's SuperNode with its `--node-config`; where the deployment is closed, it is registered first."""
        if self.closed is None:
            words = ["flower-supernode", "--superlink", f"{HOST}:{self.port}", "--host", HOST]
            words += ["--port", str(free_port()), "--node-config", _pairs(config), "--insecure"]
            self._start(name, words)
            return
        self.register(name, self.closed.certificates.node_public(name))
        self.start_seat(name, self.seat(name), config)

    def seat(self, name: str) -> Seat:
        """What a member uses to connect: its own files, and the digest of our app."""
        assert self.closed is not None
        files = self.closed.certificates
        own = (files.authority, files.member(name), files.member_key(name), files.node(name))
        return Seat(f"{HOST}:{self.door}", *own, app_digest(self.closed.app), free_port())

    def start_seat(self, process: str, seat: Seat, config: Mapping[str, Any]) -> None:
        """A SuperNode with these files, whether or not they belong together; process: the name of its log."""
        words = ["oneflare", "flower", "node", "--superlink", seat.superlink, "--authority", str(seat.authority)]
        words += ["--certificate", str(seat.certificate), "--certificate-key", str(seat.certificate_key)]
        words += ["--node-key", str(seat.node_key), "--app", seat.app, "--port", str(seat.port)]
        self._start(process, [*words, "--node-config", _pairs(config)])

    def register(self, member: str, public: Path) -> Bound:
        """Bind a node key to a member, and let the proxy know."""
        assert self.closed is not None

        def tell(key: Path) -> int:
            return registered_number(self.flwr("supernode", "register", str(key), CONNECTION, "--format", "json"))

        bound = bind_node(self.closed.federation, member, public, tell)
        door = ProxyAddresses(f"{HOST}:{self.door}", f"{HOST}:{self.port}")
        nodes = read_nodes(self.closed.federation)
        configuration = write_proxy(self.folder / "proxy", door, self.closed.certificates, nodes)
        if "proxy" in self.processes:
            self.processes["proxy"].send_signal(signal.SIGHUP)
        else:
            self._start("proxy", start_command(configuration))
            self._until(lambda: _listening(self.door), "proxy")
        return bound

    def _until(self, ready: Callable[[], bool], process: str) -> None:
        end = time.monotonic() + START_SECONDS
        while not ready():
            if self.processes[process].poll() is not None or time.monotonic() > end:
                raise RunError(f"the {process} did not start; see {self.log(process)}")
            time.sleep(0.2)

    def run(self, app: Path, config: Mapping[str, Any], timeout: float, observer: Observer | None = None) -> str:
        """`flwr run`: start the round, pass its log on, and return how it ended ("finished:completed" is a success)."""
        words = _pairs(config if self.closed is not None else {"nodes": "any", **config})
        started = json.loads(self.flwr("run", str(app), CONNECTION, "--format", "json", "--run-config", words))
        if not started.get("success"):
            raise RunError(f"flwr run was refused: {started.get('error-message', started)}")
        number = str(started["run-id"])
        end = time.monotonic() + timeout
        self._follow(number, timeout, observer or Observer())
        while not (status := self._status(number)).startswith("finished"):
            if time.monotonic() > end:
                raise RunError(f"the round did not end within {timeout:g} s (status {status}); see {self.folder}")
            time.sleep(2)
        return status

    def _status(self, number: str) -> str:
        listing = json.loads(self.flwr("list", CONNECTION, "--format", "json"))
        return next(str(run["status"]) for run in listing["runs"] if str(run["run-id"]) == number)

    def _follow(self, number: str, timeout: float, observer: Observer) -> None:
        """Pass on the lines of `flwr log` until the round ends or the time is up."""
        process = subprocess.Popen(
            [_program("flwr"), "log", number, CONNECTION, "--stream"],
            env=self._environment("flwr"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timer = threading.Timer(timeout, lambda: _end(process, signal.SIGKILL))
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    text = _LEVEL.sub("", _COLOUR.sub("", line.decode(errors="replace")).strip())
                    if text:
                        observer.note(text)
        finally:
            timer.cancel()
            _end(process, signal.SIGTERM)

    def flwr(self, *words: str) -> str:
        outcome = subprocess.run(
            [_program("flwr"), *words], env=self._environment("flwr"), capture_output=True, text=True, timeout=180
        )
        if outcome.returncode != 0:
            text = (outcome.stdout + outcome.stderr).strip()
            raise RunError(f"flwr {' '.join(words[:2])} failed: {' '.join(text.split())[-300:]}")
        return outcome.stdout

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def kill(self, name: str) -> None:
        """End a process and its children at once, as a power failure would."""
        _end(self.processes.pop(name), signal.SIGKILL)

    def close(self) -> None:
        """Nodes first, all at once, so that none looks for a SuperLink that has gone."""
        nodes = [self.processes.pop(name) for name in list(self.processes) if name not in ("superlink", "proxy")]
        for process in nodes:
            _signal(process, signal.SIGTERM)
        for process in [*nodes, *(self.processes.pop(name) for name in list(self.processes))]:
            _end(process, signal.SIGTERM)

    def _start(self, name: str, words: Sequence[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [_program(words[0]), *words[1:]],
                env=self._environment(name),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, name: str) -> dict[str, str]:
        home = self.folder / name if name == "flwr" else self.folder / f"{name}.home"
        threads = {"OMP_NUM_THREADS": "1"}
        programs = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        return os.environ | QUIET | threads | programs | {"FLWR_HOME": str(home.resolve())}


def _program(name: str) -> str:
    own = Path(sys.executable).parent / name
    return str(own) if own.exists() else shutil.which(name) or name


def _pairs(config: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the whole process group, which is ours: we made its leader."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal, insist after some seconds, and take along children that outlived their parent."""
    if process.poll() is None:
        _signal(process, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    _signal(process, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
