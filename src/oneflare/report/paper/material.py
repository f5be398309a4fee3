"""What the paper is made of: the results of its studies at the largest scale that is there, and its claims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oneflare.core.config import Experiment
from oneflare.errors import RunError
from oneflare.methods.resolve import resolve
from oneflare.report.lead import listed
from oneflare.report.paper.names import ENCODERS, data_name, method_name
from oneflare.study.declare import find_declaration
from oneflare.study.estimate import images_of
from oneflare.study.records import CellResult, PlaceResult, RowResult, StudyResult
from oneflare.study.scales import find_scale
from oneflare.study.summary import JUDGING, SCALES, JudgedClaim, best_results, judged_claims

OUTLINE = ("table1", "figure1", "table2", "figure2", "table3", "figure3", "peers")
"""the studies whose tables and figures the paper has, in its order"""
NBSP = "\N{NO-BREAK SPACE}"
SUGGESTED = "decisive"
"""the scale for which every study of the outline is declared and which two cores can run"""
PIXELS = {"digits": 8, "cifar10": 32, "cifar100": 32, "svhn": 32, "tiny-imagenet": 64}
"""of the published data sets: how many pixels an image is high and wide"""


@dataclass(frozen=True)
class Material:
    """The results behind a paper."""

    studies: dict[str, StudyResult]
    """by name, in the order of the outline"""
    claims: list[JudgedClaim] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    """studies of the outline that have no results"""

    @property
    def scales(self) -> tuple[str, ...]:
        """at which the tables and figures were run, the largest first"""
        found = {content.scale for content in self.studies.values()}
        return tuple(scale for scale in SCALES if scale in found)

    @property
    def names(self) -> list[str]:
        """of all methods in the tables and figures"""
        return list(dict.fromkeys(method_name(row) for content in self.studies.values() for row in content.rows))


def read_material(results: Path, scale: str | None = None) -> Material:
    """The results in a folder; scale: this one instead of the largest that is there."""
    scales: Sequence[str] = SCALES if scale is None else (find_scale(scale).name,)
    found = {study: best_results(results, study, scales) for study in OUTLINE}
    studies = {study: content for study, content in found.items() if content is not None}
    if not studies:
        what = "no results of the paper's studies" if scale is None else f"no results of the paper's studies at {scale}"
        raise RunError(f"{what} in {results}; make them with `{command(OUTLINE, scale or SUGGESTED, results)}`")
    judging = [name for name in scales if name in JUDGING]
    claims = (judged_claims(results, judging) if judging else []) or judged_claims(results, scales)
    return Material(studies, claims, tuple(study for study in OUTLINE if study not in studies))


def command(studies: Sequence[str], scale: str, results: Path) -> str:
    """What makes the results of the studies, at the scale, or at another where one of them is not declared for it."""
    if not all(find_declaration(study).grids(scale) for study in studies):
        scale = SUGGESTED
    where = "" if results == Path("results") else f" --out {results}"
    return f"oneflare study {' '.join(studies)} --scale {scale}{where}"


def experiment_at(content: StudyResult, place: PlaceResult, arm: str | None = None) -> Experiment:
    """The settings of an arm at a place; those that all arms share do not depend on which."""
    return resolve(content.settings[place.id][arm or content.row(content.baseline).arm])


def images_words(content: StudyResult, place: PlaceResult) -> str:
    """`10,000 training and 5,000 test images of 16 × 16 pixels`, the test images as far as runs say their number"""
    experiment = experiment_at(content, place)
    train, pixels = place.train_images or images_of(experiment), experiment.data.image_size or PIXELS.get(place.data)
    test = place.test_images
    words = f"{train:,} training images" if test is None else f"{train:,} training and {test:,} test images"
    return words if pixels is None else f"{words} of {pixels}{NBSP}×{NBSP}{pixels} pixels"


def network_words(content: StudyResult, place: PlaceResult) -> str:
    """`a ResNet-8 of width 16, 25 epochs`"""
    experiment = experiment_at(content, place)
    name = str(experiment.encoder["name"])
    words = ENCODERS.get(name, f"the network {name}")
    width, strided = experiment.encoder.get("width"), experiment.encoder.get("stem_stride") not in (None, 1)
    words += "" if width is None else f" of width {width}"
    words += " with a strided stem" if strided else ""
    return f"{words}, {experiment.epochs} epochs"


def setting_words(content: StudyResult) -> str:
    """Data, images, network, alpha and clients of a study, each said once where its places share it."""
    places = content.places
    images = _shared((data_name(place.data), images_words(content, place)) for place in places)
    networks = _shared((data_name(place.data), network_words(content, place)) for place in places)
    alphas = listed(dict.fromkeys(f"{place.alpha:g}" for place in places))
    clients = listed(dict.fromkeys(str(place.clients) for place in places))
    data = listed(dict.fromkeys(data_name(place.data) for place in places))
    return f"{data}, {images}, {networks}, α{NBSP}={NBSP}{alphas}, {clients} clients"


def _shared(pairs: Iterable[tuple[str, str]]) -> str:
    """`x` where all pairs say x, else `x (A and B), y (C)`"""
    names: dict[str, list[str]] = {}
    for name, words in dict.fromkeys(pairs):
        names.setdefault(words, []).append(name)
    if len(names) == 1:
        return next(iter(names))
    return ", ".join(f"{words} ({listed(named)})" for words, named in names.items())


def seeds_words(cells: Iterable[CellResult]) -> str:
    """`one seed`, `3 seeds`, `5 to 20 seeds`"""
    counts = sorted({len(cell.seeds) for cell in cells if cell.seeds})
    if not counts:
        return "no seed yet"
    if counts[0] == counts[-1]:
        return "one seed" if counts == [1] else f"{counts[0]} seeds"
    return f"{counts[0]} to {counts[-1]} seeds"


def place_words(place: PlaceResult, places: Sequence[PlaceResult]) -> str:
    """`CIFAR-10, α = 0.05`, and the number of clients where places differ in it"""
    clients = "" if len({other.clients for other in places}) == 1 else f", {place.clients} clients"
    return f"{data_name(place.data)}, α{NBSP}={NBSP}{place.alpha:g}{clients}"


def best_cell(cells: Sequence[CellResult]) -> CellResult | None:
    """The one with the best mean."""
    return max((cell for cell in cells if cell.mean is not None), key=lambda cell: cell.mean or 0.0, default=None)


def main_rows(content: StudyResult) -> list[RowResult]:
    """Every arm under the study's own server for it."""
    return [row for row in content.rows if row.main]
