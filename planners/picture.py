"""A plan as a picture: bytes from node to node as a heat map, and what each slot sends and receives as bars.

Inline SVG without scripts, fonts or addresses; text and lines take the colour of the page's text, so that it reads on
light and on dark. Thousands of nodes or slots share cells and bars.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np

from ray_etc.planners.words import size

if TYPE_CHECKING:
    from ray_etc.planners.facts import PlanFacts
    from ray_etc.planners.plan import MigrationPlan

CELLS = 64
"""Cells of the heat map each way, at most."""
BARS = 128
"""Bars each way, at most."""
SHADES = 5
COLOUR = "#2a7fd4"
WIDTH, SIDE, LEFT, TOP, BAR_HEIGHT = 640, 384, 110, 46, 70
"""Pixels: the picture; the heat map, its distance from the left and from the top; the longest bar."""


def picture(plan: MigrationPlan, facts: PlanFacts) -> str:
    """The wire bytes of `plan` as one `<svg>` element; empty where none move."""
    if not facts.nbytes_moved:
        return ""
    matrix_bottom = TOP + SIDE
    bars_middle = matrix_bottom + 50 + BAR_HEIGHT
    height = bars_middle + BAR_HEIGHT + 24
    parts = [*_heat_map(plan, facts), *_bars(plan, facts, bars_middle)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="Bytes from node to node" font-family="sans-serif" font-size="12" fill="currentColor">'
        f"{''.join(parts)}</svg>"
    )


def node_matrix(plan: MigrationPlan, facts: PlanFacts, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Wire bytes between nodes: int64 [cells, cells] by sender and receiver, and the first node of each cell.

    Cells are runs of nodes of one length, but the last. The second array is int64 [cells + 1], and ends with the number
    of nodes.
    """
    edges = _edges(len(facts.node_names), cells)
    number_of = {name: number for number, name in enumerate(facts.node_names)}
    cell = np.array([number_of[name] for name in plan.nodes], dtype=np.int64) // edges[1]
    wire = plan.moves.round >= 0
    src, dst = (cell[end[wire]] for end in plan.ends)
    total = np.zeros((len(edges) - 1,) * 2, dtype=np.int64)
    np.add.at(total, (src, dst), plan.move_nbytes[wire])
    return total, edges


def _edges(count: int, most: int) -> np.ndarray:
    """Where at most `most` runs of one length begin that `count` things fill, and their end: int64."""
    return np.minimum(np.arange(-(-count // -(-count // most)) + 1) * -(-count // most), count)


def _heat_map(plan: MigrationPlan, facts: PlanFacts) -> list[str]:
    nbytes, edges = node_matrix(plan, facts, CELLS)
    count, largest = len(nbytes), int(nbytes.max())
    step = SIDE / count
    names = [_run(facts.node_names, edges, cell) for cell in range(count)]
    parts = [
        _text(LEFT, 16, "Bytes over the wire, from node (rows) to node (columns)", weight="bold"),
        f'<rect x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.4"/>',
    ]
    gap = 1 if step > 8 else 0
    for src, dst in np.argwhere(nbytes).tolist():
        words = f"{names[src]} to {names[dst]}: {size(int(nbytes[src, dst]))}"
        x, y, side = LEFT + dst * step, TOP + src * step, step - gap
        parts.append(_rect(x, y, side, side, words, _shade(int(nbytes[src, dst]), largest)))
    labelled = range(0, count, -(-count // 16))
    parts += [_text(LEFT - 6, TOP + (cell + 0.5) * step + 4, _short(names[cell]), anchor="end") for cell in labelled]
    parts += [_text(LEFT, TOP - 8, _short(names[0])), _text(LEFT + SIDE, TOP - 8, _short(names[-1]), anchor="end")]
    x = LEFT + SIDE + 24
    parts.append(_text(x, TOP + 10, "bytes up to"))
    for shade in range(SHADES):
        y = TOP + 20 + 22 * shade
        upper = largest * (shade + 1) // SHADES
        parts.append(_rect(x, y, 16, 16, f"up to {size(upper)}", _shade(upper, largest)))
        parts.append(_text(x + 22, y + 13, size(upper)))
    return parts


def _bars(plan: MigrationPlan, facts: PlanFacts, middle: int) -> list[str]:
    """Sent bytes above a line at height `middle`, received ones below; a bar is the busiest of its slots."""
    edges = _edges(len(plan.slots), BARS)
    step = (WIDTH - LEFT - 20) / (len(edges) - 1)
    each = "each slot" if edges[1] == 1 else f"the busiest of each {edges[1]} slots"
    parts = [
        _text(LEFT, middle - BAR_HEIGHT - 12, f"Bytes of {each}", weight="bold"),
        _text(LEFT - 6, middle - 8, "sends", anchor="end"),
        _text(LEFT - 6, middle + 16, "receives", anchor="end"),
        f'<path d="M{LEFT} {middle}H{WIDTH - 20}" stroke="currentColor" stroke-opacity="0.4"/>',
    ]
    largest = facts.busiest_link_nbytes
    for name, nbytes in (("sends", facts.sent), ("receives", facts.received)):
        for bar, most in enumerate(np.maximum.reduceat(nbytes, edges[:-1]).tolist()):
            if most:
                height = BAR_HEIGHT * most / largest
                words = f"{_run([f'slot {slot}' for slot in plan.slots], edges, bar)} {name} {size(most)}"
                y = middle - height if name == "sends" else middle
                parts.append(_rect(LEFT + bar * step, y, step - (1 if step > 4 else 0), height, words, 0.8))
    parts.append(_text(LEFT, middle + BAR_HEIGHT + 16, f"longest bar: {size(largest)}"))
    return parts


def _shade(nbytes: int, largest: int) -> float:
    """The opacity of one of SHADES steps, by bytes against the largest."""
    return -(-SHADES * nbytes // largest) / SHADES


def _run(names: tuple[str, ...] | list[str], edges: np.ndarray, cell: int) -> str:
    first, last = names[edges[cell]], names[edges[cell + 1] - 1]
    return first if first == last else f"{first} - {last}"


def _short(name: str) -> str:
    """The first of a run of names, not too long for the margin."""
    name = name.split(" - ")[0]
    return name if len(name) <= 14 else f"{name[:6]}…{name[-7:]}"


def _rect(x: float, y: float, width: float, height: float, words: str, opacity: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{COLOUR}" '
        f'fill-opacity="{opacity:.1f}"><title>{html.escape(words)}</title></rect>'
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">{html.escape(words)}</text>'
