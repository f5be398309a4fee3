"""`oneflare flower`: a federation on Flower, for its coordinator and its members, and a trial on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oneflare.cli.options import GROUP, Folder, Json, Quiet

if TYPE_CHECKING:
    from oneflare.federation.charter import Charter

flower = typer.Typer(help="Run a federation over a network with Flower.", **GROUP)

MinMembers = Annotated[
    int,
    typer.Option(
        "--min-members",
        min=0,
        help="Fuse nothing if fewer members than this are in the fusion. Uploads of the round count, and files that "
        "were taken in before it; removed members do not. 0 means all members of the charter that are not removed.",
    ),
]


@flower.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="APP", help="New folder for `flwr run`.")],
    federation: Annotated[
        Path, typer.Option("--federation", help="Folder with federation.yaml, on the SuperLink's machine.")
    ],
    min_members: MinMembers = 0,
) -> None:
    """Write the folder that `flwr run` takes, and print the digest by which members pin it.

    [bold]Example[/bold]

      oneflare flower init lungs-app --federation lungs --min-members 3
    """
    from oneflare.cli import show
    from oneflare.federation.flower.template import app_digest, write_app

    path = write_app(folder, federation, min_members)
    show.done(f"wrote {path}; start the SuperLink and the members' SuperNodes, then: flwr run {folder} CONNECTION")
    show.done(f"digest, for the members' --app: {app_digest(folder)}")


@flower.command("digest")
def digest(folder: Annotated[Path, typer.Argument(metavar="APP", help="Folder of `oneflare flower init`.")]) -> None:
    """Print the digest of an app, which members give to `oneflare flower node --app`.

    It changes with every edit of the app's pyproject.toml; settings of one round (`flwr run --run-config`) do not
    change it.

    [bold]Example[/bold]

      oneflare flower digest lungs-app
    """
    from oneflare.federation.flower.template import app_digest

    typer.echo(app_digest(folder))


@flower.command("certificates")
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for the files.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host", help="Name or address of the coordinator; may be repeated. Default: 127.0.0.1 and localhost."
        ),
    ] = None,
    member: Annotated[
        list[str] | None,
        typer.Option("--member", help="A member, who gets a client certificate and a node key pair; may be repeated."),
    ] = None,
) -> None:
    """Make a private CA, the coordinator's certificate, and members' certificates and node keys, valid 30 days.

    This is for trials: for real use, your own CA signs, and members make their keys themselves.

    [bold]Example[/bold]

      oneflare flower certificates certificates --host 10.0.0.5 --member north --member south
    """
    from oneflare.cli import show
    from oneflare.federation.flower.certificates import DAYS, make_certificates

    files = make_certificates(folder, host or ["127.0.0.1"], member or [])
    show.done(f"{files.authority}: the CA, for every member and for `flwr`")
    show.done(f"{files.certificate}, {files.key}: for the SuperLink and its proxy, valid {DAYS} days")
    for name in member or []:
        show.done(f"{files.member(name)}, {files.member_key(name)}, {files.node(name)}: only for {name}")
        show.done(f"{files.node_public(name)}: to be registered for {name}")


@flower.command("register")
def register(
    folder: Folder,
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="A member of the charter.")],
    key: Annotated[Path, typer.Argument(metavar="PUBLIC_KEY", help="The member's public node key, NAME.node.pub.")],
    connection: Annotated[
        str | None,
        typer.Option("--connection", help="The SuperLink's name in Flower's config.toml. Default: Flower's default."),
    ] = None,
) -> None:
    """Register a member's node key with the SuperLink, and bind it to this member.

    A round asks only nodes that are bound, and refuses a reply that says it is from another member.

    [bold]Example[/bold]

      oneflare flower register lungs north certificates/north.node.pub --connection ours
    """
    from oneflare.cli import show
    from oneflare.simulation.engines.flower import require_flower

    require_flower()
    from oneflare.federation.flower.nodes import bind_node, register_with_flwr

    bound = bind_node(folder, member, key, lambda path: register_with_flwr(path, connection))
    show.done(f"node {bound.node} is {member}'s; write the proxy's configuration again: oneflare flower proxy")


@flower.command("proxy")
def proxy(
    folder: Folder,
    place: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for nginx.conf and the proxy's logs.")],
    certificates_folder: Annotated[
        Path, typer.Option("--certificates", help="Folder with ca.crt, superlink.crt and superlink.key.")
    ],
    listen: Annotated[str, typer.Option("--listen", help="Address and port that members reach.")] = "0.0.0.0:8443",
    superlink: Annotated[
        str, typer.Option("--superlink", help="Address and port of the SuperLink on this machine.")
    ] = "127.0.0.1:8000",
) -> None:
    """Write the configuration of the proxy (nginx) that admits members' SuperNodes and nothing else.

    Run it again after `oneflare flower register`, and reload nginx.

    [bold]Example[/bold]

      oneflare flower proxy lungs proxy --certificates certificates --listen 0.0.0.0:8443
    """
    from oneflare.cli import show
    from oneflare.federation.charter import read_charter
    from oneflare.federation.coordinator import FederationFiles
    from oneflare.federation.flower.certificates import Certificates
    from oneflare.federation.flower.nodes import read_nodes
    from oneflare.federation.flower.proxy import ProxyAddresses, start_command, write_proxy

    read_charter(folder)
    removed = FederationFiles(folder).removed()
    nodes = {name: bound for name, bound in read_nodes(folder).items() if name not in removed}
    path = write_proxy(place, ProxyAddresses(listen, superlink), Certificates(certificates_folder), nodes)
    command = " ".join(start_command(path))
    show.done(f"wrote {path}: admits {', '.join(sorted(nodes))} on {listen}")
    show.done(f"start: {command}; after a change: {command} -s reload")


@flower.command("node")
def node(
    superlink: Annotated[str, typer.Option("--superlink", help="Address and port of the coordinator's proxy.")],
    authority: Annotated[Path, typer.Option("--authority", help="The CA's certificate, ca.crt.")],
    certificate: Annotated[Path, typer.Option("--certificate", help="Your client certificate.")],
    certificate_key: Annotated[Path, typer.Option("--certificate-key", help="The private key of your certificate.")],
    node_key: Annotated[Path, typer.Option("--node-key", help="Your private node key, NAME.node.")],
    app: Annotated[str, typer.Option("--app", help="Digest of the one app that may run on this machine.")],
    node_config: Annotated[
        str, typer.Option("--node-config", help='Your settings, such as \'member="north" data="/srv/images"\'.')
    ],
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1 that the SuperNode uses internally.")
    ] = 9094,
) -> None:
    """Take part: run a SuperNode that executes OneFlare's app and refuses every other one.

    [bold]Example[/bold]

      oneflare flower node --superlink COORDINATOR:8443 --authority ca.crt --certificate north.crt --certificate-key north.key --node-key north.node --app DIGEST --node-config 'member="north" data="/srv/images"'
    """  # noqa: E501
    from oneflare.federation.flower.pinned import Seat, run_node

    run_node(Seat(superlink, authority, certificate, certificate_key, node_key, app, port), node_config)


@flower.command("try")
def try_here(
    folder: Folder,
    member: Annotated[
        list[str], typer.Option("--member", help="NAME=FOLDER with this member's images; may be repeated.")
    ],
    key: Annotated[
        list[str] | None, typer.Option("--key", help="NAME=FILE with the private key of this member; may be repeated.")
    ] = None,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Use new keys, TLS, an nginx proxy that admits only members, and a pinned app.",
        ),
    ] = False,
    test: Annotated[Path | None, typer.Option("--test", help="Measure the model on these images.")] = None,
    min_members: MinMembers = 0,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Wait this many seconds for uploads.")] = 600,
    work: Annotated[
        Path | None, typer.Option("--work", help="Keep logs and keys in this folder; default: FEDERATION/trial.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rehearse on this machine: a SuperLink, one SuperNode per member, one round; then all of them are stopped.

    [bold]Example[/bold]

      oneflare flower try digits --member north=north --member south=south --tls
    """
    from oneflare.cli.progress import Remarks
    from oneflare.cli.show_federation import told
    from oneflare.client.observer import Observer
    from oneflare.errors import WorkError
    from oneflare.federation.charter import FILE, read_charter
    from oneflare.federation.coordinator import FederationFiles, FusedFederation, read_fused
    from oneflare.simulation.engines.flower import require_flower

    require_flower()
    from oneflare.federation.flower.certificates import make_certificates
    from oneflare.federation.flower.deployment import Deployment, Protection
    from oneflare.federation.flower.template import write_app

    charter = read_charter(folder)
    nodes = _nodes(charter, member, key or ())
    if charter.terms.upload.masked is not None:  # the roster that a member confirmed is in its own copy
        nodes = {name: config | {"federation": str((folder / FILE).resolve())} for name, config in nodes.items()}
    place = _fresh(work or folder / "trial")
    app = write_app(place / "app", folder, min_members).parent
    closed = None
    if tls:
        keys = make_certificates(place / "certificates", ["127.0.0.1"], list(nodes))
        closed = Protection(keys, folder.resolve(), app)
    settings: dict[str, Any] = {"connect-seconds": 120, "reply-seconds": timeout}
    if test is not None:
        settings["test"] = str(test.resolve())
    observer = Observer() if quiet else Remarks()
    with Deployment(place, closed) as deployment:
        proxy_here = f" behind a proxy on 127.0.0.1:{deployment.door}" if tls else ""
        observer.note(f"SuperLink on 127.0.0.1:{deployment.port}{proxy_here}, logs in {place}")
        for name, config in nodes.items():
            deployment.start_node(name, config)
        status = deployment.run(app.resolve(), settings, timeout + 300, observer)
    if status != "finished:completed":
        raise WorkError(f"the round ended as {status}; see {place / 'superlink.log'}")
    fused = FusedFederation(charter, FederationFiles(folder), read_fused(folder))
    told(fused, json=json, quiet=quiet)


def _nodes(charter: Charter, members: Sequence[str], keys: Sequence[str]) -> dict[str, dict[str, str]]:
    """member -> the settings of its SuperNode, from `--member NAME=FOLDER` and `--key NAME=FILE`."""
    from oneflare.errors import ConfigError

    nodes = {name: {"data": path, "member": name} for name, path in (_pair(text, "--member") for text in members)}
    for name, path in (_pair(text, "--key") for text in keys):
        if name not in nodes:
            raise ConfigError(f"--key {name}: no --member has this name")
        nodes[name]["key"] = path
    for name in nodes:
        charter.check_member(name)
    return nodes


def _pair(text: str, option: str) -> tuple[str, str]:
    from oneflare.errors import ConfigError

    name, separator, path = text.partition("=")
    if not separator or not Path(path).exists():
        raise ConfigError(f"{option} {text}: give NAME=PATH with a path that exists")
    return name, str(Path(path).resolve())


def _fresh(base: Path) -> Path:
    """The first of base, base-2, base-3 ... that does not exist, so that no trial overwrites another's keys."""
    number, place = 1, base
    while place.exists():
        number += 1
        place = base.with_name(f"{base.name}-{number}")
    return place.resolve()
