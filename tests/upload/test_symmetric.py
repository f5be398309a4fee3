"""Matrices of summed products, compared with NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.upload import symmetric as symmetric_module
from oneflare.upload.symmetric import (
    around_mean,
    correlations,
    packed_diagonal,
    positive,
    products_complaint,
    symmetric,
    triangle,
    triangle_size,
    unpack_symmetric,
    upper_values,
)


def gram(rows: int, dim: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(rows, dim))
    return drawn.T @ drawn


@given(st.integers(1, 40), st.integers(0, 99))
def test_a_triangle_gives_the_matrix_back(dim, seed):
    whole = gram(3, dim, seed)
    row = whole[np.triu_indices(dim)]
    assert len(row) == triangle_size(dim)
    assert np.array_equal(torch.from_numpy(whole).masked_select(triangle(dim)), row)
    assert np.array_equal(unpack_symmetric(torch.from_numpy(row)), np.triu(whole) + np.triu(whole, 1).T)
    assert np.array_equal(packed_diagonal(torch.from_numpy(row)), np.diagonal(whole))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_sums_of_products_raise_no_complaint(rows, dim, seed):
    whole = torch.from_numpy(gram(rows, dim, seed))
    assert products_complaint(whole) is None
    assert positive(correlations(whole), 1e-9)


def test_correlations_are_those_of_numpy_without_what_is_zero():
    drawn = np.random.default_rng(0).normal(size=(50, 4))
    drawn -= drawn.mean(0)
    drawn[:, 2] = 0
    found = correlations(torch.from_numpy(drawn.T @ drawn))
    assert np.allclose(found, np.corrcoef(drawn[:, [0, 1, 3]].T), atol=1e-12)
    assert correlations(torch.zeros(3, 3, dtype=torch.float64)).shape == (0, 0)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [((1, 1), -1e-6, "a negative variance on its diagonal"), ((0, 1), 1.01, "a covariance larger than its variances")],
)
def test_what_no_products_can_be_is_named(place, value, said):
    matrix = torch.eye(3, dtype=torch.float64)
    matrix[place] = matrix[place[::-1]] = value
    assert said in str(products_complaint(matrix))


def test_an_eigenvalue_below_the_slack_is_found():
    matrix = torch.tensor([[1.0, 0.9, -0.9], [0.9, 1.0, 0.9], [-0.9, 0.9, 1.0]], dtype=torch.float64)
    least = float(np.linalg.eigvalsh(matrix.numpy())[0])
    assert products_complaint(matrix) is None
    assert not positive(matrix, -least - 1e-6)
    assert positive(matrix, -least + 1e-6)


@pytest.mark.parametrize("dim", [0, 1, 5, 512, 1100])
def test_strips_and_rows_give_the_matrix_that_masks_give(dim):
    drawn = torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    expected = drawn.triu() + drawn.triu(1).T
    assert torch.equal(symmetric(drawn), expected)
    values = upper_values(drawn)
    assert torch.equal(values, drawn.masked_select(triangle(dim)))
    assert torch.equal(unpack_symmetric(values), expected)
    assert torch.equal(unpack_symmetric(values.float(), torch.float32), expected.float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_around_the_mean_are_those_of_centred_rows(dtype, monkeypatch):
    monkeypatch.setattr(symmetric_module, "STRIP", 3)
    rows = torch.randn(30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 2
    rows[:, 4] = 7.25
    expected = (rows - rows.mean(0)).T @ (rows - rows.mean(0))
    upper = (rows.T @ rows).triu()
    found = around_mean(upper, rows.sum(0), 30.0, 1e-12, dtype)
    assert found.dtype == dtype
    assert torch.allclose(found.triu().double(), expected.triu(), atol=1e-4 if dtype == torch.float32 else 1e-10)
    assert not found[4].any()
    assert not found[:, 4].any()
