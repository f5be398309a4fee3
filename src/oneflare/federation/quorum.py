"""Which uploads may be fused, and how many members must have sent one before anything is.

A fusion with fewer members than before is made only where the coordinator asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oneflare.errors import RunError
from oneflare.federation.admission import Admission
from oneflare.federation.charter import Charter
from oneflare.federation.intake import Intake
from oneflare.federation.result import FederationResult


@dataclass(frozen=True)
class Rules:
    """Which uploads may be fused.

    late: also those made after the deadline. keep: a member that sent nothing usable now stays in with its upload of
    the last fusion. min_members: fewer members and nothing is fused; None: as many as the last fusion had, without
    those who were removed; where there was none yet, all who are admitted. everybody: None means all who are admitted
    after the first fusion too. admission: how members are checked, by each other and by what they do to answers.
    releases: folder with the members' answers, where sums are masked.
    """

    late: bool = False
    keep: bool = False
    min_members: int | None = None
    everybody: bool = False
    admission: Admission = field(default_factory=Admission)
    releases: Path | None = None

    def least(self, charter: Charter, last: FederationResult | None, removed: Mapping[str, str]) -> int:
        """How many members a fusion needs; who was removed does not count."""
        if self.min_members is not None:
            return self.min_members
        if charter.terms.upload.masked is not None and charter.roster is not None:
            return charter.roster.threshold
        names: Iterable[str] = charter.members if last is None or self.everybody else last.names
        return max(1, sum(name not in removed for name in names))


def check_enough(
    intake: Intake, rules: Rules, charter: Charter, last: FederationResult | None, removed: Mapping[str, str]
) -> None:
    """Refuse to fuse fewer members than are needed, and say who is not in and why."""
    present, least = intake.uploads, rules.least(charter, last, removed)
    if len(present) >= max(1, least):
        return
    before: Sequence[str] = () if last is None else last.names
    reasons = intake.reasons(name for name in dict.fromkeys([*before, *charter.members]) if name not in removed)
    if not present:
        raise RunError(f"no usable upload, nothing was changed ({'; '.join(reasons)})")
    why = "as many as in the last fusion" if last is not None else "as many as are admitted"
    why = "--min-members" if rules.min_members is not None else f"{why}, unless --min-members says otherwise"
    remedies = [f"--min-members {len(present)} fuses without the others"]
    if any(name not in present and name not in removed for name in before):
        remedies.append("--keep fuses the others' uploads of the last fusion again")
    raise RunError(
        f"{len(present)} usable upload{'s' if len(present) > 1 else ''} ({', '.join(present)}), but {least} are needed "
        f"({why}); nothing was changed. {'; '.join(reasons)}. "
        f"{'; '.join(remedies)}"
    )
