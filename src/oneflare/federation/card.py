"""Parts of a model's card: the head in the form that Hugging Face reads, members' scores, and the lineage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from oneflare.core.plain import markdown
from oneflare.federation.charter import Charter
from oneflare.federation.result import FederationResult
from oneflare.federation.scores import MemberScores, PooledScores
from oneflare.metrics import Measured, ModelFigures
from oneflare.models.decisions import Decision

TASK = {"type": "image-classification", "name": "Image classification"}


def head(charter: Charter, content: FederationResult) -> list[str]:
    """YAML between two lines of dashes: what the model is, and its results as a `model-index`."""
    fields: dict[str, Any] = {
        "library_name": "oneflare",
        "pipeline_tag": "image-classification",
        "tags": ["federated-learning", "one-shot-federated-learning", "image-classification"],
        "metrics": ["accuracy"],
    }
    results = list(_results(charter, content))
    if results:
        fields["model-index"] = [{"name": charter.name, "results": results}]
    text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=110)
    return ["---", *text.splitlines(), "---", ""]


def _results(charter: Charter, content: FederationResult) -> Iterator[dict[str, Any]]:
    """One entry for the members together, one for each of them, and one for the coordinator's own test images."""
    told = content.pooled
    if told is not None:
        yield _entry(charter, "members", "Test images of the members", _metrics(told.together))
        for one in told.members:
            yield _entry(charter, str(one.member), f"Test images of {one.member}", _metrics(one.together))
    scores = content.own.scores
    if scores is not None:
        figures = {
            "Accuracy": ("accuracy", scores.accuracy),
            "Balanced accuracy": ("balanced_accuracy", scores.balanced_accuracy),
        }
        metrics = [{"type": kind, "name": name, "value": round(value, 4)} for name, (kind, value) in figures.items()]
        yield _entry(charter, "coordinator", "Test images of the coordinator", metrics)


def _entry(charter: Charter, whose: str, name: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    return {"task": TASK.copy(), "dataset": {"type": f"{charter.name}/{whose}", "name": name}, "metrics": metrics}


def _metrics(figures: ModelFigures) -> list[dict[str, Any]]:
    known = [("accuracy", "Accuracy", figures.accuracy)]
    if figures.balanced_accuracy is not None:
        known.append(("balanced_accuracy", "Balanced accuracy", figures.balanced_accuracy))
    return [{"type": kind, "name": name, "value": round(value.value, 4)} for kind, name, value in known]


def scores_section(told: PooledScores | None, decision: Decision | None = None) -> list[str]:
    """What members measured, as Markdown: each, all together, and every class. decision: the model's thresholds"""
    if told is None:
        return []
    together, weakest, worst = told.together, told.together.weakest, told.worst
    lines = [
        "## Measured by the members",
        "",
        f"On {together.images} test images that no member trained on, as the members themselves say: accuracy "
        f"{_percent(together.accuracy)}, balanced accuracy {_percent(together.balanced_accuracy)}. In brackets are "
        "intervals of 95 %. It is least accurate at "
        f"{worst.member}: {_percent(worst.together.accuracy)}.",
        "",
    ]
    if weakest is not None:
        lines += [f"Weakest class: {markdown(weakest.name)}, sensitivity {_percent(weakest.sensitivity)}.", ""]
    lines += _decided(together, decision)
    lines += ["| member | images | patients | accuracy % | alone % | signed |", "|---|---:|---:|---:|---:|---|"]
    lines += [_member_row(one) for one in told.members]
    lines += [
        "",
        "| class | images | sensitivity % | specificity % | AUROC % | average precision % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in together.classes:
        figures = (one.sensitivity, one.specificity, one.auroc, one.average_precision)
        support = "withheld" if one.support is None else str(one.support)
        lines.append(f"| {markdown(one.name)} | {support} | {' | '.join(map(_percent, figures))} |")
    limit = min(one.smallest_group for one in told.members)
    return [*lines, "", f"Of groups with fewer than {limit} test images (or patients) nothing is told.", ""]


def _decided(figures: ModelFigures, decision: Decision | None) -> list[str]:
    """How good the model is as it decides by its thresholds, as far as members measured these."""
    told = figures.by_rule
    if decision is None:
        return []
    if told is None or told.rule != decision.rule:
        return [f"It decides by {decision.words}; all figures here are of the most likely class.", ""]
    rates = zip(figures.classes, told.classes, strict=True)
    found = [f"{markdown(one.name)} {_percent(by.sensitivity)}" for one, by in rates if by.sensitivity is not None]
    return [
        f"It decides by {decision.words}. So decided, accuracy {_percent(told.accuracy)} of {told.decided} images that "
        f"get a class; {_percent(told.undecided)} % of {told.images} get the answer 'none of the known classes'. "
        f"Sensitivity as decided: {', '.join(found) or 'withheld'}. All other figures are of the most likely class.",
        "",
    ]


def _member_row(one: MemberScores) -> str:
    patients = "not known" if one.together.patients is None else str(one.together.patients)
    alone = "not measured" if one.alone is None else _percent(one.alone.accuracy)
    signed = "yes" if one.signature is not None else "no"
    accuracy = _percent(one.together.accuracy)
    return f"| {one.member} | {one.together.images} | {patients} | {accuracy} | {alone} | {signed} |"


def lineage_section(charter: Charter, content: FederationResult) -> list[str]:
    """What the model was made of, each by its digest."""
    number = "" if content.version is None else f" (version {content.version})"
    lines = [
        "## Lineage",
        "",
        "| what | SHA-256 |",
        "|---|---|",
        f"| model `{content.own.model}`{number} | `{content.own.sha256}` |",
        f"| terms | `{charter.fingerprint}` |",
    ]
    if content.before is not None:
        lines.append(f"| model of the version before | `{content.before}` |")
    lines += [f"| upload of {member.name} | `{member.digest}` |" for member in content.members]
    backbone = charter.inputs.backbone
    if backbone is not None:
        lines.append(f"| pretrained network {backbone.name} | `{backbone.digest}` |")
    return [*lines, ""]


def _percent(value: Measured | None) -> str:
    return "-" if value is None else f"{100 * value.value:.1f} ({100 * value.low:.1f} to {100 * value.high:.1f})"
