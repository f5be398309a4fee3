"""Who is named when a member exchanges two classes: `python -m benchmarks.exchanged RUNS [--cells FOLDER ...]`.

Trains federations of digits below RUNS, each once as it is and once with a member that exchanged two of its classes,
and counts who contradicts the others by `oneflare.fusion.trust.exchanged`: among honest members (false alarms), with
the member that trained on exchanged classes, and with it claiming seven times its images. `--cells` also looks at
finished runs of studies (RUN/result.json), and `--analytic` at statistics of the same federations, which need no
training. In all of them every member in turn exchanges every two of its classes in its finished upload.

Every federation is kept in results/trust/exchanged.json as soon as it is looked at, and a rerun looks at what is
missing. The table is printed and written beside it. The threshold was chosen on federations with numbers below FIRST.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oneflare._version import __version__
from oneflare.client.observer import Observer
from oneflare.core.config import Experiment
from oneflare.core.files import read_json, write_json, write_text
from oneflare.data import Split
from oneflare.fusion import UploadSet, build_fusion
from oneflare.fusion.densities import member_densities
from oneflare.fusion.trust.exchanged import (
    LEAST_IMAGES,
    Agreement,
    comparable,
    exchanges,
    find_exchanges,
    mean_views,
    picture_views,
)
from oneflare.fusion.trust.pictures import answers
from oneflare.fusion.trust.sums import IMAGES_PER_DIMENSION, Sketch
from oneflare.methods.resolve import resolve
from oneflare.simulation.features import load_data
from oneflare.simulation.files import RunFiles
from oneflare.simulation.stages import open_run, read_experiment, run_experiment
from oneflare.study.attacks import with_swapped_labels
from oneflare.study.lies import claiming_more, rewritten
from oneflare.upload import Upload, read_upload

RESULTS = Path("results/trust/exchanged.json")
FIRST = 21
ALPHAS, FEWEST, MOST = (0.05, 0.1, 0.2, 0.3, 0.5), 3, 10
SHARE = 0.34
Outcome = str
"""alone: the member is named; together: it and others; wrong: others only; missed: nobody is; nobody else: has both"""
Views = list[tuple[Tensor, Callable[[Tensor, Tensor], Agreement]]]
ORDER = ("alone", "together", "wrong", "missed", "nobody else")


def experiment_of(number: int, method: str) -> Experiment:
    """Federation `number`: alpha from 0.05 to 0.5, three to ten members."""
    settings: dict[str, Any] = {
        "method": method,
        "alpha": ALPHAS[number % len(ALPHAS)],
        "clients": FEWEST + number % (MOST - FEWEST + 1),
        "seed": 1000 + number,
        "workers": 1,
    }
    if method == "flare":
        settings |= {"epochs": 12, "encoder": {"name": "conv4", "width": 8}, "train": {"batch_size": 64}}
        settings["fusions"] = ["density_ratio"]
    else:
        settings |= {"analytic": {"name": "random_conv", "filters": 24}}
    return resolve(settings)


def outcome(found: Sequence[tuple[int, ...]], row: int, *, comparable: bool) -> Outcome:
    """found: the rows of every finding"""
    if not comparable:
        return "nobody else"
    if (row,) in found:
        return "alone"
    if any(row in rows for rows in found):
        return "together"
    return "wrong" if found else "missed"


def views_of(uploads: UploadSet) -> Views:
    """What can be relabelled, `(N, ..., C or C C)`, and how it becomes an agreement with `(N, C)` judged classes."""
    made: Views = []
    if uploads.contract.statistics is not None:
        sketches = [Sketch.of(upload.statistics()) for upload in uploads]
        total = int(sum(float(sketch.counts.sum()) for sketch in sketches))
        dims = min(sketches[0].means.shape[1], total // IMAGES_PER_DIMENSION)
        within = torch.stack([sketch.within[:dims, :dims] for sketch in sketches]).mean(0)
        means = torch.stack([sketch.means[:, :dims] for sketch in sketches])
        made.append((means, lambda means, judged: Agreement.of(mean_views(means, within), judged)))
    if uploads.contract.deep:
        judged = uploads.counts >= LEAST_IMAGES
        answered = answers(uploads, member_densities(uploads), judged)
        made.append((answered, lambda answered, judged: Agreement.of(picture_views(answered), judged)))
    return made


def relabelled(content: Tensor, row: int, first: int, second: int) -> Tensor:
    """The same after one member exchanged two classes: in its class means, or in its pictures and its answers."""
    changed, order = content.clone(), torch.arange(content.shape[-1] if content.ndim == 4 else content.shape[1])
    order[[first, second]] = order[[second, first]]
    if content.ndim == 4:
        changed[row] = changed[row][..., order]
        changed[:, row] = changed[:, row][:, order]
    else:
        changed[row] = changed[row][order]
    return changed


def judged_classes(uploads: UploadSet) -> Tensor:
    counts = [upload.statistics().counts for upload in uploads] if not uploads.contract.deep else list(uploads.counts)
    return torch.stack(counts) >= LEAST_IMAGES


def in_finished_uploads(made: Views, judged: Tensor) -> Counter[Outcome]:
    """Every member exchanges every two of its classes, one exchange at a time."""
    told: Counter[Outcome] = Counter()
    for row in range(len(judged)):
        for first, second in combinations(judged[row].nonzero().flatten().tolist(), 2):
            found: list[tuple[int, ...]] = []
            known = False
            for content, build in made:
                agreement = build(relabelled(content, row, first, second), judged)
                known = known or not bool(agreement.overall[row, first, second].isnan())
                found += [one.members for one in exchanges(agreement)] if known else []
            told[outcome(found, row, comparable=known)] += 1
    return told


def target(counts: Tensor) -> tuple[int, int, int] | None:
    """The member and the two classes of which it has many images and the most other members do too."""
    many = counts >= LEAST_IMAGES
    best: tuple[tuple[int, int], tuple[int, int, int]] | None = None
    for row in range(len(counts)):
        for first, second in combinations(many[row].nonzero().flatten().tolist(), 2):
            others = min(int(many[:, first].sum()), int(many[:, second].sum())) - 1
            key = (others, int(min(counts[row, first], counts[row, second])))
            if best is None or key > best[0]:
                best = key, (row, first, second)
    return None if best is None else best[1]


def trained_attack(folder: Path, uploads: UploadSet) -> dict[str, Any] | None:
    """What is said of the member that trained with two classes exchanged, and what it costs these classes."""
    chosen = target(uploads.counts)
    if chosen is None:
        return None
    row, first, second = chosen
    experiment, client = read_experiment(folder / "honest"), uploads.uploads[row].client
    data = load_data(experiment)
    federation, _ = open_run(folder / "honest", Observer())
    empty = np.empty(0, dtype=np.int64)
    owners = tuple(rows if owner == client else empty for owner, rows in enumerate(federation.partition.indices))
    swapped = dataclasses.replace(with_swapped_labels(data, first, second), owners=owners)
    place_of = folder / f"exchanged-{client}-{first}-{second}"
    run_experiment(experiment, place_of, dataset=swapped)
    sent = read_upload(RunFiles(place_of).client(client).upload, uploads.contract)
    with tempfile.TemporaryDirectory() as place:
        more = read_upload(rewritten(sent, Path(place) / "more.safetensors", claiming_more), uploads.contract)
        both = {"exchanged": sent, "exchanged, seven times the images": more}
        sets = {name: _with(uploads, upload) for name, upload in both.items()}
        found = {name: [one.members for _, one in find_exchanges(some)] for name, some in sets.items()}
        named = {name: outcome(rows, row, comparable=_shared(uploads.counts, chosen)) for name, rows in found.items()}
        right = {
            f"{name}, {'bounded' if share else 'free'}": _right(some, data.test, (first, second), share)
            for name, some in {"honest": uploads, **sets}.items()
            for share in (None, SHARE)
        }
    return {"named": named, "right": right, "others_wrongly": sum(_others(rows, row) for rows in found.values())}


def _shared(counts: Tensor, chosen: tuple[int, int, int]) -> bool:
    """Whether others have the two classes too."""
    classes = list(chosen[1:])
    others = (counts >= LEAST_IMAGES)[:, classes].sum(0) - 1
    return bool((others > 0).all())


def _others(found: Sequence[tuple[int, ...]], row: int) -> int:
    return sum(row not in rows for rows in found)


def _with(uploads: UploadSet, sent: Upload) -> UploadSet:
    taken = tuple(sent if upload.client == sent.client else upload for upload in uploads)
    return dataclasses.replace(uploads, uploads=taken)


def _right(uploads: UploadSet, test: Split, classes: tuple[int, int], share: float | None) -> list[float]:
    """Percent of all test images, and of those of the two classes, that density_ratio answers rightly."""
    model = build_fusion({"name": "density_ratio", "class_share": share}).fuse(uploads).model
    right = (model.logits(test.images).argmax(1) == test.labels).double()
    chosen = torch.isin(test.labels, torch.tensor(classes))
    return [100 * float(right.mean()), 100 * float(right[chosen].mean())]


def look(uploads: UploadSet, about: dict[str, Any], attacked: dict[str, Any] | None) -> dict[str, Any]:
    made, judged = views_of(uploads), judged_classes(uploads)
    honest = [build(content, judged) for content, build in made]
    lowest = [float(one.overall.nan_to_num(torch.inf).min()) for one in honest]
    return about | {
        "members": len(uploads),
        "false_alarms": sum(len(found.members) for one in honest for found in exchanges(one)),
        "lowest_agreement": min(lowest, default=None),
        "relabelled": dict(in_finished_uploads(made, judged)),
        "trained": attacked,
    }


def drawn(number: int, method: str, runs: Path) -> dict[str, Any]:
    """Federation `number`, trained where it is not yet."""
    experiment = experiment_of(number, method)
    folder = runs / (f"{number:04d}" if method == "flare" else f"{method}-{number:04d}")
    run_experiment(experiment, folder / "honest")
    _, uploads = open_run(folder / "honest", Observer())
    about = {"kind": f"digits, {method}", "run": folder.name, "alpha": experiment.partition.alpha}
    return look(uploads, about, trained_attack(folder, uploads) if method == "flare" else None)


def finished(cell: Path) -> dict[str, Any] | None:
    """A finished run of a study."""
    _, uploads = open_run(cell, Observer())
    if not comparable(uploads) or (uploads.contract.deep and "density" not in uploads.offered):
        return None
    experiment = read_experiment(cell)
    network = experiment.encoder["name"] if uploads.contract.deep else "sums"
    kind = f"{experiment.data.name}, {experiment.method}, {network}"
    return look(uploads, {"kind": kind, "run": cell.name, "alpha": experiment.partition.alpha}, None)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each kind of federation and each way to exchange classes."""
    lines = [
        "| federations | members | false alarms | lowest agreement | exchanged by | tried | named alone | with others "
        "| wrong member | missed | nobody else has them |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in sorted({row["kind"] for row in rows}):
        of_kind = [row for row in rows if row["kind"] == kind]
        lowest = [row["lowest_agreement"] for row in of_kind if row["lowest_agreement"] is not None]
        head = f"| {len(of_kind)} of {kind} | {sum(row['members'] for row in of_kind)} "
        head += f"| {sum(row['false_alarms'] for row in of_kind)} | {min(lowest):.2f} " if lowest else "| 0 | "
        ways = {"relabelling a finished upload": sum((Counter(row["relabelled"]) for row in of_kind), Counter())}
        trained = [row["trained"] for row in of_kind if row["trained"]]
        for name in trained[0]["named"] if trained else ():
            ways[f"training ({name})"] = Counter(one["named"][name] for one in trained)
        for way, told in ways.items():
            lines.append(f"{head}| {way} | {told.total()} | " + " | ".join(str(told[name]) for name in ORDER) + " |")
    trained = [row["trained"] for row in rows if row["trained"]]
    if trained:
        lines += [
            "",
            "| density_ratio on test images, percent right | all classes | the two classes | lowest |",
            "|---|---|---|---|",
        ]
        for name in trained[0]["right"]:
            values = torch.tensor([one["right"][name] for one in trained])
            mean = values.mean(0)
            lines.append(f"| {name} | {mean[0]:.1f} | {mean[1]:.1f} | {values[:, 1].min():.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--number", type=int, default=100, help="federations of digits that are trained")
    parser.add_argument("--analytic", type=int, default=0, help="federations of digits by statistics")
    parser.add_argument("--cells", type=Path, nargs="*", default=[], help="folders of finished runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {row["run"]: row for row in read_json(RESULTS)["runs"]} if RESULTS.exists() else {}

    def keep(row: dict[str, Any] | None) -> None:
        if row is not None:
            rows[row["run"]] = row
            write_json(RESULTS, {"oneflare": __version__, "runs": list(rows.values())})
            print(
                row["run"],
                row["false_alarms"],
                row["relabelled"],
                row["trained"] and row["trained"]["named"],
                flush=True,
            )

    for folder in arguments.cells:
        for cell in sorted(path.parent for path in folder.glob("*/result.json")):
            if cell.name not in rows:
                keep(finished(cell))
    for number in range(FIRST, FIRST + arguments.analytic):
        if f"analytic-{number:04d}" not in rows:
            keep(drawn(number, "analytic", arguments.runs))
    for number in range(FIRST, FIRST + arguments.number):
        if f"{number:04d}" not in rows:
            keep(drawn(number, "flare", arguments.runs))
    write_text(RESULTS.with_suffix(".md"), table(list(rows.values())))
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
