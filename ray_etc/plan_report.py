"""What `python -m ray_etc plan` says of a plan: as words, as JSON, and as a page with a picture.

The keys of the JSON are stable. Bytes are `nbytes_*` (and `largest_view_nbytes`), seconds `*_s`, all others plain:

    model, parameters               the name given; how many weights
    from, to                        tp, pp, dp, cp, ep, etp, vpp; layers of each virtual stage; state (zero1, plain or
                                    fsdp); ranks; nodes, node_size
    nbytes_needed                   what all new ranks hold, all of it copied or moved once
    nbytes_moved                    of that, what goes over the wire
    nbytes_relayed                  of that, what new ranks hand on after they received it
    nbytes_cast                     neither: what new ranks make from their own main weights
    nbytes_lower_bound              no placement of the new ranks moves, or casts, less
    placement                       what is proven of the placement, in words
    nbytes_moved_if_rank_i_took_slot_i
    links                           same_slot, same_node, other_node: nbytes; slices, messages and their mean sizes,
                                    nbytes_mean_slice before and nbytes_mean_message after slices are packed
    busiest                         slot_sends, slot_receives (slot, node, nbytes), node_sends, node_receives (node,
                                    nbytes: to and from other nodes)
    rounds, nbytes_staging          what a slot sends, and receives, in one round at most
    predicted                       wire_s, local_s partly beside it, total_s; the certificate is in both
    memory                          the peak of any slot: nbytes_safe, nbytes_tight, nbytes_staging (in both);
                                    nbytes_free of a GPU; mode (safe, tight or null) is what fits
    largest_view_nbytes             the pickled part of the busiest slot: what a rank is sent of the plan
    idle_nodes                      nodes that run no new rank
    deadline                        null, or notice_s; total_s; saved_s, when what only leaving slots hold is out;
                                    fits_all, fits_saved
    planning_s, proof_s
"""

from __future__ import annotations

import html
import pickle
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from ray_etc.plan_arguments import AXES
from ray_etc.planners.explain import link_table, placement_in_words, summary
from ray_etc.planners.facts import LINK_CLASSES, PlanFacts, facts_of
from ray_etc.planners.links import Links
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.picture import picture
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.words import rows_of, size

MIB, GIB = 2**20, 2**30
HEADROOM_GIB = 6
"""What a GPU must have free besides the state and the staging, for what two processes have there (contexts, libraries,
communicators); see `memory.SHADOW_NBYTES`."""

IDLE_NODES = 8
"""Nodes that are named one by one in words."""


@dataclass(frozen=True)
class Side:
    """One configuration and the nodes it has."""

    parallel: ParallelConfig
    nodes: int
    node_size: int

    @property
    def slots(self) -> int:
        return self.nodes * self.node_size


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan that is proved, and what it was made from.

    `nbytes_if_unmoved` is what would move if rank i took slot i.
    """

    model: str
    parameters: int
    num_layers: int
    before: Side
    after: Side
    plan: MigrationPlan
    links: Links
    nbytes_if_unmoved: int
    gpu_gib: float
    deadline_s: float | None
    planning_s: float
    proof_s: float

    @cached_property
    def facts(self) -> PlanFacts:
        return facts_of(self.plan, self.links)

    @cached_property
    def idle_nodes(self) -> list[str]:
        """Nodes that run no new rank, in their order."""
        used = {self.plan.nodes[rank] for rank in np.unique(self.plan.target.rank).tolist()}
        return [node for node in self.facts.node_names if node not in used]

    @cached_property
    def largest_view_nbytes(self) -> int:
        busiest = int((self.facts.sent + self.facts.received).argmax())
        return len(pickle.dumps(self.plan.for_rank(busiest), protocol=pickle.HIGHEST_PROTOCOL))

    @property
    def nbytes_free(self) -> int:
        return int((self.gpu_gib - HEADROOM_GIB) * GIB)

    @property
    def mode(self) -> str | None:
        return self.facts.memory.mode_for(self.nbytes_free)


def as_json(planned: Planned) -> dict[str, Any]:
    """Every figure as one JSON-able object."""
    plan, facts = planned.plan, planned.facts
    seconds, memory = facts.seconds, facts.memory

    def slot(nbytes: np.ndarray) -> dict[str, Any]:
        rank = int(nbytes.argmax())
        return {"slot": plan.slots[rank], "node": plan.nodes[rank], "nbytes": int(nbytes[rank])}

    def node(nbytes: np.ndarray) -> dict[str, Any]:
        number = int(nbytes.argmax())
        return {"node": facts.node_names[number], "nbytes": int(nbytes[number])}

    return {
        "model": planned.model,
        "parameters": planned.parameters,
        "from": _side(planned.before, planned.num_layers),
        "to": _side(planned.after, planned.num_layers),
        "nbytes_needed": facts.nbytes_needed,
        "nbytes_moved": facts.nbytes_moved,
        "nbytes_relayed": facts.nbytes_relayed,
        "nbytes_cast": facts.nbytes_cast,
        "nbytes_lower_bound": facts.nbytes_lower_bound,
        "placement": placement_in_words(facts),
        "nbytes_moved_if_rank_i_took_slot_i": planned.nbytes_if_unmoved,
        "links": {
            name.replace(" ", "_"): {
                "nbytes": facts.links[name].nbytes,
                "slices": facts.links[name].slices,
                "messages": facts.links[name].messages,
                "nbytes_mean_slice": facts.links[name].mean_slice_nbytes,
                "nbytes_mean_message": facts.links[name].mean_message_nbytes,
            }
            for name in LINK_CLASSES
        },
        "busiest": {
            "slot_sends": slot(facts.sent),
            "slot_receives": slot(facts.received),
            "node_sends": node(facts.node_sent),
            "node_receives": node(facts.node_received),
        },
        "rounds": facts.rounds,
        "nbytes_staging": plan.staging_nbytes,
        "predicted": {
            "wire_s": seconds.wire,
            "local_s": seconds.local,
            "total_s": seconds.total,
        },
        "memory": {
            "nbytes_safe": int(memory.safe.max()),
            "nbytes_tight": int(memory.tight.max()),
            "nbytes_staging": int(memory.staging.max()),
            "nbytes_free": planned.nbytes_free,
            "mode": planned.mode,
        },
        "largest_view_nbytes": planned.largest_view_nbytes,
        "idle_nodes": planned.idle_nodes,
        "deadline": _deadline(facts, planned.deadline_s),
        "planning_s": round(planned.planning_s, 3),
        "proof_s": round(planned.proof_s, 3),
    }


def _side(side: Side, num_layers: int) -> dict[str, Any]:
    parallel = side.parallel
    state = "fsdp" if parallel.fully_sharded else "zero1" if parallel.distributed_optimizer else "plain"
    return {
        **{axis: getattr(parallel, name) for axis, name in AXES.items()},
        "etp": parallel.tensor_parallel_of_experts,
        "layers": list(parallel.layers_of_virtual_stages(num_layers)),
        "state": state,
        "ranks": parallel.world_size,
        "nodes": side.nodes,
        "node_size": side.node_size,
    }


def _deadline(facts: PlanFacts, deadline_s: float | None) -> dict[str, Any] | None:
    if deadline_s is None:
        return None
    return {
        "notice_s": deadline_s,
        "total_s": facts.seconds.total,
        "saved_s": facts.saved_s,
        "fits_all": facts.seconds.total <= deadline_s,
        "fits_saved": facts.saved_s <= deadline_s,
    }


def in_words(planned: Planned) -> str:
    """The report for people."""
    plan, facts = planned.plan, planned.facts
    before, after = planned.before, planned.after
    head = [
        f"{planned.model}: {planned.parameters / 1e9:.2f} billion parameters, 14 bytes each",
        f"  from  {_side_in_words(before)}",
        f"  to    {_side_in_words(after)}, {_nodes_change(planned)}",
    ]
    rows = [
        *summary(plan, facts, planned.deadline_s),
        ("fits", _fit_in_words(planned)),
        ("rank i on slot i", f"would move {size(planned.nbytes_if_unmoved)}"),
        ("a rank's view", f"at most {size(planned.largest_view_nbytes)} of the plan, pickled"),
        ("planned", f"in {planned.planning_s:.2f} s, every move proved in {planned.proof_s:.2f} s"),
    ]
    end = "From expected layouts of the state alone: a run plans from what its ranks report, activations included."
    return "\n\n".join(["\n".join(head), rows_of(rows), link_table(facts), end])


def as_html(planned: Planned) -> str:
    """The report as a page of its own: words and picture, readable on light and on dark."""
    title = html.escape(f"{planned.model}: {planned.before.parallel} to {planned.after.parallel}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<title>{title}</title><meta name="color-scheme" content="light dark"></head>\n'
        f"<body><pre>{html.escape(in_words(planned))}</pre>\n{picture(planned.plan, planned.facts)}</body></html>\n"
    )


def _side_in_words(side: Side) -> str:
    parallel = side.parallel
    layers = ""
    if parallel.pipeline_layers is not None and len(set(parallel.pipeline_layers)) > 1:
        runs = [(count, len(list(run))) for count, run in groupby(parallel.pipeline_layers)]
        layers = " layers " + "-".join(f"{count}" if times == 1 else f"{times}x{count}" for count, times in runs)
    gpus = f"{side.nodes}x{side.node_size} ({side.slots} GPUs)"
    return f"{replace(parallel, pipeline_layers=None)}{layers}, {parallel.world_size} ranks, nodes {gpus}"


def _nodes_change(planned: Planned) -> str:
    before, after = planned.before.nodes, planned.after.nodes
    if after > before:
        return f"{after - before} join"
    if after == before:
        return "the same nodes"
    if planned.plan.endangered:
        return f"the last {before - after} leave"
    names = planned.idle_nodes
    more = f" and {len(names) - IDLE_NODES} more" if len(names) > IDLE_NODES else ""
    return f"given back: {' '.join(names[:IDLE_NODES])}{more}"


def _fit_in_words(planned: Planned) -> str:
    words = {"safe": "safe, with the old state whole until the commit", "tight": "tight", None: "neither mode"}
    return f"{words[planned.mode]}: {planned.gpu_gib:g} GiB a GPU, {HEADROOM_GIB} of them for contexts"
