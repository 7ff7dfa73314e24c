"""`python -m ray_etc plan`: what a resize of a known model would move, before there is a cluster."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from ray_etc.plan_arguments import check_room, load_model, parse_parallel
from ray_etc.plan_report import HEADROOM_GIB, MIB, Planned, Side, as_html, as_json, in_words
from ray_etc.planners.errors import PlanError
from ray_etc.planners.expected import expected_table
from ray_etc.planners.links import Links
from ray_etc.planners.match import match
from ray_etc.planners.memory import STAGING_NBYTES
from ray_etc.planners.model import ModelShape
from ray_etc.planners.placement import plan_resize


@dataclass(frozen=True)
class PlanOptions:
    """Print what a resize would move: every move is made and proved, as in a run, on nodes that need not exist."""

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
    choose_nodes: bool = False
    """Of the nodes, any may leave: print those that would be given back, so that least moves."""
    deadline_s: float | None = None
    """The notice that leaving nodes have, in seconds: print what of the plan fits into it."""
    gpu_gib: float = 139.0
    """The memory of a GPU, in GiB; 139 is an H200's. 3 of it are left for the contexts and communicators of two
    processes."""
    links: Path | None = None
    """A JSON file of measured speeds that times are predicted from, as `python -m ray_etc calibrate` writes it."""
    staging_mib: int = STAGING_NBYTES // MIB
    """What a GPU sends, and what it receives, in one round, in MiB."""
    json: bool = False
    """Print one JSON object instead, with bytes in nbytes_* and seconds in *_s."""
    html: Path | None = None
    """Also write the plan to this file, with a picture of what each node sends to each other."""


def run_plan(options: PlanOptions) -> int:
    """Print the plan for `options`; 0, or 2 where there cannot be one, with the reason on stderr."""
    try:
        check_numbers(options)
        model = load_model(options.model)
        before, after = (settle(model, side) for side in sides(options))
        planned = plan_between(options, model, before, after)
        report = as_json(planned)
        if options.html is not None:
            options.html.write_text(as_html(planned), encoding="utf-8")
    except PlanError:
        raise  # a fault of the planner, not of the options
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --html {options.html}: {error.strerror}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2) if options.json else in_words(planned))
    return 0


def check_numbers(options: PlanOptions) -> None:
    """Raise ValueError for a number that means nothing."""
    if options.staging_mib < 1:
        raise ValueError(f"--staging-mib {options.staging_mib} must be at least 1")
    if not options.gpu_gib > HEADROOM_GIB:
        raise ValueError(f"--gpu-gib {options.gpu_gib:g} must be above {HEADROOM_GIB}, which contexts take")
    if options.deadline_s is not None and not (isfinite(options.deadline_s) and options.deadline_s > 0):
        raise ValueError(f"--deadline-s {options.deadline_s:g} must be above 0 seconds")
    if options.deadline_s is not None and options.choose_nodes:
        raise ValueError(
            f"--deadline-s {options.deadline_s:g} is for nodes that are told to leave, --choose-nodes for nodes that "
            "nobody told; leave one of them out"
        )


def sides(options: PlanOptions) -> tuple[Side, Side]:
    """Both configurations with their nodes; ValueError where the text of one is not understood."""
    found = re.fullmatch(r"(\d+)x(\d+),(\d+)x(\d+)", options.nodes)
    if not found:
        raise ValueError(f"--nodes {options.nodes} is not like 128x8,192x8: nodes x GPUs before, and after")
    nodes_before, size_before, nodes_after, size_after = map(int, found.groups())
    if size_before != size_after:
        raise ValueError(f"--nodes {options.nodes}: nodes of {size_before} and of {size_after} GPUs; use one size")
    if not nodes_before * nodes_after * size_before:
        raise ValueError(f"--nodes {options.nodes}: use at least 1x1,1x1")
    if options.choose_nodes and nodes_after >= nodes_before:
        raise ValueError(f"--choose-nodes: of {nodes_before} nodes {nodes_after} stay, none leaves; leave it out")
    return (
        Side(parse_parallel("--from", options.source), nodes_before, size_before),
        Side(parse_parallel("--to", options.target), nodes_after, size_after),
    )


def settle(model: ModelShape, side: Side) -> Side:
    """`side` with the layers of its stages; ValueError, with the numbers, where model or ranks do not fit."""
    parallel = model.settled(side.parallel)
    check_room(parallel, side.nodes, side.node_size)
    return replace(side, parallel=parallel)


def plan_between(options: PlanOptions, model: ModelShape, before: Side, after: Side) -> Planned:
    """The plan, made as a run would make it, and proved. Rank i runs on slot i now, so the first nodes are full.

    Raises ValueError where links are none or tensor groups need more nodes than there are after, and PlanError where
    the plan is wrong, which no options should bring about.
    """
    started = time.perf_counter()
    links = Links() if options.links is None else Links.load(options.links)
    node_size = after.node_size
    slots = range(max(before.slots, after.slots))
    held = expected_table(model.tensors(before.parallel.pipeline_parallel), before.parallel)
    held = held.on(np.arange(before.parallel.world_size), len(slots))
    wanted = expected_table(model.tensors(after.parallel.pipeline_parallel), after.parallel)
    groups = after.parallel.tensor_groups(node_size)
    plan = plan_resize(
        held,
        wanted,
        groups,
        slots,
        {slot: f"node{slot // node_size}" for slot in slots},
        usable=slots if options.choose_nodes else range(after.slots),
        staging_nbytes=options.staging_mib * MIB,
        endangered=range(0) if options.choose_nodes else range(after.slots, len(slots)),
        links=links,
    )
    planned_s = time.perf_counter() - started
    plan.check()
    planned = Planned(
        model=options.model,
        parameters=model.num_parameters,
        num_layers=model.num_layers,
        before=before,
        after=after,
        plan=plan,
        links=links,
        nbytes_if_unmoved=int(wanted.nbytes.sum()) - match(held, wanted).overlap().nbytes_unmoved(),
        gpu_gib=options.gpu_gib,
        deadline_s=options.deadline_s,
        planning_s=planned_s,
        proof_s=time.perf_counter() - started - planned_s,
    )
    used = max(before.nodes, after.nodes) - len(planned.idle_nodes)
    if used > after.nodes:
        raise ValueError(
            f"groups of {len(groups[0])} ranks need {used} nodes of {node_size} GPUs to "
            f"be whole; --nodes leaves {after.nodes}"
        )
    return planned
