"""Adds seeds to studies until every claim has a verdict that stands among all of them, or all its seeds were run.

Every cell is run with the seeds of the first look (`Scale.looks`); then only the arms of claims that are still open
(`oneflare.study.claims.open_cells`) get the seeds of the next look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from oneflare.client.observer import Outcome
from oneflare.study.cells import Cell, StudyPlan, merged, unique_cells
from oneflare.study.claims import open_cells
from oneflare.study.execute import is_complete
from oneflare.study.findings import Findings


def run_until_clear(
    plans: Sequence[StudyPlan], runs: Path, work: Callable[[list[Cell], int], Sequence[Outcome]]
) -> list[Outcome]:
    """Run rounds of cells until no claim needs more; returns the cells that failed, which are not tried again.

    work: runs what is missing of some cells; it is told the number of the round, from 0 on.
    """
    cells, number = unique_cells(plans), 0
    failed: dict[str, Outcome] = {}
    while cells:
        failed |= {outcome.cell: outcome for outcome in work(cells, number) if outcome.status == "failed"}
        wanted = merged(open_cells([Findings(plan, runs) for plan in plans]))
        cells = [cell for cell in wanted if cell.name not in failed and not is_complete(cell, runs)]
        number += 1
    return list(failed.values())
