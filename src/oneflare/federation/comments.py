"""Explains every line of `federation.yaml` by a comment above it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping

LINE = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z_][A-Za-z0-9_]*):(?: |$)")
WIDTH = 108
EXPLAINED = {
    "version": "Form of this file.",
    "name": "Name of the federation.",
    "id": "Random number, by which two federations with the same terms stay apart.",
    "classes": "The classes in the order in which all members number them.",
    "image": "What every image is brought to: side in pixels, 1 (grey) or 3 (colour) channels, whether a mirrored "
    "image keeps its class; where given, what the numbers in image files mean (pixels), mean and std.",
    "deadline": "Uploads made later are refused unless the coordinator says otherwise.",
    "use": "What the model is for. It is printed on the model's card.",
    "limits": "What the model is not for. It is printed on the model's card.",
    "members": "Who may send, with their public keys. Empty: anybody may.",
    "revoked": "Members' keys that no longer count.",
    "coordinator": "Public key of the coordinator, which signs the model, its card and the result.",
    "succession": "Keys that replaced the coordinator's, each signed by the one before.",
    "encryption": "Public key to which members encrypt their uploads.",
    "scores": "What members tell of their tests: nothing about groups of fewer test images (or patients) than this.",
    "roster": "Mask keys of the members, signed by the coordinator.",
    "experiment": "What every member computes. All options are written out, so that they mean the same everywhere.",
    "experiment.method": "The recipe from which the options below come.",
    "experiment.augment": "How images are varied while a network is trained.",
    "experiment.backbone": "Pretrained network before all others; only from its module `tune` on it is trained.",
    "experiment.encoder": "The network that members train, if the method trains one; null: the network's own value.",
    "experiment.objective": "What training minimises.",
    "experiment.objective.terms": "Loss terms and their weights; none where nothing is trained.",
    "experiment.objective.supcon_temperature": "Temperature of the contrast between images.",
    "experiment.objective.proto_temperature": "Temperature of the contrast between images and class prototypes.",
    "experiment.objective.pcgrad": "Whether the part of the anchors' pull that opposes the local loss is taken out.",
    "experiment.objective.align_classes": "Which prototypes the anchors pull: all, or those in the batch.",
    "experiment.objective.align_reduction": "Whether lambda weighs the mean over all entries or each prototype.",
    "experiment.objective.bank": "Features of other images to contrast with.",
    "experiment.objective.alignment_epochs": "First epochs, which contrast with the public bank only.",
    "experiment.objective.proximal": "Weight of the pull back to the shared start.",
    "experiment.objective.freeze_prototypes": "Whether prototypes stay at the anchors.",
    "experiment.anchors": "Fixed directions toward which all members' prototypes are pulled.",
    "experiment.controller": "What decides lambda, the weight of that pull.",
    "experiment.controller.name": "Which controller.",
    "experiment.controller.schedule": "How lambda falls over the training.",
    "experiment.analytic": "The fixed feature map whose sums over images are sent; none: no sums are sent.",
    "experiment.train": "How long and how a network is trained; without effect where nothing is trained.",
    "experiment.train.epochs": "Passes over a member's images.",
    "experiment.train.batch_size": "Images in one step.",
    "experiment.train.lr": "Learning rate.",
    "experiment.train.schedule": "How the learning rate changes over the training.",
    "experiment.train.lr_scale_batch": "Batch size for which the learning rate was chosen.",
    "experiment.train.check_lr": "Whether to warn of a learning rate that is too large.",
    "experiment.train.optimiser": "The optimiser, if it is not stochastic gradient descent.",
    "experiment.train.momentum": "Momentum of stochastic gradient descent.",
    "experiment.train.momentum_reset": "Whether momentum starts anew where the schedule does.",
    "experiment.train.thermostat": "Noise that keeps updates at this fraction of their first size; 0: none.",
    "experiment.train.weight_decay": "Pull of all weights to zero.",
    "experiment.train.clip": "Largest norm of a gradient.",
    "experiment.train.holdout": "Part of a member's images that is kept back to calibrate its network.",
    "experiment.train.snapshots": "For simulations only.",
    "experiment.train.tail": "For simulations only.",
    "experiment.train.cohort": "For simulations only.",
    "experiment.train.device": "Where to compute; auto: a graphics processor if there is one.",
    "experiment.train.precision": "Arithmetic of the training; auto: bfloat16 where it is faster.",
    "experiment.train.checkpoint_seconds": "Least time between two checkpoints, from which training goes on.",
    "experiment.upload": "What leaves a member.",
    "experiment.upload.counts": "Numbers of images of each class: exact, noised or withheld.",
    "experiment.upload.counts_epsilon": "Privacy budget of noised counts.",
    "experiment.upload.dtype": "In which precision a network is sent.",
    "experiment.upload.statistics": "Which sums are sent beside those of the classes.",
    "experiment.upload.factors": "Members with few images send a factor of their sums of products, which is shorter.",
    "experiment.upload.statistics_components": "Gaussians in the mixture of a class.",
    "experiment.upload.statistics_dtype": "In which precision sums are sent.",
    "experiment.upload.statistics_epsilon": "Privacy budget (epsilon) of the noise on the sums.",
    "experiment.upload.statistics_delta": "Privacy budget (delta) of the noise on the sums, if there is noise.",
    "experiment.upload.statistics_clip": "Largest norm of an image's features, if there is noise.",
    "experiment.upload.evidence": "What members measure of their finished network for the fusion.",
    "experiment.upload.masked": "Sums are masked: the coordinator reads their total and no member's own.",
    "experiment.fusions": "How the coordinator makes one model; the first is the federation's own. May change later.",
    "experiment.seed": "Start of all random draws.",
    "experiment.code": "Which code the terms were written with.",
    "experiment.code.arithmetic": "Version of the arithmetic of training.",
    "experiment.code.plugins": "Digests of parts that are not OneFlare's own.",
}
CONTROLLER = "An option of the controller; `oneflare methods --parts` explains it."


def commented(text: str) -> str:
    """YAML as `Charter.to_yaml` dumps it, with a comment above every line that sets something."""
    return "".join(f"{line}\n" for line in _lines(text))


def _lines(text: str) -> Iterator[str]:
    """Below other keys than `experiment` stand names, keys and texts, which the comment above all of them explains."""
    path: list[str] = []
    unclosed = 0
    for line in text.splitlines():
        found, depth = LINE.match(line), len(line) - len(line.lstrip(" "))
        if found is None or unclosed > 0 or (depth > 0 and path[0] != "experiment"):
            yield line
        else:
            path = [*path[: depth // 2], found["key"]]
            comment = explanation(".".join(path))
            if comment is not None:
                yield from (f"{found['indent']}# {part}" for part in textwrap.wrap(comment, WIDTH - depth))
            yield line
        if path[:1] == ["experiment"]:
            unclosed += line.count("{") - line.count("}")


def explanation(path: str, known: Mapping[str, str] = EXPLAINED) -> str | None:
    """What a key of the charter is for; path: with dots, such as `experiment.train.lr`."""
    if path in known:
        return known[path]
    return CONTROLLER if path.startswith("experiment.controller.") else None
