"""The card and the page of a fused federation: who took part, and what the model is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oneflare.core.files import read_regular, write_text
from oneflare.core.plain import markdown
from oneflare.federation.card import head, lineage_section, scores_section
from oneflare.federation.charter import FILE, Charter, read_charter, short
from oneflare.federation.coordinator import FusedFederation, read_fused
from oneflare.federation.model_signing import known_key, sign_card
from oneflare.federation.recording import check_log
from oneflare.federation.result import Change, FederationResult
from oneflare.federation.story import decision_of, federation_story
from oneflare.federation.verdict import RULE
from oneflare.federation.versions import FederationFiles
from oneflare.models.decisions import Decision, decision_path
from oneflare.models.sealing import check_seal
from oneflare.report.rendering import render_page

RESULT_BYTES = 1 << 28
SCRIPTS = ("chart.js", "federation.js", "frame.js")
STYLES = ("page.css", "federation.css")
SECTIONS = (
    ("classes", "Class by class"),
    ("members", "Member by member"),
    ("absent", "Who is not in"),
    ("timeline", "What happened"),
    ("versions", "Versions"),
    ("privacy", "What left the members"),
    ("limits", "Use, limits, terms"),
    ("rule", "How it is judged"),
)
FEW = 20
"""a class with fewer images than this, over all members, is named in the limits"""


def is_federation(folder: Path) -> bool:
    return (folder / FILE).is_file()


def read_federation(folder: Path) -> FusedFederation:
    """The last fusion of a federation, from its folder; a result that the coordinator did not sign is refused."""
    charter, files = read_charter(folder), FederationFiles(folder)
    known = known_key(files.result, None)
    if known is not None and files.result.exists():
        check_seal(files.result, read_regular(files.result, RESULT_BYTES), known.key, "result", known.federation)
    return FusedFederation(charter, files, read_fused(folder))


def write_card(fused: FusedFederation) -> Path:
    decision = decision_of(fused.files, fused.content)
    write_text(fused.files.card, card(fused.charter, fused.content, decision))
    sign_card(fused.charter, fused.files.card, fused.content)
    return fused.files.card


def write_federation_page(fused: FusedFederation) -> Path:
    """The page that says whether to deploy the model, beside it."""
    charter, content = fused.charter, fused.content
    log = check_log(fused.files.folder, charter)
    known = limits(charter, content, decision_of(fused.files, content))
    story = federation_story(charter, fused.files, content, known, log)
    page = render_page(
        "federation.html.j2",
        story.to_dict(),
        SCRIPTS,
        STYLES,
        title=f"Federation {charter.name}",
        story=story,
        sections=SECTIONS,
        folder=fused.files.folder.name,
        fingerprint=short(charter.fingerprint),
        terms=charter.to_yaml(),
        change=change_lines(content.change),
        tests={str(one.member): one.test for one in content.scores or ()},
        rule=RULE,
        thresholds=decision_path(fused.files.model).name,
        size_text=size_text,
    )
    write_text(fused.files.report, page)
    return fused.files.report


def limits(charter: Charter, content: FederationResult, decision: Decision | None = None) -> list[str]:
    """What a user of the model must know, from the charter and from the uploads themselves."""
    lines = [charter.limits.strip()] if charter.limits.strip() else []
    tables = content.table
    if content.masked is not None:
        lines += _rare(dict(zip(charter.classes, content.masked.counts, strict=True)), "")
        lines.append(
            "The members' sums were masked: which member has which class is not known, and no member was checked by "
            "what it does to the model."
        )
    elif tables is not None:
        noisy = " by the noised counts" if content.counts_mode == "noised" else ""
        totals = dict(zip(charter.classes, map(sum, zip(*tables, strict=True)), strict=True))
        lines += _rare(totals, noisy)
        lonely = [
            name
            for label, name in enumerate(charter.classes)
            if len(tables) > 1 and sum(row[label] > 0 for row in tables) == 1
        ]
        if lonely:
            lines.append(f"Known to one member only{noisy}: {_listed(lonely)}.")
    else:
        lines.append("Class counts were withheld: nobody can say which classes are rare.")
    if content.missing:
        lines.append(f"Admitted members that sent no usable upload: {_listed(content.missing)}.")
    if content.test_images is None and content.scores is None:
        lines.append("Its accuracy has not been measured here; `oneflare evaluate MODEL --data FOLDER` does.")
    image = charter.inputs.decoded
    kind = "grey" if image.channels == 1 else "colour"
    seen = f"Every image is brought to {image.size}x{image.size} {kind} and gets one of {len(charter.classes)} classes"
    if decision is not None and decision.floor is not None and decision.keeps is not None:
        lines.append(
            f"{seen} or the answer 'none of the known classes', which was to be given to {1 - decision.keeps:.0%} of "
            "the members' own test images; how many other images get it was not measured."
        )
    else:
        lines.append(
            f"{seen}; there is no answer 'none of these', and images unlike the members' get a confident but empty "
            "answer."
        )
    if charter.inputs.backbone is not None:
        name, digest = charter.inputs.backbone.name, charter.inputs.backbone.digest
        tune = charter.inputs.backbone.tune
        begun = "" if tune is None else f" up to its module {tune}, from which on members have trained it"
        lines.append(
            f"The model classifies features that the pretrained network {name} computes{begun}; whoever uses the model "
            f"needs that network's weights (SHA-256 {digest}), which are not in the model's file."
        )
    lines.append(_privacy(charter))
    if not charter.members or None in charter.members.values():
        lines.append("Not every upload had to be signed, so members are who they say they are, no more.")
    return lines


def _rare(totals: Mapping[str, int], noisy: str) -> list[str]:
    """Which classes nobody has, and which hardly anybody; totals: class -> images over all members."""
    unseen = [name for name, total in totals.items() if total == 0]
    few = [name for name, total in totals.items() if 0 < total < FEW]
    lines = []
    if unseen:
        lines.append(f"No member has seen{noisy}: {_listed(unseen)}. Never trust the model on these classes.")
    if few:
        lines.append(f"Fewer than {FEW} images in all{noisy}: {_listed(few)}.")
    return lines


def change_lines(change: Change | None) -> list[str]:
    """What is different from the fusion before, and what that means for whoever uses the model."""
    if change is None:
        return []
    lines = [
        f"{title} since the fusion of {change.since[:16].replace('T', ' ')} UTC: {_listed(names)}."
        for names, title in ((change.came, "New"), (change.gone, "Gone"), (change.renewed, "With another upload"))
        if names
    ]
    if change.lost_classes:
        lines.append(f"Nobody who is left has images of: {_listed(change.lost_classes)}.")
    return lines


def _privacy(charter: Charter) -> str:
    """What uploads hold, and what is promised for it."""
    terms = charter.terms
    epsilon, delta = terms.upload.statistics_epsilon, terms.upload.statistics_delta
    if epsilon is not None:
        return (
            f"Each upload is ({epsilon:g}, {delta:g})-differentially private for every image in it; the number of "
            "images is not hidden, and a second upload about the same images would add its epsilon."
        )
    held = ["trained weights"] if terms.trains else []
    if terms.upload.masked is not None:
        held.append("masked sums over images, of which the coordinator has seen the total over the members alone")
    elif terms.analytic["name"] != "none":
        exact = {"float32": "exact sums", "whole": "exact sums of rounded features"}
        sums = exact.get(terms.upload.statistics_dtype, "sums, some of them rounded,")
        held.append(f"{sums} over images, from which anybody with a copy of an image can tell whether it was used")
    if terms.upload.evidence:
        held.append(f"exact averages over images ({', '.join(terms.upload.evidence)})")
    return f"Uploads are {'; and '.join(held)}. They hold no image, but no formal privacy is promised for them."


def card(charter: Charter, content: FederationResult, decision: Decision | None = None) -> str:
    """Markdown."""
    own = content.own
    lines = [
        *head(charter, content),
        f"# Model of the federation {charter.name}",
        "",
        f"Fused {content.fused[:19]} UTC with OneFlare {content.oneflare} from {len(content.members)} "
        f"upload{'s' if len(content.members) > 1 else ''}. Terms: fingerprint {short(charter.fingerprint)}.",
        "",
        "## Expected use",
        "",
        markdown(charter.use.strip()) or "Not stated. Ask the coordinator before using it.",
        "",
        f"Classes: {_listed([markdown(name) for name in charter.classes])}.",
        "",
        "## Limits",
        "",
        *(f"- {markdown(line)}" for line in limits(charter, content, decision)),
        "",
        *_members_section(content),
        *scores_section(content.pooled, decision),
        "## Method",
        "",
        f"{content.method} with encoder {_spec(content.encoder)}, {charter.terms.epochs} epochs at each member, "
        f"one upload each, fused by {content.headline}: {own.parameters:,} parameters, "
        f"{own.forward_passes} forward pass{'es' if own.forward_passes > 1 else ''} per image.",
        "",
        *_measured_section(content),
        "",
        *lineage_section(charter, content),
    ]
    return "\n".join(lines)


def _members_section(content: FederationResult) -> list[str]:
    """Who took part and who did not, with reasons."""
    lines = ["## Members", "", "| member | images | upload | made (UTC) | signed |", "|---|---:|---:|---|---|"]
    volume = {"exact": "", "noised": " (noised)", "withheld": " (total only)"}[content.counts_mode]
    if content.masked is not None and content.counts_mode == "withheld":
        volume = " at most (enrolled)"
    for member in content.members:
        lines.append(
            f"| {member.name} | {member.samples}{volume} | {size_text(member.upload_bytes)} "
            f"| {member.created[:19]} | {'yes' if member.signed else 'no'} |"
        )
    lines.append("")
    for title, names in (("Missing", content.missing), ("Removed", list(content.removed))):
        if names:
            lines += [f"{title}: {_listed(names)}.", ""]
    for text in change_lines(content.change):
        lines += [markdown(text), ""]
    left_out = [verdict for verdict in content.verdicts if verdict.status in ("refused", "late")]
    for verdict in left_out:
        name = Path(verdict.file).name
        lines.append(f"- left out: {markdown(verdict.who)} ({markdown(name)}): {markdown(verdict.reason)}")
    return [*lines, ""] if left_out else lines


def _measured_section(content: FederationResult) -> list[str]:
    """How good every fusion is on the coordinator's own test images."""
    lines = ["## Measured by the coordinator", ""]
    if content.test_images is None:
        return [*lines, "Nothing: the coordinator gave no test images."]
    lines += [
        f"On {content.test_images} test images of the coordinator:",
        "",
        "| fusion | accuracy % | balanced % | worst class % | calibration error % |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, made in content.fusions.items():
        scores = made.scores
        assert scores is not None
        shown = (scores.accuracy, scores.balanced_accuracy, scores.worst_class, scores.calibration_error)
        lines.append(f"| {name} | " + " | ".join(f"{100 * figure:.1f}" for figure in shown) + " |")
    return lines


def size_text(number: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:30])
    return ", ".join(shown) + (f" and {len(names) - 30} more" if len(names) > 30 else "")


def _spec(spec: dict[str, Any]) -> str:
    options = ", ".join(f"{key} {value}" for key, value in spec.items() if key != "name" and value is not None)
    return f"{spec['name']} ({options})" if options else str(spec["name"])
