"""Writes an upload: what leaves a client, in which format, and under whose name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneflare.core.files import digest_of, tensor_digest, write_bytes
from oneflare.core.noise import Words, discrete_laplace, system_words
from oneflare.nn import PrototypeNetwork
from oneflare.upload.checking import parse_manifest, read_header
from oneflare.upload.contract import (
    COUNTS,
    ENCODER,
    EVIDENCE,
    HEADER_LIMIT,
    MANIFEST,
    PROTOTYPES,
    SCALE,
    SCHEMA,
    SIZE_LIMIT,
    STATISTICS,
    Contract,
    plan_of,
)

BATCHES = "num_batches_tracked"
EPSILON_STEPS = 1 << 40
LARGEST_EPSILON = float(1 << 20)
"""a larger budget leaves the counts as they are just the same"""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a client has to say beside its network: who it is, and what it measured."""

    client: int
    counts: Tensor
    """`(C,)` images of each class"""
    epoch: int
    statistics: Mapping[str, Tensor] | None = None
    """packed, see `oneflare.client.statistics`"""
    trust: float | None = None
    """how far the network may be trusted, by the images that the client kept back"""
    evidence: Mapping[str, Tensor] | None = None
    """see `oneflare.client.evidence`"""


@dataclass(frozen=True, kw_only=True)
class SentForm:
    """In which form the network and the class counts leave a client."""

    dtype: str = "float32"
    """number format of the weights: float32, bfloat16 or int8"""
    counts: str = "exact"
    """exact, noised or withheld"""
    epsilon: float = 1.0
    """privacy budget of noised counts"""
    words: Words = system_words
    """where the noise on counts comes from"""


EXACT = SentForm()


def write_upload(
    path: Path,
    network: PrototypeNetwork | None,
    contract: Contract,
    contents: Contents,
    form: SentForm = EXACT,
) -> None:
    """Write a client's message in the form that `form` says; network: None where clients only measure."""
    tensors: dict[str, Tensor] = {}
    if network is not None:
        for name, tensor in network.encoder.state_dict().items():
            tensors |= shrink(ENCODER + name, _without_volume(name, tensor.detach().cpu()), form.dtype)
        tensors[PROTOTYPES] = network.prototypes.detach().float().cpu().contiguous()
    tensors |= {STATISTICS + name: tensor.contiguous() for name, tensor in (contents.statistics or {}).items()}
    tensors |= {EVIDENCE + name: tensor.contiguous() for name, tensor in (contents.evidence or {}).items()}
    counts = contents.counts
    disclosed = disclose(counts, form.counts, form.epsilon, form.words)
    if disclosed is not None:
        tensors[COUNTS] = disclosed
    samples = int(counts.sum()) if disclosed is None else max(1, round(float(disclosed.sum())))
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "federation": contract.federation,
        "method": contract.method,
        "client": contents.client,
        "epoch": contents.epoch,
        "samples": samples,
        "counts": form.counts,
        "classes": list(contract.classes),
        "image": contract.image.to_dict(),
        "encoder": contract.encoder,
        "encoder_hash": contract.encoder_hash(),
        "anchors": contract.anchors,
        "dim": contract.dim,
        "statistics": plan_of(contract),
        "trust": contents.trust,
        "tensors": {name: tensor_digest(tensor) for name, tensor in sorted(tensors.items())},
    }
    if contract.evidence:
        manifest["evidence"] = list(contract.evidence)
    if contract.fixed is not None:
        manifest["fixed"] = contract.fixed.to_dict()
    manifest["digest"] = digest_of(manifest)
    from safetensors.torch import save

    write_bytes(path, save(tensors, metadata={MANIFEST: json.dumps(manifest, sort_keys=True)}))


def shrink(name: str, tensor: Tensor, dtype: str) -> dict[str, Tensor]:
    """A tensor as it is sent. Weights (two or more dimensions) shrink; biases and batch-norm statistics stay float32.

    int8: w = q s with one scale s = max|w|/127 per output channel.
    """
    if dtype == "float32" or not tensor.is_floating_point() or tensor.ndim < 2:
        return {name: tensor.contiguous()}
    if dtype == "bfloat16":
        return {name: tensor.to(torch.bfloat16).contiguous()}
    rows = tensor.flatten(1)
    scale = rows.abs().amax(1).clamp(min=1e-12) / 127
    quantised = (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    return {name: quantised.view_as(tensor).contiguous(), name + SCALE: scale}


def _without_volume(name: str, tensor: Tensor) -> Tensor:
    """Batch normalisation counts its batches, from which the number of images follows; no fusion needs that."""
    return torch.zeros_like(tensor) if name.rpartition(".")[2] == BATCHES else tensor


def disclose(counts: Tensor, mode: str, epsilon: float, words: Words) -> Tensor | None:
    """Class counts as the member agreed to reveal them.

    The noise is the discrete Laplace, P(x) ~ exp(-epsilon |x|) with epsilon rounded down to a multiple of 2^-40: the
    counts are epsilon-differentially private for one image more or less. They are then cut at zero.
    """
    if mode == "withheld":
        return None
    values = counts.cpu().long()
    if mode == "noised":
        step = math.floor(min(epsilon, LARGEST_EPSILON) * EPSILON_STEPS)
        noise = discrete_laplace(len(values), EPSILON_STEPS, step, words)
        values = (values + torch.from_numpy(noise)).clamp(min=0)
    return values


def seal_upload(
    source: Path,
    target: Path,
    *,
    member: str,
    created: str,
    sign: Callable[[str], dict[str, str]] | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Copy an upload under its member's name and the moment it was made, signed if `sign` signs its new digest.

    The digest covers both, and the `notes` for the coordinator; the tensors stay as they are, byte for byte. Returns
    the manifest.
    """
    header = read_header(source, SIZE_LIMIT, HEADER_LIMIT)
    old = parse_manifest(source, header)
    content = {key: value for key, value in old.items() if key not in ("digest", "signature")}
    manifest = content | {"member": member, "created": created} | ({"notes": list(notes)} if notes else {})
    manifest["digest"] = digest_of(manifest)
    if sign is not None:
        manifest["signature"] = sign(manifest["digest"])
    with source.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        body = file.read()
    header["__metadata__"] = {MANIFEST: json.dumps(manifest, sort_keys=True)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_bytes(target, len(text).to_bytes(8, "little") + text + body)
    return manifest
