"""The commands of masked sums: `server roster` and `missing`, `client join` and `release`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oneflare.cli.client import who
from oneflare.cli.options import CharterFile, Folder, Json, Mask, Quiet
from oneflare.cli.server import WAIT_SECONDS

if TYPE_CHECKING:
    from oneflare.federation.charter import Charter
    from oneflare.federation.masked.uploading import Masking

Name = Annotated[str | None, typer.Option("--name", help="Your name; default: the member whose key this is.")]
Key = Annotated[Path | None, typer.Option("--key", help="Your private signing key, if you have one.")]


def join(
    charter_file: CharterFile,
    images: Annotated[
        int,
        typer.Option("--images", help="Most images that you will send sums of; everybody in the federation sees it."),
    ],
    name: Name = None,
    key: Key = None,
    mask: Mask = None,
    lock: Annotated[
        bool, typer.Option("--pass-phrase", help="Lock the mask key with a pass phrase, which is asked for.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the enrolment here; default: NAME.join.json.")
    ] = None,
    json: Json = False,
) -> None:
    """Join a federation whose sums are masked: make a mask key and write the enrolment for the coordinator.

    The mask key stays in a folder that only you can read. A key that is there already is used again; another --mask
    folder gets a new key, which replaces the old one as soon as the coordinator signs a new roster.

    [bold]Example[/bold]

      oneflare client join federation.yaml --name north --key north.key --images 500
    """
    from oneflare.cli import show
    from oneflare.federation.charter import read_charter, short
    from oneflare.federation.masked.enrolment import ENROLMENT, SUFFIX, check_masked, enrol
    from oneflare.federation.masked.files import write_message
    from oneflare.federation.masked.secret import MaskSecrets, check_place, mask_folder
    from oneflare.upload.signing import read_key

    charter = read_charter(charter_file)
    check_masked(charter)
    signing = None if key is None else read_key(key)
    target = out or Path(f"{name or 'member'}{SUFFIX}")
    member = who(charter, name, signing, target, must_sign=True)
    target = out or Path(f"{member}{SUFFIX}")
    secrets = MaskSecrets(mask or mask_folder(key, member))
    check_place(secrets.folder, target)
    there = secrets.key_file.exists()
    phrase = pass_phrase(secrets.folder, ask=secrets.locked if there else lock, new=not there)
    if lock and not there and phrase is None:
        from oneflare.errors import ConfigError

        raise ConfigError("--pass-phrase: there is no terminal to type it; set ONEFLARE_PASS_PHRASE")
    made = secrets.reopened(phrase) if there else secrets.create(phrase if lock else None)
    enrolment = enrol(charter, member, images, made, signing)
    write_message(target, ENROLMENT, enrolment)
    if json:
        show.as_json({"file": str(target), "mask": str(secrets.folder)} | enrolment.model_dump(mode="json"))
        return
    again = "used again" if there else "new"
    show.done(f"{secrets.folder}: your mask key ({again}) and the record of its use. Keep both, copy them to nobody.")
    show.done(f"{target}: send this to the coordinator of {charter.name} ({short(charter.fingerprint)})")
    show.done(f"It says that you are {member}, with at most {images} images and mask key {made.public}")


def roster(
    folder: Folder,
    enrolments: Annotated[
        Path | None,
        typer.Option("--enrolments", help="Folder with enrolments that have arrived; those of the last roster stay."),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="Leave this member out of the new roster; may be repeated.")
    ] = None,
    json: Json = False,
) -> None:
    """Sign who takes part in the next total of masked sums, and write it into federation.yaml.

    Every new roster starts a new round: uploads, request and releases for an earlier one are deleted, because nobody
    will open them any more. So a new roster also replaces lost or stolen mask keys, and leaves members out.

    [bold]Examples[/bold]

      oneflare server roster federation --enrolments inbox

      oneflare server roster federation --without north
    """
    from oneflare.cli import show
    from oneflare.core.files import exclusive
    from oneflare.errors import RunError
    from oneflare.federation.charter import FILE, read_charter, short
    from oneflare.federation.masked.enrolment import checked_roster, collect, next_roster
    from oneflare.federation.masked.rounds import RoundFiles
    from oneflare.federation.model_signing import PRIVATE, coordinator_key
    from oneflare.federation.recording import roster_event, write_down

    read_charter(folder)  # refuses a folder that is no federation's before anything is written there
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        charter = read_charter(folder)
        key = coordinator_key(charter, folder)
        if key is None:
            raise RunError(f"{folder / PRIVATE} is missing; members believe only a roster that this key signed")
        joined = [] if enrolments is None else collect(charter, enrolments)
        changed = next_roster(charter, joined, without or (), key)
        signed = checked_roster(changed)
        changed.write(folder / FILE)
        RoundFiles(folder).clear()
        write_down(changed, folder, [roster_event(signed, without or ())])
    if json:
        show.as_json({"file": str(folder / FILE), "digest": signed.digest} | signed.model_dump(mode="json"))
        return
    show.done(f"roster {signed.number} of {charter.name}: {', '.join(signed.names)}")
    show.done(f"a total can be opened by {signed.threshold} of these {len(signed.names)} members, and by fewer never")
    absent = [name for name in changed.members if name not in signed.names]
    if absent:
        show.done(f"admitted, but not in the roster: {', '.join(absent)}")
    if len(signed.names) == 2:
        show.done("warning: whoever of two members learns the total knows the other's sums; let more members join")
    show.done(
        f"fingerprint of the roster {short(signed.digest)}: confirm it with the members by telephone or in person"
    )
    show.done(f"Send {folder / FILE} to every member again; it now holds the roster.")


def missing(
    folder: Folder,
    uploads: Annotated[Path, typer.Option("--uploads", help="Folder with the masked uploads that have arrived.")],
    early: Annotated[
        bool, typer.Option("--now", help="Close the round before the deadline, although members are missing.")
    ] = False,
    late: Annotated[bool, typer.Option("--late", help="Accept uploads that were made after the deadline.")] = False,
    json: Json = False,
) -> None:
    """Close a round of masked sums: fix who is in the total and who is missing, and write the request for the members.

    It is needed once in every round, also if nobody is missing: members then release what opens the total. Closing
    cannot be undone, and uploads that come later are refused.

    [bold]Example[/bold]

      oneflare server missing federation --uploads inbox
    """
    from oneflare.cli import show
    from oneflare.federation.masked.rounds import close_round

    closed = close_round(folder, uploads, early=early, late=late)
    here = list(closed.request.uploaded)
    if json:
        show.as_json({"request": str(closed.path), "uploaded": here, "missing": closed.missing})
        return
    show.done(f"in the total: {', '.join(here)}; missing: {', '.join(closed.missing) or 'nobody'}")
    state = (
        f"was closed on {closed.request.created[:16]} UTC; the request is the same" if closed.before else "is closed"
    )
    show.done(f"The round {state}. Send {closed.path} to every member of the roster. A member runs:")
    show.done("  oneflare client release federation.yaml request.json --name NAME --key NAME.key")
    need = "all who are in the total" if closed.missing else f"any {closed.threshold} members of the roster"
    show.done(f"and returns NAME.release.json. With the answers of {need} you run:")
    show.done(f"  oneflare server fuse {folder} --releases FOLDER")


def release(
    charter_file: CharterFile,
    request: Annotated[Path, typer.Argument(metavar="REQUEST.JSON", help="The request as the coordinator sent it.")],
    name: Name = None,
    key: Key = None,
    mask: Mask = None,
    reveal: Annotated[
        str | None,
        typer.Option(
            "--reveal",
            metavar="MEMBER",
            help="Answer although this total and an earlier one differ by this member alone, whose sums then show.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the release here; default: NAME.release.json.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer the coordinator's request, so that the total of the masked sums can be opened, and nothing else.

    For every other member you release one of two secrets, never both: your share of its personal mask if its upload is
    in the total, or the seed of the mask that you have in common if it is missing. What you released is recorded
    beside your mask key; a request that asks for the other secret is refused.

    [bold]Example[/bold]

      oneflare client release federation.yaml request.json --name north --key north.key
    """
    from oneflare.cli import show
    from oneflare.federation.charter import read_charter, short
    from oneflare.federation.masked.enrolment import check_masked, checked_roster
    from oneflare.federation.masked.release import SUFFIX
    from oneflare.federation.masked.release import release as answer_request
    from oneflare.upload.signing import read_key

    charter = read_charter(charter_file)
    check_masked(charter)
    signing = None if key is None else read_key(key)
    member = who(charter, name, signing, Path(f"{name or 'member'}{SUFFIX}"), must_sign=False)
    target = out or Path(f"{member}{SUFFIX}")
    masking = masking_of(charter, member, mask, key, target)
    assert masking is not None
    answer = answer_request(charter, request, target, member, masking, reveal)
    if json:
        show.as_json(
            {
                "file": str(target),
                "in_total": list(answer.release.shares),
                "missing": answer.missing,
                "damaged": answer.damaged,
                "answered_before": answer.before,
            }
        )
        return
    if quiet:
        return
    roster_digest = checked_roster(charter).digest
    again = " (answered before; the same again)" if answer.before else ""
    show.done(f"{target}: opens the total of {', '.join(answer.release.shares)}, and no member's own sums{again}")
    if answer.missing:
        show.done(f"missing: {', '.join(answer.missing)}; their uploads cannot join this total any more")
    if not answer.included:
        show.done("your own upload is not in this total")
    if answer.damaged:
        show.done(f"warning: {', '.join(answer.damaged)} gave you a share that cannot be opened; tell the coordinator")
    show.done(f"Send it to the coordinator of {charter.name}. Fingerprint of the roster: {short(roster_digest)}")


def masking_of(charter: Charter, member: str, mask: Path | None, key: Path | None, out: Path) -> Masking | None:
    """The member's mask key, opened; None where the sums of this federation are not masked."""
    from oneflare.errors import ConfigError
    from oneflare.federation.masked.secret import MaskSecrets, check_place, mask_folder
    from oneflare.federation.masked.uploading import Masking

    if charter.terms.upload.masked is None:
        if mask is not None:
            raise ConfigError(f"--mask: the sums of {charter.name} are not masked; leave it out")
        return None
    secrets = MaskSecrets(mask or mask_folder(key, member))
    check_place(secrets.folder, out)
    return Masking(secrets, secrets.key(pass_phrase(secrets.folder, ask=secrets.locked)))


def pass_phrase(folder: Path, *, ask: bool, new: bool = False) -> str | None:
    """From the environment, or typed where there is a terminal; None where none is needed. new: asked for twice."""
    import os
    import sys

    from oneflare.federation.masked.secret import PASS_PHRASE

    given = os.environ.get(PASS_PHRASE)
    if not ask or given:
        return given or None
    if not sys.stdin.isatty():
        return None
    return str(typer.prompt(f"pass phrase of {folder}", hide_input=True, confirmation_prompt=new, err=True))
