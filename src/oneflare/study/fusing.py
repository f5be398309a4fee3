"""The fusion bench: every fusion on one set of uploads, with its accuracy and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oneflare.client.observer import Observer
from oneflare.core.config import Experiment
from oneflare.core.files import digest_of, exclusive, write_json
from oneflare.core.records import record_to_dict
from oneflare.core.stopping import UNCHANGED, on_stop
from oneflare.errors import ConfigError, OneFlareError, RunError
from oneflare.fusion import (
    FUSIONS,
    Fused,
    MemberModel,
    UploadSet,
    Workspace,
    build_fusion,
    check_needs,
    load_model,
)
from oneflare.fusion.membership import Membership
from oneflare.metrics import TimedFusion, fuse_timed, score_all
from oneflare.nn.hardware import one_thread
from oneflare.simulation.engines.measure import measure
from oneflare.simulation.files import RunFiles
from oneflare.simulation.kept import diagnose_into, warn_if_outdated
from oneflare.simulation.results import DiagnosticsResult, FusionResult
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import complete_specs, open_run, read_experiment
from oneflare.study.compare import FILE, read_comparison
from oneflare.study.verdicts import Spread
from oneflare.upload.evidence import EVIDENCE

FIGURES = (
    "accuracy", "balanced_accuracy", "worst_class", "calibration_error", "parameters", "forward_passes",
    "fuse_seconds", "fuse_cpu_seconds", "peak_memory_bytes", "needed_bytes",
)  # fmt: skip

DIAGNOSTICS = {
    "nc1": "spread within classes against spread between them; 0 at collapse",
    "nc2": "distance of the class means' cosines from a simplex; 0 at collapse",
    "cka": "mean linear CKA between two clients' features",
    "proto_cosine_per_class": "mean cosine between two clients' prototypes of a class",
    "etf_distance": "of the mean prototypes' Gram matrix from a simplex ETF's",
    "g_protos_std": "std of all entries of the mean prototype: a scale",
    "inter_client_proto_std": "std of prototypes over clients, averaged",
    "parameter_variance": "variance of encoder parameters over clients, averaged",
    "client_entropy": "entropy of each client's classes, 1 where even",
}


@dataclass(frozen=True)
class RunBench:
    """All fusions of one run."""

    folder: Path
    experiment: Experiment
    clients: tuple[int, ...]
    fusions: dict[str, FusionResult]
    """by name"""
    left_out: dict[str, str]
    """name -> why"""
    diagnostics: DiagnosticsResult | None = None


@dataclass(frozen=True)
class BenchTable:
    """Runs that differ in nothing but their seed; all fusions of a run share its uploads, so differences are paired."""

    runs: tuple[RunBench, ...]
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        common = [name for name in self.runs[0].fusions if all(name in run.fusions for run in self.runs)]
        object.__setattr__(self, "names", tuple(common))

    @property
    def first(self) -> str | None:
        """the method's own fusion, unless others were named"""
        return self.names[0] if self.names else None

    @property
    def experiment(self) -> Experiment:
        return self.runs[0].experiment

    @property
    def left_out(self) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for run in self.runs:
            for name, reason in run.left_out.items():
                reasons.setdefault(name, reason)
        return reasons

    def figure(self, name: str, key: str) -> Spread | None:
        """None where a run could not measure it."""
        values = [getattr(run.fusions[name], key) for run in self.runs]
        return None if any(value is None for value in values) else Spread(tuple(float(value) for value in values))

    def difference(self, name: str) -> Spread:
        """Accuracy minus the first fusion's, seed by seed."""
        pairs = ((run.fusions[name].accuracy, run.fusions[self.names[0]].accuracy) for run in self.runs)
        return Spread(tuple(own - first for own, first in pairs))

    def to_dict(self) -> dict[str, Any]:
        fusions: dict[str, Any] = {}
        for name in self.names:
            figures = {key: self.figure(name, key) for key in FIGURES}
            fusions[name] = {key: None if spread is None else spread.to_dict() for key, spread in figures.items()}
            fusions[name]["paired_difference"] = self.difference(name).to_dict()
        experiment = self.experiment
        return {
            "method": experiment.method,
            "data": experiment.data.name,
            "partition": experiment.partition.model_dump(mode="json"),
            "seeds": [run.experiment.seed for run in self.runs],
            "runs": [str(run.folder) for run in self.runs],
            "clients": [list(run.clients) for run in self.runs],
            "first": self.first,
            "fusions": fusions,
            "left_out": self.left_out,
            "diagnostics": [None if run.diagnostics is None else run.diagnostics.to_dict() for run in self.runs],
        }


def bench_runs(
    folders: Sequence[Path],
    *,
    names: Sequence[str | Mapping[str, Any]] | None = None,
    with_training: bool = False,
    membership: Membership | None = None,
    diagnostics: bool = False,
    observer: Observer | None = None,
) -> list[BenchTable]:
    """One table for every group of runs that differ only in their seed. A comparison's folder stands for its runs."""
    groups: dict[str, list[RunBench]] = {}
    for folder, group in _grouped(expand(folders)).items():
        run = bench_run(
            folder,
            names=names,
            with_training=with_training,
            membership=membership or Membership(),
            diagnostics=diagnostics,
            observer=observer,
        )
        groups.setdefault(group, []).append(run)
    return [BenchTable(tuple(runs)) for runs in groups.values()]


def _grouped(folders: Sequence[Path]) -> dict[Path, str]:
    """Each run with the digest of all its settings but the seed; what cannot be fused ends here, before any work."""
    found: dict[Path, str] = {}
    seen: set[tuple[str, int]] = set()
    for folder in folders:
        experiment = read_experiment(folder)
        group = experiment.model_copy(update={"seed": 0}).training_digest()
        if (group, experiment.seed) in seen:
            raise RunError(f"{folder}: a run with the same settings and seed was named before; name it once")
        seen.add((group, experiment.seed))
        found[folder] = group
    return found


def expand(folders: Sequence[Path]) -> list[Path]:
    """Run folders, those of a comparison in its order."""
    found: list[Path] = []
    for folder in folders:
        if (folder / FILE).exists():
            found += [result.folder for runs in read_comparison(folder).results.values() for result in runs]
        else:
            found.append(folder)
    return found


def bench_run(
    folder: Path,
    *,
    names: Sequence[str | Mapping[str, Any]] | None,
    with_training: bool,
    membership: Membership,
    diagnostics: bool,
    observer: Observer | None,
) -> RunBench:
    """Fuse the run's uploads in every way they can feed (or in those named), each measured in a process of its own.

    What was measured before, of the same uploads with the same options, is read back.
    """
    observer = observer or Observer()
    with on_stop(lambda: UNCHANGED), exclusive(folder), one_thread():
        federation, uploads = open_run(folder, observer)
        uploads = membership.apply(uploads)
        files = RunFiles(membership.folder(folder, uploads))
        specs = _specs(federation.experiment, names)
        found: dict[str, FusionResult] = {}
        left_out: dict[str, str] = {}
        fresh: list[dict[str, Any]] = []
        for spec in specs:
            reason = _refusal(spec, uploads, with_training or names is not None)
            if reason is not None and names is not None:
                raise ConfigError(f"fusion {spec['name']} {reason}")
            if reason is not None:
                left_out[spec["name"]] = reason
            elif _complete(files, spec, uploads):
                found[spec["name"]] = FusionResult.read(files.metrics(spec["name"]))
            else:
                fresh.append(spec)
        measured: list[CostedFusion] = []
        for number, spec in enumerate(fresh, start=1):
            warn_if_outdated(files.metrics(spec["name"]), spec, observer)
            observer.stage(f"fusing by {spec['name']} ({number} of {len(fresh)})")
            try:
                measured.append(_fuse(spec, uploads, files))
            except OneFlareError as error:
                if names is not None:
                    raise
                left_out[spec["name"]] = str(error)
        observer.stage(f"measuring {len(measured)} models")
        found |= _evaluate(federation, uploads, files, measured)
        geometry = _geometry(federation, uploads, files) if diagnostics else None
        if not membership.unchanged:
            write_json(
                files.folder / "members.json",
                {"clients": [u.client for u in uploads], "digests": [u.digest for u in uploads]},
            )
    ordered = {spec["name"]: found[spec["name"]] for spec in specs if spec["name"] in found}
    clients = tuple(upload.client for upload in uploads)
    return RunBench(files.folder, federation.experiment, clients, ordered, left_out, geometry)


def _specs(experiment: Experiment, asked: Sequence[str | Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Those asked for; else the run's own fusions first, with its options, then all others with their defaults."""
    own = [spec["name"] for spec in experiment.fusions]
    wanted = list(dict.fromkeys([*own, *FUSIONS])) if asked is None else asked
    return complete_specs(experiment, [{"name": spec} if isinstance(spec, str) else spec for spec in wanted])


def _refusal(spec: Mapping[str, Any], uploads: UploadSet, with_training: bool) -> str | None:
    """Why these uploads cannot or shall not be fused so."""
    fusion = build_fusion(spec)
    missing = sorted(fusion.needs - uploads.offered)
    try:
        check_needs([spec], uploads.offered, f"; train with {' '.join(map(_setting, missing))}")
    except ConfigError as error:
        return str(error).removeprefix(f"fusion {spec['name']} ")
    if fusion.trains and not with_training:
        return "trains a network on the server; add --with-training"
    return None


def _setting(need: str) -> str:
    """What makes uploads offer it."""
    return {
        "counts": "upload.counts=exact",
        "statistics": "analytic=random_conv",
        "calibration": "train.holdout=0.1",
        "public": "data.public=NUMBER",
    }.get(need, f"upload.evidence={need}" if need in EVIDENCE else "a method that trains")


def _stamp(spec: Mapping[str, Any], uploads: UploadSet) -> str:
    return digest_of([dict(spec), [upload.digest for upload in uploads]])


def _complete(files: RunFiles, spec: Mapping[str, Any], uploads: UploadSet) -> bool:
    path = files.metrics(spec["name"])
    if not path.exists() or not files.model(spec["name"]).exists():
        return False
    metrics = FusionResult.read(path)
    return metrics.measured == _stamp(spec, uploads) and metrics.made_with(spec)


@dataclass(frozen=True)
class CostedFusion:
    """A fusion that was made in a process of its own, with what that took."""

    made: TimedFusion
    cost: dict[str, Any]
    """fields of `metrics.json`"""


def _fuse(spec: Mapping[str, Any], uploads: UploadSet, files: RunFiles) -> CostedFusion:
    """Fuse in a process of its own, which writes the model, and read it back here."""
    fusion = build_fusion(spec)
    path = files.model(spec["name"])
    workspace = Workspace(files.fusion_checkpoint(spec["name"]))

    def keep(made: TimedFusion) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is said beside the model is sent here, the model goes into its file."""
        fused = made.fused
        fused.model.save(path, embed=False)
        said = {"notes": fused.notes, "suspects": fused.suspects, "seconds_before": fused.seconds_before}
        return said, dict(made.origin)

    cost, (said, origin) = measure(lambda: fuse_timed(spec, uploads, workspace), keep, rehearse=not fusion.trains)
    workspace.discard()
    model = load_model(path)
    if isinstance(model, MemberModel):
        model.encoder = uploads.scratch  # one for all models
    fused = Fused(model, **said)
    return CostedFusion(
        TimedFusion(spec, fused, fused.seconds_before + cost.seconds, origin),
        {
            "fuse_cpu_seconds": cost.cpu_seconds,
            "peak_memory_bytes": cost.peak_memory_bytes,
            "needed_bytes": sum(upload.needed_bytes(fusion.needs) for upload in uploads),
            "measured": _stamp(spec, uploads),
        },
    )


def _evaluate(
    federation: Simulation, uploads: UploadSet, files: RunFiles, measured: Sequence[CostedFusion]
) -> dict[str, FusionResult]:
    """Metrics of the models just written, kept beside them, by fusion."""
    found = {}
    scored = score_all([one.made for one in measured], uploads, federation.dataset.test)
    for one, evaluation in zip(measured, scored, strict=True):
        path = files.metrics(evaluation.name)
        before = FusionResult.read(path) if path.exists() else None
        kept = before if before is not None and before.made_with(one.made.spec) else None
        history, steady = ((), None) if kept is None else (kept.history[:-1], kept.steady)
        last = {"epoch": federation.experiment.epochs, "accuracy": evaluation.scores.accuracy}
        points = [*map(record_to_dict, history), last]
        content = evaluation.to_dict() | one.cost | {"history": points}
        found[evaluation.name] = replace(FusionResult.from_dict(content, str(path)), steady=steady)
        found[evaluation.name].write(path)
    return found


def _geometry(federation: Simulation, uploads: UploadSet, files: RunFiles) -> DiagnosticsResult:
    """Neural collapse, CKA, cosines and distances of these members; kept beside their fusions."""
    if not federation.contract.deep:
        raise RunError(f"{files.folder} has no trained networks to diagnose; use a method that trains")
    return diagnose_into(files.diagnostics, uploads, federation.dataset)


def own_fusions(folders: Sequence[Path]) -> list[str]:
    """The fusions that the first run lists itself."""
    return [spec["name"] for spec in read_experiment(expand(folders)[0]).fusions]
