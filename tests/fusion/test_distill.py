from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from conftest import TINY, same_answers
from oneflare.client.observer import Observer, Relay
from oneflare.core.config import DataConfig
from oneflare.data import load
from oneflare.data.dataset import normalise, to_unit
from oneflare.errors import ConfigError, RunError, UploadError
from oneflare.fusion import SingleModel, UploadSet, build_fusion, load_model
from oneflare.fusion.distillation.coboosting import (
    adversarial_loss,
    difficulty,
    diversified,
    hard_loss,
    updated_weights,
)
from oneflare.fusion.distillation.datafree import disagreement_loss, generator_loss
from oneflare.fusion.distillation.public import distillation_loss, divergence, draw_batch, initial_student
from oneflare.fusion.distillation.teacher import Teacher, statistics_loss
from oneflare.fusion.workspace import Workspace
from oneflare.methods.resolve import resolve
from oneflare.metrics import retention
from oneflare.models.base import Cost
from oneflare.nn.generator import initial_generator
from oneflare.nn.network import signed_root
from oneflare.simulation.files import RunFiles
from oneflare.simulation.results import Point
from oneflare.simulation.stages import run_experiment
from shared import SHORT

DIGITS = load(DataConfig(public=200, test_size=100))
IMAGES = DIGITS.test.images
EVERY = pytest.mark.parametrize("name", list(SHORT))


@pytest.fixture
def uploads(tiny_uploads) -> UploadSet:
    return replace(tiny_uploads, public=DIGITS.public.images)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))


def same_weights(one: SingleModel, two: SingleModel) -> bool:
    first, second = one.network.state_dict(), two.network.state_dict()
    return all(torch.equal(first[key], second[key]) for key in first)


# the equations


def test_divergence_is_torchs():
    teacher, student = logits(7), logits(7, 1)
    for temperature in (0.5, 1.0, 3.0):
        oracle = F.kl_div(
            (student / temperature).log_softmax(1), (teacher / temperature).softmax(1), reduction="none"
        ).sum(1)
        assert torch.allclose(divergence(teacher, student, temperature), oracle, atol=1e-6)
        expected = temperature**2 * oracle.mean()
        assert torch.allclose(distillation_loss(teacher, student, temperature), expected, atol=1e-6)
    assert float(divergence(teacher, teacher + 4).abs().max()) < 1e-6


def test_divergence_by_hand():
    teacher, student = torch.tensor([[math.log(3), 0.0]]), torch.zeros(1, 2)
    assert float(divergence(teacher, student)) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_statistics_loss_is_zero_where_the_statistics_match():
    inputs = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    mean, variance = inputs.mean((0, 2, 3)), inputs.var((0, 2, 3), unbiased=False)
    assert float(statistics_loss(inputs, mean, variance)) < 1e-6
    shifted = statistics_loss(inputs, mean + torch.tensor([3.0, 0.0, 4.0]), variance - torch.tensor([0.0, 2.0, 0.0]))
    assert float(shifted) == pytest.approx(5 + 2, rel=1e-5)
    inputs.requires_grad_()
    statistics_loss(inputs, mean, variance).backward()
    assert bool(torch.isfinite(inputs.grad).all())


def test_the_teacher_sees_all_layers_of_all_clients(uploads):
    """Where every batch normalisation remembers exactly this batch, the loss vanishes; elsewhere it does not."""
    teacher = Teacher(build_fusion({"name": "ensemble"}).fuse(uploads).model)
    images = to_unit(DIGITS.train.images[:32])

    def remember(module, inputs):
        module.running_mean.copy_(inputs[0].mean((0, 2, 3)))
        module.running_var.copy_(inputs[0].var((0, 2, 3), unbiased=False))

    with torch.no_grad():
        before = teacher.logits_and_statistics(images)[1]
        for network in teacher.networks:
            for module in network.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.register_forward_pre_hook(remember)
        teacher.logits(images)
        after = teacher.logits_and_statistics(images)[1]
    assert float(before) > 0.1
    assert float(after) < 1e-4


def test_disagreement_counts_only_where_the_classes_differ():
    teacher = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    student = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    expected = -float(divergence(teacher, student)[1]) / 2
    assert float(disagreement_loss(teacher, student)) == pytest.approx(expected)
    labels = torch.tensor([0, 1])
    loss = generator_loss(teacher, student, labels, torch.tensor(0.7), 2.0, 3.0)
    assert float(loss) == pytest.approx(float(F.cross_entropy(teacher, labels)) + 1.4 + 3 * expected)


def test_hard_images_count_more():
    answers, labels = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]]), torch.tensor([0, 1])
    assert difficulty(answers, labels).tolist() == pytest.approx([0.25, 0.5])
    expected = (0.25 * -math.log(0.75) + 0.5 * math.log(2)) / 2
    assert float(hard_loss(answers, labels)) == pytest.approx(expected)
    assert float(adversarial_loss(logits(4), logits(4, 1))) == pytest.approx(
        -float(divergence(logits(4), logits(4, 1)).mean())
    )


def test_diversified_images_move_by_one_size_and_stay_images():
    random = torch.Generator().manual_seed(0)
    gradient = torch.randn(4, 1, 8, 8, generator=random)
    moved = diversified(torch.full((4, 1, 8, 8), 0.5), gradient, 0.2)
    assert (moved - 0.5).flatten(1).norm(dim=1).tolist() == pytest.approx([0.2] * 4)
    edge = diversified(torch.ones(4, 1, 8, 8), gradient, 5.0)
    assert float(edge.max()) <= 1
    assert float(edge.min()) >= 0
    assert torch.equal(diversified(edge, torch.zeros_like(gradient), 1.0), edge)


def test_the_clients_weights_by_hand():
    weights = torch.tensor([0.5, 0.3, 0.05, 0.15])
    moved = updated_weights(weights, torch.tensor([-2.0, 0.0, 7.0, 1e-3]), 0.1)
    assert moved.tolist() == pytest.approx([0.6 / 0.95, 0.3 / 0.95, 0, 0.05 / 0.95])
    alone = torch.tensor([1.0])
    assert torch.equal(updated_weights(alone, torch.tensor([1.0]), 2.0), alone)


def test_retention_by_hand():
    labels = torch.tensor([0, 1, 1, 0])
    student, teacher = torch.eye(2)[[0, 1, 0, 1]], torch.eye(2)[[0, 1, 0, 0]]
    kept = retention("ensemble", student, teacher, labels, Cost(10, 1), Cost(55, 5))
    assert kept.name == "ensemble"
    assert kept.kept == pytest.approx(0.5 / 0.75)
    assert (kept.accuracy, kept.agreement, kept.parameters_ratio, kept.passes_ratio) == (0.75, 0.75, 5.5, 5.0)


# the parts


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32), (1, 11)])
def test_generated_images_are_images(channels, size):
    generator = initial_generator(16, channels, size, 4, seed=3)
    noise = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    images = generator(noise).detach()
    assert images.shape == (6, channels, size, size)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert not list(generator.buffers())
    assert torch.equal(images, initial_generator(16, channels, size, 4, seed=3)(noise))


@pytest.mark.parametrize("name", ["count_prototypes", "ensemble", "iffi", "average"])
def test_a_teacher_answers_as_its_model(name, uploads):
    model = build_fusion({"name": name}).fuse(uploads).model
    teacher = Teacher(model)
    images = to_unit(IMAGES).requires_grad_()
    answers = teacher.logits(images)
    assert torch.allclose(answers, model.logits(IMAGES), atol=1e-4)
    equal = torch.full((len(teacher),), 1 / len(teacher))
    assert torch.allclose(teacher.logits(images, equal), answers, atol=1e-4)
    (gradient,) = torch.autograd.grad(answers.sum(), images)
    assert float(gradient.abs().max()) > 0


def test_clients_weights_reach_the_teachers_sum(uploads):
    teacher = Teacher(build_fusion({"name": "ensemble"}).fuse(uploads).model)
    images = to_unit(IMAGES)
    with torch.no_grad():
        only = teacher.logits(images, torch.tensor([0.0, 1.0, 0.0])).argmax(1)
        features = F.normalize(teacher.networks[1](normalise(images, uploads.contract.image)), dim=1)
    assert same_answers(only, features @ uploads.uploads[1].prototypes.T)


def test_batches_do_not_repeat_while_there_are_enough():
    assert sorted(draw_batch(8, 8, 0, 5).tolist()) == list(range(8))
    assert draw_batch(3, 7, 0, 5).bincount().tolist() in ([3, 2, 2], [2, 3, 2], [2, 2, 3])
    assert not torch.equal(draw_batch(50, 20, 0, 5), draw_batch(50, 20, 0, 6))


def test_a_fresh_student_depends_on_the_seed_alone(uploads):
    one = initial_student(uploads, "fresh", 0).state_dict()
    list(uploads.encoders())
    again, other = (initial_student(uploads, "fresh", seed).state_dict() for seed in (0, 1))
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert not torch.equal(one["prototypes"], other["prototypes"])


# the fusions


@EVERY
def test_one_network_comes_out(name, uploads, tmp_path):
    fusion = build_fusion(SHORT[name])
    assert fusion.single_network
    assert fusion.trains
    model = fusion.fuse(uploads).model
    assert isinstance(model, SingleModel)
    assert model.cost.forward_passes == 1
    for batch_size in (1, 7, 256):
        assert same_answers(model.predict(IMAGES, batch_size=batch_size), model.logits(IMAGES))
    model.save(tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "model.safetensors").logits(IMAGES), model.logits(IMAGES))
    list(uploads.encoders())
    assert same_weights(model, fusion.fuse(uploads).model)
    assert not same_weights(model, build_fusion(SHORT[name] | {"seed": 1}).fuse(uploads).model)


class Stop(Exception):
    pass


@EVERY
def test_a_stopped_fusion_goes_on_bit_for_bit(name, uploads, tmp_path, monkeypatch):
    monkeypatch.setattr("oneflare.fusion.workspace.REPORT_SECONDS", 0.0)
    fusion = build_fusion(SHORT[name])
    path = tmp_path / "checkpoint.safetensors"
    seen: list[int] = []

    class Stopping(Observer):
        def fusion_step(self, fusion, step, steps):
            seen.append(step)
            if step >= steps // 2:
                raise Stop

    with pytest.raises(Stop):
        fusion.fuse(uploads, Workspace(path, 0.0, observer=Stopping()))
    assert 0 < seen[-1] < 12
    going_on: list[int] = []
    workspace = Workspace(path, 0.0, observer=Relay(lambda _, words: going_on.append(words[1])))
    resumed = fusion.fuse(uploads, workspace)
    assert going_on[0] == seen[-1]
    whole = fusion.fuse(uploads)
    assert resumed.seconds_before > 0 == whole.seconds_before
    assert same_weights(resumed.model, whole.model)
    assert resumed.notes == whole.notes
    assert resumed.notes["final_loss"] > 0
    workspace.discard()
    assert not path.exists()


def test_a_checkpoint_of_other_work_is_not_used(uploads, tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    build_fusion(SHORT["distill_public"]).fuse(uploads, Workspace(path))
    first: list[int] = []
    fewer = replace(uploads, uploads=uploads.uploads[:2])
    workspace = Workspace(path, observer=Relay(lambda _, words: first.append(words[1])))
    without = build_fusion(SHORT["distill_public"]).fuse(fewer, workspace)
    assert first[0] == 0
    assert same_weights(without.model, build_fusion(SHORT["distill_public"]).fuse(fewer).model)
    path.write_bytes(b"12345678901234")
    with pytest.raises(RunError, match="is damaged"):
        build_fusion(SHORT["distill_public"]).fuse(uploads, Workspace(path))


def agreement(spec: dict, uploads: UploadSet) -> float:
    student, teacher = (build_fusion(one).fuse(uploads).model for one in (spec, {"name": "count_prototypes"}))
    return float((student.predict(IMAGES) == teacher.predict(IMAGES)).float().mean())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> UploadSet:
    """One client that has seen every class, three times."""
    from oneflare.simulation.simulation import Simulation

    layer = {"method": "fafi", "fusions": "average", "partition": {"clients": 1, "kind": "iid"}}
    more = {"data": {"name": "digits", "train_size": 600, "public": 200}, "train": {"epochs": 6, "snapshots": 0}}
    experiment = resolve(TINY, layer, more)
    files = RunFiles(tmp_path_factory.mktemp("trained"))
    run_experiment(experiment, files.folder)
    federation = Simulation.build(experiment, files, load(experiment.data))
    one = federation.collect([files.client(0).read_summary()], Observer())
    return replace(one, uploads=one.uploads * 3)


@EVERY
def test_a_student_of_identical_clients_keeps_their_opinion(name, trained):
    """It starts as their mean, which they all are, and must not forget it; measured: 0.97 and more."""
    assert agreement(SHORT[name] | {"generator_lr": 1e-2} if name != "distill_public" else SHORT[name], trained) > 0.85


def test_a_student_that_starts_from_nothing_learns_its_teacher(trained):
    """Measured: 0.72; a student that has learnt nothing agrees on about 0.1."""
    assert agreement(SHORT["distill_public"] | {"start": "fresh", "steps": 150, "lr": 1e-2}, trained) > 0.5


def test_a_feature_that_is_zero_has_a_finite_gradient():
    """Images are invented by the gradient of the teacher, and features of a network with ReLUs are often 0."""
    features = torch.tensor([[0.0, 4.0, -9.0, 1e-30]], requires_grad=True)
    roots = signed_root(features)
    roots.sum().backward()
    assert torch.allclose(roots, torch.tensor([[0.0, 2.0, -3.0, 0.0]]), atol=1e-9)
    assert torch.allclose(features.grad, torch.tensor([[0.0, 0.25, 1 / 6, 0.0]]))


def test_statistics_of_real_images_are_kept_without_them(uploads):
    mean = build_fusion({"name": "average"}).fuse(uploads).model.network.state_dict()
    student = build_fusion(SHORT["distill_datafree"]).fuse(uploads).model.network.state_dict()
    running = [key for key in mean if key.endswith(("running_mean", "running_var"))]
    assert running
    assert all(torch.equal(mean[key], student[key]) for key in running)
    assert not torch.equal(mean["prototypes"], student["prototypes"])
    public = build_fusion(SHORT["distill_public"]).fuse(uploads).model.network.state_dict()
    assert not torch.equal(mean[running[0]], public[running[0]])


# in a run


def test_what_is_missing_is_said_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"distill_public needs public images, and none are set aside; run with data"):
        resolve(TINY, {"fusions": "distill_public"})
    withheld = {"upload.counts": "withheld", "data.public": 20}
    for name in SHORT:
        with pytest.raises(ConfigError, match=f"{name} needs counts"):
            resolve(TINY, withheld, {"method": "fafi", "fusions": [SHORT[name]]})
        resolve(TINY, withheld, {"method": "fafi", "fusions": [{"name": name, "teacher": "feature_mean"}]})
    with pytest.raises(ConfigError, match="unknown fusion 'ensembel'; did you mean 'ensemble'"):
        build_fusion({"name": "coboosting", "teacher": "ensembel"})
    with pytest.raises(ConfigError, match=r"unknown key 'fusion iffi\.sed'; did you mean 'seed'"):
        build_fusion({"name": "coboosting", "teacher": {"name": "iffi", "sed": 1}})
    with pytest.raises(ConfigError, match="is itself distilled"):
        build_fusion({"name": "coboosting", "teacher": "distill_datafree"})
    with pytest.raises(ConfigError, match="no networks to invent images from; use distill_public"):
        build_fusion({"name": "distill_datafree", "teacher": "analytic"})
    with pytest.raises(ConfigError, match=r"distill_public\.steps"):
        build_fusion({"name": "distill_public", "steps": 0})


def test_public_images_are_asked_for_at_fusion(tiny_uploads):
    with pytest.raises(UploadError, match=r"needs public images; run with data\.public"):
        build_fusion(SHORT["distill_public"]).fuse(tiny_uploads)


def test_a_student_that_diverges_is_an_error(uploads):
    with pytest.raises(RunError, match="no longer finite; lower the fusion's lr"):
        build_fusion(SHORT["distill_public"] | {"lr": 1e30, "steps": 20}).fuse(uploads)


class Watching(Observer):
    def __init__(self, stop_after: int | None = None) -> None:
        self.steps: list[tuple[str, int, int]] = []
        self.stop_after = stop_after

    def fusion_step(self, fusion, step, steps):
        self.steps.append((fusion, step, steps))
        if self.stop_after is not None and step >= self.stop_after:
            raise KeyboardInterrupt


def test_a_run_with_distillation_reports_and_resumes(tmp_path, monkeypatch):
    """Stopped in the middle of the distillation and started again: the same model, nothing trained twice."""
    monkeypatch.setattr("oneflare.fusion.workspace.REPORT_SECONDS", 0.0)
    layer = {
        "data.public": 40,
        "train": {"checkpoint_seconds": 0.0},
        "fusions": ["density_ratio", {"name": "distill_public", "steps": 8}],
    }
    experiment = resolve(TINY, layer)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, tmp_path / "run", observer=Watching(4))
    files = RunFiles(tmp_path / "run")
    assert files.fusion_checkpoint("distill_public").exists()
    assert not files.result.exists()
    watching = Watching()
    result = run_experiment(experiment, tmp_path / "run", observer=watching)
    assert watching.steps[0] == ("distill_public", 4, 8)
    assert watching.steps[-1] == ("distill_public", 8, 8)
    assert not files.fusion_checkpoint("distill_public").exists()
    whole = run_experiment(experiment, tmp_path / "whole")
    assert same_weights(result.model("distill_public"), whole.model("distill_public"))

    row, teacher = result.fusions["distill_public"], result.fusions["density_ratio"]
    assert row.history == (Point(2, row.accuracy),)
    assert len(teacher.history) == 2
    assert row["training"]["steps"] == 8
    assert row["teacher"]["name"] == "density_ratio"
    assert row["teacher"]["accuracy"] == teacher["accuracy"]
    assert row["teacher"]["kept"] == pytest.approx(row["accuracy"] / teacher["accuracy"])
    assert row["teacher"]["passes_ratio"] == 3
    assert row["teacher"]["parameters_ratio"] == pytest.approx(teacher["parameters"] / row["parameters"])


def test_the_command_says_what_is_kept_and_saved(tmp_path, capsys):
    from oneflare.cli import show
    from oneflare.cli.progress import progress

    layer = {"data.public": 40, "epochs": 1, "fusions": [SHORT["distill_public"], {"name": "average"}]}
    with progress(enabled=True, table=False) as observer:
        result = run_experiment(resolve(TINY, layer), tmp_path / "run", observer=observer)
    show.run_result(result)
    output = capsys.readouterr()
    text = " ".join(output.out.split())
    assert "distill_public keeps" in text
    assert "of the accuracy of count_prototypes" in text
    ratio = result.fusions["distill_public"].teacher.parameters_ratio
    assert f"{ratio:.1f} times fewer parameters and 3.0 times fewer forward passes" in text
    assert "distill_public: 6 steps" in output.err


def test_a_bar_for_every_fusion_that_trains():
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    from oneflare.cli.progress import TerminalObserver

    bar = Progress(TextColumn("{task.fields[clients]}"), console=Console(file=io.StringIO()))
    observer = TerminalObserver(bar.console, bar, table=False)
    observer.fusion_step("coboosting", 3, 10)
    assert [(task.description, task.completed, task.total) for task in bar.tasks] == [("fusing by coboosting", 3, 10)]
    observer.fusion_step("coboosting", 10, 10)
    assert not bar.tasks
