"""The model that a single upload gives, without a federation around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from oneflare.core.plugins import load_plugins
from oneflare.core.privacy import Privacy
from oneflare.data import ImageSpec
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion.base import UploadSet, build_fusion
from oneflare.models.base import GlobalModel
from oneflare.models.checking import check_task
from oneflare.nn import initial_network
from oneflare.upload import ENCODER, Agreement, Contract, read_manifest, read_upload
from oneflare.upload.masking.fixed_point import FixedPoint
from oneflare.upload.statistics import COMPONENTS, DEFAULT_PARTS, G_B_N, MIXTURES, Plan, offers


def is_upload(path: Path) -> bool:
    """Whether a file says of itself that it is an upload; nothing else of it is checked."""
    try:
        read_manifest(path)
    except UploadError:
        return False
    return True


def model_of_upload(path: Path) -> GlobalModel:
    """The member's own network; where it trained none, the classifier that its statistics alone give."""
    load_plugins()
    manifest = read_manifest(path)
    try:
        contract, network = _own_terms(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UploadError(f"{path}: the terms in it are damaged or not known here ({reason})") from None
    if contract.masked and not contract.deep:
        raise UploadError(f"{path}: its sums are masked, so that it gives no model alone; use the federation's model")
    uploads = UploadSet((read_upload(path, contract),), contract, network)
    return build_fusion({"name": _fusion_for(contract)}).fuse(uploads).model


def _fusion_for(contract: Contract) -> str:
    if contract.deep or contract.statistics is None:
        return "average"
    offered = offers(contract.statistics.parts)
    return "analytic" if G_B_N in offered else "fedpft" if MIXTURES in offered else "fedncm"


def _own_terms(manifest: dict[str, Any]) -> tuple[Contract, Any]:
    """What the upload says it was made for, and the empty network; `read_upload` holds the file to it."""
    check_task(manifest)
    image, classes = ImageSpec.from_dict(manifest["image"]), tuple(manifest["classes"])
    network = initial_network(manifest["encoder"], image, len(classes), 0, manifest["dim"])
    plan = manifest.get("statistics")
    if plan is not None:
        privacy = None if plan.get("privacy") is None else Privacy(**plan["privacy"])
        parts, components = tuple(plan.get("parts", DEFAULT_PARTS)), plan.get("components", COMPONENTS)
        factors = bool(plan.get("factors", False))
        plan = Plan.of(plan["feature_map"], image.channels, image.size, plan["dtype"], privacy, parts, components)
        plan = replace(plan, factors=factors)
    contract = Contract.of(
        network,
        Agreement(
            federation=manifest["federation"],
            method=manifest["method"],
            encoder=manifest["encoder"],
            anchors=manifest["anchors"],
            image=image,
            classes=classes,
            statistics=plan,
            deep=any(name.startswith(ENCODER) for name in manifest["tensors"]),
            evidence=tuple(manifest.get("evidence") or ()),
            fixed=None if manifest.get("fixed") is None else FixedPoint.of(manifest["fixed"]),
        ),
    )
    masked = len(manifest["masked"]["shares"]) if manifest.get("masked") else 0
    return replace(contract, masked=masked), network
