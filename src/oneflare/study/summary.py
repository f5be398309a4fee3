"""All claims of all studies in one list, with the verdicts that stand when so many are asked at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oneflare.study.declare import declared, find_declaration
from oneflare.study.markdown import MISSING, table
from oneflare.study.records import ClaimResult, StatementResult, StudyResult
from oneflare.study.verdicts import ERROR, MOST_SEEDS, Verdict, discoveries

SCALES = ("paper", "decisive", "small", "smoke")
"""the first that is there is shown"""
JUDGING = ("paper", "decisive", "small")
"""six epochs on digits decide no claim"""
WORDS: dict[Verdict, str] = {
    "confirmed": "confirmed",
    "refuted": "refuted",
    "no difference": "no difference of a point or more",
    "undecided": "undecided",
}


@dataclass(frozen=True)
class JudgedClaim:
    """A claim, the study that tests it, and what is left of its verdict among all of them."""

    study: StudyResult
    claim: ClaimResult
    stands: bool

    @property
    def name(self) -> str:
        return claim_name(self.study.study, self.claim.id)

    @property
    def verdict(self) -> Verdict:
        return self.claim.verdict if self.stands else "undecided"

    @property
    def words(self) -> str:
        if self.verdict != self.claim.verdict:
            return f"undecided among so many ({WORDS[self.claim.verdict]} alone)"
        if self.verdict != "undecided":
            return WORDS[self.verdict]
        wanted = self.claim.seeds_wanted
        return (
            f"undecided ({f'more than {MOST_SEEDS:,}' if wanted is None else f'about {wanted:,}'} seeds would decide)"
        )

    @property
    def page(self) -> str:
        """Relative to the folder of results."""
        return f"{self.study.study}/{self.study.scale}.md"


def claim_name(study: str, claim: str) -> str:
    """The claim's own name where it is known by it."""
    return claim if claim.startswith(("C", "ours")) else f"{study}: {claim}"


def best_results(results: Path, study: str, scales: Sequence[str] = SCALES) -> StudyResult | None:
    """At the largest scale that was run."""
    for scale in scales:
        path = results / study / f"{scale}.json"
        if path.exists():
            return StudyResult.read(path)
    return None


def judged_claims(results: Path, scales: Sequence[str] = JUDGING) -> list[JudgedClaim]:
    """Every claim that was put to the test at one of the scales, in the order of the studies."""
    asked = [(content, claim) for content, claim in _measured(results, scales) if not claim.exploratory]
    standing = discoveries([claim.p_value for _, claim in asked]) if asked else []
    return [JudgedClaim(content, claim, stands) for (content, claim), stands in zip(asked, standing, strict=True)]


def exploratory_claims(results: Path, scales: Sequence[str] = JUDGING) -> list[JudgedClaim]:
    """What was asked after figures had been seen, with its verdict alone: it counts among no others."""
    return [JudgedClaim(content, claim, True) for content, claim in _measured(results, scales) if claim.exploratory]


def _measured(results: Path, scales: Sequence[str]) -> list[tuple[StudyResult, ClaimResult]]:
    contents = [content for study in declared() if (content := best_results(results, study, scales)) is not None]
    return [(content, claim) for content in contents for claim in content.claims if content.measured(claim)]


def waiting_claims(claims: Sequence[JudgedClaim]) -> list[str]:
    """The declared claims that are not among these: some of the runs they need have not been made."""
    known = {claim.name for claim in claims}
    judging = [found for found in map(find_declaration, declared()) if any(found.grids(scale) for scale in JUDGING)]
    names = [claim_name(found.name, claim.id) for found in judging for claim in found.claims if not claim.exploratory]
    return [name for name in names if name not in known]


def tally(claims: Sequence[JudgedClaim]) -> str:
    """`12 confirmed, 5 refuted, 3 no difference of a point or more, 2 undecided`"""
    counts = [(sum(claim.verdict == verdict for claim in claims), words) for verdict, words in WORDS.items()]
    return ", ".join(f"{number} {words}" for number, words in counts if number)


def summary_page(claims: Sequence[JudgedClaim], exploratory: Sequence[JudgedClaim] = ()) -> str:
    """`results/claims.md`."""
    return "\n".join(
        [
            "# What the research log claims, and what we claim, put to the test",
            "",
            f"{len(claims)} claims: {tally(claims)}. Seeds are added until a verdict is clear; among so many claims a "
            f"verdict is kept only if it stands at a false discovery rate of {ERROR:.0%}, and where it does not, the "
            "table says so. The number of seeds beside an undecided claim is how many would decide it, alone, if its "
            "means and deviations stayed as they are; at most 20 are run. The rule ends every study's page.",
            "",
            *_listed(claims),
            "",
            *_apart(exploratory),
            *_waiting(waiting_claims(claims)),
        ]
    )


def _listed(claims: Sequence[JudgedClaim]) -> list[str]:
    rows = [
        [
            f"[{judged.name}]({judged.page})",
            judged.claim.text,
            judged.words,
            "<br>".join(figure_words(test) for test in judged.claim.tests),
            judged.claim.log or MISSING,
            judged.study.scale,
        ]
        for judged in claims
    ]
    columns = ["claim", "what it says", "verdict", "our figures", "the log's figures (one seed)", "our scale"]
    return table(columns, rows, words=6)


def _apart(claims: Sequence[JudgedClaim]) -> list[str]:
    if not claims:
        return []
    return [
        "## Asked after figures had been seen",
        "",
        "These questions came up while results were read, so their verdicts, each alone, only suggest. They are not "
        "counted above.",
        "",
        *_listed(claims),
        "",
    ]


def _waiting(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"Not measured yet, because some of their runs have not been made: {', '.join(names)}.", ""]


def figure_words(test: StatementResult) -> str:
    """`+1.2 points [-0.3, +2.8], 5 seeds`"""
    if test.mean is None:
        return "not run"
    sign = "+" if test.unit else ""
    text = f"{test.mean:{sign}.3g}{' ' + test.unit if test.unit else ''}"
    if test.interval is not None:
        text += f" [{test.interval[0]:{sign}.3g}, {test.interval[1]:{sign}.3g}]"
    return f"{text}, {len(test.values)} seed{'' if len(test.values) == 1 else 's'}"
