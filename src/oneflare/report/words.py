"""Explanations of the words that a page uses, for readers who do not know them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from oneflare.fusion import FUSIONS
from oneflare.methods import METHODS
from oneflare.report.story import Story

ABOUT = (
    "In one-shot federated learning, clients that may not share their data each train alone and send one file, once; "
    "a server fuses the files into one classifier. No client hears back before it is done."
)
GENERAL = {
    "client": "One owner of data. It never shows its images to anybody.",
    "alpha": "How unequal the clients' classes are (a Dirichlet split). At 0.05 most clients hold a few classes; "
    "at 0.5 the mix is milder.",
    "seed": "One repetition: another split, another start of training. All methods share the split of a seed.",
    "point": "One per cent of the test images: from 40 % to 42 % is 2 points.",
    "interval": "Where the mean difference may well lie had other seeds been drawn (95 %, bootstrap).",
    "p": "How often chance alone would look as good for the claim (Student's paired test, one-sided). Small is good.",
    "checkpoint": "A moment during training at which fusion is simulated. Clients never see its outcome.",
    "balanced accuracy": "Mean over classes of the share recognised; a rare class counts as much as a common one.",
    "worst class": "The share recognised of the class that is recognised least.",
    "calibration error": "How far a model's stated confidence lies, on average, from how often it is right. "
    "Small is good.",
    "passes": "How many encoders look at every image when the fused model classifies it.",
    "prototype": "One vector per class: where the class lies in the encoder's features.",
}
ALIGNED = {
    "anchor": "A fixed target for the prototype of a class, the same for all clients, so that their features agree.",
    "lambda": "How hard training pulls a client toward the anchors. Raw: what the controller asks for; effective: "
    "what is left after annealing, which lets go toward the end.",
    "valve": "A bound: above it a penalty pushes raw lambda back.",
}


def words_of(story: Story) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Headings with terms: methods, ways of fusion, and the rest."""
    methods = list(_methods(story.methods))
    if methods:
        yield "Methods", methods
    used = dict.fromkeys(row.fusion for panel in story.panels for row in panel.rows)
    fusions = [(name, _sentence(FUSIONS[name].summary)) for name in used if name in FUSIONS]
    if fusions:
        yield "Fusions: how the server makes one model of the uploads", fusions
    yield (
        "Terms",
        [(term, text) for term, text in GENERAL.items() if _used(term, story)]
        + [(term, text) for term, text in ALIGNED.items() if any(panel.lambdas for panel in story.panels)],
    )


def _methods(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for label, name in names.items():
        if name in METHODS:
            yield label, _sentence(METHODS[name].summary)


def _used(term: str, story: Story) -> bool:
    if term == "p":
        return any(test.p_value is not None for verdict in story.verdicts for test in verdict.tests)
    if term in ("interval", "point", "seed"):
        return story.kind != "run"
    if term == "checkpoint":
        return has_checkpoints(story)
    if term == "prototype":
        return any(run["geometry"] is not None for run in story.runs)
    return True


def has_checkpoints(story: Story) -> bool:
    return any(len(curve.epochs) > 1 for panel in story.panels for curve in panel.curves)


def _sentence(text: str) -> str:
    """A summary as prose; a name with an underscore keeps its small letter."""
    text = text.replace("`", "").strip()
    if "_" not in text.partition(" ")[0]:
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
