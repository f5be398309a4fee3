"""Hold-out and folds by patient: nobody on both sides, and classes as even as the patients allow."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from oneflare.client.calibration import hold_out as keep_back
from oneflare.core.config import DataConfig
from oneflare.core.seeds import torch_generator
from oneflare.data import ClientData, Split, load
from oneflare.data.dataset import hold_out
from oneflare.data.patients import check_apart, held_out_rows, numbered, patient_folds
from oneflare.errors import DataError

people = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 11)), min_size=2, max_size=60)


def arrays(rows) -> tuple[torch.Tensor, torch.Tensor]:
    labels, names = zip(*rows, strict=True)
    return torch.tensor(labels), numbered([str(name) for name in names])


def shares(labels: torch.Tensor, held: torch.Tensor) -> np.ndarray:
    return np.array([held[labels == label].double().mean() for label in labels.unique()])


@settings(max_examples=60, deadline=None)
@given(people, st.floats(0.05, 0.6), st.integers(0, 3))
def test_whole_patients_are_held_out_and_every_class_can_still_be_trained(rows, fraction, seed):
    labels, patients = arrays(rows)
    held = held_out_rows(labels, patients, fraction, torch_generator(seed, "test"))
    assert not set(patients[held].tolist()) & set(patients[~held].tolist())
    assert set(labels[~held].tolist()) == set(labels.tolist())
    assert torch.equal(held, held_out_rows(labels, patients, fraction, torch_generator(seed, "test")))
    if int(held.sum()) and len(set(patients[held].tolist())) > 1:
        assert ((shares(labels, held) - fraction) ** 2).sum() < len(labels.unique()) * fraction**2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=4, max_size=30), st.floats(0.1, 0.5))
def test_nothing_is_held_out_only_where_nothing_could_be(rows, fraction):
    labels, patients = arrays(rows)
    held = held_out_rows(labels, patients, fraction, torch_generator(0, "test"))
    number = len(patients.unique())
    possible = any(
        set(labels[~torch.isin(patients, torch.tensor(some))].tolist()) == set(labels.tolist())
        for size in range(1, number)
        for some in itertools.combinations(range(number), size)
    )
    assert bool(held.any()) == possible


def test_where_every_image_is_its_own_patient_each_class_gives_its_share():
    labels = torch.arange(3).repeat_interleave(torch.tensor([50, 30, 20]))
    held = held_out_rows(labels, torch.arange(100), 0.2, torch_generator(0, "test"))
    assert [int(held[labels == label].sum()) for label in range(3)] == [10, 6, 4]
    none = held_out_rows(labels, torch.arange(100), 0.0, torch_generator(0, "test"))
    assert not none.any()


def test_images_without_a_patient_are_their_own():
    assert numbered([None, None]) is None
    assert numbered(["b", None, "a", "b", None]).tolist() == [0, 1, 2, 0, 3]


@settings(max_examples=25, deadline=None)
@given(people, st.integers(2, 5))
def test_folds_by_patient(rows, folds):
    labels, patients = arrays(rows)
    number = len(patients.unique())
    if number < folds:
        with pytest.raises(DataError, match=f"{folds} folds of {number} patients"):
            patient_folds(labels, patients, folds)
        return
    if int(labels.bincount().max()) < folds:
        with pytest.raises(DataError, match="no class has more than"):
            patient_folds(labels, patients, folds)
        return
    fold = patient_folds(labels, patients, folds)
    assert set(fold.tolist()) <= set(range(folds))
    for patient in patients.unique():
        assert len(fold[patients == patient].unique()) == 1


def test_folds_are_even_where_patients_allow_it():
    labels = torch.arange(3).repeat(40)
    patients = torch.arange(120) // 6
    fold = patient_folds(labels, patients, 4, seed=3)
    for label in range(3):
        assert torch.bincount(fold[labels == label]).tolist() == [10, 10, 10, 10]
    alone = patient_folds(labels, None, 5)
    assert torch.bincount(alone).tolist() == [24] * 5
    with pytest.raises(DataError, match="1 folds of 120 images"):
        patient_folds(labels, None, 1)


def data(patients: torch.Tensor | None, images: int = 60) -> Split:
    labels = torch.arange(images) % 2
    return Split(torch.arange(images).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).byte(), labels, patients)


def test_the_calibration_part_of_a_client_is_of_other_patients():
    split = data(torch.arange(60) // 4)
    kept, back = keep_back(ClientData.of(split, 2), 0.2, (0, 1))
    assert not set(kept.patients.tolist()) & set(back.patients.tolist())
    assert (len(kept), len(back)) == (48, 12)
    assert back.counts.tolist() == [6, 6]
    whole, nothing = keep_back(ClientData.of(split, 2), 0.0, (0, 1))
    assert nothing is None
    assert len(whole) == 60
    without, _ = keep_back(ClientData.of(data(None), 2), 0.2, (0, 1))
    assert without.patients is None


def test_a_test_part_needs_a_second_patient():
    with pytest.raises(DataError, match="60 images of 1 patients are too few to hold out a 20% test part"):
        hold_out(data(torch.zeros(60, dtype=torch.long)), 0.2)
    train, test = hold_out(data(torch.arange(60) // 30), 0.2)
    assert (len(train.labels), len(test.labels)) == (30, 30)


def test_a_patient_on_both_sides_is_named():
    check_apart(["a", None], ["b", None], "move")
    with pytest.raises(DataError, match=r"1 patient has images in both .*for example 'a'.*; move"):
        check_apart(["a", None], ["a"], "move")


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8), dtype=np.uint8)).save(path)


def test_folders_below_classes_are_patients(tmp_path):
    for number in range(40):
        picture(tmp_path / "d" / "ab"[number % 2] / f"p{number // 4}" / f"{number}.png", number)
    dataset = load(DataConfig(name="folder", path=str(tmp_path / "d"), image_size=8))
    assert not set(dataset.train.patients.tolist()) & set(dataset.test.patients.tolist())
    assert len(dataset.test.labels) == 8
    for number in range(40):
        part = "test" if number >= 30 else "train"
        picture(tmp_path / "e" / part / "ab"[number % 2] / f"p{number // 4}" / f"{number}.png", number)
    config = DataConfig(name="folder", path=str(tmp_path / "e"), image_size=8)
    with pytest.raises(DataError, match=r"1 patient has images in both .*'p7'.*data\.patients=false"):
        load(config)
    assert len(load(config.model_copy(update={"patients": False})).test.labels) == 10


def test_one_folder_name_everywhere_is_no_patient(tmp_path):
    for number in range(40):
        part = "val" if number >= 30 else "train"
        picture(tmp_path / part / "ab"[number % 2] / "images" / f"{number}.png", number)
    assert load(DataConfig(name="folder", path=str(tmp_path), image_size=8)).train.patients is None


def test_nodes_of_a_simulation_on_flower_know_their_patients(tmp_path):
    from oneflare.simulation.engines.flower.simulation import _read_data, _write_data

    for patients in (torch.arange(60) // 4, None):
        split = data(patients)
        _write_data(tmp_path / "data.safetensors", split, [np.arange(20), np.arange(20, 60)])
        own = _read_data(tmp_path / "data.safetensors", 1, 2)
        assert len(own) == 40
        assert own.patients is None if patients is None else torch.equal(own.patients, patients[20:])
