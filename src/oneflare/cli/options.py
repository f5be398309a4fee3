"""The options and arguments that several commands have, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from oneflare.cli import names

GROUP: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": "rich"}
"""how every group of commands behaves"""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings of the experiment. Some have short names: data= alpha= clients= method= epochs= seed= "
        "encoder=. All others are written with a dot, such as train.lr=0.05 or partition.kind=iid.",
        show_default=False,
        autocompletion=names.complete_settings,
    ),
]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="Read settings from this YAML file.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Write the files into this folder. Default: runs/NAME, with a name derived from the settings.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress and no tables. Files and --json are written as always.")
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", help="Also log the run to tensorboard or mlflow (needs the extra `track`); may be repeated."
    ),
]
CharterFile = Annotated[
    Path, typer.Argument(metavar="FEDERATION.YAML", help="The charter as the coordinator sent it, unchanged.")
]
OwnImages = Annotated[
    Path,
    typer.Option(
        "--data",
        "-d",
        help="Your images: a folder with one folder per class, a table of files (labels.csv) or the folder that "
        "holds it, or parquet with images and labels.",
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="FEDERATION", help="The federation's folder.")]
ImageColumn = Annotated[
    str | None,
    typer.Option(
        "--image-column",
        help="Column of a parquet file that holds the images, or of a table that holds their files; default: image, "
        "img, file, file_name or path.",
    ),
]
Mask = Annotated[
    Path | None,
    typer.Option(
        "--mask",
        help="Folder with your mask key, where sums are masked; default: NAME.mask beside the --key, or in your home.",
    ),
]
LabelColumn = Annotated[
    str | None,
    typer.Option("--label-column", help="Column of a table or parquet file that holds the labels; default: label."),
]
PatientColumn = Annotated[
    str | None,
    typer.Option(
        "--patient-column", help="Column of a table or parquet file that says whose image it is; default: patient."
    ),
]
CheckImages = Annotated[
    Path | None,
    typer.Option(
        "--check-images",
        help="Check the effect of each member on these images of yours (class folders, a table or parquet).",
    ),
]
CheckPoints = Annotated[
    float,
    typer.Option(
        "--check-points",
        min=0,
        max=100,
        help="Percentage of a class's --check-images that a member may cost before --approve is needed.",
    ),
]
Approve = Annotated[
    list[str] | None,
    typer.Option("--approve", help="Accept that this member contradicts others, or what it costs; may be repeated."),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare/--no-compare",
        help="Compare what members say of each other's classes, or leave that out (it takes long for large networks).",
    ),
]
