"""Checks every field of a model file before a network is built from it.

In this order: a regular file of bounded size, read once into memory; the coordinator's signature of those bytes, if
the key is known; the file's structure; every field and every number. At last the model is asked about one blank image,
which shows whether its tensors fit each other, the members and the classes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from oneflare.core.files import parse_state, read_regular
from oneflare.core.plain import plain
from oneflare.data.dataset import Copies
from oneflare.errors import RunError
from oneflare.models.sealing import check_seal
from oneflare.nn.backbones import WIDEST_CUT

SIZE_LIMIT = 16 << 30
CLASSES, NAME_LENGTH, DIMENSIONS, CHANNELS, SIDE, MEMBERS = 10_000, 200, 1 << 16, 16, 1024, 100_000
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.bool)
NUMBERS = 1 << 28
"""of prototypes"""
FEATURE_OPTION = 4096
"""largest whole number among the options of a feature map"""
FEATURE_NUMBER = 40_000
"""largest number of features that an option may ask for"""
FUSE_AGAIN = "give a model that a fusion has written, or fuse again"


def read_model_file(path: Path, key: str | None = None, federation: str | None = None) -> dict[str, Any]:
    """The checked content of a model file: its kind, its task and its state, what else it says, and its SHA-256.

    key: the coordinator's public key, with which the file must then be signed; federation: for which fingerprint
    """
    if not path.exists():
        raise RunError(f"no model at {path}")
    content = read_regular(path, SIZE_LIMIT)
    if key is not None:
        check_seal(path, content, key, "model", federation)
    try:
        model = parse_state(content)
        _check_fields(model)
    except ValueError as error:
        raise RunError(f"{path} is not a OneFlare model, or is damaged: {error}; {FUSE_AGAIN}") from None
    return dict(model) | {"sha256": hashlib.sha256(content).hexdigest()}


def _check_fields(model: Any) -> None:
    _mapping("the file", model, ("kind", "task", "state"))
    if not isinstance(model["kind"], str):
        raise ValueError("kind is not a word")
    check_task(model["task"])
    _mapping("state", model["state"], ())
    for place, value in _leaves("state", model["state"]):
        _check_leaf(place, value)
    state = model["state"]
    if "members" in state:
        _check_members(state["members"])
    for spec in (state, state.get("analytic")):
        if isinstance(spec, dict) and "feature_map" in spec:
            _check_feature_map(spec)
    if "fields" in state and not isinstance(state["fields"], dict):
        raise ValueError("state.fields is not a mapping")


def check_task(task: Any) -> None:
    """What is classified, with which encoder: names, sizes, constants; else a ValueError."""
    _mapping("task", task, ("encoder", "image", "classes", "dim"))
    check_class_names(task["classes"])
    _whole("task.dim", task["dim"], DIMENSIONS)
    if len(task["classes"]) * task["dim"] > NUMBERS:
        raise ValueError(f"{len(task['classes'])} classes in {task['dim']} dimensions exceed {NUMBERS:,} numbers")
    _mapping("task.encoder", task["encoder"], ("name",))
    for name, value in task["encoder"].items():
        if not isinstance(value, str | int | float | bool | None) or len(str(value)) > NAME_LENGTH:
            raise ValueError(f"task.encoder.{_shown(name)} is not a number or a word of up to {NAME_LENGTH} letters")
    _check_image("task.image", task["image"])


def _check_image(place: str, image: Any) -> None:
    """What networks are fed; behind a backbone, features without constants."""
    _mapping(place, image, ("channels", "size", "mean", "std"))
    if image.get("backbone") is not None:
        _check_backbone(place, image)
        return
    _whole(f"{place}.channels", image["channels"], CHANNELS)
    _whole(f"{place}.size", image["size"], SIDE)
    for name, least in (("mean", -math.inf), ("std", 0.0)):
        values = image[name]
        numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
        if not numbers or len(values) != image["channels"] or not all(least < value < math.inf for value in values):
            raise ValueError(f"{place}.{name} is not one finite number per channel" + " above 0" * (name == "std"))
    crop = image.get("crop")
    if crop is not None:
        _mapping(f"{place}.crop", crop, ("part", "resample"))
        if type(crop["part"]) not in (int, float) or not 0 < crop["part"] <= 1:
            raise ValueError(f"{place}.crop.part is {_shown(crop['part'])}, not a number above 0 and at most 1")
        if crop["resample"] not in ("bilinear", "bicubic"):
            raise ValueError(f"{place}.crop.resample is {_shown(crop['resample'])}, not bilinear or bicubic")


def _check_backbone(place: str, image: Mapping[str, Any]) -> None:
    backbone = image["backbone"]
    _mapping(f"{place}.backbone", backbone, ("name", "digest", "image"))
    _whole(f"{place}.channels", image["channels"], DIMENSIONS if backbone.get("tune") is None else WIDEST_CUT)
    if image["size"] != 1 or image["mean"] or image["std"]:
        raise ValueError(f"{place} is behind a backbone, but does not describe features")
    for key in ("name", "tune"):
        name = backbone.get(key, "none")
        if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH or plain(name) != name:
            raise ValueError(f"{place}.backbone.{key} is not a printable word of up to {NAME_LENGTH} letters")
    _check_digest(f"{place}.backbone.digest", backbone["digest"])
    if backbone.get("copies", "none") not in get_args(Copies):
        raise ValueError(f"{place}.backbone.copies is not one of {', '.join(get_args(Copies))}")
    _mapping(f"{place}.backbone.image", backbone["image"], ())
    if backbone["image"].get("backbone") is not None:
        raise ValueError(f"{place}.backbone is behind another backbone")
    _check_image(f"{place}.backbone.image", backbone["image"])


def _check_digest(place: str, digest: Any) -> None:
    if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(f"{place} is not a SHA-256")


def check_class_names(names: Any) -> None:
    """Names that people read in terminals and tables: text, visible, distinct; else a ValueError."""
    if not isinstance(names, list | tuple) or not 2 <= len(names) <= CLASSES:
        raise ValueError(f"task.classes is not a list of 2 to {CLASSES:,} names")
    for name in names:
        if not isinstance(name, str) or not name.strip() or len(name) > NAME_LENGTH or plain(name) != name:
            raise ValueError(f"the class name {_shown(name)} is not a printable word of up to {NAME_LENGTH} letters")
    if len(set(names)) != len(names):
        raise ValueError(f"the class name {_shown(max(names, key=list(names).count))} is there twice")


def _check_members(members: Any) -> None:
    if not isinstance(members, list) or not 1 <= len(members) <= MEMBERS:
        raise ValueError(f"state.members is not a list of 1 to {MEMBERS:,} members")
    for number, member in enumerate(members):
        _mapping(f"state.members[{number}]", member, ("digest",))
        _check_digest(f"state.members[{number}].digest", member["digest"])
        if "weights" in member:
            weights = member["weights"]
            if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
                raise ValueError(f"state.members[{number}].weights is not a mapping of tensors")
        elif not isinstance(member.get("file"), str) or "\0" in member["file"]:
            raise ValueError(f"state.members[{number}] has neither weights nor a file")


def _check_feature_map(state: Mapping[str, Any]) -> None:
    """The options of a feature map, before memory is taken for it, and its bound."""
    _mapping("state.feature_map", state["feature_map"], ("name",))
    below = state["feature_map"].get("of")
    for spec in (state["feature_map"], below if isinstance(below, dict) else {}):
        for name, value in spec.items():
            most = FEATURE_NUMBER if name == "features" else FEATURE_OPTION
            if isinstance(value, int) and name != "seed" and not 0 <= value <= most:
                raise ValueError(f"state.feature_map.{_shown(name)} is {_shown(value)}, beyond {most}")
    bound = state.get("bound")
    if bound is not None and (type(bound) not in (int, float) or not 0 < bound < math.inf):
        raise ValueError(f"state.bound is {_shown(bound)}, not a finite number above 0")


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(f"{place}.{name}", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _leaves(f"{place}[{number}]", item)
    else:
        yield place, value


def _check_leaf(place: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"{_shown(place)} is not a number, a word or a tensor")
        return
    if value.dtype not in DTYPES:
        raise ValueError(f"{_shown(place)} has the type {value.dtype}, which no model has")
    if value.is_floating_point() and not bool(value.isfinite().all()):
        raise ValueError(f"{_shown(place)} has values that are not finite")
    if place.endswith("running_var") and bool((value < 0).any()):
        raise ValueError(f"{_shown(place)} has a negative variance")


def _mapping(place: str, value: Any, keys: Sequence[str]) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} is not a mapping")
    for key in keys:
        if key not in value:
            raise ValueError(f"{place} has no {key}")


def _whole(place: str, value: Any, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{place} is {_shown(value)}, not a whole number from 1 to {most:,}")


def _shown(value: Any) -> str:
    return plain(repr(value), 80)


def rehearse(path: Path, classes: int, answer: Callable[[], Tensor]) -> None:
    """Ask a model that was just read about one blank image: its parts fit each other if logits `(1, C)` come out."""
    reason = "it does not answer with one number per class"
    try:
        with torch.no_grad():
            logits = answer()
        fits = isinstance(logits, Tensor) and tuple(logits.shape) == (1, classes)
    except RunError:
        raise
    except Exception as error:  # parts that do not fit fail in many ways
        fits, reason = False, plain(" ".join(str(error).split()) or type(error).__name__, 160)
    if not fits:
        raise RunError(f"{path}: the parts of the model do not fit each other ({reason}); {FUSE_AGAIN}")
