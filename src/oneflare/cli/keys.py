"""Commands for keys and the log of a federation: make, replace and revoke keys, and show who did what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oneflare.cli.client import client
from oneflare.cli.options import Folder, Json
from oneflare.cli.server import server

Earlier = Annotated[
    str,
    typer.Option(
        "--earlier",
        metavar="KEEP|REFUSE",
        help="Whether the member's upload in the last fusion stays valid (keep) or is refused from now on (refuse). "
        "Any other upload under the old key is refused, whatever its date.",
    ),
]


def _keeps(earlier: str) -> bool:
    from oneflare.errors import ConfigError

    if earlier not in ("keep", "refuse"):
        raise ConfigError(f"--earlier {earlier}: say keep or refuse")
    return earlier == "keep"


@client.command("keygen")
def keygen(
    name: Annotated[str, typer.Option("--name", help="Your name in the federation, which also names the two files.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write both files into this folder.")] = Path(),
) -> None:
    """Make an Ed25519 key pair: NAME.key stays with you, NAME.pub goes to the coordinator.

    [bold]Example[/bold]

      oneflare client keygen --name north
    """
    from oneflare.cli import show
    from oneflare.upload.signing import check_name, generate

    private, public = (out / f"{check_name(name)}.{ending}" for ending in ("key", "pub"))
    key = generate(private, public)
    show.done(f"{private}: your private key. Keep it, copy it to nobody; only you can read the file.")
    show.done(f"{public}: send this to the coordinator: {key.public}")


@client.command("rotate")
def rotate_key(
    name: Annotated[str, typer.Option("--name", help="Your name in the federation.")],
    key: Annotated[Path, typer.Option("--key", help="Your present private key, which signs the new one.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the new files into this new folder.")],
) -> None:
    """Replace your key: makes a new pair and NAME.rotation.json, which goes to the coordinator.

    The old key signs the new one, so the coordinator needs no telephone call. If the old key was stolen, its word does
    not count: make a new pair with `keygen` instead and ask the coordinator to revoke the old one.

    [bold]Example[/bold]

      oneflare client rotate --name north --key north.key --out new
    """
    from oneflare.cli import show
    from oneflare.federation.member import now
    from oneflare.upload.signing import check_name, generate, read_key
    from oneflare.upload.succession import succeed, write_succession

    old = read_key(key)
    private, public = (out / f"{check_name(name)}.{ending}" for ending in ("key", "pub"))
    new = generate(private, public)
    statement = out / f"{name}.rotation.json"
    write_succession(statement, succeed(name, old, new, now()))
    show.done(f"{private}: your new private key. Keep it, copy it to nobody; only you can read the file.")
    show.done(f"{statement}: send this to the coordinator. Until they have taken it, {key} counts.")


@server.command("rotate")
def rotate(
    folder: Folder,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A member's NAME.rotation.json. Without it, your own key is replaced."),
    ] = None,
    earlier: Earlier = "keep",
) -> None:
    """Replace a member's key by the one that its old key has signed, or your own key by a new one.

    Your new key is signed by your old one in federation.yaml, whose fingerprint stays the same; send that file to the
    members again. Model, result and card of the last fusion are signed anew.

    [bold]Examples[/bold]

      oneflare server rotate federation north.rotation.json

      oneflare server rotate federation
    """
    from oneflare.cli import show
    from oneflare.federation.charter import FILE, read_charter
    from oneflare.federation.keys import rotate_coordinator, rotate_member
    from oneflare.upload.succession import read_succession

    keep = _keeps(earlier)
    read_charter(folder)
    if file is not None:
        statement = read_succession(file)
        rotate_member(folder, statement, keep=keep)
        show.done(f"{statement.who} now signs with {statement.new}; {statement.old} no longer counts")
        return
    charter = rotate_coordinator(folder)
    show.done(f"you now sign with {charter.signing_key}; models are signed anew")
    show.done(f"Send {folder / FILE} to every member again; its fingerprint is the same.")
    show.done(f"Your old key is in {folder}/old-coordinator-{len(charter.succession or ())}.key; delete it.")


@server.command("revoke")
def revoke(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the member whose key was lost or stolen.")],
    earlier: Earlier = "refuse",
) -> None:
    """Revoke a member's key: uploads that it signs are refused by name until the member has a new key.

    [bold]Example[/bold]

      oneflare server revoke federation north
    """
    from oneflare.cli import show
    from oneflare.federation.charter import read_charter
    from oneflare.federation.keys import revoke_member

    keep = _keeps(earlier)
    read_charter(folder)
    revoke_member(folder, name, keep=keep)
    kept = "stays valid" if keep else "is refused"
    show.done(f"{name}'s key is revoked; its upload in the last fusion {kept}")
    show.done(f"`oneflare server admit {folder} {name} NEW.pub` takes a new key: confirm it by telephone or in person.")


@server.command("log")
def log(
    folder: Folder,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            "--expect",
            metavar="NUMBER:DIGEST|FILE",
            help="An end of the log that you noted earlier, or the signature (.sig) of a model that you received; the "
            "log must still contain it. May be repeated.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show who did what in a federation, and check that nobody changed the log.

    Every line is signed and holds the digest of the line before, and so is the end of the log. Lines that were edited,
    forged, removed, reordered or cut off are named, and the command then fails.

    [bold]Examples[/bold]

      oneflare server log federation

      oneflare server log federation --expect north/model.safetensors.sig
    """
    from dataclasses import asdict

    from oneflare.cli import show
    from oneflare.errors import RunError
    from oneflare.federation.charter import read_charter
    from oneflare.federation.recording import check_log, expected_end

    charter = read_charter(folder)
    expected = [expected_end(text, charter.signing_keys) for text in expect or ()]
    found = check_log(folder, charter, expected)
    if json:
        entries = [asdict(entry) for entry in found.entries]
        show.as_json({"entries": entries, "problems": list(found.problems), "position": str(found.position)})
    else:
        for entry in found.entries:
            show.line(f"{entry.number:4d} {entry.at[:19]} {entry.text}")
        for problem in found.problems:
            show.note(f"warning: {problem}")
    if found.problems:
        raise RunError(f"the log of {folder} is not what was written: {'; '.join(found.problems[:3])}")
    if not json:
        signed = "each signed by the coordinator" if charter.coordinator else "not signed"
        show.line(f"{len(found.entries)} lines, {signed} and following the one before; note the end: {found.position}")
