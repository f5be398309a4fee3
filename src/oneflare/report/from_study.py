"""Makes the story of a study from `results/<study>/<scale>.json`, and from its run folders where they exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from oneflare.core.records import record_to_dict
from oneflare.errors import OneFlareError
from oneflare.report import lead
from oneflare.report.collect import bounded, run_label
from oneflare.report.details import mean_lambda, traces_of
from oneflare.report.story import Gap, LambdaCurve, Panel, Row, Story, Sweep, Test, TestedClaim, curve_of
from oneflare.simulation.stages import Result, read_result
from oneflare.study.estimate import duration
from oneflare.study.records import (
    CellResult,
    ClaimResult,
    FigureResult,
    PlaceResult,
    Provenance,
    RowResult,
    StatementResult,
    StudyResult,
)

Figure = TypeVar("Figure")
Rows = Mapping[str, RowResult]
Places = Mapping[str, PlaceResult]


def is_study(path: Path) -> bool:
    return path.suffix == ".json" and path.is_file()


def study_story(path: Path, runs: Path = Path("runs")) -> Story:
    """path: the results; runs: the folder their run paths are relative to."""
    content = StudyResult.read(path)
    rows = {row.id: row for row in content.rows}
    places = {place.id: place for place in content.places}
    panels = [study_panel(content, place, runs) for place in content.places]
    verdicts = [_verdict(claim, rows, places) for claim in content.claims if content.measured(claim)]
    missing = sum(len(cell.missing) for cell in content.cells if rows[cell.row].main)
    found = list(_folders(content, rows, runs))
    everyone = sum(len(cell.runs) for cell in content.cells if rows[cell.row].main)
    return Story(
        kind="study",
        title=content.title,
        page=path.with_suffix(".html"),
        question=content.question,
        methods={rows[row.arm].label: row.method for row in rows.values()},
        lead=lead.of_study(panels, verdicts, content.scale_summary, len(content.seeds), missing),
        facts=_facts(content),
        panels=panels,
        runs=bounded(found),
        all_runs=everyone,
        verdicts=verdicts,
        rule=content.rule,
        log=[{"settings": entry.settings, "values": _named(rows, entry.values)} for entry in content.log],
        sweeps=[sweep for figure in content.figures for sweep in _sweeps(content, rows, figure)],
        provenance={
            "study": f"{content.study} at scale {content.scale}",
            **_origin(content.provenance),
        },
        note=content.note,
    )


def place_title(place: PlaceResult, places: Sequence[PlaceResult] = ()) -> str:
    """Among several places, a number of clients that all share goes without saying."""
    title = f"{place.data}, alpha {place.alpha:g}"
    shared = len(places) > 1 and len({other.clients for other in places}) == 1
    return title if shared else f"{title}, {place.clients} clients"


def _named(rows: Rows, values: Mapping[str, float | str]) -> dict[str, Any]:
    """By label, in the order of the table."""
    return {row.label: values[key] for key, row in rows.items() if key in values} | {
        key: value for key, value in values.items() if key not in rows
    }


def _facts(content: StudyResult) -> dict[str, str]:
    def over(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(map(str, values)))

    return {
        "scale": content.scale,
        "data": over(place.data for place in content.places),
        "alpha": over(place.alpha for place in content.places),
        "clients": over(place.clients for place in content.places),
        "seeds": ", ".join(str(seed) for seed in content.seeds),
    }


def _origin(provenance: Provenance) -> dict[str, str]:
    """How it came about, in words and units."""
    words = {"train_seconds": "training, all runs", "oneflare": "OneFlare", "python": "Python", "torch": "PyTorch"}
    return {
        words.get(key, key): duration(float(value)) if key == "train_seconds" else str(value)
        for key, value in record_to_dict(provenance).items()
    }


def study_panel(content: StudyResult, place: PlaceResult, runs: Path) -> Panel:
    """What a study found at one place; runs: where lambda is read from if the results do not keep it."""
    rows = {row.id: row for row in content.rows}
    cells = [cell for cell in content.cells if cell.place == place.id and cell.accuracies]
    baseline = rows[content.baseline].label
    missing = [f"{rows[cell.row].label}: seeds {list(cell.missing)}" for cell in cells if cell.missing]
    curves = []
    for cell in cells:
        row, history = rows[cell.row], cell.history
        if history:
            values = list(zip(*(point.accuracies for point in history), strict=True))
            epochs = [point.epoch for point in history]
            curves.append(curve_of(rows[row.arm].label, row.fusion, row.main, epochs, values))
    return Panel(
        place_title(place, content.places),
        baseline,
        [_row(rows, cell, baseline) for cell in cells],
        curves,
        [curve for cell in cells if rows[cell.row].main for curve in _lambdas(rows, cell, runs)],
        note=f"Not there yet: {'; '.join(missing)}." if missing else "",
    )


def _row(rows: Rows, cell: CellResult, baseline: str) -> Row:
    row, cost, mean = rows[cell.row], _there(cell.cost), _there(cell.mean)
    gap = None
    if cell.difference is not None:
        low, high = cell.difference.interval or (None, None)
        gap = Gap(baseline, cell.difference.mean, low, high)
    return Row(
        rows[row.arm].label,
        row.fusion,
        row.main,
        seeds=list(cell.seeds),
        accuracies=list(cell.accuracies),
        mean=mean,
        std=cell.std,
        low=None if cell.std is None else mean - cell.std,
        high=None if cell.std is None else mean + cell.std,
        gap=gap,
        balanced=_there(cell.balanced),
        worst_class=_there(cell.worst_class),
        calibration_error=_there(cell.calibration_error),
        passes=cost.forward_passes,
        parameters=cost.parameters,
        train_seconds=cost.train_seconds,
        upload_bytes=cost.upload_bytes,
        fuse_seconds=cost.fuse_seconds,
    )


def _there(figure: Figure | None) -> Figure:
    """A figure that every cell with accuracies has; `CellResult` sees to that."""
    assert figure is not None
    return figure


def _lambdas(rows: Rows, cell: CellResult, runs: Path) -> Iterator[LambdaCurve]:
    """From the results where they keep traces, otherwise from the run folders."""
    if cell.lambda_ is None:
        return
    kept = cell.lambda_.traces
    if kept is not None:
        traces: list[list[dict[str, float]]] = [
            [
                {"epoch": epoch, "lambda_raw": raw, "lambda_effective": effective}
                for epoch, raw, effective in zip(trace.epoch, trace.raw, trace.effective, strict=True)
            ]
            for trace in kept
        ]
    else:
        traces = [trace for folder in cell.runs for trace in _traces(runs / folder)]
    found = mean_lambda(rows[rows[cell.row].arm].label, traces)
    if found is not None:
        yield found


def _traces(folder: Path) -> Iterator[list[dict[str, float]]]:
    result = _result(folder)
    if result is not None:
        yield from traces_of(result).values()


def _result(folder: Path) -> Result | None:
    """A run that was cleared away is no error: the results stand on their own."""
    try:
        return read_result(folder)
    except OneFlareError:
        return None


def _folders(content: StudyResult, rows: Rows, runs: Path) -> Iterator[tuple[Result, str, int]]:
    """Runs that are still there: the first seed of everything, then the second, so that cutting keeps the breadth."""
    places = {place.id: number for number, place in enumerate(content.places)}
    cells = [cell for cell in content.cells if rows[cell.row].main]
    for seed in content.seeds:
        for cell in cells:
            for found, folder in zip(cell.seeds, cell.runs, strict=True):
                result = _result(runs / folder) if found == seed else None
                if result is not None:
                    yield result, run_label(result, rows[rows[cell.row].arm].label), places[cell.place]


def _verdict(claim: ClaimResult, rows: Rows, places: Places) -> TestedClaim:
    tests = [_test(test, rows, places) for test in claim.tests]
    return TestedClaim(claim.id, claim.text, claim.verdict, tests, claim.log)


def _test(test: StatementResult, rows: Rows, places: Places) -> Test:
    what, where = test.text, ""
    if test.kind == "difference" and test.than is not None:
        what = f"{rows[test.arm].label} against {rows[test.than].label}"
        what += "" if test.measure == "accuracy" else f", {test.measure}"
    if test.place not in places:
        where = test.place
    elif len(places) > 1:
        where = place_title(places[test.place], list(places.values()))
    low, high = test.interval or (None, None)
    return Test(
        what,
        where,
        test.mean,
        low,
        high,
        values=list(test.values),
        p_value=test.p_value,
        side=test.side,
        threshold=test.threshold,
        unit=test.unit,
        verdict=test.verdict,
    )


def _sweeps(content: StudyResult, rows: Rows, figure: FigureResult) -> Iterator[Sweep]:
    if figure.kind == "clients":
        yield from _over_clients(content, rows, figure)
    elif figure.kind == "sensitivity":
        yield from _over_lambda(content, rows, figure)


def _drawn(content: StudyResult, rows: Rows, figure: FigureResult) -> list[CellResult]:
    wanted = figure.arms or [row for row, entry in rows.items() if entry.main]
    return [
        cell
        for cell in content.cells
        if cell.row in wanted
        and cell.accuracies
        and figure.data in (None, cell.data)
        and figure.alpha in (None, cell.alpha)
    ]


def _over_clients(content: StudyResult, rows: Rows, figure: FigureResult) -> Iterator[Sweep]:
    cells = _drawn(content, rows, figure)
    for data, alpha in dict.fromkeys((cell.data, cell.alpha) for cell in cells):
        here = [cell for cell in cells if (cell.data, cell.alpha) == (data, alpha)]
        series = [
            _series(rows[row].label, [(cell.clients, cell) for cell in here if cell.row == row])
            for row in dict.fromkeys(cell.row for cell in here)
        ]
        yield Sweep(f"{figure.title}: {data}, alpha {alpha:g}", "clients", series)


def _over_lambda(content: StudyResult, rows: Rows, figure: FigureResult) -> Iterator[Sweep]:
    from oneflare.methods.resolve import resolve

    cells = _drawn(content, rows, figure)
    for place in content.places:
        here = [cell for cell in cells if cell.place == place.id]
        start = {}
        for cell in here:
            controller = resolve(content.settings[place.id][rows[cell.row].arm]).controller
            start[cell.row] = float(controller.get("lambda_0", 0.0))
        with_pull = sorted(((start[cell.row], cell) for cell in here if start[cell.row] > 0), key=lambda p: p[0])
        without = next((cell for cell in here if start[cell.row] == 0), None)
        if with_pull:
            level = None if without is None else {"name": rows[without.row].label, "mean": without.mean}
            title = f"{figure.title}: {place_title(place, content.places)}"
            yield Sweep(title, "lambda at the start", [_series("mean over seeds", with_pull)], level)


def _series(name: str, points: Sequence[tuple[float, CellResult]]) -> dict[str, Any]:
    return {
        "name": name,
        "x": [x for x, _ in points],
        "mean": [cell.mean for _, cell in points],
        "std": [cell.std for _, cell in points],
    }
