"""What the fusion `density_ratio` needs to know of a client's features: means by class, covariances, the background's.

The background are the client's own images, destroyed (`oneflare.client.background`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oneflare.client.background import background
from oneflare.data import ClientData, ImageSpec, prepare
from oneflare.nn import PrototypeNetwork
from oneflare.nn.encoders import both_features, own_dim
from oneflare.nn.network import signed_root
from oneflare.upload.evidence import BACKGROUND, BACKGROUND_MEAN, DENSITY_MEANS, WITHIN
from oneflare.upload.symmetric import triangle

BLOCK = 256
"""images that are measured at a time"""


@torch.no_grad()
def measure_density(network: PrototypeNetwork, data: ClientData, image: ImageSpec) -> dict[str, Tensor]:
    """Means of u = root(f(x)) by class, covariance within classes, mean and covariance over background images; float32.

    root is the square root that keeps the sign (`signed_root`), which makes long tails shorter.

    f(x) are the encoder's own features where a projection widens them (`oneflare.nn.encoders.both_features`). Sums are
    float64, over images as they are (no augmentation); the network is in evaluation mode.
    """
    device, classes = network.prototypes.device, len(network.prototypes)
    dim = own_dim(network.encoder, network.prototypes.shape[1])
    sums, squares = torch.zeros(classes, dim, dtype=torch.float64), torch.zeros(dim, dim, dtype=torch.float64)
    for images, labels in zip(data.images.split(BLOCK), data.labels.split(BLOCK), strict=True):
        roots = signed_root(both_features(network.encoder, prepare(images.to(device), image)).own).double().cpu()
        sums.index_add_(0, labels, roots)
        squares += roots.T @ roots
    means = sums / data.counts.clamp(min=1)[:, None]
    within = (squares - (means.T * data.counts) @ means) / max(len(data), 1)
    total, scatter, number = torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dim, dtype=torch.float64), 0
    for destroyed in background(data.images, BLOCK):
        roots = signed_root(both_features(network.encoder, prepare(destroyed.to(device), image)).own).double().cpu()
        total, number = total + roots.sum(0), number + len(roots)
        scatter += roots.T @ roots
    middle = total / max(number, 1)
    covariance = scatter / max(number, 1) - torch.outer(middle, middle)
    upper = triangle(dim)
    measured = {DENSITY_MEANS: means, WITHIN: within[upper], BACKGROUND_MEAN: middle, BACKGROUND: covariance[upper]}
    return {name: tensor.float().contiguous() for name, tensor in measured.items()}
