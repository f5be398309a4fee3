"""What a run has found, as typed records: `result.json`, `metrics.json` of every fusion, and `diagnostics.json`.

Each file has one writer and one reader here. A reader refuses a file with a missing, unknown or wrong field in one
line. Files of release 0.1.0 are read: they lack the code that made their figures and the notes about their data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneflare._version import __version__
from oneflare.client.files import ClientSummary
from oneflare.core.config import CodeConfig
from oneflare.core.files import read_json, write_json
from oneflare.core.records import parse_record, read_record, record_to_dict
from oneflare.fusion import made_with, older_code, outdated
from oneflare.fusion.analytic.sums import BLOCK_WEIGHTS
from oneflare.metrics import Diagnostics, Retention, Scores
from oneflare.simulation.steady import Steady

REMEDY = "restore the file, or delete it and run the same command again, which makes it anew from the uploads"


@dataclass(frozen=True)
class Point:
    """The accuracy of a fusion after this many epochs of the clients' training."""

    epoch: int
    accuracy: float


@dataclass(frozen=True)
class FusionCode:
    """Which code the figures of a fusion come from."""

    arithmetic: int
    plugins: dict[str, str] = field(default_factory=dict)
    """digest of the source of every module of the user that the fusion uses"""
    revisions: dict[str, int] = field(default_factory=dict)
    """of this fusion and of its teacher, those above 0"""


@dataclass(frozen=True, kw_only=True)
class FusionResult(Scores):
    """One fusion of a run's uploads: how well its model classifies the test images, and what it costs."""

    parameters: int
    forward_passes: int
    """encoders that look at every image"""
    fuse_seconds: float
    history: tuple[Point, ...]
    """simulated fusions during training; the last point is the real one"""
    steady: Steady | None = None
    """the mean of the last checkpoints; None where `train.tail` asks for none"""
    options: dict[str, Any] | None = None
    """of the fusion; None in figures that do not name them"""
    code: FusionCode | None = None
    """None in figures of the first release"""
    training: dict[str, Any] | None = None
    """what a fusion notes about its work: its training, or the weights of blocks of features"""
    teacher: Retention | None = None
    """beside the model that it learned from"""
    suspects: tuple[str, ...] | None = None
    """members that the fusion does not trust, and why"""
    left_out: tuple[str, ...] | None = None
    """members whose uploads turned out to be of no use, and why"""
    fuse_cpu_seconds: float | None = None
    """measured in a process of its own, as the three below: None where nobody asked for it"""
    peak_memory_bytes: int | None = None
    needed_bytes: int | None = None
    """of the uploads, that this fusion reads"""
    measured: str | None = None
    """digest of the uploads and options that these costs belong to"""

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], place: str) -> FusionResult:
        """place: begins the line that refuses a wrong field"""
        return parse_record(cls, content, place, REMEDY)

    @classmethod
    def read(cls, path: Path) -> FusionResult:
        """path: a `metrics.json`"""
        return read_record(cls, path, REMEDY)

    def write(self, path: Path) -> None:
        write_json(path, self.to_dict())

    def __getitem__(self, name: str) -> Any:
        """A field by its name in `metrics.json`, the form in which scripts for release 0.1.0 read it."""
        return self.to_dict()[name]

    @property
    def block_weights(self) -> tuple[float, ...]:
        """how much each block of features counts, where there are several"""
        return tuple((self.training or {}).get(BLOCK_WEIGHTS, ()))

    def older_code(self, name: str) -> str | None:
        """How OneFlare computed these figures of the fusion `name` otherwise than it does today; None where it did not.

        Options and plugins of the user are not looked at.
        """
        return older_code(self._origin, {"name": name, **(self.options or {})})

    def outdated(self, spec: Mapping[str, Any]) -> str | None:
        """Why these figures are not those of the fusion `spec` as it is computed today; None where they are."""
        return outdated(self._origin, spec)

    def made_with(self, spec: Mapping[str, Any]) -> bool:
        """Whether these figures are those of the fusion `spec`, with its options and with today's code."""
        return made_with(self._origin, spec)

    @property
    def _origin(self) -> dict[str, Any]:
        return {"options": self.options, "code": None if self.code is None else record_to_dict(self.code)}

    def to_dict(self) -> dict[str, Any]:
        return record_to_dict(self)


@dataclass(frozen=True)
class DiagnosticsCode:
    """Which code the diagnostics come from."""

    arithmetic: int


@dataclass(frozen=True, kw_only=True)
class DiagnosticsResult(Diagnostics):
    """The geometry of a run's uploads with the code that measured it; None in files of the first release."""

    code: DiagnosticsCode | None = None

    @classmethod
    def read(cls, path: Path) -> DiagnosticsResult:
        """path: a `diagnostics.json`"""
        return read_record(cls, path, REMEDY)

    def write(self, path: Path) -> None:
        write_json(path, self.to_dict())

    @property
    def arithmetic(self) -> int:
        """version of OneFlare's fusion arithmetic that gave these figures"""
        return 1 if self.code is None else self.code.arithmetic

    def figure(self, name: str) -> float | None:
        """A measure by its name, as studies declare it."""
        value: float | None = getattr(self, name)
        return value

    def to_dict(self) -> dict[str, Any]:
        return record_to_dict(self)


@dataclass(frozen=True)
class DataResult:
    """The data of a run."""

    name: str
    train: int
    """images"""
    test: int
    public: int
    """images that nobody owns"""
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """what was done to the data as they were read"""


@dataclass(frozen=True)
class PartitionResult:
    """Who owned what."""

    kind: str
    sizes: tuple[int, ...]
    """images of each client"""
    table: tuple[tuple[int, ...], ...]
    """`(clients, classes)` images"""
    empty: tuple[int, ...]
    """clients without an image"""
    assignments: int
    """images that were given to clients"""
    alpha: float | None
    """None where the kind has no such number"""
    clients: int
    digest: str

    @property
    def skew(self) -> str:
        """`dirichlet(0.05)`"""
        return self.kind if self.alpha is None else f"{self.kind}({self.alpha:g})"


@dataclass(frozen=True)
class CostResult:
    """What a run took, over all clients."""

    train_seconds: float
    upload_bytes: int
    peak_memory_bytes: int
    """largest resident size of any process of the run"""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run, as its `result.json` says it."""

    oneflare: str
    """version of the package"""
    code: CodeConfig | None = None
    """which code made the uploads; None in files of the first release"""
    method: str
    seed: int
    data: DataResult
    partition: PartitionResult
    encoder: dict[str, Any]
    """name and options"""
    anchors: dict[str, Any]
    """name, options, and `worst_cosine`"""
    epochs: int
    device: str
    precision: str
    headline: str
    """the method's own fusion"""
    fusions: dict[str, FusionResult]
    diagnostics: DiagnosticsResult | None
    """None where no network was trained"""
    clients: tuple[ClientSummary, ...]
    fused_clients: tuple[int, ...]
    cost: CostResult

    @classmethod
    def read(cls, path: Path) -> RunResult:
        """path: a `result.json`"""
        content = read_json(path)
        version = content.get("oneflare", __version__) if isinstance(content, dict) else __version__
        return parse_record(cls, content, str(path), REMEDY if version == __version__ else _other(version))

    def write(self, path: Path) -> None:
        write_json(path, self.to_dict())

    @property
    def accuracy(self) -> float:
        """of the method's own fusion"""
        return self.fusions[self.headline].accuracy

    @property
    def arithmetic(self) -> int:
        """version of OneFlare's training arithmetic that made the uploads"""
        return CodeConfig.recorded(self.code).arithmetic

    @property
    def worst_cosine(self) -> float | None:
        """Of the two closest anchors; None without anchors."""
        value: float | None = self.anchors["worst_cosine"]
        return value

    @property
    def trained(self) -> tuple[ClientSummary, ...]:
        """the clients that trained to the end"""
        return tuple(client for client in self.clients if client.status == "trained")

    @property
    def left_out(self) -> tuple[ClientSummary, ...]:
        """the clients that are in no fusion"""
        return tuple(client for client in self.clients if client.client not in self.fused_clients)

    def to_dict(self) -> dict[str, Any]:
        return record_to_dict(self)


def _other(version: Any) -> str:
    """The remedy for a file that another version of the package wrote."""
    return (
        f"OneFlare {version!s:.40} wrote it and this is {__version__}, so read it with that version, or run the "
        "experiment again in another folder"
    )
