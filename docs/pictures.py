"""Draw the pictures of the documentation: `python docs/pictures.py [FOLDER]` writes docs/pictures/*.svg

SVG written by hand: small, the same on every machine, and with colours for light and dark readers. Whatever shows data
is computed by the library itself (partitions, anchors, controllers, counted prototypes, statistics).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from torch import Tensor

    from oneflare.core.config import PartitionConfig

FOLDER = Path(__file__).resolve().parent / "pictures"
WIDTH = 700
STYLE = """
  svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 14px }
  .bg { fill: #ffffff } .box { fill: #f2f4f8; stroke: #b8c0cc } .line { stroke: #6b7480; fill: none }
  .t { fill: #1f2630 } .m { fill: #5b6572 } .s { font-size: 12.5px } .b { font-weight: 600 }
  .grid { stroke: #dde2e9; fill: none } .head { fill: #6b7480 }
  .f0 { fill: #2f6fde } .f1 { fill: #c8511b } .f2 { fill: #2c8a57 } .f3 { fill: #8a4fc0 } .f4 { fill: #9a7a10 }
  .s0 { stroke: #2f6fde } .s1 { stroke: #c8511b } .s2 { stroke: #2c8a57 } .s3 { stroke: #8a4fc0 }
  .s4 { stroke: #9a7a10 } .sm { stroke: #98a1ad } .stop { fill: #b3261e } .stops { stroke: #b3261e }
  .f0, .f1, .f2, .f3, .f4, .head { stroke: none } .s0, .s1, .s2, .s3, .s4, .sm, .stops { fill: none }
  @media (prefers-color-scheme: dark) {
    .bg { fill: #171b21 } .box { fill: #232931; stroke: #47505c } .line { stroke: #98a1ad } .head { fill: #98a1ad }
    .t { fill: #e8ebef } .m { fill: #a8b1bd } .grid { stroke: #343c47 }
    .f0 { fill: #6ea2ff } .f1 { fill: #f28a52 } .f2 { fill: #56c48a } .f3 { fill: #bd8cf0 } .f4 { fill: #d8b640 }
    .s0 { stroke: #6ea2ff } .s1 { stroke: #f28a52 } .s2 { stroke: #56c48a } .s3 { stroke: #bd8cf0 }
    .s4 { stroke: #d8b640 } .sm { stroke: #6b7480 } .stop { fill: #ff8a80 } .stops { stroke: #ff8a80 }
  }
"""


class Drawing:
    """A list of SVG elements on a card of its own, so that it can be read on any page."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, style: str = "t", anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, style: str = "box", radius: float = 6) -> None:
        self.parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}" '
            f'class="{style}"/>'
        )

    def cell(self, x: float, y: float, side: float, style: str, opacity: float) -> None:
        if opacity >= 0.005:
            square = f"M{_n(x)},{_n(y)}h{_n(side)}v{_n(side)}h-{_n(side)}z"
            self.parts.append(f'<path d="{square}" class="{style}" fill-opacity="{opacity:.2f}"/>')

    def dot(self, x: float, y: float, radius: float, style: str) -> None:
        self.parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{style}"/>')

    def line(self, points: Iterable[tuple[float, float]], style: str, width: float = 1.2, dash: str = "") -> None:
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{places}" class="{style}" stroke-width="{width:g}"{dashes}/>')

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], number: str = "", width: float = 1.5, dash: str = ""
    ) -> None:
        """number: the colour's, or nothing for grey"""
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        size = 6 + 1.2 * width
        back = (end[0] - 0.7 * size * math.cos(angle), end[1] - 0.7 * size * math.sin(angle))
        self.line([start, back], f"s{number}" if number else "line", width, dash)
        corners = [end] + [
            (end[0] - size * math.cos(angle + turn), end[1] - size * math.sin(angle + turn)) for turn in (0.42, -0.42)
        ]
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
        self.parts.append(f'<polygon points="{places}" class="{f"f{number}" if number else "head"}"/>')

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<rect width="{WIDTH}" height="{self.height}" rx="10" class="bg"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def one_shot() -> Drawing:
    """Members train alone, one file each, one model."""
    picture = Drawing(330, "Members train alone, send one file each, once; the coordinator verifies and fuses")
    picture.text(24, 30, "Members: images stay here", "t b")
    holdings = {"hospital A": (9, 1, 0, 2), "hospital B": (0, 8, 2, 0), "hospital C": (1, 0, 7, 6)}
    for row, (name, counts) in enumerate(holdings.items()):
        top = 46 + 88 * row
        picture.box(24, top, 216, 74)
        picture.text(38, top + 24, name, "t b")
        picture.text(38, top + 46, "trains alone,", "m s")
        picture.text(38, top + 63, "to the end", "m s")
        for label, count in enumerate(counts):
            picture.box(140 + 23 * label, top + 62 - 5 * count, 17, max(5 * count, 1.5), f"f{label}", 2)
        picture.arrow((240, top + 37), (386, 178 + 22 * (row - 1)))
        middle = (top + 37 + 178 + 22 * (row - 1)) / 2
        picture.box(296, middle - 15, 24, 30, "box", 3)
        for step in range(3):
            picture.line([(301, middle - 7 + 7 * step), (315, middle - 7 + 7 * step)], "line")
    picture.text(318, 30, "one file, once", "t b", "middle")
    picture.box(390, 110, 142, 136)
    picture.text(461, 30, "Coordinator", "t b", "middle")
    picture.text(460, 134, "verify", "t b", "middle")
    picture.text(460, 153, "who is in, who is", "m s", "middle")
    picture.text(460, 170, "refused, and why", "m s", "middle")
    picture.text(460, 202, "fuse", "t b", "middle")
    picture.text(460, 221, "by who saw", "m s", "middle")
    picture.text(460, 238, "which class", "m s", "middle")
    picture.arrow((532, 178), (560, 178))
    picture.box(564, 110, 116, 136)
    picture.text(622, 30, "Everybody", "t b", "middle")
    picture.text(622, 146, "one model", "t b", "middle")
    for row, words in enumerate(("all four classes", "predict, export,", "serve")):
        picture.text(622, 172 + 19 * row, words, "m s", "middle")
    picture.text(
        24,
        316,
        "Bars: images of four classes. No second round; a member that joins or leaves later is a new fusion.",
        "m s",
    )
    return picture


def label_skew() -> Drawing:
    """The digits over five clients at three concentrations, by the partition code."""
    from oneflare.core.config import DataConfig
    from oneflare.data import load, split_clients

    data = load(DataConfig(name="digits"))
    labels = data.train.labels.numpy()
    picture = Drawing(236, "Who owns which class at alpha 0.05, 0.5 and infinity")
    largest = 0
    tables = []
    for alpha in (0.05, 0.5, math.inf):
        table = split_clients(labels, len(data.classes), _partition(alpha, clients=5), seed=0).table
        largest = max(largest, int(table.max()))
        tables.append((alpha, table))
    for panel, (alpha, table) in enumerate(tables):
        left, top, step = 84 + 210 * panel, 56, 19.5
        name = "alpha = infinity" if math.isinf(alpha) else f"alpha = {alpha:g}"
        picture.text(left + 4.5 * step, 28, name, "t b", "middle")
        for client, row in enumerate(table):
            middle = top + 27 * client
            picture.line([(left - 11, middle), (left + 9.4 * step, middle)], "grid", 1)
            if panel == 0:
                picture.text(left - 16, middle + 5, f"client {client}", "m s", "end")
            for label, count in enumerate(row):
                if count:
                    picture.dot(left + step * label, middle, max(1.2, 11 * math.sqrt(count / largest)), "f0")
        for label in range(10):
            picture.text(left + step * label, top + 27 * 5 - 2, str(label), "m s", "middle")
    picture.text(
        84, 222, f"Columns: digits 0 to 9. A dot's area is the number of images (largest: {largest}). Seed 0.", "m s"
    )
    return picture


def _partition(alpha: float, clients: int) -> PartitionConfig:
    """The limit of the Dirichlet law at infinity is the even split."""
    from oneflare.core.config import PartitionConfig

    if math.isinf(alpha):
        return PartitionConfig(kind="iid", clients=clients)
    return PartitionConfig(alpha=alpha, clients=clients)


def anchors() -> Drawing:
    """Equiangular against random: three classes in the plane, and ten in 64 dimensions."""
    import torch

    from oneflare.nn.anchors import ANCHORS

    picture = Drawing(268, "ETF anchors are all equally far apart, random anchors are not")
    for panel, kind in enumerate(("etf", "random")):
        left = 24 + 340 * panel
        picture.text(left, 30, f"anchors={kind}", "t b")
        plane = ANCHORS.build({"name": kind}, 3, 2)
        many = ANCHORS.build({"name": kind}, 10, 64)
        assert plane is not None
        assert many is not None
        centre, radius = (left + 68, 122), 60
        picture.parts.append(f'<circle cx="{centre[0]}" cy="{centre[1]}" r="{radius}" class="grid"/>')
        for label, (x, y) in enumerate(plane.matrix.tolist()):
            picture.arrow(centre, (centre[0] + radius * x, centre[1] - radius * y), str(label), 2.2)
        picture.text(centre[0], 212, "3 classes, d = 2", "m s", "middle")
        cosines = many.matrix @ many.matrix.T
        side, corner = 14.5, (left + 160, 48)
        for row in range(10):
            for column in range(10):
                value = float(cosines[row, column])
                style = "f0" if value < 0 else "f1"
                opacity = 0.0 if row == column else min(1.0, abs(value) / 0.35)
                picture.cell(corner[0] + side * column, corner[1] + side * row, side - 1, style, opacity)
        picture.parts.append(
            f'<rect x="{_n(corner[0] - 2)}" y="{_n(corner[1] - 2)}" width="149" height="149" class="grid"/>'
        )
        off = cosines[~torch.eye(10, dtype=torch.bool)]
        picture.text(corner[0] + 72, 212, "10 classes, d = 64", "m s", "middle")
        low, high = f"{float(off.min()):.2f}", f"{float(off.max()):.2f}"
        words = f"every cosine {low}" if low == high else f"cosines {low} to {high}"
        picture.text(corner[0] + 72, 230, words, "t s b", "middle")
        picture.text(centre[0], 230, _angles(plane.matrix.tolist()), "t s b", "middle")
    picture.text(24, 256, "Squares: cosine of two anchors,", "m s")
    picture.box(248, 245, 13, 13, "f0", 2)
    picture.text(267, 256, "below 0: far apart,", "m s")
    picture.box(404, 245, 13, 13, "f1", 2)
    picture.text(423, 256, "above 0: close", "m s")
    return picture


def _angles(rows: Sequence[Sequence[float]]) -> str:
    """The smallest angle between two directions."""
    found = [
        math.degrees(math.acos(max(-1.0, min(1.0, a[0] * b[0] + a[1] * b[1]))))
        for k, a in enumerate(rows)
        for b in rows[:k]
    ]
    return f"smallest angle {min(found):.0f}°"


STEPS = 1200


def lambda_rules() -> Drawing:
    """Four controllers on the same two prescribed losses."""
    picture = Drawing(466, "Raw and effective lambda over training under four rules")
    named = {
        "meta_annealed": "meta_annealed: no valve",
        "flare": "FLARE: with the valve",
        "autonomous": "autonomous: raw = effective",
        "balanced": "balanced: raw = effective",
    }
    for panel, (method, title) in enumerate(named.items()):
        left, top = 62 + 336 * (panel % 2), 52 + 200 * (panel // 2)
        raw, effective = _lambdas(method)
        _log_axes(picture, left, top, title)
        _log_curve(picture, left, top, raw, "s1", "5 4")
        _log_curve(picture, left, top, effective, "s0", "")
        if method == "flare":
            height = _log_y(top, 50)
            picture.line([(left, height), (left + 268, height)], "stops", 1, "2 3")
            picture.text(left + 264, height - 5, "lambda_max = 50", "stop s", "end")
    picture.line([(62, 444), (92, 444)], "s1", 2, "5 4")
    picture.text(98, 449, "raw: what the rule says", "m s")
    picture.line([(270, 444), (300, 444)], "s0", 2)
    picture.text(306, 449, "effective: what is applied", "m s")
    return picture


def _lambdas(method: str) -> tuple[list[float], list[float]]:
    """A method's own controller, fed with a local loss that falls from 7 to 1, an alignment loss from 1 to 1e-3."""
    import torch

    from oneflare.methods import find_method
    from oneflare.objective import ClientFacts, build_controller

    controller = build_controller(find_method(method).recipe["controller"], ClientFacts((90, 10, 0, 0)))
    rows: list[tuple[float, float]] = []
    for step in range(STEPS):
        progress = step / STEPS
        local = torch.tensor(1 + 6 * math.exp(-4 * progress), requires_grad=True)
        align = torch.tensor(1e-3 + math.exp(-12 * progress), requires_grad=True)
        controller.loss(local, align, progress).backward()
        controller.step()
        trace = controller.trace()
        rows.append((trace["lambda_raw"], trace["lambda_effective"]))
    return [raw for raw, _ in rows], [effective for _, effective in rows]


TOP, BOTTOM = 4, -2
"""powers of ten of the axis"""


def _log_y(top: float, value: float) -> float:
    share = (TOP - math.log10(max(value, 10**BOTTOM))) / (TOP - BOTTOM)
    return top + 132 * min(max(share, 0.0), 1.0)


def _log_axes(picture: Drawing, left: float, top: float, title: str) -> None:
    picture.text(left, top - 18, title, "t b")
    for power in range(BOTTOM, TOP + 1, 2):
        height = _log_y(top, 10.0**power)
        picture.line([(left, height), (left + 268, height)], "grid", 1)
        name = {-2: "0.01", 0: "1", 2: "100", 4: "10,000"}[power]
        picture.text(left - 6, height + 4, name, "m s", "end")
    picture.text(left, top + 150, "start", "m s")
    picture.text(left + 268, top + 150, "end of training", "m s", "end")


def _log_curve(picture: Drawing, left: float, top: float, values: list[float], style: str, dash: str) -> None:
    every = 12
    shown = [*range(0, len(values), every), len(values) - 1]
    picture.line([(left + 268 * k / len(values), _log_y(top, values[k])) for k in shown], style, 2, dash)


def fusion() -> Drawing:
    """One class, three members, one of whom never saw it: the plain mean against the counted one."""
    import torch

    from oneflare.fusion.features.sums import counted_prototypes

    counts = torch.tensor([[90.0], [10.0], [0.0]])
    angles = (math.radians(62), math.radians(38), math.radians(-75))
    rows = torch.tensor([[[math.cos(a), math.sin(a)]] for a in angles])
    picture = Drawing(330, "The plain mean is led astray by a member that never saw the class; the counted mean is not")
    names = ("A: 90 images", "B: 10 images", "C: none, never trained")
    results = {
        "feature_mean: plain mean": rows.mean(0)[0],
        "count_prototypes: by counts": counted_prototypes(rows, counts)[0],
    }
    for panel, (title, mean) in enumerate(results.items()):
        left = 24 + 340 * panel
        picture.text(left, 30, title, "t b")
        centre, radius = (left + 110, 158), 98
        picture.parts.append(f'<circle cx="{centre[0]}" cy="{centre[1]}" r="{radius}" class="grid"/>')
        for member, angle in enumerate(angles):
            end = (centre[0] + radius * math.cos(angle), centre[1] - radius * math.sin(angle))
            dash = "4 4" if member == 2 else ""
            picture.arrow(centre, end, f"{member}" if member < 2 else "", 1.6, dash)
        direction = mean / mean.norm()
        end = (centre[0] + 0.86 * radius * float(direction[0]), centre[1] - 0.86 * radius * float(direction[1]))
        picture.arrow(centre, end, "3", 5)
        places = [(centre[0] + radius * math.cos(a) + 8, centre[1] - radius * math.sin(a)) for a in angles]
        for member, (x, y) in enumerate(places):
            style = f"f{member} s" if member < 2 else "m s"
            words = names[member] if member < 2 else "C: none"
            picture.text(x, y + (-3 if member < 2 else 12), words, style)
    picture.arrow((24, 286), (54, 286), "3", 5)
    picture.text(62, 291, "global prototype of the class.", "m s")
    picture.text(62, 312, "C never saw the class: its prototype still points where training began.", "m s")
    return picture


OWNED = ((("cat", (0.28, 0.70)), ("dog", (0.62, 0.74))), (("car", (0.24, 0.72)), ("ship", (0.78, 0.66))))
"""by member: its classes and where they lie in its feature space"""
SEEN = ({"x": (0.60, 0.71), "y": (0.50, 0.30)}, {"x": (0.46, 0.34), "y": (0.26, 0.70)})
"""by member: where two images lie in its feature space"""
BEHIND, CLASS_SCALE, BEHIND_SCALE = (0.5, 0.36), 0.045, 0.15


def _log_densities(member: int, image: str) -> tuple[Tensor, Tensor]:
    """Of the member's classes and of its background, at an image."""
    import torch

    from oneflare.models.rules.density import StudentDensities

    eye = torch.eye(2, dtype=torch.float64)[None]
    means = torch.tensor([[place for _, place in OWNED[member]]], dtype=torch.float64)
    known = StudentDensities.of(means, CLASS_SCALE**2 * eye, torch.ones(1, 2))
    unknown = StudentDensities.of(
        torch.tensor([[BEHIND]], dtype=torch.float64), BEHIND_SCALE**2 * eye, torch.ones(1, 1)
    )
    point = torch.tensor([SEEN[member][image]])
    return known.log_densities(0, point)[0], unknown.log_densities(0, point)[0]


def density() -> Drawing:
    """Two members' feature spaces, the same two images in each, and what the density ratio makes of them."""
    import torch

    picture = Drawing(372, "Each member speaks about an image as far as its own feature space knows it")
    generator = torch.Generator().manual_seed(3)
    side = 220.0
    for member, classes in enumerate(OWNED):
        left, top = 40 + 350 * member, 46
        picture.text(left, 30, f"Member {'AB'[member]} has {classes[0][0]}s and {classes[1][0]}s", "t b")
        picture.box(left, top, side, side)
        noise = torch.tensor(BEHIND) + BEHIND_SCALE * torch.randn(60, 2, generator=generator)
        for x, y in noise.clamp(0.03, 0.97).tolist():
            picture.dot(left + side * x, top + side * (1 - y), 2, "m")
        for index, (name, place) in enumerate(classes):
            for x, y in (torch.tensor(place) + CLASS_SCALE * torch.randn(30, 2, generator=generator)).tolist():
                picture.dot(left + side * x, top + side * (1 - y), 2.4, f"f{2 * member + index}")
            picture.text(
                left + side * place[0] - 12, top + side * (1 - place[1]) - 32, name, f"f{2 * member + index} s"
            )
        for name, place in SEEN[member].items():
            known, unknown = _log_densities(member, name)
            ratios = known - unknown
            x, y = left + side * place[0], top + side * (1 - place[1])
            picture.dot(x, y, 5.5, "t")
            best = int(ratios.argmax())
            picture.text(x + 9, y + 4, f"{name}: {classes[best][0]} {float(ratios[best]):+.0f}", "t s b")
    picture.dot(46, 292, 2.4, "m")
    picture.text(58, 297, "background: the member's own images, destroyed", "m s")
    picture.text(40, 322, "Image x is a dog: A knows it (ratio above 0), B does not, whatever its classes.", "m s")
    picture.text(
        40, 344, "Image y is a car: B knows it. The numbers are log ratios of the two densities at the image,", "m s"
    )
    picture.text(40, 364, "for the member's likeliest class.", "m s")
    return picture


def answer() -> Drawing:
    """What each member would say of two images alone, and what they say together, weighted by what they know."""
    import torch

    picture = Drawing(330, "Alone every member names one of its own classes; together the one who knows is heard")
    names = [name for classes in OWNED for name, _ in classes]
    for row, (image, truth) in enumerate((("x", "dog"), ("y", "car"))):
        top = 56 + 124 * row
        densities = [_log_densities(member, image) for member in range(2)]
        alone = [known.softmax(0).tolist() for known, _ in densities]
        together = torch.cat([known - unknown for known, unknown in densities]).softmax(0).tolist()
        columns = [("A alone", [*alone[0], 0.0, 0.0]), ("B alone", [0.0, 0.0, *alone[1]]), ("together", together)]
        picture.text(24, top + 44, f"image {image}", "t b")
        picture.text(24, top + 64, f"(a {truth})", "m s")
        for column, (title, shares) in enumerate(columns):
            left = 130 + 190 * column
            if row == 0:
                picture.text(left + 75, 30, title, "t b", "middle")
            for index, (name, share) in enumerate(zip(names, shares, strict=True)):
                x = left + 40 * index
                picture.box(x, top + 76 - 70 * share, 26, max(70 * share, 1.0), f"f{index}", 2)
                picture.text(x + 13, top + 92, name, "m s", "middle")
    picture.text(24, 316, "Height: probability. A has cats and dogs, B has cars and ships.", "m s")
    return picture


def analytic() -> Drawing:
    """Two splits of the same images: other parts, the same sum."""
    import torch

    from oneflare.client.statistics import measure
    from oneflare.core.config import DataConfig
    from oneflare.data import load, split_clients
    from oneflare.nn import build_feature_map

    data = load(DataConfig(name="digits"))
    features = build_feature_map({"name": "random_conv", "filters": 2}, 1, 8)
    picture = Drawing(366, "The sums of three clients add up to the same total for every split")
    totals = []
    for row, alpha in enumerate((0.05, math.inf)):
        split = split_clients(data.train.labels.numpy(), len(data.classes), _partition(alpha, clients=3), seed=0)
        parts = [
            measure(features, data.train.images[torch.from_numpy(part)], data.train.labels[torch.from_numpy(part)], 10)
            for part in split.indices
        ]
        total = parts[0] + parts[1] + parts[2]
        totals.append(total)
        top = 48 + 158 * row
        name = "skewed (alpha 0.05)" if row == 0 else "even (alpha infinity)"
        picture.text(24, top - 16, f"Split {row + 1}: {name}", "t b")
        largest = float(total.sums[:, :10].abs().max())
        for place, part in enumerate([*parts, total]):
            left = 24 + 152 * place + (24 if place == 3 else 0)
            _matrix(picture, left, top, part.sums[:, :10], largest)
            words = f"client {place}: {int(part.samples)}" if place < 3 else f"sum: {int(part.samples)}"
            picture.text(left + 48, top + 112, words, "m s" if place < 3 else "t s b", "middle")
            if place:
                x = left - (28 if place < 3 else 40)
                picture.text(x, top + 54, "+" if place < 3 else "=", "t b", "middle")
    same = torch.allclose(totals[0].gram, totals[1].gram, rtol=1e-12) and torch.equal(
        totals[0].counts, totals[1].counts
    )
    assert same, "the sums depend on the split"
    picture.text(652, 170, "the", "t b", "middle")
    picture.text(652, 188, "same", "t b", "middle")
    picture.line([(612, 96), (652, 96), (652, 152)], "line")
    picture.line([(652, 198), (652, 254), (612, 254)], "line")
    picture.text(
        24,
        350,
        "Rows: ten digits. Columns: ten fixed features, summed over a client's images (their number below).",
        "m s",
    )
    return picture


def _matrix(picture: Drawing, left: float, top: float, values: object, largest: float) -> None:
    side = 9.6
    for row, line in enumerate(values.tolist()):  # type: ignore[attr-defined]
        for column, value in enumerate(line):
            opacity = (abs(value) / largest) ** 0.5
            picture.cell(left + side * column, top + side * row, side - 0.8, "f0" if value >= 0 else "f1", opacity)
    picture.parts.append(f'<rect x="{_n(left - 1)}" y="{_n(top - 1)}" width="97" height="97" class="grid"/>')


LEAVES = (
    ("network weights, prototypes", "if the method trains", "method=analytic trains none", 1),
    ("number of images", "always", "noise: upload.counts=noised", 1),
    ("images of each class", "unless withheld", "upload.counts=exact | noised | withheld", 4),
    ("sums of fixed features", "only if asked for", "analytic=random_conv", 4),
    ("  the same with noise", "only if asked for", "upload.statistics_epsilon=E", 2),
    ("curvature, moments, means", "only if asked for", "upload.evidence=NAMES", 4),
    ("trust in the own network", "only if asked for", "train.holdout=0.1", 4),
    ("name, date, signature", "federations by file", "client train --name, --key", 0),
)


def privacy() -> Drawing:
    """What leaves a member, by switch."""
    picture = Drawing(372, "What leaves a member, when, and the switch that decides")
    picture.box(16, 14, 668, 54)
    picture.text(30, 36, "never leaves", "stop b")
    picture.text(150, 36, "images, labels of single images, the private key, checkpoints, traces,", "t")
    picture.text(150, 56, "what was held back for validation", "t")
    for x, words in ((30, "in the one file"), (264, "when"), (412, "the switch")):
        picture.text(x, 96, words, "t b")
    for row, (what, when, switch, colour) in enumerate(LEAVES):
        y = 124 + 29 * row
        picture.line([(16, y - 19), (684, y - 19)], "grid", 1)
        if what.startswith("  "):
            picture.text(46, y, what.strip(), "t")
        else:
            picture.text(30, y, what, "t")
        picture.dot(250, y - 5, 5, f"f{colour}")
        picture.text(264, y, when, "m s")
        picture.text(412, y, switch, "t s")
    for x, colour, words in (
        (30, 1, "cannot be switched off"),
        (220, 4, "your choice"),
        (340, 2, "differentially private"),
        (530, 0, "says who, not what"),
    ):
        picture.dot(x, 354, 5, f"f{colour}")
        picture.text(x + 11, 359, words, "m s")
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {
    "one-shot": one_shot,
    "label-skew": label_skew,
    "anchors": anchors,
    "lambda": lambda_rules,
    "fusion": fusion,
    "density": density,
    "answer": answer,
    "analytic": analytic,
    "privacy": privacy,
}


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:]))
