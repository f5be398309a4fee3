"""Decides which figures of a member are too small to be told, so that they cannot be calculated from the others either.

The rule, for a limit of k (the smallest group):

- Of a class with 1 to k - 1 test images nothing is told, not even how many there are. The total is known, so further
  classes are withheld, the smallest first, until the withheld classes hold k images together.
- For every other class its number of images and its rates (how many were answered right) are told: they are about k
  images or more. Where the wrong answers went is told in cells of the confusion matrix; a cell with 1 to k - 1 images
  is withheld, and with it at least one other cell of its row.
- Specificities tell the sums of columns. Where a cell could be calculated from the sums of rows and columns, further
  cells are withheld until none can.

Rates are thus told or withheld by the size of a class, never by how many of its answers were wrong, so that pooling
what several members tell has no bias.

Where patients are known, groups are counted in patients. With two classes a row has one wrong answer only, whose number
follows from the sensitivity; it is told if the class is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Withheld:
    """What is not told."""

    classes: tuple[bool, ...]
    cells: Array
    """`(C, C)` truth values: cells of the confusion matrix"""


def withhold(sizes: Array, counts: Array, limit: int) -> Withheld:
    """What must not be told. counts: the confusion matrix in images; sizes: the same in patients, or equal to counts.

    In both, rows are true classes and columns are answers. sizes has one more column: the whole class.
    """
    classes = _small_classes(sizes[:, -1], counts.sum(1), limit)
    cells = _small_cells(sizes[:, :-1], counts, classes, limit)
    while True:
        revealed = _revealed(cells, classes)
        if revealed is None:
            return Withheld(tuple(map(bool, classes)), cells)
        _cover(cells, counts, *revealed)


def _small_classes(sizes: Array, supports: Array, limit: int) -> Array:
    """`(C,)` which classes are withheld."""
    hidden: Array = (sizes > 0) & (sizes < limit)
    for label in np.argsort(supports, kind="stable"):
        if not hidden.any() or sizes[hidden].sum() >= limit:
            break
        hidden[label] |= supports[label] > 0
    return hidden


def _small_cells(sizes: Array, counts: Array, classes: Array, limit: int) -> Array:
    """`(C, C)` all cells of withheld classes, and in every other row small cells and one more beside a single one."""
    number = len(counts)
    hidden: Array = (sizes > 0) & (sizes < limit) & ~np.eye(number, dtype=bool)
    for row in range(number):
        others = [column for column in range(number) if column != row]
        if number == 2:
            hidden[row] = False
        elif hidden[row].sum() == 1:
            left = [column for column in others if not hidden[row, column]]
            hidden[row, min(left, key=lambda column: (counts[row, column] == 0, counts[row, column]))] = True
    hidden[classes] = True
    return hidden


def _revealed(cells: Array, classes: Array) -> tuple[int, int] | None:
    """A withheld cell, as row and column, whose number follows from known sums; None if there is no such cell.

    Withheld cells are the edges of a graph between rows and columns. A number follows from the sums exactly where its
    edge is a bridge, after all columns without a known sum have become one node: those of withheld classes. The rows of
    withheld classes are one node too, with at least two cells in every column, so theirs are never bridges.
    """
    number = len(cells)
    outside, hidden = 2 * number, 2 * number + 1
    nodes = [outside if classes[column] else number + column for column in range(number)]
    edges = [(row, nodes[column]) for row, column in np.argwhere(cells & ~classes[:, None]).tolist()]
    edges += [(hidden, node) for node in nodes if classes.any() for _ in range(2)]
    bridges = _bridges(2 * number + 2, edges)
    return (bridges[0][0], bridges[0][1] - number) if bridges else None


def _cover(cells: Array, counts: Array, row: int, column: int) -> None:
    """Withhold two cells of another row, so that a cell lies on a cycle with its neighbour; with three classes, all."""
    number = len(cells)
    if number == 3:
        cells |= ~np.eye(3, dtype=bool)
        return
    neighbours = [other for other in np.flatnonzero(cells[row]).tolist() if other not in (row, column)]

    def cost(choice: tuple[int, int]) -> tuple[int, int]:
        other, partner = choice
        new = [place for place in (column, partner) if not cells[other, place]]
        return sum(bool(counts[other, place]) for place in new), len(new)

    choices = [
        (other, partner) for partner in neighbours for other in range(number) if other not in (row, column, partner)
    ]
    other, partner = min((choice for choice in choices if cost(choice)[1]), key=cost)
    cells[other, [column, partner]] = True


def _bridges(nodes: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The edges of a graph that lie on no cycle (Tarjan 1974); edges may be parallel."""
    neighbours: list[list[tuple[int, int]]] = [[] for _ in range(nodes)]
    for index, (a, b) in enumerate(edges):
        neighbours[a].append((b, index))
        neighbours[b].append((a, index))
    order, lowest = [-1] * nodes, [0] * nodes
    found, clock = [], 0
    for root in range(nodes):
        if order[root] >= 0:
            continue
        order[root] = lowest[root] = clock
        clock += 1
        stack = [(root, -1, iter(neighbours[root]))]
        while stack:
            node, through, left = stack[-1]
            step = next(left, None)
            if step is None:
                stack.pop()
                if stack:
                    parent = stack[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[node])
                    if lowest[node] > order[parent]:
                        found.append(edges[through])
                continue
            target, index = step
            if index == through:
                continue
            if order[target] >= 0:
                lowest[node] = min(lowest[node], order[target])
                continue
            order[target] = lowest[target] = clock
            clock += 1
            stack.append((target, index, iter(neighbours[target])))
    return found
