"""`oneflare evaluate`: how good a model is on labelled images, and the scores that a member sends of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oneflare.cli.loading import Device, FusionName, Key, Model, found_file, load
from oneflare.cli.options import ImageColumn, Json, LabelColumn, PatientColumn

if TYPE_CHECKING:
    from oneflare.federation.charter import Charter
    from oneflare.federation.scores import MemberScores
    from oneflare.federation.scoring import ModelTest
    from oneflare.metrics import AgainstAlone, Measured, ModelFigures
    from oneflare.upload.signing import SigningKey

Charters = Annotated[
    Path | None,
    typer.Option(
        "--federation",
        metavar="FEDERATION.YAML",
        help="The charter of the federation that --out is for; default: the one beside the model.",
    ),
]
TestImages = Annotated[
    Path,
    typer.Option(
        "--data",
        "-d",
        help="Labelled images: a folder with one folder per class, a table of files (labels.csv) or the folder "
        "that holds it, or parquet with images and labels. A table with a column split gives its rows for test.",
    ),
]
Alone = Annotated[
    Path | None,
    typer.Option(
        "--alone", metavar="UPLOAD", help="Also measure your own model on the same images: your upload, or a model."
    ),
]
ScoresFile = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Write the scores, which you may send to the coordinator, to this JSON file."),
]
ScoresName = Annotated[
    str | None, typer.Option("--name", help="Your name in the scores; default: the member whose key --sign is.")
]
ScoresKey = Annotated[
    Path | None, typer.Option("--sign", metavar="NAME.KEY", help="Sign the scores with this private key of yours.")
]


def evaluate(
    model: Model,
    data: TestImages,
    alone: Alone = None,
    out: ScoresFile = None,
    federation: Charters = None,
    name: ScoresName = None,
    sign: ScoresKey = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    patient_column: PatientColumn = None,
    fusion: FusionName = None,
    key: Key = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure a model on labelled images of yours, and write the scores that the coordinator may know.

    Prints accuracy, balanced accuracy, the rates and areas of each class with 95 % intervals, and calibration, all for
    the most likely class. If thresholds lie beside the model (`oneflare server thresholds`), also how good it is as it
    decides by them: the accuracy of the images that get a class, and how many get none. The file that --out writes
    holds figures only: no image, no name of a file or patient, and nothing about groups of fewer images (or patients)
    than the terms allow.

    [bold]Examples[/bold]

      oneflare evaluate federation --data held-out

      oneflare evaluate north.safetensors --data held-out      # an upload: that member alone

      oneflare evaluate model.safetensors --data held-out --alone north.safetensors --sign north.key --out scores.json
    """
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.data.local import class_table, read_local
    from oneflare.data.tables import Columns
    from oneflare.federation.scoring import ModelTest, Subject
    from oneflare.simulation.features import reader_of

    file = found_file(model, fusion)
    signer = _signer(file, federation, name, sign, out)
    loaded = load(model, fusion, key, device)
    own = None if alone is None else Subject(load(alone, None, None, device), alone)
    task = loaded.task
    columns = Columns(image_column, label_column, patient_column)
    with progress(enabled=not json, table=False) as watching:
        reader = reader_of(task.image, loaded.device.type, watching)
        local = read_local(data, task.classes, task.image, columns=columns, part="test", reader=reader)
    trial = ModelTest(Subject(loaded, file), local.split, own)
    scores = None if out is None else signer.write(trial, out)
    for note in () if json else local.notes:
        show.note(f"note: {note}")
    for remark in loaded.remarks():
        show.note(f"warning: {remark}")
    if json:
        counts = class_table(local.split.labels, task.classes)
        show.as_json({"model": str(model), "data": str(data), "images": counts} | _as_json(trial, scores))
        return
    _table(trial)
    if out is not None and scores is not None:
        _written(out, scores)


class _Signer:
    """Who tells the scores, for which federation."""

    def __init__(self, charter: Charter | None, member: str | None, key: SigningKey | None) -> None:
        self.charter, self.member, self.key = charter, member, key

    def write(self, trial: ModelTest, out: Path) -> MemberScores:
        scores = trial.scores(self.charter, self.member)
        scores = scores if self.key is None else scores.signed(self.key)
        scores.write(out)
        return scores


def _signer(file: Path, federation: Path | None, name: str | None, sign: Path | None, out: Path | None) -> _Signer:
    """Checked before anything is measured: which charter, which member, which key."""
    from oneflare.errors import ConfigError
    from oneflare.federation.charter import FILE, read_charter
    from oneflare.federation.model_signing import federation_of
    from oneflare.upload.signing import check_name, read_key

    if out is None:
        if sign is not None or name is not None or federation is not None:
            raise ConfigError("--sign, --name and --federation are for scores; give --out FILE, to which they go")
        return _Signer(None, None, None)
    beside = federation_of(file) / FILE
    place = federation or (beside if beside.is_file() else None)
    charter, key = None if place is None else read_charter(place), None if sign is None else read_key(sign)
    if charter is None:
        return _Signer(None, None if name is None else check_name(name), key)
    owner = None if key is None else charter.member_of(key.public)
    member = name or owner
    if member is None:
        known = f" (members: {', '.join(charter.members)})" if charter.members else ""
        raise ConfigError(f"--name: say whose scores these are{known}")
    charter.check_member(check_name(member))
    wanted = charter.members.get(member)
    if owner is not None and owner != member:
        raise ConfigError(f"--sign {sign}: the key belongs to {owner}, not to {member}; give {member}'s own")
    if wanted is not None and (key is None or key.public != wanted):
        what = "--sign" if key is None else f"--sign {sign}: the key is not {member}'s"
        raise ConfigError(f"{what}: {member}'s scores must be signed; give --sign with the private key of {wanted}")
    return _Signer(charter, member, key)


def _as_json(trial: ModelTest, scores: MemberScores | None) -> dict[str, Any]:
    """The figures under the names that they have had, and all of them with intervals."""
    from oneflare.core.records import record_to_dict

    figures, alone, comparison = trial.figures(), trial.alone(), trial.comparison
    rates = [None if one.sensitivity is None else one.sensitivity.value for one in figures.classes]
    assert figures.balanced_accuracy is not None
    return {
        "accuracy": figures.accuracy.value,
        "balanced_accuracy": figures.balanced_accuracy.value,
        "worst_class": min(rate for rate in rates if rate is not None),
        "calibration_error": figures.calibration_error,
        "per_class": rates,
        "by_rule": None if figures.by_rule is None else record_to_dict(figures.by_rule),
        "figures": record_to_dict(figures),
        "alone": None if alone is None else record_to_dict(alone),
        "comparison": None if comparison is None else record_to_dict(comparison),
        "scores": None if scores is None else scores.to_dict(),
    }


def _table(trial: ModelTest) -> None:
    from oneflare.cli import show

    figures, alone, comparison = trial.figures(), trial.alone(), trial.comparison
    show.line(summary(figures))
    decision = trial.together.model.decision
    if decision is not None:
        show.line(f"that is the most likely class; the model decides by {decision.words}:")
        show.line(f"  {by_rule(figures)}")
    if alone is not None and comparison is not None:
        show.line(f"your own model alone, on the same images: accuracy {percent(alone.accuracy)}")
        show.line(gain(comparison))
    for text in class_lines(figures, alone):
        show.line(text)


def summary(figures: ModelFigures) -> str:
    """The figures of all images in one line."""
    patients = "" if figures.patients is None else f" of {figures.patients} patients"
    balanced = "" if figures.balanced_accuracy is None else f", balanced {percent(figures.balanced_accuracy)}"
    return (
        f"{figures.images} images{patients}: accuracy {percent(figures.accuracy)}{balanced}, "
        f"calibration error {100 * figures.calibration_error:.1f} %"
    )


def by_rule(figures: ModelFigures) -> str:
    """What the model's decision rule makes of all images, in one line."""
    rule = figures.by_rule
    assert rule is not None
    right = "withheld, too few" if rule.accuracy is None else percent(rule.accuracy)
    if rule.decided == rule.images:
        return f"accuracy {right}; every image gets a class"
    return (
        f"accuracy {right} of the {rule.decided} images that get a class; {percent(rule.undecided)} of "
        f"{rule.images} images are answered with none of the known classes"
    )


def gain(comparison: AgainstAlone) -> str:
    """What the federation gains, in one line."""
    value = comparison.gain
    if value.low > 0:
        verdict = "better"
    elif value.high < 0:
        verdict = "worse"
    else:
        verdict = "neither better nor worse beyond chance"
    return (
        f"together against alone: {100 * value.value:+.1f} points ({100 * value.low:+.1f} to {100 * value.high:+.1f}), "
        f"{verdict}; {comparison.better} images are right only together, {comparison.worse} only alone"
    )


def percent(value: Measured | None) -> str:
    """A figure with its interval."""
    return "-" if value is None else f"{100 * value.value:.1f} % ({100 * value.low:.1f} to {100 * value.high:.1f})"


def class_lines(figures: ModelFigures, alone: ModelFigures | None = None) -> Sequence[str]:
    """A line for each class, with a heading; figures that are withheld or that no image gives are a dash."""
    heads = ["class", "images", "sensitivity", "specificity", "AUROC", "average precision"]
    heads += ["sensitivity as decided"] if figures.by_rule is not None else []
    heads += ["sensitivity alone"] if alone is not None else []
    rows = []
    for label, one in enumerate(figures.classes):
        row = [one.name, "few" if one.support is None else str(one.support)]
        row += [percent(value) for value in (one.sensitivity, one.specificity, one.auroc, one.average_precision)]
        row += [percent(figures.by_rule.classes[label].sensitivity)] if figures.by_rule is not None else []
        rows.append(row + ([percent(alone.classes[label].sensitivity)] if alone is not None else []))
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    ]


def _written(out: Path, scores: MemberScores) -> None:
    from oneflare.cli import show

    limit = scores.smallest_group
    signed = "signed" if scores.signature is not None else "not signed"
    who = scores.member or "nobody named"
    show.done(f"{out}: figures only, from {who}, {signed}; nothing about groups of fewer than {limit}")
    if scores.federation is None:
        show.done("It names no federation, so no coordinator takes it; --federation FEDERATION.YAML makes it theirs.")
    else:
        show.done("Send it to the coordinator, who runs `oneflare server scores FEDERATION FILE`.")
