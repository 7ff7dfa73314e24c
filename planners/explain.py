"""A plan in words: what would move, from where to where, how close that is to the least possible, and what it takes."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np

from ray_etc.planners.facts import PlanFacts, facts_of
from ray_etc.planners.links import Links
from ray_etc.planners.moves import LOCAL
from ray_etc.planners.picture import picture
from ray_etc.planners.words import count, rows_of, size, table

if TYPE_CHECKING:
    from ray_etc.planners.plan import MigrationPlan

NODE_PAIRS = 16
"""Pairs of nodes that are listed one by one; of more, those with most bytes."""


def explain(plan: MigrationPlan, links: Links | None = None, deadline_s: float | None = None) -> str:
    """The plan as plain text: a summary, then bytes by kind of link, by pair of nodes and by kind of tensor.

    `links` are the speeds that times are predicted from; `deadline_s` is the notice that endangered slots have.
    """
    facts = facts_of(plan, links)
    sections = [rows_of(summary(plan, facts, deadline_s)), link_table(facts)]
    if facts.nbytes_moved:
        by_nodes = sorted(_by_nodes(plan, facts), key=lambda row: -row[2])
        shown = [(f"{src} -> {dst}", size(nbytes)) for src, dst, nbytes in sorted(by_nodes[:NODE_PAIRS])]
        if len(by_nodes) > NODE_PAIRS:
            rest = by_nodes[NODE_PAIRS:]
            shown.append((f"{len(rest)} more pairs", size(sum(nbytes for _, _, nbytes in rest))))
        sections.append(table(("nodes", "wire"), shown))
    sections.append(table(("kind", "local", "wire"), _by_kind(plan)))
    return "\n\n".join(sections)


def explain_html(plan: MigrationPlan) -> str:
    """The summary as a small table for a notebook, and the picture of what crosses the wire."""
    left = "style='text-align:left'"
    facts = facts_of(plan)
    rows = "".join(
        f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(text)}</td></tr>"
        for name, text in summary(plan, facts)
    )
    return f"<table>{rows}</table>{picture(plan, facts)}"


def summary(plan: MigrationPlan, facts: PlanFacts, deadline_s: float | None = None) -> list[tuple[str, str]]:
    """What a user asks first, as (name, text) pairs."""
    before, after = len(np.unique(plan.source.rank)), len(np.unique(plan.target.rank))
    nodes = len(facts.node_names)
    local = facts.links["same slot"]
    rows = [
        ("migration", f"{before} -> {after} ranks, {count(len(plan.slots), 'slot')} on {count(nodes, 'node')}"),
        ("stays in its slot", f"{size(local.nbytes)} in {count(local.slices, 'move')}"),
        ("on the wire", f"{size(facts.nbytes_moved)}, {_against_bound(facts)}"),
        ("placement", placement_in_words(facts)),
    ]
    if facts.nbytes_cast:
        rows.append(("cast, not moved", f"{size(facts.nbytes_cast)} from main weights on the same rank"))
    if facts.nbytes_moved:
        if facts.nbytes_relayed:
            rows.append(("handed on", f"{size(facts.nbytes_relayed)} of that by ranks that received it"))
        rows += [
            ("rounds", f"{facts.rounds} of at most {size(plan.staging_nbytes)} sent and received by a rank"),
            ("busiest sender", _busiest(plan, facts.sent)),
            ("busiest receiver", _busiest(plan, facts.received)),
        ]
    if facts.links["other node"].nbytes:
        rows += [
            ("busiest node out", _busiest_node(facts, facts.node_sent)),
            ("busiest node in", _busiest_node(facts, facts.node_received)),
        ]
    seconds, memory = facts.seconds, facts.memory
    rows += [
        (
            "predicted time",
            f"{seconds.total:.3g} s: wire {seconds.wire:.3g} s beside local {seconds.local:.3g} s",
        ),
        (
            "memory at most",
            f"safe {size(int(memory.safe.max(initial=0)))}, tight {size(int(memory.tight.max(initial=0)))} a rank, "
            f"staging {size(int(memory.staging.max(initial=0)))}",
        ),
    ]
    if deadline_s is not None:
        rows.append(("deadline", _deadline_in_words(plan, facts, deadline_s)))
    return rows


def placement_in_words(facts: PlanFacts) -> str:
    """Whether another placement of the new ranks could move less."""
    if not facts.nbytes_missed:
        return "proven optimal"
    return f"not proven optimal: the best moves at most {size(facts.nbytes_missed)} less"


def _deadline_in_words(plan: MigrationPlan, facts: PlanFacts, deadline_s: float) -> str:
    """Whether the notice of `deadline_s` seconds is enough for the whole plan, or for what only leaving slots hold."""
    if facts.seconds.total <= deadline_s:
        return f"all of it fits into the {deadline_s:g} s of notice"
    if not plan.endangered:
        return f"too short: all of it takes {facts.seconds.total:.3g} s of {deadline_s:g} s; no slot leaves"
    if facts.saved_s <= deadline_s:
        return f"what only leaving slots hold is out after {facts.saved_s:.3g} s of {deadline_s:g} s; not all fits"
    return f"too short: what only leaving slots hold takes {facts.saved_s:.3g} s of {deadline_s:g} s"


def link_table(facts: PlanFacts) -> str:
    """Bytes and messages of each class of links, before and after slices are packed into messages."""
    rows = [
        (name, size(use.nbytes), str(use.slices), size(use.mean_slice_nbytes))
        + (("", "") if name == "same slot" else (str(use.messages), size(use.mean_message_nbytes)))
        for name, use in facts.links.items()
        if use.nbytes
    ]
    return table(("link", "bytes", "slices", "mean", "messages", "mean"), rows)


def _against_bound(facts: PlanFacts) -> str:
    if not facts.nbytes_missed:
        return "the least possible"
    times = f" ({facts.nbytes_moved / facts.nbytes_lower_bound:.2f} times)" if facts.nbytes_lower_bound else ""
    return f"least possible {size(facts.nbytes_lower_bound)}{times}"


def _busiest(plan: MigrationPlan, nbytes: np.ndarray) -> str:
    rank = int(nbytes.argmax())
    return f"slot {plan.slots[rank]} on {plan.nodes[rank]}, {size(int(nbytes[rank]))}"


def _busiest_node(facts: PlanFacts, nbytes: np.ndarray) -> str:
    node = int(nbytes.argmax())
    return f"{facts.node_names[node]}, {size(int(nbytes[node]))}"


def _by_nodes(plan: MigrationPlan, facts: PlanFacts) -> list[tuple[str, str, int]]:
    """Wire bytes from node to node."""
    numbers = {name: number for number, name in enumerate(facts.node_names)}
    node = np.array([numbers[name] for name in plan.nodes], dtype=np.int64)
    src, dst = (node[end] for end in plan.ends)
    wire = plan.moves.round >= 0
    pair, where = np.unique(src[wire] * len(numbers) + dst[wire], return_inverse=True)
    total = np.zeros(len(pair), dtype=np.int64)
    np.add.at(total, where, plan.move_nbytes[wire])
    return [
        (facts.node_names[one // len(numbers)], facts.node_names[one % len(numbers)], nbytes)
        for one, nbytes in zip(pair.tolist(), total.tolist(), strict=True)
    ]


def _by_kind(plan: MigrationPlan) -> list[tuple[str, str, str]]:
    """(kind, local bytes, wire bytes), in words."""
    numel = plan.moves.lengths.prod(axis=1)
    is_local, is_wire = plan.moves.round == LOCAL, plan.moves.round >= 0
    rows = []
    for kind in sorted({tensor.kind for bundle in plan.bundles for tensor in bundle.tensors}):
        itemsize = np.array([sum(t.itemsize for t in bundle.tensors if t.kind == kind) for bundle in plan.bundles])
        nbytes = numel * itemsize[plan.moves.bundle]
        rows.append((kind, size(int(nbytes[is_local].sum())), size(int(nbytes[is_wire].sum()))))
    return rows
