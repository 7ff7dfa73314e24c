"""Matching: the best one-to-one assignment, and among equally good ones always the same one."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment


def best_matching(value: np.ndarray) -> list[int]:
    """The column of each row, one-to-one, with the largest total; first in order among equals.

    `value` is int64 of shape [rows, columns] with rows <= columns. Entries must be below 2**53, which scipy's
    solver holds exactly. "First in order" means that row 0 has the lowest column that any best assignment gives
    it, then row 1, and so on.

    scipy finds one best assignment. From it come potentials, under which an assignment is a best one exactly where
    each of its pairs is tight (complementary slackness); among the tight pairs the first in order is then found by
    augmenting paths (Kuhn, The Hungarian method for the assignment problem, 1955).
    """
    row_count, column_count = value.shape
    # Rows that want nothing take the spare columns, so that every column is matched.
    square = np.vstack([value, np.zeros((column_count - row_count, column_count), dtype=np.int64)])
    _, columns = linear_sum_assignment(square, maximize=True)
    return _first_in_order(_tight_pairs(square, columns), [int(column) for column in columns])[:row_count]


def _tight_pairs(square: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """bool [n, n]: the pairs that some best assignment may use, given that row i -> columns[i] is one."""
    count = len(columns)
    # loss[i, j]: what row i loses by leaving its column for j. Shortest ways along losses are the potentials.
    loss = square[np.arange(count), columns][:, None] - square
    distance = np.zeros(count, dtype=np.int64)
    for _ in range(count):
        shorter = np.minimum(distance, (distance[columns][:, None] + loss).min(axis=0, initial=0))
        if np.array_equal(shorter, distance):
            break
        distance = shorter
    return distance[columns][:, None] + loss == distance[None, :]


def _first_in_order(tight: np.ndarray, columns: list[int]) -> list[int]:
    """The perfect matching inside `tight` that is first in order; `columns` is one to start from."""
    options = [np.flatnonzero(row).tolist() for row in tight]
    row_of = {column: row for row, column in enumerate(columns)}

    for row in range(len(columns)):
        for column in options[row]:
            if column >= columns[row]:
                break
            way = _way_out(row, column, columns[row], options, row_of)
            if way is not None:
                for moved, place in [(row, column), *way]:
                    columns[moved] = place
                    row_of[place] = moved
                break
    return columns


def _way_out(
    row: int, taken: int, freed: int, options: list[list[int]], row_of: dict[int, int]
) -> list[tuple[int, int]] | None:
    """How rows after `row` move on when `row` takes column `taken` and leaves `freed`; None where they cannot."""
    came_from: dict[int, int] = {taken: taken}
    queue = [taken]
    for column in queue:
        mover = row_of[column]
        if mover < row:
            continue
        for place in options[mover]:
            if place in came_from:
                continue
            came_from[place] = column
            if place == freed:
                way = []
                while place != taken:
                    way.append((row_of[came_from[place]], place))
                    place = came_from[place]
                return way
            queue.append(place)
    return None
