"""The study of attacks: the accuracy of every fusion under every attack, over seeds, as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oneflare.client.observer import Observer
from oneflare.core.files import write_json, write_text
from oneflare.data import Dataset
from oneflare.fusion import UploadSet, without_faulty
from oneflare.fusion.trust.suspects import find_suspects
from oneflare.methods.resolve import resolve
from oneflare.metrics import evaluate
from oneflare.nn.hardware import one_thread
from oneflare.study.attacks import NOBODY, Scene, build_scene

CROWDS = ((5, 1), (10, 3))
"""members, attackers among them"""
ALPHAS = (0.5, 0.05)
PLAIN, ROBUST = "count_prototypes", "robust_prototypes"
FUSED: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("average", "ensemble", "feature_mean", "iffi", PLAIN, "median_prototypes")},
    "trimmed_prototypes": {"name": "median_prototypes", "kind": "trimmed"},
    ROBUST: {"name": ROBUST},
    "analytic": {"name": "analytic"},
    "analytic_leave_out": {"name": "analytic", "leave_out": True},
    "regmean": {"name": "regmean"},
    "density_ratio": {"name": "density_ratio"},
}
COLLAPSE = 0.1
"""loss of accuracy from which on a fusion has collapsed"""
REMOVED = "attackers known and left out"
BUDGET: dict[str, Any] = {
    "data": "digits",
    "method": "flare",
    "encoder": {"name": "conv4", "width": 16},
    "epochs": 20,
    "train.snapshots": 0,
    "fusions": PLAIN,
}
VEHICLES: dict[str, Any] = {"analytic": {"name": "random_conv", "filters": 8}, "upload.evidence": ["gram", "density"]}
"""what uploads hold beside a network, for lies about it"""


def accuracies(uploads: UploadSet, dataset: Dataset, fusions: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Test accuracy of each of these fusions, by its label; members that are at fault are left out."""
    with one_thread():
        found, _ = without_faulty(uploads, lambda kept: evaluate(list(fusions.values()), kept, dataset.test))
    return {label: one.scores.accuracy for label, one in zip(fusions, found, strict=True)}


def attack_study(
    folder: Path,
    *,
    seeds: int = 3,
    alphas: Sequence[float] = ALPHAS,
    crowds: Sequence[tuple[int, int]] = CROWDS,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Accuracy of every fusion under every attack, over seeds; runs that are there are not repeated."""
    scenes = []
    for alpha in alphas:
        for clients, attackers in crowds:
            rows = []
            for seed in range(seeds):
                layer = {"alpha": alpha, "clients": clients, "seed": seed}
                experiment = resolve(BUDGET, VEHICLES, settings or {}, layer)
                place = folder / f"a{alpha:g}-c{clients}-s{seed}"
                scene = build_scene(experiment, place, attackers, observer)
                rows.append(_measure(scene))
            scenes.append({"alpha": alpha, "clients": clients, "attackers": attackers, **_summary(rows)})
    experiment = resolve(BUDGET, VEHICLES, settings or {})
    return {
        "data": experiment.data.name,
        "method": experiment.method,
        "encoder": experiment.encoder,
        "epochs": experiment.epochs,
        "seeds": seeds,
        "fusions": list(FUSED),
        "scenes": scenes,
    }


def _measure(scene: Scene) -> dict[str, Any]:
    """One seed: accuracies by attack and fusion, and who was suspected."""
    table = {REMOVED: accuracies(scene.without_attackers(), scene.dataset, FUSED)}
    named: dict[str, list[int]] = {}
    for attack in scene.attacks:
        uploads = scene.uploads(attack)
        table[attack] = accuracies(uploads, scene.dataset, FUSED)
        with one_thread():
            named[attack] = sorted(suspect.client for suspect in find_suspects(uploads))
    turned_away = {attack: scene.refused(attack) for attack in scene.attacks}
    return {"accuracy": table, "suspects": named, "refused": turned_away, "attackers": list(scene.attackers)}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds; how many attackers were named, and how many honest members wrongly."""
    tried = tuple(rows[0]["suspects"])
    attacks = (REMOVED, *tried)
    mean = {
        attack: {name: statistics.fmean(row["accuracy"][attack][name] for row in rows) for name in FUSED}
        for attack in attacks
    }
    found = {
        attack: {
            "attackers": sum(len(row["attackers"]) for row in rows) if attack != NOBODY else 0,
            "named": sum(len(set(row["suspects"][attack]) & set(row["attackers"])) for row in rows if attack != NOBODY),
            "refused": sum(len(row["refused"][attack]) for row in rows),
            "wrongly": sum(
                len(set(row["suspects"][attack]) - (set(row["attackers"]) if attack != NOBODY else set()))
                for row in rows
            ),
        }
        for attack in tried
    }
    verdicts = {
        attack: {
            "plain_loss": mean[NOBODY][PLAIN] - mean[attack][PLAIN],
            "robust_loss": mean[NOBODY][PLAIN] - mean[attack][ROBUST],
            "robust_loss_to_removal": mean[REMOVED][PLAIN] - mean[attack][ROBUST],
            "collapsed": mean[NOBODY][PLAIN] - mean[attack][PLAIN] > COLLAPSE,
        }
        for attack in tried
    }
    return {"accuracy": mean, "found": found, "verdicts": verdicts, "runs": list(rows)}


def attack_tables(content: Mapping[str, Any]) -> str:
    """The study as Markdown; accuracies in percent."""
    lines = [
        "# Poisoned uploads: what each fusion makes of them",
        "",
        f"{content['data']}, {content['method']}, {content['encoder']['name']} width {content['encoder']['width']}, "
        f"{content['epochs']} epochs; test accuracy in percent, mean over {content['seeds']} seeds. "
        "`refused`: attackers whose uploads are turned away as they are read; `named`: those that are suspected, "
        "of all; `wrongly`: honest members that are suspected.",
    ]
    for scene in content["scenes"]:
        lines += [
            "",
            f"## alpha {scene['alpha']:g}, {scene['attackers']} of {scene['clients']} members attack",
            "",
            "| attack | " + " | ".join(content["fusions"]) + " | refused | named | wrongly |",
            "|---|" + "---|" * (len(content["fusions"]) + 3),
        ]
        for attack, row in scene["accuracy"].items():
            found = scene["found"].get(attack)
            cells = [f"{100 * row[name]:.1f}" for name in content["fusions"]]
            counted = ("refused", "named", "wrongly")
            cells += [_of(found, key) for key in counted] if found else [""] * len(counted)
            lines.append(f"| {attack} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _of(found: Mapping[str, int], key: str) -> str:
    return str(found[key]) if key == "wrongly" else f"{found[key]}/{found['attackers']}"


def write_study(content: Mapping[str, Any], out: Path) -> None:
    write_json(out / "attacks.json", content)
    write_text(out / "attacks.md", attack_tables(content))
