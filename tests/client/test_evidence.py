from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import nn

from conftest import TINY
from oneflare.client.cohort import cohorts
from oneflare.client.evidence import measure_evidence
from oneflare.client.observer import Observer
from oneflare.core.files import digest_of, tensor_digest
from oneflare.data import ClientData, ImageSpec, Split, load, prepare
from oneflare.errors import ConfigError, UploadError
from oneflare.methods.resolve import resolve
from oneflare.nn import PrototypeNetwork
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.upload import MANIFEST, Contents, read_upload, write_upload
from oneflare.upload.evidence import GRADIENTS, INPUTS, MEASURED, layout, linear_maps, map_matrix, map_state, offers
from oneflare.upload.symmetric import unpack_symmetric

IMAGE = ImageSpec.default(1, 8)
CLASSES = 4


class Small(nn.Module):
    """A convolution, a normalisation, and a linear layer whose output is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.linear = nn.Linear(48, 5)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(5, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.relu(self.linear(self.relu(self.norm(self.conv(x))).flatten(1))))


@pytest.fixture(scope="module")
def network() -> PrototypeNetwork:
    torch.manual_seed(0)
    made = PrototypeNetwork(Small(), torch.randn(CLASSES, 6))
    made.encoder.norm.running_mean.copy_(torch.randn(3))
    made.encoder.norm.running_var.copy_(torch.rand(3) + 0.5)
    return made.eval()


def some_data(n: int = 9, seed: int = 1) -> ClientData:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES - 1, (n,), generator=generator)  # nobody has the last class
    return ClientData.of(Split(torch.rand(n, 1, 8, 8, generator=generator), labels), CLASSES)


def slopes(network: PrototypeNetwork, data: ClientData) -> list[dict[str, torch.Tensor]]:
    """Each image's gradient, one backward pass each."""
    result = []
    for image, label in zip(data.images, data.labels, strict=True):
        loss = F.cross_entropy(network(prepare(image[None], IMAGE)) @ network.prototypes.T, label[None])
        found = torch.autograd.grad(loss, list(network.parameters()))
        result.append(dict(zip((name for name, _ in network.named_parameters()), found, strict=True)))
    return result


def test_names_and_shapes_are_those_of_the_layout(network):
    evidence = measure_evidence(network, some_data(), IMAGE, MEASURED)
    assert {name: tuple(tensor.shape) for name, tensor in evidence.items()} == layout(network, MEASURED)
    assert all(tensor.dtype == torch.float32 for tensor in evidence.values())
    assert all(parameter.grad is None for parameter in network.parameters())
    for name in MEASURED:
        assert set(measure_evidence(network, some_data(), IMAGE, (name,))) == set(layout(network, (name,)))
    assert offers(["kronecker"]) == {"kronecker", "gram"}


def test_without_images_the_sizes_are_those_of_every_upload(network):
    nothing = ClientData.of(Split(torch.empty(0, 1, 1, 1), torch.empty(0, dtype=torch.long)), CLASSES)
    for name in MEASURED:
        found = measure_evidence(network, nothing, IMAGE, (name,))
        assert {key: tuple(tensor.shape) for key, tensor in found.items()} == layout(network, (name,))


def test_moments_and_class_means_are_those_of_the_unit_features(network):
    data = some_data(300)  # several blocks
    evidence = measure_evidence(network, data, IMAGE, ("moments", "class_means"))
    with torch.no_grad():
        z = network(prepare(data.images, IMAGE))
    assert torch.allclose(evidence["moments.mean"], z.mean(0), atol=1e-6)
    assert torch.allclose(evidence["moments.variance"], z.var(0, correction=0), atol=1e-6)
    for c in range(CLASSES - 1):
        assert torch.allclose(evidence["class_means"][c], z[data.labels == c].mean(0), atol=1e-6)
    assert not evidence["class_means"][-1].any()


def test_raw_moments_are_those_of_the_features_as_they_are(network):
    data = some_data(300)
    evidence = measure_evidence(network, data, IMAGE, ("raw_moments",))
    with torch.no_grad():
        f = network.encoder(prepare(data.images, IMAGE)).double()
    assert torch.allclose(evidence["raw_moments.mean"].double(), f.mean(0), atol=1e-5)
    assert torch.allclose(evidence["raw_moments.variance"].double(), f.var(0, correction=0), atol=1e-5)


def test_fisher_is_the_mean_squared_gradient_of_single_images(network):
    data = some_data()
    evidence = measure_evidence(network, data, IMAGE, ("fisher",))
    each = slopes(network, data)
    for name, _ in network.named_parameters():
        expected = torch.stack([gradient[name].square() for gradient in each]).mean(0)
        assert torch.allclose(evidence[f"fisher.{name}"], expected, rtol=1e-3, atol=1e-9), name


def test_the_kronecker_factors_of_one_image_are_its_fisher_information(network):
    """Without a mean over images or places, A (x) G = (a a^T) (x) (g g^T) is exact."""
    data = some_data(1)
    evidence = measure_evidence(network, data, IMAGE, ("kronecker", "fisher"))
    state = {name.removeprefix("fisher."): tensor for name, tensor in evidence.items() if name.startswith("fisher.")}
    for name in ("encoder.linear", "encoder.last", "prototypes"):
        a, g = (unpack_symmetric(evidence[kind + name]).diagonal() for kind in (INPUTS, GRADIENTS))
        assert torch.allclose(torch.outer(g, a), map_matrix(state, name), rtol=1e-3, atol=1e-9), name


def test_factors_are_means_over_images(network):
    data = some_data(200)
    whole = measure_evidence(network, data, IMAGE, ("kronecker",))
    parts = [
        measure_evidence(network, ClientData.of(Split(image[None], label[None]), CLASSES), IMAGE, ("kronecker",))
        for image, label in zip(data.images, data.labels, strict=True)
    ]
    for name, tensor in whole.items():
        assert torch.allclose(tensor, torch.stack([part[name] for part in parts]).mean(0), rtol=1e-3, atol=1e-6), name


def test_factors_of_a_convolution(network):
    """tr(W A W^T) is the mean squared output; sum_t g_t is the gradient of the bias."""
    data = some_data()
    evidence = measure_evidence(network, data, IMAGE, ("kronecker",))
    inputs, gradients = (unpack_symmetric(evidence[kind + "encoder.conv"]) for kind in (INPUTS, GRADIENTS))
    with torch.no_grad():
        outputs = network.encoder.conv(prepare(data.images, IMAGE))
    matrix = map_matrix(dict(network.state_dict()), "encoder.conv")
    assert float((matrix @ inputs @ matrix.T).trace()) == pytest.approx(float(outputs.square().sum() / 9), rel=1e-4)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for image, label in zip(data.images, data.labels, strict=True):
        shift = torch.zeros(1, 3, 4, 4, requires_grad=True)
        hook = network.encoder.conv.register_forward_hook(lambda module, given, output, shift=shift: output + shift)
        loss = F.cross_entropy(network(prepare(image[None], IMAGE)) @ network.prototypes.T, label[None])
        hook.remove()
        (slope,) = torch.autograd.grad(loss, shift)
        rows = slope[0].flatten(1).double()
        expected += rows @ rows.T / 16 / 9
    assert torch.allclose(gradients, expected, rtol=1e-3, atol=1e-9)


def test_matrix_and_state_are_inverse(network):
    state = dict(network.state_dict())
    for name in linear_maps(network):
        for key, tensor in map_state(map_matrix(state, name), name, state).items():
            assert torch.equal(tensor.float(), state[key])


def test_grouped_convolutions_are_left_out():
    encoder = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding="same"), nn.Flatten()
    )
    assert list(linear_maps(PrototypeNetwork(encoder, torch.zeros(2, 3)))) == ["encoder.0", "prototypes"]


@pytest.fixture
def federation(tmp_path):
    experiment = resolve(TINY, {"method": "flare", "upload.evidence": list(MEASURED), "epochs": 1})
    return Simulation.build(experiment, RunFiles(tmp_path), load(experiment.data))


@pytest.fixture
def written(federation, tmp_path):
    data, network = federation.clients.data(0), federation.template()
    evidence = measure_evidence(network, data, federation.contract.image, federation.contract.evidence)
    path = tmp_path / "upload.safetensors"
    write_upload(path, network, federation.contract, Contents(client=0, counts=data.counts, epoch=1, evidence=evidence))
    return path, evidence


def forge(path, name, tensor):
    """The file with one tensor replaced (None: removed) and its digests made right again."""
    content = load_file(path)
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    manifest = json.loads(header["__metadata__"][MANIFEST])
    content |= {name: tensor}
    content = {key: value for key, value in content.items() if value is not None}
    manifest["tensors"] = {key: tensor_digest(value) for key, value in sorted(content.items())}
    manifest.pop("digest")
    manifest["digest"] = digest_of(manifest)
    path.write_bytes(save(content, metadata={MANIFEST: json.dumps(manifest)}))


def test_evidence_travels_in_the_upload(federation, written):
    path, evidence = written
    upload = read_upload(path, federation.contract)
    assert set(MEASURED) <= upload.fields
    found = upload.evidence()
    assert set(found) == set(evidence)
    assert all(torch.equal(found[name], tensor) for name, tensor in evidence.items())
    assert set(upload.evidence("moments.")) == {"moments.mean", "moments.variance"}
    plain = dataclasses.replace(federation.contract, evidence=(), evidence_shapes={})
    with pytest.raises(UploadError, match="evidence differs from this federation's"):
        read_upload(path, plain)


def indefinite(values: torch.Tensor) -> torch.Tensor:
    """The same squares, with products of which every pair is possible and all together are not."""
    diagonal = unpack_symmetric(values).diagonal()
    matrix = -0.9 * diagonal.sqrt()[:, None] * diagonal.sqrt() + torch.diag(1.9 * diagonal)
    return matrix[torch.ones_like(matrix).triu().bool()].float()


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("moments.variance", lambda t: -t - 1, "negative number"),
        ("raw_moments.variance", lambda t: -t - 1, "negative number"),
        ("raw_moments.mean", lambda t: t + 1e8, r"where honest features allow 1e\+06"),
        ("moments.mean", lambda t: t + 1, "longer than a mean of unit features"),
        ("class_means", lambda t: t + 1, "longer than a mean of unit features"),
        ("fisher.prototypes", lambda t: t - 1, "negative number"),
        ("fisher.prototypes", lambda t: t.flatten(), "has shape"),
        ("fisher.prototypes", lambda t: t.long(), "has type"),
        ("fisher.prototypes", lambda t: t / 0, "not finite"),
        ("inputs.prototypes", lambda t: t.index_fill(0, torch.tensor([1]), 1e3), "product larger than its squares"),
        ("gradients.prototypes", lambda t: t.index_fill(0, torch.tensor([0]), -1), "negative square on its diagonal"),
        ("inputs.prototypes", lambda t: indefinite(t), "not positive semidefinite"),
        ("gradients.prototypes", lambda t: indefinite(t), "not positive semidefinite"),
        ("inputs.prototypes", lambda t: 5 * t, "reaches 5, where honest features allow 1"),
        ("fisher.prototypes", lambda t: t + 7, "where honest features allow 1"),
        ("density.within", lambda t: t * 1e15, "where honest features allow"),
        ("density.background", lambda t: t * 1e15, "where honest features allow"),
        ("moments.variance", lambda t: t + 1, "where unit features have 1"),
        ("gradients.prototypes", lambda t: None, "is missing"),
        ("surprise", lambda t: torch.zeros(1), "is not a field"),
    ],
)
def test_implausible_evidence_is_refused(federation, written, name, change, reason):
    path, evidence = written
    forge(path, f"evidence.{name}", change(evidence.get(name)))
    with pytest.raises(UploadError, match=reason) as caught:
        read_upload(path, federation.contract)
    assert str(path) in str(caught.value)


def test_a_mean_of_a_class_without_images_is_refused(federation, written):
    path, evidence = written
    means = evidence["class_means"].clone()
    absent = int((federation.clients.data(0).counts == 0).nonzero()[0])
    means[absent, 0] = 0.5
    forge(path, "evidence.class_means", means)
    with pytest.raises(UploadError, match="a class without images"):
        read_upload(path, federation.contract)


PLAIN = {"fusions": "feature_mean"}


def test_mistakes_are_named_before_training():
    for settings, reason in (
        ({"upload.evidence": "fishr"}, "unknown evidence 'fishr'; did you mean 'fisher'"),
        ({"upload.evidence": "class_means", "upload.counts": "withheld", **PLAIN}, "class_means reveals which classes"),
        ({"upload.evidence": "kronecker", "upload.counts": "withheld", **PLAIN}, "kronecker reveals which classes"),
        (
            {"upload.evidence": "moments", "upload.counts": "noised", **PLAIN},
            "averages over a client's images give their num",
        ),
        ({"train.holdout": 0.1, "upload.counts": "noised", **PLAIN}, "follows from the exact class counts"),
        ({"method": "analytic", "upload.evidence": "fisher"}, "no network to measure"),
    ):
        with pytest.raises(ConfigError, match=reason):
            resolve(TINY, settings)


def test_absent_evidence_leaves_the_run_its_name():
    base = {**TINY, "fusions": "feature_mean"}
    assert resolve(base).training_digest() == resolve(base, {"upload.evidence": []}).training_digest()
    assert resolve(base, {"upload.evidence": "gram,fisher"}).upload.evidence == ("fisher", "gram")
    assert resolve(base).training_digest() != resolve(base, {"upload.evidence": "fisher"}).training_digest()


def test_clients_that_train_together_measure_too(tmp_path):
    layer = {"partition": {"kind": "iid", "clients": 20}, "upload.evidence": "moments,fisher", "epochs": 1}
    experiment = resolve(TINY, {"method": "fafi"}, layer)
    made = Simulation.build(experiment, RunFiles(tmp_path), load(experiment.data))
    assert max(map(len, cohorts(made.partition.sizes, 8, None))) > 1
    for upload in made.collect(made.train(Observer()), Observer()):
        network = made.template()
        network.encoder.load_state_dict(upload.weights())
        network.prototypes.data.copy_(upload.prototypes)
        expected = measure_evidence(
            network, made.clients.data(upload.client), made.contract.image, ("moments", "fisher")
        )
        for name, tensor in upload.evidence().items():
            assert torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-6), name
