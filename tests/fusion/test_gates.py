"""Gates over members' votes: each score against its published formula, image by image in NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_t

from oneflare.core.config import DataConfig
from oneflare.data import load, prepare
from oneflare.errors import ConfigError
from oneflare.fusion import UploadSet, build_fusion, load_model
from oneflare.fusion.densities import shrunk
from oneflare.models.onnx import export_onnx
from oneflare.models.rules.density import FREEDOM
from oneflare.upload.evidence import BACKGROUND, BACKGROUND_MEAN, DENSITY_MEANS, WITHIN
from oneflare.upload.symmetric import unpack_symmetric

IMAGES = load(DataConfig(train_size=200, test_size=60)).test.images[:12]
SCORES = ("density", "mahalanobis", "virtual_logit", "energy", "length")


class Known:
    """What one member's upload says, as NumPy arrays."""

    def __init__(self, knowing_members: UploadSet, index: int, encoder: torch.nn.Module) -> None:
        upload = knowing_members.uploads[index]
        part = {name: tensor.double() for name, tensor in upload.evidence("density.").items()}
        self.counts = knowing_members.counts[index].numpy()
        self.held = self.counts > 0
        self.n = self.counts.sum()
        self.means, self.middle = part[DENSITY_MEANS].numpy(), part[BACKGROUND_MEAN].numpy()
        self.within, self.behind = (unpack_symmetric(part[name]).numpy() for name in (WITHIN, BACKGROUND))
        self.prototypes = knowing_members.prototypes[index].double().numpy()
        with torch.no_grad():
            self.features = encoder(prepare(IMAGES, knowing_members.contract.image)).double().numpy()
        self.roots = np.sign(self.features) * np.sqrt(np.abs(self.features))
        self.d = self.features.shape[1]
        self.logits = self.features / np.linalg.norm(self.features, axis=1, keepdims=True) @ self.prototypes.T
        self.whole_mean = self.counts @ self.means / self.n
        apart = self.means - self.whole_mean
        self.whole_covariance = self.within + (apart.T * self.counts) @ apart / self.n

    def shrunk(self, matrix: np.ndarray, images: float) -> np.ndarray:
        return shrunk(torch.from_numpy(matrix)[None], torch.tensor([images]), 0.5)[0].numpy()

    def ratio(self, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        prior = np.trace(self.behind) / self.d * np.eye(self.d)
        degrees = self.n - self.held.sum() + 1
        pooled = self.shrunk((self.n * self.within + prior) / degrees, degrees)
        against = multivariate_t(mean, self.shrunk(covariance, self.n), df=FREEDOM).logpdf(self.roots)
        own = [
            multivariate_t(self.means[label], (1 + 1 / self.counts[label]) * pooled, df=FREEDOM).logpdf(self.roots)
            for label in np.flatnonzero(self.held)
        ]
        return (np.max(own, axis=0) - against) / self.d**0.5

    def virtual_logit(self) -> np.ndarray:
        values, vectors = np.linalg.eigh(self.whole_covariance)
        small = vectors[:, : self.d // 2]
        residual = np.linalg.norm((self.roots - self.whole_mean) @ small, axis=1)
        largest = []
        for label in np.flatnonzero(self.held):
            feature = np.sign(self.means[label]) * self.means[label] ** 2
            logits = feature / np.linalg.norm(feature) @ self.prototypes.T
            largest.append(logits[self.held].max() * self.counts[label])
        alpha = sum(largest) / self.n / np.sqrt(values[: self.d // 2].clip(1e-12).sum())
        return logsumexp(self.logits[:, self.held], axis=1) - max(alpha, 0) * residual

    def knowledge(self, score: str) -> np.ndarray:
        if score == "energy":
            return logsumexp(self.logits[:, self.held], axis=1)
        if score == "length":
            return np.log(np.linalg.norm(self.features, axis=1))
        if score == "virtual_logit":
            return self.virtual_logit()
        if score == "density":
            return self.ratio(self.middle, self.behind)
        return self.ratio(self.whole_mean, self.whole_covariance)


@pytest.mark.parametrize("score", SCORES)
def test_votes_are_weighted_by_the_published_score(score, knowing_members):
    model = build_fusion({"name": "gated_votes", "by": score, "sharpness": 2.0}).fuse(knowing_members).model
    found = model.logits(IMAGES).double().softmax(1).numpy()
    wanted = np.zeros_like(found)
    for index, encoder in enumerate(knowing_members.encoders()):
        known = Known(knowing_members, index, encoder)
        own = softmax(np.where(known.held, known.logits, -np.inf), axis=1)
        wanted += np.exp(2 * known.knowledge(score).clip(-20, 20))[:, None] * own
    assert np.allclose(found, wanted / wanted.sum(1, keepdims=True), atol=2e-3)


def test_a_sharp_gate_lets_only_the_one_who_knows_best_speak(knowing_members):
    knowing = [Known(knowing_members, index, encoder) for index, encoder in enumerate(knowing_members.encoders())]
    knowledge = np.sort([known.knowledge("density") for known in knowing], axis=0)
    best = np.argmax([known.knowledge("density") for known in knowing], axis=0)
    votes = build_fusion({"name": "gated_votes", "sharpness": 8.0}).fuse(knowing_members).model.predict(IMAGES)
    own = [np.where(known.held, known.logits, -np.inf).argmax(1) for known in knowing]
    clear = np.flatnonzero(knowledge[-1] - knowledge[-2] > 1)
    assert len(clear) > 3
    assert [int(votes[image]) for image in clear] == [own[best[image]][image] for image in clear]


def test_gates_are_saved_and_exported(tmp_path, knowing_members):
    for score in SCORES:
        model = build_fusion({"name": "gated_votes", "by": score}).fuse(knowing_members).model
        model.save(tmp_path / f"{score}.safetensors")
        again = load_model(tmp_path / f"{score}.safetensors")
        assert torch.equal(again.logits(IMAGES), model.logits(IMAGES))
    export_onnx(model, tmp_path / "model.onnx")


def test_what_a_gate_needs_depends_on_its_score():
    assert "density" in build_fusion({"name": "gated_votes", "by": "mahalanobis"}).needs
    assert "density" not in build_fusion({"name": "gated_votes", "by": "energy"}).needs
    with pytest.raises(ConfigError, match=r"gated_votes\.by"):
        build_fusion({"name": "gated_votes", "by": "entropy"})
    with pytest.raises(ConfigError, match=r"gated_votes\.sharpness"):
        build_fusion({"name": "gated_votes", "sharpness": 9})
