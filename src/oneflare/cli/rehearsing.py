"""`oneflare client rehearse`: how good a member's own model would be, before anything is sent."""

from __future__ import annotations

from typing import Annotated

import typer

from oneflare.cli.options import CharterFile, ImageColumn, Json, LabelColumn, OwnImages, PatientColumn, Quiet


def rehearse(
    charter_file: CharterFile,
    data: OwnImages,
    folds: Annotated[
        int, typer.Option("--folds", min=2, max=100, help="Into how many parts your images are divided.")
    ] = 5,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Leave out images that cannot be used.")] = False,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    patient_column: PatientColumn = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rehearse on your own images: cross-validation under the terms, by patient. Nothing is sent or kept.

    Your images are divided into parts; for each part a model is trained on the others and asked about this one. Images
    of one patient are never on both sides. The figures say how good your own model is alone.

    [bold]Example[/bold]

      oneflare client rehearse federation.yaml --data images
    """
    from oneflare.cli import show
    from oneflare.cli.evaluating import class_lines, percent, summary
    from oneflare.cli.progress import Remarks, progress
    from oneflare.core.records import record_to_dict
    from oneflare.data.tables import Columns
    from oneflare.federation.charter import read_charter
    from oneflare.federation.member import charter_reader, member_data
    from oneflare.federation.rehearsal import rehearse as rehearsed

    charter = read_charter(charter_file)
    columns = Columns(image_column, label_column, patient_column)
    with progress(enabled=not quiet, table=False) as watching:
        reader = charter_reader(charter, watching)
        images = member_data(charter, data, columns=columns, skip_damaged=skip_damaged, reader=reader)
    for note in () if quiet or json else images.notes:
        show.note(f"note: {note}")
    found = rehearsed(charter, images.data, folds, None if quiet or json else Remarks())
    if json:
        show.as_json(record_to_dict(found))
        return
    show.line(f"{found.folds} folds, {summary(found.figures)}")
    each = ", ".join(f"{100 * value:.1f}" for value in found.folds_accuracy)
    show.line(f"accuracy of each fold: {each} %; always answering the most frequent class: {percent(found.guess)}")
    for text in class_lines(found.figures):
        show.line(text)
    if found.figures.patients is None:
        show.note("note: no patients are named, so images of one person may be on both sides; --patient-column")
    show.done("This is your own model alone; nothing was sent or kept.")
