"""A federation on Flower: the app folder, certificates for trials, and a whole deployment on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from oneflare.cli.commands import Json, Quiet

OPTIONS: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": "rich"}
flower = typer.Typer(help="Run a federation over a network, on Flower.", **OPTIONS)

Folder = Annotated[Path, typer.Argument(metavar="FEDERATION", help="The federation's folder.")]


@flower.command("init")
def init(
    folder: Annotated[Path, typer.Argument(metavar="APP", help="New folder for `flwr run`.")],
    federation: Annotated[
        Path, typer.Option("--federation", help="Folder with federation.yaml, on the SuperLink's machine.")
    ],
    min_members: Annotated[int, typer.Option("--min-members", min=1, help="Fewer usable uploads: no fusion.")] = 1,
) -> None:
    """Write the folder that `flwr run` takes.

    [bold]Example[/bold]

      oneflare flower init lungs-app --federation lungs --min-members 3
    """
    from oneflare.cli import show
    from oneflare.flower_app.template import write_app

    path = write_app(folder, federation, min_members)
    show.done(f"wrote {path}; start the SuperLink and the members' SuperNodes, then: flwr run {folder} CONNECTION")


@flower.command("certificates")
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for the files.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of the SuperLink; repeat. Default: 127.0.0.1 and localhost."),
    ] = None,
    node: Annotated[list[str] | None, typer.Option("--node", help="A SuperNode that gets a key pair; repeat.")] = None,
) -> None:
    """Make a private CA, the SuperLink's certificate and node keys, for trials: valid 30 days.

    [bold]Example[/bold]

      oneflare flower certificates certificates --host 10.0.0.5 --node north --node south
    """
    from oneflare.cli import show
    from oneflare.flower_app.certificates import DAYS, make_certificates

    files = make_certificates(folder, host or ["127.0.0.1", "localhost"], node or [])
    show.done(f"{files.authority}: the CA, for every SuperNode and for `flwr`")
    show.done(f"{files.certificate}, {files.key}: for the SuperLink, valid {DAYS} days")
    for name in node or []:
        show.done(f"{files.node(name)}: stays with {name}; {files.node_public(name)}: to be registered")


@flower.command("try")
def try_here(
    folder: Folder,
    member: Annotated[list[str], typer.Option("--member", help="NAME=FOLDER with this member's images; repeat.")],
    key: Annotated[
        list[str] | None, typer.Option("--key", help="NAME=FILE with the private key this member signs with; repeat.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="TLS and node authentication, with new keys.")] = False,
    test: Annotated[Path | None, typer.Option("--test", help="Images to measure the model on.")] = None,
    min_members: Annotated[int, typer.Option("--min-members", min=1, help="Fewer usable uploads: no fusion.")] = 1,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for uploads to arrive.")] = 600,
    work: Annotated[
        Path | None, typer.Option("--work", help="Folder for logs and keys; default: FEDERATION/trial.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rehearse on this machine: a SuperLink, one SuperNode per member, one round; then all of them are stopped.

    [bold]Example[/bold]

      oneflare flower try digits --member north=north --member south=south --tls
    """
    from oneflare.charter import read_charter
    from oneflare.cli import show
    from oneflare.cli.show_federation import fused_federation
    from oneflare.coordinator import FederationFiles, Fused, read_fused
    from oneflare.engine.flower import require_flower
    from oneflare.errors import ConfigError, WorkError

    require_flower()
    from oneflare.flower_app.certificates import make_certificates
    from oneflare.flower_app.deployment import Deployment
    from oneflare.flower_app.template import write_app

    charter = read_charter(folder)
    nodes = {name: {"data": path, "member": name} for name, path in (_pair(text, "--member") for text in member)}
    for name, path in (_pair(text, "--key") for text in key or []):
        if name not in nodes:
            raise ConfigError(f"--key {name}: no --member has this name")
        nodes[name]["key"] = path
    for name in nodes:
        charter.check_member(name)
    place = _fresh(work or folder / "trial")
    keys = make_certificates(place / "certificates", ["127.0.0.1"], list(nodes)) if tls else None
    app = write_app(place / "app", folder, min_members).parent
    settings: dict[str, Any] = {"connect-seconds": 120, "reply-seconds": timeout}
    if test is not None:
        settings["test"] = str(test.resolve())
    say = (lambda _: None) if quiet else show.note
    with Deployment(place, keys) as deployment:
        say(f"SuperLink on 127.0.0.1:{deployment.port}{' with TLS' if tls else ''}, logs in {place}")
        for name, config in nodes.items():
            deployment.start_node(name, config)
        status = deployment.run(app.resolve(), settings, timeout + 300, say)
    if status != "finished:completed":
        raise WorkError(f"the round ended as {status}; see {place / 'superlink.log'}")
    fused = Fused(charter, FederationFiles(folder), read_fused(folder))
    if json:
        show.as_json(fused.content)
    elif not quiet:
        fused_federation(fused)


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
