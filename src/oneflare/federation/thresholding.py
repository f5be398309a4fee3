"""Chooses thresholds for the federation's model on what its members measured, signs them and writes them down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oneflare.core.files import exclusive
from oneflare.errors import ConfigError, RunError, did_you_mean
from oneflare.federation.charter import read_charter
from oneflare.federation.coordinator import FusedFederation, read_fused
from oneflare.federation.identity import now
from oneflare.federation.log import Event
from oneflare.federation.model_signing import coordinator_key, known_key, sign_thresholds
from oneflare.federation.recording import write_down
from oneflare.federation.result import FederationResult
from oneflare.federation.scores import PooledScores
from oneflare.federation.versions import FederationFiles
from oneflare.metrics.figures import ThresholdRates
from oneflare.metrics.thresholds import Rate, least_familiarity, threshold_for
from oneflare.models import GlobalModel, load_model
from oneflare.models.decisions import Decision, decision_path
from oneflare.models.sealing import seal_path

WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Aims:
    """What thresholds are chosen for."""

    sensitivity: Mapping[str, float]
    """class -> least share of its images that must get it as the answer"""
    specificity: Mapping[str, float]
    """class -> least share of other images that must not"""
    keep: float | None
    """share of known images that must keep their class; None: every image gets a class"""

    def check(self, classes: tuple[str, ...]) -> None:
        for name in (*self.sensitivity, *self.specificity):
            if name not in classes:
                raise ConfigError(f"there is no class '{name}'{did_you_mean(name, classes)}")
        both = [name for name in self.sensitivity if name in self.specificity]
        if both:
            raise ConfigError(f"class '{both[0]}': one threshold gives one of both; aim at sensitivity or specificity")
        shares = [*self.sensitivity.values(), *self.specificity.values(), *([] if self.keep is None else [self.keep])]
        for share in shares:
            if not 0 < share <= 1:
                raise ConfigError(f"{share:g} is no share of images; give a number above 0 and at most 1, such as 0.95")
        if not shares:
            raise ConfigError(
                "say what for: --sensitivity CLASS=0.95, --specificity CLASS=0.95, or --keep 0.95 of known images"
            )

    @property
    def words(self) -> str:
        """`a sensitivity of 0.95 for melanoma`"""
        parts = [f"a sensitivity of {share:g} for {name}" for name, share in self.sensitivity.items()]
        parts += [f"a specificity of {share:g} for {name}" for name, share in self.specificity.items()]
        return " and ".join(parts)


@dataclass(frozen=True)
class Chosen:
    """Thresholds that were chosen, and the rates that members measured at them."""

    fused: FusedFederation
    decision: Decision
    rates: dict[str, ThresholdRates]


def choose_thresholds(folder: Path, aims: Aims) -> Chosen:
    """Choose thresholds on the scores of the members, for the model in use; those that were there are replaced."""
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        charter, files, content = read_charter(folder), FederationFiles(folder), read_fused(folder)
        coordinator_key(charter, folder)  # a wrong key is found before anything is changed
        aims.check(content.classes)
        pooled = _scores(folder, content)
        path = folder / content.own.model
        _without(decision_path(path))
        sign_thresholds(charter, folder, content)
        known = known_key(path, None)
        model = load_model(path) if known is None else load_model(path, key=known.key, federation=known.federation)
        rates = _rates(pooled, aims)
        decision = Decision(
            model=content.own.sha256,
            classes=content.classes,
            thresholds=tuple(rates[name].threshold if name in rates else None for name in content.classes),
            floor=None if aims.keep is None else _floor(model, content, pooled, aims.keep),
            keeps=aims.keep,
            aim=aims.words,
            members=tuple(str(one.member) for one in pooled.members),
            images=pooled.together.images,
            chosen=now(),
        )
        decision.write(decision_path(path))
        sign_thresholds(charter, folder, content)
        given = {name: limit for name, limit in zip(content.classes, decision.thresholds, strict=True) if limit}
        told = {"model": decision.model, "aim": decision.aim, "keep": decision.keeps}
        limits = [f"{name} {limit:g}" for name, limit in given.items()]
        write_down(charter, folder, [Event("thresholds", told | {"thresholds": limits})])
    return Chosen(FusedFederation(charter, files, content), decision, rates)


def drop_thresholds(folder: Path) -> FusedFederation:
    """Remove the thresholds of the model in use, which then answers with its most likely class."""
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        charter, files, content = read_charter(folder), FederationFiles(folder), read_fused(folder)
        path = decision_path(folder / content.own.model)
        if not path.exists():
            raise RunError(f"{folder}: its model has no thresholds, so there is nothing to remove")
        _without(path)
        sign_thresholds(charter, folder, content)
        write_down(charter, folder, [Event("thresholds", {"model": content.own.sha256, "thresholds": ["removed"]})])
    return FusedFederation(charter, files, content)


def _without(path: Path) -> None:
    path.unlink(missing_ok=True)
    seal_path(path).unlink(missing_ok=True)


def _scores(folder: Path, content: FederationResult) -> PooledScores:
    pooled = content.pooled
    if pooled is None:
        raise RunError(
            f"{folder}: no member has sent scores of this model yet; members run `oneflare evaluate MODEL --data "
            f"FOLDER --out scores.json`, and `oneflare server scores {folder} FILE` takes them in"
        )
    return pooled


def _rates(pooled: PooledScores, aims: Aims) -> dict[str, ThresholdRates]:
    """class -> the rates at its threshold"""
    classes = {one.name: one for one in pooled.together.classes}
    wanted: list[tuple[str, Rate, float]] = [(name, "sensitivity", least) for name, least in aims.sensitivity.items()]
    wanted += [(name, "specificity", least) for name, least in aims.specificity.items()]
    return {name: threshold_for(classes[name], rate, least) for name, rate, least in wanted}


def _floor(model: GlobalModel, content: FederationResult, pooled: PooledScores, keep: float) -> float:
    """The least familiarity at which members keep this share of their images."""
    bound = model.familiarity_bound
    if bound is None:
        raise RunError(
            f"--keep: a model of the fusion {content.headline} has no densities of the members' images, so it cannot "
            "tell which images nobody knows; density_ratio can, which is the fusion of the method flare"
        )
    if pooled.together.kept is None:
        raise RunError(
            "--keep: not all members' scores say how familiar their images are; ask them to measure the model again "
            "with this version of OneFlare"
        )
    return least_familiarity(pooled.together.kept, bound, keep)
