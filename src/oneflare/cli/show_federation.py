"""The tables and lines that the commands of a federation print."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from oneflare.cli.progress import timed_bar
from oneflare.cli.show import as_json, console_for, line, note
from oneflare.client.observer import Observer
from oneflare.core.plain import plain
from oneflare.data.local import class_table
from oneflare.errors import did_you_mean
from oneflare.federation.charter import short
from oneflare.federation.page import change_lines, size_text

if TYPE_CHECKING:
    from oneflare.data import ClientData
    from oneflare.data.images import Damaged
    from oneflare.data.labelled import Inventory, Problem
    from oneflare.federation.charter import Charter
    from oneflare.federation.coordinator import FusedFederation
    from oneflare.federation.result import FederationResult, MaskedTotal
    from oneflare.upload.disclosure import Disclosure

MOST_CLASSES = 20
LOG_LINES = 10
COLOURS = {"in": "green", "superseded": "yellow", "late": "yellow", "removed": "yellow", "refused": "red"}


def announce(charter: Charter, member: str, data: ClientData, notes: tuple[str, ...]) -> None:
    """Before training: who, what, and whether the data fit."""
    note(f"{charter.name} ({short(charter.fingerprint)}): you are {member}")
    counts = [(name, count) for name, count in class_table(data.labels, charter.classes).items() if count]
    shown = ", ".join(f"{name}: {count}" for name, count in counts[:MOST_CLASSES])
    more = f", and {len(counts) - MOST_CLASSES} more" if len(counts) > MOST_CLASSES else ""
    note(f"your data fit: {len(data)} images of {len(counts)} of {len(charter.classes)} classes ({shown}{more})")
    for text in notes:
        note(f"note: {text}")
    if charter.members and member not in charter.members:
        hint = did_you_mean(member, charter.members)
        note(f"warning: the coordinator must admit {member} before its upload counts{hint}")
    if charter.deadline is not None and datetime.now(UTC) > charter.deadline:
        note(f"warning: the deadline {charter.deadline:%Y-%m-%d %H:%M %Z} has passed; ask whether it is still taken")


def list_damaged(problems: Sequence[Damaged | Problem], found: Inventory | None = None, *, json: bool = False) -> None:
    """What was found, and everything that cannot be used with the reason, on stdout."""
    if json:
        counted = {} if found is None else {"found": found.to_dict()}
        as_json(counted | {"damaged": [row._asdict() for row in problems]})
        return
    if found is not None:
        line(found.words())
    for row in problems:
        line(plain(f"{row.name}: {row.reason}"))


class MemberLines(Observer):
    """A few lines in a log file."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.step = max(1, epochs // LOG_LINES)

    def epoch(self, _client: int, epoch: int, row: Mapping[str, float], _samples: int) -> None:
        if epoch % self.step == 0 or epoch == self.epochs:
            accuracy = f"{100 * row['accuracy']:.1f} % on your training images"
            note(f"epoch {epoch}/{self.epochs}: loss {row['local']:.3f}, accuracy {accuracy}")


class MemberBar(Observer):
    """A bar over the epochs."""

    def __init__(self, epochs: int, bar: Progress) -> None:
        self.epochs = epochs
        self.bar = bar
        self.task = bar.add_task("training", total=epochs)

    def epoch(self, _client: int, epoch: int, row: Mapping[str, float], _samples: int) -> None:
        text = f"epoch {epoch}/{self.epochs}, loss {row['local']:.3f}"
        self.bar.update(self.task, completed=epoch, description=text)


@contextlib.contextmanager
def member_progress(charter: Charter, *, enabled: bool) -> Iterator[Observer]:
    """A bar over the epochs on a terminal, a few lines in a log file."""
    epochs, console = charter.terms.epochs, console_for(stderr=True)
    if not enabled or not epochs:
        yield Observer()
        return
    if not console.is_terminal:
        yield MemberLines(epochs)
        return
    with timed_bar(console) as bar:
        yield MemberBar(epochs, bar)


def disclosure(content: Disclosure) -> None:
    """What must be known first; then fields, bytes, what each reveals."""
    console = console_for()
    console.print(f"[bold]{escape(plain(content.path))}[/bold]: {size_text(content.size_bytes)}")
    signed = {"none": "not signed", "valid": f"signed with {content.key}", "not valid": "[red]BAD SIGNATURE[/red]"}
    who = escape(plain(content.member)) if content.member else "no name"
    console.print(f"from {who}, for federation {escape(short(content.federation))}, {signed[content.signature]}")
    for position, text in enumerate(content.first):
        console.print(f"[bold]{escape(text)}[/bold]" if position == 0 else escape(text))
    table = Table()
    for name in ("field", "bytes", "what it is", "what it reveals"):
        table.add_column(name, justify="right" if name == "bytes" else "left", no_wrap=name in ("field", "bytes"))
    for field in content.fields:
        size = f"{field.size_bytes:,}" if field.size_bytes else "·"
        table.add_row(field.name, size, escape(field.holds), escape(field.reveals))
    console.print(table)


def masked_next_steps(folder: Path, charter: Path) -> None:
    """What follows `server init` where sums are masked."""
    line(f"\nThe sums are masked: you will see their total and no member's own. Send {charter} to every member.")
    line("Every member takes three steps, and sends you one file after each:")
    line("  oneflare client join federation.yaml --name NAME --key NAME.key --images NUMBER   # NAME.join.json")
    line("  oneflare client train federation.yaml --data FOLDER --name NAME --key NAME.key --out NAME.safetensors")
    line("  oneflare client release federation.yaml request.json --name NAME --key NAME.key   # NAME.release.json")
    line("You run, with FOLDER for the files that have arrived:")
    line(f"  oneflare server admit {folder} NAME NAME.pub          # for each key that arrives")
    line(f"  oneflare server roster {folder} --enrolments FOLDER   # when all have joined; send {charter} again")
    line(f"  oneflare server missing {folder} --uploads FOLDER     # closes the round; send its request.json")
    line(f"  oneflare server fuse {folder} --releases FOLDER")


def _masked_line(facts: MaskedTotal, counts_mode: str) -> str:
    shown = "images are the most that each enrolled with; " if counts_mode == "withheld" else ""
    return f"{shown}the total under roster {facts.roster} is over {sum(facts.counts)} images"


def told(fused: FusedFederation, *, json: bool, quiet: bool) -> None:
    """What a command says of a fusion: one JSON object, tables and lines, or nothing."""
    if json:
        as_json(fused.content.to_dict())
    elif not quiet:
        fused_federation(fused)


def fused_federation(fused: FusedFederation) -> None:
    """Who is in, who is missing, who was refused and why; then the model."""
    content, console = fused.content, console_for()
    console.print(f"[bold]{fused.charter.name}[/bold] ({short(fused.charter.fingerprint)}), {content.method}")
    console.print(_verdicts(content))
    if content.masked is not None:
        line(_masked_line(content.masked, content.counts_mode))
    for name, made in content.fusions.items():
        measured = "not measured (--test FOLDER measures it)"
        if made.scores is not None:
            accuracy, worst = 100 * made.scores.accuracy, 100 * made.scores.worst_class
            measured = f"accuracy {accuracy:.1f} %, worst class {worst:.1f} % on {content.test_images} test images"
        passes = "1 pass" if made.forward_passes == 1 else f"{made.forward_passes} passes"
        line(f"{name}: {measured}; {passes}, {made.parameters:,} parameters")
    for text in change_lines(content.change):
        line(text)
    files = fused.files
    line(f"model: {files.model}, card: {files.card}, report: {files.report}")


def _verdicts(content: FederationResult) -> Table:
    """The verdict on every file, then the members of whom there is none."""
    table = Table()
    for name in ("member", "verdict", "images", "made (UTC)", "signed", "why, or the file"):
        table.add_column(name, justify="right" if name == "images" else "left")
    samples = {member.digest: member.samples for member in content.members}
    for verdict in sorted(content.verdicts, key=lambda row: (row.status != "in", row.member or "")):
        taken = verdict.status == "in"
        table.add_row(
            escape(verdict.who),
            f"[{COLOURS[verdict.status]}]{verdict.status}[/]",
            str(samples.get(verdict.digest or "", "")) if taken else "",
            escape((verdict.created or "")[:19]),
            "yes" if verdict.signed else "no",
            escape(verdict.file if taken else f"{verdict.file}: {verdict.reason}"),
        )
    for name in content.missing:
        table.add_row(name, "[red]missing[/red]", "", "", "", "sent nothing usable")
    seen = {verdict.member for verdict in content.verdicts}
    for name, when in content.removed.items():
        if name not in seen:
            table.add_row(name, "[yellow]removed[/yellow]", "", "", "", f"on {when[:10]}")
    return table
