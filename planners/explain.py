"""A plan in words: what would move, from where to where, and how close that is to the least possible."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_etc.planners.plan import MigrationPlan


def explain(plan: MigrationPlan) -> str:
    """The plan as plain text: a summary, then bytes by pair of nodes and by kind of tensor."""
    sections = ["\n".join(f"{name:<18}{text}" for name, text in summary(plan))]
    by_nodes = [(f"{src} -> {dst}", size(nbytes)) for (src, dst), nbytes in sorted(_by_nodes(plan).items())]
    if by_nodes:
        sections.append(table(("nodes", "wire"), by_nodes))
    local, wire = _by_kind(plan)
    by_kind = [(kind, size(local[kind]), size(wire[kind])) for kind in sorted(local | wire)]
    if by_kind:
        sections.append(table(("kind", "local", "wire"), by_kind))
    return "\n\n".join(sections)


def explain_html(plan: MigrationPlan) -> str:
    """The summary as a small table for a notebook."""
    left = "style='text-align:left'"
    rows = "".join(
        f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(text)}</td></tr>"
        for name, text in summary(plan)
    )
    return f"<table>{rows}</table>"


def summary(plan: MigrationPlan) -> list[tuple[str, str]]:
    """What a user asks first, as (name, text) pairs."""
    messages = {(index, move.src_rank, move.dst_rank) for index, moves in enumerate(plan.rounds) for move in moves}
    before = sum(1 for layout in plan.source if layout)
    after = sum(1 for layout in plan.target if layout)
    rows = [
        ("migration", f"{before} -> {after} ranks, {_count(plan.slots, 'slot')} on {_count(set(plan.nodes), 'node')}"),
        ("stays in its slot", f"{size(plan.nbytes_local)} in {_count(plan.local, 'move')}"),
        ("on the wire", f"{size(plan.nbytes_wire)}, {_against_bound(plan)}"),
    ]
    if messages:
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for moves in plan.rounds:
            for move in moves:
                sent[move.src_rank] += move.nbytes
                received[move.dst_rank] += move.nbytes
        mean = size(plan.nbytes_wire // len(messages))
        rows += [
            ("messages", f"{len(messages)} of {mean} in the mean, in {_count(plan.rounds, 'round')}"),
            ("staging", f"at most {size(plan.staging_nbytes)} sent and received by a rank in a round"),
            ("busiest sender", _busiest(plan, sent)),
            ("busiest receiver", _busiest(plan, received)),
        ]
    return rows


def size(nbytes: int) -> str:
    """Bytes for people, in powers of 1024."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}" if len(things) == 1 else f"{len(things)} {name}s"


def _against_bound(plan: MigrationPlan) -> str:
    bound = plan.nbytes_lower_bound
    if plan.nbytes_wire == bound:
        return "the least possible"
    times = f" ({plan.nbytes_wire / bound:.2f} times)" if bound else ""
    return f"least possible {size(bound)}{times}"


def _busiest(plan: MigrationPlan, nbytes: Counter[int]) -> str:
    rank = min(nbytes, key=lambda rank: (-nbytes[rank], rank))
    return f"slot {plan.slots[rank]} on {plan.nodes[rank]}, {size(nbytes[rank])}"


def _by_nodes(plan: MigrationPlan) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for moves in plan.rounds:
        for move in moves:
            total[plan.nodes[move.src_rank], plan.nodes[move.dst_rank]] += move.nbytes
    return total


def _by_kind(plan: MigrationPlan) -> tuple[Counter[str], Counter[str]]:
    local: Counter[str] = Counter()
    wire: Counter[str] = Counter()
    for total, moves in ((local, plan.local), *((wire, moves) for moves in plan.rounds)):
        for move in moves:
            total[plan.target[move.dst_rank][move.dst_shard].tensor.kind] += move.nbytes
    return local, wire


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
