"""The charter `federation.yaml`: the file with the terms, which the coordinator sends to every member.

It holds all that members must share (classes, images, method, budget, what is uploaded) and what only the coordinator
acts on (who is admitted, until when, which fusions). The first part makes the fingerprint: uploads carry it, so one
that was made for another federation, or under other terms, is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from oneflare.client.job import ClientJob
from oneflare.client.start import make_contract, shared_start
from oneflare.core.config import LARGEST_SIDE, Experiment, Pixels, Section
from oneflare.core.files import digest_of, write_text
from oneflare.core.layers import read_yaml
from oneflare.core.registry import one_line
from oneflare.core.seeds import derive
from oneflare.data import ImageSpec
from oneflare.errors import ConfigError, did_you_mean
from oneflare.federation.comments import commented
from oneflare.federation.scores import SMALLEST_GROUP
from oneflare.fusion import FUSIONS
from oneflare.methods.resolve import ARRAYS, resolve
from oneflare.nn import PrototypeNetwork
from oneflare.nn.backbones import input_spec
from oneflare.nn.given import CUSTOM
from oneflare.upload import Contract
from oneflare.upload.encryption import check_box_key
from oneflare.upload.masking.roster import Roster
from oneflare.upload.signing import check_name, check_public_key
from oneflare.upload.succession import Succession, current

FILE = "federation.yaml"
DEFAULT_SIZE = 32
OWN = ("data", "partition", "engine", "workers")
"""parts of an experiment that a charter does not decide: everybody has their own"""


def _class_name(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("class names are text; put them in quotes")
    text = str(value)
    if not text.strip() or text != text.strip() or not text.isprintable() or "/" in text or text.startswith("."):
        raise ValueError(f"class name {text!r} must be printable, without '/', not start with '.' or end in a space")
    return text


def _class_names(value: Any) -> Any:
    return tuple(_class_name(item) for item in value) if isinstance(value, list | tuple) else value


def _utc(value: Any) -> Any:
    """YAML dates and ISO text as a moment; without a zone it is UTC, a day means its end."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value + "T23:59:59" if re.fullmatch(r"\d{4}-\d\d-\d\d", value) else value)
        except ValueError:
            raise ValueError("give a date such as 2027-01-31 or 2027-01-31T18:00:00+01:00") from None
    elif value is not None and not isinstance(value, datetime):
        return _utc(str(value))
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


class ImageTerms(Section):
    """What every image is brought to before training."""

    size: int | None = Field(
        None, ge=8, le=LARGEST_SIDE, description="side in pixels; default: the backbone's own, or 32 without a backbone"
    )
    channels: Literal[1, 3] = 3
    mirror: bool = Field(False, description="whether a mirrored image keeps its class")
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pixels: Pixels | None = Field(None, description="what the numbers in image files mean; default: 8 bits")

    def spec(self) -> ImageSpec:
        """What images are brought to in a federation without a backbone."""
        default = ImageSpec.default(self.channels, self.size or DEFAULT_SIZE, self.pixels)
        mean, std = self.mean or default.mean, self.std or default.std
        if len(mean) != self.channels or len(std) != self.channels or not all(value > 0 for value in std):
            raise ConfigError(f"image: mean and std need {self.channels} values each, std above 0")
        return replace(default, mean=mean, std=std)


class ScoreTerms(Section):
    """What members tell of their tests."""

    smallest_group: int = Field(
        SMALLEST_GROUP,
        ge=1,
        le=1000,
        description="figures of fewer test images than this (patients, where they are known) are never told",
    )


class Revocation(Section):
    """A member's key that no longer counts."""

    member: str
    since: str = Field(description="when it was revoked, UTC")
    keep: tuple[str, ...] = Field((), description="digests of uploads under this key that stay valid")


class KeyChange(Section):
    """The coordinator's key was replaced; the fields are those of `upload.succession.Succession`."""

    who: Literal["coordinator"]
    old: str
    new: str
    at: str
    by_old: str
    by_new: str

    def statement(self) -> Succession:
        return Succession(**self.model_dump())


class Charter(Section):
    """The terms of one federation."""

    version: Literal[1] = 1
    name: str
    id: str = Field(pattern=r"^[0-9a-f]{32}$", description="random: two federations with the same terms stay apart")
    classes: Annotated[tuple[str, ...], BeforeValidator(_class_names)] = Field(min_length=2, max_length=10_000)
    image: ImageTerms = ImageTerms()
    deadline: Annotated[datetime | None, BeforeValidator(_utc)] = None
    use: str = Field("", description="what the model is for; goes to its card")
    limits: str = Field("", description="what it is not for; goes to its card")
    members: dict[str, str | None] = Field(default_factory=dict, description="name -> public key; empty: anybody")
    revoked: dict[str, Revocation] | None = Field(None, description="members' keys that no longer count")
    coordinator: str | None = Field(None, description="public key that signs the model, its card and the result")
    succession: tuple[KeyChange, ...] | None = Field(None, description="keys that replaced it, each signed by the last")
    encryption: str | None = Field(None, description="public key to which uploads are encrypted")
    scores: ScoreTerms | None = Field(None, description="what members tell of their tests")
    roster: Roster | None = Field(None, description="mask keys of the members, where sums are masked")
    experiment: dict[str, Any] = Field(default_factory=dict)

    @field_validator("coordinator")
    @classmethod
    def _key(cls, value: str | None) -> str | None:
        return None if value is None else _as_value_error(check_public_key, value)

    @field_validator("encryption")
    @classmethod
    def _box(cls, value: str | None) -> str | None:
        return None if value is None else _as_value_error(check_box_key, value)

    @model_validator(mode="after")
    def _followed(self) -> Charter:
        if self.succession:
            _as_value_error(lambda _: self.signing_key, "succession")
        return self

    @field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        return _as_value_error(check_name, value)

    @field_validator("classes")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"'{max(value, key=value.count)}' is listed twice")
        return value

    @field_validator("members")
    @classmethod
    def _members(cls, value: dict[str, str | None]) -> dict[str, str | None]:
        for name, key in value.items():
            _as_value_error(check_name, name)
            if key is not None:
                _as_value_error(check_public_key, key)
        keys = [key for key in value.values() if key is not None]
        if len(set(keys)) != len(keys):
            raise ValueError("two members have the same key; each needs its own")
        return value

    @cached_property
    def terms(self) -> Experiment:
        """What members train, every option written out."""
        for key in OWN:
            if key in self.experiment:
                raise ConfigError(f"experiment.{key}: a charter does not decide it; remove the line")
        given = {"data": {"name": ARRAYS, "digest": self.id}, "partition": {"kind": "given", "clients": 1}}
        terms = resolve(self.experiment, given, {"train": {"snapshots": 0, "tail": None}})
        if terms.backbone is not None and terms.backbone["name"] == CUSTOM:
            raise ConfigError("experiment.backbone: members need a backbone by name; see `oneflare methods --parts`")
        if terms.encoder["name"] == CUSTOM:
            raise ConfigError("experiment.encoder: members need an encoder by name; see `oneflare run --help`")
        if terms.objective.public_bank:
            raise ConfigError(
                f"experiment.objective.bank: method {terms.method} trains with public images, and a charter cannot "
                "carry any; choose another method, or run it as a simulation"
            )
        if terms.upload.statistics_noise_seed is not None:
            raise ConfigError("experiment.upload.statistics_noise_seed: noise that others can redraw hides nothing")
        return terms

    @cached_property
    def inputs(self) -> ImageSpec:
        """What every network of this federation is fed: pixels, or the features of its backbone."""
        backbone = self.terms.backbone
        if backbone is None:
            return self.image.spec()
        if self.image.mean is not None or self.image.std is not None:
            raise ConfigError("image: mean and std are the backbone's; remove them")
        return input_spec(backbone, self.image.pixels, self.image.size)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all that members share; members and deadline may change without a new one."""
        image = self.inputs.to_dict() | {"mirror": self.image.mirror}
        shared = [self.version, self.name, self.id, self.classes, image, self.terms.settings_digest()]
        keys = [key for key in (self.coordinator, self.encryption) if key is not None]
        scores = [] if self.scores is None else [self.scores.model_dump()]
        return digest_of([*shared, *scores, *keys])

    @property
    def smallest_group(self) -> int:
        """Figures of fewer test images or patients are never told."""
        return (self.scores or ScoreTerms()).smallest_group

    @property
    def signing_keys(self) -> tuple[str, ...]:
        """The coordinator's public keys in the order in which they counted; the last one counts now."""
        first = () if self.coordinator is None else (self.coordinator,)
        return (*first, *(change.new for change in self.succession or ()))

    @property
    def signing_key(self) -> str | None:
        """The coordinator's public key that counts now: the fingerprint's, or what it was replaced by, step by step."""
        if self.coordinator is None:
            if self.succession:
                raise ConfigError("succession: there is no coordinator's key that could have been replaced")
            return None
        return current(self.coordinator, [change.statement() for change in self.succession or ()])

    @cached_property
    def contract(self) -> Contract:
        """What every upload of this federation must look like; where sums are masked, before they are."""
        return make_contract(
            self.terms, self.inputs, self.classes, mirror=self.image.mirror, federation=self.fingerprint
        )

    @property
    def masked_contract(self) -> Contract:
        """What an upload must look like when it arrives."""
        masked = self.terms.upload.masked is not None
        return (
            replace(self.contract, masked=len(self.roster.members) if self.roster else 1) if masked else self.contract
        )

    def template(self) -> PrototypeNetwork:
        """The start that all members share, which the server fills."""
        return shared_start(self.terms, self.contract)

    def client(self, member: str) -> int:
        """A member's number: the name of its random streams, the same wherever and whenever it trains."""
        return derive(0, "member", self.id, member) >> 11

    def job(self, member: str, folder: Path) -> ClientJob:
        """What `client.train_client` needs."""
        return ClientJob(self.terms, self.contract, self.client(member), folder, self.image.mirror)

    def member_of(self, public: str) -> str | None:
        """Whose key this is."""
        return next((name for name, key in self.members.items() if key == public), None)

    def check_member(self, name: str) -> str:
        check_name(name)
        if self.members and name not in self.members:
            raise ConfigError(f"'{name}' is not a member of {self.name}{did_you_mean(name, self.members)}")
        return name

    def to_yaml(self) -> str:
        content = self.model_dump(mode="json", exclude_none=True)
        if self.members:
            content["members"] = dict(self.members)
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
        return HEADER.format(fingerprint=short(self.fingerprint)) + commented(text)

    def write(self, path: Path) -> None:
        write_text(path, self.to_yaml())


HEADER = """\
# A OneFlare federation, fingerprint {fingerprint}. Send this file to every member, unchanged.
# Members and the coordinator compare the fingerprint by telephone or in person before they train.
# Members, deadline, use, limits, roster and experiment.fusions may change later; all else makes another federation.
"""
STATED = re.compile(rb"(?:\xef\xbb\xbf)?# A OneFlare federation, fingerprint ([0-9a-f-]{23})\.")


def _as_value_error(check: Any, value: str) -> str:
    try:
        return str(check(value))
    except ConfigError as error:
        raise ValueError(str(error)) from None


def short(fingerprint: str) -> str:
    """The first 80 bits in groups, to be read aloud."""
    return "-".join(fingerprint[start : start + 5] for start in range(0, 20, 5))


def new_charter(name: str, settings: Mapping[str, Any], **fields: Any) -> Charter:
    """A charter with every option of its experiment written out, so that later versions mean the same."""
    own = {"name": name, "id": secrets.token_hex(16), "experiment": dict(settings), "scores": ScoreTerms().model_dump()}
    draft = _validate(own | fields)
    complete = draft.terms.model_dump(mode="json", exclude=set(OWN), exclude_none=True)
    if draft.terms.backbone is not None:  # everybody has its file elsewhere
        complete["backbone"].pop("weights", None)
    image = draft.image.model_copy(
        update={"size": draft.inputs.decoded.size, "channels": draft.inputs.decoded.channels}
    )
    if "fusions" not in settings:
        complete["fusions"] = [_for_strangers(complete["fusions"][0])]
    charter = _validate(draft.model_dump() | {"experiment": complete, "image": image.model_dump()})
    charter.contract  # noqa: B018  (refuses parts that do not fit the images)
    return charter


CLASS_SHARE = 0.34
"""the largest part of a class that one member has under `density_ratio`, where three or more have many images of it"""
SPREAD_CAP = 2.0
"""how many times as far as the median member's a member's densities may spread"""


def _for_strangers(fusion: Mapping[str, Any]) -> dict[str, Any]:
    """The method's own fusion, or the one that is its equal among honest members and withstands others."""
    if fusion["name"] == "density_ratio":
        given = {name: value for name, value in fusion.items() if value is not None}
        return FUSIONS.complete({"class_share": CLASS_SHARE, "spread_cap": SPREAD_CAP, **given})
    return FUSIONS.complete({"name": "robust_prototypes"} if fusion["name"] == "count_prototypes" else dict(fusion))


def revised(charter: Charter, **fields: Any) -> Charter:
    """The charter with some fields replaced, checked again."""
    return _validate(charter.model_dump() | fields)


def read_charter(path: Path) -> Charter:
    """The charter of a file, or of a folder that has one."""
    if path.is_dir():
        path = path / FILE
        if not path.exists():
            raise ConfigError(f"no {FILE} in {path.parent}; `oneflare server init {path.parent}` makes one")
    content = read_yaml(path, f"a federation's {FILE}")
    try:
        charter = _validate(content)
        charter.contract  # noqa: B018  (refuses parts that do not fit the images)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    _check_whole(path, charter)
    return charter


def _check_whole(path: Path, charter: Charter) -> None:
    """Refuse a file whose terms are not those that its first line was written for.

    A file that was cut off may still be valid, with the defaults in place of what is lost, such as noise on sums.
    Whoever changes terms on purpose changes that line too; against them, people compare the fingerprint.
    """
    with path.open("rb") as file:
        stated = STATED.match(file.read(200))
    found = short(charter.fingerprint)
    if stated is not None and stated[1].decode() != found:
        raise ConfigError(
            f"{path}: was cut off or changed: its first line says fingerprint {stated[1].decode()}, its terms give "
            f"{found}; ask the coordinator for the file again (other terms are another federation: `oneflare server "
            "init` makes one)"
        )


def _validate(content: Mapping[str, Any]) -> Charter:
    for key in content:
        if key not in Charter.model_fields:
            raise ConfigError(f"unknown key '{key}'{did_you_mean(str(key), Charter.model_fields)}")
    try:
        return Charter.model_validate(dict(content))
    except ValidationError as error:
        raise ConfigError(one_line(error, Charter)) from None
