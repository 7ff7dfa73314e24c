"""`python -m ray_etc plan`: what a resize of a known model would move, before there is a cluster."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import tyro

from ray_etc.plan_arguments import check_room, load_model, parse_parallel
from ray_etc.planners.explain import size, summary, table
from ray_etc.planners.forecast import Forecast, forecast, plan_of
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.zoo import ModelShape

AXES = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "dp": "data_parallel"}
MIB = 2**20


@dataclass(frozen=True)
class PlanOptions:
    """Print what a resize would move: bytes by kind of link, against the least possible, and the busiest links."""

    model: str
    """A public model: gpt3-1.3b, gpt3-6.7b, gpt3-175b, llama2-7b, llama2-13b, llama2-70b, llama3-8b, llama3-70b,
    llama3-405b, mixtral-8x7b, qwen3-30b-a3b, qwen3-235b-a22b or deepseek-v3; or a .yaml or .json file of Megatron's
    argument names."""
    source: Annotated[str, tyro.conf.arg(name="from", metavar="tp=N,pp=N,dp=N")]
    """The running configuration, an axis left out being 1: tp, pp, dp, cp, ep, etp and vpp. layers=7-8-8-7 gives the
    layers of each stage. The optimizer state is split over dp (ZeRO-1), unless "plain" or "fsdp" is added."""
    target: Annotated[str, tyro.conf.arg(name="to", metavar="tp=N,pp=N,dp=N")]
    """The configuration to move to."""
    nodes: Annotated[str, tyro.conf.arg(metavar="NxK,MxK")]
    """N nodes of K GPUs now, and M of the same after: the last ones join or leave."""
    staging_mib: int = 256
    """What a GPU sends, and what it receives, in one round, in MiB."""
    prove: bool = False
    """Also make every move, as a resize would, prove that each byte arrives once, and print the rounds and messages.
    Half a minute for 1,536 GPUs."""
    json: bool = False
    """Print one JSON object with all figures in bytes."""


@dataclass(frozen=True)
class Side:
    """One configuration and the nodes it has."""

    parallel: ParallelConfig
    nodes: int
    node_size: int

    @property
    def slots(self) -> int:
        return self.nodes * self.node_size


def run_plan(options: PlanOptions) -> int:
    """Print the forecast for `options`; 0, or 2 where they cannot be, with the reason on stderr."""
    started = time.perf_counter()
    try:
        if options.staging_mib < 1:
            raise ValueError(f"--staging-mib {options.staging_mib} must be at least 1")
        model = load_model(options.model)
        before, after = (check_side(model, side) for side in sides(options))
        held, wanted = ((model.tensors(side.parallel.pipeline_parallel), side.parallel) for side in (before, after))
        made = forecast(held, wanted, node_size=after.node_size, nodes_after=after.nodes)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    facts = report(options, model, before, after, made)
    if options.prove:
        staging_nbytes = options.staging_mib * MIB
        plan = plan_of(
            made, held, wanted, node_size=after.node_size, nodes_after=after.nodes, staging_nbytes=staging_nbytes
        )
        plan.check()
        facts["plan"] = dict(summary(plan))
        facts["rounds"] = len(plan.rounds)
    facts["planning_s"] = round(time.perf_counter() - started, 3)
    print(json.dumps(facts, indent=2) if options.json else in_words(facts))
    return 0


def sides(options: PlanOptions) -> tuple[Side, Side]:
    """Both configurations with their nodes; ValueError where the text of one is not understood."""
    match = re.fullmatch(r"(\d+)x(\d+),(\d+)x(\d+)", options.nodes)
    if not match:
        raise ValueError(f"--nodes {options.nodes} is not like 128x8,192x8: nodes x GPUs before, and after")
    nodes_before, size_before, nodes_after, size_after = map(int, match.groups())
    if size_before != size_after:
        raise ValueError(f"--nodes {options.nodes}: nodes of {size_before} and of {size_after} GPUs; use one size")
    if not nodes_before * nodes_after * size_before:
        raise ValueError(f"--nodes {options.nodes}: use at least 1x1,1x1")
    return (
        Side(parse_parallel("--from", options.source), nodes_before, size_before),
        Side(parse_parallel("--to", options.target), nodes_after, size_after),
    )


def check_side(model: ModelShape, side: Side) -> Side:
    """`side` with the layers of its stages; ValueError, with the numbers, where model or ranks do not fit."""
    parallel = model.settled(side.parallel)
    check_room(parallel, side.nodes, side.node_size)
    if parallel != ParallelConfig(parallel.tensor_parallel, parallel.pipeline_parallel, parallel.data_parallel):
        raise ValueError(f"{parallel}: the forecast knows tp, pp and dp with even stages and ZeRO-1 only")
    return replace(side, parallel=parallel)


def report(options: PlanOptions, model: ModelShape, before: Side, after: Side, made: Forecast) -> dict[str, Any]:
    """All figures as one JSON-able object; sizes in bytes."""
    traffic = made.traffic

    def busiest(nbytes: np.ndarray) -> dict[str, int]:
        index = int(nbytes.argmax())
        return {"index": index, "nbytes": int(nbytes[index])}

    return {
        "model": options.model,
        "parameters": model.num_parameters,
        "from": _side(before),
        "to": _side(after),
        "nbytes_needed": made.nbytes_needed,
        "nbytes_by_link": {
            "same_slot": traffic.same_slot,
            "same_node": traffic.same_node,
            "other_node": traffic.other_node,
        },
        "nbytes_moved": traffic.nbytes_wire,
        "nbytes_lower_bound": made.nbytes_lower_bound,
        "nbytes_moved_if_rank_i_took_slot_i": made.nbytes_unmoved,
        "busiest": {
            "slot_sends": busiest(traffic.sent),
            "slot_receives": busiest(traffic.received),
            "node_sends": busiest(traffic.node_sent),
            "node_receives": busiest(traffic.node_received),
        },
        "staging_nbytes": options.staging_mib * MIB,
        "rounds_at_least": made.least_rounds(options.staging_mib * MIB),
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        **{axis: getattr(side.parallel, name) for axis, name in AXES.items()},
        "ranks": side.parallel.world_size,
        **{name: value for name, value in asdict(side).items() if name != "parallel"},
    }


def in_words(facts: dict[str, Any]) -> str:
    """The report for people."""
    before, after = facts["from"], facts["to"]
    links = facts["nbytes_by_link"]
    names = {
        "same_slot": "stays in its slot",
        "same_node": "to a slot of the same node",
        "other_node": "to another node",
    }
    rows = [(names[link], size(n), f"{100 * n / facts['nbytes_needed']:.1f}%") for link, n in links.items()]
    sections = [
        "\n".join(
            (
                f"{facts['model']}: {facts['parameters'] / 1e9:.2f} billion parameters, 14 bytes each",
                f"  from  {_in_words(before)}",
                f"  to    {_in_words(after)}, {_nodes_change(before['nodes'], after['nodes'])}",
            )
        ),
        table(("what the new ranks need", size(facts["nbytes_needed"]), "100%"), rows),
        _wire_in_words(facts),
    ]
    if facts["nbytes_moved"]:
        ends = {
            "slot_sends": "GPU that sends most",
            "slot_receives": "GPU that receives most",
            "node_sends": "node that sends most to others",
            "node_receives": "node that receives most from others",
        }
        busiest = [
            (ends[end], str(one["index"]), size(one["nbytes"]))
            for end, one in facts["busiest"].items()
            if one["nbytes"]
        ]
        sections.append(table(("busiest links", "number", "bytes"), busiest))
    if "plan" in facts:
        lines = [f"  {name:<18}{text}" for name, text in facts["plan"].items()]
        sections.append("\n".join(["Every move made and proved:", *lines]))
    sections.append(
        f"From expected layouts: a run plans from those that its ranks report. Planned in {facts['planning_s']:.1f} s."
    )
    return "\n\n".join(sections)


def _in_words(side: dict[str, Any]) -> str:
    gpus = side["nodes"] * side["node_size"]
    axes = " ".join(f"{axis.upper()}{side[axis]}" for axis in AXES)
    return f"{axes} ZeRO-1, {side['ranks']} ranks, nodes {side['nodes']}x{side['node_size']} ({gpus} GPUs)"


def _nodes_change(before: int, after: int) -> str:
    if after == before:
        return "the same nodes"
    return f"{after - before} join" if after > before else f"the last {before - after} leave"


def _wire_in_words(facts: dict[str, Any]) -> str:
    moved, bound = facts["nbytes_moved"], facts["nbytes_lower_bound"]
    if moved == bound:
        against = "the least possible"
    elif bound:
        against = f"at most {moved / bound:.3f} times the least possible"
    else:
        against = "not proven to be the least possible"
    lines = [f"On the wire: {size(moved)}, {against}."]
    lines.append(f"If rank i took slot i, {size(facts['nbytes_moved_if_rank_i_took_slot_i'])} would move.")
    if moved:
        lines.append(f"At least {facts['rounds_at_least']} rounds of {size(facts['staging_nbytes'])}.")
    return "\n".join(lines)
