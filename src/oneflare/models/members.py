"""Models that ask every member: the members' encoders, and a rule that combines their features.

A `MemberModel` streams: one encoder in memory at a time, all images through it, then the next. Several member models
over the same uploads are evaluated in one pass (`logits_of_all`). Encoders compute on the model's device. Their
features come back, because rules, which are a few products of small matrices, compute on the processor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oneflare.data import prepare
from oneflare.errors import RunError
from oneflare.models.base import BATCH, Answers, Cost, GlobalModel, Task
from oneflare.nn.encoders import Features, both_features
from oneflare.upload import read_weights

RAW = "raw"
"""what a file of members says their rule is given; files of the first release do not say it, and meant unit features"""


BESIDE = "beside"
LONGEST = 1e6
"""no entry of an honest network's feature is larger; beyond it squares and sums lose their meaning"""


class Rule(Protocol):
    """How members' features become logits: start, add every member's features in turn, finish.

    Features are raw, as the encoder gives them: a rule whose formula is about directions brings them to unit length
    itself. A rule's tensors are its dataclass fields; `RULES` lists the kinds that a model file may name. A rule with a
    class attribute `own_features = True` gets the features before a projection that widens them, with `BESIDE` both in
    one row where they differ. A class attribute
    `remark` is told to whoever asks the model. A rule that can tell unknown images from known ones has a method
    `familiarity(state)`, which gives `(n,)`, and a property `familiarity_bound`.
    """

    def start(self, images: int) -> Tensor:
        """The accumulator for this many images."""

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        """Raw features `(rows, d)` of one member, accumulated in place."""

    def finish(self, state: Tensor) -> Tensor:
        """`(n, C)` logits"""


RULES: dict[str, type[Any]] = {}


def rule(kind: type[Any]) -> type[Any]:
    """Class decorator: lets model files name this rule."""
    RULES[kind.__name__] = kind
    return kind


@dataclass(frozen=True)
class Member:
    """One client's encoder, read when needed."""

    source: Path
    digest: str
    weights: Callable[[], Mapping[str, Tensor]]
    embedded: bool = False
    """whether the weights are in the model's own file, and in memory"""

    def to_dict(self, reference_from: Path | None) -> dict[str, Any]:
        reference = {"digest": self.digest}
        if reference_from is None:
            return reference | {"weights": dict(self.weights())}
        return reference | {"file": os.path.relpath(self.source, reference_from)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], model_file: Path) -> Member:
        digest = str(value["digest"])
        if "weights" in value:
            return cls(model_file, digest, partial(dict, value["weights"]), embedded=True)
        source = model_file.parent / value["file"]
        return cls(source, digest, partial(read_weights, source, digest))


class MemberModel(GlobalModel):
    """Every client's encoder, combined by a rule."""

    kind = "members"

    def __init__(self, task: Task, members: Sequence[Member], rule: Rule, encoder: nn.Module) -> None:
        super().__init__(task)
        self.members = tuple(members)
        self.rule = rule
        self.encoder = encoder
        self.unanswered = [0] * len(self.members)
        """images so far to which each member gave no usable feature, so that it had no say on them"""

    @property
    def cost(self) -> Cost:
        own = sum(p.numel() for p in self.encoder.parameters())
        rule_size = sum(value.numel() for value in vars(self.rule).values() if isinstance(value, Tensor))
        return Cost(own * len(self.members) + rule_size, len(self.members))

    def remarks(self) -> list[str]:
        """What whoever asked should know: what the rule says of itself, and members whose networks overflowed."""
        told = [self.rule.remark] if hasattr(self.rule, "remark") else []
        return told + [
            f"member {index + 1} of {len(self.members)} gave no usable answer to {count} images and had no say on them"
            for index, count in enumerate(self.unanswered)
            if count
        ]

    def start(self, images: Tensor, batch_size: int) -> Tensor:
        """The rule's accumulator, before any member has seen the images."""
        del batch_size
        return self.rule.start(len(images))

    @property
    def familiarity_bound(self) -> float | None:
        return getattr(self.rule, "familiarity_bound", None)

    def logits(self, images: Tensor, batch_size: int = BATCH) -> Tensor:
        return self.answers(images, batch_size).logits

    def answers(self, images: Tensor, batch_size: int = BATCH) -> Answers:
        return answers_of_all({"": self}, images, batch_size)[""]

    def rehearsal(self) -> Tensor:
        """The same without filling the encoder with every member's weights, of which only the shapes are compared."""
        empty = {name: tensor.shape for name, tensor in self.encoder.state_dict().items()}
        blank = self.blank_image()
        features = both_features(self.encoder.cpu().eval(), prepare(blank, self.task.image))
        found = features.projected.shape[1]
        if found != self.task.dim:
            raise ValueError(f"the encoder gives {found} features, task.dim is {self.task.dim}")
        state = self.start(blank, 1)
        for index, member in enumerate(self.members):
            if member.embedded and {name: tensor.shape for name, tensor in member.weights().items()} != empty:
                raise ValueError(f"the weights of member {index} are not those of the encoder")
            state = added(self.rule, state, index, features_for(self.rule, features))
        return self.rule.finish(state)

    def state(self, reference_from: Path | None) -> dict[str, Any]:
        return {
            "rule": type(self.rule).__name__,
            "features": RAW,
            "fields": dict(vars(self.rule)),
            "members": [member.to_dict(reference_from) for member in self.members],
        }

    @classmethod
    def from_state(
        cls, task: Task, state: Mapping[str, Any], encoder: Callable[[], nn.Module], source: Path
    ) -> MemberModel:
        return cls(task, *cls.parts(state, source), encoder())

    @staticmethod
    def parts(state: Mapping[str, Any], source: Path) -> tuple[list[Member], Rule]:
        """Members and rule from a model file's state."""
        if state.get("features") != RAW:
            raise RunError(
                f"{source}: was fused by an earlier version, which brought every member's features to unit length "
                "before the sum; this one would answer differently, so fuse the uploads again"
            )
        if state["rule"] not in RULES:
            raise RunError(f"{source}: rule '{state['rule']}' is not known to this version; update OneFlare")
        return [Member.from_dict(member, source) for member in state["members"]], RULES[state["rule"]](
            **state["fields"]
        )


def logits_of_all(models: Mapping[str, GlobalModel], images: Tensor, batch_size: int = BATCH) -> dict[str, Tensor]:
    """Logits of several models; those over the same uploads share one pass of every encoder."""
    return {name: answers.logits for name, answers in answers_of_all(models, images, batch_size).items()}


@torch.no_grad()
def answers_of_all(models: Mapping[str, GlobalModel], images: Tensor, batch_size: int = BATCH) -> dict[str, Answers]:
    """Answers of several models; those over the same uploads share one pass of every encoder."""
    streaming = {name: model for name, model in models.items() if isinstance(model, MemberModel)}
    result = {name: model.answers(images, batch_size) for name, model in models.items() if name not in streaming}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, model in streaming.items():
        groups.setdefault(tuple(member.digest for member in model.members), []).append(name)
    for names in groups.values():
        group = [streaming[name] for name in names]
        first = group[0]
        images = first.inputs(images)
        states = [model.start(images, batch_size) for model in group]
        unanswered = [0] * len(first.members)
        for index, member in enumerate(first.members):
            first.encoder.load_state_dict(dict(member.weights()))
            first.encoder.to(first.device).eval()
            for start in range(0, len(images), batch_size):
                rows = slice(start, min(start + batch_size, len(images)))
                inputs = prepare(images[rows].to(first.device), first.task.image)
                features = both_features(first.encoder, inputs).cpu()
                silent = int((~(usable(features.own) & usable(features.projected))).sum())
                unanswered[index] += silent
                for model, state in zip(group, states, strict=True):
                    wanted = features_for(model.rule, features)
                    if silent:
                        state[rows] = added(model.rule, state[rows], index, wanted)
                    else:
                        model.rule.add(state, rows, index, wanted)
        for name, model, state in zip(names, group, states, strict=True):
            result[name] = finished(model.rule, state)
            model.unanswered = [before + now for before, now in zip(model.unanswered, unanswered, strict=True)]
    return result


def finished(rule: Rule, state: Tensor) -> Answers:
    """What a rule makes of its accumulator when every member was heard."""
    familiarity = rule.familiarity(state) if hasattr(rule, "familiarity") else None
    return Answers(rule.finish(state), familiarity)


def features_for(rule: Rule, features: Features) -> Tensor:
    """What a rule is given of a member's features: f, h, or where they differ f and then h in one row."""
    wanted = getattr(rule, "own_features", False)
    if wanted == BESIDE and features.own is not features.projected:
        return torch.cat([features.projected, features.own], dim=1)
    return features.own if wanted is True else features.projected


def usable(features: Tensor) -> Tensor:
    """`(n, d)` -> `(n,)`: whether a member's feature of an image is finite and of plausible size."""
    return features.abs().amax(1) <= LONGEST


def added(rule: Rule, state: Tensor, member: int, features: Tensor) -> Tensor:
    """The accumulator after a member's features, as it was for images that the member has no usable feature of."""
    good = usable(features)
    after = state.clone()
    rule.add(after, slice(None), member, torch.where(good[:, None], features, 0.0))
    return torch.where(good.view(-1, *[1] * (state.ndim - 1)), after, state)
