"""The roster of masked sums: who takes part, with which mask key, and with at most how many images.

A member enrols itself (`Enrolment`); the coordinator signs all enrolments together (`Roster`). Every mask depends on
the roster's digest.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pydantic import Field, field_validator

from oneflare.core.config import Section
from oneflare.core.files import digest_of
from oneflare.errors import ConfigError, UploadError, did_you_mean
from oneflare.upload.masking.keys import check_mask_key
from oneflare.upload.signing import SigningKey, check_name, check_public_key, verify

ENROLMENT = b"oneflare enrolment "
ROSTER = b"oneflare roster "
MOST_MEMBERS = 255
MOST_IMAGES = 10**9


class Enrolment(Section):
    """A member's part of the roster, as the member itself wrote it."""

    federation: str = Field(pattern=r"^[0-9a-f]{64}$", description="fingerprint of the terms")
    member: str
    mask: str = Field(description="public X25519 key")
    images: int = Field(ge=1, le=MOST_IMAGES, description="the member's sums are over at most so many images")
    created: str = Field(max_length=40)
    key: str | None = Field(None, description="public Ed25519 key that signed the enrolment")
    signature: str | None = Field(None, max_length=200)

    @field_validator("member", "mask", "key")
    @classmethod
    def _usable(cls, value: str | None, info: Any) -> str | None:
        check = {"member": check_name, "mask": check_mask_key, "key": check_public_key}[info.field_name]
        try:
            return None if value is None else check(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @property
    def digest(self) -> str:
        return digest_of(self.model_dump(mode="json", exclude={"signature"}))

    def signed(self, key: SigningKey) -> Enrolment:
        named = self.model_copy(update={"key": key.public})
        return named.model_copy(update={"signature": key.sign(named.digest, ENROLMENT)})

    def check_signature(self, wanted: str | None) -> None:
        """wanted: the key that the charter has for this member; without one, an enrolment need not be signed."""
        if self.key is None and wanted is not None:
            raise UploadError(f"is not signed, but {self.member} has a key; join with --key")
        if wanted is not None and self.key != wanted:
            raise UploadError(f"is signed with another key than the one admitted for {self.member}")
        if self.key is not None and not verify(self.key, self.signature or "", self.digest, ENROLMENT):
            raise UploadError(f"the signature is not {self.member}'s; it was forged or the enrolment altered")


class Roster(Section):
    """The members whose sums are added up, ordered by name."""

    federation: str = Field(pattern=r"^[0-9a-f]{64}$")
    number: int = Field(ge=1, description="1 for the first roster of a federation, then 2, ...")
    threshold: int = Field(ge=2, description="so many members open the total; fewer cannot")
    members: tuple[Enrolment, ...] = Field(min_length=2, max_length=MOST_MEMBERS)
    signature: str = Field("", max_length=200, description="of the coordinator")

    @field_validator("members")
    @classmethod
    def _ordered(cls, value: tuple[Enrolment, ...]) -> tuple[Enrolment, ...]:
        names, keys = [row.member for row in value], [row.mask for row in value]
        if names != sorted(set(names)) or len(set(keys)) != len(keys):
            raise ValueError("members must be in the order of their names, each once and with a mask key of its own")
        return value

    @cached_property
    def digest(self) -> str:
        return digest_of(self.model_dump(mode="json", exclude={"signature"}))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(row.member for row in self.members)

    @property
    def images(self) -> int:
        """All members together have at most so many."""
        return sum(row.images for row in self.members)

    def position(self, name: str) -> int:
        """1, 2, ...: the place at which a member's shares are taken."""
        if name not in self.names:
            raise UploadError(f"{name} is not in roster {self.number}{did_you_mean(name, self.names)}")
        return self.names.index(name) + 1

    def entry(self, name: str) -> Enrolment:
        return self.members[self.position(name) - 1]

    def signed(self, key: SigningKey) -> Roster:
        return self.model_copy(update={"signature": key.sign(self.digest, ROSTER)})

    def is_signed_by(self, public: str) -> bool:
        return verify(public, self.signature, self.digest, ROSTER)
