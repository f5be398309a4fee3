"""`oneflare server`: the coordinator's commands for a federation by file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oneflare.cli.advice import Images, Privacy, advised, tell
from oneflare.cli.options import (
    GROUP,
    Approve,
    CheckImages,
    CheckPoints,
    Compare,
    Folder,
    Json,
    Overrides,
    Quiet,
)

if TYPE_CHECKING:
    from oneflare.data import Split
    from oneflare.federation.charter import Charter

WAIT_SECONDS = 60.0
"""for another command that changes the same federation"""
server = typer.Typer(help="Coordinate a federation: set its terms, admit its members, fuse its model.", **GROUP)

Classes = Annotated[
    str,
    typer.Option(
        "--classes",
        help="Names of the classes: with commas between, one per line of a text file, the folders in a folder, or "
        "the labels in a table (labels.csv).",
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        "--image-size",
        help="Images are resized to this many pixels, 8 to 1024; default: the backbone's own, or 32.",
    ),
]
Channels = Annotated[int, typer.Option("--channels", help="1 for grey, 3 for colour.")]
Mirror = Annotated[bool, typer.Option("--mirror", help="State that a mirrored image keeps its class.")]
Pixels = Annotated[
    list[str] | None,
    typer.Option(
        "--pixels",
        metavar="KEY=VALUE",
        help="What the numbers in image files mean: bits=12, or low=600 and high=3700, for images of more than 8 "
        "bits; background=black for transparent places; page=1 for files with several. Repeat.",
    ),
]
FederationName = Annotated[
    str | None, typer.Option("--name", help="Name of the federation; default: the name of its folder.")
]
Members = Annotated[
    list[str] | None,
    typer.Option(
        "--member",
        help="NAME or NAME=KEY (a public key or its file); may be repeated. Without any, anybody may send.",
    ),
]
Deadline = Annotated[
    str | None,
    typer.Option("--deadline", help="Last day for uploads, such as 2027-01-31; in UTC unless a time zone is given."),
]
Use = Annotated[str, typer.Option("--use", help="What the model is for; stated on its card.")]
Limits = Annotated[str, typer.Option("--limits", help="What the model is not for; stated on its card.")]
Encrypt = Annotated[
    bool, typer.Option("--encrypt", help="Members encrypt their uploads, so that only you can read them.")
]
Uploads = Annotated[
    Path | None, typer.Option("--uploads", help="Folder with the uploads; default: those of the last fusion.")
]
Add = Annotated[
    list[Path] | None, typer.Option("--add", help="Add this upload, even after the deadline; may be repeated.")
]
Remove = Annotated[
    list[str] | None, typer.Option("--remove", help="Leave this member out from now on; may be repeated.")
]
Late = Annotated[bool, typer.Option("--late", help="Accept uploads that were made after the deadline.")]
Keep = Annotated[
    bool,
    typer.Option("--keep", help="For members without a usable upload, keep the upload of the last fusion."),
]
MinMembers = Annotated[
    int | None,
    typer.Option(
        "--min-members",
        min=1,
        help="Fuse nothing with fewer members than this. Default: as many as the last fusion had, "
        "without those who were removed; for the first fusion, all who are admitted.",
    ),
]
TestImages = Annotated[
    Path | None,
    typer.Option("--test", help="Measure the model on these images of yours (class folders, a table or parquet)."),
]
Releases = Annotated[
    Path | None,
    typer.Option("--releases", help="Folder with the members' releases, where sums are masked."),
]


@server.command("init")
def init(
    folder: Folder,
    overrides: Overrides = None,
    classes: Classes = "",
    image_size: ImageSize = None,
    channels: Channels = 3,
    mirror: Mirror = False,
    pixels: Pixels = None,
    name: FederationName = None,
    member: Members = None,
    deadline: Deadline = None,
    use: Use = "",
    limits: Limits = "",
    privacy: Privacy = "open",
    images: Images = None,
    encrypt: Encrypt = False,
    json: Json = False,
) -> None:
    """Write federation.yaml, the terms every member trains under, and say what to send.

    Where you choose no method, the one that was measured best for your --privacy is used, and two lines say why.

    [bold]Examples[/bold]

      oneflare server init skin --classes benign,malignant --privacy masked

      oneflare server init lungs --classes normal,pneumonia,covid --image-size 64 --channels 1 --pixels bits=12

      oneflare server init digits --classes 0,1,2,3 --image-size 8 --channels 1 --member north=north.pub epochs=20

      oneflare server init skin --classes benign,malignant backbone=efficientnet_lite0 method=analytic
    """
    from oneflare.core.layers import merge, parse_overrides
    from oneflare.federation.charter import DEFAULT_SIZE, new_charter
    from oneflare.federation.recommendation import Situation

    _refuse_existing(folder)
    names, settings = _class_names(classes), parse_overrides(overrides or [], once=True)
    backbone = "backbone" in settings
    side = image_size or (None if backbone else DEFAULT_SIZE)
    advice = advised(settings, Situation(len(names), side, channels, len(member or ()), images, backbone), privacy)
    charter = new_charter(
        name or folder.resolve().name,
        settings if advice is None else merge(advice.settings, settings),
        classes=names,
        image={
            "size": image_size,
            "channels": channels,
            "mirror": mirror,
            "pixels": parse_overrides(pixels, once=True) if pixels else None,
        },
        deadline=deadline,
        use=use,
        limits=limits,
        members=_members(member or []),
    )
    charter = _founded(folder, charter, encrypt=encrypt)
    if not json:
        tell(advice)
    _what_to_send(folder, charter, json=json)


def _founded(folder: Path, charter: Charter, *, encrypt: bool) -> Charter:
    """The charter with the coordinator's new keys, as it was written into the folder."""
    from oneflare.core.files import exclusive
    from oneflare.federation.charter import FILE, revised
    from oneflare.federation.model_signing import make_key
    from oneflare.federation.opening import make_box
    from oneflare.federation.recording import write_down

    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        _refuse_existing(folder)
        key = make_key(folder)  # after everything else was found right
        charter = revised(charter, coordinator=key, encryption=make_box(folder) if encrypt else None)
        charter.write(folder / FILE)
        write_down(charter, folder, [])
    return charter


def _what_to_send(folder: Path, charter: Charter, *, json: bool) -> None:
    """After `init`: what was written, what goes to the members, and what they and the coordinator run next."""
    from oneflare.cli import show
    from oneflare.cli.show_federation import masked_next_steps
    from oneflare.federation.charter import FILE, short
    from oneflare.federation.member import upload_size
    from oneflare.federation.model_signing import PRIVATE
    from oneflare.federation.opening import PRIVATE as BOX
    from oneflare.federation.page import size_text
    from oneflare.upload.encryption import SUFFIX as ENCRYPTED

    path, upload_bytes = folder / FILE, upload_size(charter)
    if json:
        show.as_json({"file": str(path), "fingerprint": charter.fingerprint, "upload_bytes": upload_bytes})
        return
    until = f" until {charter.deadline:%Y-%m-%d %H:%M %Z}" if charter.deadline else ""
    show.done(f"wrote {path}: {len(charter.classes)} classes, method {charter.terms.method}")
    show.done(f"fingerprint {short(charter.fingerprint)}: confirm it with the members by telephone or in person")
    if charter.coordinator is not None:
        show.done(f"{folder / PRIVATE}: your private key, which signs the models. Keep it, copy it to nobody.")
    else:
        show.done("Models will not be signed: pip install 'oneflare[sign]' before this command signs them.")
    if charter.encryption is not None:
        show.done(f"{folder / BOX}: your private key, which decrypts uploads. Without it nobody can read them.")
    if charter.terms.upload.masked is not None:
        masked_next_steps(folder, path)
        return
    sent = f"NAME.safetensors{ENCRYPTED if charter.encryption is not None else ''}"
    show.done(f"\nSend {path} to every member, and nothing else. A member runs:")
    show.done("  oneflare client keygen --name NAME                    # once; sends you NAME.pub, keeps NAME.key")
    show.done("  oneflare client train federation.yaml --data FOLDER --name NAME --key NAME.key --out NAME.safetensors")
    show.done(f"and returns {sent} (about {size_text(upload_bytes)}){until}, by any road. You run:")
    show.done(f"  oneflare server admit {folder} NAME NAME.pub          # for each key that arrives")
    show.done(f"  oneflare server fuse {folder} --uploads FOLDER")
    if not charter.members:
        show.done("No member is named yet: until one is, anybody's upload counts.")


def _refuse_existing(folder: Path) -> None:
    from oneflare.errors import ConfigError
    from oneflare.federation.charter import FILE

    path = folder / FILE
    if path.exists():
        raise ConfigError(f"{path} exists; its members rely on it, so start another federation in another folder")


def _class_names(text: str) -> list[str]:
    from oneflare.data.tables import TEXT_SUFFIXES, label_names
    from oneflare.errors import ConfigError

    path = Path(text)
    if not text:
        raise ConfigError("--classes: name them, for example --classes cat,dog, or give a file or folder with them")
    if path.is_dir():
        return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and entry.name[0] != ".")
    if path.suffix.lower() in TEXT_SUFFIXES and path.is_file():
        return list(label_names(path))
    if path.is_file():
        try:
            return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise ConfigError(f"--classes {path}: is not a text file with one name per line") from None
    return [part.strip() for part in text.split(",") if part.strip()]


def _members(texts: Sequence[str]) -> dict[str, str | None]:
    """NAME or NAME=KEY of each --member, every name once."""
    from oneflare.errors import ConfigError
    from oneflare.upload.signing import public_key_of

    members: dict[str, str | None] = {}
    for text in texts:
        name, separator, key = text.partition("=")
        if name in members:
            raise ConfigError(f"--member {name} is given twice; remove one of the two")
        members[name] = public_key_of(key) if separator else None
    return members


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
    from oneflare.federation.keys import admit_member
    from oneflare.upload.signing import check_name, public_key_of

    public = None if key is None else public_key_of(key)
    charter, changed = admit_member(folder, check_name(name), public)
    how = "without a key: whoever uses this name is believed" if public is None else f"with key {public}"
    replaced = charter.members.get(name)
    instead = f", which replaces {replaced}" if replaced is not None and replaced != public else ""
    show.done(f"admitted {name} {how}{instead}; members: {', '.join(changed.members)}")


@server.command("fuse")
def fuse(
    folder: Folder,
    uploads: Uploads = None,
    add: Add = None,
    remove: Remove = None,
    late: Late = False,
    keep: Keep = False,
    min_members: MinMembers = None,
    test: TestImages = None,
    releases: Releases = None,
    check_images: CheckImages = None,
    check_points: CheckPoints = 10.0,
    approve: Approve = None,
    compare: Compare = True,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify uploads, say who is in, missing or refused and why, and make one model with its card and report.

    Works with any non-empty part of the members, if --min-members allows it. Joining and leaving later give exactly
    what a fresh fusion gives. Every version stays in the folder `models`, unless somebody who was removed is in it.

    [bold]Examples[/bold]

      oneflare server fuse federation --uploads inbox --test held-out

      oneflare server fuse federation --uploads inbox --min-members 2

      oneflare server fuse federation --add late/east.safetensors

      oneflare server fuse federation --remove north

      oneflare server fuse federation --uploads inbox --check-images own-images

      oneflare server fuse federation --releases inbox

    Members that share classes are compared by what their networks or statistics say of them. One that calls two classes
    by each other's names stops the fusion with its name, and nothing is changed, until you --approve or --remove it.
    With --check-images the model is also made without each member in turn, and a member that costs a class more than
    --check-points of your images does the same. Members that differ in their numbers are warned about.
    """
    from oneflare.cli.progress import Remarks
    from oneflare.cli.show_federation import told
    from oneflare.errors import ConfigError
    from oneflare.federation.admission import Admission
    from oneflare.federation.charter import read_charter
    from oneflare.federation.coordinator import fuse_federation
    from oneflare.federation.publishing import publish
    from oneflare.federation.quorum import Rules

    charter = read_charter(folder)
    if approve and check_images is None and not compare:
        raise ConfigError("--approve: --no-compare without --check-images checks nobody; leave --approve out")
    held_out = None if test is None else _test_images(test, charter, quiet=quiet)
    own = None if check_images is None else _own_images(check_images, charter)
    admission = Admission(own, check_points, tuple(approve or ()), compare)
    fused = fuse_federation(
        folder,
        uploads=uploads,
        add=add or (),
        remove=remove or (),
        rules=Rules(late=late, keep=keep, min_members=min_members, admission=admission, releases=releases),
        test=held_out,
        observer=None if quiet else Remarks(),
    )
    publish(fused)
    told(fused, json=json, quiet=quiet)


def _test_images(folder: Path, charter: Charter, *, quiet: bool) -> Split:
    """The images that the model is measured on; what is notable about them goes to stderr."""
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.data.local import read_local
    from oneflare.federation.member import charter_reader

    with progress(enabled=not quiet, table=False) as watching:
        reader = charter_reader(charter, watching)
        found = read_local(folder, charter.classes, charter.inputs, part="test", reader=reader)
    for text in () if quiet else found.notes:
        show.note(f"note: {text}")
    return found.split


def _own_images(folder: Path, charter: Charter) -> Split:
    from oneflare.data.local import read_local
    from oneflare.federation.member import charter_reader

    return read_local(folder, charter.classes, charter.inputs, part="test", reader=charter_reader(charter)).split
