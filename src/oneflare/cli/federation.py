"""`oneflare server` and `oneflare client`: a federation by file, for its coordinator and its members."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oneflare.cli.commands import Json, Overrides, Quiet

if TYPE_CHECKING:
    from oneflare.federation.charter import Charter
    from oneflare.upload.signing import SigningKey

WAIT_SECONDS = 60.0
"""for another command that changes the same federation"""
OPTIONS: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": "rich"}
server = typer.Typer(help="Coordinate a federation: set its terms, admit its members, fuse its model.", **OPTIONS)
client = typer.Typer(help="Take part in a federation: make a key, train on your own data, write one upload.", **OPTIONS)
upload = typer.Typer(help="Inspect uploads.", **OPTIONS)

Folder = Annotated[Path, typer.Argument(metavar="FEDERATION", help="The federation's folder.")]
ImageColumn = Annotated[
    str | None,
    typer.Option("--image-column", help="Column of a parquet file that holds the images; default: image or img."),
]
Mask = Annotated[
    Path | None,
    typer.Option(
        "--mask",
        help="Folder with your mask key, where sums are masked; default: NAME.mask beside the --key, or in your home.",
    ),
]
LabelColumn = Annotated[
    str | None, typer.Option("--label-column", help="Column of a parquet file that holds the labels; default: label.")
]


@server.command("init")
def init(
    folder: Folder,
    overrides: Overrides = None,
    classes: Annotated[
        str,
        typer.Option(
            "--classes",
            help="Names of the classes: with commas between, one per line of a file, or the folders in a folder.",
        ),
    ] = "",
    image_size: Annotated[
        int, typer.Option("--image-size", help="Images are resized to this many pixels, 8 to 64.")
    ] = 32,
    channels: Annotated[int, typer.Option("--channels", help="1 for grey, 3 for colour.")] = 3,
    mirror: Annotated[bool, typer.Option("--mirror", help="State that a mirrored image keeps its class.")] = False,
    pixels: Annotated[
        list[str] | None,
        typer.Option(
            "--pixels",
            metavar="KEY=VALUE",
            help="What the numbers in image files mean: bits=12, or low=600 and high=3700, for images of more than 8 "
            "bits; background=black for transparent places; page=1 for files with several. Repeat.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the federation; default: the name of its folder.")
    ] = None,
    member: Annotated[
        list[str] | None,
        typer.Option(
            "--member",
            help="NAME or NAME=KEY (a public key or its file); may be repeated. Without any, anybody may send.",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline", help="Last day for uploads, such as 2027-01-31; in UTC unless a time zone is given."
        ),
    ] = None,
    use: Annotated[str, typer.Option("--use", help="What the model is for; stated on its card.")] = "",
    limits: Annotated[str, typer.Option("--limits", help="What the model is not for; stated on its card.")] = "",
    json: Json = False,
) -> None:
    """Write federation.yaml, the terms every member trains under, and say what to send.

    [bold]Examples[/bold]

      oneflare server init lungs --classes normal,pneumonia,covid --image-size 64 --channels 1 --pixels bits=12

      oneflare server init digits --classes 0,1,2,3 --image-size 8 --channels 1 --member north=north.pub epochs=20
    """
    from oneflare.cli import show
    from oneflare.cli.show_federation import masked_next_steps
    from oneflare.core.config import parse_overrides
    from oneflare.core.files import exclusive
    from oneflare.federation.charter import FILE, new_charter, revised, short
    from oneflare.federation.member import upload_size
    from oneflare.federation.vouching import PRIVATE, make_key

    path = folder / FILE
    _refuse_existing(path)
    charter = new_charter(
        name or folder.resolve().name,
        parse_overrides(overrides or []),
        classes=_class_names(classes),
        image={
            "size": image_size,
            "channels": channels,
            "mirror": mirror,
            "pixels": parse_overrides(pixels) if pixels else None,
        },
        deadline=deadline,
        use=use,
        limits=limits,
        members=dict(_member(text) for text in member or []),
    )
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        _refuse_existing(path)
        key = make_key(folder)  # after everything else was found right
        charter = revised(charter, coordinator=key)
        charter.write(path)
    size = upload_size(charter)
    if json:
        show.as_json({"file": str(path), "fingerprint": charter.fingerprint, "upload_bytes": size})
        return
    until = f" until {charter.deadline:%Y-%m-%d %H:%M %Z}" if charter.deadline else ""
    show.done(f"wrote {path}: {len(charter.classes)} classes, method {charter.terms.method}")
    show.done(f"fingerprint {short(charter.fingerprint)}: confirm it with the members by telephone or in person")
    if key is None:
        show.done("Models will not be signed: pip install 'oneflare[sign]' before this command signs them.")
    else:
        show.done(f"{folder / PRIVATE}: your private key, which signs the models. Keep it, copy it to nobody.")
    if charter.terms.upload.masked is not None:
        masked_next_steps(folder, path)
        return
    show.done(f"\nSend {path} to every member, and nothing else. A member runs:")
    show.done("  oneflare client keygen --name NAME                    # once; sends you NAME.pub, keeps NAME.key")
    show.done("  oneflare client train federation.yaml --data FOLDER --name NAME --key NAME.key --out NAME.safetensors")
    show.done(f"and returns NAME.safetensors (about {_size(size)}){until}, by any road. You run:")
    show.done(f"  oneflare server admit {folder} NAME NAME.pub          # for each key that arrives")
    show.done(f"  oneflare server fuse {folder} --uploads FOLDER")
    if not charter.members:
        show.done("No member is named yet: until one is, anybody's upload counts.")


@server.command("admit")
def admit(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the member.")],
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY", help="Public key of the member, or its file. Without it, the member need not sign."
        ),
    ] = None,
) -> None:
    """Admit a member, or replace its key; uploads that were made before stay valid if that key signed them.

    [bold]Example[/bold]

      oneflare server admit federation north north.pub
    """
    from oneflare.cli import show
    from oneflare.core.files import exclusive
    from oneflare.federation.charter import FILE, read_charter, revised
    from oneflare.upload.signing import check_name, public_key_of

    public = None if key is None else public_key_of(key)
    check_name(name)
    read_charter(folder)  # refuses a folder that is no federation's before anything is written there
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        charter = read_charter(folder)
        changed = revised(charter, members=dict(charter.members) | {name: public})
        changed.write(folder / FILE)
    how = "without a key: whoever uses this name is believed" if public is None else f"with key {public}"
    replaced = charter.members.get(name)
    instead = f", which replaces {replaced}" if replaced is not None and replaced != public else ""
    show.done(f"admitted {name} {how}{instead}; members: {', '.join(changed.members)}")


@server.command("fuse")
def fuse(
    folder: Folder,
    uploads: Annotated[
        Path | None, typer.Option("--uploads", help="Folder with the uploads; default: those of the last fusion.")
    ] = None,
    add: Annotated[
        list[Path] | None, typer.Option("--add", help="Add this upload, even after the deadline; may be repeated.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", help="Leave this member out from now on; may be repeated.")
    ] = None,
    late: Annotated[bool, typer.Option("--late", help="Accept uploads that were made after the deadline.")] = False,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="For members without a usable upload, keep the upload of the last fusion."),
    ] = False,
    min_members: Annotated[
        int | None,
        typer.Option(
            "--min-members",
            min=1,
            help="Fuse nothing with fewer members than this. Default: as many as the last fusion had, "
            "without those who were removed; for the first fusion, all who are admitted.",
        ),
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option("--test", help="Measure the model on these images of yours (class folders or parquet)."),
    ] = None,
    releases: Annotated[
        Path | None,
        typer.Option("--releases", help="Folder with the members' releases, where sums are masked."),
    ] = None,
    check_images: Annotated[
        Path | None,
        typer.Option(
            "--check-images",
            help="Check the effect of each member on these images of yours (class folders or parquet).",
        ),
    ] = None,
    check_points: Annotated[
        float,
        typer.Option(
            "--check-points",
            min=0,
            max=100,
            help="Percentage of a class's --check-images that a member may cost before --approve is needed.",
        ),
    ] = 10.0,
    approve: Annotated[
        list[str] | None,
        typer.Option("--approve", help="Accept this member's effect on --check-images; may be repeated."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify uploads, say who is in, missing or refused and why, and make one model with its card and report.

    Works with any non-empty part of the members, if --min-members allows it. Joining and leaving later give exactly
    what a fresh fusion gives. The version before this fusion stays in the folder `previous`, except where somebody who
    was removed is in it.

    [bold]Examples[/bold]

      oneflare server fuse federation --uploads inbox --test held-out

      oneflare server fuse federation --uploads inbox --min-members 2

      oneflare server fuse federation --add late/east.safetensors

      oneflare server fuse federation --remove north

      oneflare server fuse federation --uploads inbox --check-images own-images

      oneflare server fuse federation --releases inbox

    With --check-images the model is also made without each member in turn. A member that costs a class more than
    --check-points of your images stops the fusion with its name, and nothing is changed, until you --approve or
    --remove it. Without such images, only members that differ from the others in their numbers are warned about.
    """
    from oneflare.cli import show
    from oneflare.cli.progress import Remarks
    from oneflare.cli.show_federation import fused_federation
    from oneflare.data.local import read_local
    from oneflare.errors import ConfigError
    from oneflare.federation.admission import Admission
    from oneflare.federation.charter import read_charter
    from oneflare.federation.coordinator import Rules, fuse_federation
    from oneflare.federation.page import write_card, write_federation_page

    charter = read_charter(folder)
    held_out = None if test is None else read_local(test, charter.classes, charter.image.spec())
    for text in () if held_out is None or quiet else held_out.notes:
        show.note(f"note: {text}")
    if approve and check_images is None:
        raise ConfigError("--approve: nothing is checked without --check-images FOLDER; give both or neither")
    admission = None
    if check_images is not None:
        own = read_local(check_images, charter.classes, charter.image.spec()).split
        admission = Admission(own, check_points, tuple(approve or ()))
    fused = fuse_federation(
        folder,
        uploads=uploads,
        add=add or (),
        remove=remove or (),
        rules=Rules(late=late, keep=keep, min_members=min_members, admission=admission, releases=releases),
        test=None if held_out is None else held_out.split,
        observer=None if quiet else Remarks(),
    )
    write_card(fused)
    write_federation_page(fused)
    if json:
        show.as_json(fused.content)
    elif not quiet:
        fused_federation(fused)


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


@client.command("train")
def train(
    charter_file: Annotated[
        Path, typer.Argument(metavar="FEDERATION.YAML", help="The charter as the coordinator sent it, unchanged.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            "--data", "-d", help="Your images: a folder with one folder per class, or parquet with images and labels."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the upload, the only file to send, here.")] = Path(
        "upload.safetensors"
    ),
    name: Annotated[
        str | None,
        typer.Option("--name", help="Your name; default: the member whose key this is, or else a random name."),
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Sign the upload with this private key.")] = None,
    mask: Mask = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            min=0,
            help="Largest total epsilon for an image under private terms; default: that of one upload.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the data and estimate time and size, without training.")
    ] = False,
    skip_damaged: Annotated[
        bool,
        typer.Option("--skip-damaged", help="Leave out images that cannot be used; the upload states how many."),
    ] = False,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check your data against the terms, train on them alone, write the one file, say what is in it.

    Nothing is sent anywhere. The same command again resumes from the last checkpoint, or says that it is complete.

    [bold]Examples[/bold]

      oneflare client train federation.yaml --data images --dry-run

      oneflare client train federation.yaml --data images --name north --key north.key --out north.safetensors
    """
    from oneflare.cli import show
    from oneflare.cli.masked import masking_of
    from oneflare.cli.show_federation import announce, disclosure, list_damaged, member_progress
    from oneflare.data.labelled import DamagedImages
    from oneflare.errors import ConfigError, DataError
    from oneflare.federation.charter import read_charter, short
    from oneflare.federation.ledger import Ledger, ledger_folder
    from oneflare.federation.masked.uploading import check_before_training
    from oneflare.federation.member import Envelope, estimate, make_upload_in, member_data, upload_notes
    from oneflare.study.estimate import duration
    from oneflare.upload.disclosure import disclose
    from oneflare.upload.signing import read_key

    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out}: an upload's name ends in .safetensors")
    charter = read_charter(charter_file)
    signing = None if key is None else read_key(key)
    member = who(charter, name, signing, out, must_sign=not dry_run)
    masking = masking_of(charter, member, mask, key, out)
    try:
        images = member_data(
            charter, data, image_column=image_column, label_column=label_column, skip_damaged=skip_damaged
        )
    except DamagedImages as error:
        if not dry_run:
            raise DataError(f"{error}; --dry-run lists all, --skip-damaged goes on without them") from None
        list_damaged(error.damaged, json=json)
        raise DataError(f"{error.summary}; repair or remove them, or go on without them: --skip-damaged") from None
    found = images.data
    if masking is not None:
        check_before_training(charter, member, masking, len(found))
    if not quiet:
        announce(charter, member, found, images.notes)
    if dry_run:
        guess = estimate(charter, found)
        if json:
            show.as_json(
                {
                    "samples": len(found),
                    "seconds": guess.seconds,
                    "upload_bytes": guess.upload_bytes,
                    "notes": list(images.notes),
                    "damaged": [row._asdict() for row in images.damaged],
                }
            )
        else:
            list_damaged(images.damaged)
            show.line(
                f"dry run: about {duration(guess.seconds)} of training on one core, "
                f"an upload of {_size(guess.upload_bytes)}; nothing was written"
            )
        return
    with member_progress(charter, enabled=not quiet) as observer:
        ledger, notes = Ledger(ledger_folder(key), budget), upload_notes(charter, images)
        envelope = Envelope(member, signing, notes, masking)
        made = make_upload_in(envelope, charter, found, out, observer=observer, ledger=ledger)
    content = disclose(out)
    if json:
        spent = None if made.balance is None else made.balance.to_dict()
        said = {"fingerprint": charter.fingerprint, "notes": list(images.notes), "summary": made.summary.to_dict()}
        show.as_json(content.to_dict() | said | {"budget": spent})
    elif not quiet:
        disclosure(content)
        if made.balance is not None:
            show.line(made.balance.text())
        state = "complete before, nothing to do" if made.complete_before else f"{made.summary.train_seconds:.1f} s"
        show.line(f"trained ({state}). Send {out} to the coordinator of {charter.name}, by any road; nothing else.")
        show.line(f"fingerprint of the terms: {short(charter.fingerprint)}; compare it with the coordinator's")
        if signing is None:
            show.line("not signed: the coordinator cannot tell who made it; --key signs it")


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


def _refuse_existing(path: Path) -> None:
    from oneflare.errors import ConfigError

    if path.exists():
        raise ConfigError(f"{path} exists; its members rely on it, so start another federation in another folder")


def _class_names(text: str) -> list[str]:
    from oneflare.errors import ConfigError

    path = Path(text)
    if not text:
        raise ConfigError("--classes: name them, for example --classes cat,dog, or give a file or folder with them")
    if path.is_dir():
        return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and entry.name[0] != ".")
    if path.is_file():
        try:
            return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise ConfigError(f"--classes {path}: is not a text file with one name per line") from None
    return [part.strip() for part in text.split(",") if part.strip()]


def _member(text: str) -> tuple[str, str | None]:
    from oneflare.upload.signing import public_key_of

    name, separator, key = text.partition("=")
    return name, public_key_of(key) if separator else None


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


def _size(number: float) -> str:
    from oneflare.federation.page import size_text

    return size_text(number)
