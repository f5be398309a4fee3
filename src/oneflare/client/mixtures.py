"""Fits the Gaussian mixtures of `oneflare.upload.mixtures` to a client's features."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from oneflare.upload.mixtures import Mixtures

IMAGES_PER_COMPONENT = 10
"""at least, of a class; with fewer a component's variances say nothing"""
ITERATIONS = 100
LEAST_VARIANCE = 1e-6


def fit_mixtures(phi: Tensor, labels: Tensor, classes: int, components: int) -> Mixtures:
    """A mixture of up to K Gaussians with diagonal covariances for each class, by maximum likelihood (EM).

    phi: features `(n, D)`. As FedPFT (Beitollahi et al. 2024), where every class has K components; here a class has
    one for each `IMAGES_PER_COMPONENT` of its images, at least one and at most K, and the weights of the others are 0.
    """
    from sklearn.mixture import GaussianMixture  # takes a second to import

    dim = phi.shape[1]
    weights = torch.zeros(classes, components)
    means, variances = (torch.zeros(classes, components, dim) for _ in range(2))
    counts = torch.bincount(labels, minlength=classes)
    for label in (counts > 0).nonzero().flatten().tolist():
        own = phi[labels == label].double()
        number = max(1, min(components, len(own) // IMAGES_PER_COMPONENT))
        if number == 1:
            weights[label, 0] = 1
            means[label, 0] = own.mean(0).float()
            variances[label, 0] = (own.var(0, correction=0) + LEAST_VARIANCE).float()
            continue
        mixture = GaussianMixture(
            number, covariance_type="diag", reg_covar=LEAST_VARIANCE, max_iter=ITERATIONS, random_state=0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about iterations, of which a few more would change little
            mixture.fit(own.numpy())
        weights[label, :number] = torch.from_numpy(mixture.weights_).float()
        means[label, :number] = torch.from_numpy(mixture.means_).float()
        variances[label, :number] = torch.from_numpy(mixture.covariances_).float()
    return Mixtures(weights, means, variances, counts.double())
