"""The tables and lines that commands print on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oneflare.cli.manners import is_quiet
from oneflare.core.plain import plain

if TYPE_CHECKING:
    from oneflare.methods import Method
    from oneflare.methods.explain import Explanation
    from oneflare.metrics import Retention
    from oneflare.simulation.stages import Result
    from oneflare.study import Comparison
    from oneflare.study.bench.suite import BenchTarget
    from oneflare.study.declare import Declaration
    from oneflare.study.records import StudyResult

WIDEST_TABLE = 20
MOST_ROWS = 20
NARROW = 110


def console_for(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=120)


def fitted(console: Console, table: Table) -> Table:
    """On a narrow terminal no frame, and words are folded rather than cut: no name and no figure is lost."""
    if console.width < NARROW:
        table.box, table.show_edge, table.pad_edge = SIMPLE_HEAD, False, False
        for column in table.columns:
            column.overflow = "fold"
        table.columns[0].no_wrap = True
    return table


def line(text: str) -> None:
    """Text on stdout in which every character is visible; line ends are its own, not those of somebody's name."""
    print("\n".join(map(plain, text.split("\n"))))


def note(text: str) -> None:
    """A remark on stderr; --quiet silences all but warnings."""
    if not is_quiet() or text.startswith("warning"):
        print(plain(text), file=sys.stderr)


def done(text: str) -> None:
    """What was made and where it is; --quiet silences it."""
    if not is_quiet():
        line(text)


def as_json(content: Any) -> None:
    json.dump(content, sys.stdout)
    sys.stdout.write("\n")


def client_table(classes: Iterable[str], counts: list[list[int]], kind: str) -> Table:
    """Who owns what."""
    names = list(classes)
    table = Table(title=f"samples per client and class ({kind})", title_justify="left", title_style="bold")
    table.add_column("client", justify="right")
    wide = len(names) > WIDEST_TABLE
    for name in [] if wide else names:
        table.add_column(name[:10], justify="right")
    table.add_column("classes", justify="right")
    table.add_column("samples", justify="right", style="bold")
    for client, row in enumerate(counts[:MOST_ROWS]):
        cells = [] if wide else [str(count) if count else "·" for count in row]
        table.add_row(str(client), *cells, str(sum(count > 0 for count in row)), str(sum(row)))
    if len(counts) > MOST_ROWS:
        rest = counts[MOST_ROWS:]
        cells = [] if wide else ["" for _ in names]
        table.add_row(f"+{len(rest)}", *cells, "", str(sum(map(sum, rest))))
    return table


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def result(run: Result, *, json: bool, quiet: bool) -> None:
    """What a command says of a run: one JSON object, tables and lines, or nothing."""
    if json:
        as_json(run.to_dict())
    elif not quiet:
        run_result(run)


def run_result(result: Result) -> None:
    content = result.content
    console = console_for()
    state = " (complete, nothing to do)" if result.complete_before else ""
    split = content.partition
    console.print(
        f"[bold]{content.method}[/bold] on {content.data.name}, {split.clients} clients, {split.skew}, "
        f"seed {content.seed}, {content.epochs} epochs{state}"
    )
    table = Table()
    for name in (
        "fusion",
        "accuracy %",
        "balanced %",
        "worst class %",
        "calibration error %",
        "passes",
        "parameters",
    ):
        table.add_column(name, justify="left" if name == "fusion" else "right")
    for name, row in result.fusions.items():
        mark = " *" if name == result.headline else ""
        table.add_row(
            name + mark,
            *map(_percent, (row.accuracy, row.balanced_accuracy, row.worst_class, row.calibration_error)),
            str(row.forward_passes),
            f"{row.parameters:,}",
        )
    console.print(fitted(console, table))
    for name, row in result.fusions.items():
        if row.teacher is not None:
            console.print(retention(name, row.teacher))
        if row.block_weights:
            console.print(block_weights(name, row.block_weights))
    lambdas = [client.lambda_raw_max for client in content.trained]
    if max(lambdas, default=0) > 0:
        conflicts = [client.conflicts for client in content.trained]
        console.print(
            f"largest raw lambda of any client: {max(lambdas):.1f}; alignment opposed the local gradient in "
            f"{100 * sum(conflicts) / len(conflicts):.0f} % of steps"
        )
    if content.anchors["name"] == "packing":
        console.print(f"anchors packed on the sphere, largest cosine {content.worst_cosine:.4f}")
    for client in content.left_out[:MOST_ROWS]:
        console.print(f"left out: client {client.client} ({client.reason})")
    cost = content.cost
    console.print(
        f"* the method's own fusion; {cost.train_seconds:.1f} s of training, "
        f"{cost.upload_bytes / 1e6:.2f} MB uploaded, peak memory {cost.peak_memory_bytes / 2**20:.0f} MiB"
    )
    console.print(f"files: {result.folder}")


def retention(name: str, teacher: Retention) -> str:
    """What a distilled model keeps of its teacher, and what it saves."""
    return (
        f"{name} keeps {_percent(teacher.kept)} % of the accuracy of {teacher.name} "
        f"({_percent(teacher.accuracy)}) and agrees with it on {_percent(teacher.agreement)} % of the images, "
        f"with {teacher.parameters_ratio:.1f} times fewer parameters and {teacher.passes_ratio:.1f} times "
        "fewer forward passes"
    )


def block_weights(name: str, weights: Sequence[float]) -> str:
    """How much each block of features counts in an analytic model."""
    return f"{name} weighs its {len(weights)} blocks of features by {', '.join(f'{share:.2f}' for share in weights)}"


def comparison(content: Comparison) -> None:
    console = console_for()
    seeds = len(content.seeds)
    table = _by_fusion(f"test accuracy %, {seeds} seed{'s' if seeds > 1 else ''}", content.fusions)
    for method in content.methods:
        cells = []
        for fusion in content.fusions:
            cell = content.cell(method, fusion)
            if cell is None:
                cells.append("–")
                continue
            text = _percent(cell.mean) + ("" if cell.std is None else f" ± {100 * cell.std:.1f}")
            cells.append(f"[bold]{text}[/bold] *" if content.own_fusion(method) == fusion else text)
        table.add_row(method, *cells)
    console.print(fitted(console, table))
    if len(content.methods) > 1:
        columns = [*content.fusions, "own fusion"]
        difference = _by_fusion(f"paired difference to {content.methods[0]}, points", columns)
        for method in content.methods[1:]:
            cells = [_points(content.difference(method, fusion)) for fusion in content.fusions]
            difference.add_row(method, *cells, _points(content.own_difference(method)))
        console.print(fitted(console, difference))
    console.print("* the method's own fusion; every column is fused from the same uploads")


def _by_fusion(title: str, fusions: Iterable[str]) -> Table:
    """A table without rows: methods below each other, fusions beside each other."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("method")
    for fusion in fusions:
        table.add_column(fusion, justify="right")
    return table


def _points(pair: tuple[float, float | None] | None) -> str:
    if pair is None:
        return "–"
    mean, std = pair
    return f"{100 * mean:+.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")


def methods(entries: Iterable[Method]) -> None:
    table = Table()
    table.add_column("method", no_wrap=True)
    table.add_column("log", no_wrap=True)
    table.add_column("what it does")
    for method in entries:
        table.add_row(escape(method.name), escape(method.version), escape(method.summary))
    console_for().print(table)


def parts(rows: Iterable[Mapping[str, Any]]) -> None:
    table = Table()
    for name in ("kind", "name", "from", "what it is"):
        table.add_column(name, no_wrap=name in ("kind", "name"))
    for row in rows:
        home = "" if row["module"].startswith("oneflare.") else row["module"]
        table.add_row(row["kind"], row["name"], escape(home), escape(row["summary"]))
    console_for().print(table)


def explanation(content: Explanation) -> None:
    """Plain text: equations hold brackets, which a markup would swallow."""
    method = content.method
    number = ", ".join(method.numbers) or method.version
    line(f"{method.name} ({number}): {method.summary}")
    line(f"from: {method.reference}")
    for note in content.notes:
        line(f"note: {note}")
    line("\nlocal loss L_l, the sum of" if content.terms else "\nno network is trained")
    for name, (weight, text) in content.terms.items():
        line(f"  {weight:g} x {name}: {_indented(text, 6)}")
    for name, text in content.additions.items():
        line(f"\n{name}\n  {_indented(text, 2)}")
    spread = "" if content.worst_cosine is None else f" (largest cosine for 10 classes: {content.worst_cosine:.4f})"
    line(f"\nanchors {content.experiment.anchors['name']}{spread}\n  {_indented(content.anchors, 2)}")
    line(f"\nlambda by {content.experiment.controller['name']}\n  {_indented(content.controller, 2)}")
    if content.feature_map is not None:
        line(f"\nstatistics of {content.experiment.analytic['name']}\n  {_indented(content.feature_map, 2)}")
    if content.experiment.objective.pcgrad:
        line("  conflicts: where <g_local, g_align> < 0, g_local loses its part along g_align (PCGrad)")
    line("\nfusions, the method's own first")
    for name, text in content.fusions.items():
        line(f"  {name}: {text}")
    line(f"\ndefaults\n  {_indented(content.defaults_yaml().rstrip(), 2)}")


def explained_parts(parts: Iterable[Mapping[str, Any]]) -> None:
    """What parts compute, as their docstrings say it, and their options."""
    for number, part in enumerate(parts):
        line(("\n" if number else "") + f"{part['kind']} {part['name']}\n  {_indented(part['document'], 2)}")
        for key, default in part["options"].items():
            line(f"  option {key}: {'required' if default == 'required' else f'default {default!r}'}")


def _indented(text: str, spaces: int) -> str:
    return text.replace("\n", "\n" + " " * spaces)


def studies(entries: Iterable[Declaration]) -> None:
    table = Table()
    table.add_column("study", no_wrap=True)
    table.add_column("what it asks")
    for entry in entries:
        table.add_row(entry.name, f"{entry.title}. {entry.question}")
    console_for().print(table)


def study_results(content: StudyResult) -> None:
    from oneflare.study.markdown import percent, place_name, points

    console = console_for()
    seeds = len(content.seeds)
    console.print(f"[bold]{content.title}[/bold] ({content.scale}, {seeds} seed{'s' if seeds > 1 else ''})")
    for place in content.places:
        table = Table(title=place_name(place), title_justify="left")
        for name in ("method", "server", "accuracy %", f"difference to {content.baseline}"):
            table.add_column(name, justify="left" if name in ("method", "server") else "right", no_wrap=True)
        for row in content.rows:
            cell = content.cell(place.id, row.id)
            table.add_row(row.short_label, row.fusion, percent(cell), points(cell.difference))
        console.print(table)
    for claim in content.claims:
        verdict = claim.verdict if content.measured(claim) else "not measured"
        console.print(f"{verdict:13}  {claim.id}: {claim.text}", markup=False)


def bench(machine: dict[str, Any], targets: Iterable[BenchTarget]) -> None:
    console = console_for()
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"bfloat16 over float32: {machine['bfloat16_speedup']:g} x, load {machine['load_average']:.1f}"
    )
    table = Table()
    for name in ("what", "measured", "at most", ""):
        table.add_column(name, justify="left" if name in ("what", "") else "right")
    for target in targets:
        table.add_row(
            target.name, f"{target.value:.3f}", f"{target.limit:g}", "" if target.held else "[red]missed[/red]"
        )
    console.print(table)
