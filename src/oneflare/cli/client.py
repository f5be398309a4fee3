"""`oneflare client` and `oneflare upload`: a member's commands for a federation by file."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oneflare.cli.options import (
    GROUP,
    CharterFile,
    ImageColumn,
    Json,
    LabelColumn,
    Mask,
    OwnImages,
    PatientColumn,
    Quiet,
)

if TYPE_CHECKING:
    from oneflare.data.labelled import ListedProblems
    from oneflare.data.tables import Columns
    from oneflare.errors import DataError
    from oneflare.federation.charter import Charter
    from oneflare.federation.member import Made, MemberData
    from oneflare.upload.signing import SigningKey

client = typer.Typer(help="Take part in a federation: make a key, train on your own data, write one upload.", **GROUP)
upload = typer.Typer(help="Inspect uploads.", **GROUP)

UploadFile = Annotated[Path, typer.Option("--out", "-o", help="Write the upload, the only file to send, here.")]
MemberName = Annotated[
    str | None,
    typer.Option("--name", help="Your name; default: the member whose key this is, or else a random name."),
]
PrivateKey = Annotated[Path | None, typer.Option("--key", help="Sign the upload with this private key.")]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        min=0,
        help="Largest total epsilon for an image under private terms; default: that of one upload.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="List what was found, and estimate time and size, without training.")
]
SkipDamaged = Annotated[
    bool,
    typer.Option("--skip-damaged", help="Leave out images that cannot be used; the upload states how many."),
]


@client.command("train")
def train(
    charter_file: CharterFile,
    data: OwnImages,
    out: UploadFile = Path("upload.safetensors"),
    name: MemberName = None,
    key: PrivateKey = None,
    mask: Mask = None,
    budget: Budget = None,
    dry_run: DryRun = False,
    skip_damaged: SkipDamaged = False,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    patient_column: PatientColumn = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check your data against the terms, train on them alone, write the one file, say what is in it.

    Nothing is sent anywhere. The same command again resumes from the last checkpoint, or says that it is complete.

    [bold]Examples[/bold]

      oneflare client train federation.yaml --data images --dry-run

      oneflare client train federation.yaml --data scans/labels.csv --dry-run

      oneflare client train federation.yaml --data images --name north --key north.key --out north.safetensors
    """
    from oneflare.cli.masked import masking_of
    from oneflare.cli.show_federation import announce, member_progress
    from oneflare.data.labelled import ListedProblems
    from oneflare.data.tables import Columns
    from oneflare.errors import ConfigError
    from oneflare.federation.charter import read_charter
    from oneflare.federation.ledger import Ledger, ledger_folder
    from oneflare.federation.masked.uploading import check_before_training
    from oneflare.federation.member import Envelope, encrypted_for, make_upload_in, upload_notes
    from oneflare.upload.signing import read_key

    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out}: an upload's name ends in .safetensors")
    charter = read_charter(charter_file)
    signing = None if key is None else read_key(key)
    member = who(charter, name, signing, out, must_sign=not dry_run)
    masking = masking_of(charter, member, mask, key, out)
    columns = Columns(image_column, label_column, patient_column)
    try:
        images = _read(charter, data, columns, skip_damaged=skip_damaged, dry_run=dry_run, quiet=quiet)
    except ListedProblems as error:
        raise _refusal(error, dry_run=dry_run, json=json) from None
    if masking is not None:
        check_before_training(charter, member, masking, len(images.data))
    if not quiet:
        announce(charter, member, images.data, images.notes)
    if dry_run:
        _dry_run(charter, images, json=json)
        return
    envelope = Envelope(member, signing, upload_notes(charter, images), masking)
    ledger = Ledger(ledger_folder(key), budget)
    with member_progress(charter, enabled=not quiet) as observer:
        made = make_upload_in(envelope, charter, images.data, out, observer=observer, ledger=ledger)
    sent = encrypted_for(charter, made.path)
    if json:
        _as_json(charter, images, made, sent)
    elif not quiet:
        _what_was_made(charter, made, sent, signed=signing is not None)


def _read(
    charter: Charter, data: Path, columns: Columns, *, skip_damaged: bool, dry_run: bool, quiet: bool
) -> MemberData:
    """The member's images as the terms ask for them, with a display of how far the reading is."""
    from oneflare.cli.progress import progress
    from oneflare.federation.member import charter_reader, member_data

    with progress(enabled=not quiet, table=False) as watching:
        reader = charter_reader(charter, watching, rehearse=dry_run)
        return member_data(charter, data, columns=columns, skip_damaged=skip_damaged, reader=reader)


def _refusal(error: ListedProblems, *, dry_run: bool, json: bool) -> DataError:
    """What to say of images that cannot be used; a dry run lists all of them first."""
    from oneflare.cli.show_federation import list_damaged
    from oneflare.data.labelled import DamagedImages
    from oneflare.errors import DataError

    skip = isinstance(error, DamagedImages)
    if not dry_run:
        return DataError(f"{error}; --dry-run lists all{', --skip-damaged goes on without them' if skip else ''}")
    list_damaged(error.problems, error.found, json=json)
    without = ", or go on without them: --skip-damaged" if skip else ""
    return DataError(f"{error.summary}; repair or remove them{without}")


def _dry_run(charter: Charter, images: MemberData, *, json: bool) -> None:
    """How long training would take, how large the upload would be, and which images would be left out."""
    from oneflare.cli import show
    from oneflare.cli.show_federation import list_damaged
    from oneflare.federation.member import estimate
    from oneflare.federation.page import size_text
    from oneflare.study.estimate import duration

    guess = estimate(charter, images.data)
    if json:
        show.as_json(
            {
                "samples": len(images.data),
                "seconds": guess.seconds,
                "feature_seconds": images.feature_seconds,
                "upload_bytes": guess.upload_bytes,
                "notes": list(images.notes),
                "found": images.found.to_dict(),
                "damaged": [row._asdict() for row in images.damaged],
            }
        )
        return
    list_damaged(images.damaged, images.found)
    if charter.inputs.backbone is not None:
        show.line(
            f"dry run: computing the features of {len(images.data)} images by {charter.inputs.backbone.name} takes "
            f"about {duration(images.feature_seconds)}, once"
        )
    show.line(
        f"dry run: about {duration(guess.seconds)} of training on one core, "
        f"an upload of {size_text(guess.upload_bytes)}; nothing was written"
    )


def _as_json(charter: Charter, images: MemberData, made: Made, sent: Path) -> None:
    from oneflare.cli import show
    from oneflare.upload.disclosure import disclose

    spent = None if made.balance is None else made.balance.to_dict()
    said = {"fingerprint": charter.fingerprint, "notes": list(images.notes), "summary": made.summary.to_dict()}
    show.as_json(disclose(made.path).to_dict() | said | {"budget": spent, "send": str(sent)})


def _what_was_made(charter: Charter, made: Made, sent: Path, *, signed: bool) -> None:
    """What is in the upload, what it cost of the privacy budget, and what to do with it."""
    from oneflare.cli import show
    from oneflare.cli.show_federation import disclosure
    from oneflare.client.files import ClientFiles
    from oneflare.federation.charter import short
    from oneflare.federation.member import work_folder
    from oneflare.upload.disclosure import disclose

    disclosure(disclose(made.path))
    if made.balance is not None:
        show.line(made.balance.text())
    state = "complete before, nothing to do" if made.complete_before else f"{made.summary.train_seconds:.1f} s"
    own = made.path if charter.terms.upload.masked is None else ClientFiles(work_folder(made.path)).upload
    show.line(f"your own model is in {own}; `oneflare evaluate MODEL --alone {own}` compares with it")
    show.line(f"trained ({state}). Send {sent} to the coordinator of {charter.name}, by any road; nothing else.")
    show.line(f"fingerprint of the terms: {short(charter.fingerprint)}; compare it with the coordinator's")
    if not signed:
        show.line("not signed: the coordinator cannot tell who made it; --key signs it")


def who(charter: Charter, name: str | None, key: SigningKey | None, out: Path, *, must_sign: bool) -> str:
    """The member's name: given, or by its key, or the one its earlier training here has, or a random one."""
    from oneflare.errors import ConfigError
    from oneflare.federation.member import claimed_member, work_folder
    from oneflare.upload.signing import check_name

    owner = None if key is None else charter.member_of(key.public)
    name = name or owner
    if name is None and charter.members:
        raise ConfigError(f"--name: say who you are; members of {charter.name}: {', '.join(charter.members)}")
    name = check_name(name or claimed_member(work_folder(out)) or f"member-{secrets.token_hex(4)}")
    if owner is not None and owner != name:
        raise ConfigError(f"the key belongs to {owner}, not to {name}; give {name}'s own")
    wanted = charter.members.get(name)
    if must_sign and wanted is not None and key is None:
        raise ConfigError(f"{name}'s uploads must be signed; give --key with the private key of {wanted}")
    if wanted is not None and key is not None and key.public != wanted:
        raise ConfigError(f"the key is not {name}'s; give the private key of {wanted}")
    return name


@client.command("budget")
def show_budget(
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", help="Your private key, whose ledger lies beside it; default: the ledger in your home folder."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show which answers about your images you gave under private terms, and what they cost.

    [bold]Example[/bold]

      oneflare client budget --key north.key
    """
    from oneflare.cli import show
    from oneflare.federation.ledger import DIGITS, Ledger, ledger_folder

    ledger = Ledger(ledger_folder(key))
    answers = ledger.answers()
    if json:
        show.as_json({"ledger": str(ledger.file), "answers": [answer.to_dict() for answer in answers]})
        return
    show.line(f"{ledger.file}: {len(answers)} answer{'' if len(answers) == 1 else 's'} under private terms")
    for answer in answers:
        show.line(
            f"{answer.created[:19]} {answer.name}, as {answer.member}: epsilon {answer.epsilon:g}, delta "
            f"{answer.delta:g} for {len(answer.images) // DIGITS} images; kept as {ledger.kept(answer)}"
        )


@upload.command("show")
def show_upload(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The upload to inspect.")],
    json: Json = False,
) -> None:
    """Say what is in an upload, how large each part is, and what it reveals about the data.

    [bold]Example[/bold]

      oneflare upload show north.safetensors
    """
    from oneflare.cli import show
    from oneflare.cli.show_federation import disclosure
    from oneflare.upload.disclosure import disclose

    content = disclose(file)
    if json:
        show.as_json(content.to_dict())
    else:
        disclosure(content)
