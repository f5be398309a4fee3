"""Exports a global model as one ONNX graph, and compares it with the model before it is written."""

from __future__ import annotations

import copy
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from oneflare.core.files import write_bytes
from oneflare.core.seeds import torch_generator
from oneflare.data.dataset import normalise
from oneflare.errors import ConfigError, RunError
from oneflare.models.analytic import AnalyticMemberModel, FeatureModel
from oneflare.models.base import Answers, GlobalModel, SingleModel
from oneflare.models.members import MemberModel, added, features_for, finished
from oneflare.nn.backbone_kinds import OnnxNetwork
from oneflare.nn.backbones import frozen, of_copies
from oneflare.nn.encoders import both_features
from oneflare.nn.feature_maps import Bounded

TOLERANCE = 1e-4
"""largest difference of a probability between the graph and the model"""
OPSET = 18
CHECKED_BATCHES = (1, 5)
REMEDY = "fuse again with a fusion that gives one network, such as average or regmean"
INPUT, LOGITS, PROBABILITIES = "images", "logits", "probabilities"
LABELS, FAMILIARITY = "labels", "familiarity"


@dataclass(frozen=True)
class Exported:
    """A graph that was written, and how far it is from the model."""

    path: Path
    size_bytes: int
    difference: float
    """largest difference of a probability on test batches"""


class Graph(nn.Module):
    """images `(n, c, h, w)` in [0, 1] -> logits and probabilities `(n, C)`, with the pixel convention inside.

    A model that has thresholds also gives labels `(n,)`, -1 for none of the known classes; one that can tell unknown
    images gives their familiarity `(n,)`. `outputs` names all of them in order.
    """

    def __init__(self, model: GlobalModel) -> None:
        super().__init__()
        self.image = model.task.image
        self.backbone = _backbone(model)
        self.model = [model]  # in a list: it is no submodule
        self.outputs = [LOGITS, PROBABILITIES]
        self.outputs += [LABELS] if model.decision is not None else []
        self.outputs += [FAMILIARITY] if model.familiarity_bound is not None else []
        self.encoders = nn.ModuleList()
        if isinstance(model, SingleModel):
            self.network = model.network
        elif isinstance(model, MemberModel):
            for member in model.members:
                encoder = copy.deepcopy(model.encoder)
                encoder.load_state_dict(dict(member.weights()))
                self.encoders.append(encoder.eval())
        elif not isinstance(model, FeatureModel):
            raise ConfigError(f"a model of kind '{model.kind}' cannot be exported; {REMEDY}")

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        model = self.model[0]
        answers = self._answers(model, images)
        named = {LOGITS: answers.logits, PROBABILITIES: answers.logits.softmax(1), FAMILIARITY: answers.familiarity}
        if model.decision is not None:
            named[LABELS] = model.decision.labels(answers)
        return tuple(cast("Tensor", named[name]) for name in self.outputs)

    def _answers(self, model: GlobalModel, images: Tensor) -> Answers:
        if self.backbone is not None:
            terms = self.image.backbone
            assert terms is not None
            features = of_copies(self.backbone, normalise(images, self.image.decoded), terms.copies)
            images = features[:, :, None, None].float()
        if isinstance(model, FeatureModel):
            return Answers(_analytic(model, images))
        if isinstance(model, SingleModel):
            return Answers(self.network(normalise(images, self.image)) @ self.network.prototypes.T)
        assert isinstance(model, MemberModel)
        return self._members(model, images)

    def _members(self, model: MemberModel, images: Tensor) -> Answers:
        state = model.rule.start(images.shape[0])
        if isinstance(model, AnalyticMemberModel):
            state[:, 0] = _analytic(model.analytic, images).log_softmax(1)
        inputs = normalise(images, self.image)
        for index, encoder in enumerate(self.encoders):
            features = features_for(model.rule, both_features(encoder, inputs))
            state = added(model.rule, state, index, features)
        return finished(model.rule, state)


def _backbone(model: GlobalModel) -> nn.Module | None:
    """The frozen network before the model, which the graph then holds."""
    terms = model.task.image.backbone
    if terms is None:
        return None
    network = frozen(terms).network
    if isinstance(network, OnnxNetwork):
        raise ConfigError(f"backbone={terms.name} is an ONNX graph already and cannot be exported with the model")
    return network


def _analytic(model: FeatureModel, images: Tensor) -> Tensor:
    """The analytic logits without the blocks of images that fix its rounding."""
    features = model.features
    inner = features.features if isinstance(features, Bounded) else features
    below = getattr(inner, "features", inner)
    if not hasattr(below, "traced"):
        raise ConfigError(f"features '{model.spec['name']}' cannot be exported; {REMEDY}")
    phi = inner.traced(images)  # type: ignore[attr-defined]
    if isinstance(features, Bounded):
        phi = features.shorten(phi)
    return model.classify(phi)


def export_onnx(model: GlobalModel, path: Path) -> Exported:
    """Write the model as ONNX if, and only if, onnxruntime agrees with it."""
    try:
        import onnx
        import onnxruntime
    except ImportError:
        raise ConfigError("export needs onnx and onnxruntime; pip install 'oneflare[onnx]'") from None
    graph = Graph(model).eval()
    content = _trace(graph, model)
    proto = onnx.load_from_string(content)
    for key, value in _metadata(model).items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    content = proto.SerializeToString()
    onnx.checker.check_model(proto)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    difference = max(_difference(model, session, batch) for batch in CHECKED_BATCHES)
    if model.decision is not None:
        _check_labels(model, session)
    if not difference <= TOLERANCE:
        raise RunError(f"the exported graph differs from the model by {difference:.2g}; nothing was written")
    write_bytes(path, content)
    return Exported(path, len(content), difference)


def _metadata(model: GlobalModel) -> dict[str, str]:
    """What programs that run the graph can read of it: classes, and how labels are chosen, a class on each line."""
    told = {"classes": "\n".join(model.task.classes), "producer": "oneflare"}
    decision = model.decision
    if decision is not None:
        told["thresholds"] = "\n".join("" if limit is None else repr(limit) for limit in decision.thresholds)
    if decision is not None and decision.floor is not None:
        told["least_familiarity"] = repr(decision.floor)
    return told


def _trace(graph: Graph, model: GlobalModel) -> bytes:
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # about constants that are meant to be constants
            torch.onnx.export(
                graph,
                (_example(model, 2),),
                buffer,  # type: ignore[arg-type]
                input_names=[INPUT],
                output_names=graph.outputs,
                dynamic_axes={name: {0: "n"} for name in (INPUT, *graph.outputs)},
                opset_version=OPSET,
                dynamo=False,
            )
    except (ConfigError, RunError):
        raise
    except Exception as error:  # the exporter raises many kinds; all mean that an operation has no ONNX form
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise ConfigError(f"this model has no ONNX form ({reason}); {REMEDY}") from None
    return buffer.getvalue()


def _example(model: GlobalModel, batch: int) -> Tensor:
    image = model.task.image.decoded
    shape = (batch, image.channels, image.size, image.size)
    return torch.rand(shape, generator=torch_generator(0, "onnx check", batch))


def _difference(model: GlobalModel, session: Any, batch: int) -> float:
    images = _example(model, batch)
    probabilities = torch.from_numpy(session.run([PROBABILITIES], {INPUT: images.numpy()})[0])
    return float((probabilities - model.predict_proba(images)).abs().max())


def _check_labels(model: GlobalModel, session: Any) -> None:
    """Labels must be the model's; images on a border, where rounding decides, are not compared."""
    decision, images = model.decision, _example(model, max(CHECKED_BATCHES))
    assert decision is not None
    answers = model.answers(images)
    found = torch.from_numpy(session.run([LABELS], {INPUT: images.numpy()})[0])
    best = decision.scores(answers.logits).topk(2, 1).values
    clear = (best[:, 0] - best[:, 1]) > TOLERANCE
    shares = answers.logits.softmax(1)
    for label, limit in enumerate(decision.thresholds):
        clear &= True if limit is None else (shares[:, label] - limit).abs() > TOLERANCE
    if decision.floor is not None and answers.familiarity is not None:
        clear &= (answers.familiarity - decision.floor).abs() > TOLERANCE
    if bool((found != decision.labels(answers))[clear].any()):
        raise RunError("the exported graph names other classes than the model; nothing was written")
