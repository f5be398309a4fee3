"""What the numbers in image files mean, as a part of the settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def _colour(value: Any) -> Any:
    return {"white": (255, 255, 255), "black": (0, 0, 0)}.get(value, value) if isinstance(value, str) else value


Byte = Annotated[int, Field(ge=0, le=255)]


class Pixels(Section):
    """What the numbers in an image file mean. Images of 8 bits are 0 to 255; any others need a stated scale."""

    bits: int | None = Field(
        None, ge=1, le=16, description="images of more than 8 bits hold 0 (black) to 2^bits - 1 (white)"
    )
    low: float | None = Field(None, description="value that is black in images of more than 8 bits or of floats")
    high: float | None = Field(None, description="value that is white; what lies outside low to high is clipped")
    background: Annotated[tuple[Byte, Byte, Byte], BeforeValidator(_colour)] = Field(
        (255, 255, 255), description="what transparent places show: white, black or [red, green, blue]"
    )
    page: Annotated[int, Field(ge=1, le=1000)] | Literal["middle"] | None = Field(
        None,
        description="page, frame or slice of a file with several, from 1, or middle; default: such files are refused",
    )

    @model_validator(mode="after")
    def _one_scale(self) -> Pixels:
        if (self.low is None) != (self.high is None):
            raise ValueError("low and high belong together; give both")
        if self.bits is not None and self.low is not None:
            raise ValueError("give bits, or low and high, not both")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError("low must be smaller than high")
        return self

    def page_of(self, pages: int) -> int | None:
        """Which of so many pages is read, from 1; None: only a single one."""
        return (pages + 1) // 2 if self.page == "middle" else self.page

    @property
    def covers_deep(self) -> bool:
        """Whether there is a scale for images of more than 8 bits."""
        return self.bits is not None or self.low is not None

    @property
    def window(self) -> tuple[float, float]:
        """The values that are black and white."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        return 0.0, float(2 ** (self.bits or 8) - 1)

    @property
    def words(self) -> str:
        low, high = self.window
        return f"pixels.bits={self.bits}" if self.bits is not None else f"the window {low:g} to {high:g}"
