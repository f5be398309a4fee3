"""Decides whether results that earlier commands left in files are still valid.

Uploads depend on the code of training, figures also on the code of fusion; both are recorded beside them. A run whose
training code has changed is kept under its name and a new one begins; figures whose fusion code has changed are made
anew from the same uploads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oneflare import _version
from oneflare.client.observer import Observer
from oneflare.core.config import CodeConfig, Experiment
from oneflare.core.layers import read_yaml
from oneflare.data import Dataset
from oneflare.errors import ConfigError, RunError
from oneflare.fusion import UploadSet
from oneflare.metrics import diagnose
from oneflare.simulation.files import EXPERIMENT
from oneflare.simulation.results import DiagnosticsCode, DiagnosticsResult, FusionResult, RunResult


def warn_if_outdated(path: Path, spec: Mapping[str, Any], observer: Observer) -> None:
    """Tell the user that figures are there which do not count, and why."""
    reason = FusionResult.read(path).outdated(spec) if path.exists() else None
    if reason is not None:
        observer.warn(f"{spec['name']}: its figures were made {reason}; they are made anew from the same uploads")


def diagnose_into(path: Path, uploads: UploadSet, dataset: Dataset) -> DiagnosticsResult:
    """The geometry of these uploads on the test images, kept in a file; one of another arithmetic is made anew."""
    if path.exists():
        found = DiagnosticsResult.read(path)
        if found.arithmetic == _version.FUSION_ARITHMETIC:
            return found
    measured = diagnose(uploads, dataset.test.images, dataset.test.labels)
    made = DiagnosticsResult(**measured.to_dict(), code=DiagnosticsCode(_version.FUSION_ARITHMETIC))
    made.write(path)
    return made


def check_figures(folder: Path, content: RunResult) -> None:
    """Refuse a result whose figures today's arithmetic would not give."""
    training = _version.TRAINING_ARITHMETIC
    if content.arithmetic != training:
        raise RunError(
            f"{folder} was trained with version {content.arithmetic} of OneFlare's training arithmetic "
            f"(today: {training}), so its figures are not today's; run the experiment again in another folder"
        )
    for name, row in content.fusions.items():
        reason = row.older_code(name)
        if reason is not None:
            raise RunError(
                f"{folder}: the figures of {name} were made {reason}; run the same command again, which makes them "
                f"anew from the same uploads"
            )


def recorded_experiment_code(folder: Path) -> CodeConfig:
    """The code with which a run folder was made."""
    path = folder / EXPERIMENT
    try:
        return CodeConfig.recorded(read_yaml(path).get("code"))
    except ValidationError:
        raise RunError(f"{path}: 'code' is not what OneFlare wrote; restore the file or choose another --out") from None


def warn_what_changed(runs: Iterable[tuple[Path, Experiment]], observer: Observer) -> None:
    """Where a new folder is begun only because code has changed since an older one was made, name both, once.

    runs: the folders about to be used, with their experiments.
    """
    said: set[str] = set()
    for folder, experiment in runs:
        if (folder / EXPERIMENT).exists():
            continue
        for older in _older(folder, experiment):
            changed = " and another ".join(experiment.code.differences(recorded_experiment_code(older)))
            if changed and changed not in said:
                said.add(changed)
                observer.warn(f"{older} was made with another {changed}; it is kept, and a new run begins in {folder}")
            break


def _older(folder: Path, experiment: Experiment) -> Iterator[Path]:
    """Folders of runs with the same settings, newest first; names differ in the digest at the end alone."""
    within = folder if _stem(folder) else folder.parent  # the runs of a comparison lie one deeper
    stem = _stem(within)
    if stem is None or not within.parent.is_dir():
        return
    inside = folder.relative_to(within)
    others = [place / inside for place in within.parent.iterdir() if place != within and _stem(place) == stem]
    others = [place for place in others if (place / EXPERIMENT).exists()]
    for place in sorted(others, key=lambda place: (place / EXPERIMENT).stat().st_mtime, reverse=True):
        try:
            before = Experiment.model_validate(read_yaml(place / EXPERIMENT))
        except (ConfigError, ValidationError):
            continue
        if before.settings_digest() == experiment.settings_digest():
            yield place


def _stem(folder: Path) -> str | None:
    found = re.fullmatch(r"(.+)-[0-9a-f]{8,10}", folder.name)
    return None if found is None else found[1]
