"""Members that exchanged classes: the views they are compared by, the judgement, and real networks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from oneflare.client.observer import Observer
from oneflare.fusion import UploadSet
from oneflare.fusion.trust.exchanged import (
    Agreement,
    Exchange,
    agreements,
    alone,
    comparable,
    exchanges,
    find_exchanges,
    groups,
    mean_views,
    picture_views,
)
from oneflare.fusion.trust.pictures import EACH, GIVERS, answers, givers
from oneflare.methods.resolve import resolve
from oneflare.simulation.features import load_data
from oneflare.simulation.files import RunFiles
from oneflare.simulation.stages import open_run, run_experiment
from oneflare.study.attacks import with_swapped_labels
from oneflare.study.lies import claiming_more, rewritten
from oneflare.upload import read_upload

SETTINGS = {
    "method": "flare",
    "data": "digits",
    "alpha": 0.5,
    "clients": 4,
    "epochs": 6,
    "seed": 3,
    "workers": 1,
    "encoder": {"name": "conv4", "width": 8},
    "train": {"batch_size": 32},
    "fusions": ["density_ratio"],
}


def opinions(liars: set[int], members: int = 4, classes: int = 3, held=None) -> Agreement:
    """Members that agree by 0.6 on everything, and liars that exchanged classes 0 and 1."""
    views = torch.full((members, members, classes, classes), 0.6)
    for asked in range(members):
        for giver in range(members):
            if (asked in liars) != (giver in liars):
                views[asked, giver, 0, 1] = views[asked, giver, 1, 0] = -0.6
    judged = torch.ones(members, classes, dtype=torch.bool) if held is None else held
    return Agreement.of(views, judged)


def test_whoever_contradicts_most_is_named_alone():
    assert list(exchanges(opinions(set()))) == []
    (found,) = exchanges(opinions({2}))
    assert found.members == (2,)
    assert found.classes == (0, 1)
    assert found.against == (0, 1, 3)
    assert found.agreement == pytest.approx(-0.6)


def test_where_nobody_can_say_who_is_right_all_are_named():
    assert [set(found.members) for found in exchanges(opinions({1}, members=2))] == [{0, 1}]
    assert [set(found.members) for found in exchanges(opinions({0, 1}))] == [{0, 1, 2, 3}]


def test_members_with_one_of_the_two_classes_count_too():
    held = torch.tensor([[True, True, False], [True, False, True], [False, True, True]])
    assert list(exchanges(opinions(set(), members=3, held=held))) == []
    (found,) = exchanges(opinions({0}, members=3, held=held))
    assert found == Exchange((0,), (0, 1), pytest.approx(-0.6), (1, 2))


def test_a_class_with_one_owner_cannot_be_contradicted():
    held = torch.tensor([[True, True, True], [False, True, True], [False, True, True]])
    assert list(exchanges(opinions({0}, members=3, held=held))) == []
    assert alone(torch.tensor([[50, 12, 11], [9, 30, 40], [0, 10, 10]])) == {0: [0]}


def test_views_by_class_means_are_one_for_the_same_and_minus_one_for_the_other():
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(3, 5, generator=generator).double()
    exchanged = means[[1, 0, 2]]
    within = torch.diag(torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])).double()
    views = mean_views(torch.stack([means, means + 0.0, exchanged]), within)
    assert views[0, 1, 0, 1] == pytest.approx(1.0)
    assert views[0, 2, 0, 1] == pytest.approx(-1.0)
    assert views[2, 0, 1, 0] == pytest.approx(-1.0)
    way, half = means[0] - means[1], (means[0] + means[1]) / 2
    precise = torch.linalg.inv(within + 1e-3 * within.diagonal().mean() * torch.eye(5).double())
    by_hand = ((exchanged[2] - half) @ precise @ way) / (way @ precise @ way / 2)
    assert mean_views(torch.stack([means[[0, 1, 2]], means[[2, 1, 0]]]), within)[0, 1, 0, 1] == pytest.approx(
        float(by_hand)
    )


def test_views_by_pictures_are_parts_of_the_members_own_margin():
    answered = torch.zeros(2, 2, 2, 2)
    answered[0, 0] = torch.tensor([[5.0, 1.0], [2.0, 4.0]])  # its own margin: (5 - 1) + (4 - 2) = 6
    answered[0, 1] = torch.tensor([[3.0, 0.0], [3.0, 1.5]])
    answered[1, 1] = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    views = picture_views(answered)
    assert views[0, 1, 0, 1] == pytest.approx(3.0 / 3)
    assert views[0, 1, 1, 0] == pytest.approx(-1.5 / 3)
    agreement = Agreement.of(views, torch.ones(2, 2, dtype=torch.bool))
    assert agreement.overall[0, 0, 1] == pytest.approx(((1 - 0.5) / 2 + 0.0) / 2)


def test_pictures_come_from_those_with_the_most_images():
    counts = torch.arange(1.0, GIVERS + 3)[:, None]
    assert givers(counts >= 2, counts)[:, 0].tolist() == [False, False] + [True] * GIVERS
    assert EACH > 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[UploadSet, UploadSet, int, tuple[int, int]]:
    """Four members that trained on digits, and the same with one of them after two folders were exchanged."""
    root = tmp_path_factory.mktemp("exchanged")
    experiment = resolve(SETTINGS)
    data = load_data(experiment)
    run_experiment(experiment, root / "honest", dataset=data)
    federation, uploads = open_run(root / "honest", Observer())
    shared = (uploads.counts >= 10).sum(0)
    liar = max(uploads, key=lambda one: int(((one.counts >= 20) & (shared >= 3)).sum()))
    first, second = ((liar.counts >= 20) & (shared >= 3)).nonzero().flatten().tolist()[:2]
    empty = federation.partition.indices[0][:0]
    owners = tuple(rows if client == liar.client else empty for client, rows in enumerate(federation.partition.indices))
    swapped = dataclasses.replace(with_swapped_labels(data, first, second), owners=owners)
    run_experiment(experiment, root / "swapped", dataset=swapped)
    path = RunFiles(root / "swapped").client(liar.client).upload
    claimed = rewritten(read_upload(path, uploads.contract), root / "more.safetensors", claiming_more)
    sent = tuple(read_upload(claimed, uploads.contract) if one.client == liar.client else one for one in uploads)
    return uploads, dataclasses.replace(uploads, uploads=sent), liar.client, (first, second)


def test_networks_name_who_exchanged_two_classes_and_nobody_else(trained):
    honest, attacked, liar, classes = trained
    assert comparable(honest)
    assert list(find_exchanges(honest)) == []
    ((group, found),) = find_exchanges(attacked)
    assert [group.uploads[row].client for row in found.members] == [liar]
    assert found.classes == classes
    assert found.agreement < -0.2


def test_the_same_uploads_give_the_same_views_and_stay_as_they_are(trained):
    honest, *_ = trained
    first, second = (next(iter(agreements(honest))).views for _ in range(2))
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
    assert all(parameter.requires_grad for parameter in honest.scratch.parameters())
    nobody = torch.zeros_like(honest.counts, dtype=torch.bool)
    from oneflare.fusion.densities import member_densities

    assert bool(answers(honest, member_densities(honest), nobody).isnan().all())


def test_many_members_are_compared_in_groups(trained):
    honest, *_ = trained
    many = dataclasses.replace(honest, uploads=honest.uploads * 40)
    found = list(groups(many))
    assert sum(len(group) for group in found) == len(many)
    assert max(len(group) for group in found) <= 64
